//! Serves a device of one's own over NBD: a mirror, which writes to two devices and reads from the
//! first.
//!
//! `cargo run -p tidegate-serve --example nbd_mirror -- unix:/tmp/mirror.sock`, and in another
//! shell `nbdinfo nbd+unix:///?socket=/tmp/mirror.sock`.

use std::error::Error;
use std::sync::Arc;

use tidegate::device::memory::MemoryDevice;
use tidegate::device::{BlockDevice, Geometry, Operation, Result};
use tidegate_serve::nbd::{Export, ListenAddress, ServerBuilder, StopHandle};

/// Two devices of one geometry with equal content.
struct Mirror {
    first: Arc<dyn BlockDevice>,
    second: Arc<dyn BlockDevice>,
}

impl BlockDevice for Mirror {
    fn geometry(&self) -> Geometry {
        self.first.geometry()
    }

    fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        if !matches!(operation, Operation::Read { .. } | Operation::Status { .. }) {
            self.second.run(operation)?;
        }
        self.first.run(operation)
    }
}

fn memory() -> Result<Arc<dyn BlockDevice>> {
    Ok(Arc::new(MemoryDevice::new(4096, 4096)?))
}

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let address = std::env::args().nth(1).ok_or("usage: nbd_mirror unix:PATH|tcp:HOST:PORT")?;
    let mirror = Mirror { first: memory()?, second: memory()? };
    // Nothing stops this server but a signal.
    serve(Arc::new(mirror), &address.parse()?, &StopHandle::new()?)
}

/// Serves `device` as the default export until `stop` says so.
fn serve(
    device: Arc<dyn BlockDevice>,
    address: &ListenAddress,
    stop: &StopHandle,
) -> std::result::Result<(), Box<dyn Error>> {
    let export = Export::new("", device).description("a mirror of two devices");
    let server = ServerBuilder::new().export(export).bind(std::slice::from_ref(address))?;
    println!("listening at {address}");
    Ok(server.run(stop)?)
}

#[cfg(test)]
mod tests {
    use std::process::{Command, ExitStatus};
    use tidegate::device::BlockDeviceExt;

    use super::*;

    fn nbdcopy(from: &str, to: &str) -> ExitStatus {
        let status = Command::new("nbdcopy").args([from, to]).status();
        status.expect("nbdcopy runs: install the Debian package libnbd-bin")
    }

    /// Stops the server when it is dropped, so that a failed test does not wait for it.
    struct Stop<'a>(&'a StopHandle);

    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.stop();
        }
    }

    #[test]
    fn a_client_writes_to_both_devices() {
        let dir = tempfile::tempdir().unwrap();
        let (socket, source) = (dir.path().join("nbd.sock"), dir.path().join("source"));
        let content: Vec<u8> = (0..16 << 20).map(|byte: u32| (byte / 4096 % 251) as u8).collect();
        std::fs::write(&source, &content).unwrap();
        let (first, second) = (memory().unwrap(), memory().unwrap());
        let mirror = Arc::new(Mirror { first: Arc::clone(&first), second: Arc::clone(&second) });
        let (stop, address) = (StopHandle::new().unwrap(), ListenAddress::Unix(socket.clone()));
        std::thread::scope(|scope| {
            let _stop = Stop(&stop);
            let server = scope.spawn(|| serve(mirror, &address, &stop).unwrap());
            while !socket.exists() && !server.is_finished() {
                std::thread::yield_now();
            }
            let uri = format!("nbd+unix:///?socket={}", socket.display());
            let status = nbdcopy(source.to_str().unwrap(), &uri);
            assert!(status.success(), "nbdcopy to {uri}: {status}");
        });
        for device in [first, second] {
            let mut found = vec![0; content.len()];
            device.read(0, &mut found).unwrap();
            assert!(found == content, "a device of the mirror does not hold what was copied");
        }
    }
}
