//! A virtual machine without a processor: the driver of its disk, and its monitor's end of the
//! connection.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

use tidegate::device::{
    BlockDevice, DeviceError, DeviceErrorKind, Extent, Geometry, Operation, Result,
};
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use crate::memory::{
    AVAILABLE_AT, DESCRIPTORS_AT, DISCARD, ENTRIES, FLUSH, MEMORY_BYTES, Memory, READ, SLOTS,
    USED_AT, USER_ADDRESS, WRITE, WRITE_ZEROES,
};

/// A monitor's connection to the server of the machine's disk.
pub(crate) struct Monitor {
    pub(crate) frontend: Frontend,
    pub(crate) kick: EventFd,
    pub(crate) call: EventFd,
    /// The connection.
    pub(crate) stream: UnixStream,
}

/// The features that the driver asks for, of those that are offered.
pub(crate) const DRIVER_FEATURES: u64 =
    1 << 9 | 1 << 12 | 1 << 13 | 1 << 14 | 1 << 28 | 1 << 30 | 1 << 32;

impl Monitor {
    /// Connects to the server at `socket`, and agrees on features.
    pub(crate) fn connect(socket: &Path, features: u64) -> Self {
        let stream = UnixStream::connect(socket).expect("the server listens");
        let own = stream.try_clone().expect("a descriptor");
        let mut frontend = Frontend::from_stream(own, 64);
        frontend.set_owner().expect("owned");
        let offered = frontend.get_features().expect("features");
        frontend.set_features(offered & features).expect("agreed");
        let protocol = frontend.get_protocol_features().expect("features");
        let wanted = VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD;
        frontend.set_protocol_features(protocol & wanted).expect("agreed");
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        let [kick, call] = [0; 2].map(|_| EventFd::new(0).expect("an eventfd"));
        Self { frontend, kick, call, stream }
    }

    /// Returns `len` bytes of the configuration.
    pub(crate) fn configuration(&mut self, len: u32) -> Vec<u8> {
        let empty = vec![0; len as usize];
        let flags = VhostUserConfigFlags::WRITABLE;
        self.frontend.get_config(0, len, flags, &empty).expect("a configuration").1
    }

    /// Asks for memory for requests in flight.
    pub(crate) fn inflight(&mut self) -> (VhostUserInflight, File) {
        let wanted = VhostUserInflight::new(0, 0, 1, ENTRIES);
        self.frontend.get_inflight_fd(&wanted).expect("memory")
    }

    /// Passes the memory, and starts the queue with its next request at `base`.
    pub(crate) fn start(
        &mut self,
        memory: &Memory,
        inflight: Option<&(VhostUserInflight, File)>,
        base: u16,
    ) -> vhost::Result<()> {
        if let Some((described, file)) = inflight {
            self.frontend.set_inflight_fd(described, file.as_raw_fd())?;
        }
        let region = VhostUserMemoryRegionInfo {
            guest_phys_addr: 0,
            memory_size: MEMORY_BYTES,
            userspace_addr: USER_ADDRESS,
            mmap_offset: 0,
            mmap_handle: memory.file.as_raw_fd(),
        };
        self.frontend.set_mem_table(&[region])?;
        self.frontend.set_vring_num(0, ENTRIES)?;
        self.frontend.set_vring_base(0, base)?;
        let addresses = VringConfigData {
            queue_max_size: 1024,
            queue_size: ENTRIES,
            flags: 0,
            desc_table_addr: USER_ADDRESS + DESCRIPTORS_AT,
            used_ring_addr: USER_ADDRESS + USED_AT,
            avail_ring_addr: USER_ADDRESS + AVAILABLE_AT,
            log_addr: None,
        };
        self.frontend.set_vring_addr(0, &addresses)?;
        self.frontend.set_vring_call(0, &self.call)?;
        self.frontend.set_vring_kick(0, &self.kick)?;
        self.frontend.set_vring_enable(0, true)
    }

    /// Waits until the machine has `answers` in all.
    pub(crate) fn await_answers(&self, memory: &Memory, answers: u16) {
        while memory.used() != answers {
            await_event(&self.call);
        }
    }
}

/// A disk of a machine, as its programs use it.
pub(crate) struct MachineDisk {
    memory: Arc<Memory>,
    /// The connection lives as long as the disk.
    _monitor: Monitor,
    kick: EventFd,
    driver: Arc<Driver>,
    interrupts: Option<JoinHandle<()>>,
    geometry: Geometry,
}

struct Driver {
    call: EventFd,
    free: Mutex<Vec<u16>>,
    freed: Condvar,
    waiting: Mutex<Vec<Option<Sender<()>>>>,
    is_over: AtomicBool,
}

impl MachineDisk {
    /// Makes a machine whose disk is at `socket`. `like` has the promises that no configuration
    /// tells.
    pub(crate) fn new(socket: &Path, like: &Geometry) -> Self {
        let memory = Arc::new(Memory::new());
        let mut monitor = Monitor::connect(socket, DRIVER_FEATURES);
        let inflight = monitor.inflight();
        monitor.start(&memory, Some(&inflight), 0).expect("started");
        let configuration = monitor.configuration(60);
        let number = |at: usize| {
            u32::from_le_bytes(configuration[at..at + 4].try_into().expect("four bytes"))
        };
        let sectors = u64::from(number(0)) | u64::from(number(4)) << 32;
        let block_bytes = number(20);
        let blocks = sectors * 512 / u64::from(block_bytes);
        let geometry = Geometry { blocks, block_bytes, fast_zero: false, ..*like };
        let driver = Arc::new(Driver {
            call: monitor.call.try_clone().expect("a descriptor"),
            free: Mutex::new((0..SLOTS).collect()),
            freed: Condvar::new(),
            waiting: Mutex::new((0..SLOTS).map(|_| None).collect()),
            is_over: AtomicBool::new(false),
        });
        let (of_thread, read) = (Arc::clone(&driver), Arc::clone(&memory));
        let interrupts = std::thread::spawn(move || of_thread.deliver(&read));
        let kick = monitor.kick.try_clone().expect("a descriptor");
        Self { memory, _monitor: monitor, kick, driver, interrupts: Some(interrupts), geometry }
    }

    fn request(&self, kind: u32, first_sector: u64, data: &[u8], answer: &mut [u8]) -> u8 {
        let slot = self.driver.take_slot();
        let (told, answered): (_, Receiver<()>) = channel();
        {
            let mut waiting = self.driver.waiting.lock().expect("no panic");
            waiting[usize::from(slot)] = Some(told);
            let answer_bytes = u32::try_from(answer.len()).expect("short");
            self.memory.submit(slot, kind, first_sector, data, answer_bytes);
        }
        self.kick.write(1).expect("notified");
        answered.recv().expect("an answer");
        self.memory.data(slot, answer);
        let status = self.memory.status(slot);
        self.driver.give_slot(slot);
        status
    }

    fn range(offset: u64, len: u64, flags: u32) -> [u8; 16] {
        let mut range = [0; 16];
        range[..8].copy_from_slice(&(offset / 512).to_le_bytes());
        range[8..12].copy_from_slice(&u32::try_from(len / 512).expect("short").to_le_bytes());
        range[12..].copy_from_slice(&flags.to_le_bytes());
        range
    }
}

impl Driver {
    fn take_slot(&self) -> u16 {
        let mut free = self.free.lock().expect("no panic");
        loop {
            match free.pop() {
                Some(slot) => return slot,
                None => free = self.freed.wait(free).expect("no panic"),
            }
        }
    }

    fn give_slot(&self, slot: u16) {
        self.free.lock().expect("no panic").push(slot);
        self.freed.notify_one();
    }

    fn deliver(&self, memory: &Memory) {
        let mut seen = 0_u16;
        while !self.is_over.load(Ordering::Acquire) {
            await_event(&self.call);
            while seen != memory.used() {
                let slot = memory.used_head(seen) / 4;
                let waiting = self.waiting.lock().expect("no panic")[usize::from(slot)].take();
                waiting.expect("one answer for each request").send(()).expect("it waits");
                seen = seen.wrapping_add(1);
            }
        }
    }
}

impl BlockDevice for MachineDisk {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        // A kernel checks ranges before its driver sees them.
        self.geometry.check_operation(operation)?;
        let (offset, len) = operation.range();
        let none = &mut [];
        let status = match operation {
            Operation::Read { buf, .. } => self.request(READ, offset / 512, &[], buf),
            Operation::Write { data, flags, .. } => {
                let status = self.request(WRITE, offset / 512, data, none);
                if flags.fua && status == 0 { self.request(FLUSH, 0, &[], none) } else { status }
            }
            Operation::Flush => self.request(FLUSH, 0, &[], none),
            Operation::Discard { .. } => {
                self.request(DISCARD, 0, &Self::range(offset, len, 0), none)
            }
            Operation::WriteZeroes { flags, .. } => {
                let range = Self::range(offset, len, flags.may_unmap.into());
                self.request(WRITE_ZEROES, 0, &range, none)
            }
            // Virtual disks have no such question.
            Operation::Status { extents, .. } => {
                extents.extend((len > 0).then(|| Extent::data(offset, len)));
                0
            }
        };
        match status {
            0 => Ok(()),
            2 => Err(DeviceError::new(DeviceErrorKind::Unsupported, "unsupported")),
            _ => Err(DeviceError::new(DeviceErrorKind::Io, "failed")),
        }
    }
}

impl Drop for MachineDisk {
    fn drop(&mut self) {
        self.driver.is_over.store(true, Ordering::Release);
        let _ = self.driver.call.write(1);
        if let Some(interrupts) = self.interrupts.take() {
            interrupts.join().expect("each answer is expected");
        }
    }
}

/// Waits for `event`, which the server has made one that no read waits for.
fn await_event(event: &EventFd) {
    let epoll = Epoll::new().expect("an epoll");
    let wanted = EpollEvent::new(EventSet::IN, 0);
    epoll.ctl(ControlOperation::Add, event.as_raw_fd(), wanted).expect("added");
    epoll.wait(-1, &mut [EpollEvent::default()]).expect("it waits");
    let _ = event.read();
}
