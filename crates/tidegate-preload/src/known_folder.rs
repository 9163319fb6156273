//! The directory whose names were asked for last, and its path: so that the kernel need not be asked for the path of each name,
//! which takes it as long as ten other questions.
//!
//! Invariant: a path that the program gives is the one by which the kernel knows the entry if
//! 1. the kernel has said this path of another entry of the same directory: so the directory's path is one of plain names;
//! 2. no directory has got another name since by a process of the tree: all of them count that ([`Log::names_unlogged`]). So the path
//!    names the directory in the same letters as the directory's own name, where a file system takes others for the same;
//! 3. the directory takes no other letters for the same, as its entry did not when the path was learned;
//! 4. the kernel meets no symbolic link on it. Who holds on to [`Known`] opens the entry in a way that fails at one
//!    ([`raw::open_without_links`]): what a process outside the tree has put there is noticed, too.
//!
//! A directory is learned when its entries are asked for a second time in a row. No lock and no heap: a reader that meets a writer
//! asks the kernel.
//!
//! Entry points: [`knows`], [`learn`].

use std::ffi::CStr;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use tidegate::log::Log;

use crate::path::{PathBuffer, are_known, split};
use crate::{file_systems, raw};

const WORD_BYTES: usize = 8;
const WORDS: usize = 32;
/// Longer paths are asked for.
const BYTES_MAX: usize = WORDS * WORD_BYTES;

struct Folder {
    /// Odd while somebody writes.
    version: AtomicU64,
    /// What [`Log::names_unlogged`] was.
    names: AtomicU64,
    len_bytes: AtomicU64,
    words: [AtomicU64; WORDS],
}

static LEARNED: Folder = Folder {
    version: AtomicU64::new(0),
    names: AtomicU64::new(0),
    len_bytes: AtomicU64::new(0),
    words: [const { AtomicU64::new(0) }; WORDS],
};
/// A digest of the directory that was asked for last.
static LAST: AtomicU64 = AtomicU64::new(0);

/// A path is the kernel's, if no symbolic link is on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Known {
    names: u64,
    /// What [`Log::names_version`] was.
    pub(crate) version: u64,
}

impl Known {
    /// No directory has got another name in the meantime. To be asked under the lock of names.
    pub(crate) fn still_holds(self, log: &Log) -> bool {
        log.names_unlogged() == self.names
    }
}

/// Whether `path` is in the directory that was learned.
pub(crate) fn knows(log: &Log, path: &CStr) -> Option<Known> {
    let (parent, _) = plain(path.to_bytes())?;
    let (version, names) = (log.names_version(), log.names_unlogged());
    (are_known() && LEARNED.is(parent, names)).then_some(Known { names, version })
}

/// The kernel has said that the entry which the program knows as `path` is known as `found`, after
/// [`Log::names_unlogged`] was `names`; it was opened through `mount`.
pub(crate) fn learn(log: &Log, path: &CStr, found: &[u8], names: u64, mount: u64) {
    let Some((parent, name)) = plain(path.to_bytes()).filter(|_| path.to_bytes() == found) else {
        return;
    };
    let digest = digest(parent);
    if LAST.swap(digest, Ordering::Relaxed) == digest
        && !LEARNED.is(parent, log.names_unlogged())
        && file_systems::folds_letters_if_any(mount)
        && tells_letters_apart(parent, name)
    {
        LEARNED.set(parent, names);
    }
}

/// Directory and name of an absolute path that ends in a name.
fn plain(path: &[u8]) -> Option<(&[u8], &[u8])> {
    let (parent, name) = split(path)?;
    // With one slash in between, and none at the end.
    let joined_bytes = parent.len() + 1 + name.len();
    (parent.len() > 1 && parent.starts_with(b"/") && joined_bytes == path.len())
        .then_some((parent, name))
}

/// The name in other letters is another name. False where it has no letters.
fn tells_letters_apart(parent: &[u8], name: &[u8]) -> bool {
    let mut other = PathBuffer::new();
    let pushed = other.push(parent).and_then(|()| other.push(b"/"));
    let swap = |byte: &u8| if byte.is_ascii_alphabetic() { byte ^ 0x20 } else { *byte };
    let pushed = name.iter().fold(pushed, |pushed, byte| pushed.and(other.push(&[swap(byte)])));
    pushed.is_ok()
        && name.iter().any(u8::is_ascii_alphabetic)
        && raw::fstatat(libc::AT_FDCWD, other.as_c_str(), libc::AT_SYMLINK_NOFOLLOW).err()
            == Some(libc::ENOENT)
}

/// Tells paths apart, mostly. Never 0.
pub(crate) fn digest(path: &[u8]) -> u64 {
    let mix = |digest: u64, word: u64| {
        (digest ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(23)
    };
    words(path).fold(path.len() as u64, mix).max(1)
}

fn words(path: &[u8]) -> impl Iterator<Item = u64> {
    path.chunks(WORD_BYTES).map(|chunk| {
        let mut word = [0; WORD_BYTES];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(word)
    })
}

impl Folder {
    fn is(&self, path: &[u8], names: u64) -> bool {
        let version = self.version.load(Ordering::Acquire);
        let same = version.is_multiple_of(2)
            && self.len_bytes.load(Ordering::Relaxed) == path.len() as u64
            && self.names.load(Ordering::Relaxed) == names
            && words(path).zip(&self.words).all(|(word, own)| own.load(Ordering::Relaxed) == word);
        fence(Ordering::Acquire);
        same && self.version.load(Ordering::Relaxed) == version
    }

    fn set(&self, path: &[u8], names: u64) {
        let version = self.version.load(Ordering::Relaxed);
        let (from, to) = (version & !1, version | 1);
        let taken =
            || self.version.compare_exchange(from, to, Ordering::Acquire, Ordering::Relaxed);
        if path.len() > BYTES_MAX || taken().is_err() {
            return;
        }
        fence(Ordering::Release);
        self.names.store(names, Ordering::Relaxed);
        self.len_bytes.store(path.len() as u64, Ordering::Relaxed);
        for (word, own) in words(path).zip(&self.words) {
            own.store(word, Ordering::Relaxed);
        }
        self.version.store(to + 1, Ordering::Release);
    }
}

#[cfg(test)]
#[allow(unsafe_code)] // descriptors
pub(crate) mod tests {
    use std::fs::File;
    use std::os::fd::{AsRawFd, FromRawFd};
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;
    use std::sync::Mutex;

    use super::*;
    use crate::files::Seen;
    use crate::testing::{World, c_path};

    /// What is learned is one for all tests of this process.
    pub(crate) static IN_TESTS: Mutex<()> = Mutex::new(());

    /// A mount of a file system that is noted, whatever the tests' files are on.
    fn noted_mount() -> u64 {
        let directory = File::open("/dev/shm").unwrap();
        let mount = Seen::of(directory.as_raw_fd()).unwrap().mount;
        file_systems::of(directory.as_raw_fd(), mount).unwrap();
        mount
    }

    /// As if the file at `path`, which the kernel calls `found`, had been made twice.
    pub(crate) fn learn_twice(log: &Log, path: &Path, found: &Path) {
        for _ in 0..2 {
            let (path, found) = (c_path(path), c_path(found));
            learn(log, &path, found.to_bytes(), log.names_unlogged(), noted_mount());
        }
    }

    fn knows(world: &World, path: &Path) -> bool {
        super::knows(&world.log, &c_path(path)).is_some()
    }

    #[test]
    fn only_absolute_paths_of_single_slashes_are_plain() {
        for path in ["", "/", "a", "/a", "a/b", "/a//b", "/a/b/", "/a/.", "/a/..", "./a/b"] {
            assert_eq!(plain(path.as_bytes()), None, "{path}");
        }
        assert_eq!(plain(b"/a/b"), Some((&b"/a"[..], &b"b"[..])));
    }

    #[test]
    fn a_directory_is_known_until_some_directory_gets_another_name() {
        let _tests = IN_TESTS.lock().unwrap();
        let world = World::new();
        let (one, other) = (world.file("one"), world.path("other"));
        assert!(!knows(&world, &other));
        learn_twice(&world.log, &one, &one);
        assert!(knows(&world, &other) && !knows(&world, &world.path("other/below")));
        let known = super::knows(&world.log, &c_path(&other)).unwrap();
        assert!(known.still_holds(&world.log));
        world.log.mark_names_unlogged();
        assert!(!knows(&world, &other) && !known.still_holds(&world.log));
        learn_twice(&world.log, &one, &one);
        assert!(knows(&world, &other));
    }

    #[test]
    fn a_directory_that_the_kernel_calls_otherwise_is_not_learned() {
        let _tests = IN_TESTS.lock().unwrap();
        let world = World::new();
        let link = world.path("link");
        std::fs::create_dir(world.path("folder")).unwrap();
        std::os::unix::fs::symlink("folder", &link).unwrap();
        let real = world.file("folder/name");
        learn_twice(&world.log, &link.join("name"), &real);
        assert!(!knows(&world, &link.join("name")));
    }

    #[test]
    fn a_directory_that_may_take_other_letters_for_the_same_is_not_learned() {
        let _tests = IN_TESTS.lock().unwrap();
        let world = World::new();
        let (lower, upper, digits) = (world.file("name"), world.file("NAME"), world.file("1"));
        for path in [&lower, &upper, &digits] {
            learn_twice(&world.log, path, path);
            assert!(!knows(&world, path), "{}", path.display());
        }
    }

    #[test]
    fn what_is_opened_without_links_is_as_the_program_made_it() {
        let world = World::new();
        let open = |path: &Path, flags| {
            let fd = raw::open_without_links(&c_path(path), flags | libc::O_RDWR, 0o600)?;
            // SAFETY: nobody else has it.
            Ok::<File, raw::Errno>(unsafe { FromRawFd::from_raw_fd(fd) })
        };
        let (path, link) = (world.path("file"), world.path("link"));
        let file = open(&path, libc::O_CREAT | libc::O_EXCL).unwrap();
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o7777, 0o600);
        file.set_len(5 << 30).unwrap();
        // As every file of `openat` may be.
        assert!(open(&path, 0).is_ok(), "larger than 2 GiB");
        std::os::unix::fs::symlink(path.parent().unwrap(), &link).unwrap();
        assert_eq!(open(&link.join("file"), 0).err(), Some(libc::ELOOP));
    }

    #[test]
    fn longer_paths_and_file_systems_of_other_kinds_are_not_learned() {
        let _tests = IN_TESTS.lock().unwrap();
        let world = World::new();
        let path = world.file("name");
        for _ in 0..2 {
            let names = world.log.names_unlogged();
            learn(&world.log, &c_path(&path), c_path(&path).to_bytes(), names, 0);
        }
        assert!(!knows(&world, &path));
        let long = world.path(&"x".repeat(200)).join("y".repeat(100));
        std::fs::create_dir_all(&long).unwrap();
        let long = world.file(long.join("name").to_str().unwrap());
        learn_twice(&world.log, &long, &long);
        assert!(!knows(&world, &long));
    }
}
