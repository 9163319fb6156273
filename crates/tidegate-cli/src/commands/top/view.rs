//! The screen of `tidegate top` from two readings of a server, in lines of at most 80 columns.

use std::time::Duration;

use tidegate::stack::Stat;
use tidegate::stats::{Latencies, Reading, Value};
use tidegate::tier::State;

/// Columns for level and name of a tier: the length of the longest, `dram transit-no-bypass`.
const LABEL_COLUMNS: usize = 22;

/// Order of the latencies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// The order of the tiers, from the top.
    Tier,
    /// The slowest first, by the 99th percentile.
    Slowest,
}

/// Two readings of one server, `apart` from each other.
pub(super) struct View<'a> {
    pub(super) before: &'a Stat,
    pub(super) now: &'a Stat,
    pub(super) apart: Duration,
}

/// One row of the table of latencies.
struct Row {
    tier: String,
    operation: &'static str,
    per_second: f64,
    latencies: Latencies,
}

impl View<'_> {
    /// Returns the lines of the screen.
    pub(super) fn lines(&self, order: Order) -> Vec<String> {
        let mut lines = vec![self.title(), String::new(), self.clients(), self.requests()];
        lines.push(self.errors());
        lines.extend(self.now.tiers.iter().enumerate().filter_map(|(at, it)| self.dirty(at, it)));
        lines.extend(self.log());
        lines.push(String::new());
        lines.push(format!(
            "{:<LABEL_COLUMNS$} {:<5} {:>7} {:>8} {:>8} {:>8} {:>8} {:>7}",
            "latency, µs", "", "per s", "mean", "p50", "p99", "p99.9", "max"
        ));
        lines.extend(self.rows(order).iter().map(Row::line));
        lines
    }

    fn title(&self) -> String {
        let text = |key: &str| self.now.description.get(key).and_then(|it| it.as_str());
        let bytes = self.now.description.get("size_bytes").and_then(serde_json::Value::as_u64);
        let size = size(bytes.unwrap_or(0));
        let engine = text("engine").unwrap_or_default();
        let pool = crate::log::printable(text("pool").unwrap_or_default());
        // The end of a path tells more than its beginning.
        let cut = pool.chars().count().saturating_sub(48);
        let mark = if cut > 0 { "…" } else { "" };
        let pool: String = pool.chars().skip(cut).collect();
        format!("tidegate top  {mark}{pool}  {engine}, {size}")
    }

    fn clients(&self) -> String {
        let count = |name| whole_number(self.count("front_end", name));
        format!(
            "clients    {} open, {} taken, {} refused, {} broken off",
            count("connections_open"),
            count("connections"),
            count("connections_refused"),
            count("client_faults")
        )
    }

    fn requests(&self) -> String {
        let rate = |name| self.rate("front_end", name);
        let bytes = |name| per_second(rate(name));
        format!(
            "requests   {} reads/s {}, {} writes/s {}, {} flushes/s",
            number(rate("reads")),
            bytes("read_bytes"),
            number(rate("writes")),
            bytes("written_bytes"),
            number(rate("flushes"))
        )
    }

    fn errors(&self) -> String {
        let (all, rate) = (self.count("front_end", "errors"), self.rate("front_end", "errors"));
        format!("errors     {} in all, {}/s", whole_number(all), number(rate))
    }

    /// Describes the pending data of tier `at`, and the time to write it below at the present rate.
    fn dirty(&self, at: usize, tier: &State) -> Option<String> {
        let (level, pending) = (tier.level.name(), tier.pending_bytes);
        let holds_nothing = !["log_ring_bytes", "cache_dirty_bytes", "dram_capacity_bytes"]
            .iter()
            .any(|name| self.count(level, name) > 0);
        if pending == 0 && holds_nothing {
            return None;
        }
        let rate = self.drained_per_second(at, tier);
        let left = match (pending, rate) {
            (0, _) => "nothing to drain".to_owned(),
            (_, rate) if rate < 1.0 => "not draining now".to_owned(),
            #[expect(clippy::cast_precision_loss, reason = "for people")]
            (pending, rate) => format!("drained in {}", duration(pending as f64 / rate)),
        };
        let (size, label) = (size(pending), label(level, &tier.name));
        Some(format!("dirty      {size} in {label}, {left}, {}", per_second(rate)))
    }

    /// Returns the bytes a second that leave tier `at` for the one below.
    fn drained_per_second(&self, at: usize, tier: &State) -> f64 {
        let level = tier.level.name();
        if let Some(below) = self.now.tiers.get(at + 1) {
            return self.rate(below.level.name(), "written_bytes");
        }
        if value(self.now, level, "log_retired_bytes").is_some() {
            return self.rate(level, "log_retired_bytes");
        }
        let before = self.before.tiers.get(at).map_or(0, |it| it.pending_bytes);
        self.per_second(before.saturating_sub(tier.pending_bytes))
    }

    fn log(&self) -> Option<String> {
        let (used, ring) = ("log_used_bytes", "log_ring_bytes");
        let (used, ring) = (self.count("pmem", used), self.count("pmem", ring));
        let pct = used.saturating_mul(100).checked_div(ring)?;
        let waits = whole_number(self.count("pmem", "log_full_waits"));
        let (used, ring) = (size(used), size(ring));
        Some(format!(
            "log        {used} of {ring} in use, {pct} %; {waits} writes waited for space"
        ))
    }

    fn rows(&self, order: Order) -> Vec<Row> {
        let mut rows = Vec::new();
        for reading in &self.now.metrics {
            let operation = match &*reading.metric.name {
                "read_ns" => "read",
                "write_ns" => "write",
                _ => continue,
            };
            let Value::Latencies(now) = &reading.value else { continue };
            let value_of = |key| reading.labels.get(key).map_or("", String::as_str);
            let level = value_of("level");
            let counter = if operation == "read" { "reads" } else { "writes" };
            let before = match value(self.before, level, &reading.metric.name) {
                Some(Value::Latencies(before)) => before.clone(),
                _ => Latencies::default(),
            };
            let is_reset = now.count < before.count;
            rows.push(Row {
                tier: label(level, value_of("tier")),
                operation,
                per_second: self.rate(level, counter),
                // After a reset in between, all latencies of the later reading count.
                latencies: if is_reset { now.clone() } else { now.since(&before) },
            });
        }
        if order == Order::Slowest {
            rows.sort_by_key(|row| std::cmp::Reverse(row.latencies.quantile_ns(990_000)));
        }
        rows
    }

    fn count(&self, level: &str, name: &str) -> u64 {
        whole(self.now, level, name)
    }

    /// Returns the growth of a counter a second. A counter that is lower than before was reset to
    /// 0.
    fn rate(&self, level: &str, name: &str) -> f64 {
        let (before, now) = (whole(self.before, level, name), self.count(level, name));
        self.per_second(now.checked_sub(before).unwrap_or(now))
    }

    #[expect(clippy::cast_precision_loss, reason = "for people")]
    fn per_second(&self, grown: u64) -> f64 {
        grown as f64 / self.apart.as_secs_f64().max(0.001)
    }
}

impl Row {
    fn line(&self) -> String {
        let Self { tier, operation, per_second, latencies } = self;
        let micros = |ns: u64| match Duration::from_nanos(ns).as_secs_f64() * 1e6 {
            _ if latencies.count == 0 => "-".to_owned(),
            micros if micros < 100.0 => format!("{micros:.2}"),
            micros if micros < 9_999_999.5 => format!("{micros:.0}"),
            micros => format!("{}s", number(micros / 1e6)),
        };
        let quantile = |millionths| micros(latencies.quantile_ns(millionths));
        format!(
            "{tier:<LABEL_COLUMNS$} {operation:<5} {:>7} {:>8} {:>8} {:>8} {:>8} {:>7}",
            number(*per_second),
            micros(latencies.mean_ns()),
            quantile(500_000),
            quantile(990_000),
            quantile(999_000),
            micros(latencies.max_ns)
        )
    }
}

/// Returns the values of the metric `name` of all tiers at `level`.
fn values<'s>(stat: &'s Stat, level: &'s str, name: &'s str) -> impl Iterator<Item = &'s Value> {
    let is_it = move |reading: &&Reading| {
        reading.metric.name == name && reading.labels.get("level").is_some_and(|it| it == level)
    };
    stat.metrics.iter().filter(is_it).map(|reading| &reading.value)
}

/// Returns the value of the metric `name` of the first tier at `level` that has it.
fn value<'s>(stat: &'s Stat, level: &'s str, name: &'s str) -> Option<&'s Value> {
    values(stat, level, name).next()
}

/// Returns the sum of the metric `name` at `level`, or 0 if no tier there has it.
fn whole(stat: &Stat, level: &str, name: &str) -> u64 {
    let number = |value: &Value| match value {
        Value::Whole(number) => *number,
        _ => 0,
    };
    values(stat, level, name).map(number).sum()
}

/// Returns level and name of a tier in [`LABEL_COLUMNS`].
fn label(level: &str, name: &str) -> String {
    let whole = format!("{level} {name}");
    if whole.chars().count() <= LABEL_COLUMNS {
        return whole;
    }
    whole.chars().take(LABEL_COLUMNS - 1).chain(['…']).collect()
}

/// Formats a number in at most seven columns.
fn number(value: f64) -> String {
    match value {
        value if value < 9_999_999.5 => format!("{value:.0}"),
        value if value < 1e9 => format!("{:.1}M", value / 1e6),
        value if value < 1e12 => format!("{:.1}G", value / 1e9),
        value => format!("{value:.0e}"),
    }
}

#[expect(clippy::cast_precision_loss, reason = "for people")]
fn whole_number(value: u64) -> String {
    number(value as f64)
}

/// Formats a number of bytes in at most six columns.
#[expect(clippy::cast_precision_loss, reason = "for people")]
fn size(bytes: u64) -> String {
    rounded(bytes as f64)
}

/// Formats a number of bytes a second.
fn per_second(bytes: f64) -> String {
    format!("{}/s", rounded(bytes))
}

/// Formats a number of bytes with two to four digits, without a fraction of zero.
fn rounded(bytes: f64) -> String {
    let units = ["B", "K", "M", "G", "T", "P", "E"];
    let (mut value, mut unit) = (bytes, 0);
    while value >= 1000.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = usize::from(value < 100.0 && value.fract() > 0.0 && unit > 0);
    format!("{value:.digits$}{}", units[unit])
}

fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 1.0 => "less than 1 s".to_owned(),
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s if s < 3.6e7 => format!("{:.0} h", s / 3600.0),
        _ => "over 10000 h".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tidegate::stats::Bucket;

    use super::*;

    fn reading(level: &str, name: &str, value: &serde_json::Value) -> serde_json::Value {
        let kind = if value.is_object() { "histogram" } else { "counter" };
        json!({"name": name, "kind": kind, "unit": "count", "help": "", "value": value,
            "labels": {"level": level,
                "tier": if level == "pmem" { "log" } else { "transit-no-bypass" }}})
    }

    /// What a server with a DRAM tier before a log says, `scale` seconds after its start.
    fn stat(scale: u64) -> Stat {
        let latencies = json!({"count": 100 * scale, "sum_ns": 200_000 * scale, "max_ns": 123_456_789,
            "buckets": [{"upto_ns": 1500, "samples": 99 * scale},
                {"upto_ns": 1_000_000_000, "samples": scale}]});
        let metrics = [
            reading("front_end", "connections_open", &json!(3)),
            reading("front_end", "writes", &json!(1_234_567 * scale)),
            reading("front_end", "written_bytes", &json!(5_056_786_432_u64 * scale)),
            reading("front_end", "errors", &json!(2 * scale)),
            reading("dram", "write_ns", &latencies),
            reading("pmem", "written_bytes", &json!((64 << 20) * scale)),
            reading("pmem", "writes", &json!(16_384 * scale)),
            reading("pmem", "write_ns", &latencies),
            reading("pmem", "log_used_bytes", &json!(3 << 20)),
            reading("pmem", "log_ring_bytes", &json!(12 << 20)),
            reading("pmem", "log_retired_bytes", &json!(0)),
        ];
        let tier = |level, name, pending: u64| {
            json!({"level": level, "name": name,
            "pending_bytes": pending, "details": {}})
        };
        serde_json::from_value(json!({"live": true, "engine": "log", "size_bytes": 64 << 20,
            "pool": format!("/{}/pool", "long".repeat(30)), "metrics": metrics,
            "tiers": [tier("dram", "transit-no-bypass", 640 << 20), tier("pmem", "log", 3 << 20)]}))
        .unwrap()
    }

    #[test]
    fn a_screen_has_80_columns_and_says_what_goes_on() {
        let (before, now) = (stat(1), stat(3));
        let view = View { before: &before, now: &now, apart: Duration::from_secs(2) };
        let lines = view.lines(Order::Tier);
        for line in &lines {
            assert!(line.chars().count() <= 80, "{} columns: {line}", line.chars().count());
        }
        let text = lines.join("\n");
        for part in [
            "clients    3 open",
            "0 reads/s 0B/s, 1234567 writes/s 4.7G/s",
            "errors     6 in all, 2/s",
            "dirty      640M in dram transit-no-bypass, drained in 10 s, 64M/s",
            "dirty      3M in pmem log, not draining now",
            "log        3M of 12M in use, 25 %",
        ] {
            assert!(text.contains(part), "{part} is missing in\n{text}");
        }
        let row = lines.iter().find(|line| line.starts_with("pmem log")).unwrap();
        let shown: Vec<_> = row.split_whitespace().collect();
        assert_eq!(shown[2..], ["write", "16384", "2.00", "1.50", "1.50", "123457", "123457"]);
    }

    /// All counters and latencies are smaller than in the reading before.
    #[test]
    fn a_reset_shows_what_was_counted_since() {
        let (before, now) = (stat(3), stat(1));
        let view = View { before: &before, now: &now, apart: Duration::from_secs(1) };
        let lines = view.lines(Order::Tier);
        let text = lines.join("\n");
        assert!(text.contains("1234567 writes/s 4.7G/s"), "{text}");
        assert!(text.contains("errors     2 in all, 2/s"), "{text}");
        let row = lines.iter().find(|line| line.starts_with("pmem log")).unwrap();
        let shown: Vec<_> = row.split_whitespace().collect();
        assert_eq!(shown[2..5], ["write", "16384", "2.00"]);
    }

    /// Sizes that are no whole number of a unit, and counters of nine and of twenty digits.
    #[test]
    fn a_screen_of_large_numbers_has_80_columns_and_all_digits_of_its_last_column() {
        for (count, shown) in [(999_999_999_u64, "1000.0M"), (u64::MAX, "2e19")] {
            let (before, mut now) = (stat(1), stat(3));
            for reading in &mut now.metrics {
                match &mut reading.value {
                    Value::Whole(number) => *number = count,
                    Value::Latencies(latencies) => latencies.max_ns = 987_654_321_098,
                    Value::Real(_) => {}
                }
            }
            for name in ["connections", "connections_refused", "client_faults", "log_full_waits"] {
                let level = if name.starts_with("log") { "pmem" } else { "front_end" };
                now.metrics
                    .push(serde_json::from_value(reading(level, name, &json!(count))).unwrap());
            }
            now.tiers.iter_mut().for_each(|tier| tier.pending_bytes = count);
            let view = View { before: &before, now: &now, apart: Duration::from_secs(1) };
            let lines = view.lines(Order::Tier);
            for line in &lines {
                assert!(line.chars().count() <= 80, "{} columns: {line}", line.chars().count());
            }
            let text = lines.join("\n");
            let clients =
                format!("{shown} open, {shown} taken, {shown} refused, {shown} broken off");
            assert!(text.contains(&clients), "{text}");
            let row =
                lines.iter().find(|line| line.starts_with("dram transit-no-bypass ")).unwrap();
            assert!(row.ends_with(" 1000000"), "the bucket's end, in µs: {row}");
        }
    }

    #[test]
    fn what_has_too_many_columns_is_made_shorter() {
        assert_eq!(label("dram", "transit-no-bypass"), "dram transit-no-bypass");
        assert_eq!(label("dram", "transit-no-bypass2"), "dram transit-no-bypas…");
        let numbers = [0.4, 9_999_999.4, 9_999_999.5, 999_999_999.0, 1e12].map(number);
        assert_eq!(numbers, ["0", "9999999", "10.0M", "1000.0M", "1e12"]);
        let sizes = [0, 999, 4096, 3 << 20, (3 << 20) + 64, 671_092_736, u64::MAX].map(size);
        assert_eq!(sizes, ["0B", "999B", "4K", "3M", "3.0M", "640M", "16E"]);
        let row = |max_ns| {
            let buckets = vec![Bucket { upto_ns: max_ns, samples: 1 }];
            let latencies = Latencies { count: 1, sum_ns: max_ns, max_ns, buckets };
            Row { tier: String::new(), operation: "read", per_second: 1.0, latencies }.line()
        };
        assert!(row(9_999_999_000).ends_with(" 9999999"), "{}", row(9_999_999_000));
        assert!(row(123_000_000_000).ends_with(" 123s"), "{}", row(123_000_000_000));
    }

    #[test]
    fn the_slowest_tier_comes_first_on_demand() {
        let (before, mut now) = (stat(1), stat(2));
        for reading in now.metrics.iter_mut().filter(|it| it.labels["level"] == "pmem") {
            if let Value::Latencies(latencies) = &mut reading.value {
                latencies.buckets[1].samples = 100;
            }
        }
        let view = View { before: &before, now: &now, apart: Duration::from_secs(1) };
        let first = |order| view.rows(order)[0].tier.clone();
        assert_eq!(
            (first(Order::Tier), first(Order::Slowest)),
            ("dram transit-no-bypass".into(), "pmem log".into())
        );
    }
}
