//! Volatile memory that several processes map: atomics, robust locks and places to wait.
//!
//! Invariants:
//! 1. All access is through atomics of the mapping or through locks that live in it: two processes
//!    never hold plain references to the same bytes.
//! 2. A lock whose holder died is passed on, with word of that: [`Locked::owner_died`].
//! 3. A file made here belongs to its maker alone (mode 0600); one that another user could write is
//!    refused.
//! 4. After the mapping is made nothing here allocates memory, so that all of it may run inside a
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

/// Bytes that a lock takes in the memory.
pub const LOCK_BYTES: u64 = 64;

const _: () = assert!(size_of::<libc::pthread_mutex_t>() as u64 <= LOCK_BYTES);

/// Memory shared with other processes.
pub struct SharedMemory {
    mapping: Mapping,
    /// Loom's atomics cannot lie in mapped memory: under its model the words are here, those that
    /// were ever asked for.
    #[cfg(loom)]
    words: std::sync::Mutex<std::collections::BTreeMap<u64, Box<AtomicU64>>>,
}

/// Why a lock was not had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LockFailure {
    /// Its holder did not give it back in time.
    #[error("the lock's holder does not give it back")]
    TimedOut,
    /// This thread holds it already: a signal handler interrupted the holder.
    #[error("this thread holds the lock already")]
    Reentered,
    /// The bytes of the lock make no lock.
    #[error("the lock is damaged")]
    Damaged,
}

/// A lock held; dropping it unlocks.
pub struct Locked<'a> {
    memory: &'a SharedMemory,
    offset: u64,
    owner_died: bool,
}

impl SharedMemory {
    /// Creates the file at `path` with `len_bytes` zero bytes, for its owner alone, and maps it.
    ///
    /// # Errors
    /// [`PmemError::Os`]: it exists, or cannot be made.
    pub fn create(path: &Path, len_bytes: u64) -> Result<Self, PmemError> {
        Ok(Self::over(Mapping::create_shared(path, len_bytes)?))
    }

    /// Maps what [`create`](Self::create) made.
    ///
    /// # Errors
    /// [`PmemError::Os`]: it is not there, or another user could write it; [`PmemError::Empty`].
    pub fn open(path: &Path) -> Result<Self, PmemError> {
        Ok(Self::over(Mapping::open_shared(path)?))
    }

    /// Memory of this process and its forks.
    ///
    /// # Errors
    /// [`PmemError`] where the memory cannot be had.
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

    /// Puts private zero bytes in the place of the memory: the process shares it no more. Threads
    /// that use it at this moment find locks free and words zero.
    ///
    /// # Errors
    /// The kernel's: the memory is shared as before.
    pub fn abandon(&self) -> std::io::Result<()> {
        self.mapping.abandon()
    }

    /// Where it is mapped.
    pub fn addresses(&self) -> std::ops::Range<usize> {
        self.mapping.addresses()
    }

    /// Size in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.mapping.len_bytes()
    }

    /// The word at `offset`.
    ///
    /// # Panics
    /// `offset` is no multiple of 8 or not inside the memory: a bug of the caller.
    #[inline]
    #[cfg(not(loom))]
    pub fn word(&self, offset: u64) -> &AtomicU64 {
        let at: *mut AtomicU64 = self.checked(offset);
        // SAFETY: aligned and inside the mapping, as checked, which lives as long as `self`.
        unsafe { &*at }
    }

    /// The word at `offset`, under loom.
    #[cfg(loom)]
    pub fn word(&self, offset: u64) -> &AtomicU64 {
        self.checked::<u64>(offset);
        let mut words = self.words.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let word = &raw const **words.entry(offset).or_insert_with(|| Box::new(AtomicU64::new(0)));
        // SAFETY: the box is never taken out, so the word stays where it is as long as `self`
        // lives.
        unsafe { &*word }
    }

    /// The half word at `offset`: what processes wait on.
    ///
    /// # Panics
    /// `offset` is no multiple of 4 or not inside the memory: a bug of the caller.
    #[inline]
    pub fn half(&self, offset: u64) -> &std::sync::atomic::AtomicU32 {
        let at: *mut std::sync::atomic::AtomicU32 = self.checked(offset);
        // SAFETY: aligned and inside the mapping, as checked, which lives as long as `self`.
        unsafe { &*at }
    }

    #[inline]
    fn checked<W>(&self, offset: u64) -> *mut W {
        let word_bytes = size_of::<W>() as u64;
        let inside = offset <= self.len_bytes().saturating_sub(word_bytes);
        assert!(inside && offset.is_multiple_of(word_bytes), "a word at offset {offset}");
        self.mapping.at(offset).cast()
    }

    /// Makes an unlocked lock of the [`LOCK_BYTES`] at `offset`, which no thread uses yet.
    pub fn init_lock(&self, offset: u64) {
        let mutex = self.mutex(offset);
        let mut attributes = std::mem::MaybeUninit::<libc::pthread_mutexattr_t>::uninit();
        let attributes = attributes.as_mut_ptr();
        // SAFETY: fresh memory for the attributes.
        unsafe { libc::pthread_mutexattr_init(attributes) };
        // SAFETY: initialized above.
        unsafe { libc::pthread_mutexattr_setpshared(attributes, libc::PTHREAD_PROCESS_SHARED) };
        // SAFETY: initialized above.
        unsafe { libc::pthread_mutexattr_setrobust(attributes, libc::PTHREAD_MUTEX_ROBUST) };
        // SAFETY: initialized above.
        unsafe { libc::pthread_mutexattr_settype(attributes, libc::PTHREAD_MUTEX_ERRORCHECK) };
        // SAFETY: the mutex fits the mapping and is not in use; the attributes are set.
        unsafe { libc::pthread_mutex_init(mutex, attributes) };
    }

    /// Locks the lock at `offset`, waiting at most `timeout`.
    ///
    /// # Errors
    /// [`LockFailure`].
    pub fn lock(&self, offset: u64, timeout: Duration) -> Result<Locked<'_>, LockFailure> {
        let mutex = self.mutex(offset);
        // SAFETY: a lock that `init_lock` made, or bytes that the C library refuses.
        let mut outcome = unsafe { libc::pthread_mutex_trylock(mutex) };
        if outcome == libc::EBUSY {
            let until = until(timeout);
            // SAFETY: as above.
            outcome =
                unsafe { pthread_mutex_clocklock(mutex, libc::CLOCK_MONOTONIC, &raw const until) };
        }
        self.locked(offset, outcome)
    }

    /// Locks the lock at `offset` if no thread holds it.
    ///
    /// # Errors
    /// [`LockFailure::TimedOut`] where a thread does.
    pub fn try_lock(&self, offset: u64) -> Result<Locked<'_>, LockFailure> {
        // SAFETY: as in `lock`.
        let outcome = unsafe { libc::pthread_mutex_trylock(self.mutex(offset)) };
        self.locked(offset, outcome)
    }

    /// Whether a live thread holds the lock at `offset`: a look at the half word in which the
    /// kernel finds the thread that holds it, and which the kernel clears of it when that thread
    /// dies.
    ///
    /// [`try_lock`](Self::try_lock) says the same, but writes to the lock's cache line even where
    /// it fails: threads that ask at each operation would pull it from each other.
    ///
    /// # Panics
    /// As for [`half`](Self::half).
    #[inline]
    pub fn is_held(&self, offset: u64) -> bool {
        self.half(offset).load(std::sync::atomic::Ordering::Acquire) & libc::FUTEX_TID_MASK != 0
    }

    fn locked(&self, offset: u64, outcome: libc::c_int) -> Result<Locked<'_>, LockFailure> {
        match outcome {
            0 => Ok(Locked { memory: self, offset, owner_died: false }),
            libc::EOWNERDEAD => {
                // SAFETY: this thread holds the lock; the caller repairs what it guards.
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

    /// Sleeps until [`wake`](Self::wake) is called for `offset`, unless the half word there is not
    /// `expected`; at most `timeout`, if there is one. May return early.
    pub fn wait(&self, offset: u64, expected: u32, timeout: Option<Duration>) {
        let timeout = timeout.map(timespec);
        let timeout = timeout.as_ref().map_or(std::ptr::null(), |it| &raw const *it);
        let word = self.half(offset).as_ptr();
        // SAFETY: a half word of the mapping; the timeout is null or valid.
        unsafe { libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAIT, expected, timeout) };
    }

    /// Wakes up to `most` threads that [`wait`](Self::wait) at `offset`, in any process.
    pub fn wake(&self, offset: u64, most: i32) {
        let word = self.half(offset).as_ptr();
        // SAFETY: a half word of the mapping.
        unsafe { libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAKE, most) };
    }
}

impl Locked<'_> {
    /// The last holder died while it held the lock: what it guards may be half done.
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

/// The moment `timeout` from now on the clock that locks wait by: not the system's time, which may
/// be set back by hours while a program waits.
fn until(timeout: Duration) -> libc::timespec {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let now = Duration::new(
        u64::try_from(now.tv_sec).unwrap_or(0),
        u32::try_from(now.tv_nsec).unwrap_or(0),
    );
    timespec(now + timeout)
}

unsafe extern "C" {
    /// Of the GNU C library since 2.30.
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
            // The thread ends with the lock held. The end of the scope would not wait for all of
            // its end.
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
