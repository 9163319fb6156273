//! Set-up that all tests of one run share, although the runner gives each test a process of its
//! own.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::path::Path;

/// Calls `make` unless a test of the same run has done so for this `name`. Tests that come
/// meanwhile wait. The next run makes it anew: its sources may have changed.
///
/// Without a runner that names its run (`NEXTEST_RUN_ID`), each call makes it.
pub(crate) fn once_per_run(name: &str, make: impl FnOnce()) {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.run"));
    let mut stamp = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    stamp.lock().expect("the stamp can be locked");
    let run = std::env::var("NEXTEST_RUN_ID").unwrap_or_default();
    let mut made_in = String::new();
    stamp.read_to_string(&mut made_in).expect("the stamp can be read");
    if run.is_empty() || made_in != run {
        make();
        stamp.set_len(0).expect("the stamp can be emptied");
        stamp.rewind().expect("the stamp is a file");
        stamp.write_all(run.as_bytes()).expect("the stamp can be written");
    }
}
