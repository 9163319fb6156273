//! Backings: the devices behind a pool, from a URL to a device and an identity. Each scheme has a
//! file.
//!
//! - `file`: `file:PATH`, `file:///PATH` or a plain path: a file or a block device;
//! - `nbd` and `nbd+unix`: an export of an NBD server;
//! - `null`: `null:SIZE`: a device that keeps nothing, for measurements;
//! - `delay`: `delay:TIME,URL`: another backing, slowed down.
//!
//! A new scheme is a file here with a [`Scheme`], and a line of [`SCHEMES`].

mod areas;
mod delay;
mod disk;
mod facts;
mod file;
mod inode;
mod loops;
mod mark;
mod nbd;
mod null;
mod observe;
mod sysfs;

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

pub use loops::loop_over;
pub use mark::Mark;
pub use observe::Observer;
pub(crate) use observe::now_ns as system_now_ns;

use crate::device::nbd::NbdAddress;
use crate::device::{BlockDevice, DeviceError};
use crate::opening::is_one_file;
use crate::pool::{BackingState, Glance};

/// All schemes.
pub static SCHEMES: &[&Scheme] = &[&file::FILE, &nbd::TCP, &nbd::UNIX, &null::NULL, &delay::DELAY];

/// How one kind of backing is named and opened.
pub struct Scheme {
    /// What stands before the colon.
    pub name: &'static str,
    /// The form of its URLs, for messages.
    pub syntax: &'static str,
    /// What such a backing is, in a few words.
    pub about: &'static str,
    /// One URL.
    pub example: &'static str,
    /// The parts of its identity, in a few words.
    pub identified_by: &'static str,
    /// Checks the text after the colon. Returns the text to keep, or the fault.
    parse: fn(&str) -> Result<String, String>,
    /// Returns the place of the data, which two pools must not share.
    place: fn(&str) -> Option<Place>,
    /// Opens the backing that the first argument names, after `parse` accepted it, and locks other
    /// programs out.
    open: fn(&str, &Opening<'_>) -> Result<OpenBacking, BackingError>,
}

/// Where the data of a backing is.
#[derive(PartialEq, Eq)]
enum Place {
    /// A file or a block device.
    File(PathBuf),
    /// An export of an NBD server.
    Export {
        /// The server.
        address: NbdAddress,
        /// Its name.
        name: String,
    },
}

/// How to open a backing.
pub struct Opening<'a> {
    /// The pool's file or device.
    pub pool: &'a Path,
    /// Size of a block in bytes in the pool's last use of its backing, if it had one. The
    /// backing takes blocks of this size if its own size is whole ones, and its server allows them.
    pub block_bytes: Option<u32>,
}

/// A backing as it was opened.
pub struct OpenBacking {
    /// The device.
    pub device: Arc<dyn BlockDevice>,
    /// Tells its identity and its state.
    pub observer: Observer,
    /// Its state before it was opened as a device.
    pub seen: BackingState,
    /// Its absolute path, without following links, or its URL.
    pub name: Vec<u8>,
    /// The pool on the backing, if there is one.
    pub holds: Option<Glance>,
    /// Locks other programs out of the device until it is dropped.
    pub guard: Option<Guard>,
    /// Sector size of the GPT on the backing, if there is one.
    pub table_sector_bytes: Option<u32>,
}

/// The locks of a backing, which hold until they are dropped.
pub struct Guard {
    /// The file or disk.
    pub lock: std::fs::File,
    /// The file behind the loop device that the backing is, or is a partition of.
    pub behind: Option<std::fs::File>,
}

/// Why a backing cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackingError {
    /// It is the file of the pool.
    #[error("the backing {url} is the pool itself: name another file, or a block device")]
    IsPool {
        /// The backing.
        url: String,
    },
    /// Another program has it locked.
    #[error("the backing {url} is in use: another program has it locked, such as `tidegate serve`")]
    InUse {
        /// The backing.
        url: String,
    },
    /// It cannot serve as a backing.
    #[error("the backing {url} does not do: {reason}")]
    Unfit {
        /// The backing.
        url: String,
        /// The reason, and the remedy.
        reason: String,
    },
    /// It is smaller than a block.
    #[error("the backing {url} has not one block of {block_bytes} bytes")]
    Empty {
        /// The backing.
        url: String,
        /// Size of a block in bytes.
        block_bytes: u32,
    },
    /// The system refused.
    #[error("cannot {action} the backing {url}")]
    Io {
        /// The action that failed.
        action: &'static str,
        /// The backing.
        url: String,
        /// Why it failed.
        source: std::io::Error,
    },
    /// The device refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// A backing as `--backing` names it.
#[derive(Clone)]
pub struct BackingUrl {
    scheme: &'static Scheme,
    rest: String,
}

impl BackingUrl {
    /// Opens the backing.
    ///
    /// # Errors
    /// [`BackingError`].
    pub fn open(&self, opening: &Opening<'_>) -> Result<OpenBacking, BackingError> {
        let backing = (self.scheme.open)(&self.rest, opening)?;
        let geometry = backing.device.geometry();
        if geometry.blocks == 0 {
            let (url, block_bytes) = (self.to_string(), geometry.block_bytes);
            return Err(BackingError::Empty { url, block_bytes });
        }
        Ok(backing)
    }

    /// Returns the path that has to exist before the backing can be opened: a file, a disk, or the
    /// socket of a server. Returns `None` for a backing without a path.
    pub fn path(&self) -> Option<PathBuf> {
        match self.place()? {
            Place::File(path) | Place::Export { address: NbdAddress::Unix(path), .. } => Some(path),
            Place::Export { address: NbdAddress::Tcp { .. }, .. } => None,
        }
    }

    /// Returns the path of the file or block device that has the data, if it is one.
    pub fn file(&self) -> Option<PathBuf> {
        match self.place()? {
            Place::File(path) => Some(path),
            Place::Export { .. } => None,
        }
    }

    /// Returns the address of the NBD server that has the data, if one has it.
    pub fn server(&self) -> Option<NbdAddress> {
        match self.place()? {
            Place::Export { address, .. } => Some(address),
            Place::File(_) => None,
        }
    }

    /// Returns whether the data of both is at one place, as far as the URLs and files show.
    pub fn shares_data_with(&self, other: &Self) -> bool {
        match (self.place(), other.place()) {
            (Some(Place::File(one)), Some(Place::File(other))) => is_one_file(&one, &other),
            (Some(one), Some(other)) => one == other,
            _ => false,
        }
    }

    fn place(&self) -> Option<Place> {
        (self.scheme.place)(&self.rest)
    }

    /// Parses the URL `text`. Returns the fault as the error.
    fn named(text: &str) -> Result<Self, String> {
        let of_scheme = SCHEMES.iter().find_map(|scheme| {
            let rest = text.strip_prefix(scheme.name)?.strip_prefix(':')?;
            Some((*scheme, rest))
        });
        let (scheme, rest) = match of_scheme {
            Some(found) => found,
            None if text.contains("://") => {
                return Err(format!("`{text}` is no backing of this release"));
            }
            None => (&file::FILE, text),
        };
        Ok(Self { scheme, rest: (scheme.parse)(rest)? })
    }
}

impl PartialEq for BackingUrl {
    fn eq(&self, other: &Self) -> bool {
        (self.scheme.name, &self.rest) == (other.scheme.name, &other.rest)
    }
}

impl FromStr for BackingUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = || SCHEMES.iter().map(|it| it.syntax).collect::<Vec<_>>().join(", ");
        Self::named(text).map_err(|wrong| format!("{wrong}; expected {}", all()))
    }
}

impl fmt::Display for BackingUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.scheme.name, self.rest)
    }
}

impl fmt::Debug for BackingUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Returns a number for the backing `name` that has no identity. The number identifies nothing.
pub(crate) fn by_name(name: &[u8]) -> u64 {
    /// Keeps these numbers apart from identities.
    const NAME: i32 = -8;
    crate::log::identity(&facts::NO_FILE_SYSTEM, NAME, name)
}

/// Parses a time such as `500us`, `20ms`, `30s` or `2m`.
fn parse_time(text: &str) -> Option<Duration> {
    let unit = text.find(|letter: char| !letter.is_ascii_digit())?;
    let (number, unit) = text.split_at(unit);
    let unit_us = match unit {
        "us" => 1,
        "ms" => 1000,
        "s" => 1_000_000,
        "m" => 60_000_000,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(unit_us).map(Duration::from_micros)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn urls_and_plain_paths_name_backings() {
        let shown = |text: &str| text.parse::<BackingUrl>().map(|url| url.to_string());
        assert_eq!(shown("/a b").unwrap(), "file:/a b");
        assert_eq!(shown("file:/a b").unwrap(), "file:/a b");
        assert_eq!(shown("file:///a b").unwrap(), "file:/a b");
        assert_eq!(shown("x").unwrap(), "file:x");
        assert_eq!(shown("a:b").unwrap(), "file:a:b");
        assert_eq!(shown("null:16M").unwrap(), "null:16M");
        assert_eq!(shown("delay:20ms,/a b").unwrap(), "delay:20ms,/a b");
        for text in ["", "file:", "file://host/x", "nbds://host/", "nbd:", "null:", "null:lots"] {
            let error = shown(text).unwrap_err();
            for scheme in SCHEMES {
                assert!(error.contains(scheme.syntax), "{text}: {error}");
            }
        }
    }

    #[test]
    fn the_examples_are_urls_of_their_schemes() {
        for scheme in SCHEMES {
            let url: BackingUrl = scheme.example.parse().unwrap();
            assert_eq!(url.scheme.name, scheme.name);
        }
    }

    #[test]
    fn the_path_that_a_backing_needs_is_that_of_its_file_or_socket() {
        let path = |text: &str| text.parse::<BackingUrl>().unwrap().path();
        assert_eq!(path("/a b"), Some("/a b".into()));
        assert_eq!(path("delay:20ms,file:///a"), Some("/a".into()));
        assert_eq!(path("nbd+unix:///x?socket=/run/s%20t"), Some("/run/s t".into()));
        assert_eq!((path("nbd://host/x"), path("null:1M")), (None, None));
    }

    #[test]
    fn urls_of_one_place_share_its_data() {
        let shares = |one: &str, other: &str| {
            let url = |text: &str| text.parse::<BackingUrl>().unwrap();
            url(one).shares_data_with(&url(other))
        };
        for (one, other) in [
            ("/nowhere/a", "delay:20ms,file:///nowhere/a"),
            ("/dev/zero", "/dev/./zero"),
            ("nbd://host/x", "nbd://host:10809/x?timeout=1s"),
            ("nbd+unix:///x?socket=/s", "nbd+unix:///x?socket=/s&timeout=1s"),
        ] {
            assert!(shares(one, other), "{one} {other}");
        }
        for (one, other) in [
            ("/nowhere/a", "/nowhere/b"),
            ("null:1M", "null:1M"),
            ("nbd://host/x", "nbd://host/y"),
            ("nbd+unix:///x?socket=/s", "/s"),
        ] {
            assert!(!shares(one, other), "{one} {other}");
        }
    }

    #[test]
    fn a_null_backing_has_its_size() {
        let url: BackingUrl = "null:1M".parse().unwrap();
        let opening = Opening { pool: Path::new("/nowhere"), block_bytes: None };
        let backing = url.open(&opening).unwrap();
        assert_eq!(backing.device.geometry().size_bytes(), 1 << 20);
        assert_eq!((backing.name.as_slice(), backing.holds), (&b"null:1M"[..], None));
        assert!(backing.observer.identity().is_some());
    }
}
