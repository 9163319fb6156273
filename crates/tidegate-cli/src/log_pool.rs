//! What `info` and `check` tell of a log pool that nobody uses.

use std::io;
use std::sync::Arc;

use anyhow::{Context, Result};
use serde::Serialize;
use tidegate::log::recover::plan_pool;
use tidegate::log::{LogPool, Scanner};
use tidegate::pmem::Region;
use tidegate::pool::{Found, Superblock};
use uuid::Uuid;

use crate::commands::check::superblock_findings;
use crate::output::{counted, field, line};
use crate::pool::in_pool;
use tidegate::size::Size;

/// What `info` shows; the keys are a contract with scripts.
#[derive(Debug, Serialize)]
pub(crate) struct Summary {
    uuid: Uuid,
    /// Bytes of the ring.
    pub(crate) ring_bytes: u64,
    /// Where the records begin that files may lack.
    tail: u64,
    /// Where the last record ends.
    head: u64,
    records: u64,
    /// Bytes from tail to head.
    live_bytes: u64,
    /// Records that were being written when their writer died.
    torn_records: u64,
    /// The boot of the machine in which the log was used last, unless it was closed.
    session: Option<Uuid>,
}

impl Summary {
    /// Scans the log in `region`.
    ///
    /// # Errors
    /// There is none, or its header is damaged.
    pub(crate) fn of(region: &Arc<Region>) -> Result<Self> {
        let pool = LogPool::open(Arc::clone(region))?;
        let tail = pool.tail()?;
        let mut scanner = Scanner::new(&pool, tail, pool.limit()?);
        let (mut records, mut head) = (0, tail);
        for header in &mut scanner {
            records += 1;
            head = header.position + header.record_bytes();
        }
        Ok(Self {
            uuid: pool.superblock().uuid,
            ring_bytes: pool.ring_bytes(),
            tail,
            head,
            records,
            live_bytes: head - tail,
            torn_records: scanner.torn(),
            session: pool.session()?.map(Uuid::from_bytes),
        })
    }

    /// Prints a line for each thing worth knowing.
    ///
    /// # Errors
    /// Standard output is full.
    pub(crate) fn print(&self) -> io::Result<()> {
        field("uuid", self.uuid)?;
        match self.records {
            0 => field("log", format_args!("empty, at position {}", self.tail))?,
            records => {
                let size = Size { bytes: self.live_bytes };
                let records = counted(records, "record");
                field("log", format_args!("{records} from {}, {size}", self.tail))?;
            }
        }
        match self.session {
            Some(boot) => field("session", format_args!("not closed, in boot {boot}")),
            None => field("session", "closed"),
        }
    }
}

/// What a check found; the keys are a contract with scripts.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    records: u64,
    /// Bytes of files that the records hold.
    data_bytes: u64,
    files: u64,
    torn_records: u64,
    unreadable_bytes: u64,
    /// Number of faults.
    pub(crate) faults: u64,
    /// A line each.
    findings: Vec<String>,
    /// Superblocks that repair wrote anew.
    repaired_superblocks: usize,
    /// Headers of the log that repair wrote anew.
    repaired_headers: usize,
}

/// Verifies each record of the log in `region`.
///
/// # Errors
/// The log's own header is damaged, or the memory failed.
pub(crate) fn check(region: Region, found: Found, mend: bool) -> Result<Report> {
    let region = Arc::new(region);
    let mut findings = superblock_findings(&found);
    let before = findings.len();
    if mend && before > 0 {
        let mut superblock = found.superblock;
        superblock.write(&region).with_context(|| in_pool(&region))?;
        findings = superblock_findings(&Superblock::read(&region)?);
    }
    let repaired_superblocks = before - findings.len();
    let pool = LogPool::open(Arc::clone(&region)).with_context(|| in_pool(&region))?;
    let mut header = pool.header_fault()?;
    let repaired_headers = usize::from(mend && header.is_some());
    if repaired_headers > 0 {
        pool.restore_header().with_context(|| in_pool(&region))?;
        header = pool.header_fault()?;
    }
    findings.extend(header.map(|fault| fault.to_string()));
    let mut scanner = Scanner::new(&pool, pool.tail()?, pool.limit()?);
    let records = (&mut scanner).count() as u64;
    let (plan, unreadable_bytes) = plan_pool(&pool).with_context(|| in_pool(&region))?;
    let untold = plan.findings().total() - plan.findings().kept().len() as u64;
    findings.extend(plan.findings().kept().iter().map(ToString::to_string));
    if unreadable_bytes > 0 {
        findings.push(format!("{} of the log cannot be read", Size { bytes: unreadable_bytes }));
    }
    Ok(Report {
        records,
        data_bytes: plan.data_bytes(),
        files: plan.files().len() as u64,
        torn_records: scanner.torn(),
        unreadable_bytes,
        faults: findings.len() as u64 + untold,
        findings,
        repaired_superblocks,
        repaired_headers,
    })
}

impl Report {
    /// Prints a line for each finding, and a summary.
    ///
    /// # Errors
    /// Standard output is full.
    pub(crate) fn print(&self) -> io::Result<()> {
        self.findings.iter().try_for_each(line)?;
        if self.repaired_superblocks > 0 {
            line(format_args!("restored superblocks: {}", self.repaired_superblocks))?;
        }
        if self.repaired_headers > 0 {
            line(format_args!("restored headers of the log: {}", self.repaired_headers))?;
        }
        line(format_args!(
            "{} about {} with {} of data; {} never finished, which recovery passes over",
            counted(self.records, "whole record"),
            counted(self.files, "file"),
            counted(self.data_bytes, "byte"),
            self.torn_records
        ))
    }
}
