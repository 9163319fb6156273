//! Formats the results of a replay as text and as JSON.

use std::fmt::Write as _;

use serde::Serialize;
use tidegate_bench::table::Table;

use super::{ReplayArgs, Replayed, Row, advice, real};
use crate::error::{Error, Result};
use crate::scheme::page::PAGE_BYTES;

const MIB: f64 = 1_048_576.0;

/// The JSON object that `--json` writes.
#[derive(Serialize)]
struct Json<'a> {
    traces: Vec<String>,
    operations: u64,
    footprint_pages: u64,
    written_bytes: u64,
    synced_bytes: u64,
    /// Synced pages by number of dirty lines of 64 bytes, from 0 to 64.
    synced_pages_by_dirty_lines: &'a [u64],
    bad_lines: u64,
    ssd: &'a str,
    pmem_media: &'a str,
    atomic: bool,
    rows: &'a [Row],
    real: Option<&'a real::Row>,
    advice: String,
}

/// Returns the JSON text that `--json` writes.
///
/// # Errors
/// The results cannot be serialized.
pub(super) fn json(args: &ReplayArgs, replayed: &Replayed) -> Result<String> {
    let Replayed { profile, rows, real, bad_lines, .. } = replayed;
    let json = Json {
        traces: args.traces.iter().map(|path| path.display().to_string()).collect(),
        operations: profile.operations,
        footprint_pages: profile.footprint_pages,
        written_bytes: profile.written_bytes,
        synced_bytes: profile.synced_bytes,
        synced_pages_by_dirty_lines: &profile.synced_pages,
        bad_lines: bad_lines.iter().map(|(_, bad)| bad.count).sum(),
        ssd: &args.ssd.name,
        pmem_media: &args.pmem_media.name,
        atomic: args.atomic,
        rows,
        real: real.as_ref(),
        advice: advice::advice(args, replayed),
    };
    let text =
        serde_json::to_string_pretty(&json).map_err(|error| Error::Usage(error.to_string()))?;
    Ok(text + "\n")
}

/// Returns the text for users: the workload, the table and the advice.
pub(super) fn text(args: &ReplayArgs, replayed: &Replayed) -> String {
    let mut text = workload(replayed);
    let _ = write!(text, "{}", table(args, replayed));
    let _ = writeln!(text, "\n{}", advice::advice(args, replayed));
    text
}

/// Describes the workload of the traces, one sentence per line.
pub(super) fn workload(replayed: &Replayed) -> String {
    let profile = &replayed.profile;
    let mut text = format!(
        "{} operations on {:.1} MiB, {:.1} MiB written",
        profile.operations,
        mib(profile.footprint_pages * PAGE_BYTES),
        mib(profile.written_bytes),
    );
    if let Some(share) = profile.synced_share() {
        let _ = write!(text, ", {:.0} % of that synced", share * 100.0);
    }
    if let (Some(bytes), Some(share)) = (profile.mean_dirty_bytes(), profile.whole_share()) {
        let _ = write!(
            text,
            "\nA synced page has {bytes:.0} dirty bytes of 4096 in the mean; {:.0} % are all dirty",
            share * 100.0
        );
    }
    text + "\n\n"
}

/// Returns a table with one row per case.
pub(super) fn table(args: &ReplayArgs, replayed: &Replayed) -> Table {
    let title =
        format!("Storage {}, persistent memory {}; sizes in MiB", args.ssd, args.pmem_media);
    let headers = [
        "scheme",
        "DRAM",
        "PMem",
        "hits %",
        "pages read",
        "pages written",
        "PMem data",
        "PMem metadata",
        "index",
        "seconds",
    ];
    let real_headers = ["sync seconds"];
    let more = if replayed.real.is_some() { &real_headers[..] } else { &[] };
    let mut table = Table::new("replay", title, &[&headers, more].concat());
    for row in &replayed.rows {
        let mut cells = vec![
            row.scheme.to_owned(),
            format!("{:.1}", mib(row.dram_pages * PAGE_BYTES)),
            format!("{:.1}", mib(row.pmem_bytes)),
            pct(row.requests.read_hits, row.requests.reads),
            row.totals.ssd_pages_read.to_string(),
            row.totals.ssd_pages_written.to_string(),
            format!("{:.1}", mib(row.totals.pmem_data_bytes)),
            format!("{:.2}", mib(row.totals.pmem_metadata_bytes)),
            format!("{:.2}", mib(row.index_bytes)),
            seconds(row.seconds),
        ];
        cells.resize(headers.len() + more.len(), String::new());
        table.push(cells);
    }
    if let Some(real) = &replayed.real {
        let mut cells = vec!["real files".to_owned()];
        cells.resize(headers.len() - 1, String::new());
        cells.extend([seconds(real.seconds), seconds(real.sync_seconds)]);
        table.push(cells);
    }
    table
}

/// Warns on standard error of lines that could not be parsed.
pub(super) fn warn_of_bad_lines(replayed: &Replayed) {
    for (path, bad) in replayed.bad_lines.iter().filter(|(_, bad)| bad.count > 0) {
        let path = path.display();
        eprintln!("tidegate: {path}: {} bad lines were left out, such as:", bad.count);
        for (line, why) in &bad.first {
            eprintln!("tidegate: {path}:{line}: {why}");
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "one digit is shown")]
pub(super) fn mib(bytes: u64) -> f64 {
    bytes as f64 / MIB
}

fn pct(part: u64, whole: u64) -> String {
    #[expect(clippy::cast_precision_loss, reason = "two digits are shown")]
    let pct = part as f64 * 100.0 / whole as f64;
    if whole > 0 { format!("{pct:.2}") } else { String::new() }
}

fn seconds(seconds: f64) -> String {
    if seconds < 10.0 { format!("{seconds:.3}") } else { format!("{seconds:.1}") }
}
