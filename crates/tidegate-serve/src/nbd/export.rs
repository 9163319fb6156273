//! The exports of a server, found by name.

use std::sync::Arc;

use tidegate::device::{BlockDevice, Geometry};

use super::ServeError;
use super::protocol::{MAX_STRING_BYTES, export_flag};
use crate::changes::Changes;
use crate::statistics::RequestCounters;

/// A device under a name.
#[derive(Clone)]
pub struct Export {
    pub(super) name: String,
    pub(super) description: String,
    pub(super) device: Arc<dyn BlockDevice>,
    pub(super) read_only: bool,
    pub(super) counters: Arc<RequestCounters>,
    pub(super) changes: Arc<Changes>,
}

impl Export {
    /// Offers `device` as `name`: at most 4096 bytes, no NUL. Read-only if the device is.
    pub fn new(name: impl Into<String>, device: Arc<dyn BlockDevice>) -> Self {
        let read_only = device.geometry().read_only;
        let (name, description) = (name.into(), String::new());
        let (counters, changes) = (Arc::default(), Arc::default());
        Self { name, description, device, read_only, counters, changes }
    }

    /// Adds a description for people: at most 4096 bytes, no NUL.
    #[must_use]
    pub fn description(mut self, description: impl Into<String>) -> Self {
        self.description = description.into();
        self
    }

    /// Refuses writes through this export, whatever the device allows.
    #[must_use]
    pub fn read_only(mut self, read_only: bool) -> Self {
        self.read_only |= read_only;
        self
    }

    pub(super) fn geometry(&self) -> Geometry {
        self.device.geometry()
    }

    /// Returns the transmission flags of this export.
    ///
    /// `CAN_MULTI_CONN` is always set: all connections to an export call the same [`BlockDevice`],
    /// whose flush covers every write acknowledged before it, on any thread, and a connection
    /// answers a write only when the device has acknowledged it. So a flush on one connection
    /// covers writes answered on any other.
    pub(super) fn flags(&self, structured: bool) -> u16 {
        use export_flag::{
            CAN_MULTI_CONN, HAS_FLAGS, READ_ONLY, SEND_CACHE, SEND_DF, SEND_FAST_ZERO, SEND_FLUSH,
            SEND_FUA, SEND_TRIM, SEND_WRITE_ZEROES,
        };
        let common = HAS_FLAGS | SEND_FLUSH | SEND_FUA | SEND_CACHE | CAN_MULTI_CONN;
        let fast = if self.geometry().fast_zero { SEND_FAST_ZERO } else { 0 };
        let access = if self.read_only { READ_ONLY } else { SEND_TRIM | SEND_WRITE_ZEROES | fast };
        common | access | if structured { SEND_DF } else { 0 }
    }
}

/// The exports of a server: at least one, with different names.
pub(super) struct Exports(Vec<Export>);

impl Exports {
    /// Checks the exports' names and descriptions.
    ///
    /// # Errors
    /// [`ServeError::Export`]: no export, two with one name, or a string beyond the protocol's
    /// limits.
    pub(super) fn new(exports: Vec<Export>) -> Result<Self, ServeError> {
        if exports.is_empty() {
            return Err(ServeError::Export(
                "a server needs at least one export; found none".into(),
            ));
        }
        for (index, export) in exports.iter().enumerate() {
            check_string("name", &export.name)?;
            check_string("description", &export.description)?;
            if exports[..index].iter().any(|other| other.name == export.name) {
                let name = &export.name;
                return Err(ServeError::Export(format!(
                    "two exports have the name {name:?}; give each its own"
                )));
            }
        }
        Ok(Self(exports))
    }

    pub(super) fn iter(&self) -> std::slice::Iter<'_, Export> {
        self.0.iter()
    }

    /// Returns the export called `name`. The empty name means the first export unless one has it.
    pub(super) fn find(&self, name: &str) -> Option<&Export> {
        let named = self.0.iter().find(|export| export.name == name);
        named.or_else(|| self.0.first().filter(|_| name.is_empty()))
    }
}

fn check_string(what: &str, value: &str) -> Result<(), ServeError> {
    if value.len() <= MAX_STRING_BYTES && !value.contains('\0') {
        return Ok(());
    }
    let len = value.len();
    Err(ServeError::Export(format!(
        "an export's {what} has {len} bytes or a NUL; it may have {MAX_STRING_BYTES} bytes and no NUL"
    )))
}
