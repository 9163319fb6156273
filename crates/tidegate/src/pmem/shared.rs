//! Volatile memory that several processes map: atomics, robust locks and words to wait on.
//!
//! Invariants:
//! 1. All access is through atomics of the mapping or through locks that are in it: two processes
//!    never hold plain references to the same bytes.
//! 2. A lock whose holder died goes to the next owner; [`Locked::owner_died`] reports the death.
//! 3. A file that is made here belongs to its maker alone (mode 0600); a file that another user
//!    could write is refused.
//! 4. After the mapping is made no function here allocates memory, so that all may run inside a
//!    signal handler.
//!
//! Entry points: [`SharedMemory::create`], [`open`](SharedMemory::open),
//! [`anonymous`](SharedMemory::anonymous); [`word`](SharedMemory::word),
//! [`half`](SharedMemory::half); [`lock`](SharedMemory::lock); [`wait`](SharedMemory::wait),
//! [`wake`](SharedMemory::wake).

use std::path::Path;
use std::time::Duration;

use super::PmemError;
use super::mapping::Mapping;
use crate::sync::AtomicU64;

/// Size of a lock in the memory, in bytes.
pub const LOCK_BYTES: u64 = 64;

const _: () = assert!(size_of::<libc::pthread_mutex_t>() as u64 <= LOCK_BYTES);

/// Memory shared with other processes.
pub struct SharedMemory {
    mapping: Mapping,
    /// Loom's atomics cannot be in mapped memory: under its model the words that were asked for are
    /// here.
    #[cfg(loom)]
    words: std::sync::Mutex<std::collections::BTreeMap<u64, Box<AtomicU64>>>,
}

/// Why a thread did not get a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LockFailure {
    /// The holder did not unlock it in time.
    #[error("the lock's holder does not give it back")]
    TimedOut,
    /// This thread holds it already: a signal handler interrupted the holder.
    #[error("this thread holds the lock already")]
    Reentered,
    /// The bytes are not a valid lock.
    #[error("the lock is damaged")]
    Damaged,
}

/// A held lock; its drop unlocks it.
pub struct Locked<'a> {
    memory: &'a SharedMemory,
    offset: u64,
    owner_died: bool,
}

impl SharedMemory {
    /// Creates the file at `path` with `len_bytes` zero bytes, for its owner alone, and maps it.
    ///
    /// # Errors
    /// [`PmemError::Os`]: the file exists, or cannot be made.
    pub fn create(path: &Path, len_bytes: u64) -> Result<Self, PmemError> {
        Ok(Self::over(Mapping::create_shared(path, len_bytes)?))
    }

    /// Maps a file that [`create`](Self::create) made.
    ///
    /// # Errors
    /// [`PmemError::Os`]: the file is missing, or another user could write it;
    /// [`PmemError::Empty`].
    pub fn open(path: &Path) -> Result<Self, PmemError> {
        Ok(Self::over(Mapping::open_shared(path)?))
    }

    /// Maps memory of this process and its forks.
    ///
    /// # Errors
    /// [`PmemError`] if the memory cannot be had.
    pub fn anonymous(len_bytes: u64) -> Result<Self, PmemError> {
        Ok(Self::over(Mapping::anonymous_shared(len_bytes)?))
    }

    fn over(mapping: Mapping) -> Self {
        Self {
            #[cfg(loom)]
            words: std::sync::Mutex::default(),
            mapping,
        }
    }

    /// Replaces the memory by private zero bytes: the process no longer shares it. Threads that use
    /// it at this moment find locks free and words zero.
    ///
    /// # Errors
    /// The kernel's error; then the memory is still shared.
    pub fn abandon(&self) -> std::io::Result<()> {
        self.mapping.abandon()
    }

    /// Returns the addresses of the memory.
    pub fn addresses(&self) -> std::ops::Range<usize> {
        self.mapping.addresses()
    }

    /// Returns the size in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.mapping.len_bytes()
    }

    /// Returns the word at `offset`.
    ///
    /// # Panics
    /// `offset` is no multiple of 8 or outside the memory: a bug of the caller.
    #[inline]
    #[cfg(not(loom))]
    pub fn word(&self, offset: u64) -> &AtomicU64 {
        let at: *mut AtomicU64 = self.checked(offset);
        // SAFETY: `checked` has checked alignment and range, and the mapping lives as long as
        // `self`.
        unsafe { &*at }
    }

    /// Returns the word at `offset`, under loom.
    #[cfg(loom)]
    pub fn word(&self, offset: u64) -> &AtomicU64 {
        self.checked::<u64>(offset);
        let mut words = self.words.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let word = &raw const **words.entry(offset).or_insert_with(|| Box::new(AtomicU64::new(0)));
        // SAFETY: no box is ever removed, so that the word stays at its address as long as `self`
        // lives.
        unsafe { &*word }
    }

    /// Returns the half word at `offset`, which processes can wait on.
    ///
    /// # Panics
    /// `offset` is no multiple of 4 or outside the memory: a bug of the caller.
    #[inline]
    pub fn half(&self, offset: u64) -> &std::sync::atomic::AtomicU32 {
        let at: *mut std::sync::atomic::AtomicU32 = self.checked(offset);
        // SAFETY: `checked` has checked alignment and range, and the mapping lives as long as
        // `self`.
        unsafe { &*at }
    }

    #[inline]
    fn checked<W>(&self, offset: u64) -> *mut W {
        let word_bytes = size_of::<W>() as u64;
        let inside = offset <= self.len_bytes().saturating_sub(word_bytes);
        assert!(inside && offset.is_multiple_of(word_bytes), "a word at offset {offset}");
        self.mapping.at(offset).cast()
    }

    /// Makes an unlocked lock of the [`LOCK_BYTES`] bytes at `offset`, which no thread uses yet.
    pub fn init_lock(&self, offset: u64) {
        let mutex = self.mutex(offset);
        let mut attributes = std::mem::MaybeUninit::<libc::pthread_mutexattr_t>::uninit();
        let attributes = attributes.as_mut_ptr();
        // SAFETY: `attributes` points to memory for the attributes.
        unsafe { libc::pthread_mutexattr_init(attributes) };
        // SAFETY: `pthread_mutexattr_init` has initialized the attributes.
        unsafe { libc::pthread_mutexattr_setpshared(attributes, libc::PTHREAD_PROCESS_SHARED) };
        // SAFETY: `pthread_mutexattr_init` has initialized the attributes.
        unsafe { libc::pthread_mutexattr_setrobust(attributes, libc::PTHREAD_MUTEX_ROBUST) };
        // SAFETY: `pthread_mutexattr_init` has initialized the attributes.
        unsafe { libc::pthread_mutexattr_settype(attributes, libc::PTHREAD_MUTEX_ERRORCHECK) };
        // SAFETY: `mutex` checked that the lock is inside the mapping; no thread uses it yet, and
        // the attributes are initialized.
        unsafe { libc::pthread_mutex_init(mutex, attributes) };
    }

    /// Locks the lock at `offset`; waits at most `timeout`.
    ///
    /// # Errors
    /// [`LockFailure`].
    pub fn lock(&self, offset: u64, timeout: Duration) -> Result<Locked<'_>, LockFailure> {
        let mutex = self.mutex(offset);
        // SAFETY: the bytes are a lock that `init_lock` made, or the C library refuses them.
        let mut outcome = unsafe { libc::pthread_mutex_trylock(mutex) };
        if outcome == libc::EBUSY {
            let until = until(timeout);
            // SAFETY: the bytes are a lock that `init_lock` made, or the C library refuses them.
            outcome =
                unsafe { pthread_mutex_clocklock(mutex, libc::CLOCK_MONOTONIC, &raw const until) };
        }
        self.locked(offset, outcome)
    }

    /// Locks the lock at `offset` if no thread holds it.
    ///
    /// # Errors
    /// [`LockFailure::TimedOut`] if a thread holds it.
    pub fn try_lock(&self, offset: u64) -> Result<Locked<'_>, LockFailure> {
        // SAFETY: the bytes are a lock that `init_lock` made, or the C library refuses them.
        let outcome = unsafe { libc::pthread_mutex_trylock(self.mutex(offset)) };
        self.locked(offset, outcome)
    }

    /// Returns whether a live thread holds the lock at `offset`. Reads the half word in which the
    /// kernel finds the owner's thread id, and which the kernel clears when that thread dies.
    ///
    /// [`try_lock`](Self::try_lock) gives the same answer, but writes to the lock's cache line even
    /// if it fails: threads that ask at each operation would pull the line from each other.
    ///
    /// # Panics
    /// `offset` is no multiple of 4 or outside the memory: a bug of the caller.
    #[inline]
    pub fn is_held(&self, offset: u64) -> bool {
        self.half(offset).load(std::sync::atomic::Ordering::Acquire) & libc::FUTEX_TID_MASK != 0
    }

    fn locked(&self, offset: u64, outcome: libc::c_int) -> Result<Locked<'_>, LockFailure> {
        match outcome {
            0 => Ok(Locked { memory: self, offset, owner_died: false }),
            libc::EOWNERDEAD => {
                // SAFETY: this thread holds the lock. The caller repairs the state under the lock,
                // as `owner_died` tells it to.
                unsafe { libc::pthread_mutex_consistent(self.mutex(offset)) };
                Ok(Locked { memory: self, offset, owner_died: true })
            }
            libc::EDEADLK => Err(LockFailure::Reentered),
            libc::EBUSY | libc::ETIMEDOUT => Err(LockFailure::TimedOut),
            _ => Err(LockFailure::Damaged),
        }
    }

    fn mutex(&self, offset: u64) -> *mut libc::pthread_mutex_t {
        let inside = offset <= self.len_bytes().saturating_sub(LOCK_BYTES);
        assert!(inside && offset.is_multiple_of(8), "a lock at offset {offset}");
        self.mapping.at(offset).cast()
    }

    /// Sleeps until [`wake`](Self::wake) is called for `offset`, at most `timeout` if there is one.
    /// Returns at once if the half word there is not `expected`, and may return early.
    pub fn wait(&self, offset: u64, expected: u32, timeout: Option<Duration>) {
        let timeout = timeout.map(timespec);
        let timeout = timeout.as_ref().map_or(std::ptr::null(), |it| &raw const *it);
        let word = self.half(offset).as_ptr();
        // SAFETY: `half` checked the word; the timeout is null or valid.
        unsafe { libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAIT, expected, timeout) };
    }

    /// Wakes up to `most` threads that [`wait`](Self::wait) at `offset`, in any process.
    pub fn wake(&self, offset: u64, most: i32) {
        let word = self.half(offset).as_ptr();
        // SAFETY: `half` checked the word.
        unsafe { libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAKE, most) };
    }
}

impl Locked<'_> {
    /// Returns whether the last holder died while it held the lock: the state under the lock may be
    /// half changed.
    pub fn owner_died(&self) -> bool {
        self.owner_died
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        // SAFETY: this thread holds the lock.
        unsafe { libc::pthread_mutex_unlock(self.memory.mutex(self.offset)) };
    }
}

fn timespec(duration: Duration) -> libc::timespec {
    libc::timespec {
        tv_sec: libc::time_t::try_from(duration.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: i64::from(duration.subsec_nanos()),
    }
}

/// Returns the moment `timeout` from now, on the clock of the locks. That is not the system's time,
/// which may be set back by hours while a program waits.
fn until(timeout: Duration) -> libc::timespec {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let now = Duration::new(
        u64::try_from(now.tv_sec).unwrap_or(0),
        u32::try_from(now.tv_nsec).unwrap_or(0),
    );
    timespec(now + timeout)
}

unsafe extern "C" {
    /// Locks a mutex with a timeout on `clock`; in the GNU C library since 2.30.
    fn pthread_mutex_clocklock(
        mutex: *mut libc::pthread_mutex_t,
        clock: libc::clockid_t,
        until: *const libc::timespec,
    ) -> libc::c_int;
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn two_mappings_of_one_file_share_words() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control");
        let one = SharedMemory::create(&path, 4096).unwrap();
        let two = SharedMemory::open(&path).unwrap();
        one.word(8).store(7, Ordering::Release);
        assert_eq!(two.word(8).load(Ordering::Acquire), 7);
        assert!(SharedMemory::create(&path, 4096).is_err(), "made twice");
    }

    /// A store to a hole of a file system that is full by then ends the process.
    #[test]
    fn the_space_of_a_file_is_there_before_it_is_used() {
        use std::os::unix::fs::MetadataExt;
        const LEN_BYTES: u64 = 1 << 20;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control");
        drop(SharedMemory::create(&path, LEN_BYTES).unwrap());
        assert!(path.metadata().unwrap().blocks() * 512 >= LEN_BYTES);
    }

    #[test]
    fn a_file_that_others_may_write_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control");
        drop(SharedMemory::create(&path, 4096).unwrap());
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o660)).unwrap();
        assert!(matches!(SharedMemory::open(&path), Err(PmemError::Os { .. })));
    }

    #[test]
    fn a_lock_excludes_and_tells_of_reentry_and_of_dead_owners() {
        let memory = SharedMemory::anonymous(4096).unwrap();
        memory.init_lock(64);
        let timeout = Duration::from_millis(10);
        assert!(!memory.is_held(64));
        let held = memory.lock(64, timeout).unwrap();
        assert!(memory.is_held(64));
        assert_eq!(memory.lock(64, timeout).err(), Some(LockFailure::Reentered));
        std::thread::scope(|scope| {
            let other = scope.spawn(|| memory.lock(64, timeout).err());
            assert_eq!(other.join().unwrap(), Some(LockFailure::TimedOut));
        });
        drop(held);
        assert!(!memory.is_held(64));
        std::thread::scope(|scope| {
            // The thread ends with the lock held. The join waits for the thread's whole end, unlike
            // the scope.
            let owner = scope.spawn(|| std::mem::forget(memory.lock(64, timeout).unwrap()));
            owner.join().unwrap();
        });
        assert!(!memory.is_held(64), "by who does not live");
        assert!(memory.lock(64, timeout).unwrap().owner_died());
        assert!(!memory.lock(64, timeout).unwrap().owner_died());
    }

    #[test]
    fn a_waiter_is_woken() {
        let memory = SharedMemory::anonymous(4096).unwrap();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                while memory.half(128).load(Ordering::Acquire) == 0 {
                    memory.wait(128, 0, None);
                }
            });
            memory.half(128).store(1, Ordering::Release);
            memory.wake(128, i32::MAX);
            waiter.join().unwrap();
        });
    }
}
