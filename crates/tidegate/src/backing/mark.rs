//! The mark of a backing: the last pool it was behind, and whether that pool may hold writes that
//! the backing lacks. By the mark, a pool that is served again notices that another pool wrote to
//! its backing.
//!
//! The mark is an extended attribute of a file, `user.tidegate.pool`, if the file system has such
//! attributes. Disks and exports of servers have no mark.

use std::fmt;
use std::fs::File;
use std::io;
use std::str::FromStr;

use rustix::fs::{XattrFlags, fgetxattr, fsetxattr};
use uuid::Uuid;

const NAME: &str = "user.tidegate.pool";
/// Most bytes of a mark: a UUID, a number and a word.
const BYTES_MAX: usize = 128;
const PENDING: &str = "pending";
const FLUSHED: &str = "flushed";

/// The last pool in front of a backing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mark {
    /// The pool.
    pub pool: Uuid,
    /// The number of its superblock at that time, which grows each time the pool is opened.
    pub sequence: u64,
    /// The pool may hold writes that the backing lacks.
    pub is_pending: bool,
}

impl Mark {
    /// Returns the mark of `file`, or `None` if it has none that this program understands.
    pub fn read(file: &File) -> Option<Self> {
        let mut bytes = [0; BYTES_MAX];
        let len = fgetxattr(file, NAME, &mut bytes[..]).ok()?;
        std::str::from_utf8(bytes.get(..len)?).ok()?.parse().ok()
    }

    /// Makes this the mark of `file`.
    ///
    /// # Errors
    /// The file cannot keep it: its file system has no such attributes.
    pub fn write(&self, file: &File) -> io::Result<()> {
        let text = self.to_string();
        Ok(fsetxattr(file, NAME, text.as_bytes(), XattrFlags::empty())?)
    }
}

impl fmt::Display for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = if self.is_pending { PENDING } else { FLUSHED };
        write!(f, "{} {} {word}", self.pool, self.sequence)
    }
}

impl FromStr for Mark {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut words = text.split(' ');
        let mut next = || words.next().ok_or(());
        let (pool, sequence, word) = (next()?, next()?, next()?);
        let is_pending = match word {
            PENDING => true,
            FLUSHED => false,
            _ => return Err(()),
        };
        let pool = pool.parse().map_err(drop)?;
        Ok(Self { pool, sequence: sequence.parse().map_err(drop)?, is_pending })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_read_as_it_was_written() {
        for is_pending in [false, true] {
            let mark = Mark { pool: Uuid::from_u128(7), sequence: 12, is_pending };
            assert_eq!(mark.to_string().parse(), Ok(mark));
            assert!(mark.to_string().len() < BYTES_MAX);
        }
        for text in ["", "x 1 pending", "00000000-0000-0000-0000-000000000007 1 lost"] {
            assert_eq!(text.parse::<Mark>(), Err(()), "{text}");
        }
    }

    #[test]
    fn a_file_keeps_its_mark_where_the_file_system_does() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(Mark::read(&file), None);
        let mark = Mark { pool: Uuid::from_u128(7), sequence: 12, is_pending: true };
        if mark.write(&file).is_ok() {
            assert_eq!(Mark::read(&file), Some(mark));
        }
    }
}
