//! The handshake (fixed newstyle, `NBD_OPT_GO`) as a state machine over bytes, without I/O.
//!
//! Invariants: the client buffers at most one answer of [`ANSWER_BYTES_MAX`]; the number of answers
//! is bounded; strings of the server are cut and stripped of control characters before people see
//! them.

use super::error::NbdError;
use super::export::NbdExport;
use super::protocol::{
    Cursor, FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, OPTION_MAGIC, OPTION_REPLY_MAGIC, SERVER_MAGIC,
    be16, be32, be64, info, opt, parse_string, rep, wire_len,
};

/// Size of the server's greeting.
const GREETING_BYTES: usize = 18;
/// Size of the header of an answer.
const ANSWER_HEADER_BYTES: usize = 20;
/// The most data of one answer: a string of the protocol fits.
const ANSWER_BYTES_MAX: usize = 8 << 10;
/// The most answers of one handshake.
const ANSWERS_MAX: u32 = 64;
/// The most characters of the server's message that an error repeats.
const MESSAGE_CHARS_MAX: usize = 200;

/// The next step after a call of [`Handshake::advance`].
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The message is incomplete: call again with more bytes.
    NeedInput,
    /// A message was handled: call again.
    Again,
    /// The export is open: requests may be sent.
    Done,
}

/// The client's side of one handshake.
pub(super) struct Handshake {
    is_greeted: bool,
    is_described: bool,
    answers: u32,
    export: NbdExport,
}

impl Handshake {
    /// Starts a handshake for the export called `name`.
    pub(super) fn new(name: &str) -> Self {
        let export = NbdExport::named(name);
        Self { is_greeted: false, is_described: false, answers: 0, export }
    }

    /// Returns the server's description of the export.
    pub(super) fn into_export(self) -> NbdExport {
        self.export
    }

    /// Handles the message at the front of `input` and appends the reply to `output`. Returns the
    /// number of used bytes, and the next step.
    ///
    /// # Errors
    /// Fails if the server refuses or breaks the protocol.
    pub(super) fn advance(
        &mut self,
        input: &[u8],
        output: &mut Vec<u8>,
    ) -> Result<(usize, Step), NbdError> {
        if self.is_greeted { self.answer(input) } else { self.greeting(input, output) }
    }

    fn greeting(&mut self, input: &[u8], output: &mut Vec<u8>) -> Result<(usize, Step), NbdError> {
        let mut cursor = Cursor(input);
        let fields = (cursor.u64(), cursor.u64(), cursor.u16());
        let (Some(magic), Some(style), Some(flags)) = fields else {
            return Ok((0, Step::NeedInput));
        };
        if magic != SERVER_MAGIC {
            return Err(protocol("the greeting does not start with NBDMAGIC"));
        }
        if style != OPTION_MAGIC {
            return Err(protocol("the server speaks the oldstyle handshake"));
        }
        if flags & FLAG_FIXED_NEWSTYLE == 0 {
            return Err(protocol("the server does not speak fixed newstyle"));
        }
        self.is_greeted = true;
        output.extend(be32(u32::from(flags & (FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES))));
        push_go(output, &self.export.name);
        Ok((GREETING_BYTES, Step::Again))
    }

    fn answer(&mut self, input: &[u8]) -> Result<(usize, Step), NbdError> {
        let Some((kind, len)) = answer_header(input)? else { return Ok((0, Step::NeedInput)) };
        let Some(data) = input.get(ANSWER_HEADER_BYTES..ANSWER_HEADER_BYTES + len) else {
            return Ok((0, Step::NeedInput));
        };
        self.answers += 1;
        if self.answers > ANSWERS_MAX {
            return Err(protocol("the server never ends its answer"));
        }
        let step = match kind {
            rep::ACK if self.is_described => Step::Done,
            rep::ACK => return Err(protocol("the server does not tell the export's size")),
            rep::INFO => self.information(data)?,
            reply if reply >> 31 == 1 => {
                return Err(NbdError::Refused { reply, message: printable(data) });
            }
            other => return Err(protocol(&format!("answer {other:#x} to NBD_OPT_GO"))),
        };
        Ok((ANSWER_HEADER_BYTES + len, step))
    }

    fn information(&mut self, data: &[u8]) -> Result<Step, NbdError> {
        let mut cursor = Cursor(data);
        let understood = match cursor.u16() {
            Some(info::EXPORT) => cursor.u64().zip(cursor.u16()).map(|(size_bytes, flags)| {
                (self.export.size_bytes, self.export.flags) = (size_bytes, flags);
                self.is_described = true;
            }),
            Some(info::BLOCK_SIZE) => three(&mut cursor).map(|it| self.export.block_sizes = it),
            Some(info::NAME) => string(cursor).map(|name| self.export.name = name),
            Some(info::DESCRIPTION) => string(cursor).map(|it| self.export.description = it),
            // Unknown information, maybe of later servers, is ignored.
            Some(_) => Some(()),
            None => None,
        };
        understood.map(|()| Step::Again).ok_or_else(|| protocol("malformed information"))
    }
}

/// Returns kind and length of the answer at the front of `input`; `None` while it is incomplete.
fn answer_header(input: &[u8]) -> Result<Option<(u32, usize)>, NbdError> {
    let mut cursor = Cursor(input);
    let fields = (cursor.u64(), cursor.u32(), cursor.u32(), cursor.u32());
    let (Some(magic), Some(option), Some(kind), Some(len)) = fields else { return Ok(None) };
    if magic != OPTION_REPLY_MAGIC {
        return Err(protocol("an answer with the wrong magic"));
    }
    if option != opt::GO {
        return Err(protocol("an answer to another option"));
    }
    match usize::try_from(len) {
        Ok(len) if len <= ANSWER_BYTES_MAX => Ok(Some((kind, len))),
        _ => Err(protocol(&format!("an answer of {len} bytes"))),
    }
}

/// Asks for the export called `name`, and for the information that identifies it.
fn push_go(output: &mut Vec<u8>, name: &str) {
    let wanted = [info::BLOCK_SIZE, info::NAME, info::DESCRIPTION].map(be16).concat();
    output.extend(be64(OPTION_MAGIC));
    output.extend(be32(opt::GO));
    output.extend(be32(wire_len(4 + name.len() + 2 + wanted.len())));
    output.extend(be32(wire_len(name.len())));
    output.extend(name.as_bytes());
    output.extend(be16(3));
    output.extend(wanted);
}

fn three(cursor: &mut Cursor<'_>) -> Option<(u32, u32, u32)> {
    Some((cursor.u32()?, cursor.u32()?, cursor.u32()?))
}

fn string(cursor: Cursor<'_>) -> Option<String> {
    parse_string(cursor.0).map(str::to_owned)
}

fn protocol(what: &str) -> NbdError {
    NbdError::Protocol(what.to_owned())
}

/// Makes the server's message fit into one line.
fn printable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.chars().filter(|letter| !letter.is_control()).take(MESSAGE_CHARS_MAX).collect()
}
