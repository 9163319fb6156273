//! The edge to the kernel, and the only `unsafe` of this front end: commands by `io_uring`, and the
//! memory in which the driver describes requests.
//!
//! Invariants, on which each `unsafe` relies:
//! 1. Memory whose address a command has lives at least as long as the ring that carries it: the
//!    blocks of [`ControlRing`] are fields behind its ring, and [`QueueRing`] is dropped before the
//!    buffers of its tags are.
//! 2. The driver copies to and from a tag's buffer only while the queue's thread is inside a system
//!    call of its ring, and only if the tag's command has its address.

#![expect(
    unsafe_code,
    reason = "the kernel reads and writes memory that the type system cannot see it borrow"
)]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use io_uring::squeue::{Entry, Entry128};
use io_uring::{IoUring, cqueue, opcode, types};
use rustix::event::PollFlags;
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use zerocopy::{FromZeros, IntoBytes};

use super::abi::{
    COMMIT_AND_FETCH, Command, ControlCommand, DEPTH_MAX, Descriptor, DeviceInfo, FETCH, IoCommand,
    NO_QUEUE, Parameters,
};
use super::requests::Answer;

/// Entries of the ring for commands: one runs at a time.
const CONTROL_ENTRIES: u32 = 4;

/// Runs commands of the driver, one at a time.
pub(super) struct ControlRing {
    ring: IoUring<Entry128, cqueue::Entry>,
    file: File,
    info: Box<DeviceInfo>,
    parameters: Box<Parameters>,
}

/// The memory that a command reads or writes.
enum Block {
    None,
    Info,
    Parameters,
}

impl ControlRing {
    /// Makes a ring for the driver's control device.
    ///
    /// # Errors
    /// The kernel refuses a ring.
    pub(super) fn new(file: File) -> std::io::Result<Self> {
        let ring = IoUring::builder().build(CONTROL_ENTRIES)?;
        let (info, parameters) = (FromZeros::new_box_zeroed(), FromZeros::new_box_zeroed());
        let no_memory = |_| std::io::Error::from(std::io::ErrorKind::OutOfMemory);
        let (info, parameters) = (info.map_err(no_memory)?, parameters.map_err(no_memory)?);
        Ok(Self { ring, file, info, parameters })
    }

    /// Runs `command` on device `number` with one number as its data.
    ///
    /// # Errors
    /// The driver's error.
    pub(super) fn run(&mut self, command: Command, number: u32, data: u64) -> Result<(), Errno> {
        self.submit(command, number, data, &Block::None)
    }

    /// Runs `command` on device `number` with `info`. Returns what the driver made of it.
    ///
    /// # Errors
    /// The driver's error.
    pub(super) fn run_info(
        &mut self,
        command: Command,
        number: u32,
        info: DeviceInfo,
    ) -> Result<DeviceInfo, Errno> {
        *self.info = info;
        self.submit(command, number, 0, &Block::Info)?;
        Ok(*self.info)
    }

    /// Runs `command` on device `number` with `parameters`. Returns what the driver made of them.
    ///
    /// # Errors
    /// The driver's error.
    pub(super) fn run_parameters(
        &mut self,
        command: Command,
        number: u32,
        parameters: Parameters,
    ) -> Result<Parameters, Errno> {
        *self.parameters = parameters;
        self.submit(command, number, 0, &Block::Parameters)?;
        Ok(*self.parameters)
    }

    fn submit(
        &mut self,
        Command(operation): Command,
        number: u32,
        data: u64,
        block: &Block,
    ) -> Result<(), Errno> {
        let (address, len) = self.memory_of(block);
        let command = ControlCommand {
            device: number,
            queue: NO_QUEUE,
            len,
            address,
            data,
            ..FromZeros::new_zeroed()
        };
        let mut bytes = [0; 80];
        bytes[..size_of::<ControlCommand>()].copy_from_slice(command.as_bytes());
        let fd = types::Fd(self.file.as_raw_fd());
        let entry = opcode::UringCmd80::new(fd, operation).cmd(bytes).build();
        // SAFETY: the address in the entry, if there is one, is that of a box of this struct, which
        // lives until after the ring (invariant 1), and nothing else uses it before this returns.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.map_err(|_| Errno::BUSY)?;
        wait(&self.ring)?;
        let result = self
            .ring
            .completion()
            .next()
            .map_or(Errno::IO.raw_os_error(), |completion| -completion.result());
        if result <= 0 { Ok(()) } else { Err(Errno::from_raw_os_error(result)) }
    }

    fn memory_of(&mut self, block: &Block) -> (u64, u16) {
        let (pointer, len) = match block {
            Block::None => return (0, 0),
            Block::Info => {
                let info: *mut DeviceInfo = &raw mut *self.info;
                (info.expose_provenance(), size_of::<DeviceInfo>())
            }
            Block::Parameters => {
                let parameters: *mut Parameters = &raw mut *self.parameters;
                (parameters.expose_provenance(), size_of::<Parameters>())
            }
        };
        (pointer as u64, u16::try_from(len).unwrap_or(0))
    }
}

/// Submits the entries of `ring`, and waits until a completion is there. Signals do not end the
/// wait.
fn wait<S: io_uring::squeue::EntryMarker>(ring: &IoUring<S, cqueue::Entry>) -> Result<(), Errno> {
    loop {
        match ring.submit_and_wait(1) {
            Ok(_) => return Ok(()),
            Err(error) => match Errno::from_io_error(&error) {
                Some(Errno::INTR) => {}
                // The completions that are there must be taken first.
                Some(Errno::BUSY | Errno::AGAIN) => return Ok(()),
                errno => return Err(errno.unwrap_or(Errno::IO)),
            },
        }
    }
}

/// What has happened at a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    /// The watched descriptor is readable, and is no longer watched.
    Woken,
    /// A request has arrived, or the command of a tag has failed.
    Tag(u16, Result<(), Errno>),
}

/// The number of the entry that watches a descriptor; other entries have the number of their tag.
const WATCH: u64 = u64::MAX;

/// Gets the requests of one queue from the kernel.
pub(super) struct QueueRing {
    ring: IoUring,
    file: File,
    queue: u16,
    descriptors: Descriptors,
}

impl QueueRing {
    /// Makes a ring for queue `queue` with `depth` tags of the device in `file`. The thread that
    /// fetches the first request must fetch all.
    ///
    /// # Errors
    /// The kernel refuses a ring or the memory of the descriptors.
    pub(super) fn new(file: File, queue: u16, depth: u16) -> std::io::Result<Self> {
        // One entry for each tag, and one for the watch.
        let entries = u32::from(depth) + 1;
        let ring = IoUring::builder().setup_coop_taskrun().build(entries.next_power_of_two())?;
        let descriptors = Descriptors::map(&file, queue, depth)?;
        Ok(Self { ring, file, queue, descriptors })
    }

    /// Returns the request that has arrived with `tag`.
    pub(super) fn descriptor(&self, tag: u16) -> Descriptor {
        self.descriptors.read(tag)
    }

    /// Asks for the first request of `tag`, whose data goes to or comes from `address`.
    ///
    /// # Errors
    /// The kernel takes no entries.
    pub(super) fn fetch(&mut self, tag: u16, address: u64) -> Result<(), Errno> {
        self.command(FETCH, Answer { tag, result: 0 }, address)
    }

    /// Answers a request, and asks for the next one with its tag.
    ///
    /// # Errors
    /// The kernel takes no entries.
    pub(super) fn commit(&mut self, answer: Answer, address: u64) -> Result<(), Errno> {
        self.command(COMMIT_AND_FETCH, answer, address)
    }

    fn command(&mut self, operation: u32, answer: Answer, address: u64) -> Result<(), Errno> {
        let Answer { tag, result } = answer;
        let command = IoCommand { queue: self.queue, tag, result, address };
        let mut bytes = [0; 16];
        bytes.copy_from_slice(command.as_bytes());
        let fd = types::Fd(self.file.as_raw_fd());
        let entry = opcode::UringCmd16::new(fd, operation).cmd(bytes).build();
        self.push(&entry.user_data(tag.into()))
    }

    /// Watches `fd` until it is readable.
    ///
    /// # Errors
    /// The kernel takes no entries.
    pub(super) fn watch(&mut self, fd: BorrowedFd<'_>) -> Result<(), Errno> {
        let readable = u32::from(PollFlags::IN.bits());
        let entry = opcode::PollAdd::new(types::Fd(fd.as_raw_fd()), readable).build();
        self.push(&entry.user_data(WATCH))
    }

    fn push(&mut self, entry: &Entry) -> Result<(), Errno> {
        // SAFETY: the entry has the address of a tag's buffer or none. The buffer outlives the ring
        // (invariant 1), and only the tag's thread, which runs this, uses it (invariant 2).
        while unsafe { self.ring.submission().push(entry) }.is_err() {
            self.submit()?;
        }
        Ok(())
    }

    /// Gives the kernel all entries.
    ///
    /// # Errors
    /// The kernel takes no entries.
    pub(super) fn submit(&mut self) -> Result<(), Errno> {
        match self.ring.submit() {
            Ok(_) => Ok(()),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => Ok(()),
            Err(error) => Err(Errno::from_io_error(&error).unwrap_or(Errno::IO)),
        }
    }

    /// Gives the kernel all entries, and waits for an event.
    ///
    /// # Errors
    /// The kernel takes no entries.
    pub(super) fn wait(&mut self) -> Result<(), Errno> {
        wait(&self.ring)
    }

    /// Adds the events that have happened to `events`.
    pub(super) fn events(&mut self, events: &mut Vec<Event>) {
        events.extend(self.ring.completion().map(|completion| {
            let result = match completion.result() {
                result if result >= 0 => Ok(()),
                result => Err(Errno::from_raw_os_error(-result)),
            };
            match u16::try_from(completion.user_data()) {
                Ok(tag) => Event::Tag(tag, result),
                Err(_) => Event::Woken,
            }
        }));
    }
}

/// The descriptors of a queue's requests, which the driver writes.
struct Descriptors {
    memory: NonNull<Descriptor>,
    bytes: usize,
    depth: u16,
}

// SAFETY: the memory is a mapping, which belongs to no thread.
unsafe impl Send for Descriptors {}

impl Descriptors {
    fn map(file: &File, queue: u16, depth: u16) -> rustix::io::Result<Self> {
        let page_bytes = rustix::param::page_size();
        let in_pages = |tags: usize| (tags * size_of::<Descriptor>()).next_multiple_of(page_bytes);
        let offset = u64::from(queue) * in_pages(DEPTH_MAX) as u64;
        let bytes = in_pages(depth.into());
        // SAFETY: the kernel chooses where the new mapping is, so it replaces none.
        let memory = unsafe {
            mmap(std::ptr::null_mut(), bytes, ProtFlags::READ, MapFlags::SHARED, file, offset)
        };
        let memory = NonNull::new(memory?.cast()).ok_or(Errno::NOMEM)?;
        Ok(Self { memory, bytes, depth })
    }

    /// Returns the descriptor of `tag`, an empty one if the queue has no such tag.
    fn read(&self, tag: u16) -> Descriptor {
        if tag >= self.depth {
            return Descriptor::default();
        }
        let at = self.memory.as_ptr().wrapping_add(tag.into());
        // SAFETY: `tag` is below `depth`, so `at` is inside the mapping, aligned, and mapped until
        // this is dropped. The driver wrote the descriptor before the request arrived; a volatile
        // read is right also if it writes at the same time, since all bits are valid.
        unsafe { at.read_volatile() }
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: the mapping was made with these values, and no reference to it is left.
        let _ = unsafe { munmap(self.memory.as_ptr().cast(), self.bytes) };
    }
}
