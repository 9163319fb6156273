#![no_main]

use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use tidegate::dram::{Policy, TierSpec};
use tidegate::pmem::Region;
use tidegate::stack::REGISTRY;

fuzz_target!(|data: &[u8]| {
    tidegate::btt::fuzzing::arbitrary_pool(data);
    if let Ok(region) = Region::anonymous(data.len().max(1) as u64) {
        let _ = region.write(0, data);
        let none = TierSpec { policy: Policy::None, bytes: 0 };
        let _ = REGISTRY.describe(&Arc::new(region), none);
    }
});
