//! A TOML file whose faults are found all at once, each with its line and column.

use std::cell::RefCell;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// The file, and what is wrong in it.
pub(super) struct Document<'a> {
    path: &'a Path,
    text: &'a str,
    faults: RefCell<Vec<(usize, String)>>,
}

/// A table of the file, from which each key is taken once.
pub(super) struct Table<'a> {
    document: &'a Document<'a>,
    /// As the file writes it.
    name: &'static str,
    /// Where it begins.
    pub(super) offset: usize,
    entries: DeTable<'a>,
    known: Vec<&'static str>,
}

impl<'a> Document<'a> {
    /// The file at `path`, which holds `text`.
    pub(super) fn new(path: &'a Path, text: &'a str) -> Self {
        Self { path, text, faults: RefCell::default() }
    }

    /// The whole of it. What breaks the grammar is noted, and the rest is read.
    pub(super) fn root(&'a self) -> Table<'a> {
        let (root, errors) = DeTable::parse_recoverable(self.text);
        for error in errors {
            self.fault(error.span().unwrap_or_default().start, error.message());
        }
        let entries = root.into_inner();
        Table { document: self, name: "the file", offset: 0, entries, known: Vec::new() }
    }

    /// Notes what is wrong at `offset`.
    pub(super) fn fault(&self, offset: usize, what: impl Display) {
        self.faults.borrow_mut().push((offset, what.to_string()));
    }

    /// `FILE:LINE:COLUMN` of the character at `offset`; both count from 1.
    pub(super) fn position(&self, offset: usize) -> String {
        let before = self.text.get(..offset).unwrap_or(self.text);
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
        format!("{}:{line}:{column}", self.path.display())
    }

    /// What is wrong, in the order of the file, a line each.
    pub(super) fn faults(&self) -> Vec<String> {
        let mut faults = self.faults.borrow().clone();
        faults.sort();
        let show = |(offset, what): (usize, String)| format!("{}: {what}", self.position(offset));
        faults.into_iter().map(show).collect()
    }
}

impl<'a> Table<'a> {
    /// It has `key`, which was not taken yet.
    pub(super) fn has(&self, key: &str) -> bool {
        self.entries.contains_key(key)
    }

    fn take(&mut self, key: &'static str) -> Option<Spanned<DeValue<'a>>> {
        self.known.push(key);
        self.entries.remove(key)
    }

    fn expected<T>(&self, offset: usize, key: &str, what: &str, found: &DeValue<'_>) -> Option<T> {
        let found = found.type_str();
        self.document.fault(offset, format_args!("`{key}` is {what}, found {found}"));
        None
    }

    /// What `value_of` finds in the value of `key`, with where it is; a value of another type is a
    /// fault.
    fn typed<'v, T>(
        &self,
        key: &str,
        what: &str,
        value: &'v Spanned<DeValue<'a>>,
        value_of: impl FnOnce(&'v DeValue<'a>) -> Option<T>,
    ) -> Option<(T, usize)> {
        let (value, offset) = (value.get_ref(), value.span().start);
        let found = value_of(value).or_else(|| self.expected(offset, key, what, value))?;
        Some((found, offset))
    }

    /// The text of `key` with where it is.
    pub(super) fn text_at(&mut self, key: &'static str) -> Option<(String, usize)> {
        let value = self.take(key)?;
        self.typed(key, "a text in quotes", &value, |it| it.as_str().map(str::to_owned))
    }

    /// The text of `key`.
    pub(super) fn text(&mut self, key: &'static str) -> Option<String> {
        Some(self.text_at(key)?.0)
    }

    /// The path in `key`.
    pub(super) fn path(&mut self, key: &'static str) -> Option<PathBuf> {
        self.text(key).map(PathBuf::from)
    }

    /// What the text of `key` means to `parse`.
    pub(super) fn with<T, E: Display>(
        &mut self,
        key: &'static str,
        parse: impl FnOnce(&str) -> Result<T, E>,
    ) -> Option<T> {
        let (text, offset) = self.text_at(key)?;
        self.noted(offset, key, parse(&text))
    }

    /// What the text of `key` means.
    pub(super) fn parsed<T: FromStr<Err: Display>>(&mut self, key: &'static str) -> Option<T> {
        self.with(key, T::from_str)
    }

    fn noted<T, E: Display>(&self, offset: usize, key: &str, parsed: Result<T, E>) -> Option<T> {
        parsed.map_err(|error| self.document.fault(offset, format_args!("`{key}`: {error}"))).ok()
    }

    /// What each text in the list of `key` means, with where it is.
    pub(super) fn list<T: FromStr<Err: Display>>(&mut self, key: &'static str) -> Vec<(T, usize)> {
        let Some(value) = self.take(key) else { return Vec::new() };
        let items = self.typed(key, "a list in brackets", &value, DeValue::as_array);
        let item = |item: &Spanned<DeValue<'a>>| {
            let (text, offset) = self.typed(key, "a list of texts", item, DeValue::as_str)?;
            Some((self.noted(offset, key, T::from_str(text))?, offset))
        };
        items.into_iter().flat_map(|(items, _)| items).filter_map(item).collect()
    }

    /// Whether `key` is true; false where it is not given.
    pub(super) fn flag(&mut self, key: &'static str) -> bool {
        let Some(value) = self.take(key) else { return false };
        self.typed(key, "true or false", &value, DeValue::as_bool).is_some_and(|(flag, _)| flag)
    }

    /// The number of `key`, as `parse` reads it.
    pub(super) fn number<T, E: Display>(
        &mut self,
        key: &'static str,
        parse: impl FnOnce(&str) -> Result<T, E>,
    ) -> Option<T> {
        let value = self.take(key)?;
        let (number, offset) = self.typed(key, "a whole number", &value, DeValue::as_integer)?;
        self.noted(offset, key, parse(number.as_str()))
    }

    fn table_in(
        &self,
        key: &'static str,
        what: &str,
        value: Spanned<DeValue<'a>>,
    ) -> Option<Table<'a>> {
        let (document, offset) = (self.document, value.span().start);
        match value.into_inner() {
            DeValue::Table(entries) => {
                Some(Table { document, name: key, offset, entries, known: Vec::new() })
            }
            other => self.expected(offset, key, what, &other),
        }
    }

    /// The table `[key]`.
    pub(super) fn table(&mut self, key: &'static str) -> Option<Table<'a>> {
        let value = self.take(key)?;
        self.table_in(key, "a table", value)
    }

    /// The tables `[[key]]`.
    pub(super) fn tables(&mut self, key: &'static str) -> Vec<Table<'a>> {
        let Some(value) = self.take(key) else { return Vec::new() };
        let span = value.span();
        let items: Vec<_> = match value.into_inner() {
            DeValue::Array(items) => items.into_iter().collect(),
            other => vec![Spanned::new(span, other)],
        };
        let table = |item| self.table_in(key, "tables: `[[device]]`", item);
        items.into_iter().filter_map(table).collect()
    }

    /// Notes each key that was not taken, with the known one that is nearest to it.
    pub(super) fn finish(self) {
        for key in self.entries.keys() {
            let found: &str = key.get_ref();
            let likeness = |known: &&&str| strsim::jaro_winkler(found, known);
            let nearest = self.known.iter().max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
            let name = self.name;
            let nearest = nearest.copied().unwrap_or_default();
            self.document.fault(
                key.span().start,
                format_args!("`{found}` is no key of {name}; the nearest is `{nearest}`"),
            );
        }
    }
}
