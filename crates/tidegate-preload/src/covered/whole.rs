//! The whole of a locked file, for a make record: recovery can create the file again from it.
//!
//! Entry points: [`Whole::read`]; [`Content::of_file`] for the bytes alone.

use std::ffi::c_int;

use tidegate::log::cover::{self, FileFacts, MADE_BYTES_MAX};
use tidegate::log::{Attributes, FileGuard, Make};

use super::Open;
use crate::state::descriptors::WRITE_ONLY;
use crate::state::extended::{CAPABILITY, Extended};
use crate::state::extents;
use crate::state::files::Seen;
use crate::state::parents::{Parent, timestamp};
use crate::sys::page::{Mapped, PAGE_BYTES, Page};
use crate::sys::query;
use crate::sys::raw::Errno;

/// The content and the attributes of a locked file.
pub(super) struct Whole {
    fd: c_int,
    seen: Seen,
    content: Content,
    extended: Extended,
}

impl Whole {
    /// Reads the file. Returns `None` if it is too large for a record, or cannot be read.
    pub(super) fn read(open: &Open) -> Option<Self> {
        let fd = open.fd;
        let seen = Seen::of(fd).ok().filter(|seen| seen.size() <= MADE_BYTES_MAX)?;
        let content = Content::of_file(open, seen.size())?;
        let extended = Extended::read(fd)?;
        Some(Self { fd, seen, content, extended })
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.content.bytes()
    }

    /// Returns the ctime that the file had when it was read, in nanoseconds since 1970.
    pub(super) fn changed_ns(&self) -> u64 {
        self.seen.changed_ns()
    }

    /// Returns the file's name and attributes for the record, or `None` if the file has a name
    /// other than that in `parent`, or attributes that a record cannot hold.
    pub(super) fn make<'a>(&'a self, parent: &'a Parent) -> Option<Make<'a>> {
        let (stat, seen) = (&self.seen.stat, &self.seen);
        let flags = query::file_flags(self.fd).ok()?;
        let sizes = [flags.project, flags.extent_bytes, flags.cow_extent_bytes];
        let child = parent.child()?;
        let file = FileFacts {
            links: u32::try_from(stat.st_nlink).ok()?,
            keeps_name: (child.st_dev, child.st_ino) == (stat.st_dev, stat.st_ino),
            is_ordinary: cover::fit_record(seen.attributes, flags.flags, sizes)
                && cover::is_overwritten_in_place(
                    stat.st_mode,
                    || self.extended.has(CAPABILITY),
                    || query::inode_flags(self.fd).ok(),
                    || Some(flags.flags),
                ),
        };
        // The directory was opened after the file's creation, and before the record.
        let directory = &parent.seen.stat;
        let attributes = Attributes {
            mode: stat.st_mode & 0o7777,
            owner: stat.st_uid,
            group: stat.st_gid,
            accessed: timestamp(stat.st_atime, stat.st_atime_nsec),
            modified: timestamp(stat.st_mtime, stat.st_mtime_nsec),
            extended: self.extended.bytes(),
        };
        let parent_changed = timestamp(directory.st_ctime, directory.st_ctime_nsec);
        cover::has_all(&file).then(|| Make { at: parent.at(), parent_changed, attributes })
    }

    /// Notes a file with a make record if overwrites allocate blocks, since it has a hole, or
    /// blocks that another file shares.
    pub(super) fn note_sparse(&self, guard: &FileGuard<'_>) {
        if !extents::become_dense(self.fd, self.seen.size()) {
            guard.note_hole();
        }
    }
}

/// The bytes of a file, in memory that is neither the heap nor the stack.
pub(super) struct Content {
    memory: Memory,
    len_bytes: usize,
}

enum Memory {
    Page(Page),
    Mapped(Mapped),
}

impl Content {
    /// Reads the whole file of `bytes` bytes. Returns `None` if it cannot be read, has another
    /// length, or would have to be opened while the program may hold a record lock on it.
    pub(super) fn of_file(open: &Open, bytes: u64) -> Option<Self> {
        let mut content = Self::with_space(usize::try_from(bytes).ok()?)?;
        if !open.known.has(WRITE_ONLY) {
            return content.fill(open.fd).ok().map(|()| content);
        }
        let opened = open.opened_again(libc::O_RDONLY | libc::O_NOATIME)?;
        content.fill(opened.number()).ok().map(|()| content)
    }

    fn with_space(len_bytes: usize) -> Option<Self> {
        // One byte more, so that the read of a file that has grown returns more than `len_bytes`.
        let memory = if len_bytes < PAGE_BYTES {
            Memory::Page(Page::take())
        } else {
            Memory::Mapped(Mapped::new(len_bytes + 1)?)
        };
        Some(Self { memory, len_bytes })
    }

    /// Reads the file of `fd`. Fails with `ESTALE` if the file does not have `len_bytes` bytes.
    fn fill(&mut self, fd: c_int) -> Result<(), Errno> {
        let wanted = self.len_bytes + 1;
        let memory = match &mut self.memory {
            Memory::Page(page) => page.bytes_mut(),
            Memory::Mapped(mapped) => mapped.bytes_mut(),
        };
        let space = memory.get_mut(..wanted).ok_or(libc::ENOMEM)?;
        let mut done = 0;
        while let Some(rest) = space.get_mut(done..).filter(|rest| !rest.is_empty()) {
            match query::pread(fd, rest, done as u64) {
                Ok(bytes) => {
                    done += bytes;
                    if bytes == 0 || done == wanted - 1 {
                        break;
                    }
                }
                Err(libc::EINTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        if done == wanted - 1 { Ok(()) } else { Err(libc::ESTALE) }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        let memory = match &self.memory {
            Memory::Page(page) => page.bytes(),
            Memory::Mapped(mapped) => mapped.bytes(),
        };
        memory.get(..self.len_bytes).unwrap_or_default()
    }
}
