//! Costs of a machine: presets, and files that `tidegate model --calibrate` writes.

use std::path::Path;

use serde::{Deserialize, Serialize};
use tidegate::opening;
use tidegate::pmem::MediaModel;

use crate::error::{Error, Result};
use crate::time::SsdModel;

/// Most bytes of a file of costs.
const FILE_BYTES_MAX: u64 = 64 << 10;

/// Costs of a machine, in nanoseconds unless the name says otherwise.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Costs {
    /// The origin of the costs.
    pub name: String,
    /// Software around a request, before it reaches the tier and after it has left: system call,
    /// file system, block layer.
    pub request_ns: u64,
    /// Software of the block translation table for one write, beside its operations on the memory.
    pub btt_ns: u64,
    /// Reading the clock.
    pub clock_ns: u64,
    /// Locking and unlocking a lock whose last holder was the same CPU.
    pub lock_ns: u64,
    /// Locking and unlocking a lock whose last holder was another CPU: the cache line travels.
    pub handover_ns: u64,
    /// Work of a tier under a lock: look-ups, links, state changes.
    pub section_ns: u64,
    /// Waking a thread, on the waking thread.
    pub wake_ns: u64,
    /// Delay between a wake-up and the woken thread's start on an idle CPU.
    pub wake_latency_ns: u64,
    /// Switching a CPU from one thread to another.
    pub switch_ns: u64,
    /// Time that a thread keeps its CPU while other threads are ready.
    pub slice_ns: u64,
    /// Rate of copies of one thread from DRAM to DRAM.
    pub dram_copy_bytes_per_s: u64,
    /// Rate of streaming stores of one thread, before the media model of persistent memory slows
    /// them down.
    pub stream_bytes_per_s: u64,
    /// Loading a word of persistent memory, mostly of the map.
    pub word_load_ns: u64,
    /// Storing a word.
    pub word_store_ns: u64,
    /// Writing a cache line back.
    pub write_back_ns: u64,
    /// A fence, without the media model.
    pub fence_ns: u64,
    /// The persistent memory, in the syntax of `--media` of `tidegate bench`.
    pub media: String,
    /// The storage, in the syntax of `--ssd` of `tidegate replay`.
    #[serde(default = "default_ssd")]
    pub ssd: String,
}

fn default_ssd() -> String {
    "nvme".into()
}

impl Costs {
    /// The names of the presets.
    pub const PRESETS: [&'static str; 3] = ["caiti", "caiti-own", "optane"];

    /// Returns the costs of a machine with Optane by published measurements: 3 GB/s of streaming
    /// stores per thread, 13.8 GB/s in all, 62 to 90 ns per store (Yang et al., FAST 2020).
    /// Tidegate is called in the same process.
    pub fn optane() -> Self {
        Self {
            name: "optane".into(),
            request_ns: 20,
            btt_ns: 120,
            clock_ns: 22,
            lock_ns: 15,
            handover_ns: 70,
            section_ns: 30,
            wake_ns: 1500,
            wake_latency_ns: 3000,
            switch_ns: 1000,
            slice_ns: 3_000_000,
            dram_copy_bytes_per_s: 10_000_000_000,
            stream_bytes_per_s: 10_000_000_000,
            word_load_ns: 5,
            word_store_ns: 2,
            write_back_ns: 20,
            fence_ns: 20,
            media: "optane".into(),
            ssd: default_ssd(),
        }
    }

    /// Returns the costs of the Caiti paper's machine, as far as its text tells. The inputs are the
    /// paper's figures for requests without a cache, and for the parts of Caiti's requests. The
    /// model predicts the performance of the caches:
    ///
    /// - Caiti takes 4.41 µs per request (table 1): 11.5 % for copies to DRAM, so 8 GB/s, and 2.9 %
    ///   for metadata (5.2). The rest is assumed to be software around the request: 3.77 µs.
    /// - Ext4 on the bare memory takes 120.2 % more time (5.1): 9.71 µs. Without the software, 5.94
    ///   µs remain for 4 KiB, so 690 MB/s per thread.
    /// - Ext4 on the kernel's BTT takes 3.6 times as long as Caiti: 15.9 µs. A write to our table
    ///   is faster; `btt_ns` makes up the difference.
    /// - The map of a BTT of 64 GB does not fit the CPU's cache: a look-up is a read of 305 ns.
    pub fn caiti() -> Self {
        Self { name: "caiti".into(), btt_ns: 5520, ..Self::caiti_own() }
    }

    /// Returns the costs of the Caiti paper's machine with Tidegate's block translation table: a
    /// write needs two fences, fewer than the kernel's, and none of the kernel's bookkeeping.
    pub fn caiti_own() -> Self {
        Self {
            name: "caiti-own".into(),
            request_ns: 3770,
            dram_copy_bytes_per_s: 8_000_000_000,
            word_load_ns: 305,
            media: "optane,thread_write_bytes_per_s=690000000".into(),
            ..Self::optane()
        }
    }

    /// Loads a preset by name, or else a file.
    ///
    /// # Errors
    /// No preset has this name, and the file cannot be read or does not contain valid costs.
    pub fn load(name: &str) -> Result<Self> {
        let costs = match name {
            "caiti" => Self::caiti(),
            "caiti-own" => Self::caiti_own(),
            "optane" => Self::optane(),
            path => Self::read(Path::new(path))?,
        };
        costs.check()?;
        Ok(costs)
    }

    fn read(path: &Path) -> Result<Self> {
        let text = opening::read_text(path, FILE_BYTES_MAX).map_err(Error::io(path))?;
        serde_json::from_str(&text).map_err(|error| {
            let (shown, presets) = (path.display(), Self::PRESETS.join(", "));
            Error::Usage(format!(
                "--costs {shown}: {error}; expected one of {presets}, or a file of --calibrate"
            ))
        })
    }

    /// Writes the costs to `path`.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self).map_err(std::io::Error::from);
        text.and_then(|text| std::fs::write(path, text + "\n")).map_err(Error::io(path))
    }

    /// Formats the costs for users, one per line.
    pub fn lines(&self) -> String {
        let fields = serde_json::to_value(self).unwrap_or_default();
        let fields = fields.as_object().into_iter().flatten();
        fields.map(|(key, value)| format!("{key:<24} {value}")).collect::<Vec<_>>().join("\n")
    }

    /// Parses the persistent memory.
    ///
    /// # Errors
    /// [`media`](Self::media) is not a valid media model.
    pub fn media(&self) -> Result<MediaModel> {
        self.media
            .parse()
            .map_err(|error| Error::Usage(format!("costs {}: media: {error}", self.name)))
    }

    /// Parses the persistent memory, and adds the costs that the model of many cores counts outside
    /// the media model: the rate at which a thread streams, and a fence.
    ///
    /// # Errors
    /// [`media`](Self::media) is not a valid media model.
    pub fn whole_media(&self) -> Result<MediaModel> {
        let media = self.media()?;
        let rate = media.thread_write_bytes_per_s.unwrap_or(u64::MAX).min(self.stream_bytes_per_s);
        let fence_ns = u32::try_from(self.fence_ns).unwrap_or(u32::MAX).max(media.write_latency_ns);
        let settings = format!("thread_write_bytes_per_s={rate},write_latency_ns={fence_ns}");
        Self { media: format!("{},{settings}", self.media), ..self.clone() }.media()
    }

    /// Parses the storage.
    ///
    /// # Errors
    /// [`ssd`](Self::ssd) is not a valid storage model.
    pub fn ssd(&self) -> Result<SsdModel> {
        self.ssd.parse().map_err(|error| Error::Usage(format!("costs {}: ssd: {error}", self.name)))
    }

    fn check(&self) -> Result<()> {
        self.media()?;
        self.ssd()?;
        let rates = [self.dram_copy_bytes_per_s, self.stream_bytes_per_s];
        if rates.iter().any(|&rate| rate < 1_000_000) || self.slice_ns == 0 {
            return Err(Error::Usage(format!(
                "costs {}: expected rates of at least 1000000 bytes per second and a slice",
                self.name
            )));
        }
        Ok(())
    }
}

/// Returns the nanoseconds that `bytes` take at a rate.
pub(super) fn transfer_ns(bytes: u64, bytes_per_s: u64) -> u64 {
    let ns = u128::from(bytes) * 1_000_000_000 / u128::from(bytes_per_s.max(1));
    u64::try_from(ns).unwrap_or(u64::MAX)
}
