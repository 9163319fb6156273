//! `tidegate check`: every fault of a pool, a line each; `--repair` mends what the format's redundancy allows.

use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result};
use serde::Serialize;
use tidegate::btt::check::{Progress, Report, check, repair};
use tidegate::pmem::Region;
use tidegate::pool::{Engine, Found, PoolError, PoolKind, Superblock, identify};
use tidegate::raw::RawDevice;

use crate::args::CheckArgs;
use crate::log_pool;
use crate::output::{json, line, progress};
use crate::pool;

/// What `--json` prints; the keys are a contract with scripts.
#[derive(Serialize)]
struct Outcome<'a> {
    pool: &'a Path,
    clean: bool,
    #[serde(flatten)]
    report: Checked,
}

/// What a check of either engine found.
#[derive(Serialize)]
#[serde(tag = "engine", rename_all = "lowercase")]
enum Checked {
    Btt(Report),
    Raw(RawReport),
    Log(log_pool::Report),
}

/// What a check of a raw pool found: its superblock is all of its metadata.
#[derive(Serialize)]
struct RawReport {
    /// Number of faults.
    faults: u64,
    findings: Vec<String>,
    /// Superblocks that repair wrote anew.
    repaired_superblocks: usize,
}

/// Runs the command. Damage that is left is exit status 1.
///
/// # Errors
/// The pool cannot be mapped, or there is none.
pub(crate) fn run(args: &CheckArgs) -> Result<ExitCode> {
    let region = pool::map(&args.pool, &args.memory, !args.repair)?;
    let kind = identify(&region).with_context(|| pool::in_pool(&region))?;
    let report = match kind {
        PoolKind::Tidegate(found) if found.superblock.engine == Engine::Log => {
            Checked::Log(log_pool::check(region, found, args.repair)?)
        }
        PoolKind::Tidegate(found) => {
            Checked::Raw(check_raw(region, found, args.repair).with_context(|| in_pool(args))?)
        }
        // Also where nothing is recognised: a BTT can be found by its second info block.
        _ => Checked::Btt(check_btt(&region, args.repair).with_context(|| in_pool(args))?),
    };
    let clean = report.faults() == 0;
    if args.json {
        json(&Outcome { pool: &args.pool, clean, report })?;
    } else {
        report.print()?;
        line(verdict(&report, args))?;
    }
    Ok(if clean { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn in_pool(args: &CheckArgs) -> String {
    format!("pool {}", args.pool.display())
}

fn check_btt(region: &Region, mend: bool) -> Result<Report> {
    let bar = progress("checking");
    let mut show = |progress: Progress| {
        bar.set_length(progress.total);
        bar.set_position(progress.done);
    };
    let report = if mend { repair(region, &mut show) } else { check(region, &mut show) };
    bar.finish_and_clear();
    Ok(report?)
}

fn check_raw(region: Region, found: Found, mend: bool) -> Result<RawReport, PoolError> {
    let findings = superblock_findings(&found);
    if !mend || findings.is_empty() {
        return Ok(RawReport::new(findings, 0));
    }
    let region = Arc::new(region);
    // Opening for writing mends the superblock.
    drop(RawDevice::open(Arc::clone(&region))?);
    let left = superblock_findings(&Superblock::read(&region)?);
    let repaired = findings.len() - left.len();
    Ok(RawReport::new(left, repaired))
}

impl RawReport {
    fn new(findings: Vec<String>, repaired_superblocks: usize) -> Self {
        Self { faults: findings.len() as u64, findings, repaired_superblocks }
    }
}

/// What is wrong with the copies of a superblock.
pub(crate) fn superblock_findings(found: &Found) -> Vec<String> {
    let finding = |which, fault| {
        format!("the superblock at the pool's {which} {fault}; the other one is whole")
    };
    let first = found.first.map(|fault| finding("start", fault));
    let second = found.second.map(|fault| finding("end", fault));
    first.into_iter().chain(second).collect()
}

impl Checked {
    fn faults(&self) -> u64 {
        match self {
            Self::Btt(report) => report.faults,
            Self::Raw(report) => report.faults,
            Self::Log(report) => report.faults,
        }
    }

    fn print(&self) -> io::Result<()> {
        match self {
            Self::Btt(report) => print_btt(report),
            Self::Raw(report) => print_raw(report),
            Self::Log(report) => report.print(),
        }
    }
}

fn print_btt(report: &Report) -> io::Result<()> {
    report.findings.iter().try_for_each(line)?;
    let untold = report.faults - report.findings.len() as u64;
    if untold > 0 {
        line(format_args!("and {untold} more"))?;
    }
    if report.repaired_info_blocks > 0 {
        line(format_args!("restored info blocks: {}", report.repaired_info_blocks))?;
    }
    line(format_args!(
        "{} blocks written, {} zero, {} lost to media errors; {} unfinished writes that opening completes",
        report.written_blocks, report.zero_blocks, report.error_blocks, report.unfinished_writes
    ))
}

fn print_raw(report: &RawReport) -> io::Result<()> {
    report.findings.iter().try_for_each(line)?;
    if report.repaired_superblocks > 0 {
        line(format_args!("restored superblocks: {}", report.repaired_superblocks))?;
    }
    Ok(())
}

fn verdict(report: &Checked, args: &CheckArgs) -> String {
    let pool = args.pool.display();
    let faults = match report.faults() {
        0 => return format!("{pool}: no damage"),
        1 => "1 fault".to_owned(),
        faults => format!("{faults} faults"),
    };
    if args.repair {
        format!("{pool}: {faults} that cannot be repaired; copy off what can still be read")
    } else {
        format!(
            "{pool}: {faults}; `tidegate check --repair` restores damaged headers from their second copy"
        )
    }
}
