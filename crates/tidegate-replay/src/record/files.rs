//! Files of recorded programs: which number and which identity is which file, and its name in the
//! trace.
//!
//! Invariants:
//! 1. No two files that are there at a time have one name in the trace.
//! 2. A file that has lost its last name keeps one in the trace, which no file has, as long as a
//!    process holds it open: to the reader of the trace a file without a name is gone.
//! 3. Names of files that the trace has not shown are nothing to it: no row tells of them.

use rustc_hash::FxHashMap;
use tidegate::glob::Filter;
use tidegate_record::event::{Event, FOLDER};

use super::rows::{At, Rows};
use super::summary::{Operation, Summary};
use crate::trace::is_storage;

/// `O_DSYNC`, which `O_SYNC` has too; the same on x86-64 and aarch64.
const O_DSYNC: u64 = 0o10000;
/// What `readlink` says behind the path of a file without a name.
const DELETED: &[u8] = b" (deleted)";

/// Device, inode, and time of creation: no other file ever has the same.
pub(super) type Identity = [u64; 3];

/// A descriptor of a process, and how many programs that had executed before it was opened.
type Holder = (u32, u32, u64);

/// What is known of a file.
#[derive(Debug, Default)]
struct File {
    name: Box<[u8]>,
    /// Its other names.
    links: Vec<Box<[u8]>>,
    holders: Vec<Holder>,
    /// The trace has a row of it.
    is_shown: bool,
    /// It has no name in the file system.
    is_unlinked: bool,
    /// The user does not want it, or it is no storage.
    is_left_out: bool,
}

/// A file behind a number.
#[derive(Debug, Clone, Copy)]
struct Numbered {
    identity: Identity,
    /// Writes through the descriptors of this number are synced.
    syncs: bool,
}

/// All files.
#[derive(Default)]
pub(super) struct Files {
    filter: Filter,
    numbers: FxHashMap<u32, Numbered>,
    /// Those that are there.
    known: FxHashMap<Identity, File>,
    /// By name in the trace.
    names: FxHashMap<Box<[u8]>, Identity>,
    /// How many programs a process has executed.
    programs: FxHashMap<u32, u32>,
    /// Files without a name that a process has open.
    unlinked: Vec<Identity>,
    /// How many names were made that no file has.
    aside: u64,
}

/// Where rows go, and are counted.
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

    /// A process runs another program, or has ended: what it had open is closed. What another
    /// program still has of it is seen again.
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

    /// A descriptor of a file at `path` was seen for the first time.
    pub(super) fn opened(&mut self, event: &Event, path: &[u8], out: &mut Out<'_>) {
        let [_, device, inode, created_ns, flags] = event.arguments;
        let identity = [device, inode, created_ns];
        let syncs = flags & O_DSYNC != 0;
        self.numbers.insert(event.file, Numbered { identity, syncs });
        let holder = self.holder(event);
        self.file(identity, path, out).holders.push(holder);
    }

    /// The file with this identity; one that was not seen gets the name `path`.
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

    /// The name in the trace of the file with this number, of which there is a row now, and whether
    /// its writes are synced. None: it is left out, or not known.
    pub(super) fn shown(&mut self, number: u32, out: &mut Out<'_>) -> Option<(&[u8], bool)> {
        let Some(Numbered { identity, syncs }) = self.numbers.get(&number).copied() else {
            out.summary.unknown += 1;
            return None;
        };
        // Gone from the trace, but a child that has inherited it still uses it.
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

    /// A file has another length.
    pub(super) fn resized(&mut self, event: &Event, out: &mut Out<'_>) {
        if let Some((name, _)) = self.shown(event.file, out) {
            out.push(Operation::Truncate, name, [event.arguments[0], 0]);
        }
    }

    /// A file at `path`, which may not be open, has another length.
    pub(super) fn resized_path(&mut self, event: &Event, path: &[u8], out: &mut Out<'_>) {
        let [len, device, inode, created_ns, _] = event.arguments;
        let identity = [device, inode, created_ns];
        self.file(identity, path, out);
        if let Some(name) = self.shown_by_identity(identity, out.summary) {
            out.push(Operation::Truncate, name, [len, 0]);
        }
    }

    /// A descriptor is one more of the file.
    pub(super) fn copied(&mut self, event: &Event) {
        let holder = self.holder(event);
        let identity = self.numbers.get(&event.file).map(|it| it.identity);
        if let Some(file) = identity.and_then(|identity| self.known.get_mut(&identity)) {
            file.holders.push(holder);
        }
    }

    /// A descriptor was closed.
    pub(super) fn closed(&mut self, event: &Event, out: &mut Out<'_>) {
        let holder = self.holder(event);
        let Some(identity) = self.numbers.get(&event.file).map(|it| it.identity) else { return };
        let Some(file) = self.known.get_mut(&identity) else { return };
        file.holders.retain(|it| *it != holder);
        if file.is_unlinked && !self.is_held(identity) {
            self.remove(identity, out);
        }
    }

    /// Whether a process has a descriptor of the file, as far as was told.
    fn is_held(&mut self, identity: Identity) -> bool {
        let Some(file) = self.known.get_mut(&identity) else { return false };
        let programs = &self.programs;
        file.holders.retain(|(process, executed, _)| {
            programs.get(process).copied().unwrap_or(0) == *executed
        });
        !file.holders.is_empty()
    }

    /// The file is gone.
    fn remove(&mut self, identity: Identity, out: &mut Out<'_>) {
        self.unlinked.retain(|unlinked| *unlinked != identity);
        let Some(file) = self.known.remove(&identity) else { return };
        self.names.remove(&file.name);
        if file.is_shown {
            out.push(Operation::Unlink, &file.name, [0, 0]);
        }
    }

    /// The name of a file in the trace is no longer its own; it had no other if `is_last`.
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

    /// A name that no file has.
    fn name_aside(&mut self, name: &[u8]) -> Box<[u8]> {
        self.aside += 1;
        let name = name.strip_suffix(DELETED).unwrap_or(name);
        [name, format!(" (unlinked {})", self.aside).as_bytes()].concat().into()
    }

    /// Gives a file another name in the trace, which no file has.
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

    /// A name of a file was removed.
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

    /// A file has one more name.
    pub(super) fn linked(&mut self, event: &Event, path: &[u8]) {
        let [device, inode, created_ns, ..] = event.arguments;
        if let Some(file) = self.known.get_mut(&[device, inode, created_ns]) {
            file.links.push(path.into());
        }
    }

    /// A name was changed, of a file or of a folder, and with it the names of what is below.
    pub(super) fn renamed(&mut self, event: &Event, [old, new]: [&[u8]; 2], out: &mut Out<'_>) {
        let [device, inode, created_ns, other_inode, other_created_ns] = event.arguments;
        let identity = [device, inode, created_ns];
        let other = [device, other_inode, other_created_ns];
        if identity == other {
            // Two names of one file: the kernel leaves both.
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

    /// Another file takes the name `name`, which that with this identity had, or one that has gone
    /// unseen.
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

    /// The file with this identity has the name `new` in place of `old`; where that is a folder,
    /// so have those below it.
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

    /// The files below a folder, and their names behind its own; sorted, so that the order of rows
    /// does not vary.
    fn below(&self, folder: &[u8]) -> Vec<(Identity, Box<[u8]>)> {
        let rest = |name: &[u8]| {
            name.strip_prefix(folder).filter(|rest| rest.first() == Some(&b'/')).map(Box::from)
        };
        let below = self.names.iter().filter_map(|(name, identity)| Some((*identity, rest(name)?)));
        let mut below: Vec<_> = below.collect();
        below.sort_unstable();
        below
    }

    /// The program has ended: files without a name go.
    pub(super) fn end(&mut self, out: &mut Out<'_>) {
        for identity in self.unlinked.clone() {
            self.remove(identity, out);
        }
    }
}
