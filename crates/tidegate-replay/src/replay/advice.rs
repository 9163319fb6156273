//! Computes the last line of a replay: the scheme to choose, the gain, and the certainty.
//!
//! Advice compares the rows that users can choose, whose schemes are engines of Tidegate, with the
//! row of the storage alone with as much DRAM. Rows are equally good if they differ by less than
//! 2 % of the time of the storage alone. Among the rows as good as the fastest, the simplest is
//! advised: data stays in place rather than moves to persistent memory, then least memory.
//!
//! The first read of a page that existed before the trace reads storage. If all data is on
//! persistent memory, the move has read the page already; the read is charged all the same. The
//! certainty is the share of the trace's parts in which the row is as good as the fastest.

use super::{ReplayArgs, Replayed, Row};
use crate::scheme::page::PAGE_BYTES;
use crate::scheme::shipped::tiers::tier_pages;
use crate::scheme::{Pmem, scheme};
use tidegate::size::Size;

/// Minimum gain, as a share of the time of the storage alone.
const LEAST_GAIN: f64 = 0.02;
/// The offer of a log for files.
const RUN: &str = "a log (`tidegate run`, or `tidegate create --engine log` for a whole disk)";

/// Returns the line of advice.
pub(super) fn advice(args: &ReplayArgs, replayed: &Replayed) -> String {
    if replayed.profile.footprint_pages == 0 {
        return "Advice: none, for there is nothing to advise on: the trace neither reads nor writes"
            .to_owned();
    }
    let mut offered: Vec<Row> =
        replayed.rows.iter().filter(|row| offer_of(row).is_some()).cloned().collect();
    charge_first_reads(&mut offered, replayed.profile.first_read_pages);
    let rows: Vec<&Row> = offered.iter().collect();
    let Some(fastest) = fastest(&rows) else {
        return "Advice: none, for no scheme of these is an engine of Tidegate".to_owned();
    };
    let is_plain = |row: &&&Row| row.pmem_bytes == 0 && row.dram_pages == fastest.dram_pages;
    let Some(plain) = rows.iter().find(is_plain) else {
        let offer = offer(fastest, replayed);
        return format!("Advice: {offer}; add the scheme dram to see the gain");
    };
    let best = simplest(&rows, fastest, plain);
    if best.pmem_bytes == 0 {
        return "Advice: no persistent memory; nothing here gains 2 % over the storage alone"
            .into();
    }
    format!(
        "Advice: {}: {:.2} times as fast as {} alone{}; {}{}",
        offer(best, replayed),
        plain.seconds / best.seconds,
        args.ssd.kind(),
        flash_life(best, plain),
        certainty(&rows, best, plain),
        share_of_time(plain, replayed.profile.seconds()),
    )
}

/// Adds the time of first reads, which other schemes spend, to the rows with all data on persistent
/// memory.
fn charge_first_reads(rows: &mut [Row], first_read_pages: u64) {
    let Some(staying) = rows.iter().find(|row| !moves_data(row) && row.totals.ssd_pages_read > 0)
    else {
        return;
    };
    #[expect(clippy::cast_precision_loss, reason = "a share needs no more than 53 bits")]
    let share = (first_read_pages as f64 / staying.totals.ssd_pages_read as f64).min(1.0);
    let charges: Vec<f64> = staying.part_read_seconds.iter().map(|read| read * share).collect();
    for row in rows.iter_mut().filter(|row| moves_data(row)) {
        row.seconds += charges.iter().sum::<f64>();
        row.part_seconds.iter_mut().zip(&charges).for_each(|(part, charge)| *part += charge);
    }
}

fn offer_of(row: &Row) -> Option<&'static str> {
    scheme(row.scheme)?.offer
}

/// Returns the choice for users, with the size of a DRAM tier if the scheme has one.
fn offer(row: &Row, replayed: &Replayed) -> String {
    let tier = Size { bytes: tier_pages(row.dram_pages) * PAGE_BYTES };
    let is_run = replayed.is_of_files && row.scheme == "log";
    let offer = if is_run { RUN } else { offer_of(row).unwrap_or_default() };
    let offer = offer.replace("NAME", row.scheme).replace("SIZE", &tier.to_string());
    if row.pmem_bytes == 0 {
        return offer;
    }
    format!("{offer}, of {}", Size { bytes: row.pmem_bytes })
}

/// Returns the fastest of `rows`; of equal rows the first one, which has the least memory.
fn fastest<'a>(rows: &[&'a Row]) -> Option<&'a Row> {
    rows.iter().copied().min_by(|one, other| one.seconds.total_cmp(&other.seconds))
}

/// Returns the simplest of `rows` that is as good as the fastest.
fn simplest<'a>(rows: &[&'a Row], fastest: &'a Row, plain: &Row) -> &'a Row {
    let most_seconds = fastest.seconds + plain.seconds * LEAST_GAIN;
    let effort = |row: &Row| (moves_data(row), row.pmem_bytes, row.dram_pages);
    let as_good = rows.iter().copied().filter(|row| row.seconds <= most_seconds);
    let order = |one: &&Row, other: &&Row| {
        effort(one).cmp(&effort(other)).then(one.seconds.total_cmp(&other.seconds))
    };
    as_good.min_by(order).unwrap_or(fastest)
}

/// Returns whether the scheme keeps all data on persistent memory.
fn moves_data(row: &Row) -> bool {
    scheme(row.scheme).is_some_and(|entry| matches!(entry.pmem, Pmem::AllData))
}

/// Returns a note about the share of the recorded time that the storage takes, if it is so small
/// that faster storage would hardly be noticed.
fn share_of_time(plain: &Row, recorded_seconds: f64) -> String {
    let share = plain.seconds / recorded_seconds;
    if share >= LEAST_GAIN || !share.is_finite() {
        return String::new();
    }
    format!(
        "; the storage alone takes {:.1} % of the {recorded_seconds:.1} s of the trace",
        share * 100.0
    )
}

fn flash_life(best: &Row, plain: &Row) -> String {
    if plain.totals.ssd_pages_written == 0 {
        return String::new();
    }
    #[expect(clippy::cast_precision_loss, reason = "a percentage is shown")]
    let saved_pct = 100.0
        - best.totals.ssd_pages_written as f64 * 100.0 / plain.totals.ssd_pages_written as f64;
    if saved_pct >= 0.0 {
        format!(", {saved_pct:.0} % fewer writes to flash")
    } else {
        format!(", {:.0} % more writes to flash", -saved_pct)
    }
}

/// Returns how many parts of the trace agree with `best`.
fn certainty(rows: &[&Row], best: &Row, plain: &Row) -> String {
    let parts = best.part_seconds.len();
    let is_as_good = |part: &usize| {
        let seconds = |row: &Row| row.part_seconds.get(*part).copied().unwrap_or(f64::INFINITY);
        let margin = seconds(plain) * LEAST_GAIN;
        rows.iter().all(|row| seconds(best) <= seconds(row) + margin)
    };
    let agree = (0..parts).filter(is_as_good).count();
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
        "{sure}: as good as the fastest in {agree} of {parts} parts of the trace, {least:.2} to \
         {most:.2} times"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Profile;
    use crate::scheme::Requests;
    use crate::time::Totals;
    fn row(scheme: &'static str, pmem_bytes: u64, written: u64, part_seconds: [f64; 5]) -> Row {
        Row {
            scheme,
            dram_pages: 10,
            pmem_bytes,
            requests: Requests::default(),
            totals: Totals { ssd_pages_written: written, ..Totals::default() },
            index_bytes: 0,
            seconds: part_seconds.iter().sum(),
            part_seconds: part_seconds.to_vec(),
            part_read_seconds: vec![0.0; 5],
        }
    }

    fn advice_of(rows: Vec<Row>) -> String {
        advice_on(rows, false)
    }

    fn advice_on(rows: Vec<Row>, is_of_files: bool) -> String {
        let args = ReplayArgs::of(["trace"]);
        let mut profile = Profile::default();
        profile.footprint_pages = 1;
        let bad_lines = Vec::new();
        advice(&args, &Replayed { profile, is_of_files, rows, real: None, bad_lines })
    }

    #[test]
    fn a_log_for_files_is_run_and_a_tier_has_its_size() {
        let rows = || vec![row("dram", 0, 9, [2.0; 5]), row("log", 1 << 20, 9, [1.0; 5])];
        assert!(advice_on(rows(), true).contains("`tidegate run`"));
        assert!(!advice_on(rows(), false).contains("`tidegate run`"));
        let tier = |scheme, seconds| Row { dram_pages: 2048, ..row(scheme, 0, 9, seconds) };
        let transit = Row { pmem_bytes: 1 << 30, ..tier("transit", [1.0; 5]) };
        let advice = advice_of(vec![tier("dram", [2.0; 5]), transit]);
        assert!(advice.contains("`--dram transit:1M`, of 1G"), "{advice}");
    }

    #[test]
    fn the_fastest_engine_is_advised_with_what_it_gains() {
        let rows = vec![
            row("dram", 0, 100, [2.0; 5]),
            row("tidegate", 1 << 20, 25, [1.0, 1.0, 1.0, 0.5, 1.5]),
            // Not an engine of Tidegate.
            row("afcm", 1 << 20, 5, [0.1; 5]),
        ];
        assert_eq!(
            advice_of(rows),
            "Advice: a cache (`tidegate create --engine cache --block-size 512`, `tidegate serve \
             --mode wo`), of 1M: 2.00 times as fast as nvme alone, 75 % fewer writes to flash; sure: as good as the fastest \
             in 5 of 5 parts of the trace, 1.33 to 4.00 times"
        );
    }

    #[test]
    fn parts_that_disagree_make_it_less_sure() {
        let rows = vec![
            row("dram", 0, 100, [1.0, 1.0, 1.0, 1.0, 9.0]),
            row("tidegate", 1 << 20, 125, [2.0, 2.0, 2.0, 2.0, 1.0]),
        ];
        let advice = advice_of(rows);
        assert!(
            advice.contains("25 % more writes")
                && advice.contains("not sure: as good as the fastest in 1 of 5"),
            "{advice}"
        );
    }

    #[test]
    fn of_what_is_as_good_the_simplest_is_advised() {
        let rows = vec![
            row("dram", 0, 100, [2.0; 5]),
            row("btt", 1 << 20, 0, [0.01; 5]),
            row("log", 4 << 20, 0, [0.02; 5]),
            row("log", 2 << 20, 0, [0.03; 5]),
            row("log", 1 << 20, 0, [0.06; 5]),
        ];
        let advice = advice_of(rows);
        assert!(advice.contains("`tidegate create --engine log`), of 2M"), "{advice}");
        assert!(advice.contains("sure: as good as the fastest in 5 of 5"), "{advice}");
    }

    #[test]
    fn a_move_to_persistent_memory_gains_nothing_by_the_first_reads_of_pages() {
        let read_s = vec![0.5; 5];
        let staying = |scheme, pmem_bytes, seconds| Row {
            totals: Totals { ssd_pages_read: 100, ..Totals::default() },
            part_read_seconds: read_s.clone(),
            ..row(scheme, pmem_bytes, 0, seconds)
        };
        let rows = [
            staying("dram", 0, [2.0; 5]),
            staying("log", 1 << 20, [0.6; 5]),
            row("btt", 1 << 20, 0, [0.1; 5]),
        ];
        let charged = |first_read_pages| {
            let mut rows = rows.clone();
            charge_first_reads(&mut rows, first_read_pages);
            rows
        };
        assert_eq!(charged(100)[2].part_seconds, [0.6; 5]);
        assert_eq!(charged(50)[2].part_seconds, [0.35; 5], "the others are read again");
        assert_eq!(charged(100)[..2], rows[..2]);
        assert!((charged(100)[2].seconds - 3.0).abs() < 1e-9);
        let mut profile = Profile::default();
        (profile.footprint_pages, profile.first_read_pages) = (100, 100);
        let (rows, bad_lines) = (rows.to_vec(), Vec::new());
        let replayed = Replayed { profile, is_of_files: false, rows, real: None, bad_lines };
        let advice = advice(&ReplayArgs::of(["trace"]), &replayed);
        assert!(advice.starts_with("Advice: a log"), "{advice}");
    }

    #[test]
    fn what_takes_hardly_any_of_the_time_is_said() {
        let row = row("dram", 0, 1, [0.01; 5]);
        assert_eq!(share_of_time(&row, 0.0), "", "the trace has no times");
        assert_eq!(share_of_time(&row, 1.0), "");
        let said = "; the storage alone takes 1.0 % of the 5.0 s of the trace";
        assert_eq!(share_of_time(&row, 5.0), said);
    }

    #[test]
    fn where_nothing_gains_the_storage_alone_is_advised() {
        let rows = vec![row("dram", 0, 1, [1.0; 5]), row("tidegate", 1 << 20, 1, [0.999; 5])];
        assert!(advice_of(rows).starts_with("Advice: no persistent memory"));
        assert!(advice_of(vec![row("afcm", 1, 1, [1.0; 5])]).contains("no scheme of these"));
        assert!(
            advice_of(vec![row("tidegate", 4096, 1, [1.0; 5])]).contains("add the scheme dram")
        );
    }
}
