//! The handshake (fixed newstyle) as a state machine over bytes, without I/O.
//!
//! Invariants:
//! 1. Each call of [`Handshake::advance`] handles at most one message, so a client makes the server
//!    hold at most one message and its answer.
//! 2. Options are bounded in number and in length; longer data is skipped, never stored.
//! 3. Everything negotiated in plain text is forgotten when TLS starts: an attacker in the middle
//!    cannot leave anything behind for the encrypted session.
//!
//! Entry points: [`Handshake::new`], [`Handshake::advance`], [`Handshake::tls_started`].

use std::sync::Arc;

use super::export::{Export, Exports};
use super::protocol::{
    BASE_ALLOCATION, BASE_ALLOCATION_ID, CLIENT_FLAGS_BYTES, Cursor, FLAG_FIXED_NEWSTYLE,
    FLAG_NO_ZEROES, OPTION_HEADER_BYTES, OptionHeader, be16, be32, block_size_info, export_info,
    info, opt, option_reply, parse_string, rep, wire_len,
};
use super::tls::TlsMode;
use super::users::User;

/// The most options of one handshake.
pub(super) const MAX_OPTIONS: u32 = 256;
/// The most data of one option, in bytes: a name and many metadata queries fit.
pub(super) const MAX_OPTION_BYTES: usize = 8 << 10;
/// The most metadata queries of one option.
const MAX_QUERIES: u32 = 64;

/// The refusal of an option: the kind of the answer, and its message.
type Refusal = (u32, &'static str);
/// The next step after an option, or its refusal.
type Handled = Result<Step, Refusal>;
const MALFORMED: Refusal = (rep::ERR_INVALID, "the option's data is malformed");
/// Also the answer while the export's device is not open. The protocol's words for this code are
/// "the requested export is not available". `ERR_SHUTDOWN` would mean that the whole server ends.
const NO_EXPORT: Refusal = (rep::ERR_UNKNOWN, "no export of this name is available");

/// The number of bytes used up and the next step, or how the client broke the protocol.
type Advanced = Result<(usize, Step), String>;

/// The result of a finished handshake.
#[derive(Clone)]
pub(super) struct Negotiated {
    /// The export that the client chose.
    pub(super) export: Export,
    /// Replies are structured.
    pub(super) structured: bool,
    /// Block status replies carry `base:allocation`.
    pub(super) base_allocation: bool,
}

/// The next step after a call of [`Handshake::advance`].
pub(super) enum Step {
    /// The message is not whole: call again with more bytes.
    NeedInput,
    /// A message was handled: call again.
    Again,
    /// The device of the export that the client asks for is being opened: call again with the same
    /// bytes once that has ended.
    Wait,
    /// Send the answer, then start TLS.
    StartTls,
    /// Send the answer, then enter the transmission phase, as a user of the export.
    Transmit(Box<Negotiated>, User),
    /// Send the answer, then close: the client said goodbye.
    Close,
    /// Close: the client broke the protocol, as told.
    Fault(String),
}

/// The server's side of one handshake.
pub(super) struct Handshake {
    exports: Arc<Exports>,
    max_request_bytes: u32,
    tls: TlsMode,
    encrypted: bool,
    client_flags: Option<u32>,
    options: u32,
    skip_bytes: u32,
    structured: bool,
    /// The name of the export whose `base:allocation` was chosen.
    base_allocation: Option<String>,
}

impl Handshake {
    /// Starts a handshake that offers `exports`, with requests of at most `max_request_bytes`.
    pub(super) fn new(exports: Arc<Exports>, max_request_bytes: u32, tls: TlsMode) -> Self {
        Self {
            exports,
            max_request_bytes,
            tls,
            encrypted: false,
            client_flags: None,
            options: 0,
            skip_bytes: 0,
            structured: false,
            base_allocation: None,
        }
    }

    /// Notes that TLS runs, and forgets everything negotiated before.
    pub(super) fn tls_started(&mut self) {
        self.encrypted = true;
        self.structured = false;
        self.base_allocation = None;
    }

    /// Handles the message at the front of `input` and appends the answer to `reply`. Returns the
    /// number of bytes used up, and the next step.
    pub(super) fn advance(&mut self, input: &[u8], reply: &mut Vec<u8>) -> (usize, Step) {
        let advanced = match self.client_flags {
            _ if self.skip_bytes > 0 => Ok(self.skip(input)),
            None => self.client_flags(input),
            Some(client_flags) => self.option(client_flags, input, reply),
        };
        advanced.unwrap_or_else(|fault| (0, Step::Fault(fault)))
    }

    fn skip(&mut self, input: &[u8]) -> (usize, Step) {
        let skipped = input.len().min(self.skip_bytes as usize);
        self.skip_bytes -= wire_len(skipped);
        (skipped, if self.skip_bytes > 0 { Step::NeedInput } else { Step::Again })
    }

    fn client_flags(&mut self, input: &[u8]) -> Advanced {
        let Some(flags) = Cursor(input).u32() else { return Ok((0, Step::NeedInput)) };
        let known = u32::from(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES);
        if flags & !known != 0 {
            return Err(format!("unknown client flags {flags:#x}"));
        }
        self.client_flags = Some(flags);
        Ok((CLIENT_FLAGS_BYTES, Step::Again))
    }

    fn option(&mut self, client_flags: u32, input: &[u8], reply: &mut Vec<u8>) -> Advanced {
        let header = OptionHeader::parse(input);
        let header = header.map_err(|magic| format!("option with the wrong magic {magic:#x}"))?;
        let Some(OptionHeader { option, len }) = header else { return Ok((0, Step::NeedInput)) };
        let has = |flag: u16| client_flags & u32::from(flag) != 0;
        if !has(FLAG_FIXED_NEWSTYLE) && option != opt::EXPORT_NAME {
            return Err("an option other than EXPORT_NAME without fixed newstyle".into());
        }
        if self.options >= MAX_OPTIONS {
            return Err(format!("more than {MAX_OPTIONS} options"));
        }
        if len as usize > MAX_OPTION_BYTES {
            return self.too_big(option, len, reply);
        }
        let used = OPTION_HEADER_BYTES + len as usize;
        let Some(data) = input.get(OPTION_HEADER_BYTES..used) else {
            return Ok((0, Step::NeedInput));
        };
        if !self.needs_tls() && self.is_early(option, data) {
            return Ok((0, Step::Wait));
        }
        self.options += 1;
        let step = if option == opt::EXPORT_NAME {
            self.export_name(data, has(FLAG_NO_ZEROES), reply)?
        } else {
            let handled = self.handle(option, data, reply);
            end_answer(option, handled, reply)
        };
        Ok((used, step))
    }

    fn too_big(&mut self, option: u32, len: u32, reply: &mut Vec<u8>) -> Advanced {
        if option == opt::EXPORT_NAME {
            return Err(format!("an export name of {len} bytes"));
        }
        self.options += 1;
        self.skip_bytes = len;
        let refused = Err((rep::ERR_TOO_BIG, "the option's data is too long"));
        Ok((OPTION_HEADER_BYTES, end_answer(option, refused, reply)))
    }

    /// Returns whether the option asks for an export whose device is being opened.
    fn is_early(&self, option: u32, data: &[u8]) -> bool {
        let name = match option {
            opt::EXPORT_NAME => parse_string(data),
            opt::INFO | opt::GO | opt::LIST_META_CONTEXT | opt::SET_META_CONTEXT => {
                Cursor(data).string()
            }
            _ => None,
        };
        name.is_some_and(|name| self.exports.is_opening(name))
    }

    fn needs_tls(&self) -> bool {
        self.tls == TlsMode::Required && !self.encrypted
    }

    /// Handles an option that has an answer, and appends the parts before the answer's end.
    fn handle(&mut self, option: u32, data: &[u8], reply: &mut Vec<u8>) -> Handled {
        match option {
            opt::ABORT => Ok(Step::Close),
            opt::STARTTLS => self.start_tls(data),
            _ if self.needs_tls() => Err((rep::ERR_TLS_REQD, "this server requires TLS")),
            opt::LIST => self.list(data, reply),
            opt::INFO | opt::GO => self.info_or_go(option, data, reply),
            opt::STRUCTURED_REPLY => {
                expect_no_data(data, "STRUCTURED_REPLY has no data")?;
                self.structured = true;
                Ok(Step::Again)
            }
            opt::LIST_META_CONTEXT | opt::SET_META_CONTEXT => {
                self.meta_context(option, data, reply)
            }
            _ => Err((rep::ERR_UNSUP, "this server does not know the option")),
        }
    }

    fn start_tls(&self, data: &[u8]) -> Handled {
        expect_no_data(data, "STARTTLS has no data")?;
        if self.encrypted {
            return Err((rep::ERR_INVALID, "TLS is running already"));
        }
        if self.tls == TlsMode::Off {
            return Err((rep::ERR_POLICY, "this server is set up without TLS"));
        }
        Ok(Step::StartTls)
    }

    fn export_name(
        &self,
        data: &[u8],
        is_short: bool,
        reply: &mut Vec<u8>,
    ) -> Result<Step, String> {
        if self.needs_tls() {
            return Err("EXPORT_NAME before TLS, which this server requires".into());
        }
        let found = parse_string(data).and_then(|name| self.exports.enter(name));
        let Some((user, export)) = found else {
            let name = String::from_utf8_lossy(data);
            return Err(format!("no export {name:?} is available"));
        };
        let size_bytes = export.geometry().size_bytes();
        reply.extend(export_info(size_bytes, export.flags(self.structured)));
        if !is_short {
            reply.extend([0; 124]);
        }
        Ok(Step::Transmit(Box::new(self.negotiated(export)), user))
    }

    fn negotiated(&self, export: Export) -> Negotiated {
        let is_chosen = |name| self.exports.find(name, |chosen| chosen.name == export.name);
        let base_allocation = self.base_allocation.as_deref().and_then(is_chosen) == Some(true);
        Negotiated { export, structured: self.structured, base_allocation }
    }

    fn list(&self, data: &[u8], reply: &mut Vec<u8>) -> Handled {
        expect_no_data(data, "LIST has no data")?;
        self.exports.of_open(|export| {
            let name_len = be32(wire_len(export.name.len()));
            let parts = [&name_len[..], export.name.as_bytes(), export.description.as_bytes()];
            option_reply(reply, opt::LIST, rep::SERVER, &parts);
        });
        Ok(Step::Again)
    }

    fn info_or_go(&self, option: u32, data: &[u8], reply: &mut Vec<u8>) -> Handled {
        let (name, wanted) = parse_info(data).ok_or(MALFORMED)?;
        let (user, export) = self.exports.enter(name).ok_or(NO_EXPORT)?;
        self.describe(option, &export, wanted, reply);
        Ok(match option {
            opt::GO => Step::Transmit(Box::new(self.negotiated(export)), user),
            _ => Step::Again,
        })
    }

    /// Appends the export's description. Block sizes are told even if not asked for: a client that
    /// ignores them sends requests that are refused.
    fn describe(&self, option: u32, export: &Export, mut wanted: Cursor<'_>, reply: &mut Vec<u8>) {
        let geometry = export.geometry();
        let about = export_info(geometry.size_bytes(), export.flags(self.structured));
        push_info(reply, option, info::EXPORT, &about);
        let preferred =
            geometry.preferred_bytes.clamp(geometry.block_bytes, self.max_request_bytes);
        let sizes = block_size_info(
            geometry.block_bytes,
            preferred.checked_next_power_of_two().unwrap_or(geometry.block_bytes),
            self.max_request_bytes,
        );
        push_info(reply, option, info::BLOCK_SIZE, &sizes);
        let (mut named, mut described) = (false, export.description.is_empty());
        while let Some(kind) = wanted.u16() {
            if kind == info::NAME && !std::mem::replace(&mut named, true) {
                push_info(reply, option, info::NAME, export.name.as_bytes());
            } else if kind == info::DESCRIPTION && !std::mem::replace(&mut described, true) {
                push_info(reply, option, info::DESCRIPTION, export.description.as_bytes());
            }
        }
    }

    fn meta_context(&mut self, option: u32, data: &[u8], reply: &mut Vec<u8>) -> Handled {
        let set = option == opt::SET_META_CONTEXT;
        if set {
            self.base_allocation = None;
        }
        if !self.structured {
            return Err((rep::ERR_INVALID, "metadata contexts need structured replies first"));
        }
        let (name, wanted) = parse_queries(data, set).ok_or(MALFORMED)?;
        self.exports.find(name, |_| ()).ok_or(NO_EXPORT)?;
        if wanted {
            // The number is reserved in answers to LIST_META_CONTEXT.
            let id = be32(if set { BASE_ALLOCATION_ID } else { 0 });
            option_reply(reply, option, rep::META_CONTEXT, &[&id, BASE_ALLOCATION.as_bytes()]);
        }
        if set {
            self.base_allocation = wanted.then(|| name.to_owned());
        }
        Ok(Step::Again)
    }
}

/// Appends the end of the answer to an option: an acknowledgement or the refusal.
fn end_answer(option: u32, handled: Handled, reply: &mut Vec<u8>) -> Step {
    match handled {
        Ok(step) => {
            option_reply(reply, option, rep::ACK, &[]);
            step
        }
        Err((kind, message)) => {
            option_reply(reply, option, kind, &[message.as_bytes()]);
            Step::Again
        }
    }
}

fn expect_no_data(data: &[u8], message: &'static str) -> Result<(), Refusal> {
    if data.is_empty() { Ok(()) } else { Err((rep::ERR_INVALID, message)) }
}

fn push_info(reply: &mut Vec<u8>, option: u32, kind: u16, data: &[u8]) {
    option_reply(reply, option, rep::INFO, &[&be16(kind), data]);
}

/// Parses the data of `INFO` and `GO`: an export's name, and the kinds of information wanted.
fn parse_info(data: &[u8]) -> Option<(&str, Cursor<'_>)> {
    let mut cursor = Cursor(data);
    let name = cursor.string()?;
    let wanted_bytes = usize::from(cursor.u16()?) * 2;
    let wanted = Cursor(cursor.take(wanted_bytes)?);
    cursor.is_empty().then_some((name, wanted))
}

/// Parses the data of `LIST_META_CONTEXT` and `SET_META_CONTEXT`: an export's name, and whether the
/// queries select `base:allocation`. A list also selects by namespace, or all without queries.
fn parse_queries(data: &[u8], set: bool) -> Option<(&str, bool)> {
    let mut cursor = Cursor(data);
    let name = cursor.string()?;
    let queries = cursor.u32().filter(|&queries| queries <= MAX_QUERIES)?;
    let mut wanted = !set && queries == 0;
    for _ in 0..queries {
        let query = cursor.string()?;
        wanted |= query == BASE_ALLOCATION || (!set && query == "base:");
    }
    cursor.is_empty().then_some((name, wanted))
}
