//! Counts the events of traces, and how fast they are read: `count_events [--format F] TRACE...`
//!
//! `cargo run --release -p tidegate-replay --example count_events -- app.csv.zst`

use std::collections::{BTreeMap, HashSet};
use std::error::Error;
use std::path::PathBuf;
use std::time::Instant;

use clap::Parser;
use tidegate_replay::trace::{Format, Op, open};

#[derive(Parser)]
struct Args {
    /// The format of all; found out if it is not given
    #[arg(long)]
    format: Option<Format>,
    traces: Vec<PathBuf>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    for path in &args.traces {
        let started = Instant::now();
        let mut trace = open(path, args.format)?;
        let mut kinds = BTreeMap::<&str, (u64, u64)>::new();
        let (mut files, mut streams) = (HashSet::new(), HashSet::new());
        let (mut last_us, mut events) = (0, 0u32);
        for event in &mut trace {
            let event = event?;
            let (name, file, len_bytes) = match event.op {
                Op::Read { file, len_bytes, .. } => ("read", Some(file), len_bytes),
                Op::Write { file, len_bytes, .. } => ("write", Some(file), len_bytes),
                Op::Sync { file } => ("sync", Some(file), 0),
                Op::SyncAll => ("sync-all", None, 0),
                Op::Resize { file, .. } => ("resize", Some(file), 0),
                Op::Remove { file } => ("remove", Some(file), 0),
            };
            let (count, bytes) = kinds.entry(name).or_default();
            (*count, *bytes) = (*count + 1, *bytes + len_bytes);
            files.extend(file);
            streams.insert(event.stream);
            (last_us, events) = (event.time_us, events + 1);
        }
        let seconds = started.elapsed().as_secs_f64();
        println!("{}: {}", path.display(), trace.format().name());
        for (name, (count, bytes)) in kinds {
            println!("  {name:<8} {count:>10} {bytes:>16} bytes");
        }
        println!(
            "  {} files, {} streams, {last_us} us, {:.2} million events a second",
            files.len(),
            streams.len(),
            f64::from(events) / seconds / 1e6
        );
        println!("  {} bad lines", trace.bad_lines().count);
        for (number, why) in &trace.bad_lines().first {
            println!("    line {number}: {why}");
        }
    }
    Ok(())
}
