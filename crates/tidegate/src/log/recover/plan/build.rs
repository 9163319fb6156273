//! The state of files and paths as the records go by.

use super::{
    BTreeMap, BTreeSet, Content, Defined, Extent, Fate, FilePlan, Finding, Findings, HashMap,
    HashSet, Name, Noted, Operation, PathPlan, Plan, Renamed, Taken,
};
use crate::log::layout::RECORD_ALIGN_BYTES;
use crate::log::recover::extents::ExtentMap;
use crate::log::recover::gather::BATCH_BYTES;

/// The plan of `records`, which are in order.
pub(super) fn build(records: &[Noted], findings: Findings) -> Plan {
    let prepared = Prepared::of(records);
    let files = prepared.ids.iter().map(|_| File::default()).collect();
    let mut builder = Builder { prepared, files, findings, ..Builder::default() };
    for record in records {
        if !builder.prepared.void.contains(&record.position) {
            builder.apply(record);
        }
    }
    builder.into_plan()
}

/// What later records say of earlier ones.
#[derive(Default)]
struct Prepared {
    void: HashSet<u64>,
    /// Which file an id means: the ids that are defined with one identity are one file.
    index_of: HashMap<u64, usize>,
    ids: Vec<u64>,
    identities: HashMap<u64, usize>,
    /// By file: records before it are settled.
    retired: HashMap<usize, u64>,
    redefinitions: HashSet<u64>,
}

impl Prepared {
    fn of(records: &[Noted]) -> Self {
        let mut this = Self::default();
        for record in records {
            if let Operation::Void(position) = record.operation {
                // A record cannot know that a later one failed.
                if position < record.position {
                    this.void.insert(position);
                }
            }
        }
        let counts = |record: &&Noted| !this.void.contains(&record.position);
        let counting: Vec<_> = records.iter().filter(counts).collect();
        for record in &counting {
            if let Operation::Define(defined) = &record.operation {
                this.define(record, defined);
            }
        }
        for record in counting {
            if let (Operation::Retire, Some(&index)) =
                (&record.operation, this.index_of.get(&record.file))
            {
                this.retired.insert(index, record.position);
            }
        }
        this
    }

    fn define(&mut self, record: &Noted, defined: &Defined) {
        let known_id = self.index_of.get(&record.file).copied();
        let known_identity = self.identities.get(&defined.identity).copied();
        let index = match (known_id, known_identity) {
            (Some(file), Some(other)) if file != other => {
                self.redefinitions.insert(record.position);
                return;
            }
            (Some(index), _) | (None, Some(index)) => index,
            (None, None) => {
                self.ids.push(record.file);
                self.ids.len() - 1
            }
        };
        self.index_of.insert(record.file, index);
        self.identities.insert(defined.identity, index);
    }
}

#[derive(Default)]
struct File {
    identities: Vec<u64>,
    born: bool,
    mode: u32,
    uid: u32,
    gid: u32,
    known_paths: Vec<usize>,
    /// By path: made.
    names: BTreeMap<usize, bool>,
    displaced: bool,
    cut: Option<u64>,
    size: Option<u64>,
    size_min: u64,
    extents: ExtentMap,
    /// Writes that are not in the map yet, as long as there is nothing but writes.
    first_writes: Vec<Extent>,
    has_more_than_writes: bool,
    records: u64,
    /// The write that made the size what it is.
    size_from: Option<u64>,
    /// Positions of data of which a part counts.
    parted: Vec<u64>,
    /// Records that are too long to be copied in one piece.
    long: Vec<u64>,
}

#[derive(Default)]
struct Builder {
    prepared: Prepared,
    files: Vec<File>,
    paths: Vec<PathPlan>,
    path_indices: HashMap<Box<[u8]>, usize>,
    known: HashSet<(usize, usize)>,
    findings: Findings,
    undefined_records: u64,
}

/// The record that is being applied.
#[derive(Clone, Copy)]
struct At {
    position: u64,
    file: usize,
    settled: bool,
}

impl Builder {
    fn apply(&mut self, record: &Noted) {
        let position = record.position;
        if matches!(record.operation, Operation::Void(_) | Operation::Retire | Operation::Nothing) {
            return;
        }
        let Some(&file) = self.prepared.index_of.get(&record.file) else {
            self.apply_undefined(record);
            return;
        };
        if self.prepared.redefinitions.contains(&position) {
            self.findings.add(Finding::Redefined { position, file: record.file });
            return;
        }
        let retired = self.prepared.retired.get(&file);
        let settled = retired.is_some_and(|retired| position < *retired);
        if !settled {
            self.files[file].records += 1;
        }
        self.dispatch(record, At { position, file, settled });
    }

    /// A record of a file without definition. Only of a removed file is all known that matters.
    fn apply_undefined(&mut self, record: &Noted) {
        match &record.operation {
            Operation::Unlink(path, identity) if *identity != 0 => {
                let path = self.path(path);
                let at = At { position: record.position, file: usize::MAX, settled: false };
                self.take_identity(at, path, *identity);
            }
            _ => {
                self.undefined_records += 1;
                let (position, file) = (record.position, record.file);
                self.findings.add(Finding::Undefined { position, file });
            }
        }
    }

    fn dispatch(&mut self, record: &Noted, at: At) {
        match &record.operation {
            Operation::Define(defined) => self.define(at, defined, record.file),
            Operation::Link(path) => {
                let path = self.path(path);
                self.bind(at, path, !at.settled);
            }
            Operation::Rename(renamed) => self.rename(at, renamed),
            Operation::Unlink(path, _) => {
                let path = self.path(path);
                self.know(at.file, path);
                self.take(at, path);
            }
            data if !at.settled => self.files[at.file].change(record, data),
            _ => {}
        }
    }

    fn path(&mut self, path: &[u8]) -> usize {
        if let Some(&index) = self.path_indices.get(path) {
            return index;
        }
        let index = self.paths.len();
        let path: Box<[u8]> = path.into();
        self.path_indices.insert(path.clone(), index);
        self.paths.push(PathPlan { path, binding: None, taken: BTreeSet::new() });
        index
    }

    /// `file` was at `path` at some time.
    fn know(&mut self, file: usize, path: usize) {
        if self.known.insert((file, path)) {
            self.files[file].known_paths.push(path);
        }
    }

    fn define(&mut self, at: At, defined: &Defined, id: u64) {
        let path = self.path(&defined.path);
        let file = &mut self.files[at.file];
        let first = file.identities.is_empty();
        // Only what begins with the file's first definition, which its id is the position of, is all of it.
        if defined.born && at.position == id {
            file.born = !at.settled;
        }
        (file.mode, file.uid, file.gid) = (defined.mode, defined.uid, defined.gid);
        file.identities.retain(|identity| *identity != defined.identity);
        file.identities.push(defined.identity);
        let made = file.born && at.position == id;
        // A record took the file from there, so that this is a path that the writer remembered from before.
        let stale = !first && self.known.contains(&(at.file, path)) && !file.displaced;
        if !stale && self.paths[path].binding != Some(at.file) {
            self.bind(at, path, made);
        }
    }

    /// `path` names the file from here on.
    fn bind(&mut self, at: At, path: usize, made: bool) {
        self.displace(at, path);
        self.know(at.file, path);
        let file = &mut self.files[at.file];
        file.names.insert(path, made);
        self.paths[path].binding = Some(at.file);
        self.paths[path].taken.remove(&Taken::File(at.file));
    }

    /// Whoever else has `path` lost it in a way that the log does not have.
    fn displace(&mut self, at: At, path: usize) {
        let Some(other) = self.paths[path].binding.filter(|other| *other != at.file) else {
            return;
        };
        let file = &mut self.files[other];
        file.names.remove(&path);
        file.displaced = true;
        self.paths[path].binding = None;
        let path = text(&self.paths[path].path);
        self.findings.add(Finding::Displaced { position: at.position, path });
    }

    /// The record takes `path` from its file.
    fn take(&mut self, at: At, path: usize) {
        self.displace(at, path);
        self.paths[path].binding = None;
        self.files[at.file].names.remove(&path);
        if !at.settled {
            self.paths[path].taken.insert(Taken::File(at.file));
        }
    }

    fn rename(&mut self, at: At, renamed: &Renamed) {
        let (from, to) = (self.path(&renamed.from), self.path(&renamed.to));
        self.know(at.file, from);
        let same_file = self.prepared.identities.get(&renamed.replaced) == Some(&at.file);
        if from == to || same_file || self.paths[to].binding == Some(at.file) {
            // Two names of one file: the kernel leaves both.
            return;
        }
        self.take(at, from);
        if renamed.replaced != 0 {
            self.take_identity(at, to, renamed.replaced);
        }
        self.bind(at, to, !at.settled);
    }

    /// The record takes `path` from the file of this identity, whether or not the log has more of it.
    fn take_identity(&mut self, at: At, path: usize, identity: u64) {
        if let Some(&file) = self.prepared.identities.get(&identity) {
            self.know(file, path);
            // It counts for that file even where it is settled for its own.
            self.take(At { file, ..at }, path);
            return;
        }
        self.displace(at, path);
        if !at.settled {
            self.paths[path].taken.insert(Taken::Identity(identity));
        }
    }

    fn into_plan(mut self) -> Plan {
        self.files.iter_mut().for_each(File::map_first_writes);
        let unproved = self.files.iter().flat_map(File::unproved).collect();
        let files = self.files.into_iter().zip(self.prepared.ids);
        let files: Vec<_> = files.map(|(file, id)| file.into_plan(id)).collect();
        let extents = files.iter().flat_map(|file| &file.extents);
        let data = extents.filter(|extent| extent.content != Content::Zero);
        Plan {
            data_bytes: data.map(Extent::bytes).fold(0, u64::saturating_add),
            files,
            paths: self.paths,
            findings: self.findings,
            undefined_records: self.undefined_records,
            unproved,
        }
    }
}

impl File {
    fn change(&mut self, record: &Noted, operation: &Operation) {
        match *operation {
            Operation::Write { offset, bytes } if bytes > 0 => {
                let end = offset + u64::from(bytes); // Checked when the record was taken.
                let content = Content::Log(record.data_position());
                self.write(Extent { start: offset, end, content });
                if end > self.size_min {
                    (self.size_min, self.size_from) = (end, Some(record.position));
                }
                self.size = self.size.map(|size| size.max(end));
                if bytes as usize > BATCH_BYTES {
                    self.long.push(record.position);
                }
            }
            Operation::Zero { offset, len } => {
                let (end, content) = (offset + len, Content::Zero);
                self.map_first_writes();
                let extent = Extent { start: offset, end, content };
                self.extents.insert_noting(extent, &mut self.parted);
            }
            Operation::SetSize(size) => {
                self.map_first_writes();
                self.extents.cut(size, &mut self.parted);
                self.cut = Some(self.cut.map_or(size, |cut| cut.min(size)));
                self.size = Some(size);
                (self.size_min, self.size_from) = (size, None);
            }
            _ => {}
        }
    }

    fn write(&mut self, extent: Extent) {
        if self.has_more_than_writes {
            self.extents.insert_noting(extent, &mut self.parted);
        } else {
            self.first_writes.push(extent);
        }
    }

    /// Ends the time of nothing but writes.
    fn map_first_writes(&mut self) {
        if !self.has_more_than_writes {
            self.has_more_than_writes = true;
            self.extents = ExtentMap::of(&self.first_writes, &mut self.parted);
            self.first_writes = Vec::new();
        }
    }

    /// As of [`Plan::unproved`].
    fn unproved(&self) -> impl Iterator<Item = u64> {
        let parted = self.parted.iter().map(|data| data.saturating_sub(RECORD_ALIGN_BYTES));
        self.size_from.into_iter().chain(parted).chain(self.long.iter().copied())
    }

    fn into_plan(self, id: u64) -> FilePlan {
        let fate = match (self.names.is_empty(), self.displaced) {
            (false, _) => Fate::Named,
            (true, false) => Fate::Dead,
            (true, true) => Fate::Displaced,
        };
        FilePlan {
            id,
            identities: self.identities.into_iter().rev().collect(),
            born: self.born,
            mode: self.mode,
            uid: self.uid,
            gid: self.gid,
            known_paths: self.known_paths,
            names: self.names.into_iter().map(|(path, made)| Name { path, made }).collect(),
            fate,
            cut: self.cut,
            size: self.size,
            size_min: self.size_min,
            extents: self.extents.into_vec(),
            records: self.records,
        }
    }
}

fn text(path: &[u8]) -> String {
    String::from_utf8_lossy(path).into_owned()
}
