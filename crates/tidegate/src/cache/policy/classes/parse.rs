//! The table of IO classes as text, in the form of Open CAS's configuration files:
//!
//! ```text
//! IO class id,IO class name,Eviction priority,Allocation,Cache mode,Minimum
//! 0,unclassified,22,1.00,,
//! 1,request_size:le:64K&io_direction:write,1,0.50,wb,0.10
//! 2,lba:lt:2048&done,,0.01,,
//! ```
//!
//! The name of a class is its rule. An empty priority, or `pinned`, pins. Allocation is the share
//! of the cache that a class may use, from 0.00 to 1.00. The columns `Cache mode` and `Minimum` are
//! not Open CAS's and may be left out.

use std::fmt;

use super::{Class, ClassError, Classes, MAX_ID, Priority, Problem, Rule};

/// All columns.
const HEADER: &str = "IO class id,IO class name,Eviction priority,Allocation,Cache mode,Minimum";
/// Columns that every table has.
const NEEDED: usize = 4;

impl Classes {
    /// Parses the classes in `text`. A cache mode has to be one of `modes`.
    ///
    /// # Errors
    /// [`ClassError`] of the first line that is wrong.
    pub fn parse(text: &str, modes: &[&'static str]) -> Result<Self, ClassError> {
        let mut lines = text.lines().map(str::trim).zip(1..).filter(|(line, _)| !line.is_empty());
        let (header, number) = lines.next().unwrap_or(("", 1));
        let columns =
            parse_header(header).map_err(|problem| ClassError { line: number, problem })?;
        let mut found = Vec::new();
        for (line, number) in lines {
            let class = parse_line(line, columns, modes);
            let class = class.and_then(|class| check_with_others(class, &found));
            found.push((class.map_err(|problem| ClassError { line: number, problem })?, number));
        }
        let mut classes: Vec<_> = found.into_iter().map(|(class, _)| class).collect();
        classes.sort_by_key(|class| class.id);
        if classes.first().is_none_or(|class| class.id != 0) {
            classes.insert(0, Class::unclassified());
        }
        Ok(Self { classes })
    }
}

/// Returns the number of columns of the table.
fn parse_header(line: &str) -> Result<usize, Problem> {
    let columns = line.split(',').count();
    let mut names = HEADER.split(',').zip(line.split(','));
    let known = names.all(|(name, found)| name.eq_ignore_ascii_case(found.trim()));
    if known && (NEEDED..=HEADER.split(',').count()).contains(&columns) {
        return Ok(columns);
    }
    Err(Problem::Header { found: line.to_owned(), expected: HEADER })
}

fn parse_line(line: &str, columns: usize, modes: &[&'static str]) -> Result<Class, Problem> {
    let fields: Vec<_> = line.split(',').map(str::trim).collect();
    if fields.len() != columns {
        return Err(Problem::Columns { found: fields.len(), expected: columns });
    }
    let field = |at: usize| fields.get(at).copied().unwrap_or_default();
    let id = parse_id(field(0))?;
    let max_pct = parse_share("the allocation", field(3))?;
    let min_pct = if field(5).is_empty() { 0 } else { parse_share("the minimum", field(5))? };
    if min_pct > max_pct {
        let expected = format!("at most the allocation, {}", Share(max_pct));
        return Err(Problem::value("the minimum", field(5), expected));
    }
    Ok(Class {
        id,
        rule: parse_rule(id, field(1))?,
        priority: parse_priority(field(2))?,
        min_pct,
        max_pct,
        mode: parse_mode(field(4), modes)?,
    })
}

/// Returns `class`, unless it conflicts with the earlier classes `before`, each with its line.
fn check_with_others(class: Class, before: &[(Class, usize)]) -> Result<Class, Problem> {
    if let Some((_, first_line)) = before.iter().find(|it| it.0.id == class.id) {
        return Err(Problem::Twice { id: class.id, first_line: *first_line });
    }
    let all = before.iter().map(|it| &it.0).chain([&class]);
    let total_pct = all.map(|it| u32::from(it.min_pct)).sum();
    if total_pct > 100 { Err(Problem::Minimums { total_pct }) } else { Ok(class) }
}

fn parse_id(text: &str) -> Result<u8, Problem> {
    let id = text.parse().ok().filter(|&id| id <= MAX_ID);
    id.ok_or_else(|| Problem::value("the id", text, format!("a number from 0 to {MAX_ID}")))
}

fn parse_rule(id: u8, text: &str) -> Result<Rule, Problem> {
    match (id, text) {
        (0, "unclassified") => Ok(Rule::UNCLASSIFIED),
        (0, _) => Err(Problem::value("the rule of class 0", text, "unclassified")),
        _ => Rule::parse(text),
    }
}

fn parse_priority(text: &str) -> Result<Priority, Problem> {
    if text.is_empty() || text == "pinned" {
        return Ok(Priority::Pinned);
    }
    let expected = "0 (evicted last) to 255 (evicted first), or nothing or `pinned` (not evicted)";
    let level = text.parse().map_err(|_| Problem::value("the priority", text, expected))?;
    Ok(Priority::Level(level))
}

fn parse_mode(text: &str, modes: &[&'static str]) -> Result<Option<&'static str>, Problem> {
    if text.is_empty() {
        return Ok(None);
    }
    let mode = modes.iter().copied().find(|mode| *mode == text);
    let expected = || format!("{}, or nothing for the mode of the cache", modes.join(", "));
    mode.map(Some).ok_or_else(|| Problem::value("the cache mode", text, expected()))
}

/// Parses a text such as `1`, `0.5` or `0.25`, and returns hundredths.
fn parse_share(what: &'static str, text: &str) -> Result<u8, Problem> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let is_number = |digits: &str| digits.bytes().all(|digit| digit.is_ascii_digit());
    let tail = match fraction.len() {
        1 if is_number(fraction) => fraction.parse::<u8>().ok().map(|tenths| 10 * tenths),
        2 if is_number(fraction) => fraction.parse().ok(),
        _ => None,
    };
    let pct = match (whole, tail) {
        ("0", Some(tail)) => Some(tail),
        ("1", Some(0)) => Some(100),
        _ => None,
    };
    pct.ok_or_else(|| Problem::value(what, text, "0.00 to 1.00, with two decimals at most"))
}

/// Hundredths as [`parse_share`] reads them.
struct Share(u8);

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:02}", self.0 / 100, self.0 % 100)
    }
}

/// The table, as [`Classes::parse`] reads it.
impl fmt::Display for Classes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{HEADER}")?;
        for class in self.iter() {
            let Class { id, rule, priority, min_pct, max_pct, mode } = class;
            let (max, min) = (Share(*max_pct), Share(*min_pct));
            writeln!(f, "{id},{rule},{priority},{max},{},{min}", mode.unwrap_or_default())?;
        }
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::{Just, Strategy, any, prop_oneof};
    use proptest::sample::select;
    use proptest::{collection, prop_assert_eq, proptest};

    use super::super::{Compare, Condition, Field, Join};
    use super::*;

    const MODES: &[&str] = &["wt", "wb", "pt"];
    const SHORT: &str = "IO class id,IO class name,Eviction priority,Allocation";

    fn error(header: &str, lines: &str) -> String {
        Classes::parse(&format!("{header}\n{lines}"), MODES).unwrap_err().to_string()
    }

    #[test]
    fn a_table_of_open_cas_parses() {
        let text = format!(
            "{SHORT}\r\n0,unclassified,22,1.00\r\n\r\n2, request_size:le:64K&done ,,0.25\r\n"
        );
        let classes = Classes::parse(&text, MODES).unwrap();
        let class = classes.get(2).unwrap();
        assert_eq!((class.priority, class.max_pct, class.min_pct), (Priority::Pinned, 25, 0));
        assert!(class.rule.is_final && class.mode.is_none());
        assert_eq!(classes.get(0).unwrap().priority, Priority::Level(22));
    }

    #[test]
    fn modes_and_minimums_are_columns_of_ours() {
        let classes = Classes::parse(&format!("{HEADER}\n3,lba:eq:0,pinned,0.5,wb,0.1"), MODES);
        let classes = classes.unwrap();
        let class = classes.get(3).unwrap();
        assert_eq!((class.mode, class.min_pct, class.max_pct), (Some("wb"), 10, 50));
        assert_eq!(classes.get(0), Classes::default().get(0), "class 0 is there in any case");
    }

    #[test]
    fn errors_name_the_line_what_was_found_and_what_would_do() {
        assert_eq!(
            error("id,rule", ""),
            format!(
                "IO classes, line 1: the header is `id,rule`; expected `{HEADER}`, of which the last two may be left out"
            )
        );
        assert_eq!(
            error(SHORT, "\n33,lba:eq:0,1,1"),
            "IO classes, line 3: the id is `33`; expected a number from 0 to 32"
        );
        assert_eq!(
            error(SHORT, "1,lba:eq:0,256,1"),
            "IO classes, line 2: the priority is `256`; expected 0 (evicted last) to 255 (evicted first), or nothing or `pinned` (not evicted)"
        );
        assert_eq!(
            error(SHORT, "1,lba:eq:0,1,0.125"),
            "IO classes, line 2: the allocation is `0.125`; expected 0.00 to 1.00, with two decimals at most"
        );
        assert_eq!(
            error(SHORT, "1,lba:eq:0,1,1\n1,lba:eq:1,1,1"),
            "IO classes, line 3: class 1 was defined in line 2; choose another id or remove one of the two"
        );
        assert_eq!(
            error(SHORT, "1,lba:eq:0,1"),
            "IO classes, line 2: there are 3 columns; expected 4, as in the header"
        );
        assert_eq!(
            error(HEADER, "1,lba:eq:0,1,1,wx,"),
            "IO classes, line 2: the cache mode is `wx`; expected wt, wb, pt, or nothing for the mode of the cache"
        );
        assert_eq!(
            error(HEADER, "1,lba:eq:0,1,0.5,,0.51"),
            "IO classes, line 2: the minimum is `0.51`; expected at most the allocation, 0.50"
        );
        assert_eq!(
            error(HEADER, "1,lba:eq:0,1,1,,0.51\n2,lba:eq:1,1,1,,0.5"),
            "IO classes, line 3: the minimums up to here are 101 % of the cache; expected at most 100 %"
        );
        assert!(error(SHORT, "0,lba:eq:0,1,1").contains("expected unclassified"));
        assert!(error(SHORT, "1,unclassified,1,1").contains("the rule of class 0 alone"));
        assert!(Classes::parse("", MODES).is_err());
        for share in ["", ".5", "1.01", "2", "-0", "0.", "+0.1", "0.+1", "nan", "00"] {
            assert!(error(SHORT, &format!("1,lba:eq:0,1,{share}")).contains("allocation"));
        }
    }

    fn rules() -> impl Strategy<Value = Rule> {
        use Compare::{Eq, Ge, Gt, Le, Lt, Ne};
        let by = || select(vec![Eq, Ne, Lt, Le, Gt, Ge]);
        let field = select(vec![Field::RequestSize, Field::Lba, Field::Offset]);
        let condition = prop_oneof![
            3 => (field, by(), any::<u64>()).prop_map(|(of, by, it)| Condition::Number(of, by, it)),
            1 => (by(), 0..3_u64).prop_map(|(by, it)| Condition::Number(Field::Queue, by, it)),
            1 => any::<bool>().prop_map(|is_write| Condition::Direction { is_write }),
        ];
        let join = prop_oneof![Just(Join::And), Just(Join::Or)];
        (collection::vec((join, condition), 1..6), any::<bool>()).prop_map(
            |(mut conditions, is_final)| {
                conditions[0].0 = Join::And;
                Rule { conditions, is_final }
            },
        )
    }

    fn classes() -> impl Strategy<Value = Classes> {
        let priority = prop_oneof![Just(Priority::Pinned), any::<u8>().prop_map(Priority::Level)];
        let mode = select(vec![None, Some("wt"), Some("wb"), Some("pt")]);
        let class = (rules(), priority, 0..4_u8, 3..=100_u8, mode);
        let ids = select((1..=MAX_ID).collect::<Vec<_>>());
        collection::btree_map(ids, class, 0..20).prop_map(|table| {
            let classes =
                table.into_iter().map(|(id, (rule, priority, min_pct, max_pct, mode))| Class {
                    id,
                    rule,
                    priority,
                    min_pct,
                    max_pct,
                    mode,
                });
            Classes { classes: [Class::unclassified()].into_iter().chain(classes).collect() }
        })
    }

    proptest! {
        #[test]
        fn what_is_shown_parses_back(classes in classes()) {
            prop_assert_eq!(Classes::parse(&classes.to_string(), MODES), Ok(classes));
        }

        #[test]
        fn no_text_panics(text in any::<String>()) {
            let _ = Classes::parse(&text, MODES);
            let _ = Classes::parse(&format!("{SHORT}\n{text}"), MODES);
            let _ = Rule::parse(&text);
        }

        /// Tables that are nearly right reach further into the parser.
        #[test]
        fn no_damaged_table_panics(classes in classes(), cuts in collection::vec((any::<u16>(), any::<char>()), 1..4)) {
            let mut text: Vec<char> = classes.to_string().chars().collect();
            for (at, letter) in cuts {
                let at = usize::from(at) % text.len();
                text[at] = letter;
            }
            if let Err(error) = Classes::parse(&text.into_iter().collect::<String>(), MODES) {
                prop_assert_eq!(error.to_string().matches("IO classes, line").count(), 1);
            }
        }
    }
}
