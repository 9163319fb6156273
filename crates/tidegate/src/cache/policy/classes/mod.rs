//! IO classes: requests sorted by size, direction, offset and queue, and the share of the cache
//! that each class may use (Open CAS).
//!
//! - `rule`: the conditions of a class;
//! - `parse`: the table as text;
//! - `shares`: the shares of the classes, and the order of giving up slots.
//!
//! A class has an id from 0 to 32. A request belongs to the class with the highest id whose rule
//! matches, unless a class before it matches and ends in `done`. Class 0 takes all other requests.

mod error;
mod parse;
mod rule;
mod shares;

use std::fmt;

pub use error::{ClassError, Problem};
pub use rule::{Compare, Condition, Field, Join, Rule};
pub use shares::{Admission, Surplus};

use super::Request;

/// Highest id of a class.
pub const MAX_ID: u8 = 32;

/// Largest number of classes.
pub const CLASSES: usize = MAX_ID as usize + 1;

/// A class.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Class {
    /// Number of the class.
    pub id: u8,
    /// Conditions of its requests.
    pub rule: Rule,
    /// How soon it gives up slots.
    pub priority: Priority,
    /// Share of the slots, in percent, that other classes leave to it.
    pub min_pct: u8,
    /// Share of the slots, in percent, that it may use. At 0 its requests go around the cache.
    pub max_pct: u8,
    /// The cache mode of its requests; `None` for the mode of the cache.
    pub mode: Option<&'static str>,
}

/// How soon a class gives up slots: the greatest priority first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    /// Other classes never evict it.
    Pinned,
    /// From 0, which gives up slots last, to 255.
    Level(u8),
}

/// The classes of a cache. There is always a class 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Classes {
    /// By id, each id once.
    classes: Vec<Class>,
}

impl Class {
    /// Returns class 0 without a table: it may use the whole cache, and gives up slots first.
    fn unclassified() -> Self {
        Self {
            id: 0,
            rule: Rule::UNCLASSIFIED,
            priority: Priority::Level(u8::MAX),
            min_pct: 0,
            max_pct: 100,
            mode: None,
        }
    }
}

impl Classes {
    /// Returns the id of the class of `request`.
    pub fn classify(&self, request: &Request) -> u8 {
        let mut id = 0;
        for class in &self.classes {
            if class.rule.matches(request) {
                id = class.id;
                if class.rule.is_final {
                    break;
                }
            }
        }
        id
    }

    /// Returns the class with `id`.
    pub fn get(&self, id: u8) -> Option<&Class> {
        let at = self.classes.binary_search_by_key(&id, |class| class.id).ok()?;
        self.classes.get(at)
    }

    /// Returns the id of the class that gives up slots last.
    pub fn foremost(&self) -> u8 {
        self.classes.iter().min_by_key(|class| class.priority).map_or(0, |class| class.id)
    }

    /// Returns whether there is class 0 alone, which takes the whole cache.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Returns all classes, by id.
    pub fn iter(&self) -> impl Iterator<Item = &Class> {
        self.classes.iter()
    }
}

/// Class 0 alone.
impl Default for Classes {
    fn default() -> Self {
        Self { classes: vec![Class::unclassified()] }
    }
}

/// A number from 0 to 255, or `pinned`.
impl fmt::Display for Priority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pinned => f.write_str("pinned"),
            Self::Level(level) => level.fmt(f),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn id(classes: &Classes, offset_bytes: u64, len_bytes: u64, is_write: bool) -> u8 {
        classes.classify(&Request { queue: 0, offset_bytes, len_bytes, is_write })
    }

    #[test]
    fn the_highest_id_counts_unless_one_before_it_is_done() {
        let lines = |first: &str| {
            let text = format!(
                "IO class id,IO class name,Eviction priority,Allocation\n\
                 0,unclassified,22,1.00\n\
                 3,{first},1,1.00\n\
                 4,request_size:ge:8K,2,0.5\n\
                 7,lba:lt:100,3,0.1\n"
            );
            Classes::parse(&text, &[]).unwrap()
        };
        let classes = lines("io_direction:write");
        assert_eq!(id(&classes, 1 << 20, 4096, false), 0);
        assert_eq!(id(&classes, 1 << 20, 4096, true), 3);
        assert_eq!(id(&classes, 1 << 20, 8192, true), 4);
        assert_eq!(id(&classes, 99 * 512, 8192, true), 7);
        assert_eq!(id(&classes, 100 * 512, 8192, true), 4);
        let classes = lines("io_direction:write&done");
        assert_eq!(id(&classes, 99 * 512, 8192, true), 3);
        assert_eq!(id(&classes, 99 * 512, 8192, false), 7);
    }

    #[test]
    fn without_a_table_all_is_unclassified() {
        let classes = Classes::default();
        assert_eq!(id(&classes, 0, u64::MAX, true), 0);
        assert_eq!(classes.iter().count(), 1);
        assert_eq!(classes.get(0).map(|it| it.max_pct), Some(100));
        assert_eq!(classes.get(1), None);
    }
}
