//! `null:SIZE`: a device that accepts all writes and keeps no data.

use std::sync::Arc;

use super::observe::Observer;
use super::{BackingError, OpenBacking, Opening, Scheme};
use crate::device::null::NullDevice;
use crate::log::identity;
use crate::size::parse_bytes;

const BLOCK_BYTES: u32 = 4096;
/// Keeps these identities apart from the identities of files and disks.
const NULL_TYPE: i32 = -3;

/// `null:SIZE`.
pub(super) static NULL: Scheme = Scheme {
    name: "null",
    syntax: "null:SIZE",
    about: "a device that keeps nothing, for measurements",
    example: "null:16G",
    identified_by: "its size, as it is written",
    parse,
    place: |_| None,
    open,
};

fn parse(rest: &str) -> Result<String, String> {
    parse_bytes(rest).map_err(|error| format!("`null:{rest}` has no size: {error}"))?;
    Ok(rest.to_owned())
}

fn open(rest: &str, _opening: &Opening<'_>) -> Result<OpenBacking, BackingError> {
    let blocks = parse_bytes(rest).unwrap_or(0) / u64::from(BLOCK_BYTES);
    let device = Arc::new(NullDevice::new(BLOCK_BYTES, blocks)?);
    let identity = identity(&[0; 16], NULL_TYPE, rest.as_bytes());
    let observer = Observer::of_device(identity, Arc::<NullDevice>::clone(&device));
    Ok(OpenBacking {
        seen: observer.observe_device()?,
        observer,
        device,
        name: format!("null:{rest}").into_bytes(),
        holds: None,
        guard: None,
        table_sector_bytes: None,
    })
}
