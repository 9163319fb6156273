//! The formats of traces.

use strum::VariantArray;

/// A format that a trace may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::IntoStaticStr, VariantArray)]
#[strum(serialize_all = "lowercase")]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum Format {
    /// Calls of an Android app: Mobibench's `MobiGen`. All threads share the descriptors.
    Mobigen,
    /// `ts_us,tid,op,file,offset,len`: recorded with strace, for one.
    Csv,
    /// The operations of clients of a file server: dbench. It has no times.
    Dbench,
    /// Requests of block devices: `MQSim`.
    Mqsim,
    /// SCSI requests of a virtual machine's disk: libCacheSim's CSV of `CloudPhysics` traces.
    Cloudphysics,
    /// Block requests of a phone: `MobileBlockIOTraces`.
    Mobileblock,
    /// Calls on files by inode number: FIU.
    Fiu,
    /// Block requests of servers: Microsoft Research, Cambridge.
    Msr,
    /// Block requests of virtual disks: Alibaba Cloud.
    Alibaba,
    /// System calls: `strace -ttt`, with `-f` or `-ff`.
    Strace,
}

impl Format {
    /// All formats.
    pub const ALL: &'static [Self] = Self::VARIANTS;

    /// Returns the name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Returns whether the lines are calls on files, not requests of a disk.
    #[must_use]
    pub const fn is_of_files(self) -> bool {
        use Format::{Alibaba, Cloudphysics, Mobileblock, Mqsim, Msr};
        !matches!(self, Mqsim | Cloudphysics | Mobileblock | Msr | Alibaba)
    }

    /// Returns the names of all formats, for messages.
    pub(super) fn names() -> String {
        Self::ALL.iter().map(|format| format.name()).collect::<Vec<_>>().join(", ")
    }
}
