//! What things cost on a machine: presets, and files that `tidegate model --calibrate` writes.

use std::path::Path;

use serde::{Deserialize, Serialize};
use tidegate::pmem::MediaModel;

use crate::error::{Error, Result};
use crate::time::SsdModel;

/// Times of a machine, in nanoseconds unless the name says otherwise.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Costs {
    /// Where they are from.
    pub name: String,
    /// Software around a request, before it reaches the tier and after it left: system call, file
    /// system, block layer.
    pub request_ns: u64,
    /// Software of the block translation table for one write, beside what it does to the memory.
    pub btt_ns: u64,
    /// A reading of the clock.
    pub clock_ns: u64,
    /// A lock and its unlock, where the same CPU had it last.
    pub lock_ns: u64,
    /// A lock and its unlock, where another CPU had it last: its cache line travels.
    pub handover_ns: u64,
    /// What a tier does under a lock: looks up, links, changes states.
    pub section_ns: u64,
    /// Waking a thread, for the thread that wakes it.
    pub wake_ns: u64,
    /// From then until the woken thread runs on an idle CPU.
    pub wake_latency_ns: u64,
    /// A CPU changes from one thread to another.
    pub switch_ns: u64,
    /// A thread keeps its CPU for so long while others want it.
    pub slice_ns: u64,
    /// One thread copies so much from DRAM to DRAM.
    pub dram_copy_bytes_per_s: u64,
    /// One thread streams so much to the memory that stands for persistent memory, before the media
    /// model slows it down.
    pub stream_bytes_per_s: u64,
    /// A word of persistent memory is loaded: of the map, mostly.
    pub word_load_ns: u64,
    /// A word is stored.
    pub word_store_ns: u64,
    /// A cache line is written back.
    pub write_back_ns: u64,
    /// A fence, before the media model.
    pub fence_ns: u64,
    /// The persistent memory, as `--media` of `tidegate bench` takes it.
    pub media: String,
    /// The storage, as `--ssd` of `tidegate replay` takes it.
    #[serde(default = "default_ssd")]
    pub ssd: String,
}

fn default_ssd() -> String {
    "nvme".into()
}

impl Costs {
    /// Names of the presets.
    pub const PRESETS: [&'static str; 3] = ["caiti", "caiti-own", "optane"];

    /// A machine with Optane by the figures that are generally measured: 3 GB/s of streaming stores
    /// a thread, 13.8 GB/s of all, 62 to 90 ns a store (Yang et al., FAST 2020). Tidegate is called
    /// in the same process.
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

    /// The machine of the Caiti paper, as far as its text tells. What the paper says of requests
    /// that go without a cache, and of the parts of Caiti's, are the inputs; what the caches do
    /// there is for the model to tell:
    ///
    /// - Caiti takes 4.41 µs a request (table 1): 11.5 % for copies to DRAM, so 8 GB/s, and 2.9 %
    ///   for metadata (5.2). The rest is taken to be software around it: 3.77 µs.
    /// - Ext4 on the bare memory takes 120.2 % more time (5.1): 9.71 µs. Without the software 5.94
    ///   µs are left for 4 KiB, so 690 MB/s a thread.
    /// - Ext4 on the kernel's BTT takes 3.6 times as long as Caiti: 15.9 µs. What a write to ours
    ///   takes less is added to it.
    /// - The map of a BTT of 64 GB does not fit the CPU's cache: a look-up is a read of 305 ns.
    pub fn caiti() -> Self {
        Self { name: "caiti".into(), btt_ns: 5520, ..Self::caiti_own() }
    }

    /// The same machine with our block translation table: two fences a write where the kernel's has
    /// more, and nothing of the kernel's bookkeeping.
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

    /// A preset by its name, or else the file of that name.
    ///
    /// # Errors
    /// There is no such preset or file, or it does not hold costs.
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
        let text = std::fs::read_to_string(path).map_err(Error::io(path))?;
        serde_json::from_str(&text).map_err(|error| {
            let (shown, presets) = (path.display(), Self::PRESETS.join(", "));
            Error::Usage(format!(
                "--costs {shown}: {error}; expected one of {presets}, or a file of --calibrate"
            ))
        })
    }

    /// Writes them to `path`.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self).map_err(std::io::Error::from);
        text.and_then(|text| std::fs::write(path, text + "\n")).map_err(Error::io(path))
    }

    /// A line for each cost, for people.
    pub fn lines(&self) -> String {
        let fields = serde_json::to_value(self).unwrap_or_default();
        let fields = fields.as_object().into_iter().flatten();
        fields.map(|(key, value)| format!("{key:<24} {value}")).collect::<Vec<_>>().join("\n")
    }

    /// The persistent memory.
    ///
    /// # Errors
    /// [`media`](Self::media) names none.
    pub fn media(&self) -> Result<MediaModel> {
        self.media
            .parse()
            .map_err(|error| Error::Usage(format!("costs {}: media: {error}", self.name)))
    }

    /// The persistent memory with all that it takes, also what the model of many cores counts apart
    /// from the media: the rate at which a thread streams to it, and a fence.
    ///
    /// # Errors
    /// As for [`media`](Self::media).
    pub fn whole_media(&self) -> Result<MediaModel> {
        let media = self.media()?;
        let rate = media.thread_write_bytes_per_s.unwrap_or(u64::MAX).min(self.stream_bytes_per_s);
        let fence_ns = u32::try_from(self.fence_ns).unwrap_or(u32::MAX).max(media.write_latency_ns);
        let settings = format!("thread_write_bytes_per_s={rate},write_latency_ns={fence_ns}");
        Self { media: format!("{},{settings}", self.media), ..self.clone() }.media()
    }

    /// The storage.
    ///
    /// # Errors
    /// [`ssd`](Self::ssd) names none.
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

/// What `bytes` take at a rate.
pub(super) fn transfer_ns(bytes: u64, bytes_per_s: u64) -> u64 {
    let ns = u128::from(bytes) * 1_000_000_000 / u128::from(bytes_per_s.max(1));
    u64::try_from(ns).unwrap_or(u64::MAX)
}
