//! `nbd://HOST[:PORT]/EXPORT` and `nbd+unix:///EXPORT?socket=PATH`: an export of an NBD server.
//!
//! The URLs follow the NBD project's `doc/uri.md`, with one setting of ours: `timeout=TIME` limits
//! how long a request may take while the server is silent or gone.

use std::sync::Arc;
use std::time::Duration;

use super::areas::{self, Areas};
use super::observe::Observer;
use super::{BackingError, OpenBacking, Opening, Place, Scheme, parse_time};
use crate::device::BlockDevice;
use crate::device::nbd::{NbdAddress, NbdDevice, NbdExport, NbdOptions, Watch};
use crate::log::identity;
use crate::pool::{Glance, glance_device};

/// The port of NBD servers.
const PORT: u16 = 10809;
/// Time limit of a request, unless the URL has another.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Time limits that the URL may have.
const TIMEOUT_RANGE: std::ops::RangeInclusive<Duration> =
    Duration::from_millis(100)..=Duration::from_secs(3600);
/// Keeps these identities apart from the identities of files, disks and null devices.
const NBD_TYPE: i32 = -4;

/// What identifies an export, of either scheme.
const IDENTIFIED_BY: &str =
    "name and description of the export, as the server tells them; not by its address";

/// The areas, by which another export is noticed after a reconnection.
static WATCH: Watch = Watch { ranges: areas::ranges, describe: areas::describe };

/// `nbd://HOST[:PORT]/EXPORT`.
pub(super) static TCP: Scheme = Scheme {
    name: "nbd",
    syntax: "nbd://HOST[:PORT]/EXPORT[?timeout=TIME]",
    about: "an export of an NBD server, by TCP without TLS",
    example: "nbd://storage.example:10809/disk?timeout=60s",
    identified_by: IDENTIFIED_BY,
    parse: |rest| NbdScheme::Tcp.options(rest).map(|_| rest.to_owned()),
    place: |rest| NbdScheme::Tcp.place(rest),
    open: |rest, opening| NbdScheme::Tcp.open(rest, opening),
};

/// `nbd+unix:///EXPORT?socket=PATH`.
pub(super) static UNIX: Scheme = Scheme {
    name: "nbd+unix",
    syntax: "nbd+unix:///EXPORT?socket=PATH[&timeout=TIME]",
    about: "an export of an NBD server on this machine, by a unix socket",
    example: "nbd+unix:///disk?socket=/run/nbd.sock",
    identified_by: IDENTIFIED_BY,
    parse: |rest| NbdScheme::Unix.options(rest).map(|_| rest.to_owned()),
    place: |rest| NbdScheme::Unix.place(rest),
    open: |rest, opening| NbdScheme::Unix.open(rest, opening),
};

/// Where the server of a scheme listens.
enum NbdScheme {
    Tcp,
    Unix,
}

impl NbdScheme {
    fn open(&self, rest: &str, opening: &Opening<'_>) -> Result<OpenBacking, BackingError> {
        let unfit = |reason| BackingError::Unfit { url: self.url(rest), reason };
        let options = self.options(rest).map_err(unfit)?;
        let options = NbdOptions { block_bytes: opening.block_bytes, ..options };
        let device = NbdDevice::open_watched(&options, &WATCH)?;
        if device.geometry().read_only {
            let reason = "the server exports it read-only, but a backing is written; \
                          have it exported for writing";
            return Err(unfit(reason.into()));
        }
        let export = device.export().clone();
        let identity = identity_of(&export);
        let holds = Some(glance_device(&device)?);
        let holds = holds.filter(|found| !matches!(found, Glance::Unknown(_)));
        let name = self.url(rest).into_bytes();
        let table_sector_bytes = Areas::of_device(&device)?.table_sector_bytes();
        let device = Arc::new(device);
        let former = Box::new(move |size_bytes| former_identity_of(&export, size_bytes));
        let observer = Observer::of_device(identity, Arc::<NbdDevice>::clone(&device));
        let observer = observer.formerly(former);
        let seen = observer.observe_device()?;
        Ok(OpenBacking { device, observer, seen, name, holds, guard: None, table_sector_bytes })
    }

    fn place(&self, rest: &str) -> Option<Place> {
        let NbdOptions { address, export: name, .. } = self.options(rest).ok()?;
        Some(Place::Export { address, name })
    }

    fn url(&self, rest: &str) -> String {
        let scheme = match self {
            Self::Tcp => &TCP,
            Self::Unix => &UNIX,
        };
        format!("{}:{rest}", scheme.name)
    }

    /// Parses the text after the scheme's colon.
    fn options(&self, rest: &str) -> Result<NbdOptions, String> {
        let name = self.url(rest);
        let url = rest.strip_prefix("//").ok_or_else(|| format!("`{name}` has no `//`"))?;
        let (place, query) = url.split_once('?').unwrap_or((url, ""));
        let (host, export) = place.split_once('/').unwrap_or((place, ""));
        let (mut socket, mut timeout) = (None, TIMEOUT);
        for part in query.split('&').filter(|part| !part.is_empty()) {
            match part.split_once('=') {
                Some(("socket", path)) if matches!(self, Self::Unix) => {
                    socket = Some(decoded(path)?);
                }
                Some(("timeout", time)) => timeout = parse_timeout(time)?,
                _ => return Err(format!("`{name}` has the unknown setting `{part}`")),
            }
        }
        let address = match (self, socket) {
            (Self::Tcp, _) => parse_host(host)?,
            (Self::Unix, Some(path)) if host.is_empty() && !path.is_empty() => {
                NbdAddress::Unix(path.into())
            }
            (Self::Unix, None) => return Err(format!("`{name}` has no socket=PATH")),
            (Self::Unix, _) => return Err(format!("`{name}` names a host, or an empty socket")),
        };
        Ok(NbdOptions { address, export: decoded(export)?, name, timeout, block_bytes: None })
    }
}

/// Parses `HOST`, `HOST:PORT`, `[ADDRESS]` or `[ADDRESS]:PORT`.
fn parse_host(text: &str) -> Result<NbdAddress, String> {
    let bad = || format!("`{text}` is no host, or has a wrong port");
    let (host, port) = match text.strip_prefix('[').map(|rest| rest.split_once(']')) {
        Some(Some((host, ""))) => (host, None),
        Some(Some((host, rest))) => (host, Some(rest.strip_prefix(':').ok_or_else(bad)?)),
        Some(None) => return Err(bad()),
        None => text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port))),
    };
    let port = port.map_or(Ok(PORT), str::parse).map_err(|_| bad())?;
    let host = decoded(host)?;
    if host.is_empty() { Err(bad()) } else { Ok(NbdAddress::Tcp { host, port }) }
}

/// Parses the time limit of a request.
fn parse_timeout(text: &str) -> Result<Duration, String> {
    parse_time(text)
        .filter(|time| TIMEOUT_RANGE.contains(time))
        .ok_or_else(|| format!("the timeout `{text}` is no time from 100ms to 60m, such as 30s"))
}

/// Decodes each `%XX` in `text` into a byte. The result is UTF-8 without NUL, and at most as long
/// as a string of the protocol.
fn decoded(text: &str) -> Result<String, String> {
    let bad = || format!("`{text}` has a `%` without two digits, is no UTF-8, or is too long");
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte == b'%' {
            let mut digit = || char::from(rest.next()?).to_digit(16);
            let value = digit().zip(digit()).map(|(high, low)| high * 16 + low);
            bytes.push(value.and_then(|value| u8::try_from(value).ok()).ok_or_else(bad)?);
        } else {
            bytes.push(byte);
        }
    }
    let whole = crate::device::nbd::protocol::parse_string(&bytes).map(str::to_owned);
    whole.ok_or_else(bad)
}

/// Returns the identity of an export, wherever its server runs, and whatever its size is.
fn identity_of(export: &NbdExport) -> u64 {
    let NbdExport { name, description, .. } = export;
    // Strings of the protocol contain no NUL.
    let told = format!("{name}\0{description}");
    identity(&[0; 16], NBD_TYPE, told.as_bytes())
}

/// Returns the identity that release 0.1 gave to an export with the name and description of
/// `export` and the size `size_bytes`.
fn former_identity_of(export: &NbdExport, size_bytes: u64) -> u64 {
    let NbdExport { name, description, .. } = export;
    let told = format!("{name}\0{description}\0{size_bytes}");
    identity(&[0; 16], NBD_TYPE, told.as_bytes())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn options(url: &str) -> Result<NbdOptions, String> {
        let (name, rest) = url.split_once(':').unwrap();
        let scheme = if name == "nbd" { NbdScheme::Tcp } else { NbdScheme::Unix };
        scheme.options(rest)
    }

    #[test]
    fn urls_are_read() {
        let tcp = |host: &str, port| NbdAddress::Tcp { host: host.into(), port };
        for (url, address, export, seconds) in [
            ("nbd://host/disk", tcp("host", 10809), "disk", 30),
            ("nbd://host", tcp("host", 10809), "", 30),
            ("nbd://10.0.0.1:99/a/b", tcp("10.0.0.1", 99), "a/b", 30),
            ("nbd://[::1]/", tcp("::1", 10809), "", 30),
            ("nbd://[::1]:7/a%20b?timeout=2m", tcp("::1", 7), "a b", 120),
            ("nbd+unix:///?socket=/run/s", NbdAddress::Unix("/run/s".into()), "", 30),
            ("nbd+unix:///x?timeout=5s&socket=a%26b", NbdAddress::Unix("a&b".into()), "x", 5),
        ] {
            let found = options(url).expect(url);
            assert_eq!((found.address, found.export.as_str()), (address, export), "{url}");
            assert_eq!(found.timeout, Duration::from_secs(seconds), "{url}");
            assert_eq!(found.name, url);
        }
    }

    #[test]
    fn wrong_urls_are_refused() {
        for url in [
            "nbd:host",
            "nbd:///disk",
            "nbd://host:port/",
            "nbd://host:70000/",
            "nbd://[::1/",
            "nbd://[::1]x/",
            "nbd://host/?socket=/x",
            "nbd://host/?timeout=",
            "nbd://host/?timeout=1",
            "nbd://host/?timeout=0s",
            "nbd://host/?timeout=99h",
            "nbd://host/?timeout=99999999999999999999s",
            "nbd://host/%4",
            "nbd://host/%ff",
            "nbd://host/%00",
            "nbd+unix:///x",
            "nbd+unix:///x?socket=",
            "nbd+unix://host/x?socket=/s",
        ] {
            assert!(options(url).is_err(), "{url}");
        }
    }

    #[test]
    fn exports_differ_by_name_and_description() {
        let export = |name: &str, description: &str, size_bytes| NbdExport {
            name: name.into(),
            description: description.into(),
            size_bytes,
            flags: 0,
            block_sizes: (1, 4096, 1 << 25),
        };
        let first = identity_of(&export("a", "b", 1 << 20));
        for other in [export("a", "c", 1 << 20), export("c", "b", 1 << 20)] {
            assert_ne!(identity_of(&other), first, "{other:?}");
        }
        let flags = NbdExport { flags: 1, ..export("a", "b", 1 << 20) };
        assert_eq!(identity_of(&flags), first, "a later server may know more");
        assert_eq!(identity_of(&export("a", "b", 1 << 21)), first, "it has grown");
        let former = identity(&[0; 16], NBD_TYPE, b"a\0b\x001048576");
        assert_eq!(former_identity_of(&flags, 1 << 20), former);
        assert_ne!(former, first);
    }
}
