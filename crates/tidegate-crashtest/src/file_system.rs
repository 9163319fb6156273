//! The file systems whose power is cut.

use std::fs;
use std::process::Command;

use anyhow::{Result, bail};
use clap::ValueEnum;

use crate::model::Kind;
use crate::operation::{FallocateMode, Operation};
use crate::sequence::{Sequence, Step};

/// A file system of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FileSystem {
    /// Judged by the [`model`](crate::model).
    Ext4,
    /// Judged by the [`model`](crate::model).
    Xfs,
    /// Judged by the promises of syncs ([`promise`](crate::promise)): `tidegate run` logs nothing
    /// there.
    Btrfs,
}

impl FileSystem {
    /// Returns the name for `mount` and for the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
            Self::Btrfs => "btrfs",
        }
    }

    /// Returns the model's rules, or `None` if no model describes the file system.
    pub fn kind(self) -> Option<Kind> {
        match self {
            Self::Ext4 => Some(Kind::Ext4),
            Self::Xfs => Some(Kind::Xfs),
            Self::Btrfs => None,
        }
    }

    /// Returns whether the file system has every operation of `sequence`. Btrfs has no `fallocate`
    /// that collapses or inserts a range; files of ext4 share no blocks.
    pub fn can_execute(self, sequence: &Sequence) -> bool {
        use FallocateMode::{Collapse, Insert};
        let moves_blocks = |step: &Step| {
            let (Step::Operation(operation) | Step::Killed(_, operation)) = step.innermost() else {
                return false;
            };
            matches!(operation, Operation::Fallocate { mode: Collapse | Insert, .. })
        };
        let shares_blocks =
            |step: &Step| matches!(step.innermost(), Step::Operation(Operation::Reflink { .. }));
        match self {
            Self::Ext4 => !sequence.steps.iter().any(shares_blocks),
            Self::Xfs => true,
            Self::Btrfs => !sequence.steps.iter().any(moves_blocks),
        }
    }

    /// Checks that the kernel has the file system, and loads its module if necessary.
    ///
    /// # Errors
    /// The kernel does not have the file system.
    pub fn check_kernel(self) -> Result<()> {
        if !self.is_registered()? {
            // The next check tells whether the module was loaded.
            let _ = Command::new("modprobe").arg(self.name()).output();
        }
        if !self.is_registered()? {
            bail!(
                "this kernel has no {name}: /proc/filesystems does not list it, and modprobe loads no module of it; \
                 nothing was tested on {name}, use a kernel with CONFIG_{upper}_FS",
                name = self.name(),
                upper = self.name().to_uppercase()
            );
        }
        Ok(())
    }

    fn is_registered(self) -> Result<bool> {
        let listed = fs::read_to_string("/proc/filesystems")?;
        Ok(listed.lines().any(|line| line.split_whitespace().last() == Some(self.name())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_btrfs_lacks_operations() {
        let collapse: Sequence = "fallocate d0/A collapse 4096 4096; fsync .".parse().unwrap();
        let punch: Sequence = "fallocate d0/A punch 4096 4096; fsync .".parse().unwrap();
        assert!(FileSystem::Xfs.can_execute(&collapse));
        assert!(!FileSystem::Btrfs.can_execute(&collapse));
        assert!(FileSystem::Btrfs.can_execute(&punch));
    }
}
