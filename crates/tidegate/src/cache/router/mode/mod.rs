//! The modes of Open CAS, one file each: how they write, also zeroes, and read.
//!
//! | mode | write | read |
//! |---|---|---|
//! | `wb` | into the cache, durable there | from the cache; a miss from the backing, then cached |
//! | `wt` | into the cache and to the backing | as `wb` |
//! | `wa` | as `wt` if all pages are cached, else as `wi` | as `wb` |
//! | `wi` | to the backing; the cache gives its copies up | as `wb` |
//! | `wo` | as `wb` | as `wb`, but a miss is not cached |
//! | `pt` | as `wi` | from the backing; dirty pages are cleaned before |
//!
//! Every mode may find pages of any other mode in the cache, dirty ones too.

mod pt;
mod wa;
mod wb;
mod wi;
mod wo;
mod wt;

use strum::VariantArray;

use crate::cache::router::Route;
use crate::cache::span::Content;
use crate::cache::{Ask, Core};
use crate::device::Result;

/// How writes and reads are treated.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Default,
    strum::Display,
    strum::EnumString,
    strum::FromRepr,
    strum::IntoStaticStr,
    VariantArray,
)]
#[repr(u32)]
pub enum Mode {
    /// Write-back.
    #[default]
    #[strum(serialize = "wb")]
    WriteBack,
    /// Write-through.
    #[strum(serialize = "wt")]
    WriteThrough,
    /// Write-around.
    #[strum(serialize = "wa")]
    WriteAround,
    /// Write-invalidate.
    #[strum(serialize = "wi")]
    WriteInvalidate,
    /// Write-only.
    #[strum(serialize = "wo")]
    WriteOnly,
    /// Pass-through.
    #[strum(serialize = "pt")]
    PassThrough,
}

/// The behaviour of one mode. Requests are whole blocks and inside the device.
pub(in crate::cache) trait Behaviour: Sync {
    /// Writes `content`, durably on return if `ask` says so. Zeroes are for whole pages.
    fn write(&self, core: &Core, content: &Content<'_>, ask: Ask<'_>) -> Result<()>;

    /// Reads the bytes of a request.
    fn read(&self, core: &Core, route: &Route, buf: &mut [u8]) -> Result<()> {
        core.read_bytes(route, buf)
    }

    /// Returns whether a read of cached pages needs the cache alone.
    fn reads_hits(&self) -> bool {
        true
    }

    /// Returns whether pages that a read missed are cached.
    fn keeps_misses(&self) -> bool {
        true
    }

    /// Returns whether writes that miss are cached.
    fn caches_writes(&self) -> bool {
        self.writes_back()
    }

    /// Returns whether a write needs the cache alone.
    fn writes_back(&self) -> bool {
        false
    }
}

impl Mode {
    /// All modes, in the order of their codes.
    pub const ALL: &'static [Self] = Self::VARIANTS;

    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Returns whether all writes go into the cache, and to the backing later. Atomic flush needs
    /// it.
    pub fn writes_back(self) -> bool {
        self.behaviour().writes_back()
    }

    /// Returns the mode's number in the cache header.
    pub(in crate::cache) fn code(self) -> u32 {
        self as u32
    }

    /// Returns the mode with the number `code`; `None` if there is none.
    pub(in crate::cache) fn of_code(code: u32) -> Option<Self> {
        Self::from_repr(code)
    }

    pub(in crate::cache) fn behaviour(self) -> &'static dyn Behaviour {
        match self {
            Self::WriteBack => &wb::WriteBack,
            Self::WriteThrough => &wt::WriteThrough,
            Self::WriteAround => &wa::WriteAround,
            Self::WriteInvalidate => &wi::WriteInvalidate,
            Self::WriteOnly => &wo::WriteOnly,
            Self::PassThrough => &pt::PassThrough,
        }
    }
}
