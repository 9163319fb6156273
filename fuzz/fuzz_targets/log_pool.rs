#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    tidegate::log::recover::fuzzing::arbitrary_pool(data);
    tidegate::log::recover::fuzzing::patched_pool(data);
});
