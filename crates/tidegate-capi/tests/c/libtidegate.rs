//! `libtidegate.so` and its header: the example of the manual page, and each function through C's
//! types.

use std::ffi::{CStr, CString, c_void};
use std::path::Path;
use std::process::Command;

use tidegate_capi::tidegate::{
    TIDEGATE_READ_ONLY, TIDEGATE_REPAIR, TidegatePool, tidegate_block_bytes, tidegate_blocks,
    tidegate_check, tidegate_close, tidegate_create, tidegate_errormsg, tidegate_flush,
    tidegate_open, tidegate_read, tidegate_set_error, tidegate_version, tidegate_write,
    tidegate_zero,
};

use crate::linked::{folder, libraries, scratch, succeed};

#[test]
fn the_header_is_the_one_that_cbindgen_makes() {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let mut places: Vec<_> = std::env::split_paths(&path).collect();
    places.push(target.join("tools/bin"));
    let cbindgen = places.iter().map(|place| place.join("cbindgen")).find(|it| it.exists());
    let cbindgen = cbindgen.expect("cbindgen is not here: scripts/install-deps test installs it");
    let mut command = Command::new(cbindgen);
    command.args(["--quiet", "--config", "cbindgen.toml", "src/tidegate.rs"]);
    let made = succeed(command.current_dir(folder()));
    let kept = std::fs::read_to_string(folder().join("include/tidegate.h")).unwrap();
    assert!(made == kept, "run in {}: {command:?} >include/tidegate.h", folder().display());
}

#[test]
fn the_header_is_c99_and_cpp() {
    for (compiler, language) in [("cc", ["-std=c99", "-xc"]), ("g++", ["-std=c++11", "-xc++"])] {
        let mut command = Command::new(compiler);
        command.args(["-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only"]);
        succeed(command.args(language).arg(folder().join("include/tidegate.h")));
    }
}

#[test]
fn the_example_counts() {
    let dir = scratch();
    let program = dir.path().join("blocks");
    let mut compiler = Command::new("cc");
    compiler.args(["-Wall", "-Wextra", "-Werror", "-std=c99", "-o"]).arg(&program);
    compiler.arg(folder().join("examples/blocks.c")).arg("-I").arg(folder().join("include"));
    succeed(compiler.arg("-L").arg(libraries()).arg("-ltidegate"));
    let run = || {
        let mut command = Command::new(&program);
        command.arg(dir.path().join("counter")).env("LD_LIBRARY_PATH", libraries());
        succeed(&mut command)
    };
    assert_eq!([run(), run(), run()], ["1\n", "2\n", "3\n"]);
}

/// A pool through the functions of C. All pointers that it passes are valid during the calls.
struct Pool(*mut TidegatePool);

fn c(text: &str) -> CString {
    CString::new(text).unwrap()
}

fn create(path: &Path, engine: &str, bytes: u64, options: &str) -> i32 {
    let (path, engine, options) = (c(path.to_str().unwrap()), c(engine), c(options));
    // SAFETY: all three are C strings.
    unsafe { tidegate_create(path.as_ptr(), engine.as_ptr(), bytes, options.as_ptr()) }
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap()
}

fn message() -> String {
    // SAFETY: the message is a C string until the thread's next error.
    unsafe { CStr::from_ptr(tidegate_errormsg()) }.to_str().unwrap().to_owned()
}

impl Pool {
    fn open(path: &Path, dram: Option<&str>, flags: u32) -> Option<Self> {
        let (path, dram) = (c(path.to_str().unwrap()), dram.map(c));
        let dram = dram.as_ref().map_or(std::ptr::null(), |dram| dram.as_ptr());
        // SAFETY: the texts are C strings or null.
        let pool = unsafe { tidegate_open(path.as_ptr(), std::ptr::null(), dram, flags) };
        (!pool.is_null()).then_some(Self(pool))
    }

    fn write(&self, offset: u64, data: &[u8]) -> i32 {
        // SAFETY: the pool is open, and the buffer has its length.
        unsafe { tidegate_write(self.0, data.as_ptr().cast::<c_void>(), offset, data.len()) }
    }

    fn read(&self, offset: u64) -> Option<u8> {
        let mut data = [0xEE; 4096];
        // SAFETY: the pool is open, and the buffer has its length.
        let result = unsafe { tidegate_read(self.0, data.as_mut_ptr().cast(), offset, 4096) };
        assert!(result != 0 || data.iter().all(|&byte| byte == data[0]));
        (result == 0).then_some(data[0])
    }

    fn close(self) -> i32 {
        // SAFETY: the pool is open, and this is its last use.
        unsafe { tidegate_close(self.0) }
    }
}

#[test]
fn a_pool_is_created_written_and_read() {
    let dir = scratch();
    let path = dir.path().join("pool");
    assert_eq!(create(&path, "btt", 32 << 20, ""), 0, "{}", message());
    let pool = Pool::open(&path, None, 0).expect("a pool");
    // SAFETY: the pool is open.
    let bytes = unsafe { tidegate_block_bytes(pool.0) };
    // SAFETY: the pool is open.
    let blocks = unsafe { tidegate_blocks(pool.0) };
    assert!(bytes == 4096 && blocks > 7000, "{blocks}");
    assert_eq!(
        (pool.write(4096, &[7; 8192]), pool.read(4096), pool.read(8192)),
        (0, Some(7), Some(7))
    );
    // SAFETY: the pool is open.
    assert_eq!(unsafe { tidegate_zero(pool.0, 4096, 4096) }, 0);
    // SAFETY: the pool is open.
    assert_eq!(unsafe { tidegate_set_error(pool.0, 8192) }, 0);
    assert_eq!((pool.read(4096), pool.read(8192), errno()), (Some(0), None, libc::EIO));
    // SAFETY: the pool is open.
    assert_eq!(unsafe { tidegate_flush(pool.0) }, 0);
    assert_eq!((pool.write(100, &[7; 4096]), errno()), (-1, libc::EINVAL));
    assert_eq!((pool.write(blocks * 4096, &[7; 4096]), errno()), (-1, libc::EINVAL));
    let text = c(path.to_str().unwrap());
    // SAFETY: the path is a C string.
    assert_eq!((unsafe { tidegate_check(text.as_ptr(), 0) }, errno()), (-1, libc::EAGAIN));
    assert_eq!(pool.close(), 0);
    // SAFETY: the path is a C string.
    assert_eq!(unsafe { tidegate_check(text.as_ptr(), TIDEGATE_REPAIR) }, 1, "the marked block");
    let pool = Pool::open(&path, None, TIDEGATE_READ_ONLY).expect("a pool");
    assert_eq!((pool.write(0, &[7; 4096]), errno()), (-1, libc::EROFS));
    // SAFETY: the pool is open.
    assert_eq!((unsafe { tidegate_set_error(pool.0, 0) }, errno()), (-1, libc::EROFS));
    assert_eq!(pool.close(), 0);
}

#[test]
fn a_dram_tier_is_written_back_when_the_pool_is_closed() {
    let dir = scratch();
    let path = dir.path().join("pool");
    assert_eq!(create(&path, "btt", 32 << 20, "btt-version=2.0"), 0, "{}", message());
    let pool = Pool::open(&path, Some("transit:8M"), 0).expect("a pool");
    assert_eq!(pool.write(0, &[9; 4096]), 0);
    // SAFETY: the pool is open.
    assert_eq!((unsafe { tidegate_set_error(pool.0, 0) }, errno()), (-1, libc::ENOTSUP));
    assert_eq!(pool.close(), 0);
    let pool = Pool::open(&path, None, 0).expect("a pool");
    assert_eq!((pool.read(0), pool.close()), (Some(9), 0));
}

#[test]
fn wrong_arguments_are_told() {
    let dir = scratch();
    let path = dir.path().join("pool");
    for (engine, bytes, options, part) in [
        ("tape", 32 << 20, "", "engine `tape`"),
        ("", 32 << 20, "", "engine ``"),
        ("btt", 1 << 20, "", "too small"),
        ("btt", 32 << 20, "color=red", "no option color"),
        ("btt", 32 << 20, "block-size", "NAME=VALUE"),
        ("btt", 32 << 20, "block-size=1000", "expected one of 512, 4096"),
    ] {
        assert_eq!((create(&path, engine, bytes, options), errno()), (-1, libc::EINVAL));
        assert!(message().contains(part), "{}", message());
        assert!(!path.exists());
    }
    assert!(Pool::open(&path, None, 0).is_none() && errno() == libc::ENOENT);
    std::fs::write(&path, "To whom it may concern,\n").unwrap();
    assert!(Pool::open(&path, None, 0).is_none() && errno() == libc::EINVAL);
    assert!(message().contains("text"), "{}", message());
    assert!(Pool::open(&path, None, 8).is_none() && errno() == libc::EINVAL);
    assert!(Pool::open(&path, Some("tape:8M"), 0).is_none() && errno() == libc::EINVAL);
    assert_eq!((create(&path, "btt", 32 << 20, ""), errno()), (-1, libc::EEXIST));
    let null = std::ptr::null_mut();
    // SAFETY: null pointers are allowed.
    let closed = unsafe { tidegate_close(null) };
    // SAFETY: null pointers are allowed.
    let read = unsafe { tidegate_read(null, null.cast(), 0, 1) };
    // SAFETY: null pointers are allowed.
    let opened = unsafe { tidegate_open(null.cast(), null.cast(), null.cast(), 0) };
    assert_eq!((closed, read, opened.is_null()), (0, -1, true));
    assert!(message().contains("null pointer"), "{}", message());
    // SAFETY: the version is a static C string.
    let version = unsafe { CStr::from_ptr(tidegate_version()) };
    assert_eq!(version.to_str().unwrap(), env!("CARGO_PKG_VERSION"));
}
