//! Serves zeroed memory over NBD until it is killed: `serve_memory unix:/tmp/nbd.sock 1073741824`.

use std::sync::Arc;

use tidegate::device::memory::MemoryDevice;
use tidegate_serve::nbd::{Export, ListenAddress, ServerBuilder, StopHandle};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let address: ListenAddress = arguments.next().ok_or("expected an address")?.parse()?;
    let size_bytes: u64 = arguments.next().map_or(Ok(1 << 30), |size| size.parse())?;
    let device = Arc::new(MemoryDevice::new(512, size_bytes / 512)?);
    let server = ServerBuilder::new().export(Export::new("", device)).bind(&[address])?;
    Ok(server.run(&StopHandle::new()?)?)
}
