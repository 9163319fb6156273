//! The TLS files of a server.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::Result;
use tidegate_serve::nbd::{Tls, TlsMode};

use crate::log::{Level, say};
use crate::plan::TlsFiles;

/// Reads the TLS files.
///
/// # Errors
/// A file cannot be read, or is no certificate or key.
pub(crate) fn read(files: &TlsFiles) -> Result<Tls> {
    let TlsFiles { mode, certificate, key, authorities } = files;
    let tls = Tls::from_files(*mode, certificate, key, authorities.as_deref())?;
    warn_of_readers(key);
    Ok(tls)
}

/// Warns if all users can read the private key in `key`.
pub(crate) fn warn_of_readers(key: &Path) {
    let others = key.metadata().map_or(0, |found| found.mode() & 0o006);
    if others != 0 {
        say(
            Level::Warning,
            format_args!("all users of this machine can read {}; chmod o-rw it", key.display()),
        );
    }
}

/// Returns whether every client must show a certificate, which clients without TLS never do.
pub(crate) fn demands_certificates(tls: Option<&TlsFiles>) -> bool {
    tls.is_some_and(|tls| tls.mode == TlsMode::Required && tls.authorities.is_some())
}
