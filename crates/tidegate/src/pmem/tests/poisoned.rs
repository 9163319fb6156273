//! Failed memory: an access to a page beyond the end of a shrunk file raises the same signal as
//! hardware poison.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::pmem::{Domain, PmemError, Region, RegionOptions};

const PAGE: u64 = 4096;
const PAGES: u64 = 200;

struct Shrunk {
    region: Region,
    path: PathBuf,
    _dir: tempfile::TempDir,
}

impl Shrunk {
    fn new() -> Self {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = dir.path().join("pool");
        let options =
            RegionOptions { create_bytes: Some(PAGES * PAGE), ..RegionOptions::default() };
        let region = Region::open(&path, &options).unwrap();
        region.write_streaming(0, &vec![7; usize::try_from(PAGES * PAGE).unwrap()]).unwrap();
        Self { region, path, _dir: dir }
    }

    /// Takes away the pages from `page` on.
    fn shrink_to(self, page: u64) -> Self {
        std::fs::File::options()
            .write(true)
            .open(&self.path)
            .unwrap()
            .set_len(page * PAGE)
            .unwrap();
        self
    }
}

#[expect(clippy::needless_pass_by_value, reason = "the result is made for this call")]
fn poisoned<T>(result: Result<T, PmemError>, at: u64, bytes: u64) -> bool {
    matches!(result, Err(PmemError::Poisoned { offset, len }) if offset == at && len == bytes)
}

#[test]
fn every_access_to_a_lost_page_is_an_error() {
    let shrunk = Shrunk::new().shrink_to(10);
    let region = &shrunk.region;
    // A different operation is the first to touch each page.
    assert!(poisoned(region.read(10 * PAGE, &mut [0; 64]), 10 * PAGE, 64));
    assert!(poisoned(region.write(11 * PAGE, &[1; 8]), 11 * PAGE, 8));
    assert!(poisoned(region.write_streaming(12 * PAGE, &[1; 4096]), 12 * PAGE, 4096));
    assert!(poisoned(region.load_u32(13 * PAGE), 13 * PAGE, 4));
    assert!(poisoned(region.load_u64(14 * PAGE), 14 * PAGE, 8));
    assert!(poisoned(region.store_u32(15 * PAGE, 1), 15 * PAGE, 4));
    assert!(poisoned(region.store_u64(16 * PAGE, 1), 16 * PAGE, 8));
    assert!(poisoned(region.zero_streaming(17 * PAGE, 10), 17 * PAGE, 10));
    assert!(poisoned(region.write_back(18 * PAGE, 8), 18 * PAGE, 8));
    assert!(poisoned(region.read(9 * PAGE, &mut [0; 8192]), 9 * PAGE, 8192));
    for page in 10..19 {
        assert!(poisoned(region.load_u64(page * PAGE), page * PAGE, 8), "again, page {page}");
        assert!(poisoned(region.store_u64(page * PAGE, 1), page * PAGE, 8), "again, page {page}");
    }
}

#[test]
fn other_pages_and_other_regions_keep_working() {
    let other = Shrunk::new();
    let shrunk = Shrunk::new().shrink_to(10);
    let region = &shrunk.region;
    region.load_u64(10 * PAGE).unwrap_err();
    let mut page = [0; PAGE as usize];
    region.read(9 * PAGE, &mut page).unwrap();
    assert_eq!(page, [7; PAGE as usize]);
    region.write_streaming(9 * PAGE, &[8; PAGE as usize]).unwrap();
    region.store_u64(0, 9).unwrap();
    region.persist(0, 8).unwrap();
    assert_eq!(region.load_u64(0).unwrap(), 9);
    other.region.read(10 * PAGE, &mut page).unwrap();
    assert_eq!(page, [7; PAGE as usize]);
}

#[test]
fn more_lost_pages_than_are_told_apart_poison_what_is_lost() {
    let shrunk = Shrunk::new().shrink_to(10);
    let mut all = vec![0; usize::try_from(PAGES * PAGE).unwrap()];
    assert!(poisoned(shrunk.region.read(0, &mut all), 0, PAGES * PAGE));
    for page in 10..PAGES {
        assert!(poisoned(shrunk.region.load_u64(page * PAGE), page * PAGE, 8));
    }
    assert_eq!(shrunk.region.load_u32(9 * PAGE).unwrap(), 0x0707_0707, "it is not lost");
}

#[test]
fn opening_again_after_repair_forgets_the_loss() {
    let Shrunk { region, path, _dir } = Shrunk::new().shrink_to(10);
    region.load_u64(10 * PAGE).unwrap_err();
    drop(region);
    std::fs::File::options().write(true).open(&path).unwrap().set_len(PAGES * PAGE).unwrap();
    let region = Region::open(&path, &RegionOptions::default()).unwrap();
    assert_eq!(region.load_u64(10 * PAGE).unwrap(), 0);
}

#[test]
fn a_read_only_region_survives_too() {
    let Shrunk { region, path, _dir } = Shrunk::new().shrink_to(10);
    drop(region);
    let options = RegionOptions { read_only: true, ..RegionOptions::default() };
    let region = Region::open(&path, &options).unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(PAGE).unwrap();
    assert!(poisoned(region.load_u32(5 * PAGE), 5 * PAGE, 4));
    assert_eq!(region.load_u32(0).unwrap(), 0x0707_0707);
}

/// The page is lost while threads store to it and read it.
#[test]
fn no_thread_is_told_that_a_lost_page_works() {
    let Shrunk { region, path, _dir } = Shrunk::new();
    let lost = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                loop {
                    let was_lost = lost.load(Ordering::Acquire);
                    let stored = region.store_u64(50 * PAGE, 1);
                    let loaded = region.load_u64(50 * PAGE);
                    assert!(!(was_lost && (stored.is_ok() || loaded.is_ok())));
                    if was_lost {
                        break;
                    }
                }
            });
        }
        std::fs::File::options().write(true).open(&path).unwrap().set_len(PAGE).unwrap();
        lost.store(true, Ordering::Release);
    });
}

#[test]
fn a_lost_page_is_an_error_in_the_msync_domain_as_well() {
    let Shrunk { region, path, _dir } = Shrunk::new();
    drop(region);
    let options = RegionOptions { domain: Some(Domain::Msync), ..RegionOptions::default() };
    let region = Region::open(&path, &options).unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(PAGE).unwrap();
    assert!(poisoned(region.store_u64(5 * PAGE, 1), 5 * PAGE, 8));
    region.store_u64(0, 1).unwrap();
    region.persist(0, 8).unwrap();
}

/// Makes a mapped page without memory that belongs to no region.
fn foreign_lost_page() -> *mut u8 {
    use rustix::mm::{MapFlags, ProtFlags};
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    let len = PAGE as usize;
    // SAFETY: a fresh mapping at an address of the kernel's choice. The file has no byte to map.
    let page =
        unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, &file, 0) };
    page.unwrap().cast()
}

#[test]
fn a_fault_elsewhere_is_passed_on_and_ends_the_process() {
    let _installs_the_handler = Shrunk::new();
    let page = foreign_lost_page();
    // SAFETY: the child makes no call that is unsafe in a copy of a process with threads.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: the page is mapped without memory: the access raises SIGBUS.
        unsafe { page.write_volatile(1) };
        // SAFETY: ends the child without running any code of the parent.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: waits for the child that was made above.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(waited, child);
    assert!(libc::WIFSIGNALED(status), "the child ended with status {status:#x}");
    assert_eq!(libc::WTERMSIG(status), libc::SIGBUS);
}
