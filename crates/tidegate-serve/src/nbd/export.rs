//! The exports of a server, found by name.

use std::sync::Arc;

use parking_lot::RwLock;
use tidegate::device::{BlockDevice, Geometry};

use super::ServeError;
use super::protocol::{MAX_STRING_BYTES, export_flag};
use super::users::{User, Users};
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
    pub(super) users: Arc<Users>,
}

impl Export {
    /// Offers `device` as `name`: at most 4096 bytes, no NUL. Read-only if the device is.
    pub fn new(name: impl Into<String>, device: Arc<dyn BlockDevice>) -> Self {
        let read_only = device.geometry().read_only;
        let (name, description) = (name.into(), String::new());
        let (counters, changes, users) = Default::default();
        Self { name, description, device, read_only, counters, changes, users }
    }

    /// Checks a name of an export.
    ///
    /// # Errors
    /// [`ServeError::Export`] if `name` is longer than 4096 bytes or has a NUL.
    pub fn check_name(name: &str) -> Result<(), ServeError> {
        check_string("name", name)
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

/// The state of an export.
pub(super) enum State {
    /// Its device is being opened for the first time, or anew: the export's clients wait.
    Opening,
    /// Its device is not open.
    Unavailable,
    /// Clients use it.
    Open(Export),
}

impl State {
    fn export(&self) -> Option<&Export> {
        match self {
            Self::Open(export) => Some(export),
            Self::Opening | Self::Unavailable => None,
        }
    }
}

/// The exports of a server: at least one, with different names. Devices may open later.
pub(super) struct Exports(RwLock<Vec<(String, State)>>);

impl Exports {
    /// Checks the exports' names and descriptions.
    ///
    /// # Errors
    /// [`ServeError::Export`]: no export, two with one name, or a string beyond the protocol's
    /// limits.
    pub(super) fn new(exports: Vec<(String, State)>) -> Result<Self, ServeError> {
        let names: Vec<_> = exports.iter().map(|(name, _)| name.as_str()).collect();
        check_names(&names)?;
        for (_, state) in &exports {
            if let State::Open(export) = state {
                check_string("description", &export.description)?;
            }
        }
        Ok(Self(RwLock::new(exports)))
    }

    /// Makes `names` the names of the exports, in this order. New names are being opened.
    ///
    /// # Errors
    /// [`ServeError::Export`], as for [`new`](Self::new). Nothing has changed then.
    pub(super) fn rename(&self, names: &[&str]) -> Result<(), ServeError> {
        check_names(names)?;
        let mut exports = self.0.write();
        let mut before = std::mem::take(&mut *exports);
        let state_of = |name: &&str| {
            let found = before.iter().position(|(other, _)| other == name);
            let state = found.map_or(State::Opening, |found| before.swap_remove(found).1);
            ((*name).to_owned(), state)
        };
        exports.extend(names.iter().map(state_of));
        Ok(())
    }

    /// Returns `of` each export that clients can use.
    pub(super) fn of_open<R>(&self, of: impl FnMut(&Export) -> R) -> Vec<R> {
        self.0.read().iter().filter_map(|(_, state)| state.export()).map(of).collect()
    }

    /// Calls `look` with the state of the export called `name`. The empty name means the first
    /// export unless one has it: also while that one is not open, since a client must not get
    /// another device instead.
    fn look<R>(&self, name: &str, look: impl FnOnce(&State) -> R) -> Option<R> {
        let exports = self.0.read();
        let named = exports.iter().find(|(other, _)| other == name);
        let found = named.or_else(|| exports.first().filter(|_| name.is_empty()));
        found.map(|(_, state)| look(state))
    }

    /// Returns `of` the export called `name` if clients can use it.
    pub(super) fn find<R>(&self, name: &str, of: impl FnOnce(&Export) -> R) -> Option<R> {
        self.look(name, |state| state.export().map(of))?
    }

    /// Returns the export called `name`, and the caller as its user. The export must be dropped
    /// before the user.
    pub(super) fn enter(&self, name: &str) -> Option<(User, Export)> {
        self.find(name, |export| Some((export.users.enter()?, export.clone())))?
    }

    /// Returns whether the device of export `name` is being opened for the first time, or anew.
    pub(super) fn is_opening(&self, name: &str) -> bool {
        self.look(name, |state| matches!(state, State::Opening)).unwrap_or(false)
    }

    /// Changes the state of export `name`. Returns the state of before.
    ///
    /// # Errors
    /// [`ServeError::Export`] if the server has no export of this name.
    pub(super) fn set(&self, name: &str, state: State) -> Result<State, ServeError> {
        let mut exports = self.0.write();
        let Some((_, found)) = exports.iter_mut().find(|(other, _)| other == name) else {
            let what = format!("the server has no export with the name {name:?}");
            return Err(ServeError::Export(what));
        };
        Ok(std::mem::replace(found, state))
    }
}

fn check_names(names: &[&str]) -> Result<(), ServeError> {
    if names.is_empty() {
        return Err(ServeError::Export("a server needs at least one export; found none".into()));
    }
    for (index, name) in names.iter().enumerate() {
        Export::check_name(name)?;
        if names[..index].contains(name) {
            let what = format!("two exports have the name {name:?}; give each its own");
            return Err(ServeError::Export(what));
        }
    }
    Ok(())
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
