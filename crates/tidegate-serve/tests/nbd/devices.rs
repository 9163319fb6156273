//! Devices that make things happen: gates that a test opens, and failures.

use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender, unbounded};
use parking_lot::Mutex;
use tidegate::device::memory::MemoryDevice;
use tidegate::device::{
    Attempt, BlockDevice, BlockDeviceExt, Context, DeviceError, DeviceErrorKind, Extent, Geometry,
    Operation, Result, WriteFlags, ZeroFlags,
};

use crate::harness::memory;

/// One call of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Call {
    Read(u64, usize),
    Write(u64, usize, WriteFlags),
    Flush,
    Discard(u64, u64),
    WriteZeroes(u64, u64, ZeroFlags),
    Status(u64, u64, usize),
}

/// Memory that records its calls, and fails or waits where it is told to.
pub(crate) struct Probe {
    memory: Arc<MemoryDevice>,
    /// It hands every request back that is to run at once.
    is_slow: bool,
    calls: Mutex<Vec<Call>>,
    fail: Option<DeviceErrorKind>,
    extents: Vec<Extent>,
    gate: Option<(Sender<Arrival>, u64)>,
}

/// A call that waits at the gate.
pub(crate) struct Arrival {
    pub(crate) call: Call,
    open: Sender<()>,
}

impl Arrival {
    /// Lets the call go on.
    pub(crate) fn open(self) {
        self.open.send(()).expect("the call waits");
    }
}

impl Probe {
    /// 4 MiB of memory at memory speed.
    pub(crate) fn new() -> Self {
        Self {
            memory: memory(4 << 20),
            is_slow: false,
            calls: Mutex::default(),
            fail: None,
            extents: Vec::new(),
            gate: None,
        }
    }

    /// Fails every call with `kind`.
    pub(crate) fn failing(kind: DeviceErrorKind) -> Self {
        Self { fail: Some(kind), ..Self::new() }
    }

    /// Tells `extents` as its allocation.
    pub(crate) fn with_extents(extents: Vec<Extent>) -> Self {
        Self { extents, ..Self::new() }
    }

    /// A slow device whose calls below `gate_bytes` wait at a gate.
    pub(crate) fn gated(gate_bytes: u64) -> (Arc<Self>, Receiver<Arrival>) {
        let (arrivals, gate) = unbounded();
        let mut probe = Self::new();
        probe.is_slow = true;
        probe.gate = Some((arrivals, gate_bytes));
        (Arc::new(probe), gate)
    }

    pub(crate) fn calls(&self) -> Vec<Call> {
        self.calls.lock().clone()
    }

    /// Reads past the gate.
    pub(crate) fn content(&self, offset: u64, buf: &mut [u8]) {
        self.memory.read(offset, buf).expect("memory is read");
    }

    fn called(&self, call: Call, offset: u64) -> Result<()> {
        self.calls.lock().push(call);
        if let Some((arrivals, gate_bytes)) =
            self.gate.as_ref().filter(|(_, below)| offset < *below)
        {
            let (open, opened) = unbounded();
            arrivals.send(Arrival { call, open }).map_err(|_| closed(*gate_bytes))?;
            opened.recv().map_err(|_| closed(*gate_bytes))?;
        }
        match self.fail {
            Some(kind) => Err(DeviceError::new(kind, format!("told to fail at {offset}"))),
            None => Ok(()),
        }
    }
}

fn closed(gate_bytes: u64) -> DeviceError {
    DeviceError::new(
        DeviceErrorKind::Io,
        format!("the gate of the first {gate_bytes} bytes is gone"),
    )
}

impl BlockDevice for Probe {
    fn geometry(&self) -> Geometry {
        self.memory.geometry()
    }

    fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        let (offset, call) = match *operation {
            Operation::Read { offset, ref buf } => (offset, Call::Read(offset, buf.len())),
            Operation::Write { offset, data, flags } => {
                (offset, Call::Write(offset, data.len(), flags))
            }
            Operation::Flush => (u64::MAX, Call::Flush),
            Operation::Discard { offset, len } => (offset, Call::Discard(offset, len)),
            Operation::WriteZeroes { offset, len, flags } => {
                (offset, Call::WriteZeroes(offset, len, flags))
            }
            Operation::Status { offset, len, most, .. } => {
                (offset, Call::Status(offset, len, most))
            }
        };
        self.called(call, offset)?;
        match operation {
            Operation::Flush | Operation::Discard { .. } => Ok(()),
            Operation::Status { extents, .. } => {
                extents.clone_from(&self.extents);
                Ok(())
            }
            _ => self.memory.run(operation),
        }
    }

    fn attempt(&self, operation: &mut Operation<'_>, _context: Context) -> Attempt {
        if self.is_slow { Attempt::WouldBlock } else { Attempt::Done(self.run(operation)) }
    }
}
