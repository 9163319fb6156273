//! Verification of a cache pool, and what its headers say in numbers. Changes nothing.

use std::collections::BTreeSet;

use serde::Serialize;

use super::choices::Choices;
use super::error::CacheError;
use super::header::CacheHeader;
use super::layout::{Decoded, PAGE_BYTES, SlotHeader};
use super::recover::{Newest, Scan};
use crate::pmem::Region;

/// Findings that are kept in words; more are counted.
const FINDINGS_MAX: usize = 100;

/// What the slots of a pool hold; the keys are a contract with scripts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Slots that hold a page, older versions included.
    pub used_slots: u64,
    /// Those of them whose bytes the backing may lack.
    pub dirty_slots: u64,
    /// Slots that hold a record: some lines of a page, the rest of which is the backing's.
    pub record_slots: u64,
    /// Slots that hold no page.
    pub free_slots: u64,
    /// Headers and data of writes that never finished: recovery frees their slots.
    pub unfinished_slots: u64,
    /// Slots of writes that no flush committed: recovery frees them.
    pub uncommitted_slots: u64,
    /// The last group of writes that a flush committed; 0 without atomic flush.
    pub committed_group: u64,
    /// Number of faults.
    pub faults: u64,
    /// The first of them, a line each.
    pub findings: Vec<String>,
    /// Slots in whose headers one bit changed.
    #[serde(skip)]
    pub(super) changed_slots: Vec<u32>,
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
}

/// Counts the slots of the pool in `region` by their headers.
///
/// # Errors
/// The pool's headers are damaged, or the memory failed.
pub fn summary(region: &Region, header: &CacheHeader) -> Result<Report, CacheError> {
    let mut report = Report::of(header.committed_group(region)?);
    Scan::new(region, header).each(|scanned| count(&mut report, &scanned.decoded))?;
    Ok(report)
}

fn count(report: &mut Report, decoded: &Decoded) {
    match decoded {
        Decoded::Free { .. } => report.free_slots += 1,
        Decoded::Bad => report.unfinished_slots += 1,
        Decoded::Header(header) => {
            report.used_slots += 1;
            report.record_slots += u64::from(header.is_record());
            report.uncommitted_slots += u64::from(header.group > report.committed_group);
            report.dirty_slots += u64::from(header.dirty);
        }
    }
}

/// The dirty records that are the newest versions of their pages and lack the pages over which they
/// lie: slot, page, and version of the page.
fn over_missing(
    slots: &[(u32, SlotHeader)],
    versions: &BTreeSet<(u64, u64)>,
) -> Vec<(u32, u64, u64)> {
    let is_newest = |it: &SlotHeader| {
        versions.range((it.page, it.version.saturating_add(1))..(it.page + 1, 0)).next().is_none()
    };
    let lacks = |it: &SlotHeader| {
        it.over > 0 && !versions.contains(&(it.page, it.over)) && it.dirty && is_newest(it)
    };
    let lacking = slots.iter().filter(|(_, header)| lacks(header));
    lacking.map(|(slot, it)| (*slot, it.page, it.over)).collect()
}

/// Compares all data with its checksums, and the headers with each other.
///
/// # Errors
/// As for [`summary`].
pub fn check(region: &Region) -> Result<Report, CacheError> {
    let header = CacheHeader::read(region)?;
    let scan = Scan::new(region, &header);
    let (mut report, mut newest, mut versions) =
        (Report::of(header.committed_group(region)?), Newest::default(), BTreeSet::new());
    let mut slots: Vec<(u32, SlotHeader)> = Vec::new();
    let mut bad = Vec::new();
    scan.each(|scanned| {
        count(&mut report, &scanned.decoded);
        if scanned.decoded == Decoded::Bad {
            bad.push(scanned.slot);
        }
        if let Decoded::Header(found) = scanned.decoded {
            newest.see(scanned.slot, &found);
            slots.push((scanned.slot, found));
            if !versions.insert((found.page, found.version)) {
                report.fault(format!(
                    "slot {}: version {} of the page at offset {} is in another slot too",
                    scanned.slot,
                    found.version,
                    found.page * PAGE_BYTES
                ));
            }
        }
    })?;
    report_changed(&scan, &newest, &bad, &mut report)?;
    for (slot, page, over) in over_missing(&slots, &versions) {
        report.fault(format!(
            "slot {slot}: version {over} of the page at offset {} is missing under a dirty record",
            page * PAGE_BYTES
        ));
    }
    let newest: BTreeSet<u32> = newest.members().map(|(slot, _)| *slot).collect();
    for (slot, found) in slots {
        match (scan.is_whole(slot, &found)?, newest.contains(&slot)) {
            (true, _) => {}
            (false, true) => report.unfinished_slots += 1,
            (false, false) => report.fault(format!(
                "slot {slot}: the data of the {} page at offset {} does not match its checksum",
                if found.dirty { "dirty" } else { "clean" },
                found.page * PAGE_BYTES
            )),
        }
    }
    for setting in Choices::parse(&header.settings).1 {
        report.fault(format!("this program does not know the setting `{setting}`"));
    }
    if !header.is_whole || !header.superblock_is_whole {
        report.fault("one copy of the superblock or of the cache header is damaged".into());
    }
    Ok(report)
}

/// Tells headers of which one bit changed from those of writes that never finished: a later batch
/// of the lane, or data that is whole, shows that the write was finished.
fn report_changed(
    scan: &Scan<'_>,
    newest: &Newest,
    bad: &[u32],
    report: &mut Report,
) -> Result<(), CacheError> {
    for &slot in bad {
        let what = match scan.changed(slot)? {
            Some((_, Decoded::Header(found)))
                if found.group <= report.committed_group
                    && (newest.is_newer_than(&found) || scan.is_whole(slot, &found)?) =>
            {
                let kind = if found.dirty { "dirty" } else { "clean" };
                format!("the {kind} page at offset {}", found.page * PAGE_BYTES)
            }
            Some((bit, Decoded::Free { .. })) if bit < 64 => "no page".to_owned(),
            _ => continue,
        };
        report.unfinished_slots -= 1;
        report.fault(format!(
            "slot {slot}: one bit of its header changed, which was that of {what}; opening the pool frees the slot"
        ));
        report.changed_slots.push(slot);
    }
    Ok(())
}

/// Changes back the one bit of each header that [`check`] found to be changed; the number of them.
///
/// # Errors
/// The memory failed.
pub(super) fn repair_changed(region: &Region, slots: &[u32]) -> Result<usize, CacheError> {
    let header = CacheHeader::read(region)?;
    let scan = Scan::new(region, &header);
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
