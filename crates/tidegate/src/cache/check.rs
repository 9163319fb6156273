//! Verification of a cache pool, and counts of its headers. Changes nothing.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::choices::Choices;
use super::error::CacheError;
use super::pages::write::BATCH_PAGES_MAX;
use super::recover::{Data, Newest, Scan, Scanned};
use super::store::header::CacheHeader;
use super::store::lane::LANES;
use super::store::layout::{Decoded, PAGE_BYTES, SlotHeader, is_part};
use crate::pmem::{ReadOnce, Region};

/// Most findings that are reported in words; all are counted.
const FINDINGS_MAX: usize = 100;
/// Versions of pages that are compared at once, in 32 MiB.
const VERSIONS_AT_ONCE: u64 = 1 << 20;

/// Most slots whose older version a crash leaves half overwritten: each lane fills one batch.
const OVERWRITTEN_MAX: usize = LANES as usize * BATCH_PAGES_MAX;

/// Counts and faults of a pool's slots. Scripts rely on the keys.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Slots that hold a page, older versions included, or parts.
    pub used_slots: u64,
    /// Slots and parts whose bytes the backing may lack; after a crash with older versions.
    pub dirty_slots: u64,
    /// Slots and parts that hold a record: some lines of a page.
    pub record_slots: u64,
    /// Slots that are split into parts, for records.
    pub split_slots: u64,
    /// Slots that hold no page.
    pub free_slots: u64,
    /// Slots with the header or the data of an unfinished write: recovery frees them.
    pub unfinished_slots: u64,
    /// Slots of writes that no flush committed: recovery frees them.
    pub uncommitted_slots: u64,
    /// Lanes whose last batch has data that does not match its checksum. The pool cannot tell
    /// whether that write was acknowledged.
    pub doubtful_lanes: u64,
    /// The last group of writes that a flush committed; 0 without atomic flush.
    pub committed_group: u64,
    /// Number of faults.
    pub faults: u64,
    /// The first faults, a line each.
    pub findings: Vec<String>,
    /// Advice about the faults; `None` if there are none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
    /// Slots and parts that hold a page or a record.
    #[serde(skip)]
    pages: u64,
    /// Slots with one changed bit in the header.
    #[serde(skip)]
    pub(super) changed_slots: Vec<u32>,
    /// Slots with damaged data.
    #[serde(skip)]
    damaged: Damaged,
    /// One copy of the superblock or of the cache header is damaged.
    #[serde(skip)]
    lacks_copy: bool,
}

/// Slots with damaged data, by kind of page.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Damaged {
    dirty: u64,
    clean: u64,
    /// Slots of newest batches: recovery frees them.
    newest: u64,
}

impl Report {
    fn of(committed_group: u64) -> Self {
        Self { committed_group, ..Self::default() }
    }

    fn fault(&mut self, finding: String) {
        self.faults += 1;
        if self.findings.len() < FINDINGS_MAX {
            self.findings.push(finding);
        }
    }

    /// Sets the advice for each kind of fault that was found. `repaired`: a repair has restored all
    /// that the pool itself proves.
    pub(super) fn advise(&mut self, repaired: bool) {
        if self.faults == 0 {
            return;
        }
        let is_repairable = self.lacks_copy || !self.changed_slots.is_empty();
        let advice = [
            (!repaired && is_repairable)
                .then_some("`tidegate check --repair` restores what the pool itself proves"),
            (self.damaged.dirty > 0).then_some(
                "a read of a damaged dirty page fails until all of the page is written anew: \
                 restore it from a backup",
            ),
            (self.damaged.newest > 0).then_some(
                "where one bit of a last write changed, opening the pool leaves what was there \
                 before it: write it once more, or restore it from a backup",
            ),
            (self.damaged.clean > 0).then_some("damaged clean pages are read from the backing"),
        ];
        let advice: Vec<_> = advice.into_iter().flatten().collect();
        self.advice = Some(if advice.is_empty() {
            "flush what can be flushed (`tidegate flush`), and create the pool anew".to_owned()
        } else {
            advice.join("; ")
        });
    }
}

/// Counts the slots of the pool in `region` by their headers.
///
/// # Errors
/// The pool's headers are damaged, or the memory failed.
pub fn summary(region: &Region, header: &CacheHeader) -> Result<Report, CacheError> {
    let mut report = Report::of(header.committed_group(region)?);
    Scan { region, header }.each(|scanned| {
        count(&mut report, &scanned);
        Ok(())
    })?;
    Ok(report)
}

fn count(report: &mut Report, scanned: &Scanned) {
    let is_part = is_part(scanned.slot);
    match &scanned.decoded {
        Decoded::Free { .. } => report.free_slots += u64::from(!is_part),
        Decoded::Bad => report.unfinished_slots += 1,
        Decoded::Split => {
            report.used_slots += 1;
            report.split_slots += 1;
        }
        Decoded::Header(header) => {
            report.used_slots += u64::from(!is_part);
            report.pages += 1;
            report.record_slots += u64::from(header.is_record());
            report.uncommitted_slots += u64::from(header.group > report.committed_group);
            report.dirty_slots += u64::from(header.dirty);
        }
    }
}

/// Compares all data with its checksums, and the headers with each other.
///
/// # Errors
/// The pool's headers are damaged, or the memory failed.
pub fn check(region: &Region) -> Result<Report, CacheError> {
    let header = CacheHeader::read(region)?;
    let scan = Scan { region, header: &header };
    let (mut report, mut newest) = (Report::of(header.committed_group(region)?), Newest::default());
    scan.each(|scanned| {
        count(&mut report, &scanned);
        if let Decoded::Header(found) = scanned.decoded {
            newest.see(scanned.slot, &found);
        }
        Ok(())
    })?;
    let mut check = Check { scan, newest, mismatched: Mismatched::default(), report };
    check.check_slots()?;
    let parts = check.report.pages.div_ceil(VERSIONS_AT_ONCE).max(1);
    (0..parts).try_for_each(|part| check.check_versions(part, parts))?;
    let mut report = check.report;
    for setting in Choices::parse(&header.settings).1 {
        report.fault(format!("this program does not know the setting `{setting}`"));
    }
    if let Some(damage) = header.damaged_copy {
        report.lacks_copy = true;
        report.fault(damage.to_string());
    }
    Ok(report)
}

/// A verification and its findings so far.
struct Check<'a> {
    scan: Scan<'a>,
    newest: Newest,
    mismatched: Mismatched,
    report: Report,
}

impl Check<'_> {
    /// Compares the data of each slot with its header, and reports headers with one changed bit.
    fn check_slots(&mut self) -> Result<(), CacheError> {
        let scan = self.scan;
        let of_newest: BTreeSet<u32> = self.newest.members().map(|(slot, _)| *slot).collect();
        let (mut doubtful_lanes, mut bad_headers) = (BTreeSet::new(), 0_u64);
        let mut read_once = ReadOnce::new(scan.region);
        scan.each(|Scanned { slot, decoded, is_changed_split }| {
            match decoded {
                Decoded::Split if is_changed_split => {
                    self.report.fault(format!(
                        "slot {slot}: one bit of its header changed, which says that it has \
                         parts; opening the pool restores it"
                    ));
                    self.report.changed_slots.push(slot);
                }
                Decoded::Free { .. } | Decoded::Split => {}
                Decoded::Bad if self.report_changed(slot)? => {}
                Decoded::Bad => bad_headers += 1,
                Decoded::Header(found) => {
                    // A group's members are fenced before its commit, and count only after it.
                    let is_last = found.group == 0 && of_newest.contains(&slot);
                    let is_uncommitted = found.group > self.report.committed_group;
                    if !is_uncommitted && !scan.header.is_home(slot, found.page) {
                        let name = name_of(found.page, found.dirty);
                        self.report.fault(format!(
                            "slot {slot}: {name} belongs into a slot of another shard, and no                              program opens such a pool"
                        ));
                    }
                    match scan.compare(slot, &found)? {
                        Data::Whole => {}
                        data if is_last => {
                            doubtful_lanes.insert(found.lane);
                            self.mismatched.add(slot, false);
                            report_last(slot, &found, data, &mut self.report);
                        }
                        _ if is_uncommitted => self.report.unfinished_slots += 1,
                        _ if self.mismatched.add(slot, true) => {}
                        _ => report_damaged(slot, found.page, found.dirty, &mut self.report),
                    }
                }
            }
            if !is_part(slot) {
                read_once.has_read(scan.header.places.data(slot), PAGE_BYTES);
            }
            Ok(())
        })?;
        self.report.doubtful_lanes = doubtful_lanes.len() as u64;
        // A crash interrupts each lane's newest batch. Opening the pool voids its unfinished slots.
        let most = OVERWRITTEN_MAX as u64;
        if bad_headers > most {
            self.report.fault(format!(
                "{bad_headers} slots have headers that are none, and writes that never finished \
                 leave at most {most}: the pages of the others are lost"
            ));
        }
        Ok(())
    }

    /// Compares the versions of each page with each other, for one of `parts` parts of all pages.
    /// So memory use does not grow with the pool.
    fn check_versions(&mut self, part: u64, parts: u64) -> Result<(), CacheError> {
        let mut versions = Vec::new();
        self.scan.each(|Scanned { slot, decoded, .. }| {
            if let Decoded::Header(found) = decoded
                && part_of(found.page, parts) == part
            {
                let SlotHeader { page, version, over, dirty: is_dirty, .. } = found;
                let is_committed = found.group <= self.report.committed_group;
                versions.push(Stored { page, version, slot, is_dirty, is_committed, over });
            }
            Ok(())
        })?;
        versions.sort_unstable();
        for of_page in versions.chunk_by(|one, other| one.page == other.page) {
            check_page(of_page, &mut self.report);
            check_mismatched(of_page, &self.mismatched, &mut self.report);
        }
        Ok(())
    }

    /// Reports the header of `slot` if it is bad because one bit changed, and returns whether it
    /// is. A later batch of the lane, or whole data, proves that the header's write was finished.
    fn report_changed(&mut self, slot: u32) -> Result<bool, CacheError> {
        let what = match self.scan.changed(slot)? {
            Some((_, Decoded::Header(found)))
                if found.group <= self.report.committed_group
                    && (self.newest.is_newer_than(&found)
                        || self.scan.compare(slot, &found)? == Data::Whole) =>
            {
                name_of(found.page, found.dirty)
            }
            Some((bit, Decoded::Free { .. })) if bit < 64 => "no page".to_owned(),
            _ => return Ok(false),
        };
        self.report.unfinished_slots -= 1;
        self.report.fault(format!(
            "slot {slot}: one bit of its header changed, which was that of {what}; opening the \
             pool frees the slot"
        ));
        self.report.changed_slots.push(slot);
        Ok(true)
    }
}

/// Reports data of a lane's last batch that does not match its checksum: as damage if one bit makes
/// the difference, else as an unfinished write, which it is as far as the pool can tell.
fn report_last(slot: u32, found: &SlotHeader, data: Data, report: &mut Report) {
    if data == Data::Other {
        report.unfinished_slots += 1;
        return;
    }
    report.damaged.newest += 1;
    report.fault(format!(
        "slot {slot}: the data of {} differs by one bit from its checksum: it was changed, or \
         never finished, which nothing tells; opening the pool frees the slot",
        name_of(found.page, found.dirty)
    ));
}

fn report_damaged(slot: u32, page: u64, is_dirty: bool, report: &mut Report) {
    if is_dirty {
        report.damaged.dirty += 1;
    } else {
        report.damaged.clean += 1;
    }
    let name = name_of(page, is_dirty);
    report.fault(format!("slot {slot}: the data of {name} does not match its checksum"));
}

fn name_of(page: u64, is_dirty: bool) -> String {
    let kind = if is_dirty { "dirty" } else { "clean" };
    format!("the {kind} page at offset {}", page * PAGE_BYTES)
}

/// Slots whose data does not match their headers.
///
/// A writer fills the slot of an older version, which is dead, and only then replaces its header.
/// So a crash leaves the header of an older version over other data, which is no damage.
#[derive(Default)]
struct Mismatched {
    /// By slot: whether it is damaged unless it holds an older version.
    slots: BTreeMap<u32, bool>,
    /// There are more such slots than a crash leaves.
    are_too_many: bool,
}

impl Mismatched {
    /// Adds `slot`. Returns `false` if there are too many.
    fn add(&mut self, slot: u32, is_damaged_unless_older: bool) -> bool {
        self.are_too_many |= self.slots.len() == OVERWRITTEN_MAX;
        if !self.are_too_many {
            self.slots.insert(slot, is_damaged_unless_older);
        }
        !self.are_too_many
    }

    /// Returns whether `slot` is damaged unless it is an older version; `None` if its data is
    /// whole.
    fn get(&self, slot: u32) -> Option<bool> {
        self.slots.get(&slot).copied()
    }
}

/// A version of a page in a slot: the page, or a record.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Stored {
    page: u64,
    version: u64,
    slot: u32,
    is_dirty: bool,
    is_committed: bool,
    /// Version of the page under a record; 0 for a page.
    over: u64,
}

/// Returns the part that `page` belongs to, from 0 up to `parts`.
fn part_of(page: u64, parts: u64) -> u64 {
    (page.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) % parts
}

/// Checks all versions of one page, in order: each may be there once, and the page under the newest
/// version must be there if that is a dirty record.
fn check_page(versions: &[Stored], report: &mut Report) {
    for pair in versions.windows(2).filter(|pair| pair[0].version == pair[1].version) {
        report.fault(format!(
            "slot {}: version {} of the page at offset {} is in another slot too",
            pair[1].slot,
            pair[1].version,
            pair[1].page * PAGE_BYTES
        ));
    }
    let newest = versions.last().map_or(0, |it| it.version);
    let is_there = |version| versions.iter().any(|it| it.version == version);
    let is_record = |it: &&Stored| it.is_dirty && it.over > 0;
    let records = versions.iter().filter(is_record).filter(|it| it.version == newest);
    for record in records.filter(|it| !is_there(it.over)) {
        report.fault(format!(
            "slot {}: version {} of the page at offset {} is missing under a dirty record",
            record.slot,
            record.over,
            record.page * PAGE_BYTES
        ));
    }
}

/// Reports damaged data among all versions of one page, in order, except for older versions.
fn check_mismatched(versions: &[Stored], mismatched: &Mismatched, report: &mut Report) {
    let counts = |it: &&Stored| it.is_committed && mismatched.get(it.slot).is_none();
    let newest = versions.iter().rfind(counts);
    let is_older = |it: &Stored| {
        let replaces = |newest: &Stored| newest.version > it.version && newest.over != it.version;
        !mismatched.are_too_many && newest.is_some_and(replaces)
    };
    for it in versions.iter().filter(|it| mismatched.get(it.slot) == Some(true) && !is_older(it)) {
        report_damaged(it.slot, it.page, it.is_dirty, report);
    }
}

/// Flips the changed bit of each header in `slots` back. Returns the number of repaired headers.
///
/// # Errors
/// The memory failed.
pub(super) fn repair_changed(region: &Region, slots: &[u32]) -> Result<usize, CacheError> {
    let header = CacheHeader::read(region)?;
    let scan = Scan { region, header: &header };
    let mut repaired = 0;
    for &slot in slots {
        let Some((bit, _)) = scan.changed(slot)? else { continue };
        let at = header.places.header(slot) + bit as u64 / 64 * 8;
        region.store_u64(at, region.load_u64(at)? ^ 1 << (bit % 64))?;
        region.persist(at, 8)?;
        repaired += 1;
    }
    Ok(repaired)
}
