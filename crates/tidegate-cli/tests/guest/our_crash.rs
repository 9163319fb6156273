//! Our crash images, opened by the kernel: it is one more judge of the crash simulator.
//!
//! The simulator runs threads of our engine under random interleavings, cuts the power before each
//! fence, lets any of the stores that are not durable yet be lost, and asks its judges what every
//! block holds. The kernel in the guest is one: for each image it looks for a BTT on the NVDIMM,
//! recovers it and reads.

use std::cell::RefCell;
use std::path::PathBuf;
use std::sync::Arc;

use tidegate::btt::check::check;
use tidegate::btt::{Btt, BttOptions, FlogSlots, create};
use tidegate::device::BlockDevice;
use tidegate::pmem::Region;
use tidegate_sim::explore::{Effort, Explorer, Pool};
use tidegate_sim::history::Mix;
use tidegate_sim::medium::{Granule, StoreOrder};
use tidegate_sim::random::{Random, seeds};
use tidegate_sim::subject::{Peer, Subject};

use crate::image::Image;
use crate::pool::{POOL_BYTES, assert_clean, blank, open_pool, read_all};
use crate::vm::{Guest, Lab, Nvdimm};

const BLOCK_BYTES: usize = 4096;
/// Blocks that the histories write: few, so that lanes meet.
const BLOCKS_USED: &[u64] = &[0, 1, 2, 3, 4, 5];
/// One image in this many is read whole by the kernel, the others only at their start.
const READ_WHOLE_ONE_IN: u64 = 8;
/// The blocks that the histories write, and some more.
const FIRST_BYTES: usize = 16 * BLOCK_BYTES;

/// A kernel that waits for images.
struct KernelJudge {
    guest: Guest,
    path: PathBuf,
    images: u64,
    /// Images in which the kernel completed a map entry.
    completed: u64,
}

thread_local! {
    /// The simulator calls its judges by plain functions, on the thread of the test.
    static KERNEL: RefCell<Option<KernelJudge>> = const { RefCell::new(None) };
}

impl KernelJudge {
    /// What the device holds once the kernel has recovered `image`, as we read it. The kernel reads
    /// the same, and leaves nothing for a check to find.
    fn read(&mut self, image: &[u8]) -> Vec<u8> {
        self.guest.detach(1);
        let before = Image::of(image);
        before.write(&self.path);
        self.guest.attach(1);
        self.completed += u64::from(Image::read(&self.path).map() != before.map());
        assert_clean(&self.path);
        let content = read_all(&open_pool(&self.path));
        let whole = self.images.is_multiple_of(READ_WHOLE_ONE_IN);
        let bytes = if whole { content.len() } else { FIRST_BYTES };
        let read = self.guest.read_disk_at(1, 0, bytes);
        assert!(read == content[..bytes], "we read something else than the kernel");
        self.images += 1;
        content
    }
}

/// A BTT as large as the kernel wants it, judged by the kernel.
struct FullSizeBtt {
    options: BttOptions,
    peers: [Peer; 1],
}

impl FullSizeBtt {
    fn new(flog_slots: FlogSlots) -> Self {
        let read = |image: &mut [u8]| {
            KERNEL.with_borrow_mut(|kernel| {
                Ok(kernel.as_mut().expect("the test booted a guest").read(image))
            })
        };
        let lba_bytes = u32::try_from(BLOCK_BYTES).expect("small");
        Self {
            options: BttOptions { lba_bytes, flog_slots, ..BttOptions::default() },
            peers: [Peer { name: "the kernel in the guest", read }],
        }
    }
}

impl Subject for FullSizeBtt {
    fn create(&self, region: &Region) -> Result<(), String> {
        create(region, &self.options).map(drop).map_err(|error| error.to_string())
    }

    fn open(&self, region: &Arc<Region>) -> Result<Arc<dyn BlockDevice>, String> {
        let btt = Btt::open(Arc::clone(region)).map_err(|error| error.to_string())?;
        Ok(Arc::new(btt))
    }

    fn check(&self, region: &Region) -> Result<(), String> {
        let report = check(region, &mut |_| ()).map_err(|error| error.to_string())?;
        if report.clean() { Ok(()) } else { Err(format!("{:?}", report.findings)) }
    }

    fn peers(&self) -> &[Peer] {
        &self.peers
    }

    fn region_bytes(&self) -> u64 {
        POOL_BYTES
    }

    fn rounds_after_recovery(&self) -> u32 {
        1
    }
}

#[test]
fn the_kernel_opens_what_we_leave_when_our_power_is_cut() {
    let lab = Lab::enter();
    let path = lab.path("pool");
    blank(&path, POOL_BYTES);
    let guest = Guest::boot(&lab, &[Nvdimm::plain(&path)]);
    KERNEL.set(Some(KernelJudge { guest, path, images: 0, completed: 0 }));
    for seed in seeds("guest", 1) {
        crash_and_judge(FlogSlots::ZeroOne, seed);
        crash_and_judge(FlogSlots::ZeroTwo, seed);
    }
    let KernelJudge { guest, images, completed, .. } = KERNEL.take().expect("set above");
    assert!(images > 20, "only {images} images");
    assert!(completed > 0, "the kernel completed no write in {images} images");
    guest.power_off();
}

/// One history of three threads, crashed everywhere.
fn crash_and_judge(flog_slots: FlogSlots, seed: u64) {
    let subject = FullSizeBtt::new(flog_slots);
    // Some blocks were written more than once, some never.
    let pool = Pool::prepare(&subject, &[0, 1, 2, 3, 0, 1]).expect("a pool can be made");
    let effort = Effort {
        exhaustive_images: 0,
        sampled_images: 1,
        deep_one_in: u64::MAX,
        granule: Granule::Word,
        order: StoreOrder::Word,
    };
    let mixture =
        Mix { threads: 3, ops: 2, lbas: BLOCKS_USED, blocks_max: 2, reads_pct: 5, others_pct: 8 };
    let plan = mixture.plan(&mut Random::new(seed), &mut 1000);
    let mut explorer = Explorer::new(&subject, pool, 3, effort).expect("a simulator");
    let result = explorer.sampled(&plan, seed);
    result.unwrap_or_else(|failure| panic!("TIDEGATE_SIM_SEED={seed}, {flog_slots:?}\n{failure}"));
}
