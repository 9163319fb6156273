//! The kernel's driver: makes devices, finds the devices of earlier servers, and deletes them.

use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use zerocopy::FromZeros;

use super::abi::{ANY_NUMBER, Command, DeviceInfo, Parameters, feature, state};
use super::parameters::REQUEST_BYTES_MAX;
use super::ring::ControlRing;
use crate::ServeError;

const CONTROL: &str = "/dev/ublk-control";
/// The directory that lists the devices.
const DEVICES: &str = "/sys/class/ublk-char";
/// Requests that the kernel may have in a queue.
const DEPTH: u16 = 64;

/// The driver's control device.
pub(super) struct Driver(ControlRing);

/// Returns the path of block device `number`.
pub(super) fn block_path(number: u32) -> PathBuf {
    format!("/dev/ublkb{number}").into()
}

impl Driver {
    /// Opens the control device.
    ///
    /// # Errors
    /// [`ServeError::NoUblk`]: the kernel has no driver, or this process may not use it.
    pub(super) fn open() -> Result<Self, ServeError> {
        let file = File::options().read(true).write(true).open(CONTROL);
        let file = file.map_err(|error| no_driver(&error))?;
        ControlRing::new(file).map(Self).map_err(|error| no_ring(&error))
    }

    /// Adds a device with `queues` queues and the server's `mark`. The kernel chooses its number
    /// unless `number` does.
    ///
    /// # Errors
    /// [`ServeError::UblkDevice`]: the number is taken, or the driver refuses.
    pub(super) fn add(
        &mut self,
        number: Option<u32>,
        queues: u16,
        features: u64,
        mark: u64,
    ) -> Result<DeviceInfo, ServeError> {
        let wanted = DeviceInfo {
            queues,
            depth: DEPTH,
            buffer_bytes: REQUEST_BYTES_MAX,
            number: number.unwrap_or(ANY_NUMBER),
            features: features | feature::ENCODED,
            server_mark: mark,
            ..DeviceInfo::new_zeroed()
        };
        let added = self.0.run_info(Command::ADD, wanted.number, wanted);
        let added = added.map_err(|error| not_added(number, error))?;
        let missing = wanted.features & !added.features;
        if missing != 0 {
            // The device is of no use; the error says why.
            let _ = self.0.run(Command::DELETE, added.number, 0);
            return Err(too_old(&format!("its ublk driver lacks features {missing:#x}")));
        }
        Ok(added)
    }

    /// Sets the parameters of a device that is not started.
    ///
    /// # Errors
    /// [`ServeError::UblkDevice`].
    pub(super) fn set(&mut self, number: u32, parameters: Parameters) -> Result<(), ServeError> {
        let set = self.0.run_parameters(Command::SET_PARAMETERS, number, parameters);
        set.map(drop).map_err(|error| failed("set the parameters of", number, error))
    }

    /// Returns the parameters of a device.
    ///
    /// # Errors
    /// [`ServeError::UblkDevice`].
    pub(super) fn parameters(&mut self, number: u32) -> Result<Parameters, ServeError> {
        let asked = Parameters { len: Parameters::BYTES, ..FromZeros::new_zeroed() };
        let got = self.0.run_parameters(Command::GET_PARAMETERS, number, asked);
        got.map_err(|error| failed("read the parameters of", number, error))
    }

    /// Returns the device that has `mark`, if there is one.
    ///
    /// # Errors
    /// [`ServeError::UblkDevice`]: a device cannot be asked for its mark.
    pub(super) fn find(&mut self, mark: u64) -> Result<Option<DeviceInfo>, ServeError> {
        for number in numbers_in(Path::new(DEVICES)) {
            match self.info(number) {
                Ok(found) if found.server_mark == mark => return Ok(Some(found)),
                // A device may be deleted at any time.
                Ok(_) | Err(Errno::NODEV | Errno::INVAL) => {}
                Err(error) => return Err(failed("ask for", number, error)),
            }
        }
        Ok(None)
    }

    /// Returns device `number` as the driver knows it.
    ///
    /// # Errors
    /// The driver's error.
    pub(super) fn info(&mut self, number: u32) -> Result<DeviceInfo, Errno> {
        self.0.run_info(Command::GET_INFO, number, DeviceInfo::new_zeroed())
    }

    /// Lets users have a device whose queues are being served. Waits until the kernel has read its
    /// partition table.
    ///
    /// # Errors
    /// [`ServeError::UblkDevice`].
    pub(super) fn start(&mut self, number: u32) -> Result<(), ServeError> {
        let started = self.0.run(Command::START, number, u64::from(std::process::id()));
        started.map_err(|error| failed("start", number, error))
    }

    /// Begins to take a device up whose server is gone.
    ///
    /// # Errors
    /// The driver's error; [`Errno::BUSY`] while the old server ends.
    pub(super) fn start_recovery(&mut self, number: u32) -> Result<(), Errno> {
        self.0.run(Command::START_RECOVERY, number, 0)
    }

    /// Lets the users of a device go on, whose queues are being served again.
    ///
    /// # Errors
    /// [`ServeError::UblkDevice`].
    pub(super) fn end_recovery(&mut self, number: u32) -> Result<(), ServeError> {
        let ended = self.0.run(Command::END_RECOVERY, number, u64::from(std::process::id()));
        ended.map_err(|error| failed("take up", number, error))
    }

    /// Stops a device: writes what its users have in the page cache, and lets no one use it any
    /// more. Its queues must be served meanwhile.
    ///
    /// # Errors
    /// [`ServeError::UblkDevice`].
    pub(super) fn stop(&mut self, number: u32) -> Result<(), ServeError> {
        match self.0.run(Command::STOP, number, 0) {
            // Another program has deleted it.
            Ok(()) | Err(Errno::NODEV) => Ok(()),
            Err(error) => Err(failed("stop", number, error)),
        }
    }

    /// Deletes a stopped device. A device that programs have open is deleted once they close it.
    ///
    /// # Errors
    /// [`ServeError::UblkDevice`].
    pub(super) fn delete(&mut self, number: u32) -> Result<(), ServeError> {
        let later = self.0.run(Command::DELETE_LATER, number, 0);
        let deleted = match later {
            // An older kernel can only wait for the programs.
            Err(Errno::OPNOTSUPP) => self.0.run(Command::DELETE, number, 0),
            later => later,
        };
        match deleted {
            Ok(()) | Err(Errno::NODEV) => Ok(()),
            Err(error) => Err(failed("delete", number, error)),
        }
    }
}

/// Returns whether the device was made and never started, or was stopped.
pub(super) fn is_dead(info: &DeviceInfo) -> bool {
    info.state == state::DEAD
}

/// Returns the numbers of the devices that `directory` lists.
fn numbers_in(directory: &Path) -> Vec<u32> {
    let Ok(entries) = directory.read_dir() else { return Vec::new() };
    let number = |name: &str| name.strip_prefix("ublkc")?.parse().ok();
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    names.filter_map(|name| number(&name)).collect()
}

fn no_driver(error: &std::io::Error) -> ServeError {
    ServeError::NoUblk(match error.kind() {
        ErrorKind::NotFound if Path::new("/sys/module/ublk_drv").exists() => format!(
            "{CONTROL} is not there, although the kernel has the ublk driver; mount devtmpfs at \
             /dev, or give the container the device"
        ),
        ErrorKind::NotFound => format!(
            "{CONTROL} is not there: the kernel has no ublk driver; `modprobe ublk_drv`, or boot a \
             kernel that has it (CONFIG_BLK_DEV_UBLK)"
        ),
        ErrorKind::PermissionDenied => {
            format!("{CONTROL} cannot be opened: {error}; be root to serve a ublk device")
        }
        _ => format!("{CONTROL} cannot be opened: {error}"),
    })
}

fn no_ring(error: &std::io::Error) -> ServeError {
    ServeError::NoUblk(format!(
        "ublk needs io_uring, which the kernel refuses: {error}; see `sysctl \
         kernel.io_uring_disabled`, which must be 0 or, for root, 1"
    ))
}

fn not_added(number: Option<u32>, error: Errno) -> ServeError {
    let device = number
        .map_or_else(|| "a ublk device".into(), |number| block_path(number).display().to_string());
    match error {
        Errno::EXIST => ServeError::UblkDevice(format!(
            "{device} exists already and is not this pool's; choose another number, or let the \
             kernel choose one (--ublk)"
        )),
        Errno::PERM | Errno::ACCESS => ServeError::NoUblk(format!(
            "{device} cannot be made: {error}; be root (CAP_SYS_ADMIN) to serve a ublk device"
        )),
        Errno::OPNOTSUPP => too_old(&format!("it does not make {device}: {error}")),
        _ => ServeError::UblkDevice(format!("{device} cannot be made: {error}")),
    }
}

fn too_old(what: &str) -> ServeError {
    ServeError::NoUblk(format!("the kernel is too old for ublk devices: {what}; boot a newer one"))
}

fn failed(what: &str, number: u32, error: Errno) -> ServeError {
    let path = block_path(number);
    ServeError::UblkDevice(format!("cannot {what} {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_found_by_their_names() {
        let dir = tempfile::tempdir().expect("a directory");
        for name in ["ublkc0", "ublkc17", "ublkcx", "ublk-control"] {
            std::fs::write(dir.path().join(name), "").expect("a file");
        }
        let mut numbers = numbers_in(dir.path());
        numbers.sort_unstable();
        assert_eq!(numbers, [0, 17]);
        assert!(numbers_in(&dir.path().join("none")).is_empty());
    }

    #[test]
    fn errors_say_what_to_do() {
        let said = |kind: ErrorKind| no_driver(&kind.into()).to_string();
        assert!(said(ErrorKind::NotFound).contains("/dev/ublk-control is not there"));
        assert!(said(ErrorKind::PermissionDenied).contains("be root"));
        let taken = not_added(Some(3), Errno::EXIST).to_string();
        assert!(taken.starts_with("/dev/ublkb3 exists already"), "{taken}");
        assert!(matches!(not_added(None, Errno::PERM), ServeError::NoUblk(_)));
    }
}
