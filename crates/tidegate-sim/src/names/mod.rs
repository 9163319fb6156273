//! New files and names under `tidegate run` (stage B): an executable model of the rules.
//!
//! One history of a program's calls is played on two kernels: on one beside the log, whose syncs
//! the log answers where the rules let it, and on a *twin* whose syncs are all real. Events from
//! outside happen to both. At the end the power is cut, also in the middle of the last call.
//! Recovery runs, interrupted at random, and must leave a state that the twin could have left. The
//! rules are in docs/decisions/run-logs-what-was-synced.md.
//!
//! - `library.rs`: the syncs that the log answers, and its records;
//! - `recovery.rs`: recovery from the records;
//! - `judge.rs`: the allowed states.
//!
//! The model of bytes and sizes ([`run`](crate::run)) covers ranges, sizes and torn records.
//! Covered on paper only: concurrency, reused inode numbers, directories that are moved, and
//! outsiders that remove one of two names or take a name that the log knows.

mod judge;
mod library;
mod recovery;

use std::collections::BTreeSet;

use tidegate::log::cover::Sync;

use self::judge::{Facts, judge};
use self::library::{Both, Called, Library, NameChange};
use self::recovery::{Pool, Recovery};
use crate::files::{DIRECTORIES, Inode, Kernel, NAMES, Slot, directory_of};
use crate::random::Random;

const STEPS: usize = 24;
/// The files at the beginning; each has the content of version 1.
const INITIAL_FILES: usize = 2;
/// Slots that programs of the tree use.
const SLOTS: usize = (DIRECTORIES - 1) * NAMES;

/// A planted fault of the library, the supervisor or recovery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NamesFault {
    /// Nothing.
    None,
    /// A name is recorded of a file that the log does not have.
    NameOfPlainFile,
    /// A name is recorded while something else is pending.
    NameWhilePending,
    /// A record answers a sync although something else is pending.
    MadeWhilePending,
    /// A record makes a file again that was renamed before its sync.
    MadeAfterRename,
    /// A file with another name is renamed over by a record.
    ReplacedLives,
    /// A change of names that is not recorded touches a file that has names in the log.
    TouchedWithoutLeave,
    /// Attributes are recorded while something else is pending.
    AttributesWhilePending,
    /// A sync behind recorded attributes is answered though something else is pending.
    AttributesForgotten,
    /// A real sync that has given the file no blocks is taken for a commit of all pending changes.
    CommitAssumed,
    /// A file that no real sync has made durable leaves without one.
    LeftUnsynced,
    /// A file with an open stream is handled as one without.
    SealIgnored,
    /// A file is covered when its stream is closed, whatever that has written.
    UnsealedUnseen,
    /// A record makes a file that is mapped.
    MadeThoughMapped,
    /// A record makes a file while the program writes in ways that no hook sees.
    MadeThoughUnseen,
    /// A record makes a file again that has more than a record says.
    MadeThoughSpecial,
    /// The sync of a directory is answered though a file was created that no record has.
    DirectoryIgnoresCreation,
    /// Records are retired before the journal was committed.
    RetiredWithoutCommit,
    /// Recovery makes a file again that was unlinked.
    UnlinkIgnored,
    /// Recovery applies the records of a file from before it left.
    LeaveIgnored,
    /// Recovery replaces a file that the log does not expect at its name.
    TakenNameReplaced,
    /// Recovery makes a file again that an outsider has removed.
    MadeAgainAfterCommit,
    /// A recovery that was interrupted decides anew.
    DecidedTwice,
    /// Recovery names a file before its content is written.
    NamedBeforeWhole,
}

struct Life {
    both: Both,
    library: Library,
    facts: Facts,
    /// The last version: one byte, which is the whole content of a written file.
    version: u8,
    /// Files are mapped, flags are set, and the program may write in ways that no hook sees. Only
    /// few histories have this, so that rare orders of other steps stay frequent enough.
    is_unusual: bool,
    /// Files that an outsider has given another name: programs of the tree only unlink those.
    moved: BTreeSet<Inode>,
    /// The steps so far, for the report of a failure.
    steps: Vec<String>,
}

/// Plays the history of `seed`, cuts the power at its end, recovers and judges.
///
/// # Errors
/// Describes a state that no kernel with real syncs could have left.
pub fn play(seed: u64, fault: NamesFault) -> Result<(), String> {
    let mut random = Random::new(seed);
    let kernel = Kernel::new(random.one_in(2), INITIAL_FILES, &[1]);
    let both = Both { twin: kernel.clone(), kernel };
    let mut life = Life {
        both,
        library: Library::new(fault),
        facts: Facts::default(),
        version: 1,
        is_unusual: random.one_in(4),
        moved: BTreeSet::new(),
        steps: Vec::new(),
    };
    let steps = random.below(STEPS) + 1;
    (1..steps).for_each(|_| life.step(&mut random));
    life.cut_in_a_step(&mut random);
    life.both.kernel.write_back_some(&mut random);
    life.recover(&mut random, fault)
        .and_then(|found| judge(&life.both.twin, &life.facts, &found))
        .map_err(|what| {
            format!("seed {seed:#x}, {fault:?}: {what}; after {}", life.steps.join(", "))
        })
}

impl Life {
    /// Makes the last step, which the power cut may interrupt before or after the fence of one of
    /// its records, so that no part of the step was acknowledged.
    fn cut_in_a_step(&mut self, random: &mut Random) {
        let (promised, facts) = (self.both.twin.committed, self.facts.clone());
        let records = self.library.log.len();
        self.library.at_records = Some(Vec::new());
        self.step(random);
        let mut at_records = self.library.at_records.take().unwrap_or_default();
        if random.one_in(2) || at_records.is_empty() {
            return;
        }
        self.steps.push("which the power cut interrupts".to_owned());
        let number = random.below(at_records.len());
        self.both.kernel = at_records.swap_remove(number);
        self.library.log.truncate(records + number + random.below(2));
        self.both.twin.committed = promised;
        self.facts.synced = facts.synced;
        self.facts.existing = facts.existing;
    }

    /// Makes one step of a program, an outsider or the supervisor.
    fn step(&mut self, random: &mut Random) {
        match random.below(if self.is_unusual { 24 } else { 22 }) {
            0..3 => self.create(random),
            3 => self.write(random),
            4 => self.set_mode(random),
            5..9 => self.sync(random),
            9..11 => self.sync_directory(random),
            11..17 => self.change_names(random),
            17 => {
                self.steps.push("other change".to_owned());
                self.both.each(Kernel::change_other);
                self.library.other_changed(&self.both.kernel);
            }
            18 => self.happen_outside(random),
            19 => self.toggle_stream(random),
            20 => self.write_unseen(random),
            22 => self.toggle_mapping(random),
            23 => self.change_unusually(random),
            _ => {
                let until = random.below(self.library.log.len() + 1);
                self.steps.push(format!("clean, retire {until} records"));
                self.library.clean(&mut self.both, until);
            }
        }
    }

    fn names(&self) -> Vec<(Slot, Inode)> {
        let names = self.both.kernel.present().names.iter();
        names.map(|(slot, inode)| (*slot, *inode)).filter(|(slot, _)| *slot < SLOTS).collect()
    }

    fn pick_name(&self, random: &mut Random) -> Option<(Slot, Inode)> {
        let names = self.names();
        // Mostly the newest file: deliveries and replacements are short.
        let newest = names.iter().max_by_key(|(_, inode)| *inode).copied();
        newest.map(|newest| if random.one_in(2) { newest } else { *random.pick(&names) })
    }

    fn pick_free(&self, random: &mut Random, slots: std::ops::Range<Slot>) -> Option<Slot> {
        let is_free = |slot: &Slot| !self.both.kernel.present().names.contains_key(slot);
        let free: Vec<Slot> = slots.filter(is_free).collect();
        (!free.is_empty()).then(|| *random.pick(&free))
    }

    fn create(&mut self, random: &mut Random) {
        let Some(slot) = self.pick_free(random, 0..SLOTS) else { return };
        let inode = self.both.kernel.create(slot);
        self.both.twin.create(slot);
        self.note_named(inode);
        let is_seen = !random.one_in(8);
        self.steps.push(format!("create {inode} at {slot}, seen {is_seen}"));
        self.library.created(&self.both.kernel, inode, slot, is_seen);
        if random.one_in(2) {
            self.write_to(inode);
        }
    }

    fn note_named(&mut self, inode: Inode) {
        let change = self.both.twin.changes();
        self.facts.named_at.entry(inode).or_default().push(change);
    }

    fn write(&mut self, random: &mut Random) {
        if let Some((_, inode)) = self.pick_name(random) {
            self.write_to(inode);
        }
    }

    fn write_to(&mut self, inode: Inode) {
        self.version += 1;
        let version = self.version;
        self.steps.push(format!("write {inode}, version {version}"));
        self.library.write(&mut self.both, inode, version);
        self.change_content(inode, version);
    }

    fn toggle_stream(&mut self, random: &mut Random) {
        let Some((_, inode)) = self.pick_name(random) else { return };
        self.steps.push(format!("open or close a stream on {inode}"));
        self.library.toggle_stream(&mut self.both, inode);
    }

    fn toggle_mapping(&mut self, random: &mut Random) {
        let Some((_, inode)) = self.pick_name(random) else { return };
        self.steps.push(format!("map or unmap {inode}"));
        self.library.toggle_mapping(&mut self.both, inode);
    }

    /// Sets flags of a file; or begins or ends to write in ways that no hook sees.
    fn change_unusually(&mut self, random: &mut Random) {
        if random.one_in(4) {
            self.steps.push("begin or end unseen writes".to_owned());
            return self.library.toggle_unseen(&mut self.both);
        }
        let Some((_, inode)) = self.pick_name(random) else { return };
        self.steps.push(format!("set extended flags of {inode}"));
        self.library.set_extended(&mut self.both, inode);
    }

    /// Makes a write that the library does not see.
    fn write_unseen(&mut self, random: &mut Random) {
        let mut inodes: Vec<Inode> = self.names().into_iter().map(|(_, inode)| inode).collect();
        inodes.retain(|inode| self.library.may_change_unseen(*inode));
        if inodes.is_empty() {
            return;
        }
        let inode = *random.pick(&inodes);
        self.version += 1;
        self.steps.push(format!("write {inode} unseen, version {}", self.version));
        self.change_content(inode, self.version);
    }

    fn change_content(&mut self, inode: Inode, version: u8) {
        self.both.each(|kernel| kernel.write(inode, 0, &[version]));
        let changes = self.both.twin.changes();
        let first = if inode < INITIAL_FILES { 0 } else { changes };
        self.facts.written_at.entry(inode).or_insert(first);
    }

    fn set_mode(&mut self, random: &mut Random) {
        let Some((_, inode)) = self.pick_name(random) else { return };
        let mode = self.steps.len() + 1;
        self.steps.push(format!("set mode of {inode} to {mode}"));
        self.library.set_mode(&mut self.both, inode, mode);
    }

    fn sync(&mut self, random: &mut Random) {
        let Some((_, inode)) = self.pick_name(random) else { return };
        let (data_only, covers) = (random.one_in(3), random.one_in(2));
        self.steps.push(format!("sync {inode}, data only {data_only}, covers {covers}"));
        self.both.twin.sync(inode, data_only);
        let wanted = if data_only { Sync::Data } else { Sync::All };
        self.library.sync(&mut self.both, inode, wanted, covers);
        self.facts.synced.insert(inode, self.both.twin.version(inode));
        self.facts.existing.insert(inode);
    }

    fn sync_directory(&mut self, random: &mut Random) {
        let directory = random.below(DIRECTORIES - 1);
        let is_answered = self.library.answers_directory();
        self.steps.push(format!("sync directory {directory}, answered {is_answered}"));
        self.both.twin.sync_directory(directory);
        if !is_answered && self.both.kernel.sync_directory(directory) {
            // The twin may have had nothing to commit, and may commit by itself.
            self.both.twin.commit();
        }
        let names = self.names().into_iter();
        let children = names.filter(|(slot, _)| directory_of(*slot) == directory);
        self.facts.existing.extend(children.map(|(_, inode)| inode));
    }

    fn change_names(&mut self, random: &mut Random) {
        let Some((from, inode)) = self.pick_name(random) else { return };
        let to = random.below(SLOTS);
        let replaced = self.both.kernel.present().names.get(&to).copied();
        let change = match random.below(4) {
            _ if self.moved.contains(&inode) => NameChange::Unlink { from },
            0 => NameChange::Unlink { from },
            1 if replaced.is_none() => NameChange::Link { to },
            _ if replaced != Some(inode) => NameChange::Rename { from, to, replaced },
            _ => return,
        };
        let called = if random.one_in(8) { Called::Otherwise } else { Called::Simply };
        self.steps.push(format!("{change:?} of {inode}, called {called:?}"));
        self.library.change_names(&mut self.both, inode, (change, called));
        self.note_named(inode);
    }

    /// Makes an unwatched program change files durably, or the kernel act by itself.
    fn happen_outside(&mut self, random: &mut Random) {
        let Some((slot, inode)) = self.pick_name(random) else { return };
        let is_only = self.both.kernel.present().links(inode) == 1;
        let cur = self.pick_free(random, SLOTS..SLOTS + NAMES);
        match random.below(4) {
            0 => {
                self.steps.push(format!("outside: write back {inode}"));
                return self.both.each(|kernel| kernel.write_back(inode));
            }
            1 if is_only => {
                self.steps.push(format!("outside: unlink {inode} at {slot}"));
                self.both.each(|kernel| kernel.unlink(slot));
            }
            2 if cur.is_some() => {
                let to = cur.unwrap_or(slot);
                self.steps.push(format!("outside: rename {inode} from {slot} to {to}"));
                self.both.each(|kernel| kernel.rename(inode, slot, to));
                self.note_named(inode);
                self.moved.insert(inode);
            }
            _ => self.steps.push("outside: commit".to_owned()),
        }
        self.both.each(Kernel::commit);
        self.facts.existing.extend(self.both.kernel.present().names.values());
    }

    /// Recovers after the power cut; further power cuts interrupt the recovery, which is repeated.
    fn recover(&self, random: &mut Random, fault: NamesFault) -> Result<Kernel, String> {
        let mut kernel = self.both.kernel.clone();
        let mut pool = Pool::with(self.library.log.clone());
        for round in 0..4 {
            kernel.crash();
            let calls_left = if round == 3 { usize::MAX } else { random.below(16) };
            let recovery = Recovery {
                kernel: &mut kernel,
                pool: &mut pool,
                random: &mut *random,
                calls_left,
                fault,
            };
            let is_whole = recovery.run().is_ok();
            if round == 3 && !is_whole {
                return Err("recovery does not end".to_owned());
            }
            kernel.write_back_some(random);
        }
        kernel.crash();
        Ok(kernel)
    }
}
