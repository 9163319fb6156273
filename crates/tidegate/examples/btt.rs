//! Creates a pool with a BTT, writes a block, and opens the pool again as after a crash.
//!
//! `cargo run -p tidegate --example btt -- /mnt/pmem/pool` uses a file on persistent memory.
//! Without a path the pool is a new file in the directory for temporary files.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;

use tidegate::btt::{self, Btt, BttOptions};
use tidegate::device::{BlockDevice, BlockDeviceExt, WriteFlags};
use tidegate::pmem::{Region, RegionOptions};

fn main() -> Result<(), Box<dyn Error>> {
    match std::env::args().nth(1) {
        Some(path) => run(Path::new(&path)),
        None => run(&tempfile::tempdir()?.path().join("pool")),
    }
}

fn run(path: &Path) -> Result<(), Box<dyn Error>> {
    write(path)?;
    read(path)
}

/// Each write is durable when it returns, and each block is all old or all new after a crash.
fn write(path: &Path) -> Result<(), Box<dyn Error>> {
    let options = RegionOptions { create_bytes: Some(32 << 20), ..RegionOptions::default() };
    let region = Arc::new(Region::open(path, &options)?);
    println!("{}: domain {}", path.display(), region.domain());
    btt::create(&region, &BttOptions::default())?;
    let device = Btt::open(region)?;
    let block = vec![7; device.geometry().block_bytes as usize];
    device.write(0, &block, WriteFlags::default())?;
    Ok(())
}

/// Opening is recovery: it completes the writes that a crash interrupted.
fn read(path: &Path) -> Result<(), Box<dyn Error>> {
    let region = Arc::new(Region::open(path, &RegionOptions::default())?);
    let device = Btt::open(region)?;
    let mut block = vec![0; device.geometry().block_bytes as usize];
    device.read(0, &mut block)?;
    assert!(block.iter().all(|&byte| byte == 7), "the write was acknowledged");
    println!("{} blocks, block 0 holds what was written", device.geometry().blocks);
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn it_runs() {
        super::run(&tempfile::tempdir().unwrap().path().join("pool")).unwrap();
    }
}
