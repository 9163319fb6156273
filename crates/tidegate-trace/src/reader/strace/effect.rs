//! Effects of calls on files and descriptors.

use super::call::{Call, Descriptor, integer, member, pair};
use super::path::{joined, unescaped, unquoted};
use super::processes::Processes;
use crate::bad::{Bad, Result};
use crate::descriptors::{Descriptors, Open, Opening};
use crate::event::Op;
use crate::fields::{has_flag, number};
use crate::out::{Out, Way};
use crate::storage::is_storage;

/// Arguments of a path: the directory's descriptor, if any, and the path.
type PathAt = (Option<usize>, usize);

/// A call that succeeded, and the state that it changes.
pub(super) struct Effect<'a> {
    pub(super) pid: u32,
    /// The process's descriptor table.
    pub(super) table: u32,
    pub(super) call: &'a Call<'a>,
    pub(super) result: i64,
    pub(super) processes: &'a mut Processes,
    pub(super) descriptors: &'a mut Descriptors,
    pub(super) out: &'a mut Out,
}

impl Effect<'_> {
    /// Applies the call. Calls that are not listed change no data of files.
    pub(super) fn apply(mut self) -> Result<()> {
        match self.call.name {
            b"open" | b"creat" => self.open((None, 0)),
            b"openat" | b"openat2" => self.open((Some(0), 1)),
            b"close" => self.close(),
            b"close_range" => self.close_range(),
            b"dup" | b"dup2" => self.duplicate(false),
            b"dup3" => self.duplicate(has_flag(self.call.argument(2), b"O_CLOEXEC")),
            b"fcntl" | b"fcntl64" => self.control(),
            b"lseek" | b"_llseek" => self.seek(),
            b"read" | b"readv" => self.transfer(Way::Read, None),
            b"write" | b"writev" => self.transfer(Way::Write, None),
            b"pread64" | b"pread" | b"preadv" | b"preadv2" => self.transfer(Way::Read, Some(3)),
            b"pwrite64" | b"pwrite" | b"pwritev" | b"pwritev2" => {
                self.transfer(Way::Write, Some(3))
            }
            b"sendfile" | b"sendfile64" => self.copy((1, 2), (0, None)),
            b"copy_file_range" | b"splice" => self.copy((0, 1), (2, Some(3))),
            b"fsync" | b"fdatasync" => self.sync(),
            b"sync" | b"syncfs" => {
                self.out.push(Op::SyncAll);
                Ok(())
            }
            b"truncate" | b"truncate64" | b"ftruncate" | b"ftruncate64" => self.truncate(),
            b"fallocate" => self.allocate(),
            b"rename" => self.rename((None, 0), (None, 1)),
            b"renameat" | b"renameat2" => self.rename((Some(0), 1), (Some(2), 3)),
            b"unlink" => self.unlink((None, 0)),
            b"unlinkat" => self.unlink((Some(0), 1)),
            b"link" => self.link((None, 0), (None, 1)),
            b"linkat" => self.link((Some(0), 1), (Some(2), 3)),
            b"fstat" | b"fstat64" => self.show_length(None),
            b"stat" | b"stat64" => self.show_length(Some((None, 0))),
            b"newfstatat" | b"fstatat64" | b"statx" => self.show_length(Some((Some(0), 1))),
            b"clone" | b"clone3" | b"fork" | b"vfork" => self.forked(),
            b"execve" | b"execveat" => {
                self.descriptors.close_all(self.table, |_, on_exec| on_exec, self.out);
                Ok(())
            }
            b"chdir" | b"fchdir" => self.change_folder(),
            b"pipe" | b"pipe2" | b"socketpair" => self.pair(),
            name if makes_descriptor(name) => self.other(self.result),
            _ => Ok(()),
        }
    }

    /// Returns the key of the descriptor in argument `at`. An unknown descriptor is opened at the
    /// path that `-y` shows behind it, with an unknown position.
    fn descriptor(&mut self, at: usize) -> Result<(u32, i64)> {
        let Descriptor { number, shown } = Descriptor::parse(self.call.argument(at))?;
        let key = (self.table, number.ok_or(Bad::Number("descriptor"))?);
        if let Some(shown) = shown
            && self.descriptors.get(key).is_err()
        {
            let mut open = Open::default();
            let path = unescaped(shown)?;
            if path.starts_with(b"/") && is_storage(&path) {
                open.file = Some(self.descriptors.files.named(&path)?);
                open.folder = Some(path.into());
            }
            self.descriptors.open(key, open, false, self.out)?;
        }
        Ok(key)
    }

    /// Returns the path in an argument, joined to its directory or the working directory.
    fn path(&mut self, (folder, at): PathAt) -> Result<Vec<u8>> {
        let path = unquoted(self.call.argument(at))?;
        if path.starts_with(b"/") {
            return Ok(joined(b"", &path));
        }
        let folder = folder.map(|at| Descriptor::parse(self.call.argument(at))).transpose()?;
        match folder {
            Some(Descriptor { shown: Some(shown), .. }) => Ok(joined(&unescaped(shown)?, &path)),
            Some(Descriptor { number: Some(number), .. }) => {
                let open = self.descriptors.get((self.table, number))?;
                Ok(joined(open.folder.as_deref().ok_or(Bad::Descriptor(number))?, &path))
            }
            _ => Ok(joined(&self.processes.get(self.pid)?.folder, &path)),
        }
    }

    fn open(&mut self, path: PathAt) -> Result<()> {
        let flags = match (self.call.name, self.call.argument(path.1 + 1)) {
            (b"creat", _) => b"O_WRONLY|O_CREAT|O_TRUNC",
            (b"openat2", how) => member(how, b"flags").ok_or(Bad::Shape)?,
            (_, flags) => flags,
        };
        let path = match self.call.returned_path() {
            Some(shown) if shown.starts_with(b"/") => unescaped(shown)?,
            _ => self.path(path)?,
        };
        let has = |flag: &[u8]| has_flag(flags, flag);
        let mut open = Open::default();
        if has(b"O_TMPFILE") {
            open = Open::at_start(self.descriptors.files.unnamed()?);
        } else if is_storage(&path) {
            open = self.descriptors.open_named(&path, Opening::of_flags(flags), self.out)?;
            if has(b"O_DIRECTORY") || has(b"O_PATH") {
                open.folder = Some(path.into());
            }
        }
        let key = (self.table, self.result);
        self.descriptors.open(key, open, has(b"O_CLOEXEC"), self.out)
    }

    fn close(&mut self) -> Result<()> {
        let number = Descriptor::parse(self.call.argument(0))?.number;
        let key = (self.table, number.ok_or(Bad::Number("descriptor"))?);
        self.descriptors.close(key, self.out);
        Ok(())
    }

    fn close_range(&mut self) -> Result<()> {
        let (first, _) = integer(self.call.argument(0)).ok_or(Bad::Number("descriptor"))?;
        // The last is `~0U` for all descriptors.
        let last = integer(self.call.argument(1)).map_or(i64::MAX, |(last, _)| last);
        if !has_flag(self.call.argument(2), b"CLOSE_RANGE_CLOEXEC") {
            self.descriptors.close_all(self.table, |it, _| (first..=last).contains(&it), self.out);
        }
        Ok(())
    }

    fn duplicate(&mut self, on_exec: bool) -> Result<()> {
        let (table, from) = self.descriptor(0)?;
        match self.descriptors.duplicate(table, (from, self.result), on_exec, self.out) {
            // Both descriptors are unknown: later transfers through them are bad lines.
            Err(Bad::Descriptor(_)) => {
                self.descriptors.close((table, self.result), self.out);
                Ok(())
            }
            result => result,
        }
    }

    fn control(&mut self) -> Result<()> {
        match self.call.argument(1) {
            b"F_DUPFD" => self.duplicate(false),
            b"F_DUPFD_CLOEXEC" => self.duplicate(true),
            b"F_SETFL" => {
                let key = self.descriptor(0)?;
                if let Ok(open) = self.descriptors.get_mut(key) {
                    open.append = has_flag(self.call.argument(2), b"O_APPEND");
                }
                Ok(())
            }
            b"F_SETFD" => {
                let key = self.descriptor(0)?;
                let on_exec = has_flag(self.call.argument(2), b"FD_CLOEXEC");
                self.descriptors.set_close_on_exec(key, on_exec);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn seek(&mut self) -> Result<()> {
        let key = self.descriptor(0)?;
        let position = if self.call.name == b"_llseek" {
            let text = self.call.argument(3).strip_prefix(b"[").ok_or(Bad::Shape)?;
            integer(text).and_then(|(it, _)| u64::try_from(it).ok()).ok_or(Bad::Number("offset"))?
        } else {
            self.call.count().ok_or(Bad::Number("offset"))?
        };
        let Ok(open) = self.descriptors.get_mut(key) else { return Ok(()) };
        open.position = Some(position);
        let is_end = self.call.argument(1) == b"0" && self.call.argument(2) == b"SEEK_END";
        if let (true, Some(file)) = (is_end, open.file) {
            self.descriptors.files.set_len(file, Some(position));
        }
        Ok(())
    }

    /// Applies a call that transfers as many bytes as it returns, at the offset in argument
    /// `offset` or at the descriptor's position.
    fn transfer(&mut self, way: Way, offset: Option<usize>) -> Result<()> {
        let key = self.descriptor(0)?;
        let offset = match offset.map(|at| self.call.argument(at)) {
            None | Some(b"-1") => None,
            Some(text) => Some(number(text, "offset")?),
        };
        let flags = self.call.argument(4);
        let len = self.call.count().ok_or(Bad::Number("result"))?;
        if has_flag(flags, b"RWF_APPEND") {
            return Err(Bad::Operation);
        }
        self.descriptors.transfer(key, way, offset, len, self.out)?;
        let is_sync = has_flag(flags, b"RWF_DSYNC") || has_flag(flags, b"RWF_SYNC");
        if is_sync && way == Way::Write { self.descriptors.sync(key, self.out) } else { Ok(()) }
    }

    /// Applies a call that copies from one descriptor to another. For each descriptor, one argument
    /// is its number and one is a pointer to the offset.
    fn copy(
        &mut self,
        (from, from_offset): (usize, usize),
        (to, to_offset): (usize, Option<usize>),
    ) -> Result<()> {
        let keys = (self.descriptor(from)?, self.descriptor(to)?);
        let (read_at, written_at) = (
            pointed(self.call.argument(from_offset))?,
            to_offset.map_or(Ok(None), |at| pointed(self.call.argument(at)))?,
        );
        let len = self.call.count().ok_or(Bad::Number("result"))?;
        // Fails before the read is emitted if the offset of the write is unknown.
        self.descriptors.start(keys.1, Way::Write, written_at)?;
        self.descriptors.transfer(keys.0, Way::Read, read_at, len, self.out)?;
        self.descriptors.transfer(keys.1, Way::Write, written_at, len, self.out)
    }

    fn sync(&mut self) -> Result<()> {
        let key = self.descriptor(0)?;
        self.descriptors.sync(key, self.out)
    }

    fn truncate(&mut self) -> Result<()> {
        let len = number(self.call.argument(1), "length")?;
        let file = if self.call.name.starts_with(b"f") {
            let key = self.descriptor(0)?;
            self.descriptors.get(key)?.file
        } else {
            let path = self.path((None, 0))?;
            Some(self.descriptors.files.named(&path)?)
        };
        file.map_or(Ok(()), |file| self.descriptors.files.resize(file, len, self.out))
    }

    /// Applies an allocation, which changes no data but may extend the file.
    fn allocate(&mut self) -> Result<()> {
        let key = self.descriptor(0)?;
        let Some(file) = self.descriptors.get(key)?.file else { return Ok(()) };
        let mode = self.call.argument(1);
        if mode == b"0" {
            let offset = number(self.call.argument(2), "offset")?;
            let end = offset.checked_add(number(self.call.argument(3), "length")?);
            self.descriptors.files.reaches(file, end.ok_or(Bad::Range)?);
        } else if !has_flag(mode, b"FALLOC_FL_KEEP_SIZE") {
            self.descriptors.files.set_len(file, None);
        }
        Ok(())
    }

    fn rename(&mut self, from: PathAt, to: PathAt) -> Result<()> {
        let (from, to) = (self.path(from)?, self.path(to)?);
        if has_flag(self.call.argument(4), b"RENAME_EXCHANGE") {
            return self.descriptors.files.exchange(&from, &to);
        }
        self.descriptors.files.rename(&from, &to, self.out)
    }

    fn unlink(&mut self, path: PathAt) -> Result<()> {
        let path = self.path(path)?;
        self.descriptors.files.unlink(&path, self.out);
        Ok(())
    }

    fn link(&mut self, from: PathAt, to: PathAt) -> Result<()> {
        let (from, to) = (self.path(from)?, self.path(to)?);
        let number = from.strip_prefix(b"/proc/self/fd/").and_then(integer);
        match number {
            // The call names a file that was opened without a name.
            Some((number, _)) => {
                let file = self.descriptors.get((self.table, number))?.file;
                file.map_or(Ok(()), |file| self.descriptors.files.name(file, &to))
            }
            None => self.descriptors.files.link(&from, &to),
        }
    }

    /// Applies a call that shows the length of a file, by descriptor or path. Ignores files that
    /// the trace has not shown.
    fn show_length(&mut self, path: Option<PathAt>) -> Result<()> {
        let shown = |at: usize| {
            let structure = self.call.argument(at);
            let is_file = memchr::memmem::find(structure, b"S_IFREG").is_some();
            let size = member(structure, b"st_size").or_else(|| member(structure, b"stx_size"));
            size.filter(|_| is_file).and_then(|size| number(size, "length").ok())
        };
        let Some(len_bytes) = (1..5).find_map(shown) else { return Ok(()) };
        let named = path.filter(|(_, at)| self.call.argument(*at) != b"\"\"");
        let file = if let Some(path) = named {
            let path = self.path(path)?;
            self.descriptors.files.known(&path)
        } else {
            let key = self.descriptor(0)?;
            self.descriptors.get(key).ok().and_then(|open| open.file)
        };
        if let Some(file) = file {
            self.descriptors.files.set_len(file, Some(len_bytes));
        }
        Ok(())
    }

    fn forked(&mut self) -> Result<()> {
        let child = u32::try_from(self.result).map_err(|_| Bad::Number("process"))?;
        let is_thread = self.call.mentions(b"CLONE_FILES");
        self.processes.fork((self.pid, child), is_thread, self.descriptors, self.out)
    }

    fn change_folder(&mut self) -> Result<()> {
        let folder = if self.call.name == b"chdir" {
            self.path((None, 0))?.into()
        } else {
            let key = self.descriptor(0)?;
            let folder = self.descriptors.get(key)?.folder.clone();
            folder.ok_or(Bad::Descriptor(key.1))?
        };
        self.processes.get(self.pid)?.folder = folder;
        Ok(())
    }

    fn pair(&mut self) -> Result<()> {
        let at = if self.call.name == b"socketpair" { 3 } else { 0 };
        let (one, other) = pair(self.call.argument(at)).ok_or(Bad::Shape)?;
        self.other(one)?;
        self.other(other)
    }

    /// Marks descriptor `number` as not storage.
    fn other(&mut self, number: i64) -> Result<()> {
        self.descriptors.open((self.table, number), Open::default(), false, self.out)
    }
}

/// Returns the number behind a pointer, or `None` for a null pointer.
fn pointed(text: &[u8]) -> Result<Option<u64>> {
    if text == b"NULL" {
        return Ok(None);
    }
    let (value, _) = text.strip_prefix(b"[").and_then(integer).ok_or(Bad::Number("offset"))?;
    u64::try_from(value).map(Some).map_err(|_| Bad::Number("offset"))
}

/// Returns whether the call returns a descriptor that is not storage.
fn makes_descriptor(name: &[u8]) -> bool {
    const NAMES: [&[u8]; 22] = [
        b"accept",
        b"accept4",
        b"bpf",
        b"epoll_create",
        b"epoll_create1",
        b"eventfd",
        b"eventfd2",
        b"fanotify_init",
        b"inotify_init",
        b"inotify_init1",
        b"io_uring_setup",
        b"memfd_create",
        b"memfd_secret",
        b"mq_open",
        b"perf_event_open",
        b"pidfd_getfd",
        b"pidfd_open",
        b"signalfd",
        b"signalfd4",
        b"socket",
        b"timerfd_create",
        b"userfaultfd",
    ];
    NAMES.contains(&name)
}
