//! Bodies of the fuzz targets, plain functions so that a short property test runs them too.
//!
//! Each feeds bytes, cut where the input says, to the code that serves clients, with buffers in
//! place of sockets, and checks the output.

use std::sync::Arc;

use tidegate::device::memory::MemoryDevice;
use tidegate::device::{
    AsyncRequest, Attempt, BlockDevice, Context, DeviceError, DeviceErrorKind, Extent, Geometry,
    Operation, Result,
};

use super::Limits;
use super::buffer::{Input, Output};
use super::export::{Export, Exports, State};
use super::handshake::{Handshake, MAX_OPTIONS, Negotiated, Step};
use super::protocol::{
    CHUNK_HEADER_BYTES, CHUNK_MAGIC, Cursor, SIMPLE_REPLY_BYTES, SIMPLE_REPLY_MAGIC,
};
use super::session::{Mail, Progress, Session};
use super::share::Share;
use super::tls::TlsMode;
use crate::budget::{Budget, Lease, Wakes};

const DEVICE_BYTES: u64 = 256 << 10;

/// A little memory; its last block fails.
struct Scratch {
    memory: MemoryDevice,
    /// Every request that is to run at once is handed back.
    is_slow: bool,
}

impl BlockDevice for Scratch {
    fn geometry(&self) -> Geometry {
        self.memory.geometry()
    }

    fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        let (offset, len) = operation.range();
        self.geometry().check(offset, len)?;
        match operation {
            Operation::Flush => Ok(()),
            Operation::Status { most, extents, .. } => {
                let extent = |index| Extent {
                    hole: index % 2 == 0,
                    ..Extent::data(offset + index * 512, 512)
                };
                **extents = (0..(len / 512).min(*most as u64)).map(extent).collect();
                Ok(())
            }
            _ if offset + len == DEVICE_BYTES => {
                Err(DeviceError::new(DeviceErrorKind::Io, "the last block fails"))
            }
            _ => self.memory.run(operation),
        }
    }

    fn attempt(&self, operation: &mut Operation<'_>, _context: Context) -> Attempt {
        if self.is_slow { Attempt::WouldBlock } else { Attempt::Done(self.run(operation)) }
    }

    /// Completes at once, so that an input has one outcome.
    fn start(self: Arc<Self>, request: AsyncRequest) {
        request.run_on(&*self);
    }
}

fn scratch_export(is_slow: bool) -> Export {
    let memory = MemoryDevice::new(512, DEVICE_BYTES / 512).expect("a device");
    Export::new("", Arc::new(Scratch { memory, is_slow })).description("for fuzzing")
}

/// Removes and returns the first byte, or 0 at the end.
fn byte(data: &mut &[u8]) -> u8 {
    let (&first, rest) = data.split_first().unwrap_or((&0, &[]));
    *data = rest;
    first
}

/// Feeds any bytes as a client's side of a handshake. The first byte chooses the TLS mode.
pub fn handshake(mut data: &[u8]) {
    let mode =
        [TlsMode::Off, TlsMode::Optional, TlsMode::Required][usize::from(byte(&mut data) % 3)];
    if let Some((negotiated, rest)) = shake_hands(mode, data) {
        transmit(&negotiated, 256, rest);
    }
}

fn shake_hands(mode: TlsMode, mut data: &[u8]) -> Option<(Negotiated, &[u8])> {
    let second = Export::new("second", scratch_export(false).device).read_only(true);
    let open = |export: Export| (export.name.clone(), State::Open(export));
    let later = ("later".to_owned(), State::Opening);
    let exports = Exports::new(vec![open(scratch_export(false)), open(second), later]).ok()?;
    let mut handshake = Handshake::new(Arc::new(exports), 32 << 20, mode);
    let mut steps = 0;
    loop {
        let mut reply = Vec::new();
        let (used, step) = handshake.advance(data, &mut reply);
        data = &data[used..];
        assert!(reply.len() < 2 << 10, "a long answer");
        assert!(steps <= 2 * MAX_OPTIONS + 4, "more messages than allowed");
        steps += 1;
        match step {
            Step::Again => {}
            Step::StartTls => handshake.tls_started(),
            Step::Transmit(negotiated, _) => return Some((*negotiated, data)),
            Step::NeedInput | Step::Wait | Step::Close | Step::Fault(_) => return None,
        }
    }
}

/// Feeds any bytes as requests. The first byte chooses the result of the handshake, and whether
/// buffers are small. Each piece has its length before it.
pub fn transmission(mut data: &[u8]) {
    let bits = byte(&mut data);
    let export = scratch_export(bits & 1 == 0).read_only(bits & 2 != 0);
    let (structured, base_allocation) = (bits & 4 != 0, bits & 8 != 0);
    let connections = if bits & 16 == 0 { 256 } else { usize::MAX };
    transmit(&Negotiated { export, structured, base_allocation }, connections, data);
}

/// Serves `data` on a connection of a server that allows `connections`.
fn transmit(negotiated: &Negotiated, connections: usize, mut data: &[u8]) {
    let Ok(mailbox) = Mail::new().map(Arc::new) else { return };
    let (in_flight_bytes, in_flight_requests) = (1 << 20, 4);
    let limits = Limits { connections, in_flight_bytes, in_flight_requests, ..Limits::default() };
    let share = Share::new(&limits, false);
    let lease = Lease::new(Arc::new(Budget::new(1 << 20)), Arc::clone(&mailbox) as Arc<dyn Wakes>);
    let mut session = Session::new(negotiated, &limits, &share, 0, mailbox, lease);
    let buffers = (Input::try_new(share.input_bytes), Output::try_new(share.output_bytes()));
    let (Some(mut input), Some(mut output)) = buffers else { return };
    let mut sent = Vec::new();
    let mut progress = Progress::NeedInput;
    while !data.is_empty() && matches!(progress, Progress::NeedInput) {
        let cut = (usize::from(byte(&mut data)) << 4) + 1;
        receive(&mut session, &mut input, &mut data, cut);
        progress = session.run(&mut input, &mut output);
        while let Progress::Blocked = progress {
            session.collect(&mut output);
            deliver(&mut session, &mut output, &mut sent);
            progress = session.run(&mut input, &mut output);
        }
    }
    session.collect(&mut output);
    deliver(&mut session, &mut output, &mut sent);
    assert!(session.is_idle());
    if negotiated.structured {
        check_replies(&sent);
    }
}

/// Receives up to `cut` bytes as a connection does: first for the incoming write's payload.
fn receive(session: &mut Session, input: &mut Input, data: &mut &[u8], cut: usize) {
    let (now, rest) = data.split_at(cut.min(data.len()));
    *data = rest;
    let space = session.payload_space();
    let (for_payload, for_input) = now.split_at(space.len().min(now.len()));
    space[..for_payload.len()].copy_from_slice(for_payload);
    session.payload_received(for_payload.len());
    input.free_space()[..for_input.len()].copy_from_slice(for_input);
    input.received(for_input.len());
}

fn deliver(session: &mut Session, output: &mut Output, sent: &mut Vec<u8>) {
    while !output.is_empty() {
        let mut pieces = Output::no_pieces();
        let count = output.pieces(&mut pieces);
        let message: Vec<u8> = pieces[..count].iter().flat_map(|piece| piece.to_vec()).collect();
        assert!(!message.is_empty(), "nothing to send in an output that is not empty");
        output.sent(message.len(), session.pool());
        sent.extend(message);
    }
}

/// Checks that the sent bytes are whole simple replies and chunks.
fn check_replies(mut sent: &[u8]) {
    while !sent.is_empty() {
        let len = match Cursor(sent).u32() {
            Some(SIMPLE_REPLY_MAGIC) => SIMPLE_REPLY_BYTES,
            Some(CHUNK_MAGIC) => {
                let payload = Cursor(&sent[16..]).u32().map_or(0, |len| len as usize);
                CHUNK_HEADER_BYTES + payload
            }
            other => panic!("a reply starts with {other:x?}"),
        };
        sent = &sent[len..];
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::protocol::{REQUEST_MAGIC, be16, be32};
    use super::*;

    fn any_request() -> impl Strategy<Value = Vec<u8>> {
        let len = prop_oneof![Just(0_u32), Just(512), Just(1024), Just(300 << 10), any::<u32>()];
        let offset = prop_oneof![Just(0_u64), Just(512), Just((256 << 10) - 512), any::<u64>()];
        (0_u16..10, 0_u16..40, offset, len, any::<bool>()).prop_map(
            |(command, flags, offset, len, whole)| {
                let mut bytes = be32(REQUEST_MAGIC).to_vec();
                bytes.extend(be16(flags));
                bytes.extend(be16(command));
                bytes.extend([7; 8]);
                bytes.extend(be32(u32::try_from(offset >> 32).unwrap_or(0)));
                bytes.extend(be32(u32::try_from(offset & 0xffff_ffff).unwrap_or(0)));
                bytes.extend(be32(len));
                if whole && command == 1 && len <= 300 << 10 {
                    bytes.resize(bytes.len() + len as usize, 0xab);
                }
                bytes
            },
        )
    }

    /// Puts the length of each piece before the piece, as [`transmission`] expects.
    fn cut(bytes: &[u8], lens: &[u8]) -> Vec<u8> {
        let (mut rest, mut lens) = (bytes, lens.iter().cycle());
        let mut all = Vec::new();
        while let (false, Some(&len)) = (rest.is_empty(), lens.next()) {
            let (now, later) = rest.split_at(rest.len().min((usize::from(len) << 4) + 1));
            all.push(len);
            all.extend_from_slice(now);
            rest = later;
        }
        all
    }

    proptest! {
        #[test]
        fn handshakes_survive_any_bytes(data in prop::collection::vec(any::<u8>(), 0..300)) {
            handshake(&data);
            handshake(&[&[0, 0, 0, 0, 3][..], b"IHAVEOPT", &data].concat());
        }

        #[test]
        fn transmissions_survive_any_bytes(data in prop::collection::vec(any::<u8>(), 0..300)) {
            transmission(&data);
        }

        #[test]
        fn transmissions_survive_any_requests(
            bits: u8,
            requests in prop::collection::vec(any_request(), 1..12),
            lens in prop::collection::vec(any::<u8>(), 1..5),
        ) {
            transmission(&[&[bits][..], &cut(&requests.concat(), &lens)].concat());
        }
    }
}
