//! The server's description of an export, and the rules that a device derives.

use super::error::NbdError;
use super::protocol::export_flag::{
    READ_ONLY, SEND_FAST_ZERO, SEND_FLUSH, SEND_FUA, SEND_TRIM, SEND_WRITE_ZEROES,
};
use crate::device::{BLOCK_BYTES_MIN, Geometry, is_block_bytes};

/// Most bytes of one request, which every server accepts; less if the server's limit is lower.
pub(super) const REQUEST_BYTES_MAX: u32 = 32 << 20;
/// Most bytes of a write of zeroes as data.
const ZEROES_BYTES_MAX: u32 = 1 << 20;
/// The block sizes of a server that does not state them.
const UNTOLD: (u32, u32, u32) = (1, 4096, REQUEST_BYTES_MAX);

/// An export, as the server describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NbdExport {
    /// The server's own name for the export if it sends one, else the requested name.
    pub name: String,
    /// The server's description; often empty.
    pub description: String,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Transmission flags: bits of [`export_flag`](super::protocol::export_flag).
    pub flags: u16,
    /// Smallest, preferred and largest request in bytes.
    pub block_sizes: (u32, u32, u32),
}

impl NbdExport {
    /// Makes the export called `name`, before the server has described it.
    pub(super) fn named(name: &str) -> Self {
        let (name, description) = (name.to_owned(), String::new());
        Self { name, description, size_bytes: 0, flags: 0, block_sizes: UNTOLD }
    }

    pub(super) fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

/// Limits of requests to an export.
#[derive(Debug, Clone)]
pub(super) struct Rules {
    pub(super) export: NbdExport,
    pub(super) geometry: Geometry,
    /// Most bytes of one request: whole blocks.
    pub(super) request_bytes_max: u32,
    /// Most bytes of zeroes that are written as data: whole blocks.
    pub(super) zeroes_bytes_max: u32,
}

impl Rules {
    /// Makes the rules for `export`, with blocks of `block_bytes` bytes if server and size allow
    /// it.
    ///
    /// # Errors
    /// Fails as [`NbdError::Unfit`] if a device cannot use the export.
    pub(super) fn of(export: NbdExport, block_bytes: Option<u32>) -> Result<Self, NbdError> {
        let (minimum, preferred, maximum) = export.block_sizes;
        let block_bytes = whole_block_bytes(&export, block_bytes.unwrap_or(preferred))?;
        let whole = |bytes: u32| bytes.min(maximum) / block_bytes * block_bytes;
        let request_bytes_max = whole(REQUEST_BYTES_MAX);
        if request_bytes_max == 0 {
            return Err(NbdError::Unfit(format!(
                "requests of at most {maximum} bytes and at least {minimum}; \
                 expected at least one block of {block_bytes} bytes"
            )));
        }
        if !export.has(READ_ONLY | SEND_FLUSH) {
            let reason = "the server cannot flush (no NBD_FLAG_SEND_FLUSH), so that nothing \
                          written there could be made durable; expected one that can";
            return Err(NbdError::Unfit(reason.into()));
        }
        let geometry = Geometry {
            preferred_bytes: preferred.clamp(64 << 10, request_bytes_max.max(64 << 10)),
            read_only: export.has(READ_ONLY),
            fast_zero: export.has(SEND_FAST_ZERO),
            ..Geometry::plain(block_bytes, export.size_bytes / u64::from(block_bytes))
        };
        let zeroes_bytes_max = whole(ZEROES_BYTES_MAX);
        Ok(Self { export, geometry, request_bytes_max, zeroes_bytes_max })
    }

    /// Checks that these rules fit `is`, the export after a reconnection. An export may have grown:
    /// the device keeps its size.
    ///
    /// # Errors
    /// Fails as [`NbdError::Unfit`], naming the change.
    pub(super) fn check_again(&self, is: &NbdExport) -> Result<(), NbdError> {
        let was = &self.export;
        let needed = SEND_FLUSH | SEND_FUA | SEND_TRIM | SEND_WRITE_ZEROES | SEND_FAST_ZERO;
        let changed = if was.size_bytes > is.size_bytes {
            format!("it has {} bytes, expected at least {}", is.size_bytes, was.size_bytes)
        } else if (&was.name, &was.description) != (&is.name, &is.description) {
            format!(
                "it is {:?} ({:?}), expected {:?} ({:?})",
                is.name, is.description, was.name, was.description
            )
        } else if is.has(READ_ONLY) && !was.has(READ_ONLY) {
            "it is read-only now".to_owned()
        } else if was.flags & needed & !is.flags != 0 {
            format!("its flags are {:#x}, expected all of {:#x}", is.flags, was.flags & needed)
        } else if !self.geometry.block_bytes.is_multiple_of(is.block_sizes.0.max(1))
            || is.block_sizes.2 < self.request_bytes_max
        {
            format!("its block sizes are {:?}, expected {:?}", is.block_sizes, was.block_sizes)
        } else {
            return Ok(());
        };
        Err(NbdError::Unfit(format!("the export is another one after the reconnection: {changed}")))
    }
}

/// Returns the largest block size that divides the export: up to `most_bytes`, and at least the
/// server's smallest size.
///
/// # Errors
/// Fails as [`NbdError::Unfit`] if there is none.
fn whole_block_bytes(export: &NbdExport, most_bytes: u32) -> Result<u32, NbdError> {
    let (minimum, size_bytes) = (export.block_sizes.0, export.size_bytes);
    let least = minimum.max(BLOCK_BYTES_MIN);
    if !is_block_bytes(least) || !least.is_multiple_of(minimum.max(1)) {
        return Err(NbdError::Unfit(format!(
            "the smallest request has {minimum} bytes; expected a power of two up to 4096"
        )));
    }
    let sizes = least..=most_bytes.max(least);
    let fits = |size: &u32| sizes.contains(size) && size_bytes.is_multiple_of((*size).into());
    [4096, 2048, 1024, BLOCK_BYTES_MIN].into_iter().find(fits).ok_or_else(|| {
        let least_bytes = u64::from(least);
        let grown = size_bytes.checked_next_multiple_of(least_bytes);
        let grown = grown.unwrap_or(size_bytes / least_bytes * least_bytes);
        NbdError::Unfit(format!(
            "the export has {size_bytes} bytes, expected a multiple of {least}: its last bytes \
             are in no block, `truncate -s {grown}` of its image makes it one"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn export(size_bytes: u64, block_sizes: (u32, u32, u32)) -> NbdExport {
        NbdExport { size_bytes, flags: SEND_FLUSH, block_sizes, ..NbdExport::named("x") }
    }

    #[test]
    fn blocks_are_as_large_as_export_and_server_allow() {
        for (size, sizes, expected) in [
            (1 << 20, UNTOLD, 4096),
            ((1 << 20) + 512, UNTOLD, 512),
            (1 << 20, (512, 65536, 1 << 25), 4096),
            (1 << 20, (1, 512, u32::MAX), 512),
            (1 << 20, (4096, 4096, 1 << 25), 4096),
            ((1 << 20) + 1024, (1024, 4096, 1 << 25), 1024),
            (1 << 20, (1, 100, 1 << 25), 512),
        ] {
            let rules = Rules::of(export(size, sizes), None).unwrap();
            assert_eq!(rules.geometry.block_bytes, expected, "{size} {sizes:?}");
            assert_eq!(rules.geometry.blocks, size / u64::from(expected));
            assert_eq!(rules.request_bytes_max % expected, 0);
            assert!(rules.request_bytes_max <= REQUEST_BYTES_MAX);
        }
    }

    #[test]
    fn a_pool_keeps_its_block_size_whatever_the_server_prefers() {
        for (size, sizes, asked, expected) in [
            (1 << 20, (512, 4096, 1 << 25), 512, 512),
            (1 << 20, (1, 512, 1 << 25), 4096, 4096),
            (1 << 20, UNTOLD, 2048, 2048),
            // Neither the server nor the size allows the pool's size.
            (1 << 20, (1024, 4096, 1 << 25), 512, 1024),
            ((1 << 20) + 512, UNTOLD, 4096, 512),
        ] {
            let rules = Rules::of(export(size, sizes), Some(asked)).unwrap();
            assert_eq!(rules.geometry.block_bytes, expected, "{size} {sizes:?} {asked}");
            assert_eq!(rules.geometry.size_bytes(), size);
        }
    }

    #[test]
    fn every_byte_of_an_export_is_in_a_block_or_the_export_is_refused() {
        for (size, minimum, grown) in [
            ((1 << 20) + 100, 1, (1 << 20) + 512),
            (100, 1, 512),
            (u64::MAX, 1, u64::MAX - 511),
            (u64::MAX - 4095 - 512, 4096, u64::MAX - 4095),
            ((1 << 20) + 512, 4096, (1 << 20) + 4096),
        ] {
            for asked in [None, Some(512), Some(4096)] {
                let sizes = (minimum, 4096, 1 << 25);
                let error = Rules::of(export(size, sizes), asked).unwrap_err().to_string();
                for part in [format!("{size} bytes"), format!("truncate -s {grown}")] {
                    assert!(error.contains(&part), "{error}");
                }
            }
        }
    }

    #[test]
    fn exports_that_no_device_can_be_made_of_are_refused() {
        for sizes in [(8192, 8192, 1 << 25), (1, 4096, 256), (3000, 4096, 1 << 25), (0, 0, 0)] {
            assert!(Rules::of(export(1 << 20, sizes), None).is_err(), "{sizes:?}");
        }
        let without_flush = NbdExport { flags: 0, ..export(1 << 20, UNTOLD) };
        let error = Rules::of(without_flush, None).unwrap_err().to_string();
        assert!(error.contains("NBD_FLAG_SEND_FLUSH"), "{error}");
        let read_only = NbdExport { flags: READ_ONLY, ..export(1 << 20, UNTOLD) };
        assert!(Rules::of(read_only, None).unwrap().geometry.read_only);
    }

    #[test]
    fn another_export_is_noticed_after_a_reconnection() {
        let rules = |export| Rules::of(export, None).unwrap();
        let first = rules(export(1 << 20, UNTOLD));
        first.check_again(&first.export).unwrap();
        let more = NbdExport { flags: SEND_FLUSH | SEND_FUA, ..first.export.clone() };
        first.check_again(&more).unwrap();
        for grown in [1 << 21, (1 << 20) + 100] {
            first.check_again(&export(grown, UNTOLD)).unwrap();
        }
        for other in [
            export(1 << 19, UNTOLD),
            export((1 << 20) - 100, UNTOLD),
            export(1 << 20, (1, 4096, 1 << 20)),
            export(1 << 20, (8192, 8192, REQUEST_BYTES_MAX)),
            NbdExport { name: "y".into(), ..first.export.clone() },
            NbdExport { flags: READ_ONLY, ..first.export.clone() },
        ] {
            let error = first.check_again(&other).unwrap_err().to_string();
            assert!(error.contains("another one"), "{other:?}: {error}");
        }
        assert!(rules(more).check_again(&first.export).is_err());
        let small = Rules::of(export(1 << 20, (512, 512, 512)), None).unwrap();
        small.check_again(&export(1 << 20, (512, 4096, 512))).unwrap();
    }
}
