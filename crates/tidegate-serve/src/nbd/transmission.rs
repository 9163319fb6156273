//! The transmission phase without I/O: checks requests, and turns them into operations.
//!
//! Invariants:
//! 1. [`check`] refuses everything that the protocol or the device does not allow, before any byte
//!    is allocated. A [`Command`] is inside the device, aligned, and no longer than the limit.
//! 2. A command is acknowledged only when the device has acknowledged it. So the flush of one
//!    connection covers the writes answered on every other one.
//!
//! Entry points: [`Rules::new`], [`check`], [`operation_of`], [`errno_of`].

use std::ops::Range;

use tidegate::device::{
    DeviceError, DeviceErrorKind, Extent, OwnedOperation, WriteFlags, ZeroFlags,
};

use super::handshake::Negotiated;
use super::protocol::{Request, cmd, cmd_flag, errno};
use crate::queue::Then;
use crate::statistics::Kind;

/// The most extents of one block status reply.
const MAX_EXTENTS: usize = 1024;

/// Rules for the requests of one connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rules {
    /// Size of the export.
    pub(super) size_bytes: u64,
    /// The unit of all offsets and lengths.
    pub(super) block_bytes: u32,
    /// The most data of one read or write.
    pub(super) max_request_bytes: u32,
    /// Writes are refused.
    pub(super) read_only: bool,
    /// Replies are structured.
    pub(super) structured: bool,
    /// Block status may be asked for.
    pub(super) base_allocation: bool,
}

impl Rules {
    /// Returns the rules that follow from a handshake.
    pub(super) fn new(negotiated: &Negotiated, max_request_bytes: u32) -> Self {
        let geometry = negotiated.export.geometry();
        Self {
            size_bytes: geometry.size_bytes(),
            block_bytes: geometry.block_bytes,
            max_request_bytes,
            read_only: negotiated.export.read_only,
            structured: negotiated.structured,
            base_allocation: negotiated.base_allocation,
        }
    }
}

/// The action of a sound request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// Read the range.
    Read,
    /// Write the range.
    Write(WriteFlags),
    /// Say goodbye.
    Disconnect,
    /// Do something that carries no data.
    Control(Control),
}

/// The action of a request without data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Control {
    /// Make acknowledged writes durable.
    Flush,
    /// Discard the range. With `fua` that must be durable.
    Trim { fua: bool },
    /// Prefetch the range.
    Cache,
    /// Write zeroes to the range.
    WriteZeroes(ZeroFlags),
    /// Tell which parts of the range are allocated, in at most so many extents.
    BlockStatus { most: usize },
}

/// A sound request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Command {
    /// The kind in the statistics; `None` for a goodbye.
    pub(super) kind: Option<Kind>,
    /// The action.
    pub(super) action: Action,
    /// The client's name for the request.
    pub(super) cookie: u64,
    /// First byte.
    pub(super) offset: u64,
    /// Length in bytes.
    pub(super) len: u32,
}

impl Command {
    /// Returns the bytes that the request changes, or `None` if it changes none.
    pub(super) fn changed_bytes(&self) -> Option<Range<u64>> {
        use Control::{Trim, WriteZeroes};
        let changes =
            matches!(self.action, Action::Write(_) | Action::Control(Trim { .. } | WriteZeroes(_)));
        changes.then(|| self.offset..self.offset + u64::from(self.len))
    }

    /// Returns the length of the data in the reply or behind the request.
    pub(super) fn data_bytes(&self) -> usize {
        match self.action {
            Action::Read | Action::Write(_) => self.len as usize,
            _ => 0,
        }
    }
}

/// The reason of a refused request: an error number of the protocol, and words for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Refusal {
    /// One of [`errno`].
    pub(super) error: u32,
    /// The reason for people.
    pub(super) message: &'static str,
}

fn refusal<T>(error: u32, message: &'static str) -> std::result::Result<T, Refusal> {
    Err(Refusal { error, message })
}

/// Turns a request into a command.
///
/// # Errors
/// Returns the [`Refusal`] of a request that is not sound.
pub(super) fn check(request: &Request, rules: &Rules) -> std::result::Result<Command, Refusal> {
    check_flags(request, rules)?;
    let action = action(request)?;
    check_access(request, rules)?;
    check_range(request, rules)?;
    let Request { cookie, offset, len, .. } = *request;
    Ok(Command { kind: kind_of(request.command), action, cookie, offset, len })
}

/// Returns the kind of a request in the statistics; `None` if it is unknown or a goodbye.
pub(super) fn kind_of(command: u16) -> Option<Kind> {
    Some(match command {
        cmd::READ => Kind::Read,
        cmd::WRITE => Kind::Write,
        cmd::FLUSH => Kind::Flush,
        cmd::TRIM => Kind::Trim,
        cmd::CACHE => Kind::Cache,
        cmd::WRITE_ZEROES => Kind::WriteZeroes,
        cmd::BLOCK_STATUS => Kind::BlockStatus,
        _ => return None,
    })
}

fn action(request: &Request) -> std::result::Result<Action, Refusal> {
    let has = |flag| request.flags & flag != 0;
    let fua = has(cmd_flag::FUA);
    Ok(match request.command {
        cmd::READ => Action::Read,
        cmd::WRITE => Action::Write(WriteFlags { fua }),
        cmd::DISC => Action::Disconnect,
        cmd::FLUSH => Action::Control(Control::Flush),
        cmd::TRIM => Action::Control(Control::Trim { fua }),
        cmd::CACHE => Action::Control(Control::Cache),
        cmd::WRITE_ZEROES => Action::Control(Control::WriteZeroes(ZeroFlags {
            fua,
            may_unmap: !has(cmd_flag::NO_HOLE),
            fast_only: has(cmd_flag::FAST_ZERO),
        })),
        cmd::BLOCK_STATUS => {
            let most = if has(cmd_flag::REQ_ONE) { 1 } else { MAX_EXTENTS };
            Action::Control(Control::BlockStatus { most })
        }
        _ => return refusal(errno::INVAL, "unknown command"),
    })
}

/// Checks the flags. FUA is allowed everywhere: some clients set it on requests that write nothing.
fn check_flags(request: &Request, rules: &Rules) -> std::result::Result<(), Refusal> {
    let own = match request.command {
        cmd::READ if rules.structured => cmd_flag::DF,
        cmd::WRITE_ZEROES => cmd_flag::NO_HOLE | cmd_flag::FAST_ZERO,
        cmd::BLOCK_STATUS => cmd_flag::REQ_ONE,
        _ => 0,
    };
    if request.flags & !(own | cmd_flag::FUA) != 0 {
        return refusal(errno::INVAL, "a flag does not belong to the command");
    }
    Ok(())
}

fn check_access(request: &Request, rules: &Rules) -> std::result::Result<(), Refusal> {
    match request.command {
        cmd::WRITE | cmd::TRIM | cmd::WRITE_ZEROES if rules.read_only => {
            refusal(errno::PERM, "the export is read-only")
        }
        cmd::BLOCK_STATUS if !rules.base_allocation => {
            refusal(errno::INVAL, "no metadata context was negotiated")
        }
        cmd::READ | cmd::WRITE if request.len > rules.max_request_bytes => {
            refusal(errno::OVERFLOW, "the request is longer than the maximum block size")
        }
        _ => Ok(()),
    }
}

fn check_range(request: &Request, rules: &Rules) -> std::result::Result<(), Refusal> {
    let (offset, len) = (request.offset, u64::from(request.len));
    match request.command {
        // A goodbye is honoured whatever its range: it has no reply that could refuse it.
        cmd::DISC => return Ok(()),
        cmd::FLUSH if (offset, len) == (0, 0) => return Ok(()),
        cmd::FLUSH => return refusal(errno::INVAL, "a flush has no range"),
        _ => {}
    }
    let block_bytes = u64::from(rules.block_bytes);
    if len == 0 {
        return refusal(errno::INVAL, "the length is zero");
    }
    if offset.checked_add(len).is_none_or(|end| end > rules.size_bytes) {
        let writes = matches!(request.command, cmd::WRITE | cmd::WRITE_ZEROES);
        let error = if writes { errno::NOSPC } else { errno::INVAL };
        return refusal(error, "the request passes the end of the export");
    }
    if !offset.is_multiple_of(block_bytes) || !len.is_multiple_of(block_bytes) {
        return refusal(
            errno::INVAL,
            "the request is not made of whole blocks of the minimum size",
        );
    }
    Ok(())
}

/// Returns the operation of a command without data, and the step that follows. Returns `None` for a
/// cache command, since the devices cache by themselves.
pub(super) fn operation_of(command: &Command, control: Control) -> Option<(OwnedOperation, Then)> {
    let (offset, len) = (command.offset, u64::from(command.len));
    Some(match control {
        Control::Flush => (OwnedOperation::Flush, Then::Complete),
        Control::Trim { fua } => {
            let then = if fua { Then::Flush } else { Then::Complete };
            (OwnedOperation::Discard { offset, len }, then)
        }
        Control::WriteZeroes(flags) => {
            (OwnedOperation::WriteZeroes { offset, len, flags }, Then::Complete)
        }
        Control::BlockStatus { most } => {
            let extents = Vec::new();
            (OwnedOperation::Status { offset, len, most, extents }, Then::Complete)
        }
        Control::Cache => return None,
    })
}

/// Joins neighbours of one state. Returns at most `most` extents, together no longer than `len`.
pub(super) fn fit(extents: Vec<Extent>, offset: u64, len: u64, most: usize) -> Vec<Extent> {
    let mut left = len;
    let mut fitted: Vec<Extent> = Vec::with_capacity(extents.len().min(most));
    for mut extent in extents {
        extent.len = extent.len.min(left);
        left -= extent.len;
        let joins = |last: &Extent| (last.hole, last.zero) == (extent.hole, extent.zero);
        if let Some(last) = fitted.last_mut().filter(|last| joins(last)) {
            last.len += extent.len;
        } else if extent.len > 0 && fitted.len() < most {
            fitted.push(extent);
        } else {
            break;
        }
    }
    if fitted.is_empty() {
        // The protocol wants at least one extent, and lets a server that knows nothing say so.
        fitted.push(Extent::data(offset, len));
    }
    fitted
}

/// Returns the protocol's number for a device's error.
pub(super) fn errno_of(error: &DeviceError) -> u32 {
    match error.kind() {
        DeviceErrorKind::ReadOnly => errno::PERM,
        DeviceErrorKind::NoSpace => errno::NOSPC,
        DeviceErrorKind::Unsupported => errno::NOTSUP,
        DeviceErrorKind::OutOfRange | DeviceErrorKind::Misaligned => errno::INVAL,
        _ => errno::IO,
    }
}
