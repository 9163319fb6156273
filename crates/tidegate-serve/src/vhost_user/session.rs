//! One connection of a machine's monitor: its messages, and the queues that they start and stop.
//!
//! Invariants:
//! 1. A queue has a thread while it is enabled and has its addresses, its memory and an event for
//!    the guest's notifications.
//! 2. The answer to "stop the queue" comes once each request of the queue is answered.
//! 3. No message waits for anything but requests of queues, and none ends the process.

use std::fs::File;
use std::io;
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use vhost::VhostUserMemoryRegionBase;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig,
    VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};
use vm_memory::GuestAddress;

use super::abi::{Configuration, accepted, feature, features};
use super::event::Event;
use super::guest::{Guest, Part};
use super::inflight::Inflight;
use super::queue::{Events, Running};
use super::ring::{Disk, Mail, Parts, queue};
use super::{QUEUE_ENTRIES_MAX, QUEUES_MAX, REGIONS_MAX};
use crate::budget::{Budget, Lease, Wakes};
use crate::log::Log;

/// The server's side that all connections have in common.
pub(super) struct Service {
    pub(super) disk: Arc<Disk>,
    pub(super) budget: Arc<Budget>,
    /// Describes the disk: a machine has one until it is reset.
    pub(super) mark: u64,
    /// Whether the end of a server by a kill loses no write that it has acknowledged.
    pub(super) survives_a_kill: bool,
    /// The memory for requests in flight of the last machine.
    pub(super) claimed: Mutex<Option<Arc<Inflight>>>,
    pub(super) log: Arc<Log>,
}

/// A queue, as the monitor has described it so far.
#[derive(Default)]
struct Vring {
    entries: u16,
    next_available: u16,
    /// Guest addresses of the descriptors, the available ring and the used ring.
    addresses: Option<[GuestAddress; 3]>,
    kick: Option<Arc<Event>>,
    call: Arc<Mutex<Option<Event>>>,
    fault: Option<Arc<Event>>,
    is_enabled: bool,
    running: Option<Running>,
}

/// A connection. Its drop stops all queues, once their requests are answered.
pub(super) struct Session {
    service: Arc<Service>,
    features: u64,
    guest: Option<Arc<RwLock<Arc<Guest>>>>,
    inflight: Option<Arc<Inflight>>,
    vrings: Vec<Vring>,
}

impl Session {
    pub(super) fn new(service: Arc<Service>) -> Self {
        let vrings = (0..QUEUES_MAX).map(|_| Vring::default()).collect();
        Self { service, features: 0, guest: None, inflight: None, vrings }
    }

    /// Stops all queues, once their requests are answered.
    fn stop_all(&mut self) {
        for vring in &self.vrings {
            vring.running.iter().for_each(Running::leave);
        }
        self.vrings.iter_mut().for_each(Vring::stop);
    }

    fn vring(&mut self, index: u32) -> Result<&mut Vring> {
        self.vrings.get_mut(index as usize).ok_or(Error::InvalidParam)
    }

    /// Changes a queue that does not run, and starts or stops it as its state then says.
    fn change(&mut self, index: u32, change: impl FnOnce(&mut Vring) -> Result<()>) -> Result<()> {
        let vring = self.vring(index)?;
        vring.stop();
        change(vring)?;
        self.start_if_ready(index)
    }

    fn start_if_ready(&mut self, index: u32) -> Result<()> {
        let (service, guest) = (Arc::clone(&self.service), self.guest.clone());
        let (features, inflight) = (self.features, self.inflight.clone());
        let vring = self.vring(index)?;
        let (Some(guest), Some(addresses), Some(kick)) = (guest, vring.addresses, &vring.kick)
        else {
            return Ok(());
        };
        if !vring.is_enabled || vring.running.is_some() {
            return Ok(());
        }
        if inflight.is_none() && !service.survives_a_kill {
            let what = "the disk has a write cache, and this monitor has no memory for requests in \
                        flight: it could not tell that a kill has lost writes";
            return Err(Error::ReqHandlerError(io::Error::other(what)));
        }
        let number = u16::try_from(index).map_err(|_| Error::InvalidParam)?;
        let mark = |inflight: Arc<Inflight>| inflight.queue(number, vring.entries);
        let marks = inflight.map(mark).transpose().map_err(failed)?;
        let mailbox = Arc::new(Mail::new().map_err(failed)?);
        let client = Arc::clone(&mailbox) as Arc<dyn Wakes>;
        let parts = Parts {
            number,
            queue: queue(vring.entries, addresses, features, vring.next_available)
                .map_err(failed)?,
            guest,
            call: Arc::clone(&vring.call),
            marks,
            writes_through: features & feature::FLUSH == 0
                && service.disk.rules.geometry.volatile_cache,
            lease: Lease::new(Arc::clone(&service.budget), client),
            mailbox,
        };
        let events = Events { kick: Arc::clone(kick), fault: vring.fault.clone() };
        let disk = Arc::clone(&service.disk);
        let running = Running::start(disk, parts, events, Arc::clone(&service.log));
        vring.running = Some(running.map_err(failed)?);
        Ok(())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.stop_all();
    }
}

impl Vring {
    /// Stops the queue, once its requests are answered.
    fn stop(&mut self) {
        if let Some(next) = self.running.take().and_then(Running::stop) {
            self.next_available = next;
        }
    }
}

fn failed(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::ReqHandlerError(io::Error::other(error))
}

/// Returns the refusal of a message whose feature was not offered.
fn not_offered<T>() -> Result<T> {
    Err(Error::InvalidOperation("the feature was not offered"))
}

impl VhostUserBackendReqHandlerMut for Session {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        self.stop_all();
        self.vrings.iter_mut().for_each(|vring| vring.is_enabled = false);
        self.features = 0;
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(features(&self.service.disk.rules))
    }

    fn set_features(&mut self, acknowledged: u64) -> Result<()> {
        let unknown = acknowledged & !accepted(&self.service.disk.rules);
        if unknown != 0 {
            let what = format!("the machine has features that no such disk has: {unknown:#x}");
            return Err(Error::ReqHandlerError(io::Error::other(what)));
        }
        self.features = acknowledged;
        if acknowledged & feature::PROTOCOL == 0 {
            // Such a monitor has no message that enables a queue.
            (0..u32::from(QUEUES_MAX)).try_for_each(|index| self.set_enabled(index, true))?;
        }
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD
            | VhostUserProtocolFeatures::RESET_DEVICE)
    }

    fn set_protocol_features(&mut self, _features: u64) -> Result<()> {
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(QUEUES_MAX.into())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<Vec<VhostUserMemoryRegionBase>>> {
        if regions.len() > REGIONS_MAX {
            return Err(Error::InvalidParam);
        }
        let part = |(region, file): (&VhostUserMemoryRegion, File)| Part {
            file,
            offset: region.mmap_offset,
            bytes: region.memory_size,
            guest_address: region.guest_phys_addr,
            user_address: region.user_addr,
        };
        let guest = Guest::map(regions.iter().zip(files).map(part).collect());
        let guest = Arc::new(guest.map_err(Error::ReqHandlerError)?);
        match &self.guest {
            Some(present) => {
                *present.write() = guest;
                let running = self.vrings.iter().filter_map(|vring| vring.running.as_ref());
                running.for_each(Running::wake);
            }
            None => self.guest = Some(Arc::new(RwLock::new(guest))),
        }
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, entries: u32) -> Result<()> {
        let entries = u16::try_from(entries).map_err(|_| Error::InvalidParam)?;
        if !entries.is_power_of_two() || entries > QUEUE_ENTRIES_MAX {
            return Err(Error::InvalidParam);
        }
        self.change(index, |vring| {
            vring.entries = entries;
            Ok(())
        })
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptors: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        let guest = self.guest.clone().ok_or(Error::InvalidParam)?;
        let guest = Arc::clone(&guest.read());
        let address = |user| guest.guest_address(user).ok_or(Error::InvalidParam);
        let addresses = [address(descriptors)?, address(available)?, address(used)?];
        self.change(index, |vring| {
            vring.addresses = Some(addresses);
            Ok(())
        })
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let base = u16::try_from(base).map_err(|_| Error::InvalidParam)?;
        self.change(index, |vring| {
            vring.next_available = base;
            Ok(())
        })
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let vring = self.vring(index)?;
        vring.stop();
        vring.kick = None;
        *vring.call.lock() = None;
        Ok(VhostUserVringState::new(index, vring.next_available.into()))
    }

    fn set_vring_kick(&mut self, index: u8, file: Option<File>) -> Result<()> {
        // Without an event the queue would have to be looked at all the time.
        let file = file.ok_or(Error::InvalidParam)?;
        let kick = Arc::new(Event::new(file).map_err(Error::ReqHandlerError)?);
        self.change(index.into(), |vring| {
            vring.kick = Some(kick);
            Ok(())
        })
    }

    fn set_vring_call(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let call = file.map(Event::new).transpose().map_err(Error::ReqHandlerError)?;
        let vring = self.vring(index.into())?;
        *vring.call.lock() = call;
        // Answers since the last event was set may not have been noticed.
        vring.call.lock().iter().for_each(Event::signal);
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, file: Option<File>) -> Result<()> {
        // Another file gets no word of faults.
        let fault = file.and_then(|file| Event::new(file).ok()).map(Arc::new);
        self.change(index.into(), |vring| {
            vring.fault = fault;
            Ok(())
        })
    }

    fn set_vring_enable(&mut self, index: u32, is_enabled: bool) -> Result<()> {
        self.set_enabled(index, is_enabled)
    }

    fn get_config(
        &mut self,
        offset: u32,
        size: u32,
        _flags: VhostUserConfigFlags,
    ) -> Result<Vec<u8>> {
        Ok(Configuration::new(&self.service.disk.rules).part(offset, size))
    }

    fn set_config(
        &mut self,
        _offset: u32,
        _buf: &[u8],
        _flags: VhostUserConfigFlags,
    ) -> Result<()> {
        Err(Error::InvalidOperation("the configuration cannot be changed"))
    }

    fn get_inflight_fd(&mut self, wanted: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let (queues, entries) = (wanted.num_queues, wanted.queue_size);
        if !(1..=QUEUES_MAX).contains(&queues) || !(1..=QUEUE_ENTRIES_MAX).contains(&entries) {
            return Err(Error::InvalidParam);
        }
        Inflight::create(queues, entries).map_err(Error::ReqHandlerError)
    }

    fn set_inflight_fd(&mut self, described: &VhostUserInflight, file: File) -> Result<()> {
        if self.vrings.iter().any(|vring| vring.running.is_some()) {
            return Err(Error::InvalidOperation("a queue runs"));
        }
        let inflight = Inflight::open(described, file).map_err(Error::ReqHandlerError)?;
        let Service { mark, survives_a_kill, .. } = *self.service;
        let mut claimed = self.service.claimed.lock();
        let is_own = claimed.as_ref().is_some_and(|claimed| claimed.file() == inflight.file());
        inflight.claim(mark, survives_a_kill, is_own).map_err(failed)?;
        *claimed = Some(Arc::clone(&inflight));
        drop(claimed);
        self.inflight = Some(inflight);
        Ok(())
    }

    fn set_gpu_socket(&mut self, _gpu_backend: GpuBackend) -> Result<()> {
        not_offered()
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        not_offered()
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        not_offered()
    }

    fn add_mem_region(
        &mut self,
        _region: &VhostUserSingleMemoryRegion,
        _file: File,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<VhostUserMemoryRegionBase>> {
        not_offered()
    }

    fn remove_mem_region(&mut self, _region: &VhostUserSingleMemoryRegion) -> Result<()> {
        not_offered()
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _file: File,
    ) -> Result<Option<File>> {
        not_offered()
    }

    fn check_device_state(&mut self) -> Result<()> {
        not_offered()
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        not_offered()
    }

    fn set_log_base(&mut self, _log: &VhostUserLog, _file: File) -> Result<()> {
        not_offered()
    }
}

impl Session {
    fn set_enabled(&mut self, index: u32, is_enabled: bool) -> Result<()> {
        self.change(index, |vring| {
            vring.is_enabled = is_enabled;
            Ok(())
        })
    }
}
