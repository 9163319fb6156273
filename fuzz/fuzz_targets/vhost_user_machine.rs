#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| tidegate_serve::vhost_user::fuzzing::machine(data));
