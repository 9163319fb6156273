//! Detects and repairs damage of the log's tail, limit and session, which have two copies each.
//!
//! If both copies of a position are damaged, the records may prove it by their own positions. The
//! tail proves the limit: no record was ever stored beyond one lap. The limit proves the tail only
//! if the ring holds no record before the limit: a record does not tell whether its file has it
//! already.

use std::fmt;

use crate::log::error::LogError;
use crate::log::pool::layout::{
    COPY_DISTANCE, LIMIT_OFFSET, RecordHeaderBytes, SESSION_OFFSET, SessionBytes, TAIL_OFFSET,
};
use crate::log::pool::{LogPool, is_whole_session};

/// A fault of tail, limit or session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::log) enum PositionFault {
    /// One copy is damaged.
    Copy {
        /// Name of the number.
        field: &'static str,
        /// Offset of the copy in the pool.
        offset: u64,
    },
    /// Both copies are damaged.
    Both {
        /// Name of the number.
        field: &'static str,
        /// The value that the records prove, if they prove one.
        proved: Option<u64>,
    },
}

impl fmt::Display for PositionFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Copy { field, offset } => {
                write!(
                    f,
                    "the log's {field} at offset {offset} is damaged; the other copy is whole"
                )
            }
            Self::Both { field, proved: Some(position) } => write!(
                f,
                "the log's {field} is damaged in both copies; the records prove that {position} will do"
            ),
            Self::Both { field, proved: None } => write!(
                f,
                "the log's {field} is damaged in both copies, and the records do not prove what it was: which of \
                 them the files have already cannot be told; restore the pool from a backup, or give its records \
                 up by `tidegate create --force`, which leaves files and devices as they are"
            ),
        }
    }
}

impl LogPool {
    /// Returns the faults of tail, limit and session.
    ///
    /// # Errors
    /// [`LogError::Pmem`].
    pub(in crate::log) fn position_faults(&self) -> Result<Vec<PositionFault>, LogError> {
        let mut faults = Vec::new();
        for (field, offset) in [("tail", TAIL_OFFSET), ("limit", LIMIT_OFFSET)] {
            match self.position_copies(offset)? {
                [Some(_), Some(_)] => {}
                [None, None] => {
                    faults.push(PositionFault::Both { field, proved: self.proved(offset)? });
                }
                [Some(_), None] if self.is_former(offset)? => {}
                copies => faults.push(self.copy_fault(field, offset, copies[0].is_some())),
            }
        }
        let [first, second] = self.session_copies()?.map(|copy| is_sound_session(&copy));
        if !first || !second {
            faults.push(self.copy_fault("session", SESSION_OFFSET, first));
        }
        Ok(faults)
    }

    /// Writes damaged copies again, and positions that the records prove. Returns the number of
    /// faults that are repaired.
    ///
    /// # Errors
    /// [`LogError::Pmem`].
    pub(in crate::log) fn restore_positions(&self) -> Result<usize, LogError> {
        let faults = self.position_faults()?;
        for fault in &faults {
            match *fault {
                PositionFault::Copy { field: "tail", .. } => self.set_tail(self.tail()?)?,
                PositionFault::Copy { field: "limit", .. } => self.set_limit(self.limit()?)?,
                PositionFault::Copy { .. } => {
                    self.set_session(self.session()?.unwrap_or_default())?;
                }
                PositionFault::Both { field: "tail", proved: Some(position) } => {
                    self.set_tail(position)?;
                }
                PositionFault::Both { proved: Some(position), .. } => self.set_limit(position)?,
                PositionFault::Both { proved: None, .. } => {}
            }
        }
        Ok(faults.len() - self.position_faults()?.len())
    }

    fn copy_fault(&self, field: &'static str, offset: u64, first_is_whole: bool) -> PositionFault {
        let distance = if first_is_whole { COPY_DISTANCE } else { 0 };
        PositionFault::Copy { field, offset: self.superblock().data_offset + offset + distance }
    }

    /// Returns a position whose copies are both lost, if the other position and the records prove
    /// it.
    fn proved(&self, offset: u64) -> Result<Option<u64>, LogError> {
        let (tail, limit) = (self.tail()?, self.limit()?);
        Ok(match offset {
            LIMIT_OFFSET if tail > 0 => Some(tail + self.ring_bytes()),
            TAIL_OFFSET if limit > 0 && !self.has_records_before(limit)? => Some(limit),
            _ => None,
        })
    }

    /// Returns whether the ring holds any record of the lap before `limit`, whole or torn.
    fn has_records_before(&self, limit: u64) -> Result<bool, LogError> {
        let start = limit.saturating_sub(self.ring_bytes());
        for position in (start..limit).step_by(size_of::<RecordHeaderBytes>()) {
            if self.read_header(position)?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Returns whether the session is whole, or was never written.
fn is_sound_session(bytes: &SessionBytes) -> bool {
    is_whole_session(bytes) || *bytes == SessionBytes::default()
}
