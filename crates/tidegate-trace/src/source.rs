//! Sources of lines: one file, or the files of `strace -ff`, one for each process.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use super::by_time::ByTime;
use super::fields::seconds_us;
use super::input::{Input, Progress};
use super::lines::{Line, Lines};

/// Number of bytes, of all processes' files, that detect the format.
const HEAD_BYTES: usize = 64 << 10;

/// Lines in time order.
pub(super) enum Source {
    One(Lines<Input>),
    Processes(Processes),
    ByTime(ByTime),
}

impl Source {
    /// Opens the file at `path`. If `path` does not exist but `path.1`, `path.2` and so on do,
    /// opens them as the files of a program's processes under `strace -ff -o path`.
    pub(super) fn open(path: &Path, progress: &mut Progress) -> io::Result<Self> {
        match progress.open(path) {
            Ok(input) => {
                progress.total_bytes += path.metadata()?.len();
                Ok(Self::One(Lines::new(input)))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let files = files_of_processes(path);
                if files.is_empty() {
                    return Err(error);
                }
                Ok(Self::Processes(Processes::open(files, progress)?))
            }
            Err(error) => Err(error),
        }
    }

    pub(super) fn read(bytes: impl Read + Send + 'static, progress: &Progress) -> io::Result<Self> {
        Ok(Self::One(Lines::new(progress.read(bytes)?)))
    }

    pub(super) fn next(&mut self) -> io::Result<Option<Line<'_>>> {
        match self {
            Self::One(lines) => lines.next(),
            Self::Processes(processes) => processes.next(),
            Self::ByTime(lines) => Ok(lines.next()),
        }
    }

    /// Sorts the lines by the time in their second field.
    pub(super) fn by_time(mut self) -> io::Result<Self> {
        let mut sorted = ByTime::default();
        while let Some(line) = self.next()? {
            sorted.push(line)?;
        }
        sorted.sort();
        Ok(Self::ByTime(sorted))
    }

    /// Returns the number of the line that was read last, if the source reorders lines.
    pub(super) fn line_number(&self) -> Option<u64> {
        match self {
            Self::ByTime(lines) => Some(lines.number()),
            _ => None,
        }
    }

    /// Returns the first bytes, for the detection of the format.
    pub(super) fn head(&mut self) -> io::Result<&[u8]> {
        match self {
            Self::One(lines) => lines.head(),
            Self::Processes(processes) => Ok(&processes.head),
            Self::ByTime(_) => Ok(&[]),
        }
    }
}

/// Returns the files beside `path` whose names are its own, a dot and a number.
fn files_of_processes(path: &Path) -> Vec<(u32, PathBuf)> {
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else { return Vec::new() };
    let folder = path.parent().filter(|it| !it.as_os_str().is_empty());
    let Ok(entries) = folder.unwrap_or(Path::new(".")).read_dir() else { return Vec::new() };
    let process = |entry: io::Result<std::fs::DirEntry>| {
        let entry = entry.ok()?;
        let found = entry.file_name();
        let pid = found.to_str()?.strip_prefix(name)?.strip_prefix('.')?.parse().ok()?;
        Some((pid, entry.path()))
    };
    let mut files: Vec<_> = entries.filter_map(process).collect();
    files.sort_unstable();
    files
}

/// The files of `strace -ff -ttt`, merged by time. Each line gets the process's number in front, as
/// with `strace -f`. A file is open from its first line to its last.
pub(super) struct Processes {
    files: Vec<Process>,
    /// Time of a file's next line, and index of the file.
    next: BinaryHeap<Reverse<(u64, usize)>>,
    progress: Progress,
    head: Vec<u8>,
    line: Vec<u8>,
}

struct Process {
    pid: u32,
    path: PathBuf,
    lines: Option<Lines<Input>>,
}

impl Processes {
    fn open(files: Vec<(u32, PathBuf)>, progress: &mut Progress) -> io::Result<Self> {
        let (mut processes, mut next, mut head) = (Vec::new(), BinaryHeap::new(), Vec::new());
        for (index, (pid, path)) in files.into_iter().enumerate() {
            // The first line only determines when to open the file for good and count its bytes.
            let mut lines = Lines::new(Progress::default().open(&path)?);
            if head.len() < HEAD_BYTES {
                head.extend_from_slice(lines.head()?);
            }
            if let Some(Ok(text)) = lines.next()? {
                next.push(Reverse((time_us(text).unwrap_or(0), index)));
            }
            progress.total_bytes += path.metadata()?.len();
            processes.push(Process { pid, path, lines: None });
        }
        let progress = progress.clone();
        Ok(Self { files: processes, next, progress, head, line: Vec::new() })
    }

    fn next(&mut self) -> io::Result<Option<Line<'_>>> {
        while let Some(Reverse((last_us, index))) = self.next.pop() {
            let Process { pid, path, lines } = &mut self.files[index];
            let opened = match lines {
                Some(lines) => lines,
                None => lines.insert(Lines::new(self.progress.open(path)?)),
            };
            let Some(line) = opened.next()? else {
                *lines = None;
                continue;
            };
            self.line.clear();
            write!(self.line, "{pid} ")?;
            let text = line.map(|text| self.line.extend_from_slice(text));
            let next_us = opened.peek()?.and_then(time_us);
            self.next.push(Reverse((next_us.unwrap_or(last_us), index)));
            return Ok(Some(text.map(|()| &*self.line)));
        }
        Ok(None)
    }
}

/// Returns the time at the start of `line`.
fn time_us(line: &[u8]) -> Option<u64> {
    seconds_us(line.split(|&byte| byte == b' ').next()?).ok()
}
