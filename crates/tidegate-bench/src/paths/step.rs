//! Counts instructions of a program between two of its functions, one step at a time.
//!
//! Only the program itself and the preload library are counted, since the C library chooses its
//! copies by the processor. `tidegate::pmem` also chooses checksums and streamed copies by the
//! processor; functions of these names are left out. The counts are then equal on all processors.

use std::io::{BufRead, BufReader, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;
use object::{Object, ObjectSegment, ObjectSymbol};

use super::instruction::{Kind, kind};
use crate::error::{BenchError, Result};

/// Parts of the names of functions that the processor chooses.
const CHOSEN: [&str; 3] = ["4pmem3cpu", "crc32c", "crc_fast"];

/// The counts of one operation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Counts {
    /// All instructions, the other kinds included.
    pub(super) instructions: u64,
    pub(super) locked: u64,
    pub(super) fences: u64,
    pub(super) write_backs: u64,
}

/// Counts the instructions of each operation of `command`, which prints "ready PID BEGIN END" with
/// the addresses of two functions, waits for a line, and calls both functions around each
/// operation.
///
/// # Errors
/// The program or the system behaves unexpectedly.
pub(super) fn count(mut command: Command) -> Result<Vec<Counts>> {
    let name = command.get_program().to_string_lossy().into_owned();
    let failed = |found: String| BenchError::Program { program: name.clone(), found };
    let traced = |error: nix::Error| failed(format!("it cannot be traced: {error}"));
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().map_err(BenchError::os("start", &name))?;
    let mut line = String::new();
    let stdout = child.stdout.take().expect("stdout is piped");
    BufReader::new(stdout).read_line(&mut line).map_err(BenchError::os("read from", &name))?;
    let words: Vec<u64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let [pid, begin, end] = words[..] else {
        return Err(failed(format!("printed {line:?}, expected \"ready PID BEGIN END\"")));
    };
    let pid = Pid::from_raw(i32::try_from(pid).map_err(|_| failed(line.clone()))?);
    ptrace::seize(pid, ptrace::Options::PTRACE_O_EXITKILL).map_err(traced)?;
    ptrace::interrupt(pid).map_err(traced)?;
    waitpid(pid, None).map_err(traced)?;
    let counted = Counted::of(pid)?;
    let mut stdin = child.stdin.take().expect("stdin is piped");
    stdin.write_all(b"\n").map_err(BenchError::os("write to", &name))?;
    let (operations, ended) = step_to_the_end(pid, begin..end, &counted).map_err(traced)?;
    // The traced process was waited for; a child that only started it is reaped here.
    if pid.as_raw().cast_unsigned() != child.id() {
        child.wait().map_err(BenchError::os("wait for", &name))?;
    }
    match ended {
        WaitStatus::Exited(_, 0) => Ok(operations),
        other => Err(failed(format!("ended with {other:?}"))),
    }
}

/// Steps through all operations to the end of the program. Returns their counts and the status.
fn step_to_the_end(
    pid: Pid,
    Range { start: begin, end }: Range<u64>,
    counted: &Counted,
) -> nix::Result<(Vec<Counts>, WaitStatus)> {
    let (mut operations, mut current, mut before) = (Vec::new(), None::<Counts>, 0);
    loop {
        ptrace::step(pid, None)?;
        match waitpid(pid, None)? {
            WaitStatus::Stopped(_, Signal::SIGTRAP) => {}
            WaitStatus::Stopped(_, signal) => {
                ptrace::step(pid, signal)?;
                waitpid(pid, None)?;
            }
            ended => return Ok((operations, ended)),
        }
        let at = ptrace::getregs(pid)?.rip;
        if at == begin {
            current = Some(Counts::default());
        } else if at == end {
            operations.extend(current.take());
        } else if let Some(counts) = &mut current
            // An instruction that repeats itself counts once.
            && at != before
            && counted.contains(at)
        {
            counts.add(kind(&bytes_at(pid, at)?));
        }
        before = at;
    }
}

impl Counts {
    fn add(&mut self, kind: Kind) {
        self.instructions += 1;
        match kind {
            Kind::Plain => {}
            Kind::Locked => self.locked += 1,
            Kind::Fence => self.fences += 1,
            Kind::WriteBack => self.write_backs += 1,
        }
    }
}

/// Returns the first bytes of the instruction at `at`, enough to identify it.
fn bytes_at(pid: Pid, at: u64) -> nix::Result<[u8; 8]> {
    let address = usize::try_from(at).map_err(|_| nix::Error::EFAULT)?;
    Ok(ptrace::read(pid, std::ptr::without_provenance_mut(address))?.to_le_bytes())
}

/// The addresses whose instructions are counted.
struct Counted {
    ours: Vec<Range<u64>>,
    chosen: Vec<Range<u64>>,
}

impl Counted {
    fn of(pid: Pid) -> Result<Self> {
        let path = PathBuf::from(format!("/proc/{pid}/maps"));
        let maps = std::fs::read_to_string(&path).map_err(BenchError::os("read", &path))?;
        let (mut ours, mut chosen) = (Vec::new(), Vec::new());
        for (addresses, offset, file) in maps.lines().filter_map(mapping) {
            chosen.extend(chosen_in(Path::new(file), &addresses, offset)?);
            ours.push(addresses);
        }
        Ok(Self { ours, chosen })
    }

    fn contains(&self, at: u64) -> bool {
        let within = |ranges: &[Range<u64>]| ranges.iter().any(|range| range.contains(&at));
        within(&self.ours) && !within(&self.chosen)
    }
}

/// Parses a mapping of our own code: its addresses, its offset in the file, and the file.
fn mapping(line: &str) -> Option<(Range<u64>, u64, &str)> {
    let mut words = line.split_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let rights = words.next()?;
    let offset = u64::from_str_radix(words.next()?, 16).ok()?;
    let file = words.nth(2)?;
    let name = Path::new(file).file_name()?.to_str()?;
    let is_ours = name.starts_with("tidegate-bench") || name.starts_with("libtidegate");
    let number = |text| u64::from_str_radix(text, 16).ok();
    (is_ours && rights.contains('x')).then_some((number(start)?..number(end)?, offset, file))
}

/// Returns the mapped addresses of the functions of `file` that the processor chooses.
fn chosen_in(file: &Path, addresses: &Range<u64>, offset: u64) -> Result<Vec<Range<u64>>> {
    let failed = |error: object::Error| BenchError::Program {
        program: file.display().to_string(),
        found: format!("its symbols cannot be read: {error}"),
    };
    let bytes = std::fs::read(file).map_err(BenchError::os("read", file))?;
    let parsed = object::File::parse(&*bytes).map_err(failed)?;
    let is_here = |segment: &object::Segment<'_, '_>| {
        let (at, len) = segment.file_range();
        (at..at + len).contains(&offset)
    };
    let Some(segment) = parsed.segments().find(is_here) else { return Ok(Vec::new()) };
    // Offset of the file's addresses in memory.
    let base = addresses.start - (segment.address() + (offset - segment.file_range().0));
    let of_symbol = |symbol: object::Symbol<'_, '_>| {
        let name = symbol.name().ok()?;
        let is_chosen = CHOSEN.iter().any(|part| name.contains(part));
        let start = base + symbol.address();
        is_chosen.then(|| start..start + symbol.size())
    };
    Ok(parsed.symbols().filter_map(of_symbol).collect())
}
