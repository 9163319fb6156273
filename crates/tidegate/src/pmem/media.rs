//! Media models: memory that is slower than the mapped one, for trials of policies anywhere.

use std::fmt;
use std::str::FromStr;

use super::ParseError;

/// Latency and bandwidth of the persistent memory that the mapped memory stands for.
///
/// Times include the mapped memory's own: a model slower than the hardware is met exactly, and a
/// faster one changes nothing. `None` means as fast as the hardware.
///
/// Written as text: `dram`, `optane`, `cxl` or `custom` (the hardware's own speed), then any number
/// of `,KEY=NUMBER` with the names of the fields:
/// `optane,write_latency_ns=80,write_bytes_per_s=4000000000`. `none` removes a limit of bandwidth.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct MediaModel {
    /// The text of the model.
    pub name: String,
    /// The least time of a read, in ns.
    pub read_latency_ns: u32,
    /// The least time of a fence whose thread stored since its last fence, in ns.
    pub write_latency_ns: u32,
    /// Most that one thread reads.
    pub thread_read_bytes_per_s: Option<u64>,
    /// Most that one thread writes.
    pub thread_write_bytes_per_s: Option<u64>,
    /// Most that all threads together read.
    pub read_bytes_per_s: Option<u64>,
    /// Most that all threads together write.
    pub write_bytes_per_s: Option<u64>,
    /// Bytes of the medium that an access of one byte occupies. A power of two.
    pub granularity_bytes: u32,
}

/// Slowest bandwidth of a model: a slower block would take longer than any client waits.
const LEAST_BYTES_PER_S: u64 = 1_000_000;
/// Longest latency of a model.
const MOST_LATENCY_NS: u32 = 1_000_000_000;
const MOST_GRANULARITY_BYTES: u32 = 1 << 20;

impl Default for MediaModel {
    fn default() -> Self {
        Self::dram()
    }
}

impl MediaModel {
    /// Returns the model of the hardware's own speed.
    pub fn dram() -> Self {
        Self {
            name: "dram".into(),
            read_latency_ns: 0,
            write_latency_ns: 0,
            thread_read_bytes_per_s: None,
            thread_write_bytes_per_s: None,
            read_bytes_per_s: None,
            write_bytes_per_s: None,
            granularity_bytes: 64,
        }
    }

    /// Returns the model of six interleaved Optane DIMMs, as in the Caiti paper: random read 305
    /// ns, store 62 to 90 ns, 6.6 GB/s read and 2.3 GB/s write a DIMM, about 3 GB/s of streaming
    /// stores from one thread, 256-byte granularity.
    pub fn optane() -> Self {
        Self {
            name: "optane".into(),
            read_latency_ns: 305,
            write_latency_ns: 76,
            thread_read_bytes_per_s: None,
            thread_write_bytes_per_s: Some(3_000_000_000),
            read_bytes_per_s: Some(6 * 6_600_000_000),
            write_bytes_per_s: Some(6 * 2_300_000_000),
            granularity_bytes: 256,
        }
    }

    /// Returns the model of non-volatile memory behind CXL: about 200 ns more than DRAM (90 ns) and
    /// 20 GB/s.
    pub fn cxl() -> Self {
        Self {
            name: "cxl".into(),
            read_latency_ns: 290,
            write_latency_ns: 290,
            read_bytes_per_s: Some(20_000_000_000),
            write_bytes_per_s: Some(20_000_000_000),
            ..Self::dram()
        }
    }

    /// Returns whether the model has no delay at all.
    pub fn is_undelayed(&self) -> bool {
        let same_speed = Self { name: self.name.clone(), ..Self::dram() };
        *self == Self { granularity_bytes: self.granularity_bytes, ..same_speed }
    }

    fn preset(name: &str) -> Option<Self> {
        match name {
            "dram" | "custom" => Some(Self::dram()),
            "optane" => Some(Self::optane()),
            "cxl" => Some(Self::cxl()),
            _ => None,
        }
    }

    fn set(&mut self, setting: &str) -> Result<(), ParseError> {
        let Some((key, value)) = setting.split_once('=') else {
            return Err(ParseError::new(format!("media setting `{setting}`: expected KEY=NUMBER")));
        };
        match key {
            "read_latency_ns" => self.read_latency_ns = latency(key, value)?,
            "write_latency_ns" => self.write_latency_ns = latency(key, value)?,
            "thread_read_bytes_per_s" => self.thread_read_bytes_per_s = bandwidth(key, value)?,
            "thread_write_bytes_per_s" => self.thread_write_bytes_per_s = bandwidth(key, value)?,
            "read_bytes_per_s" => self.read_bytes_per_s = bandwidth(key, value)?,
            "write_bytes_per_s" => self.write_bytes_per_s = bandwidth(key, value)?,
            "granularity_bytes" => self.granularity_bytes = granularity(key, value)?,
            _ => return Err(unknown_key(key)),
        }
        Ok(())
    }
}

impl FromStr for MediaModel {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let mut parts = text.split(',');
        let preset = parts.next().unwrap_or_default();
        let mut model = Self::preset(preset).ok_or_else(|| {
            ParseError::new(format!(
                "unknown media model `{preset}`: expected dram, optane, cxl or custom"
            ))
        })?;
        parts.try_for_each(|setting| model.set(setting))?;
        model.name = text.to_string();
        Ok(model)
    }
}

impl fmt::Display for MediaModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name)
    }
}

fn unknown_key(key: &str) -> ParseError {
    ParseError::new(format!(
        "unknown media setting `{key}`: expected read_latency_ns, write_latency_ns, thread_read_bytes_per_s, \
         thread_write_bytes_per_s, read_bytes_per_s, write_bytes_per_s or granularity_bytes"
    ))
}

fn latency(key: &str, value: &str) -> Result<u32, ParseError> {
    value.parse().ok().filter(|&ns| ns <= MOST_LATENCY_NS).ok_or_else(|| {
        ParseError::new(format!("media setting {key}={value}: expected 0 to {MOST_LATENCY_NS} ns"))
    })
}

fn bandwidth(key: &str, value: &str) -> Result<Option<u64>, ParseError> {
    if value == "none" {
        return Ok(None);
    }
    let parsed = value.parse().ok().filter(|&bytes_per_s| bytes_per_s >= LEAST_BYTES_PER_S);
    parsed.map(Some).ok_or_else(|| {
        ParseError::new(format!(
            "media setting {key}={value}: expected none, or {LEAST_BYTES_PER_S} bytes per second or more"
        ))
    })
}

fn granularity(key: &str, value: &str) -> Result<u32, ParseError> {
    let fits = |bytes: &u32| bytes.is_power_of_two() && *bytes <= MOST_GRANULARITY_BYTES;
    value.parse().ok().filter(fits).ok_or_else(|| {
        ParseError::new(format!(
            "media setting {key}={value}: expected a power of two from 1 to {MOST_GRANULARITY_BYTES}"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_parse_by_their_name() {
        for model in [MediaModel::dram(), MediaModel::optane(), MediaModel::cxl()] {
            assert_eq!(model.name.parse::<MediaModel>().unwrap(), model);
            assert_eq!(model.is_undelayed(), model.name == "dram");
        }
        assert!("custom".parse::<MediaModel>().unwrap().is_undelayed());
    }

    #[test]
    fn settings_change_a_preset() {
        let text =
            "optane,write_latency_ns=80,thread_write_bytes_per_s=none,write_bytes_per_s=4000000000";
        let expected = MediaModel {
            name: text.into(),
            write_latency_ns: 80,
            thread_write_bytes_per_s: None,
            write_bytes_per_s: Some(4_000_000_000),
            ..MediaModel::optane()
        };
        assert_eq!(text.parse::<MediaModel>().unwrap(), expected);
    }

    #[test]
    fn errors_name_what_was_found_and_expected() {
        let cases = [
            ("", "unknown media model ``: expected dram"),
            ("flash", "unknown media model `flash`: expected dram"),
            ("optane,", "media setting ``: expected KEY=NUMBER"),
            ("optane,x=1", "unknown media setting `x`: expected read_latency_ns"),
            ("cxl,read_latency_ns=-1", "media setting read_latency_ns=-1: expected 0 to"),
            (
                "cxl,read_bytes_per_s=0",
                "media setting read_bytes_per_s=0: expected none, or 1000000",
            ),
            (
                "cxl,granularity_bytes=3",
                "media setting granularity_bytes=3: expected a power of two",
            ),
        ];
        for (text, expected) in cases {
            let error = text.parse::<MediaModel>().unwrap_err().to_string();
            assert!(error.starts_with(expected), "{text}: {error}");
        }
    }
}
