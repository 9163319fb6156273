#![no_main]

use libfuzzer_sys::fuzz_target;
use tidegate::pmem::Region;

fuzz_target!(|data: &[u8]| {
    tidegate::btt::fuzzing::arbitrary_pool(data);
    if let Ok(region) = Region::anonymous(data.len().max(1) as u64) {
        let _ = region.write(0, data);
        let _ = tidegate::pool::identify(&region);
    }
});
