//! Recovery of names: decided once, written into the pool, then carried out as often as necessary.
//!
//! The product makes the decisions (rules B6 and B7 of docs/decisions/run-logs-what-was-synced.md,
//! stage B): [`NameStories::decide`]. This model executes them by rule B8: the decisions are
//! durable before the first one is carried out, files are made whole under reserved names, and all
//! names are set before any is removed.

use std::collections::BTreeMap;

use tidegate::log::recover::{Decisions, DiskNames, NameFact, NameStories, Source};

use super::library::{Made, NameChange, Record};
use super::{NamesFault, directory_of};
use crate::files::{Inode, Kernel, Slot, Tree};
use crate::random::Random;

/// The steps that recovery will take.
#[derive(Debug, Clone, Default)]
struct Plan {
    decisions: Decisions<Slot, Inode>,
    made: BTreeMap<Inode, Made>,
    modes: BTreeMap<Inode, usize>,
    versions: BTreeMap<Inode, u8>,
}

/// The part of the pool that survives a power cut.
#[derive(Debug, Clone, Default)]
pub(super) struct Pool {
    log: Vec<Record>,
    plan: Option<Plan>,
    /// Whether the plan was carried out, except that reserved names may be left.
    is_done: bool,
}

/// The log's records by file.
#[derive(Debug, Default)]
struct Stories {
    made: BTreeMap<Inode, Made>,
    versions: BTreeMap<Inode, u8>,
    /// The content of files if their growth counts, because of a mark or the disk.
    grown: BTreeMap<Inode, u8>,
    names: NameStories<Slot, Inode>,
}

/// The names on the disk, as recovery asks for them.
struct Disk<'a> {
    tree: &'a Tree,
    stories: &'a Stories,
    fault: NamesFault,
}

impl DiskNames<Slot, Inode> for Disk<'_> {
    fn at(&self, slot: &Slot) -> Option<Inode> {
        let found = *self.tree.names.get(slot)?;
        let names = &self.stories.names;
        if self.fault != NamesFault::TakenNameReplaced || names.knows(slot, &found) {
            return Some(found);
        }
        // The fault takes the file for a former one of this slot.
        let is_former = |file: &Inode| names.knows(slot, file) && names.last_of(slot) != Some(file);
        names.files().into_iter().copied().find(is_former)
    }

    fn links(&self, inode: &Inode) -> u64 {
        self.tree.links(*inode) as u64
    }

    /// Returns whether the disk cannot have had the file (rule B7): its directory is unchanged.
    fn is_unseen(&self, inode: &Inode) -> bool {
        self.fault == NamesFault::MadeAgainAfterCommit
            || self.stories.made.get(inode).is_some_and(|made| {
                self.tree.changed_at[directory_of(made.slot)] <= made.directory_changed_at
            })
    }
}

fn fact_of(change: NameChange) -> NameFact<Slot, Inode> {
    match change {
        NameChange::Link { to } => NameFact::Linked(to),
        NameChange::Unlink { from } => NameFact::Unlinked(from),
        NameChange::Rename { from, to, replaced } => NameFact::Renamed { from, to, replaced },
    }
}

impl Pool {
    /// Makes a pool with these records.
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
                self.grown.remove(&inode);
                self.names.add(&inode, NameFact::Made(made.slot), 1);
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
                let is_unlink = matches!(change, NameChange::Unlink { .. });
                if !is_unlink || fault != NamesFault::UnlinkIgnored {
                    self.names.add(&inode, fact_of(change), links as u64);
                }
            }
            Record::Cover { .. } | Record::Leave { .. } => {}
        }
    }

    fn plan(&self, tree: &Tree, fault: NamesFault) -> Plan {
        let decisions = self.names.decide(&Disk { tree, stories: self, fault });
        // Encodes and decodes them, as the product does in its pool.
        let bits = self.names.to_bits(&decisions);
        let decisions = self.names.from_bits(&bits).unwrap_or_default();
        let mut plan = Plan { decisions, made: self.made.clone(), ..Plan::default() };
        self.plan_contents(tree, &mut plan);
        plan
    }

    fn plan_contents(&self, disk: &Tree, plan: &mut Plan) {
        let exists = |inode: &Inode| disk.links(*inode) > 0;
        for (inode, made) in self.made.iter().filter(|(inode, _)| exists(inode)) {
            plan.modes.insert(*inode, made.mode);
        }
        let is_wanted = |inode: &Inode| exists(inode) || plan.decisions.files.contains_key(inode);
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
    /// Makes a call of the kernel, which may commit by itself afterwards.
    fn call(&mut self, call: impl FnOnce(&mut Kernel)) -> Result<(), PowerCut> {
        self.calls_left = self.calls_left.checked_sub(1).ok_or(PowerCut)?;
        call(self.kernel);
        if self.random.one_in(4) {
            self.kernel.commit();
        }
        Ok(())
    }

    /// Recovers, unless a power cut interrupts.
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
        for inode in plan.decisions.files.keys() {
            self.call(|kernel| kernel.release(*inode))?;
        }
        self.call(Kernel::commit)?;
        *self.pool = Pool::default();
        Ok(())
    }

    fn reserve(&mut self, plan: &Plan) -> Result<(), PowerCut> {
        for (inode, source) in &plan.decisions.files {
            if self.kernel.present().reserved.contains_key(inode) {
                continue;
            }
            let made = plan.made.get(inode).filter(|_| *source == Source::Log);
            let Some(made) = made else {
                self.call(|kernel| kernel.reserve(*inode))?;
                continue;
            };
            let version = plan.versions.get(inode).copied().unwrap_or(made.version);
            if self.fault == NamesFault::NamedBeforeWhole {
                let mut made_as = 0;
                self.call(|kernel| made_as = kernel.make_empty(*inode, made.mode))?;
                self.call(|kernel| kernel.write(made_as, 0, &[version]))?;
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
        let exists = |inode: &Inode| plan.decisions.files.get(inode) != Some(&Source::Log);
        for (inode, version) in plan.versions.iter().filter(|(inode, _)| exists(inode)) {
            self.call(|kernel| kernel.write(*inode, 0, &[*version]))?;
            self.call(|kernel| {
                kernel.sync(*inode, false);
            })?;
        }
        Ok(())
    }

    fn set_names(&mut self, plan: &Plan) -> Result<(), PowerCut> {
        for (slot, inode) in &plan.decisions.names {
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
