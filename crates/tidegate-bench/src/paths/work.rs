//! The operations whose instructions are counted, each in a program of its own.

use std::hint::black_box;
use std::io::Write;
use std::sync::Arc;

use strum::VariantArray;
use tidegate::btt::{self, Btt, BttOptions};
use tidegate::cache::{self, Binding, CacheDevice, CacheDeviceOptions, CacheOptions};
use tidegate::device::null::NullDevice;
use tidegate::device::{BlockDevice, BlockDeviceExt, DeviceError, WriteFlags};
use tidegate::dram::{self, Policy};
use tidegate::pmem::{Domain, Region, RegionOptions};

use crate::error::{BenchError, Result};
use crate::policy::name_of;

/// Number of counted operations.
const ROUNDS: u64 = 9;
/// Number of operations before the counted ones.
const WARM_UP: u64 = 256;
const BLOCK_BYTES: usize = 4096;
const POOL_BYTES: u64 = 64 << 20;
/// Blocks that the operations use.
const BLOCKS: u64 = 64;

/// A program for `tidegate run`: it overwrites a block of a file and syncs it by `fdatasync`. The
/// functions around an operation are the C library's; a program of ours makes system calls of its
/// own, and is not watched for that reason. The arguments are a file and [`OVERWRITE_NUMBERS`].
pub(super) const OVERWRITE: &str = r#"
import ctypes, os, sys
c = ctypes.CDLL(None)
at = lambda function: ctypes.cast(function, ctypes.c_void_p).value
f = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o644)
block_bytes, blocks, warm_up, rounds = map(int, sys.argv[2:])
def once(n):
    os.pwrite(f, b"7" * block_bytes, n % blocks * block_bytes)
    os.fdatasync(f)
for n in range(warm_up):
    once(n)
print("ready", os.getpid(), at(c.getppid), at(c.getpgrp), flush=True)
sys.stdin.readline()
for n in range(rounds):
    c.getppid()
    once(n)
    c.getpgrp()
os._exit(0)
"#;
/// Bytes of a block, blocks, operations before the counted ones, and counted operations.
pub(super) const OVERWRITE_NUMBERS: [u64; 4] = [BLOCK_BYTES as u64, BLOCKS, WARM_UP, ROUNDS];

/// A path that most requests of some user take.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, strum::IntoStaticStr, VariantArray,
)]
#[strum(serialize_all = "kebab-case")]
pub enum HotPath {
    /// A block written to a BTT.
    BttWrite,
    /// A block read from a BTT.
    BttRead,
    /// A block written to a `transit` tier, over an older version or into a free slot.
    TransitWrite,
    /// A page written that the cache has.
    CacheWriteHit,
    /// A page read that the cache has.
    CacheReadHit,
    /// A page read that the cache lacks.
    CacheReadMiss,
}

/// Marks the beginning of an operation for the tracer.
#[inline(never)]
extern "C" fn begin() {
    black_box(1_u32);
}

/// Marks the end of an operation for the tracer.
#[inline(never)]
extern "C" fn end() {
    black_box(2_u64);
}

impl HotPath {
    /// Prepares the operation, tells the tracer, waits for the tracer, and repeats the operation.
    ///
    /// # Errors
    /// Pool or device refuse.
    pub(super) fn work(self) -> Result<()> {
        match self {
            Self::BttWrite => repeat_on(self, &*btt()?, true, BLOCKS),
            Self::BttRead => repeat_on(self, &*btt()?, false, BLOCKS),
            Self::TransitWrite => {
                let tier = dram::open(Policy::Transit, 16 << 20, btt()?);
                repeat_on(self, &*tier.map_err(BenchError::device(name_of(self)))?, true, BLOCKS)
            }
            Self::CacheWriteHit => repeat_on(self, &cache()?, true, BLOCKS),
            Self::CacheReadHit => repeat_on(self, &cache()?, false, BLOCKS),
            Self::CacheReadMiss => repeat_on(self, &cache()?, false, WARM_UP + ROUNDS),
        }
    }
}

fn region() -> Result<Region> {
    let options = RegionOptions { domain: Some(Domain::Adr), ..RegionOptions::default() };
    Ok(Region::anonymous_with(POOL_BYTES, &options)?)
}

fn btt() -> Result<Arc<dyn BlockDevice>> {
    let region = region()?;
    let failed = || BenchError::device("btt");
    btt::create(&region, &BttOptions::default()).map_err(failed())?;
    Ok(Arc::new(Btt::open(Arc::new(region)).map_err(failed())?))
}

fn cache() -> Result<CacheDevice> {
    let region = region()?;
    cache::create(&region, &CacheOptions::default())?;
    let pages = POOL_BYTES / BLOCK_BYTES as u64;
    let backing = NullDevice::new(4096, pages).map_err(BenchError::device("cache"))?;
    let binding = Binding { identity: 1, name: "null".to_owned(), pages };
    let options = CacheDeviceOptions::default();
    Ok(CacheDevice::open(Arc::new(region), Arc::new(backing), binding, options)?)
}

/// Writes or reads one block after the other, from the first again after `blocks` blocks.
fn repeat_on(path: HotPath, device: &dyn BlockDevice, writes: bool, blocks: u64) -> Result<()> {
    let failed = || BenchError::device(name_of(path));
    let mut bytes = vec![7; BLOCK_BYTES];
    // Blocks must be written before reads, except for misses.
    if !writes && blocks == BLOCKS {
        let write = |block: u64| device.write(offset(block), &bytes, WriteFlags::default());
        (0..blocks).try_for_each(write).map_err(failed())?;
    }
    repeat(|round| {
        let at = offset(round % blocks);
        let done: std::result::Result<(), DeviceError> = if writes {
            device.write(at, &bytes, WriteFlags::default())
        } else {
            device.read(at, &mut bytes)
        };
        done.map_err(failed())
    })
}

fn offset(block: u64) -> u64 {
    block * BLOCK_BYTES as u64
}

fn repeat(mut operation: impl FnMut(u64) -> Result<()>) -> Result<()> {
    (0..WARM_UP).try_for_each(&mut operation)?;
    let (first, last) = (begin as *const () as usize, end as *const () as usize);
    let mut stdout = std::io::stdout();
    let told = writeln!(stdout, "ready {} {first} {last}", std::process::id());
    told.and_then(|()| stdout.flush()).map_err(BenchError::os("write to", "stdout"))?;
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).map_err(BenchError::os("read from", "stdin"))?;
    for round in WARM_UP..WARM_UP + ROUNDS {
        begin();
        operation(round)?;
        end();
    }
    // A teardown is not counted, and slow under a tracer.
    std::process::exit(0);
}
