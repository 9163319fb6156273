//! Makes traces of typical workloads, for `make papers`: `make_traces DIR [NAME...]`
//!
//! Each is what a program does by its documented way of writing, with pages chosen by a generator
//! of a fixed seed: the same traces each time, in the format `csv`. Without names, all are made.

use std::error::Error;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use clap::Parser;
use tidegate_bench::pattern::{Pattern, Picker, Rng};

#[derive(Parser)]
struct Args {
    /// Where the traces go; made if it is not there
    dir: PathBuf,
    /// The traces that are made; all if none is named
    names: Vec<String>,
}

const PAGE_BYTES: u64 = 4096;
const SEED: u64 = 14;
const STREAM: u64 = 1;
/// One operation begins so long after the other.
const STEP_US: u64 = 10;

/// A workload: the name of its file, and what writes it.
type Workload = (&'static str, fn(&mut Trace) -> io::Result<()>);

const WORKLOADS: [Workload; 8] = [
    ("own-sqlite-rollback", sqlite_rollback),
    ("own-sqlite-wal", sqlite_wal),
    ("own-file-server", file_server),
    ("own-zipf", zipf),
    ("own-small-updates", small_updates),
    ("own-iphoto", |trace| IPHOTO.write(trace)),
    ("own-usr1", |trace| USR1.write(trace)),
    ("own-usr2", |trace| USR2.write(trace)),
];

fn main() -> Result<(), Box<dyn Error>> {
    let Args { dir, names } = Args::parse();
    std::fs::create_dir_all(&dir)?;
    let is_asked = |name: &str| names.is_empty() || names.iter().any(|it| it == name);
    for (name, write) in WORKLOADS.into_iter().filter(|(name, _)| is_asked(name)) {
        let mut trace = Trace::create(&dir.join(format!("{name}.csv")))?;
        write(&mut trace)?;
        trace.out.flush()?;
    }
    Ok(())
}

/// A trace that is being written.
struct Trace {
    out: BufWriter<File>,
    time_us: u64,
    random: Rng,
}

impl Trace {
    fn create(path: &Path) -> io::Result<Self> {
        let mut out = BufWriter::new(File::create(path)?);
        writeln!(out, "ts_us,tid,op,file,offset,len")?;
        Ok(Self { out, time_us: 0, random: Rng::new(SEED, STREAM) })
    }

    fn add(&mut self, op: &str, file: &str, offset_bytes: u64, len_bytes: u64) -> io::Result<()> {
        self.time_us += STEP_US;
        writeln!(self.out, "{},1,{op},{file},{offset_bytes},{len_bytes}", self.time_us)
    }

    fn write(&mut self, file: &str, offset_bytes: u64, len_bytes: u64) -> io::Result<()> {
        self.add("write", file, offset_bytes, len_bytes)
    }

    fn sync(&mut self, file: &str) -> io::Result<()> {
        self.add("fsync", file, 0, 0)
    }

    /// A number from `least` to `most`.
    fn between(&mut self, least: u64, most: u64) -> u64 {
        least + self.random.below(most - least + 1)
    }
}

/// Pages of a database, a few of them hot.
fn hot_pages(pages: u64) -> Picker {
    Picker::new(Pattern::Zipf { theta: 0.9 }, pages, SEED, 0, 1)
}

/// `SQLite` with a rollback journal and `synchronous=FULL`: the journal gets the pages' former
/// content and is synced, its header counts them and is synced, the pages change and are synced,
/// and the journal goes.
fn sqlite_rollback(trace: &mut Trace) -> io::Result<()> {
    const SECTOR_BYTES: u64 = 512;
    const RECORD_BYTES: u64 = PAGE_BYTES + 8;
    let mut pages = hot_pages(8192);
    for _ in 0..6000 {
        let changed: Vec<u64> =
            (0..trace.between(1, 4)).map(|_| pages.next_block() * PAGE_BYTES).collect();
        trace.write("/db-journal", 0, SECTOR_BYTES)?;
        let mut end = SECTOR_BYTES;
        for offset in &changed {
            trace.add("read", "/db", *offset, PAGE_BYTES)?;
            trace.write("/db-journal", end, RECORD_BYTES)?;
            end += RECORD_BYTES;
        }
        trace.sync("/db-journal")?;
        trace.write("/db-journal", 0, 12)?;
        trace.sync("/db-journal")?;
        for offset in changed {
            trace.write("/db", offset, PAGE_BYTES)?;
        }
        trace.sync("/db")?;
        trace.add("unlink", "/db-journal", 0, 0)?;
    }
    Ok(())
}

/// `SQLite` with a write-ahead log and `synchronous=FULL`: frames of 24 bytes and a page, synced
/// with each transaction; after a thousand frames the newest of each page go to the database.
fn sqlite_wal(trace: &mut Trace) -> io::Result<()> {
    const HEADER_BYTES: u64 = 32;
    const FRAME_BYTES: u64 = PAGE_BYTES + 24;
    let mut pages = hot_pages(8192);
    let (mut end, mut logged) = (HEADER_BYTES, Vec::new());
    trace.write("/db-wal", 0, HEADER_BYTES)?;
    for _ in 0..6000 {
        for _ in 0..trace.between(1, 4) {
            let page = pages.next_block();
            trace.write("/db-wal", end, FRAME_BYTES)?;
            end += FRAME_BYTES;
            logged.push(page);
        }
        trace.sync("/db-wal")?;
        if logged.len() < 1000 {
            continue;
        }
        logged.sort_unstable();
        logged.dedup();
        for page in logged.drain(..) {
            trace.write("/db", page * PAGE_BYTES, PAGE_BYTES)?;
        }
        trace.sync("/db")?;
        trace.write("/db-wal", 0, HEADER_BYTES)?;
        end = HEADER_BYTES;
    }
    Ok(())
}

/// Clients of a file server, as of dbench: files are written in pieces, some are flushed, read, and
/// removed.
fn file_server(trace: &mut Trace) -> io::Result<()> {
    const PIECE_BYTES: u64 = 65_536;
    let name = |number: u64| format!("/share/{number}");
    for number in 0..3000_u64 {
        let file = name(number);
        let len_bytes = trace.between(1, 64) * 4000;
        for offset in (0..len_bytes).step_by(65_536) {
            trace.write(&file, offset, PIECE_BYTES.min(len_bytes - offset))?;
        }
        if number.is_multiple_of(7) {
            trace.sync(&file)?;
        }
        let read = number.saturating_sub(trace.between(0, 100));
        let offset = trace.between(0, 15) * 4096;
        trace.add("read", &name(read), offset, PIECE_BYTES)?;
        if number >= 200 && !number.is_multiple_of(5) {
            trace.add("unlink", &name(number - 200), 0, 0)?;
        }
    }
    Ok(())
}

/// Reads and writes of whole pages, some of them hot, with a sync after eight.
fn zipf(trace: &mut Trace) -> io::Result<()> {
    let mut pages = hot_pages(16_384);
    for number in 0..120_000_u64 {
        let op = if trace.between(0, 1) == 0 { "read" } else { "write" };
        trace.add(op, "/volume", pages.next_block() * PAGE_BYTES, PAGE_BYTES)?;
        if number % 8 == 7 {
            trace.sync("/volume")?;
        }
    }
    Ok(())
}

/// Records of a few hundred bytes that change in their places, each synced: mostly clean pages.
fn small_updates(trace: &mut Trace) -> io::Result<()> {
    let mut pages = hot_pages(16_384);
    for page in 0..16_384 {
        trace.write("/records", page * PAGE_BYTES, PAGE_BYTES)?;
    }
    trace.sync("/records")?;
    for _ in 0..60_000 {
        let len_bytes = trace.between(64, 900);
        let in_page = trace.between(0, PAGE_BYTES - len_bytes);
        trace.write("/records", pages.next_block() * PAGE_BYTES + in_page, len_bytes)?;
        trace.sync("/records")?;
    }
    Ok(())
}

/// A workload of partly dirty pages, as AFCM's figure 2 shows of Iphoto, Usr1 and Usr2.
///
/// Files of at most a page are saved again and again, each by a write of all of it and a sync, so a
/// page is dirty as far as its file goes. Between two saves other data is read, and written without
/// a sync. What the paper does not say is assumed here: the numbers below. The saved files are 30 %
/// of all pages, so whole pages of them do not fit the paper's persistent memory.
struct Desktop {
    /// Saved files of a page each.
    files: u64,
    /// Exponent of their popularity.
    theta: f64,
    /// Sizes of the files: percent of them, and the least and most bytes.
    sizes: [(u64, [u64; 2]); 3],
    /// Pages of the data that is read.
    read_pages: u64,
    /// Saves between two reads of a page.
    saves_a_read: u64,
    /// Pages that are written without a sync.
    unsynced_pages: u64,
    /// Bytes of them that are written for each save.
    unsynced_bytes: u64,
}

/// An application for photographs: settings and thumbnails, and pictures.
const IPHOTO: Desktop = Desktop {
    files: 3000,
    theta: 0.3,
    sizes: [(30, [64, 512]), (10, [513, 3072]), (60, [PAGE_BYTES, PAGE_BYTES])],
    read_pages: 6600,
    saves_a_read: 8,
    unsynced_pages: 400,
    unsynced_bytes: 256,
};

/// A desktop of which half of the written bytes are never synced.
const USR1: Desktop = Desktop {
    files: 3000,
    theta: 0.3,
    sizes: [(20, [64, 512]), (10, [513, 3072]), (70, [PAGE_BYTES, PAGE_BYTES])],
    read_pages: 5600,
    saves_a_read: 3,
    unsynced_pages: 1400,
    unsynced_bytes: 3200,
};

/// The same desktop at another time: hardly anything is written without a sync.
const USR2: Desktop = Desktop {
    files: 3000,
    theta: 0.3,
    sizes: [(20, [64, 512]), (10, [513, 3072]), (70, [PAGE_BYTES, PAGE_BYTES])],
    read_pages: 6600,
    saves_a_read: 32,
    unsynced_pages: 400,
    unsynced_bytes: 128,
};

impl Desktop {
    const SAVES: u64 = 60_000;

    fn write(&self, trace: &mut Trace) -> io::Result<()> {
        let lens: Vec<u64> = (0..self.files).map(|_| self.len_bytes(trace)).collect();
        let theta = self.theta;
        let mut saved = Picker::new(Pattern::Zipf { theta }, self.files, SEED, 0, 1);
        let mut read = hot_pages(self.read_pages);
        let mut unsynced_bytes = 0;
        for page in 0..self.read_pages {
            trace.add("read", "/library", page * PAGE_BYTES, PAGE_BYTES)?;
        }
        for number in 0..Self::SAVES {
            let file = saved.next_block();
            let name = format!("/settings/{file}");
            trace.write(&name, 0, lens[usize::try_from(file).unwrap_or(0)])?;
            trace.sync(&name)?;
            if number % self.saves_a_read == 0 {
                trace.add("read", "/library", read.next_block() * PAGE_BYTES, PAGE_BYTES)?;
            }
            unsynced_bytes += self.unsynced_bytes;
            if unsynced_bytes >= PAGE_BYTES {
                unsynced_bytes -= PAGE_BYTES;
                let page = trace.random.below(self.unsynced_pages);
                trace.write("/scratch", page * PAGE_BYTES, PAGE_BYTES)?;
            }
        }
        Ok(())
    }

    fn len_bytes(&self, trace: &mut Trace) -> u64 {
        let mut pct = trace.between(1, 100);
        for (share_pct, [least, most]) in self.sizes {
            if pct <= share_pct {
                return trace.between(least, most);
            }
            pct -= share_pct;
        }
        PAGE_BYTES
    }
}
