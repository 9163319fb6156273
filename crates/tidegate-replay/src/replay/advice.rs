//! The last line of a replay: what to choose, what it gains, and how sure that is.
//!
//! Advice is about what users can choose: the fastest row whose scheme an engine of Tidegate
//! offers, against the row of storage alone with as much DRAM. It is as sure as the parts of the
//! trace agree on it: each part asks by itself which of these rows is the fastest.

use super::{ReplayArgs, Replayed, Row};
use crate::scheme::scheme;
use tidegate::size::Size;

/// A gain of less than this is none.
const LEAST_GAIN: f64 = 1.02;

/// The line.
pub(super) fn advice(args: &ReplayArgs, replayed: &Replayed) -> String {
    let rows: Vec<&Row> = replayed.rows.iter().filter(|row| offer_of(row).is_some()).collect();
    let Some(best) = fastest(&rows) else {
        return "Advice: none, for no scheme of these is an engine of Tidegate".to_owned();
    };
    let is_plain = |row: &&&Row| row.pmem_bytes == 0 && row.dram_pages == best.dram_pages;
    let Some(plain) = rows.iter().find(is_plain) else {
        return format!("Advice: {}; add the scheme dram to see the gain", offer(best));
    };
    let gain = plain.seconds / best.seconds;
    if gain < LEAST_GAIN {
        return "Advice: no persistent memory; nothing here gains 2 % over the storage alone"
            .into();
    }
    format!(
        "Advice: {}: {gain:.2} times as fast as {} alone{}; {}",
        offer(best),
        args.ssd,
        flash_life(best, plain),
        certainty(&rows, best, plain),
    )
}

fn offer_of(row: &Row) -> Option<&'static str> {
    scheme(row.scheme)?.offer
}

fn offer(row: &Row) -> String {
    let offer = offer_of(row).unwrap_or_default();
    if row.pmem_bytes == 0 {
        return offer.to_owned();
    }
    format!("{offer}, of {}", Size { bytes: row.pmem_bytes })
}

/// The fastest of `rows`; of those that are equal the first, which has least memory.
fn fastest<'a>(rows: &[&'a Row]) -> Option<&'a Row> {
    rows.iter().copied().min_by(|one, other| one.seconds.total_cmp(&other.seconds))
}

fn flash_life(best: &Row, plain: &Row) -> String {
    if plain.ssd_pages_written == 0 {
        return String::new();
    }
    #[expect(clippy::cast_precision_loss, reason = "a percentage is shown")]
    let saved_pct = 100.0 - best.ssd_pages_written as f64 * 100.0 / plain.ssd_pages_written as f64;
    if saved_pct >= 0.0 {
        format!(", {saved_pct:.0} % fewer writes to flash")
    } else {
        format!(", {:.0} % more writes to flash", -saved_pct)
    }
}

/// How the parts of the trace agree with `best`.
fn certainty(rows: &[&Row], best: &Row, plain: &Row) -> String {
    let parts = best.part_seconds.len();
    let is_fastest = |part: &usize| {
        let seconds = |row: &Row| row.part_seconds.get(*part).copied().unwrap_or(f64::INFINITY);
        rows.iter().all(|row| seconds(best) <= seconds(row))
    };
    let agree = (0..parts).filter(is_fastest).count();
    let gains = plain.part_seconds.iter().zip(&best.part_seconds);
    let gains: Vec<f64> =
        gains.map(|(plain, best)| plain / best).filter(|it| it.is_finite()).collect();
    let least = gains.iter().copied().fold(f64::INFINITY, f64::min);
    let most = gains.iter().copied().fold(0.0, f64::max);
    let sure = match agree {
        agree if agree == parts => "sure",
        agree if agree * 3 >= parts * 2 => "fairly sure",
        _ => "not sure",
    };
    if gains.is_empty() {
        return format!("{sure}: the trace is too short to be split");
    }
    format!(
        "{sure}: the fastest in {agree} of {parts} parts of the trace, {least:.2} to {most:.2} times"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Profile;
    fn row(scheme: &'static str, pmem_bytes: u64, written: u64, part_seconds: [f64; 5]) -> Row {
        Row {
            scheme,
            dram_pages: 10,
            pmem_bytes,
            reads: 0,
            read_hits: 0,
            writes: 0,
            syncs: 0,
            synced_pages: 0,
            ssd_pages_written: written,
            ssd_pages_read: 0,
            pmem_data_bytes: 0,
            pmem_metadata_bytes: 0,
            index_bytes: 0,
            seconds: part_seconds.iter().sum(),
            part_seconds: part_seconds.to_vec(),
        }
    }

    fn advice_of(rows: Vec<Row>) -> String {
        let args = ReplayArgs::of(["trace"]);
        advice(
            &args,
            &Replayed { profile: Profile::default(), rows, real: None, bad_lines: Vec::new() },
        )
    }

    #[test]
    fn the_fastest_engine_is_advised_with_what_it_gains() {
        let rows = vec![
            row("dram", 0, 100, [2.0; 5]),
            row("sccm", 1 << 20, 25, [1.0, 1.0, 1.0, 0.5, 1.5]),
            // No engine of ours.
            row("afcm", 1 << 20, 5, [0.1; 5]),
        ];
        assert_eq!(
            advice_of(rows),
            "Advice: a cache (`tidegate create --engine cache`) with granularity=page, of 1M: 2.00 \
             times as fast as nvme alone, 75 % fewer writes to flash; sure: the fastest in 5 of 5 \
             parts of the trace, 1.33 to 4.00 times"
        );
    }

    #[test]
    fn parts_that_disagree_make_it_less_sure() {
        let rows = vec![
            row("dram", 0, 100, [1.0, 1.0, 1.0, 1.0, 9.0]),
            row("sccm", 1 << 20, 125, [2.0, 2.0, 2.0, 2.0, 1.0]),
        ];
        let advice = advice_of(rows);
        assert!(
            advice.contains("25 % more writes")
                && advice.contains("not sure: the fastest in 1 of 5"),
            "{advice}"
        );
    }

    #[test]
    fn where_nothing_gains_the_storage_alone_is_advised() {
        let rows = vec![row("dram", 0, 1, [1.0; 5]), row("sccm", 1 << 20, 1, [0.999; 5])];
        assert!(advice_of(rows).starts_with("Advice: no persistent memory"));
        assert!(advice_of(vec![row("afcm", 1, 1, [1.0; 5])]).contains("no scheme of these"));
        assert!(advice_of(vec![row("sccm", 4096, 1, [1.0; 5])]).contains("add the scheme dram"));
    }
}
