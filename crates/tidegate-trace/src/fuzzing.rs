//! Checks the readers with arbitrary bytes, for the fuzz target and for tests.

use std::io::Cursor;
use std::path::Path;

use super::{Event, Format, Op, read};

/// The maximum length of a request.
const MAX_REQUEST_BYTES: u64 = 1 << 31;

/// Reads the bytes behind the first byte of `data` as a trace. The first byte selects the format or
/// its detection.
///
/// # Panics
/// If an event is impossible: its time goes back, or its range exceeds the largest offset.
pub fn any_trace(data: &[u8]) {
    let Some((&first, rest)) = data.split_first() else { return };
    let format = Format::ALL.get(usize::from(first) % (Format::ALL.len() + 1)).copied();
    let bytes = Cursor::new(rest.to_vec());
    let Ok(trace) = read(Path::new("fuzz"), bytes, format) else { return };
    let mut last_us = 0;
    for event in trace.map_while(Result::ok) {
        assert!(event.time_us >= last_us, "a time that goes back");
        last_us = event.time_us;
        check(&event);
    }
}

fn check(event: &Event) {
    let (offset_bytes, len_bytes) = match event.op {
        Op::Read { offset_bytes, len_bytes, .. } | Op::Write { offset_bytes, len_bytes, .. } => {
            assert!(len_bytes > 0 && len_bytes <= MAX_REQUEST_BYTES, "{event:?}");
            (offset_bytes, len_bytes)
        }
        Op::Resize { len_bytes, .. } => (0, len_bytes),
        Op::Sync { .. } | Op::SyncAll | Op::Remove { .. } => (0, 0),
    };
    let end = offset_bytes.checked_add(len_bytes);
    assert!(end.is_some_and(|end| i64::try_from(end).is_ok()), "{event:?}");
}
