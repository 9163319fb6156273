//! The modes of Open CAS, one file each: what a write, of zeroes too, and a read do.
//!
//! | mode | write | read |
//! |---|---|---|
//! | `wb` | into the cache, durable there | from the cache; a miss from the backing, and kept |
//! | `wt` | into the cache and to the backing | as `wb` |
//! | `wa` | as `wt` where all of it is cached, else as `wi` | as `wb` |
//! | `wi` | to the backing; the cache gives its copies up | as `wb` |
//! | `wo` | as `wb` | as `wb`, but a miss is not kept |
//! | `pt` | as `wi` | from the backing; dirty pages are cleaned before |
//!
//! Any mode finds pages of any other in the cache, dirty ones too.

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

/// What one mode does. Requests are whole blocks and inside the device. The router asks what a mode
/// needs and keeps; nobody else does.
pub(in crate::cache) trait Behaviour: Sync {
    /// Writes `content`; where `ask` says so it is durable on return. Zeroes are for whole pages.
    fn write(&self, core: &Core, content: &Content<'_>, ask: Ask<'_>) -> Result<()>;

    /// Reads the bytes of a request.
    fn read(&self, core: &Core, route: &Route, buf: &mut [u8]) -> Result<()> {
        core.read_bytes(route, buf)
    }

    /// A read of cached pages needs the cache alone.
    fn reads_hits(&self) -> bool {
        true
    }

    /// Pages that a read missed are kept.
    fn keeps_misses(&self) -> bool {
        true
    }

    /// Writes that miss are cached.
    fn caches_writes(&self) -> bool {
        self.writes_back()
    }

    /// A write needs the cache alone.
    fn writes_back(&self) -> bool {
        false
    }
}

impl Mode {
    /// All modes, in the order of their codes.
    pub const ALL: &'static [Self] = Self::VARIANTS;

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// All writes go into the cache, and to the backing later: what atomic flush needs.
    pub fn writes_back(self) -> bool {
        self.behaviour().writes_back()
    }

    /// The number in the cache header.
    pub(in crate::cache) fn code(self) -> u32 {
        self as u32
    }

    /// The mode with this number.
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
