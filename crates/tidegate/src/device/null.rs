//! A device without a medium, to measure the layers above: it drops writes and reads zeroes.

use super::{Attempt, BlockDevice, Context, Extent, Geometry, Operation, Result};

/// A device that keeps no data. It breaks invariant 3 of [`device`](super) on purpose.
#[derive(Debug)]
pub struct NullDevice {
    geometry: Geometry,
}

impl NullDevice {
    /// Makes a device of `blocks` blocks of `block_bytes` bytes.
    ///
    /// # Errors
    /// Fails as [`Unsupported`](super::DeviceErrorKind::Unsupported) if `block_bytes` is no power
    /// of two from 512 to 4096, or the size does not fit 64 bits.
    pub fn new(block_bytes: u32, blocks: u64) -> Result<Self> {
        Ok(Self::like(Geometry::in_memory(block_bytes, blocks)?))
    }

    /// Makes a device of this geometry.
    pub fn like(geometry: Geometry) -> Self {
        Self { geometry: Geometry { keeps_data: false, ..geometry } }
    }
}

impl BlockDevice for NullDevice {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        self.geometry.check_operation(operation)?;
        match *operation {
            Operation::Read { ref mut buf, .. } => buf.fill(0),
            Operation::Status { offset, len, ref mut extents, .. } => {
                **extents = vec![Extent { offset, len, hole: true, zero: true }];
            }
            _ => {}
        }
        Ok(())
    }

    fn attempt(&self, operation: &mut Operation<'_>, _context: Context) -> Attempt {
        Attempt::Done(self.run(operation))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::conformance::{self, Promises};
    use crate::device::{BlockDeviceExt, DeviceErrorKind, WriteFlags};

    #[test]
    fn it_conforms_but_keeps_nothing() {
        let device = NullDevice::new(4096, 256).unwrap();
        conformance::check(&device, Promises { keeps_data: false, whole_blocks: false });
    }

    #[test]
    fn writes_are_swallowed() {
        let device = NullDevice::new(512, 8).unwrap();
        device.write(0, &[7; 512], WriteFlags::default()).unwrap();
        let mut buf = [1; 512];
        device.read(0, &mut buf).unwrap();
        assert_eq!(buf, [0; 512]);
    }

    #[test]
    fn impossible_shapes_are_refused() {
        for (block_bytes, blocks) in [(0, 1), (256, 1), (1000, 1), (8192, 1), (4096, u64::MAX)] {
            let error = NullDevice::new(block_bytes, blocks).unwrap_err();
            assert_eq!(error.kind(), DeviceErrorKind::Unsupported, "{block_bytes} x {blocks}");
        }
    }
}
