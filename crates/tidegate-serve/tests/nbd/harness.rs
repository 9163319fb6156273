//! A server in a thread for the length of a test.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::Mutex;
use tidegate::device::BlockDevice;
use tidegate::device::memory::MemoryDevice;
use tidegate_serve::nbd::{
    Export, ExportTable, Limits, ListenAddress, ServerBuilder, Statistics, StatisticsSource,
    StopHandle,
};

/// Zeroed memory of `size_bytes` in blocks of 512 bytes.
pub(crate) fn memory(size_bytes: u64) -> Arc<MemoryDevice> {
    Arc::new(MemoryDevice::new(512, size_bytes / 512).expect("a device in memory"))
}

/// A running server. Dropping it stops the server and checks that it stopped well.
pub(crate) struct TestServer {
    dir: tempfile::TempDir,
    pub(crate) stop: StopHandle,
    thread: Option<JoinHandle<()>>,
    statistics: StatisticsSource,
    pub(crate) exports: ExportTable,
    addresses: Vec<ListenAddress>,
    pub(crate) log: Arc<Mutex<Vec<String>>>,
}

impl TestServer {
    /// Serves `device` as the default export.
    pub(crate) fn serve(device: Arc<dyn BlockDevice>) -> Self {
        Self::start(ServerBuilder::new().export(Export::new("", device)))
    }

    /// Serves 4 MiB of memory.
    pub(crate) fn memory() -> Self {
        Self::serve(memory(4 << 20))
    }

    /// Serves 64 MiB of memory within `limits`.
    pub(crate) fn limited(limits: Limits) -> Self {
        let export = Export::new("", memory(64 << 20));
        Self::start(ServerBuilder::new().export(export).limits(limits))
    }

    pub(crate) fn start(builder: ServerBuilder) -> Self {
        let dir = tempfile::tempdir().expect("temporary directory");
        let log = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&log);
        let builder = builder.log(Arc::new(move |line: &str| sink.lock().push(line.to_owned())));
        let unix = ListenAddress::Unix(dir.path().join("nbd.sock"));
        let tcp = ListenAddress::Tcp { host: "127.0.0.1".into(), port: 0 };
        let server = builder.bind(&[unix, tcp]).expect("bind");
        let addresses = server.addresses();
        let (stop, statistics) = (StopHandle::new().expect("stop handle"), server.statistics());
        let exports = server.exports();
        let handle = stop.clone();
        let thread = Some(std::thread::spawn(move || server.run(&handle).expect("run")));
        Self { dir, stop, thread, statistics, exports, addresses, log }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.dir.path().join("nbd.sock")
    }

    /// The TCP port.
    pub(crate) fn port(&self) -> u16 {
        let port = |address: &ListenAddress| match address {
            ListenAddress::Tcp { port, .. } => Some(*port),
            _ => None,
        };
        self.addresses.iter().find_map(port).expect("it listens on TCP")
    }

    /// A directory that lives as long as the server.
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The address as clients take it.
    pub(crate) fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.path().display())
    }

    pub(crate) fn statistics(&self) -> Statistics {
        self.statistics.snapshot()
    }

    /// Waits until the server has stopped.
    pub(crate) fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the server stops without a panic");
            assert!(!self.path().exists(), "the socket is removed");
        }
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.stop.stop();
        if !std::thread::panicking() {
            self.join();
        }
    }
}
