//! TLS for NBD: when to use TLS, and certificates from PEM files, which can be reloaded.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::RwLock;
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use rustls_pki_types::pem::{self, PemObject};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tidegate::opening;

use super::ServeError;

/// Most bytes of a PEM file. A list of all public authorities has 300 KiB.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// When connections are encrypted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TlsMode {
    /// Never.
    #[default]
    Off,
    /// When the client asks for TLS.
    Optional,
    /// Always: a client must start TLS before anything else.
    Required,
}

/// A server's certificate, and the clients that it accepts. Clones share both.
#[derive(Clone)]
pub struct Tls {
    pub(super) mode: TlsMode,
    files: Arc<Files>,
    config: Arc<RwLock<Arc<ServerConfig>>>,
}

/// The PEM files.
struct Files {
    certificate: PathBuf,
    key: PathBuf,
    client_authority: Option<PathBuf>,
}

impl Tls {
    /// Reads PEM files: the server's certificate chain, its key, and, if clients must show
    /// certificates, the certificate of the authority that signed them. With [`TlsMode::Off`] the
    /// files are read and nothing is encrypted.
    ///
    /// # Errors
    /// [`ServeError::Tls`] if a file cannot be read, is not a regular file of at most
    /// 4 MiB, or does not hold its certificate or key.
    pub fn from_files(
        mode: TlsMode,
        certificate: &Path,
        key: &Path,
        client_authority: Option<&Path>,
    ) -> Result<Self, ServeError> {
        let files = Files {
            certificate: certificate.to_owned(),
            key: key.to_owned(),
            client_authority: client_authority.map(Path::to_owned),
        };
        let config = Arc::new(RwLock::new(Arc::new(files.read()?)));
        Ok(Self { mode, files: Arc::new(files), config })
    }

    /// Reads the files again, for connections that begin TLS from now on. Connections that have
    /// begun TLS keep their configuration.
    ///
    /// # Errors
    /// As [`from_files`](Self::from_files). The previous configuration then stays in use.
    pub fn reload(&self) -> Result<(), ServeError> {
        let config = Arc::new(self.files.read()?);
        *self.config.write() = config;
        Ok(())
    }

    pub(super) fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.config.read())
    }
}

impl Files {
    fn read(&self) -> Result<ServerConfig, ServeError> {
        let Self { certificate, key, client_authority } = self;
        let chain = certificates(certificate)?;
        let secret =
            PrivateKeyDer::from_pem_slice(&content(key)?).map_err(|error| match error {
                pem::Error::NoItemsFound => tls_error(key, &"it holds no private key in PEM form"),
                error => tls_error(key, &error),
            })?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| tls_error(certificate, &error))?;
        let builder = match client_authority {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let roots = Arc::new(roots(path)?);
                let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider).build();
                builder
                    .with_client_cert_verifier(verifier.map_err(|error| tls_error(path, &error))?)
            }
        };
        let config = builder.with_single_cert(chain, secret);
        config.map_err(|error| tls_error(certificate, &error))
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, ServeError> {
    let content = content(path)?;
    let found = CertificateDer::pem_slice_iter(&content).collect::<Result<Vec<_>, _>>();
    let found = found.map_err(|error| tls_error(path, &error))?;
    if found.is_empty() {
        return Err(tls_error(path, &"it holds no certificate in PEM form"));
    }
    Ok(found)
}

fn roots(path: &Path) -> Result<RootCertStore, ServeError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).map_err(|error| tls_error(path, &error))?;
    }
    Ok(roots)
}

fn content(path: &Path) -> Result<Vec<u8>, ServeError> {
    opening::read(path, FILE_BYTES_MAX).map_err(|error| tls_error(path, &error))
}

fn tls_error(path: &Path, error: &dyn std::fmt::Display) -> ServeError {
    ServeError::Tls(format!("TLS file {}: {error}", path.display()))
}
