//! A TOML document that collects all faults, each with its line and column.

use std::cell::RefCell;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// A file's text and its faults.
pub(super) struct Document<'a> {
    path: &'a Path,
    text: &'a str,
    faults: RefCell<Vec<(usize, String)>>,
}

/// A table of the file. Each key is taken once.
pub(super) struct Table<'a> {
    document: &'a Document<'a>,
    /// The name of the table in the file.
    name: &'static str,
    /// Offset of the table in the file.
    pub(super) offset: usize,
    entries: DeTable<'a>,
    known: Vec<&'static str>,
}

impl<'a> Document<'a> {
    /// Creates a document from `text`, the content of the file at `path`.
    pub(super) fn new(path: &'a Path, text: &'a str) -> Self {
        Self { path, text, faults: RefCell::default() }
    }

    /// Returns the root table. Notes errors of grammar as faults, and reads the rest.
    pub(super) fn root(&'a self) -> Table<'a> {
        let (root, errors) = DeTable::parse_recoverable(self.text);
        for error in errors {
            self.fault(error.span().unwrap_or_default().start, error.message());
        }
        let entries = root.into_inner();
        Table { document: self, name: "the file", offset: 0, entries, known: Vec::new() }
    }

    /// Notes the fault `what` at `offset`.
    pub(super) fn fault(&self, offset: usize, what: impl Display) {
        self.faults.borrow_mut().push((offset, what.to_string()));
    }

    /// Returns whether there is a fault.
    pub(super) fn has_faults(&self) -> bool {
        !self.faults.borrow().is_empty()
    }

    /// Returns `FILE:LINE:COLUMN` of the character at `offset`; line and column count from 1.
    pub(super) fn position(&self, offset: usize) -> String {
        let before = self.text.get(..offset).unwrap_or(self.text);
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
        format!("{}:{line}:{column}", self.path.display())
    }

    /// Returns the faults in the order of the file, a line each.
    pub(super) fn faults(&self) -> Vec<String> {
        let mut faults = self.faults.borrow().clone();
        faults.sort();
        let show = |(offset, what): (usize, String)| format!("{}: {what}", self.position(offset));
        faults.into_iter().map(show).collect()
    }
}

impl<'a> Table<'a> {
    /// Returns whether the table has `key` and it was not taken yet.
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

    /// Returns the part of the value of `key` that `value_of` takes, with its offset. Notes a value
    /// of another type as a fault.
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

    /// Returns the offset of the value of `key` if the table has it.
    pub(super) fn offset_of(&self, key: &str) -> Option<usize> {
        Some(self.entries.get(key)?.span().start)
    }

    /// Returns the text of `key` with its offset.
    fn text_at(&mut self, key: &'static str) -> Option<(String, usize)> {
        let value = self.take(key)?;
        let text = self.typed(key, "a text in quotes", &value, DeValue::as_str)?;
        self.without_nul(key, text)
    }

    /// Returns `text` with its offset. Notes a NUL in it as a fault, since neither paths nor names
    /// can have one.
    fn without_nul(&self, key: &str, (text, offset): (&str, usize)) -> Option<(String, usize)> {
        if text.contains('\0') {
            self.document
                .fault(offset, format_args!("`{key}` has a NUL; a text without it is expected"));
            return None;
        }
        Some((text.to_owned(), offset))
    }

    /// Returns the path in `key`.
    pub(super) fn path(&mut self, key: &'static str) -> Option<PathBuf> {
        let path =
            |text: &str| if text.is_empty() { Err("the path is empty") } else { Ok(text.into()) };
        self.with(key, path)
    }

    /// Returns the text of `key`, parsed by `parse`.
    pub(super) fn with<T, E: Display>(
        &mut self,
        key: &'static str,
        parse: impl FnOnce(&str) -> Result<T, E>,
    ) -> Option<T> {
        let (text, offset) = self.text_at(key)?;
        self.noted(offset, key, parse(&text))
    }

    /// Returns the text of `key`, parsed.
    pub(super) fn parsed<T: FromStr<Err: Display>>(&mut self, key: &'static str) -> Option<T> {
        self.with(key, T::from_str)
    }

    fn noted<T, E: Display>(&self, offset: usize, key: &str, parsed: Result<T, E>) -> Option<T> {
        parsed.map_err(|error| self.document.fault(offset, format_args!("`{key}`: {error}"))).ok()
    }

    /// Returns each text in the list of `key`, parsed, with its offset.
    pub(super) fn list<T: FromStr<Err: Display>>(&mut self, key: &'static str) -> Vec<(T, usize)> {
        let Some(value) = self.take(key) else { return Vec::new() };
        let items = self.typed(key, "a list in brackets", &value, DeValue::as_array);
        let item = |item: &Spanned<DeValue<'a>>| {
            let text = self.typed(key, "a list of texts", item, DeValue::as_str)?;
            let (text, offset) = self.without_nul(key, text)?;
            Some((self.noted(offset, key, T::from_str(&text))?, offset))
        };
        items.into_iter().flat_map(|(items, _)| items).filter_map(item).collect()
    }

    /// Returns whether `key` is true; false if the key is not given.
    pub(super) fn flag(&mut self, key: &'static str) -> bool {
        let Some(value) = self.take(key) else { return false };
        self.typed(key, "true or false", &value, DeValue::as_bool).is_some_and(|(flag, _)| flag)
    }

    /// Returns the number of `key`, parsed by `parse`.
    pub(super) fn number<T, E: Display>(
        &mut self,
        key: &'static str,
        parse: impl FnOnce(&str) -> Result<T, E>,
    ) -> Option<T> {
        let value = self.take(key)?;
        let (number, offset) = self.typed(key, "a whole number", &value, DeValue::as_integer)?;
        // The text has neither prefix nor underscores.
        let decimal = i128::from_str_radix(number.as_str(), number.radix());
        let decimal =
            decimal.map_or_else(|_| number.as_str().to_owned(), |number| number.to_string());
        self.noted(offset, key, parse(&decimal))
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

    /// Returns the table `[key]`.
    pub(super) fn table(&mut self, key: &'static str) -> Option<Table<'a>> {
        let value = self.take(key)?;
        self.table_in(key, "a table", value)
    }

    /// Returns the tables `[[key]]`.
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

    /// Notes each key that was not taken as a fault, with the nearest known key.
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
