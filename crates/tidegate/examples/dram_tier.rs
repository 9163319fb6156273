//! Stacks a DRAM tier on a BTT: writes are acknowledged from DRAM and durable after the next flush.
//!
//! `cargo run -p tidegate --example dram_tier -- lru:8M` tries another policy than `transit:8M`.

use std::error::Error;
use std::sync::Arc;

use tidegate::btt::{self, Btt, BttOptions};
use tidegate::device::{BlockDevice, BlockDeviceExt, WriteFlags};
use tidegate::dram::{self, TierSpec};
use tidegate::pmem::Region;

const BLOCK_BYTES: usize = 4096;

fn main() -> Result<(), Box<dyn Error>> {
    let spec = std::env::args().nth(1).unwrap_or_else(|| "transit:8M".to_owned());
    run(spec.parse()?)
}

fn run(spec: TierSpec) -> Result<(), Box<dyn Error>> {
    let region = Arc::new(Region::anonymous(64 << 20)?);
    btt::create(&region, &BttOptions::default())?;
    let btt: Arc<dyn BlockDevice> = Arc::new(Btt::open(region)?);
    let tier = dram::open(spec.policy, spec.bytes, Arc::clone(&btt))?;

    for block in 0..100_u8 {
        let offset = u64::from(block) * BLOCK_BYTES as u64;
        tier.write(offset, &[block; BLOCK_BYTES], WriteFlags::default())?;
    }
    tier.flush()?;

    // The BTT has it all: what the tier still holds is clean.
    let mut found = [0; BLOCK_BYTES];
    btt.read(42 * BLOCK_BYTES as u64, &mut found)?;
    assert_eq!(found, [42; BLOCK_BYTES]);
    println!("{spec}: {} dirty slots after the flush", tier.summary().dirty_slots);
    tier.drain()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn it_runs_with_any_policy() {
        for spec in ["none", "transit:1M", "pmbd:1M", "lru:1M", "coactive:1M"] {
            super::run(spec.parse().unwrap()).unwrap();
        }
    }
}
