//! Paths become regions: kinds of memory, domains, locks, and refusals.

use std::fs::File;
use std::path::{Path, PathBuf};

use crate::pmem::{Domain, MediaModel, PmemError, Region, RegionOptions};

const BYTES: u64 = 1 << 16;

fn create(path: &Path) -> Region {
    Region::open(path, &creating(BYTES)).unwrap()
}

fn creating(bytes: u64) -> RegionOptions {
    RegionOptions { create_bytes: Some(bytes), ..RegionOptions::default() }
}

fn with_domain(domain: Domain) -> RegionOptions {
    RegionOptions { domain: Some(domain), ..RegionOptions::default() }
}

fn on_tmpfs() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

/// Makes a directory beside this program: on a file system with a page cache and blocks.
fn on_disk() -> tempfile::TempDir {
    let program = std::env::current_exe().unwrap();
    tempfile::tempdir_in(program.parent().unwrap()).unwrap()
}

#[test]
fn tmpfs_stands_for_persistent_memory_and_says_what_it_loses() {
    let dir = on_tmpfs();
    let region = create(&dir.path().join("pool"));
    assert_eq!(region.domain(), Domain::Adr);
    let line = region.describe();
    assert!(line.contains("65536 bytes, tmpfs, domain adr (POWER LOSS LOSES tmpfs)"), "{line}");
    assert!(line.ends_with("media dram"), "{line}");
}

#[test]
fn an_ordinary_file_is_synced() {
    let dir = on_disk();
    let path = dir.path().join("pool");
    let region = create(&path);
    assert_eq!(region.domain(), Domain::Msync);
    region.write(5000, b"hello").unwrap();
    region.write_streaming(100, b"world").unwrap();
    region.persist(5000, 5).unwrap();
    assert!(region.describe().contains("ordinary file, domain msync,"), "{}", region.describe());
    let bytes = std::fs::read(&path).unwrap();
    assert_eq!((&bytes[5000..5005], &bytes[100..105]), (&b"hello"[..], &b"world"[..]));
}

#[test]
fn anonymous_memory_is_volatile_and_says_so() {
    let region = Region::anonymous(BYTES).unwrap();
    assert_eq!(region.domain(), Domain::Volatile);
    assert!(region.describe().contains("NOTHING SURVIVES"), "{}", region.describe());
    let options = with_domain(Domain::Adr);
    let region = Region::anonymous_with(BYTES, &options).unwrap();
    assert!(region.describe().contains("NOTHING SURVIVES"), "{}", region.describe());
}

#[test]
fn the_domain_can_be_overridden() {
    let dir = on_disk();
    let path = dir.path().join("pool");
    drop(create(&path));
    for domain in [Domain::Adr, Domain::Eadr, Domain::Msync, Domain::Volatile] {
        let region = Region::open(&path, &with_domain(domain)).unwrap();
        assert_eq!(region.domain(), domain);
        let expected = format!("domain {domain}");
        assert!(region.describe().contains(&expected), "{}", region.describe());
    }
    let region = Region::open(&path, &with_domain(Domain::Adr)).unwrap();
    assert!(region.describe().contains("POWER LOSS LOSES"), "{}", region.describe());
}

#[test]
fn the_medium_is_kept_for_messages() {
    let options = RegionOptions { media: MediaModel::optane(), ..RegionOptions::default() };
    let region = Region::anonymous_with(BYTES, &options).unwrap();
    assert_eq!(region.media(), &MediaModel::optane());
    assert!(region.describe().ends_with("media optane"), "{}", region.describe());
}

#[test]
fn creating_allocates_the_space() {
    use std::os::unix::fs::MetadataExt;
    for dir in [on_disk(), on_tmpfs()] {
        let path = dir.path().join("pool");
        let region = create(&path);
        let metadata = std::fs::metadata(&path).unwrap();
        assert_eq!((region.len_bytes(), metadata.len()), (BYTES, BYTES));
        assert!(metadata.blocks() * 512 >= BYTES, "{} blocks", metadata.blocks());
    }
}

#[test]
fn creating_never_replaces_a_file() {
    let dir = on_tmpfs();
    let path = dir.path().join("pool");
    std::fs::write(&path, "precious").unwrap();
    let error = Region::open(&path, &creating(BYTES)).unwrap_err();
    let PmemError::Os { action: "create", source, .. } = &error else { panic!("{error:?}") };
    assert_eq!(source.kind(), std::io::ErrorKind::AlreadyExists);
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
}

#[test]
fn no_space_is_an_error_that_leaves_nothing_behind() {
    let dir = on_tmpfs();
    let path = dir.path().join("pool");
    for (bytes, errno) in [(1 << 50, libc::ENOSPC), (u64::MAX, libc::EFBIG)] {
        let error = Region::open(&path, &creating(bytes)).unwrap_err();
        let PmemError::Os { action: "allocate space for", source, .. } = &error else {
            panic!("{error:?}")
        };
        assert_eq!(source.raw_os_error(), Some(errno));
        assert!(!path.exists());
    }
}

/// More than this machine has: the system counts what is written.
#[test]
fn sparse_anonymous_memory_costs_what_is_written() {
    const TIB: u64 = 1 << 40;
    let options = RegionOptions { sparse: true, ..RegionOptions::default() };
    let region = Region::anonymous_with(4 * TIB, &options).unwrap();
    region.write(3 * TIB, b"far").unwrap();
    let mut found = [0; 3];
    region.read(3 * TIB, &mut found).unwrap();
    assert_eq!(&found, b"far");
}

#[test]
fn a_pool_is_open_once() {
    let dir = on_tmpfs();
    let path = dir.path().join("pool");
    let read_only = RegionOptions { read_only: true, ..RegionOptions::default() };
    let busy = |options: &RegionOptions| match Region::open(&path, options) {
        Err(PmemError::Busy { path: named }) => named == path,
        _ => false,
    };
    let writer = create(&path);
    assert!(busy(&RegionOptions::default()) && busy(&read_only));
    drop(writer);
    let reader = Region::open(&path, &read_only).unwrap();
    let second = Region::open(&path, &read_only).unwrap();
    assert!(busy(&RegionOptions::default()));
    drop((reader, second));
    Region::open(&path, &RegionOptions::default()).unwrap();
}

/// The same happens while another thread starts a program, until the exec closes the descriptors.
#[test]
fn a_pool_that_is_closed_can_be_opened_although_a_child_has_its_descriptors() {
    let dir = on_tmpfs();
    let path = dir.path().join("pool");
    let writer = create(&path);
    // SAFETY: the child makes no call that is unsafe in a copy of a process with threads.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: touches no memory; the parent kills the child.
        unsafe { libc::pause() };
        // SAFETY: ends the child without running any code of the parent.
        unsafe { libc::_exit(0) };
    }
    drop(writer);
    let reopened = Region::open(&path, &RegionOptions::default());
    // SAFETY: the process is this test's child, and was not waited for.
    unsafe { libc::kill(child, libc::SIGKILL) };
    // SAFETY: waits for the child that was made above.
    unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
    reopened.unwrap();
}

#[test]
fn a_read_only_region_refuses_every_store() {
    let dir = on_tmpfs();
    let path = dir.path().join("pool");
    create(&path).write(0, b"kept").unwrap();
    let options = RegionOptions { read_only: true, ..RegionOptions::default() };
    let region = Region::open(&path, &options).unwrap();
    let refusals = [
        region.write(0, b"x"),
        region.write_streaming(0, b"x"),
        region.zero_streaming(0, 1),
        region.store_u32(0, 1),
        region.store_u64(0, 1),
        region.write_back(0, 1),
        region.persist(0, 1),
    ];
    assert!(refusals.iter().all(|refusal| matches!(refusal, Err(PmemError::ReadOnly))));
    region.fence().unwrap();
    let mut kept = [0; 4];
    region.read(0, &mut kept).unwrap();
    assert_eq!(&kept, b"kept");
}

#[test]
fn what_cannot_be_mapped_is_refused_with_a_reason() {
    let dir = on_tmpfs();
    let empty = dir.path().join("empty");
    File::create(&empty).unwrap();
    let error = |path: PathBuf| Region::open(&path, &RegionOptions::default()).unwrap_err();
    assert!(matches!(error(empty), PmemError::Empty { .. }));
    let fresh = Region::open(&dir.path().join("fresh"), &creating(0));
    assert!(matches!(fresh, Err(PmemError::Empty { .. })));
    assert!(matches!(Region::anonymous(0), Err(PmemError::Empty { .. })));
    let missing = error(dir.path().join("missing"));
    assert!(matches!(missing, PmemError::Os { action: "open", .. }), "{missing:?}");
    for (path, reason) in
        [(dir.path().into(), "is a directory"), ("/dev/null".into(), "that is no devdax device")]
    {
        let message = error(path).to_string();
        assert!(message.contains(reason), "{message}");
    }
}

#[test]
fn space_in_tmpfs_is_huge_pages_that_keep_their_bytes() {
    // If memory is fragmented, the kernel finds no huge page. The test then has the kernel compact
    // memory, which only root may do.
    let mut faults = Vec::new();
    while faults.len() < 8 && faults.last().is_none_or(|it| *it >= 6 * 512 / 16) {
        if !faults.is_empty() {
            let _ = std::fs::write("/proc/sys/vm/compact_memory", "1");
        }
        faults.push(faults_of_six_huge_pages());
    }
    assert!(faults.last().is_some_and(|it| *it < 6 * 512 / 16), "{faults:?} for 6 huge pages");
}

/// Returns the page faults of a reader of six allocated blocks of 2 MiB. Checks their bytes too.
fn faults_of_six_huge_pages() -> i64 {
    const BLOCK: u64 = 2 << 20;
    let dir = on_tmpfs();
    let path = dir.path().join("pool");
    let options = RegionOptions { sparse: true, ..creating(8 * BLOCK) };
    let region = Region::open(&path, &options).unwrap();
    // The block is used before it is complete, as the start of a log is.
    region.allocate(0, BLOCK + 4096).unwrap();
    region.write(BLOCK + 5, b"early").unwrap();
    region.allocate(BLOCK + 4096, 6 * BLOCK).unwrap();
    let guest = RegionOptions { guest: true, ..RegionOptions::default() };
    let other = Region::open(&path, &guest).unwrap();
    let faults_before = page_faults();
    for page in (BLOCK..7 * BLOCK).step_by(4096) {
        other.load_u64(page).unwrap();
    }
    let faults = page_faults() - faults_before;
    let mut bytes = vec![0xff; 6 * BLOCK as usize];
    region.read(BLOCK, &mut bytes).unwrap();
    assert_eq!(&bytes[5..10], b"early");
    assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == 0 || (5..10).contains(&at)));
    faults
}

/// Returns the page faults of this thread.
fn page_faults() -> i64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: `usage` has space for the answer.
    assert_eq!(unsafe { libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()) }, 0);
    // SAFETY: `getrusage` has filled it in.
    unsafe { usage.assume_init() }.ru_minflt
}
