//! Hooks: syncs. Each is reported before the call.
#![allow(unsafe_code)] // C's calling convention

use std::ffi::{c_int, c_uint};

use libc::off_t;
use tidegate_record::event::{Event, Kind};

use crate::hook::hooks;
use crate::session;
use crate::{files, stream};

/// Reports a sync of the file of `fd` (`fsync` if `is_full`), makes the call, reports a failure.
fn synced(fd: c_int, is_full: bool, call: impl FnOnce() -> c_int) -> c_int {
    session::recording(|recorder| {
        stream::account_descriptor(recorder, fd);
        if let Some(file) = files::of(recorder, fd) {
            recorder.tell(Event::new(Kind::Sync).of_file(file.number).flagged(is_full), &[]);
        }
    });
    told_of_failure(call())
}

/// Reports a sync of all files (`syncfs` if `is_one`), and makes the call.
fn all_synced<R>(is_one: bool, call: impl FnOnce() -> R) -> R {
    session::recording(|recorder| recorder.tell(Event::new(Kind::SyncAll).flagged(is_one), &[]));
    call()
}

fn told_of_failure(result: c_int) -> c_int {
    if result != 0 {
        session::recording(|recorder| recorder.tell(Event::new(Kind::SyncFailed), &[]));
    }
    result
}

fn range_synced(fd: c_int, (offset, len): (off_t, off_t), result: c_int) -> c_int {
    if result == 0 {
        session::recording(|recorder| {
            if let (Some(file), Ok(offset), Ok(len)) =
                (files::of(recorder, fd), u64::try_from(offset), u64::try_from(len))
            {
                let event = Event::new(Kind::SyncRange).of_file(file.number);
                recorder.tell(event.with([offset, len]), &[]);
            }
        });
    }
    result
}

hooks! {
    [fsync](fd: c_int) -> c_int => |call| synced(fd, true, call);
    [fdatasync](fd: c_int) -> c_int => |call| synced(fd, false, call);
    [sync]() -> () => |call| all_synced(false, call);
    [syncfs](fd: c_int) -> c_int => |call| told_of_failure(all_synced(true, call));
    [sync_file_range](fd: c_int, offset: off_t, len: off_t, flags: c_uint) -> c_int =>
        |call| range_synced(fd, (offset, len), call());
}
