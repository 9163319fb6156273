//! The facts that the rules of `run` ask for, and the code that executes their decisions, on the
//! model of a kernel. The rules are the product's ([`tidegate::log::cover`]); faults are planted in
//! facts.
//!
//! A file's *story* is its part of the log. A file with an open stream has no story except the one
//! record that makes it: it is sealed.

use std::collections::BTreeMap;

use tidegate::log::cover::{
    self, AdmissionFacts, BeginAction, BeginFacts, DirectoryFacts, FileFacts, LeaveAction,
    MadeFacts, MakeFacts, RecordFacts, ReplacedFacts, Sync, SyncAction, SyncFacts, SyncLookups,
    answers_directory, decide_admission, decide_begin, decide_leave, decide_sync, fit_record,
    has_all, leaves_unrecorded, may_record_name, may_replace, may_seal, may_unseal,
    stands_for_sync, stays_by_sync,
};

use super::{NamesFault, directory_of};
use crate::files::{Inode, Kernel, Slot};

/// A change of names among covered files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NameChange {
    Link { to: Slot },
    Unlink { from: Slot },
    Rename { from: Slot, to: Slot, replaced: Option<Inode> },
}

impl NameChange {
    /// Returns the number of names of the file after the change, from the number before.
    fn links_after(self, links: usize) -> usize {
        match self {
            Self::Link { .. } => links + 1,
            Self::Unlink { .. } => links - 1,
            Self::Rename { .. } => links,
        }
    }
}

/// A file's admission as a record has it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Made {
    pub(super) slot: Slot,
    pub(super) mode: usize,
    pub(super) version: u8,
    /// When the slot's directory was changed last, as far as the program could see.
    pub(super) directory_changed_at: usize,
}

/// An extended flag that no record has: the time of access is not set.
const FS_XFLAG_NOATIME: u32 = 0x40;

/// A record.
#[derive(Debug, Clone, Copy)]
pub(super) enum Record {
    /// All of a file, which can be made again from it.
    Make { inode: Inode, made: Made },
    /// A real sync made the file durable; the log answers for the file from now on.
    Cover { inode: Inode },
    /// Bytes of a covered file; the first ones make it grow.
    Write { inode: Inode, version: u8, grows: bool },
    /// Growth before this record is promised.
    Mark { inode: Inode },
    /// A change of a covered file's names, and the number of names afterwards.
    Name { inode: Inode, change: NameChange, links: usize },
    /// All of the file was made durable; its earlier records no longer count.
    Leave { inode: Inode },
}

/// The library's knowledge of a file.
#[allow(clippy::struct_excessive_bools, reason = "each is about something else")]
#[derive(Debug, Clone, Copy, Default)]
struct Known {
    is_covered: bool,
    /// The tree created it at this slot, and since then its names were not changed.
    created_at: Option<Slot>,
    /// The log has changes of its names, or its creation.
    has_names: bool,
    /// It was made by a record, and its names were not changed since.
    is_as_made: bool,
    /// A real sync has made durable everything that the log promises of the file.
    is_retired: bool,
    /// A stream is open on it.
    is_pinned: bool,
    /// The file has a shared mapping that can be written to.
    is_mapped: bool,
    /// The version in a record that was made while a stream was open.
    sealed_version: u8,
    is_written: bool,
    /// A record has changed the file's names or attributes since its last sync; the next sync would
    /// commit that change.
    was_named: bool,
    /// The file grew, and neither a mark nor a real sync followed.
    has_grown: bool,
    /// The file's names or attributes were changed without a record.
    has_own_change: bool,
    /// Number of the journal's changes at the file's last change that the library saw.
    last_change: usize,
}

impl Known {
    /// Returns the entry that remains when the file becomes plain.
    fn plain(&self) -> Self {
        let Self { is_pinned, is_mapped, last_change, .. } = *self;
        Self { is_pinned, is_mapped, last_change, ..Self::default() }
    }

    /// Returns how often the file is pinned.
    fn pins(&self) -> u64 {
        u64::from(self.is_pinned) + u64::from(self.is_mapped)
    }

    fn record_facts(&self) -> RecordFacts {
        let (is_covered, has_own_changes) = (self.is_covered, self.has_own_change);
        RecordFacts { can_record: true, is_covered, has_own_changes }
    }

    fn sync_facts(&self) -> SyncFacts {
        SyncFacts {
            is_covered: self.is_covered,
            has_promises: false,
            unsynced_bytes: 0,
            has_own_changes: self.has_own_change,
            was_written: self.is_written,
            has_grown: self.has_grown,
            was_named: self.was_named,
        }
    }
}

/// A change of names or attributes that no record has.
#[derive(Debug, Clone, Copy)]
struct Pending {
    change: usize,
    /// The file whose next sync makes the change durable, if there is one.
    owner: Option<Inode>,
}

/// How a program changes names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Called {
    /// By a call that can be recorded.
    Simply,
    /// By a call that cannot be recorded, such as an exchange.
    Otherwise,
}

#[derive(Debug)]
pub(super) struct Library {
    pub(super) log: Vec<Record>,
    /// The kernel at the time of each record of the last step, which a power cut may interrupt.
    pub(super) at_records: Option<Vec<Kernel>>,
    files: BTreeMap<Inode, Known>,
    pending: Vec<Pending>,
    /// Creations of files that were not synced since.
    creations: Vec<Pending>,
    /// Number of the journal's changes that are known to be on the disk.
    committed: usize,
    /// The program writes in ways that no hook sees.
    writes_unseen: bool,
    fault: NamesFault,
}

impl Library {
    pub(super) fn new(fault: NamesFault) -> Self {
        Self {
            log: Vec::new(),
            at_records: None,
            files: BTreeMap::new(),
            pending: Vec::new(),
            creations: Vec::new(),
            committed: 0,
            writes_unseen: false,
            fault,
        }
    }

    fn append(&mut self, kernel: &Kernel, record: Record) {
        if let Some(at_records) = &mut self.at_records {
            at_records.push(kernel.clone());
        }
        self.log.push(record);
    }

    fn known(&mut self, inode: Inode) -> &mut Known {
        self.files.entry(inode).or_default()
    }

    /// Returns whether a change is pending that a sync of `except` alone would not make durable.
    fn is_pending(&self, except: Option<Inode>) -> bool {
        self.pending.iter().any(|pending| {
            pending.change > self.committed && (except.is_none() || pending.owner != except)
        })
    }

    /// Notes a change of names or attributes that was just made and not recorded.
    fn note_plain(&mut self, kernel: &Kernel, owner: Option<Inode>) {
        let change = kernel.changes();
        self.pending.push(Pending { change, owner });
        if let Some(inode) = owner {
            let known = self.known(inode);
            known.has_own_change = true;
            known.last_change = change;
        }
    }

    pub(super) fn created(&mut self, kernel: &Kernel, inode: Inode, slot: Slot, is_seen: bool) {
        let change = kernel.changes();
        if is_seen {
            self.known(inode).created_at = Some(slot);
            self.known(inode).last_change = change;
            self.creations.push(Pending { change, owner: Some(inode) });
        } else {
            self.note_plain(kernel, Some(inode));
        }
    }

    pub(super) fn other_changed(&mut self, kernel: &Kernel) {
        self.note_plain(kernel, None);
    }

    /// Notes a write before the kernel's, and appends its record if the file is covered.
    pub(super) fn write(&mut self, both: &mut Both, inode: Inode, version: u8) {
        self.break_seal(both, inode);
        let kernel = &both.kernel;
        let (change, grows) = (kernel.changes(), kernel.version(inode) == 0);
        let known = self.known(inode);
        known.is_written = true;
        if known.is_covered {
            known.last_change = change;
            known.has_grown |= grows;
            known.is_retired = false;
            self.append(kernel, Record::Write { inode, version, grows });
        }
    }

    /// Opens a stream on the file, or closes the open one.
    pub(super) fn toggle_stream(&mut self, both: &mut Both, inode: Inode) {
        let known = *self.known(inode);
        let is_as_recorded = || {
            known.sealed_version == both.kernel.version(inode)
                || self.fault == NamesFault::UnsealedUnseen
        };
        if known.is_covered && !may_unseal(false, known.is_pinned, is_as_recorded) {
            self.leave(both, inode);
        }
        self.known(inode).is_pinned = !known.is_pinned;
    }

    /// Makes a shared mapping of the file, or ends the existing one.
    pub(super) fn toggle_mapping(&mut self, both: &mut Both, inode: Inode) {
        if self.known(inode).is_covered {
            self.leave(both, inode);
        }
        self.known(inode).is_mapped ^= true;
    }

    /// Starts or ends the program's writes that no hook sees.
    pub(super) fn toggle_unseen(&mut self, both: &mut Both) {
        self.covered().into_iter().for_each(|inode| self.leave(both, inode));
        self.writes_unseen ^= true;
    }

    fn covered(&self) -> Vec<Inode> {
        let covered = self.files.iter().filter(|(_, known)| known.is_covered);
        covered.map(|(inode, _)| *inode).collect()
    }

    /// Returns whether the program may write to the file in ways that no hook sees.
    pub(super) fn may_change_unseen(&mut self, inode: Inode) -> bool {
        self.writes_unseen || self.known(inode).pins() > 0
    }

    /// Makes a sealed file leave, before an operation on it.
    fn break_seal(&mut self, both: &mut Both, inode: Inode) {
        let known = *self.known(inode);
        if known.is_pinned && known.is_covered && self.fault != NamesFault::SealIgnored {
            self.leave(both, inode);
        }
    }

    pub(super) fn set_mode(&mut self, both: &mut Both, inode: Inode, mode: usize) {
        self.break_seal(both, inode);
        let is_recorded = self.may_record_attributes(inode);
        if !is_recorded {
            self.touch(both, inode);
        }
        both.each(|kernel| kernel.set_mode(inode, mode));
        if is_recorded {
            self.known(inode).last_change = both.kernel.changes();
            self.make(&both.kernel, inode, Sync::All);
            self.known(inode).was_named = self.fault != NamesFault::AttributesForgotten;
        } else {
            self.note_plain(&both.kernel, Some(inode));
        }
    }

    /// Sets extended flags, which no record has.
    pub(super) fn set_extended(&mut self, both: &mut Both, inode: Inode) {
        self.break_seal(both, inode);
        self.touch(both, inode);
        both.each(|kernel| kernel.set_extended(inode, FS_XFLAG_NOATIME));
        self.note_plain(&both.kernel, Some(inode));
    }

    fn may_record_attributes(&mut self, inode: Inode) -> bool {
        let known = *self.known(inode);
        let is_pending =
            || self.is_pending(None) && self.fault != NamesFault::AttributesWhilePending;
        let (has_names, was_moved) = (known.has_names, !known.is_as_made);
        let made = MadeFacts { has_names, was_moved, size: 0 };
        cover::may_record_attributes(&known.record_facts(), &made, is_pending)
    }

    /// Makes a change of names, recorded or not.
    pub(super) fn change_names(
        &mut self,
        both: &mut Both,
        inode: Inode,
        (change, called): (NameChange, Called),
    ) {
        let replaced = match change {
            NameChange::Rename { replaced, .. } => replaced,
            _ => None,
        };
        self.break_seal(both, inode);
        let may_be_recorded = |this: &mut Self, both: &Both| {
            called == Called::Simply && this.may_record(&both.kernel, inode, replaced)
        };
        let is_recorded = may_be_recorded(self, both)
            || self.commit_pending(both, inode) && may_be_recorded(self, both);
        if is_recorded {
            // The file system may allocate the file's growth together with its new name.
            self.mark(&both.kernel, inode);
            let links = change.links_after(both.kernel.present().links(inode));
            self.append(&both.kernel, Record::Name { inode, change, links });
            self.known(inode).has_names = true;
        } else {
            [Some(inode), replaced].into_iter().flatten().for_each(|inode| self.touch(both, inode));
        }
        both.each(|kernel| match change {
            NameChange::Link { to } => kernel.link(inode, to),
            NameChange::Unlink { from } => kernel.unlink(from),
            NameChange::Rename { from, to, .. } => kernel.rename(inode, from, to),
        });
        if is_recorded {
            self.known(inode).last_change = both.kernel.changes();
            self.known(inode).was_named = true;
            self.known(inode).is_as_made = false;
            self.known(inode).is_retired = false;
        } else {
            self.known(inode).created_at = None;
            self.note_plain(&both.kernel, Some(inode));
            if let Some(replaced) = replaced {
                self.known(replaced).created_at = None;
                self.known(replaced).has_own_change = true;
                self.known(replaced).last_change = both.kernel.changes();
            }
        }
        for inode in [Some(inode), replaced].into_iter().flatten() {
            if both.kernel.present().links(inode) == 0 {
                self.files.remove(&inode);
            }
        }
    }

    fn commit_pending(&mut self, both: &mut Both, inode: Inode) -> bool {
        let known = *self.known(inode);
        let facts = (known.is_covered, !known.is_retired, self.is_pending(None));
        let commits = || both.kernel.is_delayed(inode).then_some(());
        let is_synced = stays_by_sync(facts, commits).is_some();
        if is_synced {
            self.sync_really(both, inode);
        }
        is_synced
    }

    fn mark(&mut self, kernel: &Kernel, inode: Inode) {
        if std::mem::take(&mut self.known(inode).has_grown) {
            self.append(kernel, Record::Mark { inode });
        }
    }

    fn may_record(&mut self, kernel: &Kernel, inode: Inode, replaced: Option<Inode>) -> bool {
        let (fault, mut facts) = (self.fault, self.known(inode).record_facts());
        facts.is_covered |= fault == NamesFault::NameOfPlainFile;
        let is_pending = || self.is_pending(None) && fault != NamesFault::NameWhilePending;
        let ends = |other| {
            let links = links_of(kernel, other);
            let links = if fault == NamesFault::ReplacedLives { 1 } else { links };
            let (is_replacing, is_file, is_beside) = (true, true, true);
            may_replace(&ReplacedFacts { is_replacing, is_file, links, is_beside })
        };
        may_record_name(&facts, is_pending) && replaced.is_none_or(ends)
    }

    /// Makes a file with names in the log leave, before a change that no record has.
    fn touch(&mut self, both: &mut Both, inode: Inode) {
        let has_names = self.known(inode).has_names;
        let has_names = || has_names && self.fault != NamesFault::TouchedWithoutLeave;
        if leaves_unrecorded(false, has_names) {
            self.leave(both, inode);
        }
    }

    fn leave(&mut self, both: &mut Both, inode: Inode) {
        // A plain file is unharmed by the record of an end.
        if decide_leave(true, || !self.known(inode).is_retired) == LeaveAction::SyncAndEnd {
            self.sync_really(both, inode);
        }
        self.append(&both.kernel, Record::Leave { inode });
        *self.known(inode) = self.known(inode).plain();
    }

    /// Makes a real sync that the program may not have asked for: without Tidegate the same sync
    /// may come from outside.
    fn sync_really(&mut self, both: &mut Both, inode: Inode) {
        let is_delayed = both.kernel.is_delayed(inode);
        if is_delayed || self.fault == NamesFault::CommitAssumed {
            self.committed = self.committed.max(both.kernel.changes());
        }
        both.sync_from_outside(inode);
        self.note_synced(both, inode);
    }

    /// Notes a real sync of the file, which made its last change and all earlier ones durable.
    fn note_synced(&mut self, both: &Both, inode: Inode) {
        let last_change = self.known(inode).last_change;
        self.committed = self.committed.max(last_change);
        self.known(inode).has_own_change = false;
        self.known(inode).is_written = false;
        self.known(inode).was_named = false;
        if self.known(inode).is_covered {
            self.mark(&both.kernel, inode);
        }
    }

    /// Syncs a file; `covers` says whether a real sync covers the file.
    pub(super) fn sync(&mut self, both: &mut Both, inode: Inode, wanted: Sync, covers: bool) {
        self.break_seal(both, inode);
        let lookups = SyncLookups {
            is_in_place: || true,
            is_resized: || false,
            is_pending: || self.is_pending(None),
        };
        let known = self.files.get(&inode).copied().unwrap_or_default();
        let action = decide_sync(wanted, &known.sync_facts(), &lookups);
        self.known(inode).is_retired &= !known.is_covered;
        match action {
            SyncAction::Plain if self.may_make(&both.kernel, inode) => {
                self.make(&both.kernel, inode, wanted);
            }
            SyncAction::Plain => self.sync_plain(both, inode, covers),
            SyncAction::Real(_) | SyncAction::Leave(_) => self.sync_really(both, inode),
            SyncAction::Nothing | SyncAction::NothingYet => {}
            SyncAction::Mark => {
                self.mark(&both.kernel, inode);
                self.known(inode).is_written = false;
                self.known(inode).was_named = false;
            }
        }
    }

    fn sync_plain(&mut self, both: &mut Both, inode: Inode, covers: bool) {
        self.sync_really(both, inode);
        if self.may_make(&both.kernel, inode) {
            self.make(&both.kernel, inode, Sync::All);
            self.known(inode).is_retired = true;
            return;
        }
        self.known(inode).created_at = None;
        if covers && self.is_admitted(inode) {
            self.known(inode).is_covered = true;
            self.append(&both.kernel, Record::Cover { inode });
        }
    }

    fn is_admitted(&mut self, inode: Inode) -> bool {
        let (known, writes_unseen) = (*self.known(inode), self.writes_unseen);
        let facts = AdmissionFacts {
            syncs: 1,
            cover_after: 1,
            every_write: false,
            is_suspended: false,
            writes_unseen,
            is_direct: false,
            is_pinned: known.is_pinned,
        };
        let begins = BeginFacts {
            is_pinned: known.pins() > 0,
            is_logged: false,
            is_covered: false,
            has_promises: false,
        };
        decide_admission(&facts, || true, || false).is_ok()
            && decide_begin(&begins) == BeginAction::Begin
    }

    fn may_begin_made(&mut self, kernel: &Kernel, inode: Inode) -> bool {
        let (fault, known) = (self.fault, *self.known(inode));
        let facts = MakeFacts {
            size: kernel.bytes(inode).len() as u64,
            is_direct: false,
            writes_unseen: self.writes_unseen && fault != NamesFault::MadeThoughUnseen,
            in_vfork_child: false,
            is_suspended: false,
        };
        let is_told = !known.is_mapped || fault != NamesFault::MadeThoughMapped;
        let pins = if is_told { known.pins() } else { u64::from(known.is_pinned) };
        cover::may_make(&facts, || true, || true) && may_seal(pins, known.is_pinned)
    }

    fn may_make(&mut self, kernel: &Kernel, inode: Inode) -> bool {
        let may_begin = self.may_begin_made(kernel, inode);
        let is_pending =
            || self.is_pending(Some(inode)) && self.fault != NamesFault::MadeWhilePending;
        let tree = kernel.present();
        let created_at = self.files.get(&inode).and_then(|known| known.created_at);
        let keeps_name = created_at.is_some_and(|slot| tree.names.get(&slot) == Some(&inode));
        let flags = tree.extended.get(&inode).copied().unwrap_or(0);
        let flags = if self.fault == NamesFault::MadeThoughSpecial { 0 } else { flags };
        let file = FileFacts {
            links: links_of(kernel, inode),
            keeps_name: keeps_name || self.fault == NamesFault::MadeAfterRename,
            is_ordinary: fit_record(0, flags, [0; 3]),
        };
        may_begin && has_all(&file) && stands_for_sync(false, is_pending)
    }

    fn make(&mut self, kernel: &Kernel, inode: Inode, wanted: Sync) {
        let tree = kernel.present();
        let Some(slot) = tree.slots_of(inode).next() else { return };
        let made = Made {
            slot,
            mode: tree.modes[&inode],
            version: kernel.version(inode),
            directory_changed_at: tree.changed_at[directory_of(slot)],
        };
        self.append(kernel, Record::Make { inode, made });
        self.pending.retain(|pending| pending.owner != Some(inode));
        self.creations.retain(|pending| pending.owner != Some(inode));
        let known = Known {
            sealed_version: kernel.version(inode),
            is_retired: self.fault == NamesFault::LeftUnsynced,
            is_covered: true,
            has_names: true,
            is_as_made: true,
            // `fdatasync` may have committed nothing: `fsync` would.
            is_written: wanted == Sync::Data,
            ..self.known(inode).plain()
        };
        self.files.insert(inode, known);
    }

    /// Returns whether the log answers a sync of a directory.
    pub(super) fn answers_directory(&self) -> bool {
        let is_created = self.creations.iter().any(|pending| pending.change > self.committed);
        let is_created = is_created && self.fault != NamesFault::DirectoryIgnoresCreation;
        answers_directory(&DirectoryFacts {
            is_held: true,
            commits_in_order: true,
            is_pending: self.is_pending(None) || is_created,
        })
    }

    /// Plays the supervisor: makes all files durable, commits, and retires records up to `until`.
    pub(super) fn clean(&mut self, both: &mut Both, until: usize) {
        for inode in self.covered() {
            if self.fault == NamesFault::RetiredWithoutCommit {
                both.kernel.write_back(inode);
            } else {
                both.sync_from_outside(inode);
            }
        }
        if self.fault != NamesFault::RetiredWithoutCommit {
            both.each(Kernel::commit);
            self.committed = both.kernel.changes();
        }
        self.log.drain(..until);
    }
}

fn links_of(kernel: &Kernel, inode: Inode) -> u32 {
    u32::try_from(kernel.present().links(inode)).unwrap_or(u32::MAX)
}

/// The kernel beside the log, and the *twin*: an identical kernel without Tidegate.
#[derive(Debug, Clone)]
pub(super) struct Both {
    pub(super) kernel: Kernel,
    pub(super) twin: Kernel,
}

impl Both {
    pub(super) fn each(&mut self, call: impl Fn(&mut Kernel)) {
        call(&mut self.kernel);
        call(&mut self.twin);
    }

    fn sync_from_outside(&mut self, inode: Inode) {
        let commits = self.kernel.sync(inode, false);
        self.twin.write_back(inode);
        if commits {
            self.twin.commit();
        }
    }
}
