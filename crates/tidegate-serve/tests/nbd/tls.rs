//! TLS against libnbd's `GnuTLS`: certificates, their absence, and the modes.

use std::path::{Path, PathBuf};
use std::process::Command;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustix::fs::{CWD, FileType, mknodat};
use tidegate_serve::nbd::{Export, Limits, ServeError, ServerBuilder, Tls, TlsMode};

use crate::client::*;
use crate::harness::TestServer;
use crate::harness::memory;
use crate::tools::run;

/// An authority, a server's certificate, and two directories of client files as libnbd wants them:
/// one signed by the authority, one by another.
struct Certificates {
    dir: tempfile::TempDir,
}

fn authority() -> CertifiedIssuer<'static, KeyPair> {
    let mut params = CertificateParams::new(vec![]).expect("parameters");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().expect("key")).expect("authority")
}

fn signed(dir: &Path, name: &str, by: &CertifiedIssuer<'static, KeyPair>) {
    let params = CertificateParams::new(vec!["localhost".into()]).expect("parameters");
    let key = KeyPair::generate().expect("key");
    let certificate = params.signed_by(&key, by).expect("certificate");
    std::fs::write(dir.join(format!("{name}-cert.pem")), certificate.pem()).expect("write");
    std::fs::write(dir.join(format!("{name}-key.pem")), key.serialize_pem()).expect("write");
}

impl Certificates {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("temporary directory");
        let (ours, other) = (authority(), authority());
        signed(dir.path(), "server", &ours);
        std::fs::write(dir.path().join("ca-cert.pem"), ours.pem()).expect("write");
        for (name, issuer) in
            [("client", Some(&ours)), ("stranger", Some(&other)), ("nobody", None)]
        {
            let client = dir.path().join(name);
            std::fs::create_dir(&client).expect("directory");
            std::fs::write(client.join("ca-cert.pem"), ours.pem()).expect("write");
            if let Some(issuer) = issuer {
                signed(&client, "client", issuer);
            }
        }
        Self { dir }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn tls(&self, mode: TlsMode, client_certificates: bool) -> Tls {
        let authority = client_certificates.then(|| self.file("ca-cert.pem"));
        let (certificate, key) = (self.file("server-cert.pem"), self.file("server-key.pem"));
        Tls::from_files(mode, &certificate, &key, authority.as_deref()).expect("TLS")
    }

    fn serve(&self, mode: TlsMode, client_certificates: bool) -> TestServer {
        self.serve_within(Limits::default(), mode, client_certificates)
    }

    fn serve_within(&self, limits: Limits, mode: TlsMode, client_certificates: bool) -> TestServer {
        let export = Export::new("", memory(16 << 20));
        let tls = self.tls(mode, client_certificates);
        TestServer::start(ServerBuilder::new().export(export).tls(tls).limits(limits))
    }

    fn uri(&self, server: &TestServer, client: &str) -> String {
        let (socket, files) = (server.path(), self.file(client));
        format!(
            "nbds+unix://localhost/?socket={}&tls-certificates={}",
            socket.display(),
            files.display()
        )
    }
}

/// The address of a server for a client that checks whose certificate it shows: libnbd does so only
/// where the address has a name, which that of a unix socket does not have.
fn checked_uri(server: &TestServer, files: &Path) -> String {
    format!("nbds://localhost:{}/?tls-certificates={}", server.port(), files.display())
}

fn nbdinfo_fails(uri: &str) {
    let output = Command::new("nbdinfo").arg(uri).output();
    let output =
        output.unwrap_or_else(|error| panic!("cannot run nbdinfo: {error}; install libnbd-bin"));
    assert!(!output.status.success(), "nbdinfo {uri} should have been refused");
}

#[test]
fn client_certificates_are_required_and_checked() {
    let certificates = Certificates::new();
    let server = certificates.serve(TlsMode::Required, true);
    let printed = run("libnbd-bin", "nbdinfo", &["--json", &certificates.uri(&server, "client")]);
    let seen: serde_json::Value = serde_json::from_str(&printed).expect("JSON");
    assert_eq!(seen["TLS"], true);
    assert_eq!(seen["exports"][0]["contexts"][0], "base:allocation");
    nbdinfo_fails(&certificates.uri(&server, "stranger"));
    nbdinfo_fails(&certificates.uri(&server, "nobody"));
    nbdinfo_fails(&server.uri());
    assert!(server.statistics().client_faults >= 2);
}

/// Connections that begin TLS after the files were read again are shown the new certificate; files
/// that cannot be used change nothing.
#[test]
fn files_are_read_again() {
    let certificates = Certificates::new();
    let tls = certificates.tls(TlsMode::Required, false);
    let export = Export::new("", memory(16 << 20));
    let server = TestServer::start(ServerBuilder::new().export(export).tls(tls.clone()));
    let uri = checked_uri(&server, &certificates.file("client"));
    run("libnbd-bin", "nbdinfo", &[&uri]);
    // Of another authority than the client knows: that it is shown is seen by its refusal.
    signed(certificates.dir.path(), "server", &authority());
    run("libnbd-bin", "nbdinfo", &[&uri]);
    tls.reload().expect("the files are whole");
    nbdinfo_fails(&uri);
    std::fs::write(certificates.file("server-key.pem"), "broken").expect("write");
    assert!(matches!(tls.reload(), Err(ServeError::Tls(_))));
    nbdinfo_fails(&uri);
    let ours = Certificates::new();
    for name in ["server-cert.pem", "server-key.pem"] {
        std::fs::copy(ours.file(name), certificates.file(name)).expect("copied");
    }
    tls.reload().expect("the files are whole");
    run("libnbd-bin", "nbdinfo", &[&checked_uri(&server, &ours.file("client"))]);
}

/// Copies 16 MiB to the server and back.
fn expect_whole(server: &TestServer, uri: &str) {
    let (source, copy) = (server.dir().join("source"), server.dir().join("copy"));
    std::fs::write(&source, pattern(16 << 20, 3)).expect("write");
    run("libnbd-bin", "nbdcopy", &[source.to_str().expect("UTF-8"), uri]);
    run("libnbd-bin", "nbdcopy", &[uri, copy.to_str().expect("UTF-8")]);
    assert!(std::fs::read(&source).expect("read") == std::fs::read(&copy).expect("read"));
}

#[test]
fn data_passes_through_tls_whole() {
    let certificates = Certificates::new();
    let server = certificates.serve(TlsMode::Required, true);
    expect_whole(&server, &certificates.uri(&server, "client"));
}

/// With as many connections as 64 MiB of memory are enough for, each has the smallest buffers.
#[test]
fn data_passes_whole_through_the_smallest_buffers() {
    let certificates = Certificates::new();
    let limits = |connections| Limits { connections, memory_bytes: 64 << 20, ..Limits::default() };
    let server = certificates.serve_within(limits(184), TlsMode::Required, true);
    expect_whole(&server, &certificates.uri(&server, "client"));
    let export = Export::new("", memory(16 << 20));
    let server = TestServer::start(ServerBuilder::new().export(export).limits(limits(655)));
    expect_whole(&server, &server.uri());
}

#[test]
fn optional_tls_serves_both() {
    let certificates = Certificates::new();
    let server = certificates.serve(TlsMode::Optional, false);
    run("libnbd-bin", "nbdinfo", &[&certificates.uri(&server, "nobody")]);
    run("libnbd-bin", "nbdinfo", &[&server.uri()]);
    Client::simple(&server.path()).write(0, &[1; 512]);
}

#[test]
fn required_tls_refuses_all_but_starttls_and_abort() {
    let certificates = Certificates::new();
    let server = certificates.serve(TlsMode::Required, false);
    let mut client = Client::haggle(&server.path());
    for option in [OPT_LIST, OPT_INFO, OPT_GO, OPT_STRUCTURED_REPLY, OPT_SET_META_CONTEXT, 99] {
        client.option(option, &[]);
        assert_eq!(client.reply(option).0, ERR_TLS_REQD, "option {option}");
    }
    client.option(OPT_STARTTLS, b"x");
    assert_eq!(client.reply(OPT_STARTTLS).0, ERR_INVALID);
    client.option(OPT_ABORT, &[]);
    assert_eq!(client.reply(OPT_ABORT).0, REP_ACK);
    let mut client = Client::haggle(&server.path());
    client.option(OPT_EXPORT_NAME, b"");
    client.expect_closed();
}

#[test]
fn plain_text_behind_starttls_is_never_taken_for_the_clients() {
    let certificates = Certificates::new();
    let server = certificates.serve(TlsMode::Optional, false);
    let mut client = Client::haggle(&server.path());
    client.send(&[option_bytes(OPT_STARTTLS, &[]), option_bytes(OPT_LIST, &[])].concat());
    client.expect_closed();
    // Garbage instead of TLS ends the connection too, perhaps with an alert of TLS before it.
    let mut client = Client::haggle(&server.path());
    client.option(OPT_STARTTLS, &[]);
    assert_eq!(client.reply(OPT_STARTTLS).0, REP_ACK);
    client.send(&option_bytes(OPT_LIST, &[]));
    let mut rest = Vec::new();
    let _ = std::io::Read::read_to_end(&mut client.stream, &mut rest);
    assert!(rest.len() < 64, "the server answered: {rest:?}");
}

#[test]
fn files_that_make_no_sense_are_named() {
    let certificates = Certificates::new();
    let (certificate, key) =
        (certificates.file("server-cert.pem"), certificates.file("server-key.pem"));
    let (missing, fifo) = (certificates.file("missing.pem"), certificates.file("fifo"));
    mknodat(CWD, &fifo, FileType::Fifo, 0o600.into(), 0).expect("a FIFO");
    let (endless, huge) = (PathBuf::from("/dev/zero"), certificates.file("huge"));
    let size = std::fs::File::create(&huge).and_then(|file| file.set_len(1 << 40));
    size.expect("a sparse file");
    let cases = [
        (&endless, &key, "/dev/zero: it is a character device: a regular file is expected"),
        (&certificate, &endless, "/dev/zero: it is a character device"),
        (&certificate, &fifo, "fifo: it is a FIFO: a regular file is expected"),
        (&huge, &key, "huge: it has more than 4194304 bytes"),
        (&missing, &key, "missing.pem"),
        (&certificate, &missing, "missing.pem"),
        (&certificate, &certificate, "server-cert.pem"),
    ];
    for (certificate, key, named) in cases {
        let error = Tls::from_files(TlsMode::Required, certificate, key, None).err().expect(named);
        assert!(matches!(&error, ServeError::Tls(text) if text.contains(named)), "{error}");
    }
}
