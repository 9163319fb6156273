#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| tidegate::cache::fuzzing::patched_pool(data));
