//! Recovery of names: decided once, written into the pool, then carried out as often as it takes.
//!
//! Rules (numbers as in docs/decisions/run-logs-what-was-synced.md, stage B):
//! - B6: what each name was in the log, and what the disk has at it, decides. What the log does not
//!   know at a name stays there.
//! - B7: a file is made again only if no commit has had it: its directory is as old as its record.
//! - B8: the decisions are durable before the first of them is carried out. Files are made whole,
//!   under reserved names; all names are set before one of them is removed.

use std::collections::{BTreeMap, BTreeSet};

use super::kernel::{Inode, Kernel, Slot, Tree};
use super::library::{Made, NameChange, Record};
use super::{NamesFault, directory_of};
use crate::random::Random;

/// Where a file that is to have a name comes from.
#[derive(Debug, Clone, Copy)]
enum Source {
    Disk,
    Log(Made),
}

/// What recovery will do.
#[derive(Debug, Clone, Default)]
struct Plan {
    /// Files that get names.
    files: BTreeMap<Inode, Source>,
    modes: BTreeMap<Inode, usize>,
    versions: BTreeMap<Inode, usize>,
    names: BTreeMap<Slot, Option<Inode>>,
}

/// The pool: what of it outlives a power cut.
#[derive(Debug, Clone, Default)]
pub(super) struct Pool {
    log: Vec<Record>,
    plan: Option<Plan>,
    /// The plan was carried out; only reserved names may be left.
    is_done: bool,
}

/// What the log says of a name.
#[derive(Debug, Default)]
struct Name {
    /// The files that it had in the course of the log.
    files: BTreeSet<Inode>,
    last: Option<Inode>,
    /// A file was renamed away from it last.
    was_renamed: Option<Inode>,
}

/// What the log says of all files.
#[derive(Debug, Default)]
struct Stories {
    made: BTreeMap<Inode, Made>,
    versions: BTreeMap<Inode, usize>,
    /// What files hold if their growth counts; a mark says so, or the disk.
    grown: BTreeMap<Inode, usize>,
    /// How many names files have at the end of the log.
    links: BTreeMap<Inode, usize>,
    names: BTreeMap<Slot, Name>,
}

impl Pool {
    /// A pool with these records.
    pub(super) fn with(log: Vec<Record>) -> Self {
        Self { log, ..Self::default() }
    }
}

impl Stories {
    fn of(log: &[Record], fault: NamesFault) -> Self {
        let mut left_at = BTreeMap::new();
        for (at, record) in log.iter().enumerate() {
            if let Record::Leave { inode } = record {
                left_at.insert(*inode, at);
            }
        }
        let mut this = Self::default();
        for (at, record) in log.iter().enumerate() {
            let (Record::Make { inode, .. }
            | Record::Cover { inode }
            | Record::Write { inode, .. }
            | Record::Mark { inode }
            | Record::Name { inode, .. }
            | Record::Leave { inode }) = *record;
            let has_left = left_at.get(&inode).is_some_and(|left_at| at <= *left_at);
            if !has_left || fault == NamesFault::LeaveIgnored {
                this.add(record, fault);
            }
        }
        this
    }

    fn add(&mut self, record: &Record, fault: NamesFault) {
        match *record {
            Record::Make { inode, made } => {
                self.made.insert(inode, made);
                self.versions.insert(inode, made.version);
                self.links.insert(inode, 1);
                self.set(made.slot, inode, Some(inode));
            }
            Record::Write { inode, version, grows } => {
                if !grows && !self.grown.contains_key(&inode) {
                    self.versions.insert(inode, version);
                } else {
                    self.grown.insert(inode, version);
                }
            }
            Record::Mark { inode } => {
                self.versions.extend(self.grown.remove(&inode).map(|version| (inode, version)));
            }
            Record::Name { inode, change, links } => {
                self.links.insert(inode, links);
                self.add_name(inode, change, fault);
            }
            Record::Cover { .. } | Record::Leave { .. } => {}
        }
    }

    fn add_name(&mut self, inode: Inode, change: NameChange, fault: NamesFault) {
        match change {
            NameChange::Link { to } => self.set(to, inode, Some(inode)),
            NameChange::Unlink { .. } if fault == NamesFault::UnlinkIgnored => {}
            NameChange::Unlink { from } => self.set(from, inode, None),
            NameChange::Rename { from, to, replaced } => {
                self.set(from, inode, None);
                self.names.entry(from).or_default().was_renamed = Some(inode);
                if let Some(links) = replaced.and_then(|replaced| self.links.get_mut(&replaced)) {
                    *links -= 1;
                }
                self.set(to, inode, Some(inode));
                self.names.entry(to).or_default().files.extend(replaced);
            }
        }
    }

    fn set(&mut self, slot: Slot, inode: Inode, last: Option<Inode>) {
        let name = self.names.entry(slot).or_default();
        name.files.insert(inode);
        name.last = last;
        name.was_renamed = None;
    }

    /// An outsider has changed the file's names: those that the log does not know are more or fewer
    /// than they were.
    fn was_moved(&self, disk: &Tree, inode: Inode) -> bool {
        let names = || self.names.iter().filter(|(_, name)| name.files.contains(&inode));
        let last = names().filter(|(_, name)| name.last == Some(inode)).count();
        let found = names().filter(|(slot, _)| disk.names.get(slot) == Some(&inode)).count();
        let others = self.links.get(&inode).map(|links| links.saturating_sub(last));
        others.is_some_and(|others| disk.links(inode) != others + found)
    }

    fn plan(&self, disk: &Tree, fault: NamesFault) -> Plan {
        let mut plan = Plan::default();
        for (slot, name) in &self.names {
            let found = disk.names.get(slot).copied();
            let is_known = found.is_none_or(|inode| name.files.contains(&inode));
            let keeps = !is_known && fault != NamesFault::TakenNameReplaced;
            let stays = name.was_renamed.is_some_and(|inode| self.was_moved(disk, inode));
            if keeps || stays || found == name.last {
                continue;
            }
            let Some(inode) = name.last else {
                plan.names.insert(*slot, None);
                continue;
            };
            if let Some(source) = self.source(disk, inode, fault) {
                plan.names.insert(*slot, Some(inode));
                plan.files.insert(inode, source);
            }
        }
        self.plan_contents(disk, &mut plan);
        plan
    }

    /// Where the file comes from; nowhere, if it is not for recovery to give it names.
    fn source(&self, disk: &Tree, inode: Inode, fault: NamesFault) -> Option<Source> {
        if disk.links(inode) > 0 {
            return (!self.was_moved(disk, inode)).then_some(Source::Disk);
        }
        // Rule B7.
        let is_unseen = |made: &&Made| {
            disk.changed_at[directory_of(made.slot)] <= made.directory_changed_at
                || fault == NamesFault::MadeAgainAfterCommit
        };
        self.made.get(&inode).filter(is_unseen).map(|made| Source::Log(*made))
    }

    fn plan_contents(&self, disk: &Tree, plan: &mut Plan) {
        let exists = |inode: &Inode| disk.links(*inode) > 0;
        for (inode, made) in self.made.iter().filter(|(inode, _)| exists(inode)) {
            plan.modes.insert(*inode, made.mode);
        }
        let is_wanted = |inode: &Inode| exists(inode) || plan.files.contains_key(inode);
        let versions = self.versions.iter().filter(|(inode, _)| is_wanted(inode));
        plan.versions = versions.map(|(inode, version)| (*inode, *version)).collect();
    }
}

/// One run of recovery: its calls succeed until the power is cut.
pub(super) struct Recovery<'a> {
    pub(super) kernel: &'a mut Kernel,
    pub(super) pool: &'a mut Pool,
    pub(super) random: &'a mut Random,
    pub(super) calls_left: usize,
    pub(super) fault: NamesFault,
}

/// The power was cut.
#[derive(Debug)]
pub(super) struct PowerCut;

impl Recovery<'_> {
    /// A call of the kernel, around which it may commit by itself.
    fn call(&mut self, call: impl FnOnce(&mut Kernel)) -> Result<(), PowerCut> {
        self.calls_left = self.calls_left.checked_sub(1).ok_or(PowerCut)?;
        call(self.kernel);
        if self.random.one_in(4) {
            self.kernel.commit();
        }
        Ok(())
    }

    /// Recovers, or is interrupted.
    pub(super) fn run(mut self) -> Result<(), PowerCut> {
        if self.pool.plan.is_none() || self.fault == NamesFault::DecidedTwice {
            let stories = Stories::of(&self.pool.log, self.fault);
            self.pool.plan = Some(stories.plan(self.kernel.present(), self.fault));
        }
        let plan = self.pool.plan.clone().unwrap_or_default();
        if !self.pool.is_done {
            self.reserve(&plan)?;
            self.write(&plan)?;
            self.call(Kernel::commit)?;
            self.set_names(&plan)?;
            self.call(Kernel::commit)?;
            self.pool.is_done = true;
        }
        for inode in plan.files.keys() {
            self.call(|kernel| kernel.release(*inode))?;
        }
        self.call(Kernel::commit)?;
        *self.pool = Pool::default();
        Ok(())
    }

    fn reserve(&mut self, plan: &Plan) -> Result<(), PowerCut> {
        for (inode, source) in &plan.files {
            if self.kernel.present().reserved.contains_key(inode) {
                continue;
            }
            let Source::Log(made) = source else {
                self.call(|kernel| kernel.reserve(*inode))?;
                continue;
            };
            let version = plan.versions.get(inode).copied().unwrap_or(made.version);
            if self.fault == NamesFault::NamedBeforeWhole {
                let mut made_as = 0;
                self.call(|kernel| made_as = kernel.make_empty(*inode, made.mode))?;
                self.call(|kernel| kernel.write(made_as, version))?;
                self.call(|kernel| {
                    kernel.sync(made_as, false);
                })?;
            } else {
                self.call(|kernel| {
                    kernel.make_reserved(*inode, made.mode, version);
                })?;
            }
        }
        Ok(())
    }

    fn write(&mut self, plan: &Plan) -> Result<(), PowerCut> {
        for (inode, mode) in &plan.modes {
            self.call(|kernel| kernel.set_mode(*inode, *mode))?;
        }
        let exists = |inode: &Inode| !matches!(plan.files.get(inode), Some(Source::Log(_)));
        for (inode, version) in plan.versions.iter().filter(|(inode, _)| exists(inode)) {
            self.call(|kernel| kernel.write(*inode, *version))?;
            self.call(|kernel| {
                kernel.sync(*inode, false);
            })?;
        }
        Ok(())
    }

    fn set_names(&mut self, plan: &Plan) -> Result<(), PowerCut> {
        for (slot, inode) in &plan.names {
            let reserved = &self.kernel.present().reserved;
            match inode.map(|inode| reserved.get(&inode).copied()) {
                Some(Some(inode)) => self.call(|kernel| kernel.link(inode, *slot))?,
                // The reserved name was durable before.
                Some(None) => {}
                None => self.call(|kernel| kernel.unlink(*slot))?,
            }
        }
        Ok(())
    }
}
