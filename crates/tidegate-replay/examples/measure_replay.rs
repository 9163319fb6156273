//! Measures a replay in CPU time, both passes apart: `measure_replay [--scheme NAME] TRACE...`
//!
//! `cargo run --release -p tidegate-replay --example measure_replay -- app.csv.zst`
//!
//! The first pass decompresses and reads the trace and finds its footprint, the second one plays
//! it. Of a short trace the operations are kept between them; those of a long one are read again,
//! which is part of the second pass then. Sizes of memory are the defaults of `tidegate replay`.

use std::error::Error;
use std::path::{Path, PathBuf};

use clap::Parser;
use rustix::time::{ClockId, clock_gettime};
use tidegate::pmem::MediaModel;
use tidegate_replay::model::costs::Costs;
use tidegate_replay::profile::Profile;
use tidegate_replay::replay::KEPT_OPERATIONS_MAX;
use tidegate_replay::replay::amount::Amount;
use tidegate_replay::replay::case::Case;
use tidegate_replay::scheme::{Sizes, scheme};
use tidegate_replay::trace::{merge, open};

#[derive(Parser)]
struct Args {
    /// The scheme that is played
    #[arg(long, default_value = "sccm")]
    scheme: String,
    #[arg(required = true)]
    traces: Vec<PathBuf>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    println!("Millions a second of CPU time; pages are those that reads and writes cover.");
    for path in &args.traces {
        measure(path, &args.scheme)?;
    }
    println!("peak of memory {} kB", peak_kb().unwrap_or_default());
    Ok(())
}

fn measure(path: &Path, name: &str) -> Result<(), Box<dyn Error>> {
    let started = cpu_seconds();
    let (mut profile, mut kept) = (Profile::default(), Vec::new());
    for event in merge(vec![open(path, None)?]) {
        let event = event?;
        profile.add_event(&event);
        if kept.len() < KEPT_OPERATIONS_MAX {
            kept.push(event.op);
        }
    }
    let looked = cpu_seconds();
    let pages = profile.footprint_pages;
    let sizes = Sizes {
        dram_pages: Amount::Pct(50.0).pages(pages),
        pmem_bytes: Amount::Pct(20.0).bytes(pages),
        pmem_media: MediaModel::dram(),
        costs: Costs::optane(),
        footprint_pages: pages,
        atomic: false,
    };
    let entry = scheme(name).ok_or("no scheme of this name")?;
    let mut case = Case::new(entry, sizes, &"nvme".parse()?)?;
    if kept.len() < KEPT_OPERATIONS_MAX {
        kept.iter().try_for_each(|op| case.play(op))?;
    } else {
        for event in merge(vec![open(path, None)?]) {
            case.play(&event?.op)?;
        }
    }
    let played = cpu_seconds();
    let row = case.row();
    let (first, second) = (looked - started, played - looked);
    #[expect(clippy::cast_precision_loss, reason = "numbers for people")]
    let millions = |count: u64, seconds: f64| count as f64 / seconds / 1e6;
    let (operations, touched) = (profile.operations, row.requests.reads + row.requests.writes);
    println!(
        "{}: {operations} operations, {touched} pages: read and looked at {:.2}, played {:.2} \
         ({:.2} pages), both {:.2} operations ({:.2} pages)",
        path.display(),
        millions(operations, first),
        millions(operations, second),
        millions(touched, second),
        millions(operations, first + second),
        millions(touched, first + second),
    );
    Ok(())
}

/// CPU time of this thread.
#[expect(clippy::cast_precision_loss, reason = "times need no more than 53 bits")]
fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn peak_kb() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.split_whitespace().next()?.parse().ok()
}
