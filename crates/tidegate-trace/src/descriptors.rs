//! Descriptors: the file of each, and the offset of its next read or write.
//!
//! As in the kernel, a process's table maps a descriptor to an open file description, which has the
//! position. `dup` and `fork` create more descriptors for one description.

use rustc_hash::FxHashMap;

use super::bad::{Bad, Result};
use super::event::{FileId, Op};
use super::fields::{has_flag, range};
use super::files::Files;
use super::out::{Out, Way};

/// Maximum number of descriptors of all processes at a time.
const MAX_DESCRIPTORS: usize = 1 << 20;

/// An open file description.
#[derive(Debug, Clone, Default)]
pub(super) struct Open {
    /// The file, or `None` if the description is not storage: a pipe, a socket, a terminal.
    pub(super) file: Option<FileId>,
    /// The path of a directory whose descriptor may be the start of relative paths.
    pub(super) folder: Option<Box<[u8]>>,
    /// Offset of the next read or write, if the trace shows it.
    pub(super) position: Option<u64>,
    /// Every write goes to the end of the file.
    pub(super) append: bool,
    /// Every write is followed by a sync.
    pub(super) sync: bool,
}

impl Open {
    /// Returns the description of `file`, opened at its start.
    pub(super) fn at_start(file: FileId) -> Self {
        Self { file: Some(file), position: Some(0), ..Self::default() }
    }
}

/// The effect of opening a file, and how later writes behave.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Opening {
    pub(super) makes: Makes,
    /// Every write goes to the end of the file.
    pub(super) append: bool,
    /// Every write is followed by a sync.
    pub(super) sync: bool,
}

/// The effect of opening on a file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Makes {
    #[default]
    Nothing,
    /// The file is a directory.
    Folder,
    /// The file is truncated.
    Empty,
    /// The file is new: it has no bytes.
    New,
    /// The file is new. A file that the trace has shown under this path was removed.
    Anew,
}

impl Opening {
    /// Returns the effect of the flags of `open`, joined by `|`.
    pub(super) fn of_flags(flags: &[u8]) -> Self {
        let has = |flag: &[u8]| has_flag(flags, flag);
        let makes = if has(b"O_DIRECTORY") {
            Makes::Folder
        } else if has(b"O_TRUNC") {
            Makes::Empty
        } else if has(b"O_CREAT") && has(b"O_EXCL") {
            Makes::New
        } else {
            Makes::Nothing
        };
        Self { makes, append: has(b"O_APPEND"), sync: has(b"O_SYNC") || has(b"O_DSYNC") }
    }
}

#[derive(Debug, Clone, Copy)]
struct Descriptor {
    open: usize,
    close_on_exec: bool,
}

/// The descriptor tables of all processes.
#[derive(Debug)]
pub(super) struct Descriptors {
    tables: FxHashMap<u32, FxHashMap<i64, Descriptor>>,
    /// Open file descriptions and their descriptor counts; `free` has the unused indices.
    open: Vec<(Open, u32)>,
    free: Vec<usize>,
    count: usize,
    pub(super) files: Files,
}

impl Descriptors {
    /// Returns empty tables; `separator` separates the names of directories in a path.
    pub(super) fn new(separator: u8) -> Self {
        let files = Files::new(separator);
        Self { tables: FxHashMap::default(), open: Vec::new(), free: Vec::new(), count: 0, files }
    }

    /// Returns a description of the file at `path`, after the effect of opening it.
    pub(super) fn open_named(
        &mut self,
        path: &[u8],
        Opening { makes, append, sync }: Opening,
        out: &mut Out,
    ) -> Result<Open> {
        let was_known = self.files.known(path).is_some();
        let file = self.files.named(path)?;
        match makes {
            Makes::Nothing => {}
            Makes::Folder => self.files.set_folder(file),
            Makes::Anew if was_known => self.files.resize(file, 0, out)?,
            Makes::Empty => self.files.resize(file, 0, out)?,
            Makes::New | Makes::Anew => self.files.set_len(file, Some(0)),
        }
        Ok(Open { append, sync, ..Open::at_start(file) })
    }

    /// Makes descriptor `number` of `table` refer to `open`, after closing its former description.
    pub(super) fn open(
        &mut self,
        (table, number): (u32, i64),
        open: Open,
        close_on_exec: bool,
        out: &mut Out,
    ) -> Result<()> {
        self.close((table, number), out);
        if self.count >= MAX_DESCRIPTORS {
            return Err(Bad::Tables);
        }
        if let Some(file) = open.file {
            self.files.opened(file);
        }
        let open = if let Some(free) = self.free.pop() {
            self.open[free] = (open, 1);
            free
        } else {
            self.open.push((open, 1));
            self.open.len() - 1
        };
        self.insert((table, number), Descriptor { open, close_on_exec });
        Ok(())
    }

    fn insert(&mut self, (table, number): (u32, i64), descriptor: Descriptor) {
        self.count += 1;
        self.tables.entry(table).or_default().insert(number, descriptor);
    }

    /// Closes a descriptor. Ignores an unknown descriptor, which no event needs.
    pub(super) fn close(&mut self, (table, number): (u32, i64), out: &mut Out) {
        let table = self.tables.get_mut(&table);
        if let Some(descriptor) = table.and_then(|table| table.remove(&number)) {
            self.release(descriptor, out);
        }
    }

    fn release(&mut self, descriptor: Descriptor, out: &mut Out) {
        self.count -= 1;
        let (open, uses) = &mut self.open[descriptor.open];
        *uses -= 1;
        if *uses == 0 {
            let closed = std::mem::take(open);
            self.free.push(descriptor.open);
            if let Some(file) = closed.file {
                self.files.closed(file, out);
            }
        }
    }

    /// Makes descriptor `to` a duplicate of `from`.
    pub(super) fn duplicate(
        &mut self,
        table: u32,
        (from, to): (i64, i64),
        close_on_exec: bool,
        out: &mut Out,
    ) -> Result<()> {
        let open = self.find(table, from)?.open;
        if from == to {
            return Ok(());
        }
        if self.count >= MAX_DESCRIPTORS {
            return Err(Bad::Tables);
        }
        self.open[open].1 += 1;
        self.close((table, to), out);
        self.insert((table, to), Descriptor { open, close_on_exec });
        Ok(())
    }

    /// Copies to table `to` the descriptors of table `from` that it lacks.
    pub(super) fn inherit(&mut self, from: u32, to: u32) -> Result<()> {
        let mut inherited = self.tables.get(&from).cloned().unwrap_or_default();
        let own = self.tables.entry(to).or_default();
        inherited.retain(|number, _| !own.contains_key(number));
        if self.count + inherited.len() > MAX_DESCRIPTORS {
            return Err(Bad::Tables);
        }
        self.count += inherited.len();
        for descriptor in inherited.values() {
            self.open[descriptor.open].1 += 1;
        }
        own.extend(inherited);
        Ok(())
    }

    /// Closes the descriptors of `table` that `which` selects, by number and close-on-exec.
    pub(super) fn close_all(
        &mut self,
        table: u32,
        which: impl Fn(i64, bool) -> bool,
        out: &mut Out,
    ) {
        let Some(descriptors) = self.tables.get_mut(&table) else { return };
        let is_closed = |number: &i64, it: &mut Descriptor| which(*number, it.close_on_exec);
        let mut closed: Vec<_> = descriptors.extract_if(is_closed).collect();
        if descriptors.is_empty() {
            self.tables.remove(&table);
        }
        closed.sort_unstable_by_key(|(number, _)| *number);
        for (_, descriptor) in closed {
            self.release(descriptor, out);
        }
    }

    fn find(&self, table: u32, number: i64) -> Result<Descriptor> {
        let found = self.tables.get(&table).and_then(|table| table.get(&number));
        found.copied().ok_or(Bad::Descriptor(number))
    }

    pub(super) fn get(&self, (table, number): (u32, i64)) -> Result<&Open> {
        Ok(&self.open[self.find(table, number)?.open].0)
    }

    pub(super) fn get_mut(&mut self, (table, number): (u32, i64)) -> Result<&mut Open> {
        let found = self.find(table, number)?;
        Ok(&mut self.open[found.open].0)
    }

    pub(super) fn set_close_on_exec(&mut self, (table, number): (u32, i64), on_exec: bool) {
        let table = self.tables.get_mut(&table);
        if let Some(descriptor) = table.and_then(|table| table.get_mut(&number)) {
            descriptor.close_on_exec = on_exec;
        }
    }

    /// Returns the file and offset of a transfer: `offset`, or the descriptor's position, or the
    /// end of the file for an append. Returns `None` if the descriptor is not storage.
    pub(super) fn start(
        &self,
        descriptor: (u32, i64),
        way: Way,
        offset: Option<u64>,
    ) -> Result<Option<(FileId, u64)>> {
        let open = self.get(descriptor)?;
        let Some(file) = open.file else { return Ok(None) };
        let start = if open.append && way == Way::Write {
            self.files.len_bytes(file).ok_or(Bad::Append(descriptor.1))?
        } else {
            offset.or(open.position).ok_or(Bad::Position(descriptor.1))?
        };
        Ok(Some((file, start)))
    }

    /// Emits a transfer of `len` bytes at `offset`, or at the position, which then advances.
    pub(super) fn transfer(
        &mut self,
        descriptor: (u32, i64),
        way: Way,
        offset: Option<u64>,
        len: u64,
        out: &mut Out,
    ) -> Result<()> {
        let Some((file, start)) = self.start(descriptor, way, offset)? else { return Ok(()) };
        let (start, len) = range(start, len)?;
        out.transfer(way, file, start, len)?;
        if way == Way::Write && len > 0 {
            self.files.reaches(file, start + len);
            if self.get(descriptor)?.sync {
                out.push(Op::Sync { file });
            }
        }
        if offset.is_none() {
            self.get_mut(descriptor)?.position = Some(start + len);
        }
        Ok(())
    }

    /// Emits a sync of a descriptor's file.
    pub(super) fn sync(&mut self, descriptor: (u32, i64), out: &mut Out) -> Result<()> {
        if let Some(file) = self.get(descriptor)?.file {
            out.push(Op::Sync { file });
        }
        Ok(())
    }
}
