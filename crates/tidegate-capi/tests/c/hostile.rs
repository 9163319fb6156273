//! P7: pools with any bytes give an error or a pool, and nothing else.

use std::ffi::{CString, c_longlong, c_void};
use std::os::unix::fs::FileExt;
use std::path::Path;

use proptest::prelude::*;
use tidegate_capi::pmemblk::{
    pmemblk_bsize, pmemblk_check, pmemblk_check_version, pmemblk_close, pmemblk_create,
    pmemblk_ctl_get, pmemblk_nblock, pmemblk_open, pmemblk_read, pmemblk_set_error,
    pmemblk_set_zero, pmemblk_write,
};

use crate::linked::scratch;

fn c(path: &Path) -> CString {
    CString::new(path.to_str().unwrap()).unwrap()
}

fn create(path: &Path) {
    // SAFETY: the path is a C string.
    let pool = unsafe { pmemblk_create(c(path).as_ptr(), 4096, 17 << 20, 0o600) };
    assert!(!pool.is_null());
    let block = [7_u8; 4096];
    // SAFETY: the pool is open, the buffer has a block.
    assert_eq!(unsafe { pmemblk_write(pool, block.as_ptr().cast(), 3) }, 0);
    // SAFETY: the pool is open, and this is its last use.
    unsafe { pmemblk_close(pool) };
}

/// Uses a pool in every way that C can.
fn exercise(path: &Path) {
    let path = c(path);
    // SAFETY: the path is a C string.
    let checked = unsafe { pmemblk_check(path.as_ptr(), 0) };
    assert!((-1..=1).contains(&checked));
    // SAFETY: the path is a C string.
    let pool = unsafe { pmemblk_open(path.as_ptr(), 0) };
    if pool.is_null() {
        return;
    }
    // SAFETY: the pool is open.
    let bytes = unsafe { pmemblk_bsize(pool) };
    // SAFETY: the pool is open.
    let blocks = unsafe { pmemblk_nblock(pool) };
    let mut block = vec![0_u8; bytes];
    let data = block.as_mut_ptr().cast::<c_void>();
    let last = c_longlong::try_from(blocks).unwrap() - 1;
    for number in [0, 3, last, last + 1, -1, c_longlong::MIN, c_longlong::MAX] {
        // SAFETY: the pool is open, the buffer has a block.
        unsafe { pmemblk_read(pool, data, number) };
        // SAFETY: the pool is open, the buffer has a block.
        unsafe { pmemblk_write(pool, data, number) };
        // SAFETY: the pool is open.
        unsafe { pmemblk_set_zero(pool, number) };
        // SAFETY: the pool is open.
        unsafe { pmemblk_set_error(pool, number) };
    }
    // SAFETY: the pool is open, and this is its last use.
    unsafe { pmemblk_close(pool) };
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn p7_patched_pools_give_errors_not_panics(
        patches in proptest::collection::vec((0..12_u64 << 10, any::<u8>()), 1..4),
        size in prop_oneof![4 => Just(17_u64 << 20), 1 => 0..17_u64 << 20],
    ) {
        let dir = scratch();
        let path = dir.path().join("pool");
        create(&path);
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        for (offset, byte) in patches {
            // The headers are at the start of each page, and at the end of the first.
            let offset = if offset % 2 == 0 { offset / 4096 * 4096 + offset % 128 } else { offset };
            file.write_all_at(&[byte], offset).unwrap();
        }
        file.set_len(size).unwrap();
        exercise(&path);
    }
}

#[test]
fn null_pointers_are_errors() {
    let null = std::ptr::null_mut();
    // SAFETY: null pointers are allowed.
    let created = unsafe { pmemblk_create(std::ptr::null(), 512, 17 << 20, 0o600) };
    // SAFETY: null pointers are allowed.
    let opened = unsafe { pmemblk_open(std::ptr::null(), 512) };
    assert!(created.is_null() && opened.is_null());
    // SAFETY: null pointers are allowed.
    let read = unsafe { pmemblk_read(null, null.cast(), 0) };
    // SAFETY: null pointers are allowed.
    unsafe { pmemblk_close(null) };
    assert_eq!((read, pmemblk_ctl_get(null, std::ptr::null(), null.cast())), (-1, -1));
    assert!(pmemblk_check_version(1, 0).is_null() && pmemblk_check_version(1, 1).is_null());
    assert!(!pmemblk_check_version(1, 2).is_null() && !pmemblk_check_version(2, 0).is_null());
}

/// The permissions are those that the caller asked for.
#[test]
fn a_new_pool_has_its_mode() {
    use std::os::unix::fs::PermissionsExt;
    let dir = scratch();
    let path = dir.path().join("pool");
    // SAFETY: the path is a C string.
    let pool = unsafe { pmemblk_create(c(&path).as_ptr(), 4096, 17 << 20, 0o640) };
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o640);
    // SAFETY: the pool is open, and this is its last use.
    unsafe { pmemblk_close(pool) };
}
