//! The kernel's crash images: a guest is stopped in the middle of its writes, and we open what it
//! left.
//!
//! The kernel makes each store durable before the next one that needs it, so what a power cut
//! leaves is what it had stored at some moment: a copy of the NVDIMM while the guest stands still
//! between two instructions. So one guest gives many images; the last one comes from a kill.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tidegate::device::BlockDevice;

use crate::image::Image;
use crate::pool::{
    POOL_BYTES, assert_clean, blank, generations, mix, open_pool, read_all, stamped,
};
use crate::vm::{Guest, Lab, Nvdimm};

/// Images taken while the guest stands still.
const CUTS: u64 = 12;
/// Generations that the guest can write, and the bytes of one.
const GENERATIONS: u64 = 40;
const GENERATION_BYTES: u64 = 512 * 1024;
/// The guest tells that it wrote after each run of this many bytes.
const RUN_BYTES: u64 = 64 * 1024;
/// How long the guest may write nothing.
const IDLE: Duration = Duration::from_secs(60);

/// A disk that the guest writes to.
struct Victim {
    path: PathBuf,
    nvdimm: usize,
    lba_bytes: u32,
    /// Where the flog is in the file, once the disk is formatted.
    flog_range: Range<usize>,
    /// The newest generation of each run that the guest told of.
    acknowledged: BTreeMap<u64, u64>,
}

impl Victim {
    fn new(lab: &Lab, nvdimm: usize, lba_bytes: u32) -> Self {
        let path = lab.path(&lba_bytes.to_string());
        blank(&path, POOL_BYTES);
        Self { path, nvdimm, lba_bytes, flog_range: 0..0, acknowledged: BTreeMap::new() }
    }

    fn generation(&self, generation: u64) -> Vec<u8> {
        stamped(0..GENERATION_BYTES / u64::from(self.lba_bytes), generation, self.lba_bytes)
    }

    /// The first page of the exchange that holds what is to be written here.
    fn first_page(&self) -> u64 {
        (self.nvdimm as u64 - 1) * GENERATIONS * GENERATION_BYTES / 4096
    }

    /// The flog as it is now, for seeing it change.
    fn flog(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.flog_range.len()];
        let read = fs::File::open(&self.path)
            .and_then(|file| file.read_exact_at(&mut bytes, self.flog_range.start as u64));
        read.expect("the pool can be read");
        bytes
    }

    /// Opens an image of this disk as it is after a cut. Returns how many runs the cut left half
    /// written.
    fn assert_image(&self, path: &Path) -> usize {
        let device = open_pool(path);
        let name = path.display().to_string();
        let found = generations(&name, &read_all(&device), device.geometry().block_bytes);
        drop(device);
        assert_clean(path);
        let written = usize::try_from(GENERATION_BYTES / u64::from(self.lba_bytes)).expect("few");
        assert!(found[written..].iter().all(|&generation| generation == 0), "{name}: not written");
        let runs = found[..written]
            .chunks(usize::try_from(RUN_BYTES / u64::from(self.lba_bytes)).expect("few"));
        let mut half_written = 0;
        for (run, generations) in (0..).zip(runs) {
            let oldest = *generations.iter().min().expect("a run has blocks");
            let newest = *generations.iter().max().expect("a run has blocks");
            let acknowledged = self.acknowledged.get(&run).copied().unwrap_or(0);
            assert!(oldest >= acknowledged, "{name}: run {run} lost generation {acknowledged}");
            assert!(newest <= oldest + 1, "{name}: run {run} has generations {oldest} to {newest}");
            half_written += usize::from(newest != oldest);
        }
        half_written
    }
}

#[test]
fn we_open_what_the_kernel_leaves_when_its_power_is_cut() {
    let lab = Lab::enter();
    let mut victims = [Victim::new(&lab, 1, 4096), Victim::new(&lab, 2, 512)];
    let nvdimms: Vec<_> = victims.iter().map(|victim| Nvdimm::plain(&victim.path)).collect();
    let mut guest = Guest::boot(&lab, &nvdimms);
    for victim in &mut victims {
        guest.detach(victim.nvdimm);
        guest.format(victim.nvdimm, victim.lba_bytes, "d3a1b1de-7a15-4f60-8a0e-1f34a3f0c1b2");
        let blocks = guest.disk_bytes(victim.nvdimm) / u64::from(victim.lba_bytes);
        guest.write_disk(victim.nvdimm, 0, &stamped(0..blocks, 0, victim.lba_bytes));
        victim.flog_range = Image::read(&victim.path).flog_range();
    }
    start_writers(&mut guest, &victims);
    let image = lab.path("image");
    let (mut half_written, mut rewound) = (0, 0);
    for cut in 0..CUTS {
        wait_for_writes(&guest, &mut victims, cut);
        guest.freeze();
        while let Some(line) = guest.line_if_any() {
            note(&guest, &mut victims, &line);
        }
        for victim in &victims {
            fs::copy(&victim.path, &image).expect("the image can be copied");
            half_written += victim.assert_image(&image);
            rewound += assert_rewound(victim, &image);
        }
        guest.thaw();
    }
    wait_for_writes(&guest, &mut victims, CUTS);
    guest.cut();
    for victim in &victims {
        half_written += victim.assert_image(&victim.path);
    }
    assert!(half_written > 0, "no cut fell into the middle of a run");
    assert!(rewound > 0, "no write could be rewound to before its map entry");
}

fn start_writers(guest: &mut Guest, victims: &[Victim]) {
    let content: Vec<u8> = victims
        .iter()
        .flat_map(|victim| (1..=GENERATIONS).flat_map(|generation| victim.generation(generation)))
        .collect();
    guest.fill_exchange(&content);
    let exchange = guest.exchange();
    let writers = victims.iter().map(|victim| {
        let (region, page) = (guest.region(victim.nvdimm), victim.first_page());
        format!("write_generations {region} {exchange} {page} {GENERATIONS} & ")
    });
    let writers: String = writers.collect();
    guest.start(&writers);
}

/// Waits for a number of runs, then for the next write to a flog: the guest is in the middle of a
/// run.
fn wait_for_writes(guest: &Guest, victims: &mut [Victim], cut: u64) {
    let mut left = 10 + mix(cut) % 20;
    while left > 0 {
        left -= u64::from(note(guest, victims, &guest.line()));
    }
    let victim = &victims[usize::try_from(cut % 2).expect("0 or 1")];
    let (before, since) = (victim.flog(), Instant::now());
    while victim.flog() == before {
        assert!(since.elapsed() < IDLE, "the guest writes no more\n{}", guest.console_tail());
    }
}

/// Takes note of a line of the guest; true if it tells of a write.
fn note(guest: &Guest, victims: &mut [Victim], line: &str) -> bool {
    let Some(rest) = line.strip_prefix("@written ") else {
        assert!(["", "@status 0"].contains(&line), "{line}\n{}", guest.console_tail());
        return false;
    };
    let numbers: Vec<u64> =
        rest.split(' ').map(|number| number.parse().expect("the guest prints numbers")).collect();
    let [region, run, generation] = numbers[..] else { panic!("three numbers, not {line:?}") };
    let victim = victims.iter_mut().find(|v| u64::from(guest.region(v.nvdimm)) == region);
    victim.expect("the guest writes to its disks").acknowledged.insert(run, generation);
    true
}

/// Takes back the map entry of each lane's last write, as if the cut had come between it and the
/// flog entry, and asserts that opening the image completes these writes. Returns how many there
/// were.
fn assert_rewound(victim: &Victim, path: &Path) -> usize {
    let mut image = Image::read(path);
    let rewound = image.rewind_maps();
    image.write(path);
    assert_eq!(open_pool(path).summary().recovered_lanes as usize, rewound);
    victim.assert_image(path);
    rewound
}
