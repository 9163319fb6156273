//! Files of recorded programs: maps numbers and identities to files, and names files in the trace.
//!
//! Invariants:
//! 1. No two existing files have one name in the trace.
//! 2. A file that has lost its last name keeps a unique name in the trace while a process holds it
//!    open, because the trace's reader removes a file without a name.
//! 3. No row reports a change of name of a file that the trace has not shown.

use rustc_hash::FxHashMap;
use tidegate::glob::Filter;
use tidegate_record::event::{Event, FOLDER};

use super::rows::{At, Rows};
use super::summary::{Operation, Summary};
use crate::trace::is_storage;

/// `O_DSYNC`, which is part of `O_SYNC`; has one value on x86-64 and aarch64.
const O_DSYNC: u64 = 0o10000;
/// The suffix in `/proc` of the path of an unlinked file.
const DELETED: &[u8] = b" (deleted)";

/// Device, inode, and creation time: unique for all files.
pub(super) type Identity = [u64; 3];

/// A process, the number of programs that it had executed before the open, and the descriptor.
type Holder = (u32, u32, u64);

/// The state of a file.
#[derive(Debug, Default)]
struct File {
    name: Box<[u8]>,
    /// Further names.
    links: Vec<Box<[u8]>>,
    holders: Vec<Holder>,
    /// The trace has a row for the file.
    is_shown: bool,
    /// The file has no name in the file system.
    is_unlinked: bool,
    /// The user's filter excludes the file, or it is not storage.
    is_left_out: bool,
}

/// The file that a number stands for.
#[derive(Debug, Clone, Copy)]
struct Numbered {
    identity: Identity,
    /// Writes through the number's descriptors are synced.
    syncs: bool,
}

/// All files of the recorded programs.
#[derive(Default)]
pub(super) struct Files {
    filter: Filter,
    numbers: FxHashMap<u32, Numbered>,
    /// Existing files.
    known: FxHashMap<Identity, File>,
    /// Files by name in the trace.
    names: FxHashMap<Box<[u8]>, Identity>,
    /// Number of programs that each process has executed.
    programs: FxHashMap<u32, u32>,
    /// Files without a name that a process holds open.
    unlinked: Vec<Identity>,
    /// Number of unique names that were generated.
    aside: u64,
}

/// Destination of rows, and their statistics.
pub(super) struct Out<'a> {
    pub(super) at: At,
    pub(super) rows: &'a mut Rows,
    pub(super) summary: &'a mut Summary,
}

impl Out<'_> {
    pub(super) fn push(&mut self, operation: Operation, name: &[u8], numbers: [u64; 2]) {
        self.rows.push(self.at, operation.name(), name, numbers);
        self.summary.add(operation, numbers);
    }
}

impl Files {
    pub(super) fn new(filter: Filter) -> Self {
        Self { filter, ..Self::default() }
    }

    /// Drops the descriptors of a process that executes another program or has ended. Descriptors
    /// that another program inherits are reported again.
    pub(super) fn executed(&mut self, process: u32, out: &mut Out<'_>) {
        *self.programs.entry(process).or_insert(0) += 1;
        for identity in self.unlinked.clone() {
            if !self.is_held(identity) {
                self.remove(identity, out);
            }
        }
    }

    fn holder(&self, event: &Event) -> Holder {
        let programs = self.programs.get(&event.process).copied().unwrap_or(0);
        (event.process, programs, event.arguments[0])
    }

    /// Handles the first report of a descriptor, of a file at `path`.
    pub(super) fn opened(&mut self, event: &Event, path: &[u8], out: &mut Out<'_>) {
        let [_, device, inode, created_ns, flags] = event.arguments;
        let identity = [device, inode, created_ns];
        let syncs = flags & O_DSYNC != 0;
        self.numbers.insert(event.file, Numbered { identity, syncs });
        let holder = self.holder(event);
        self.file(identity, path, out).holders.push(holder);
    }

    /// Returns the file with this identity. An unknown file gets the name `path`.
    fn file(&mut self, identity: Identity, path: &[u8], out: &mut Out<'_>) -> &mut File {
        if !self.known.contains_key(&identity) {
            let is_left_out =
                !is_storage(path) || path.starts_with(b"/memfd:") || !self.filter.admits(path);
            let is_unlinked = path.ends_with(DELETED);
            let name = if is_unlinked { self.name_aside(path) } else { path.into() };
            if let Some(other) = self.names.get(&name).copied() {
                self.lose_name(other, true, out);
            }
            self.names.insert(name.clone(), identity);
            let file = File { name, is_unlinked, is_left_out, ..File::default() };
            self.known.insert(identity, file);
            if is_unlinked {
                self.unlinked.push(identity);
            }
        }
        self.known.entry(identity).or_default()
    }

    /// Returns the name in the trace of a file that gets a row, and whether its writes are synced.
    /// Returns `None` if the file is excluded or unknown.
    pub(super) fn shown(&mut self, number: u32, out: &mut Out<'_>) -> Option<(&[u8], bool)> {
        let Some(Numbered { identity, syncs }) = self.numbers.get(&number).copied() else {
            out.summary.unknown += 1;
            return None;
        };
        // The trace has removed the file, but a child still uses an inherited descriptor.
        self.file(identity, DELETED, out);
        self.shown_by_identity(identity, out.summary).map(|name| (name, syncs))
    }

    fn shown_by_identity(&mut self, identity: Identity, summary: &mut Summary) -> Option<&[u8]> {
        let file = self.known.get_mut(&identity).filter(|file| !file.is_left_out)?;
        if !std::mem::replace(&mut file.is_shown, true) {
            summary.files += 1;
        }
        Some(&file.name)
    }

    /// Handles a change of an open file's length.
    pub(super) fn resized(&mut self, event: &Event, out: &mut Out<'_>) {
        if let Some((name, _)) = self.shown(event.file, out) {
            out.push(Operation::Truncate, name, [event.arguments[0], 0]);
        }
    }

    /// Handles a change of the length of a file at `path`, which may not be open.
    pub(super) fn resized_path(&mut self, event: &Event, path: &[u8], out: &mut Out<'_>) {
        let [len, device, inode, created_ns, _] = event.arguments;
        let identity = [device, inode, created_ns];
        self.file(identity, path, out);
        if let Some(name) = self.shown_by_identity(identity, out.summary) {
            out.push(Operation::Truncate, name, [len, 0]);
        }
    }

    /// Handles a duplicate descriptor of a file.
    pub(super) fn copied(&mut self, event: &Event) {
        let holder = self.holder(event);
        let identity = self.numbers.get(&event.file).map(|it| it.identity);
        if let Some(file) = identity.and_then(|identity| self.known.get_mut(&identity)) {
            file.holders.push(holder);
        }
    }

    /// Handles the close of a descriptor.
    pub(super) fn closed(&mut self, event: &Event, out: &mut Out<'_>) {
        let holder = self.holder(event);
        let Some(identity) = self.numbers.get(&event.file).map(|it| it.identity) else { return };
        let Some(file) = self.known.get_mut(&identity) else { return };
        file.holders.retain(|it| *it != holder);
        if file.is_unlinked && !self.is_held(identity) {
            self.remove(identity, out);
        }
    }

    /// Returns whether a process has a descriptor of the file, according to the reported events.
    fn is_held(&mut self, identity: Identity) -> bool {
        let Some(file) = self.known.get_mut(&identity) else { return false };
        let programs = &self.programs;
        file.holders.retain(|(process, executed, _)| {
            programs.get(process).copied().unwrap_or(0) == *executed
        });
        !file.holders.is_empty()
    }

    /// Removes the file.
    fn remove(&mut self, identity: Identity, out: &mut Out<'_>) {
        self.unlinked.retain(|unlinked| *unlinked != identity);
        let Some(file) = self.known.remove(&identity) else { return };
        self.names.remove(&file.name);
        if file.is_shown {
            out.push(Operation::Unlink, &file.name, [0, 0]);
        }
    }

    /// Takes the file's name in the trace away. The file has no other name if `is_last`.
    fn lose_name(&mut self, identity: Identity, is_last: bool, out: &mut Out<'_>) {
        let Some(file) = self.known.get_mut(&identity) else { return };
        if let Some(link) = file.links.pop() {
            return self.rename(identity, &link, out);
        }
        if is_last && !self.is_held(identity) {
            return self.remove(identity, out);
        }
        let Some(file) = self.known.get_mut(&identity) else { return };
        file.is_unlinked = is_last;
        let name = file.name.clone();
        if is_last {
            self.unlinked.push(identity);
        }
        let aside = self.name_aside(&name);
        self.rename(identity, &aside, out);
    }

    /// Returns a name that no file has.
    fn name_aside(&mut self, name: &[u8]) -> Box<[u8]> {
        self.aside += 1;
        let name = name.strip_suffix(DELETED).unwrap_or(name);
        [name, format!(" (unlinked {})", self.aside).as_bytes()].concat().into()
    }

    /// Gives a file a new name in the trace, which no other file has.
    fn rename(&mut self, identity: Identity, new: &[u8], out: &mut Out<'_>) {
        let Some(file) = self.known.get_mut(&identity) else { return };
        let old = std::mem::replace(&mut file.name, new.into());
        if old[..] == *new {
            return;
        }
        if file.is_shown {
            out.rows.push_rename(out.at, &old, new);
            out.summary.add(Operation::Rename, [0, 0]);
        }
        self.names.remove(&old);
        self.names.insert(new.into(), identity);
    }

    /// Handles the removal of a file's name.
    pub(super) fn unlinked(&mut self, event: &Event, path: &[u8], out: &mut Out<'_>) {
        let [device, inode, created_ns, names, _] = event.arguments;
        let identity = [device, inode, created_ns];
        let Some(file) = self.known.get_mut(&identity) else { return };
        file.links.retain(|link| **link != *path);
        let is_last = names <= 1;
        if is_last {
            file.links.clear();
        }
        if is_last || *file.name == *path {
            self.lose_name(identity, is_last, out);
        }
    }

    /// Handles an additional name of a file.
    pub(super) fn linked(&mut self, event: &Event, path: &[u8]) {
        let [device, inode, created_ns, ..] = event.arguments;
        if let Some(file) = self.known.get_mut(&[device, inode, created_ns]) {
            file.links.push(path.into());
        }
    }

    /// Handles a rename of a file or a directory, and of the files below the directory.
    pub(super) fn renamed(&mut self, event: &Event, [old, new]: [&[u8]; 2], out: &mut Out<'_>) {
        let [device, inode, created_ns, other_inode, other_created_ns] = event.arguments;
        let identity = [device, inode, created_ns];
        let other = [device, other_inode, other_created_ns];
        if identity == other {
            // Both names belong to one file: the kernel keeps both.
            return;
        }
        let is_folder = event.flags & FOLDER != 0;
        if event.is_flagged() {
            let aside = self.name_aside(new);
            self.moved(other, [new, &aside], is_folder, out);
            self.moved(identity, [old, new], is_folder, out);
            self.moved(other, [&aside, old], is_folder, out);
        } else {
            self.replaced(other, new, out);
            self.moved(identity, [old, new], is_folder, out);
        }
    }

    /// Takes `name` away from the file with this identity, because another file gets the name. If
    /// that file is unknown, takes `name` from the file that the trace knows by it.
    fn replaced(&mut self, identity: Identity, name: &[u8], out: &mut Out<'_>) {
        let named = self.names.get(name).copied();
        if let Some(file) = self.known.get_mut(&identity) {
            file.links.retain(|link| **link != *name);
            if *file.name == *name {
                self.lose_name(identity, true, out);
            }
        } else if let Some(gone) = named {
            self.lose_name(gone, true, out);
        }
    }

    /// Renames the file with this identity from `old` to `new`, and the files below it if it is a
    /// directory.
    fn moved(
        &mut self,
        identity: Identity,
        [old, new]: [&[u8]; 2],
        is_folder: bool,
        out: &mut Out<'_>,
    ) {
        if let Some(file) = self.known.get_mut(&identity) {
            let links = file.links.len();
            file.links.retain(|link| **link != *old);
            if file.links.len() < links {
                file.links.push(new.into());
            } else {
                self.rename(identity, new, out);
            }
        }
        if is_folder {
            for (identity, rest) in self.below(old) {
                self.rename(identity, &[new, &rest].concat(), out);
            }
        }
    }

    /// Returns the files below a directory, and their names without its own; sorted, so that the
    /// order of rows is fixed.
    fn below(&self, folder: &[u8]) -> Vec<(Identity, Box<[u8]>)> {
        let rest = |name: &[u8]| {
            name.strip_prefix(folder).filter(|rest| rest.first() == Some(&b'/')).map(Box::from)
        };
        let below = self.names.iter().filter_map(|(name, identity)| Some((*identity, rest(name)?)));
        let mut below: Vec<_> = below.collect();
        below.sort_unstable();
        below
    }

    /// Removes the unlinked files when the program has ended.
    pub(super) fn end(&mut self, out: &mut Out<'_>) {
        for identity in self.unlinked.clone() {
            self.remove(identity, out);
        }
    }
}
