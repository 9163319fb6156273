//! What calls do to files and descriptors.

use super::call::{Call, Descriptor, has_flag, integer, member, pair};
use super::path::{joined, unescaped, unquoted};
use super::processes::Processes;
use crate::bad::Bad;
use crate::descriptors::{Descriptors, Open, Way};
use crate::event::Op;
use crate::fields::number;
use crate::files::Files;
use crate::out::Out;
use crate::storage::is_storage;

/// All processes and what they have open.
pub(super) struct State {
    processes: Processes,
    descriptors: Descriptors,
}

/// A call that succeeded, and by which process.
#[derive(Clone, Copy)]
struct Done<'a> {
    pid: u32,
    call: &'a Call<'a>,
    result: i64,
}

impl State {
    pub(super) fn new() -> Self {
        Self { processes: Processes::default(), descriptors: Descriptors::new(Files::new(b'/')) }
    }

    pub(super) fn knows(&self, pid: u32) -> bool {
        self.processes.knows(pid)
    }

    pub(super) fn fork(
        &mut self,
        pids: (u32, u32),
        is_thread: bool,
        out: &mut Out,
    ) -> Result<(), Bad> {
        self.processes.fork(pids, is_thread, &mut self.descriptors, out)
    }

    pub(super) fn exit(&mut self, pid: u32, out: &mut Out) {
        self.processes.exit(pid, &mut self.descriptors, out);
    }

    /// Does what `call` of `pid` did. Calls that are not named here change no data of files.
    pub(super) fn apply(&mut self, pid: u32, call: &Call<'_>, out: &mut Out) -> Result<(), Bad> {
        self.processes.get(pid)?;
        let Some(result) = call.result() else { return Ok(()) };
        let done = Done { pid, call, result };
        match call.name {
            b"open" | b"creat" => self.open(done, None, 0, out),
            b"openat" | b"openat2" => self.open(done, Some(0), 1, out),
            b"close" => self.close(done, out),
            b"close_range" => self.close_range(done, out),
            b"dup" | b"dup2" => self.duplicate(done, false, out),
            b"dup3" => self.duplicate(done, has_flag(call.argument(2), b"O_CLOEXEC"), out),
            b"fcntl" | b"fcntl64" => self.control(done, out),
            b"lseek" | b"_llseek" => self.seek(done),
            b"read" | b"readv" => self.transfer(done, Way::Read, None, out),
            b"write" | b"writev" => self.transfer(done, Way::Write, None, out),
            b"pread64" | b"pread" | b"preadv" | b"preadv2" => {
                self.transfer(done, Way::Read, Some(3), out)
            }
            b"pwrite64" | b"pwrite" | b"pwritev" | b"pwritev2" => {
                self.transfer(done, Way::Write, Some(3), out)
            }
            b"sendfile" | b"sendfile64" => self.copy(done, (1, 2), (0, None), out),
            b"copy_file_range" | b"splice" => self.copy(done, (0, 1), (2, Some(3)), out),
            b"fsync" | b"fdatasync" => self.sync(done, out),
            b"sync" | b"syncfs" => {
                out.push(Op::SyncAll);
                Ok(())
            }
            b"truncate" | b"truncate64" | b"ftruncate" | b"ftruncate64" => self.truncate(done, out),
            b"fallocate" => self.allocate(done),
            b"rename" => self.rename(done, (None, 0), (None, 1), out),
            b"renameat" | b"renameat2" => self.rename(done, (Some(0), 1), (Some(2), 3), out),
            b"unlink" => self.unlink(done, None, 0, out),
            b"unlinkat" => self.unlink(done, Some(0), 1, out),
            b"link" => self.link(done, (None, 0), (None, 1)),
            b"linkat" => self.link(done, (Some(0), 1), (Some(2), 3)),
            b"fstat" | b"fstat64" => self.show_length(done, None),
            b"stat" | b"stat64" => self.show_length(done, Some((None, 0))),
            b"newfstatat" | b"fstatat64" | b"statx" => self.show_length(done, Some((Some(0), 1))),
            b"clone" | b"clone3" | b"fork" | b"vfork" => self.forked(done, out),
            b"execve" | b"execveat" => self.execute(done, out),
            b"chdir" | b"fchdir" => self.change_folder(done),
            b"pipe" | b"pipe2" | b"socketpair" => self.pair(done, out),
            name if makes_descriptor(name) => self.other(done, result, out),
            _ => Ok(()),
        }
    }

    /// The table of `done`'s process and the number of the descriptor in argument `at`. One that no
    /// call made is taken for what `-y` shows behind it; its position is not known.
    fn descriptor(&mut self, done: Done<'_>, at: usize, out: &mut Out) -> Result<(u32, i64), Bad> {
        let Descriptor { number, shown } = Descriptor::parse(done.call.argument(at))?;
        let key = (self.table(done)?, number.ok_or(Bad::Number("descriptor"))?);
        if let Some(shown) = shown
            && self.descriptors.get(key).is_err()
        {
            let mut open = Open::default();
            let path = unescaped(shown)?;
            if path.starts_with(b"/") && is_storage(&path) {
                open.file = Some(self.descriptors.files.named(&path)?);
                open.folder = Some(path.into());
            }
            self.descriptors.open(key, open, false, out)?;
        }
        Ok(key)
    }

    fn table(&mut self, done: Done<'_>) -> Result<u32, Bad> {
        Ok(self.processes.get(done.pid)?.table)
    }

    /// The path in argument `at`, from the folder in argument `folder` or the working folder.
    fn path(&mut self, done: Done<'_>, folder: Option<usize>, at: usize) -> Result<Vec<u8>, Bad> {
        let path = unquoted(done.call.argument(at))?;
        if path.starts_with(b"/") {
            return Ok(joined(b"", &path));
        }
        let Some(folder) = folder else {
            return Ok(joined(&self.processes.get(done.pid)?.folder, &path));
        };
        let Descriptor { number, shown } = Descriptor::parse(done.call.argument(folder))?;
        if let Some(shown) = shown {
            return Ok(joined(&unescaped(shown)?, &path));
        }
        let Some(number) = number else {
            return Ok(joined(&self.processes.get(done.pid)?.folder, &path));
        };
        let table = self.table(done)?;
        let open = self.descriptors.get((table, number))?;
        Ok(joined(open.folder.as_deref().ok_or(Bad::Descriptor(number))?, &path))
    }

    fn open(
        &mut self,
        done: Done<'_>,
        folder: Option<usize>,
        at: usize,
        out: &mut Out,
    ) -> Result<(), Bad> {
        let flags = match (done.call.name, done.call.argument(at + 1)) {
            (b"creat", _) => b"O_WRONLY|O_CREAT|O_TRUNC",
            (b"openat2", how) => member(how, b"flags").ok_or(Bad::Shape)?,
            (_, flags) => flags,
        };
        let path = match done.call.returned_path() {
            Some(shown) if shown.starts_with(b"/") => unescaped(shown)?,
            _ => self.path(done, folder, at)?,
        };
        let has = |flag: &[u8]| has_flag(flags, flag);
        let mut open = Open::default();
        if has(b"O_TMPFILE") {
            let file = self.descriptors.files.unnamed()?;
            open = Open::at_start(file);
        } else if is_storage(&path) {
            open = self.open_named(&path, has, out)?;
        }
        let key = (self.table(done)?, done.result);
        self.descriptors.open(key, open, has(b"O_CLOEXEC"), out)
    }

    fn open_named(
        &mut self,
        path: &[u8],
        has: impl Fn(&[u8]) -> bool,
        out: &mut Out,
    ) -> Result<Open, Bad> {
        let files = &mut self.descriptors.files;
        let file = files.named(path)?;
        let mut open = Open::at_start(file);
        if has(b"O_DIRECTORY") || has(b"O_PATH") {
            open.folder = Some(path.into());
        }
        if has(b"O_DIRECTORY") {
            files.set_folder(file);
        } else if has(b"O_TRUNC") {
            files.resize(file, 0, out)?;
        } else if has(b"O_CREAT") && has(b"O_EXCL") {
            files.set_len(file, 0);
        }
        open.append = has(b"O_APPEND");
        open.sync = has(b"O_SYNC") || has(b"O_DSYNC");
        Ok(open)
    }

    fn close(&mut self, done: Done<'_>, out: &mut Out) -> Result<(), Bad> {
        let number = Descriptor::parse(done.call.argument(0))?.number;
        let key = (self.table(done)?, number.ok_or(Bad::Number("descriptor"))?);
        self.descriptors.close(key, out);
        Ok(())
    }

    fn close_range(&mut self, done: Done<'_>, out: &mut Out) -> Result<(), Bad> {
        let table = self.table(done)?;
        let (first, _) = integer(done.call.argument(0)).ok_or(Bad::Number("descriptor"))?;
        // The last is `~0U` where all are meant.
        let last = integer(done.call.argument(1)).map_or(i64::MAX, |(last, _)| last);
        if !has_flag(done.call.argument(2), b"CLOSE_RANGE_CLOEXEC") {
            self.descriptors.close_all(table, |it, _| (first..=last).contains(&it), out);
        }
        Ok(())
    }

    fn duplicate(&mut self, done: Done<'_>, on_exec: bool, out: &mut Out) -> Result<(), Bad> {
        let (table, from) = self.descriptor(done, 0, out)?;
        match self.descriptors.duplicate(table, (from, done.result), on_exec, out) {
            // Two descriptors that are not known: what comes through them is told as bad.
            Err(Bad::Descriptor(_)) => {
                self.descriptors.close((table, done.result), out);
                Ok(())
            }
            result => result,
        }
    }

    fn control(&mut self, done: Done<'_>, out: &mut Out) -> Result<(), Bad> {
        match done.call.argument(1) {
            b"F_DUPFD" => self.duplicate(done, false, out),
            b"F_DUPFD_CLOEXEC" => self.duplicate(done, true, out),
            b"F_SETFL" => {
                let key = self.descriptor(done, 0, out)?;
                if let Ok(open) = self.descriptors.get_mut(key) {
                    open.append = has_flag(done.call.argument(2), b"O_APPEND");
                }
                Ok(())
            }
            b"F_SETFD" => {
                let key = self.descriptor(done, 0, out)?;
                let on_exec = has_flag(done.call.argument(2), b"FD_CLOEXEC");
                self.descriptors.set_close_on_exec(key, on_exec);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn seek(&mut self, done: Done<'_>) -> Result<(), Bad> {
        let key = self.descriptor(done, 0, &mut Out::default())?;
        let position = if done.call.name == b"_llseek" {
            let text = done.call.argument(3).strip_prefix(b"[").ok_or(Bad::Shape)?;
            integer(text).and_then(|(it, _)| u64::try_from(it).ok()).ok_or(Bad::Number("offset"))?
        } else {
            done.call.count().ok_or(Bad::Number("offset"))?
        };
        let Ok(open) = self.descriptors.get_mut(key) else { return Ok(()) };
        open.position = Some(position);
        let is_end = done.call.argument(1) == b"0" && done.call.argument(2) == b"SEEK_END";
        if let (true, Some(file)) = (is_end, open.file) {
            self.descriptors.files.set_len(file, position);
        }
        Ok(())
    }

    /// A call that reads or writes as many bytes as it returns, at the offset in argument
    /// `offset` or at the position of the descriptor.
    fn transfer(
        &mut self,
        done: Done<'_>,
        way: Way,
        offset: Option<usize>,
        out: &mut Out,
    ) -> Result<(), Bad> {
        let key = self.descriptor(done, 0, out)?;
        let offset = match offset.map(|at| done.call.argument(at)) {
            None | Some(b"-1") => None,
            Some(text) => Some(number(text, "offset")?),
        };
        let flags = done.call.argument(4);
        let len = done.call.count().ok_or(Bad::Number("result"))?;
        if has_flag(flags, b"RWF_APPEND") {
            return Err(Bad::Operation);
        }
        self.descriptors.transfer(key, way, offset, len, out)?;
        let is_sync = has_flag(flags, b"RWF_DSYNC") || has_flag(flags, b"RWF_SYNC");
        if is_sync && way == Way::Write { self.descriptors.sync(key, out) } else { Ok(()) }
    }

    /// A call that copies from one descriptor to another; each has an argument with its number and
    /// one with a pointer to its offset.
    fn copy(
        &mut self,
        done: Done<'_>,
        (from, from_offset): (usize, usize),
        (to, to_offset): (usize, Option<usize>),
        out: &mut Out,
    ) -> Result<(), Bad> {
        let keys = (self.descriptor(done, from, out)?, self.descriptor(done, to, out)?);
        let (read_at, written_at) = (
            pointed(done.call.argument(from_offset))?,
            to_offset.map_or(Ok(None), |at| pointed(done.call.argument(at)))?,
        );
        let len = done.call.count().ok_or(Bad::Number("result"))?;
        // Both or none.
        self.descriptors.start(keys.1, Way::Write, written_at)?;
        self.descriptors.transfer(keys.0, Way::Read, read_at, len, out)?;
        self.descriptors.transfer(keys.1, Way::Write, written_at, len, out)
    }

    fn sync(&mut self, done: Done<'_>, out: &mut Out) -> Result<(), Bad> {
        let key = self.descriptor(done, 0, out)?;
        self.descriptors.sync(key, out)
    }

    fn truncate(&mut self, done: Done<'_>, out: &mut Out) -> Result<(), Bad> {
        let len = number(done.call.argument(1), "length")?;
        let file = if done.call.name.starts_with(b"f") {
            let key = self.descriptor(done, 0, out)?;
            self.descriptors.get(key)?.file
        } else {
            let path = self.path(done, None, 0)?;
            Some(self.descriptors.files.named(&path)?)
        };
        file.map_or(Ok(()), |file| self.descriptors.files.resize(file, len, out))
    }

    /// Space changes no data, but may make the file longer.
    fn allocate(&mut self, done: Done<'_>) -> Result<(), Bad> {
        let key = self.descriptor(done, 0, &mut Out::default())?;
        let Some(file) = self.descriptors.get(key)?.file else { return Ok(()) };
        let mode = done.call.argument(1);
        if mode == b"0" {
            let offset = number(done.call.argument(2), "offset")?;
            let end = offset.checked_add(number(done.call.argument(3), "length")?);
            self.descriptors.files.reaches(file, end.ok_or(Bad::Range)?);
        } else if !has_flag(mode, b"FALLOC_FL_KEEP_SIZE") {
            self.descriptors.files.forget_len(file);
        }
        Ok(())
    }

    fn rename(
        &mut self,
        done: Done<'_>,
        from: (Option<usize>, usize),
        to: (Option<usize>, usize),
        out: &mut Out,
    ) -> Result<(), Bad> {
        let (from, to) = (self.path(done, from.0, from.1)?, self.path(done, to.0, to.1)?);
        if has_flag(done.call.argument(4), b"RENAME_EXCHANGE") {
            return self.descriptors.files.exchange(&from, &to);
        }
        self.descriptors.files.rename(&from, &to, out)
    }

    fn unlink(
        &mut self,
        done: Done<'_>,
        folder: Option<usize>,
        at: usize,
        out: &mut Out,
    ) -> Result<(), Bad> {
        let path = self.path(done, folder, at)?;
        self.descriptors.files.unlink(&path, out);
        Ok(())
    }

    fn link(
        &mut self,
        done: Done<'_>,
        from: (Option<usize>, usize),
        to: (Option<usize>, usize),
    ) -> Result<(), Bad> {
        let (from, to) = (self.path(done, from.0, from.1)?, self.path(done, to.0, to.1)?);
        let number = from.strip_prefix(b"/proc/self/fd/").and_then(integer);
        let files = &mut self.descriptors;
        match number {
            // A name for a file that was opened without one.
            Some((number, _)) => {
                let table = self.processes.get(done.pid)?.table;
                let file = files.get((table, number))?.file;
                file.map_or(Ok(()), |file| files.files.name(file, &to))
            }
            None => files.files.link(&from, &to),
        }
    }

    /// A call that shows how long a file is, by its descriptor or by a path. Only files that the
    /// trace has shown are of interest.
    fn show_length(
        &mut self,
        done: Done<'_>,
        path: Option<(Option<usize>, usize)>,
    ) -> Result<(), Bad> {
        let shown = |at: usize| {
            let structure = done.call.argument(at);
            let is_file = memchr::memmem::find(structure, b"S_IFREG").is_some();
            let size = member(structure, b"st_size").or_else(|| member(structure, b"stx_size"));
            size.filter(|_| is_file).and_then(|size| number(size, "length").ok())
        };
        let Some(len_bytes) = (1..5).find_map(shown) else { return Ok(()) };
        let named = path.filter(|(_, at)| done.call.argument(*at) != b"\"\"");
        let file = if let Some((folder, at)) = named {
            let path = self.path(done, folder, at)?;
            self.descriptors.files.known(&path)
        } else {
            let key = self.descriptor(done, 0, &mut Out::default())?;
            self.descriptors.get(key).ok().and_then(|open| open.file)
        };
        if let Some(file) = file {
            self.descriptors.files.set_len(file, len_bytes);
        }
        Ok(())
    }

    fn forked(&mut self, done: Done<'_>, out: &mut Out) -> Result<(), Bad> {
        let child = u32::try_from(done.result).map_err(|_| Bad::Number("process"))?;
        let is_thread = done.call.mentions(b"CLONE_FILES");
        self.fork((done.pid, child), is_thread, out)
    }

    fn execute(&mut self, done: Done<'_>, out: &mut Out) -> Result<(), Bad> {
        let table = self.table(done)?;
        self.descriptors.close_all(table, |_, on_exec| on_exec, out);
        Ok(())
    }

    fn change_folder(&mut self, done: Done<'_>) -> Result<(), Bad> {
        let folder = if done.call.name == b"chdir" {
            self.path(done, None, 0)?.into()
        } else {
            let key = self.descriptor(done, 0, &mut Out::default())?;
            let folder = self.descriptors.get(key)?.folder.clone();
            folder.ok_or(Bad::Descriptor(key.1))?
        };
        self.processes.get(done.pid)?.folder = folder;
        Ok(())
    }

    fn pair(&mut self, done: Done<'_>, out: &mut Out) -> Result<(), Bad> {
        let at = if done.call.name == b"socketpair" { 3 } else { 0 };
        let (one, other) = pair(done.call.argument(at)).ok_or(Bad::Shape)?;
        self.other(done, one, out)?;
        self.other(done, other, out)
    }

    /// Descriptor `number` is no storage.
    fn other(&mut self, done: Done<'_>, number: i64, out: &mut Out) -> Result<(), Bad> {
        let key = (self.table(done)?, number);
        self.descriptors.open(key, Open::default(), false, out)
    }
}

/// The number that a pointer points to; none for a null pointer.
fn pointed(text: &[u8]) -> Result<Option<u64>, Bad> {
    if text == b"NULL" {
        return Ok(None);
    }
    let (value, _) = text.strip_prefix(b"[").and_then(integer).ok_or(Bad::Number("offset"))?;
    u64::try_from(value).map(Some).map_err(|_| Bad::Number("offset"))
}

/// True for calls that return a descriptor of what is no storage.
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
