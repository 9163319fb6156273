//! `tidegate replay`: plays a trace through schemes, with any sizes of memory.
//!
//! The trace is played once to measure its footprint, the base of percentages. It is played again
//! for each batch of schemes whose memory this machine should hold at a time (`MEMORY_BYTES_MAX`),
//! and once more on real files with `--real`. A long trace is read from its files each time: memory
//! use grows with the footprint, not with the length of the trace or the number of schemes. Only
//! `mobigen` holds all lines, because it sorts them by time.

mod advice;
pub mod amount;
pub mod case;
mod interrupt;
mod output;
mod page;
mod papers;
pub mod real;

use std::path::{Path, PathBuf};

use indicatif::{ProgressBar, ProgressStyle};
use tidegate::pmem::MediaModel;

use crate::error::{Error, Result};
use crate::model::costs::Costs;
use crate::profile::Profile;
use crate::report;
use crate::scheme::{SCHEMES, SchemeEntry, Sizes, scheme};
use crate::stdout::print;
use crate::time::SsdModel;
use crate::trace::{BadLines, Event, Format, Merged, Op, Trace, merge, open};
use amount::Amount;
pub use case::Row;
use case::{Case, PARTS};
use interrupt::Interrupt;
use real::Real;

/// Maximum number of operations that are kept from the first pass for later passes, so that the
/// trace need not be read again: 64 MiB of operations.
pub const KEPT_OPERATIONS_MAX: usize = 1 << 21;
/// Memory for the cases that are played at a time. A case that takes more is played alone.
const MEMORY_BYTES_MAX: u64 = 2 << 30;
/// Approximate memory of a case beside its data, per page of the trace.
const TABLE_BYTES_A_PAGE: u64 = 256;
/// Events between two updates of the progress bar.
const EVENTS_A_MOVE: u64 = 1 << 16;
/// Kept operations between two updates, fewer because many schemes may play each.
const KEPT_A_MOVE: usize = 1 << 12;

/// Arguments of `tidegate replay`.
#[derive(Debug, Clone, clap::Args)]
pub struct ReplayArgs {
    /// Traces; several are played together, each from its own start on
    #[arg(required = true, value_name = "TRACE")]
    pub traces: Vec<PathBuf>,
    /// The format of the traces, where their first lines do not tell it
    #[arg(long, value_enum)]
    pub format: Option<Format>,
    /// Schemes to compare: dram; sccm, sfcm and afcm, of the AFCM paper; tidegate, the cache; log;
    /// and for all data on persistent memory btt, alone or below transit, transit-no-eager,
    /// transit-no-bypass, pmbd, pmbd70, lru or coactive
    #[arg(long, value_delimiter = ',', default_value = DEFAULT_SCHEMES, value_parser = parse_scheme)]
    pub schemes: Vec<&'static str>,
    /// DRAM for pages: a percentage of the pages that the traces touch, or a size as 64M
    #[arg(long, value_name = "PCT|SIZE", default_value = "50")]
    pub dram: Amount,
    /// Persistent memory, likewise
    #[arg(long, value_name = "PCT|SIZE", default_value = "20")]
    pub pmem: Amount,
    /// More amounts of DRAM, each with the persistent memory of --pmem
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub sweep_dram: Vec<Amount>,
    /// More amounts of persistent memory, each with the DRAM of --dram
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub sweep_pmem: Vec<Amount>,
    /// Do the traces on real files, too, in a new folder in DIR that goes at the end, and show what
    /// that took: on the disk as it is, or under `tidegate run`
    #[arg(long, value_name = "DIR")]
    pub real: Option<PathBuf>,
    /// Make all of a sync durable or nothing of it, with sccm, sfcm, afcm and tidegate, and count
    /// what that costs
    #[arg(long)]
    pub atomic: bool,
    /// The storage: nvme, nvme-plp, sata-ssd, hdd or paper, then ,KEY=NUMBER to change it
    #[arg(long, value_name = "MODEL", default_value = "nvme")]
    pub ssd: SsdModel,
    /// The persistent memory: dram, optane, cxl or custom, then ,KEY=NUMBER to change it
    #[arg(long, value_name = "MODEL", default_value = "optane")]
    pub pmem_media: MediaModel,
    /// The machine as `tidegate model --calibrate FILE` measured it: storage, memory, and for DRAM
    /// tiers also locks and threads
    #[arg(long, value_name = "FILE", conflicts_with_all = ["ssd", "pmem_media"])]
    pub costs: Option<String>,
    /// Costs of the rest of the machine, of the same file.
    #[arg(skip = Costs::optane())]
    pub machine: Costs,
    /// Write one object with `rows` to FILE, or with - to standard output in place of the table
    #[arg(long, value_name = "FILE|-")]
    pub json: Option<PathBuf>,
    /// Write a page with plots to DIR/index.html
    #[arg(long, value_name = "DIR")]
    pub report: Option<PathBuf>,
    /// Make the figures of the AFCM paper from each trace, and write them into this page
    #[arg(long, value_name = "FILE", hide = true)]
    pub papers: Option<PathBuf>,
}

#[cfg(test)]
impl ReplayArgs {
    /// Parses the arguments in `words`, without the command's name.
    fn of<'a>(words: impl IntoIterator<Item = &'a str>) -> Self {
        use clap::{Args, FromArgMatches};
        let command = Self::augment_args(clap::Command::new("replay"));
        let words = std::iter::once("replay").chain(words);
        Self::from_arg_matches(&command.get_matches_from(words)).expect("they were parsed")
    }
}

const DEFAULT_SCHEMES: &str = "dram,sccm,sfcm,afcm,tidegate,log";

fn parse_scheme(name: &str) -> Result<&'static str, String> {
    scheme(name).map(|entry| entry.name).ok_or_else(|| {
        let names: Vec<_> = SCHEMES.iter().map(|entry| entry.name).collect();
        format!("expected one of {}", names.join(", "))
    })
}

/// The results of a replay.
pub struct Replayed {
    /// The workload of the traces.
    pub profile: Profile,
    /// Whether all traces are of files, which `tidegate run` covers, not of disks.
    pub is_of_files: bool,
    /// Results by case.
    pub rows: Vec<Row>,
    /// Results on real files, if requested.
    pub real: Option<real::Row>,
    /// Bad lines by trace.
    pub bad_lines: Vec<(PathBuf, BadLines)>,
}

impl ReplayArgs {
    /// Replays the traces, and prints the results.
    ///
    /// # Errors
    /// A trace cannot be read or understood, or a file cannot be written.
    pub fn run(&mut self) -> Result<()> {
        if let Some(path) = &self.papers {
            return papers::update(self, path);
        }
        if let Some(costs) = &self.costs {
            let costs = Costs::load(costs)?;
            (self.ssd, self.pmem_media) = (costs.ssd()?, costs.whole_media()?);
            self.machine = costs;
        }
        let replayed = self.replay()?;
        output::warn_of_bad_lines(&replayed);
        if let Some(dir) = &self.report {
            report::write(dir, &page::page(self, &replayed))?;
        }
        if let Some(path) = self.json.as_deref() {
            let json = output::json(self, &replayed)?;
            if path == Path::new("-") {
                return print(&json);
            }
            std::fs::write(path, json).map_err(Error::io(path))?;
        }
        print(&output::text(self, &replayed))
    }

    /// Replays the traces.
    ///
    /// # Errors
    /// A trace cannot be read or understood.
    pub fn replay(&self) -> Result<Replayed> {
        let mut profile = Profile::default();
        let mut kept = Some(Vec::new());
        let merged = self.each_event("looking", |event| {
            profile.add_event(event);
            kept = kept.take().filter(|ops| ops.len() < KEPT_OPERATIONS_MAX);
            if let Some(ops) = &mut kept {
                ops.push(event.op);
            }
            Ok(())
        })?;
        let mut rows = Vec::new();
        for batch in batches(self.cases(&profile)) {
            rows.extend(self.play(batch, kept.as_deref(), profile.operations)?);
        }
        let real = self.real.as_deref().map(|folder| self.on_real_files(folder, &profile));
        let bad_lines = merged.traces().map(|it| (it.path().into(), it.bad_lines().clone()));
        let bad_lines = bad_lines.collect();
        let is_of_files = merged.traces().all(|it| it.format().is_of_files());
        Ok(Replayed { profile, is_of_files, rows, real: real.transpose()?, bad_lines })
    }

    /// Plays a trace of `operations` operations through `cases`; reads the traces again unless the
    /// operations were `kept`.
    fn play(
        &self,
        cases: Vec<(Sizes, &'static SchemeEntry)>,
        kept: Option<&[Op]>,
        operations: u64,
    ) -> Result<Vec<Row>> {
        let cases = cases.into_iter().map(|(sizes, entry)| Case::new(entry, sizes, &self.ssd));
        let mut cases = cases.collect::<Result<Vec<_>, _>>()?;
        let (mut played, mut parts) = (0, 0);
        let mut play = |op: &Op| {
            cases.iter_mut().try_for_each(|case| case.play(op))?;
            played += 1;
            while parts < PARTS && played * PARTS >= (parts + 1) * operations {
                parts += 1;
                cases.iter_mut().for_each(Case::end_part);
            }
            Ok(())
        };
        match kept {
            Some(ops) => each_kept(ops, play)?,
            None => drop(self.each_event("replaying", |event| play(&event.op))?),
        }
        Ok(cases.iter().map(Case::row).collect())
    }

    fn on_real_files(&self, folder: &Path, profile: &Profile) -> Result<real::Row> {
        let interrupt = Interrupt::watch().map_err(Error::io(folder))?;
        let mut files = Real::create(folder, profile)?;
        self.each_event("doing", |event| {
            if interrupt.was_asked() {
                return Err(Error::Interrupted { folder: folder.into() });
            }
            files.play(&event.op)
        })?;
        Ok(files.row())
    }

    /// Returns the schemes with each usable amount of memory, the smallest amounts first.
    fn cases(&self, profile: &Profile) -> Vec<(Sizes, &'static SchemeEntry)> {
        let pages = profile.footprint_pages;
        let (dram, pmem) = (self.dram.pages(pages), self.pmem.bytes(pages));
        let drams = self.sweep_dram.iter().map(|dram| (dram.pages(pages), pmem));
        let pmems = self.sweep_pmem.iter().map(|pmem| (dram, pmem.bytes(pages)));
        let mut amounts: Vec<_> = drams.chain(pmems).chain([(dram, pmem)]).collect();
        amounts.sort_unstable();
        amounts.dedup();
        let mut cases: Vec<(Sizes, &'static SchemeEntry)> = Vec::new();
        for (dram_pages, pmem_bytes) in amounts {
            for entry in self.schemes.iter().filter_map(|name| scheme(name)) {
                let sizes = Sizes {
                    dram_pages,
                    pmem_bytes: entry.pmem.bytes(pmem_bytes, pages),
                    pmem_media: self.pmem_media.clone(),
                    costs: self.machine.clone(),
                    footprint_pages: pages,
                    atomic: self.atomic,
                };
                if !cases.iter().any(|case| case.0 == sizes && case.1.name == entry.name) {
                    cases.push((sizes, entry));
                }
            }
        }
        cases
    }

    /// Passes all events of the traces to `see`; a progress bar shows `what`.
    fn each_event(
        &self,
        what: &'static str,
        mut see: impl FnMut(&Event) -> Result<()>,
    ) -> Result<Merged> {
        let traces: Vec<_> =
            self.traces.iter().map(|path| open(path, self.format)).collect::<Result<_, _>>()?;
        let bar = progress_bar(what, "{msg} {wide_bar} {bytes}/{total_bytes} {eta}");
        let mut merged = merge(traces);
        let mut events = 0_u64;
        while let Some(event) = merged.next() {
            see(&event?)?;
            events += 1;
            if events.is_multiple_of(EVENTS_A_MOVE) {
                move_bar(&bar, &merged);
            }
        }
        bar.finish_and_clear();
        Ok(merged)
    }
}

/// Splits `cases`, in order, into batches that fit in [`MEMORY_BYTES_MAX`].
fn batches(cases: Vec<(Sizes, &'static SchemeEntry)>) -> Vec<Vec<(Sizes, &'static SchemeEntry)>> {
    let mut batches = Vec::new();
    let mut free_bytes = 0;
    for case in cases {
        let bytes = memory_bytes(&case.0, case.1);
        match batches.last_mut() {
            Some(batch) if bytes <= free_bytes => Vec::push(batch, case),
            _ => {
                free_bytes = MEMORY_BYTES_MAX.max(bytes);
                batches.push(vec![case]);
            }
        }
        free_bytes -= bytes;
    }
    batches
}

/// Returns the approximate memory of this machine that a case takes.
fn memory_bytes(sizes: &Sizes, entry: &SchemeEntry) -> u64 {
    let data_bytes = if entry.holds_data { sizes.pmem_bytes } else { 0 };
    data_bytes.saturating_add(sizes.footprint_pages.saturating_mul(TABLE_BYTES_A_PAGE))
}

/// Passes kept operations to `play`, and shows a progress bar.
fn each_kept(operations: &[Op], mut play: impl FnMut(&Op) -> Result<()>) -> Result<()> {
    let bar = progress_bar("replaying", "{msg} {wide_bar} {human_pos}/{human_len} {eta}");
    bar.set_length(operations.len() as u64);
    for part in operations.chunks(KEPT_A_MOVE) {
        part.iter().try_for_each(&mut play)?;
        bar.inc(part.len() as u64);
    }
    bar.finish_and_clear();
    Ok(())
}

/// Returns a progress bar on standard error, which is hidden unless that is a terminal.
fn progress_bar(what: &'static str, template: &str) -> ProgressBar {
    let bar = ProgressBar::new(0).with_message(what);
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

fn move_bar(bar: &ProgressBar, merged: &Merged) {
    let progress = merged.traces().map(Trace::progress);
    let (read, total) = progress.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    bar.set_length(total);
    bar.set_position(read);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn case(
        scheme_name: &str,
        pmem_bytes: u64,
        footprint_pages: u64,
    ) -> (Sizes, &'static SchemeEntry) {
        let sizes = Sizes {
            dram_pages: 1,
            pmem_bytes,
            pmem_media: MediaModel::dram(),
            costs: Costs::optane(),
            footprint_pages,
            atomic: false,
        };
        (sizes, scheme(scheme_name).expect("there is one"))
    }

    #[test]
    fn a_case_that_takes_more_than_all_memory_is_played_by_itself() {
        let cases = [("log", 3 << 30), ("log", 3 << 30), ("sccm", 3 << 30), ("tidegate", 1 << 30)];
        let cases = cases.map(|(scheme, pmem_bytes)| case(scheme, pmem_bytes, 1 << 20));
        let lens: Vec<_> = batches(cases.into()).iter().map(Vec::len).collect();
        assert_eq!(lens, [1, 1, 2]);
        assert_eq!(batches(Vec::new()).len(), 0);
    }

    proptest! {
        /// Batches keep all cases in order, and a batch of several cases fits in memory.
        #[test]
        fn batches_hold_what_memory_takes(
            of in prop::collection::vec((0..3_usize, 0..4_u64 << 30, 0..1_u64 << 24), 0..60)
        ) {
            let names = ["log", "tidegate", "afcm"];
            let cases: Vec<_> =
                of.into_iter().map(|(name, pmem, pages)| case(names[name], pmem, pages)).collect();
            let batches = batches(cases.clone());
            for batch in batches.iter().filter(|batch| batch.len() > 1) {
                let bytes: u64 = batch.iter().map(|(sizes, entry)| memory_bytes(sizes, entry)).sum();
                prop_assert!(bytes <= MEMORY_BYTES_MAX);
            }
            let names = |cases: &[(Sizes, &'static SchemeEntry)]| {
                cases.iter().map(|case| (case.0.clone(), case.1.name)).collect::<Vec<_>>()
            };
            prop_assert_eq!(names(&batches.concat()), names(&cases));
        }
    }
}
