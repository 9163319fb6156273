//! Hook: `mlockall`, which locks the program's memory and not the log's.
//!
//! Invariant: the program may lock as much memory, and locks the same memory, as without the
//! library. No memory of the log is locked: that would be the whole pool.
#![allow(unsafe_code)] // C's calling convention, and system calls

use std::ffi::{c_int, c_uint};
use std::ops::Range;

use rustix::process::{Resource, getrlimit};

use crate::state::{descriptors, process};
use crate::sys::page::Mapped;
use crate::sys::path::Opened;
use crate::sys::query;
use crate::sys::raw::{self, Errno, checked, words};

/// The longest list of mappings that is read.
const LIST_BYTES: usize = 4 << 20;
/// Flags of `mlockall`.
const CURRENT: c_uint = libc::MCL_CURRENT.cast_unsigned();
const FUTURE: c_uint = libc::MCL_FUTURE.cast_unsigned();
const ON_FAULT: c_uint = libc::MCL_ONFAULT.cast_unsigned();

#[unsafe(no_mangle)]
pub(crate) extern "C-unwind" fn mlockall(flags: c_int) -> c_int {
    let flags = flags.cast_unsigned();
    let is_about_log =
        flags & CURRENT != 0 && flags & !(CURRENT | FUTURE | ON_FAULT) == 0 && is_mapped();
    let done = if is_about_log { lock_others(flags) } else { lock(flags) };
    raw::returned_int(done.map_or_else(crate::covered::negated, |_| 0))
}

fn is_mapped() -> bool {
    process::log().is_some()
}

fn lock(flags: c_uint) -> Result<usize, Errno> {
    // SAFETY: the call takes no pointers.
    checked(unsafe { raw::call(libc::SYS_mlockall, words![flags]) })
}

/// Locks all memory but the log's, as `mlockall` with these flags locks all. Returns 0.
fn lock_others(flags: c_uint) -> Result<usize, Errno> {
    let mut memory = Mapped::new(LIST_BYTES).ok_or(libc::ENOMEM)?;
    let list = listed(&mut memory)?;
    let bytes: usize = others(list).map(|(range, _)| range.len()).sum();
    let limit = getrlimit(Resource::Memlock).current.unwrap_or(u64::MAX);
    let is_beyond = bytes as u64 > limit;
    if is_beyond && !may_exceed() {
        return Err(if limit == 0 { libc::EPERM } else { libc::ENOMEM });
    }
    if flags & FUTURE != 0 {
        lock(flags & !CURRENT)?;
    }
    let on_fault = c_uint::from(flags & ON_FAULT != 0);
    for (range, is_ordinary) in others(list) {
        let arguments = words![range.start, range.len(), on_fault];
        // SAFETY: locking changes no content.
        let locked = checked(unsafe { raw::call(libc::SYS_mlock2, arguments) });
        // For memory without access, `mlock2` fails though it locks; `mlockall` does not fail.
        let is_refused = locked == Err(libc::EPERM) || is_ordinary && locked == Err(libc::ENOMEM);
        if is_beyond && is_refused {
            // SAFETY: the call takes no pointers.
            unsafe { raw::call(libc::SYS_munlockall, words![]) };
            return Err(libc::ENOMEM);
        }
    }
    Ok(0)
}

/// Reads `/proc/self/maps` into `memory`. Fails with `ENOMEM` if it does not fit.
fn listed(memory: &mut Mapped) -> Result<&[u8], Errno> {
    let file = Opened::open(libc::AT_FDCWD, c"/proc/self/maps", libc::O_RDONLY)?;
    let mut len = 0;
    loop {
        let space = memory.bytes_mut().get_mut(len..).filter(|space| !space.is_empty());
        match query::read(file.number(), space.ok_or(libc::ENOMEM)?)? {
            0 => break,
            read => len += read,
        }
    }
    Ok(memory.bytes().get(..len).unwrap_or_default())
}

/// Returns the mappings that are not the library's, and whether each can be read and written.
fn others(list: &[u8]) -> impl Iterator<Item = (Range<usize>, bool)> {
    let of_log = process::log().map(|log| log.ring().memory()).unwrap_or_default();
    let own = [of_log[0].clone(), of_log[1].clone(), descriptors::memory()];
    let lines = list.split(|&byte| byte == b'\n').filter(|line| !is_library(line));
    let is_ordinary = |line: &[u8]| line.split(|&byte| byte == b' ').nth(1) == Some(b"rw-p");
    let ranges = lines.filter_map(move |line| Some((range_of(line)?, is_ordinary(line))));
    ranges.filter(move |(range, _)| !own.iter().any(|own| own.contains(&range.start)))
}

/// Returns whether a line is a mapping of the library's file. Its other memory lies next to it.
fn is_library(line: &[u8]) -> bool {
    line.ends_with(b"/libtidegate_preload.so")
}

/// Returns the addresses at the start of a line.
fn range_of(line: &[u8]) -> Option<Range<usize>> {
    let mut ends = line.split(|&byte| byte == b' ').next()?.splitn(2, |&byte| byte == b'-');
    let mut end = || {
        let digits = std::str::from_utf8(ends.next()?).ok()?;
        usize::from_str_radix(digits, 16).ok()
    };
    Some(end()?..end()?)
}

/// Returns whether this process may lock more than its limit.
fn may_exceed() -> bool {
    const VERSION_3: c_uint = 0x2008_0522;
    const IPC_LOCK: c_uint = 14;
    let header = [VERSION_3, 0];
    // Effective, permitted, inheritable; twice.
    let mut sets = [0 as c_uint; 6];
    let arguments = words![header.as_ptr(), sets.as_mut_ptr()];
    // SAFETY: a header and two sets, as the kernel expects them for this version.
    let is_told = unsafe { query::call(libc::SYS_capget, arguments) }.is_ok();
    is_told && sets[0] & 1 << IPC_LOCK != 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::World;

    #[test]
    fn the_memory_of_the_log_is_none_of_the_program() {
        let world = World::of_process();
        descriptors::make().unwrap();
        let mut memory = Mapped::new(LIST_BYTES).unwrap();
        let list = listed(&mut memory).unwrap();
        let all: Vec<_> = list.split(|&byte| byte == b'\n').filter_map(range_of).collect();
        for own in world.log.ring().memory().into_iter().chain([descriptors::memory()]) {
            assert!(all.iter().any(|range| range.contains(&own.start)));
            assert!(!others(list).any(|(range, _)| range.contains(&own.start)), "{own:x?}");
        }
        let here = (&raw const world).addr();
        assert!(others(list).any(|(range, _)| range.contains(&here)));
    }

    #[test]
    fn a_line_says_where_a_mapping_is() {
        let line = b"7f00-7f80 r--p 00000000 fe:01 77 /lib/x.so";
        assert_eq!(range_of(line), Some(0x7f00..0x7f80));
        assert_eq!((range_of(b""), range_of(b"x-y r")), (None, None));
    }
}
