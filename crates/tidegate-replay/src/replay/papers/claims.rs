//! Claims of the AFCM paper beside the results of the traces: rows of the tables of claims.

use super::{
    FACEBOOK, IPHOTO, Measure, PARTLY_DIRTY, PMEM_PCT, Played, TPCC, TWITTER, USR1, USR2, seconds,
    traffic, written,
};
use crate::papers::Check;
use crate::replay::Row;
use crate::scheme::tcow;

pub(super) const PARTLY_TITLE: &str = "The paper's claims, on its six workloads: made ones for Iphoto, Usr1 and Usr2, traces for\n\
     Facebook, Twitter and TPC-C (PostgreSQL), as far as these were given";

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

fn largest(values: &[f64]) -> f64 {
    values.iter().copied().fold(0.0, f64::max)
}

/// Traces with syncs, for the checks of claims.
struct Synced<'a>(Vec<&'a Played>);

impl Synced<'_> {
    fn ratios(&self, one: &str, other: &str, of: Measure) -> Vec<f64> {
        self.0.iter().filter_map(|it| it.ratio(one, other, of)).collect()
    }

    /// Returns by how many percent `of` is lower for `one` than for `other`, in the mean.
    fn less_pct(&self, one: &str, other: &str, of: Measure) -> f64 {
        100.0 - mean(&self.ratios(one, other, of)) * 100.0
    }

    /// Returns the DRAM for the index of `afcm` in percent of the workload, by trace.
    fn index_pcts(&self) -> Vec<f64> {
        self.0.iter().filter_map(|it| index_pct(it)).collect()
    }

    /// Returns a row for a claim about all workloads: the number of workloads that fulfil it.
    fn all(&self, claim: Claim, holds: impl Fn(&Played) -> bool, reason: &'static str) -> Check {
        let count = self.0.iter().filter(|it| holds(it)).count();
        let ours = format!("{count} of {}", self.0.len());
        check(claim, ("all".to_owned(), ours), count == self.0.len(), reason)
    }

    fn atomic_pct(&self) -> f64 {
        let pct = |it: &&Played| Some((it.atomic.seconds / it.row("afcm")?.seconds - 1.0) * 100.0);
        mean(&self.0.iter().filter_map(pct).collect::<Vec<_>>())
    }

    /// Returns a row for our own aim.
    fn aim(&self, what: &'static str, of: Measure, reason: &'static str) -> Check {
        let is_no_worse = |it: &Played| it.row("tidegate").map(of) <= it.row("afcm").map(of);
        Check { paper: "all (our aim)".to_owned(), ..self.all(("-", what), is_no_worse, reason) }
    }

    fn share_check(&self) -> Check {
        let most = |it: &&&Played| it.replayed.profile.synced_share() > Some(0.7);
        let count = self.0.iter().filter(most).count();
        check(
            ("1", "workloads of whose written bytes a sync covers 70 % or more"),
            ("5 of 6".to_owned(), format!("{count} of {}", self.0.len())),
            count * 6 >= self.0.len() * 5,
            "other workloads; traces without syncs are not counted",
        )
    }
}

/// A figure, and the claim about it.
type Claim = (&'static str, &'static str);

/// Returns a row for a claim of a figure: the paper's result, ours, and the reason of a difference.
fn check(
    (figure, what): Claim,
    (paper, ours): (String, String),
    holds: bool,
    reason: &'static str,
) -> Check {
    let (verdict, reason) = if holds { ("holds", "") } else { ("differs", reason) };
    let what = what.to_owned();
    Check { figure, what, paper, ours, verdict: verdict.into(), reason: reason.into() }
}

/// Returns a row for a lower bound from the paper in `unit`. It holds from 85 % of the bound on.
fn at_least(claim: Claim, (paper, ours): (f64, f64), unit: &str, reason: &'static str) -> Check {
    let numbers = (format!("{paper} {unit}"), format!("{ours:.2} {unit}"));
    check(claim, numbers, ours >= paper * 0.85, reason)
}

/// Returns a row for an upper bound in percent. It holds up to 115 % of the bound.
fn at_most(claim: Claim, (paper, ours): (f64, f64), reason: &'static str) -> Check {
    check(claim, (format!("{paper} %"), format!("{ours:.2} %")), ours <= paper * 1.15, reason)
}

/// Returns a row for a number of the paper's text, a factor or a percentage. It holds within 15 %;
/// of a factor, at least half of the gain must be reached, too.
fn about(
    claim: Claim,
    (paper, ours): (f64, Option<f64>),
    unit: &str,
    reason: &'static str,
) -> Option<Check> {
    let ours = ours?;
    let numbers = (format!("{paper} {unit}"), format!("{ours:.2} {unit}"));
    let has_gain = unit != "times" || ours - 1.0 >= (paper - 1.0) / 2.0;
    Some(check(claim, numbers, has_gain && (ours - paper).abs() <= paper * 0.15, reason))
}

/// Returns the rows for traces of programs, which write mostly whole pages.
pub(super) fn whole(played: &[&Played]) -> Vec<Check> {
    let synced = Synced(played.iter().copied().filter(|it| it.has_syncs()).collect());
    let over_dram = largest(&synced.ratios("dram", "afcm", seconds));
    let over_sccm = largest(&synced.ratios("sccm", "afcm", seconds));
    let mut rows = vec![
        synced.share_check(),
        at_least(OVER_DRAM, (8.8, over_dram), "times", "as many syncs stand beside reads of flash"),
        at_least(OVER_SCCM, (1.84, over_sccm), "times", WHOLE),
    ];
    rows.extend(synced.means(WHOLE));
    rows.extend(synced.aims());
    rows
}

/// Returns the rows for the paper's own workloads whose substitutes are in `played`.
pub(super) fn partly_dirty(played: &[Played], groups: &[Played]) -> Vec<Check> {
    let find = |part: &str| played.iter().find(|it| it.name.contains(part));
    let names = [IPHOTO, USR1, USR2, FACEBOOK, TWITTER, TPCC];
    let six = Synced(names.iter().filter_map(|name| find(name)).collect());
    let made = Synced(PARTLY_DIRTY.iter().filter_map(|name| find(name)).collect());
    let mut rows = Vec::new();
    rows.extend(find(USR1).map(half_synced));
    rows.extend(find(TPCC).map(all_dirty));
    rows.push(dirty_shares(&made));
    rows.extend(times(&six, find(USR2), find(TPCC), find(FACEBOOK)));
    if !groups.is_empty() {
        rows.push(Synced(groups.iter().collect()).all(FASTEST_GROUP, afcm_is_fastest, CPU));
    }
    rows.extend(six.means(SIX));
    rows.extend(stores(&six));
    rows.extend(find(IPHOTO).and_then(gain_grows));
    rows.extend(find(USR2).into_iter().flat_map(by_pmem));
    rows.extend(find(USR1).into_iter().flat_map(by_dram));
    rows.push(torn_syncs());
    rows.extend(made.aims());
    rows
}

const OVER_DRAM: Claim = ("7a", "afcm is faster than dram, up to");
const OVER_SCCM: Claim = ("7a", "afcm is faster than sccm, up to");
const FASTEST_GROUP: Claim = ("7b", "groups of workloads on which afcm is the fastest of the four");

impl Synced<'_> {
    /// Returns rows for the paper's means over its workloads.
    fn means(&self, why_less: &'static str) -> [Check; 5] {
        const WRITES: Claim = ("7c", "afcm writes fewer pages to flash than sccm, in the mean");
        const THAN_SCCM: Claim =
            ("8", "afcm stores fewer bytes in persistent memory than sccm, in the mean");
        const THAN_SFCM: Claim =
            ("8", "afcm stores fewer bytes in persistent memory than sfcm, in the mean");
        const INDEX: Claim = ("9", "DRAM for the index of afcm, of the workload, at most");
        const ATOMIC: Claim = ("13", "atomic syncs make afcm slower, in the mean by");
        let fewer = self.less_pct("afcm", "sccm", written);
        let than_sccm = self.less_pct("afcm", "sccm", traffic);
        let than_sfcm = self.less_pct("afcm", "sfcm", traffic);
        [
            at_least(WRITES, (63.0, fewer), "%", why_less),
            at_least(THAN_SCCM, (13.4, than_sccm), "%", why_less),
            at_least(THAN_SFCM, (10.6, than_sfcm), "%", WORDS),
            at_most(INDEX, (2.0, largest(&self.index_pcts())), EXTENTS),
            at_most(ATOMIC, (0.14, self.atomic_pct()), "old versions take space until a sync ends"),
        ]
    }

    /// Returns rows for our own aims.
    fn aims(&self) -> [Check; 3] {
        const TIME: &str = "traces on which tidegate takes no longer than afcm";
        const WRITES: &str = "traces on which tidegate writes no more pages to flash than afcm";
        const STORES: &str = "traces on which tidegate stores no more in persistent memory";
        [
            self.aim(TIME, seconds, OWN_SECONDS),
            self.aim(WRITES, written, OWN_WRITTEN),
            self.aim(STORES, traffic, OWN_STORED),
        ]
    }
}

/// Checks figure 1 for Usr1.
fn half_synced(usr1: &Played) -> Check {
    let share = usr1.replayed.profile.synced_share().unwrap_or_default() * 100.0;
    let numbers = ("nearly 50 %".to_owned(), format!("{share:.0} %"));
    let holds = (40.0..55.0).contains(&share);
    check(("1", "usr1: share of written bytes that a sync covers"), numbers, holds, MADE)
}

/// Checks figure 2 for TPC-C.
fn all_dirty(tpcc: &Played) -> Check {
    let share = tpcc.replayed.profile.whole_share().unwrap_or_default() * 100.0;
    let claim = ("2", "TPC-C: synced pages all of which is dirty");
    at_least(claim, (99.0, share), "%", "another version of PostgreSQL")
}

/// Returns figure 2 for the generated workloads. It is an input, so that no check is possible.
fn dirty_shares(made: &Synced<'_>) -> Check {
    let share = |it: &&Played| {
        let profile = &it.replayed.profile;
        let mean_pct = profile.mean_dirty_bytes().unwrap_or_default() * 100.0 / 4096.0;
        let partly_pct = 100.0 - profile.whole_share().unwrap_or_default() * 100.0;
        format!("{partly_pct:.0} % ({mean_pct:.0} %)")
    };
    Check {
        figure: "2",
        what: "iphoto, usr1, usr2: synced pages that are partly dirty (mean dirty ratio)"
            .to_owned(),
        paper: "a large proportion, much less than 100 %".to_owned(),
        ours: made.0.iter().map(share).collect::<Vec<_>>().join(", "),
        verdict: "an input".into(),
        reason: "the paper's text has no numbers: assumed".into(),
    }
}

/// Checks figures 7a and 7c.
fn times(
    six: &Synced<'_>,
    usr2: Option<&Played>,
    tpcc: Option<&Played>,
    facebook: Option<&Played>,
) -> Vec<Check> {
    const FASTEST: Claim = ("7a", "workloads on which afcm is the fastest of the four");
    const TPCC_SFCM: Claim = ("7a", "TPC-C: sfcm is slower than sccm by");
    const FACEBOOK_SFCM: Claim = ("7a", "Facebook: sfcm is slower than sccm by");
    const FACEBOOK_WRITES: Claim = ("7c", "Facebook: sfcm writes fewer pages to flash by");
    let more_pct = |played: Option<&Played>, of: Measure| {
        played?.ratio("sfcm", "sccm", of).map(|ratio| (ratio - 1.0) * 100.0)
    };
    let usr2_over = |scheme| usr2.and_then(|it| it.ratio(scheme, "afcm", seconds));
    let facebook_fewer = more_pct(facebook, written).map(|pct| -pct);
    let mut rows: Vec<Check> = [
        about(("7a", "usr2: afcm is faster than dram"), (8.8, usr2_over("dram")), "times", MADE),
        about(("7a", "usr2: afcm is faster than sccm"), (1.84, usr2_over("sccm")), "times", MADE),
        about(TPCC_SFCM, (27.0, more_pct(tpcc, seconds)), "%", REUSE),
        about(FACEBOOK_SFCM, (6.0, more_pct(facebook, seconds)), "%", CPU),
        about(FACEBOOK_WRITES, (5.0, facebook_fewer), "%", FEW),
    ]
    .into_iter()
    .flatten()
    .collect();
    rows.push(six.all(FASTEST, afcm_is_fastest, CPU));
    rows
}

/// The paper's schemes.
const FOUR: [&str; 4] = ["dram", "sccm", "sfcm", "afcm"];

/// Returns whether no other scheme of the paper takes 1 % less time.
fn afcm_is_fastest(it: &Played) -> bool {
    let is_slower = |other: &&str| it.ratio(other, "afcm", seconds) >= Some(0.99);
    FOUR.iter().all(is_slower)
}

/// Returns whether the numbers of `schemes` do not decrease, in this order.
fn is_ordered(it: &Played, schemes: &[&str], of: fn(&Row) -> u64) -> bool {
    schemes.iter().map(|scheme| it.row(scheme).map(of)).is_sorted()
}

/// Checks figures 8 and 9.
fn stores(six: &Synced<'_>) -> Vec<Check> {
    const DATA: Claim = ("8", "sfcm stores least data and sccm most");
    const METADATA: Claim = ("8", "sfcm stores more metadata than sccm and afcm");
    const LEAST: Claim = ("8", "afcm stores fewer bytes, data and metadata, than sccm and sfcm");
    const INDEX: Claim = ("9", "sccm needs least DRAM for its index, sfcm most");
    let pcts = six.index_pcts();
    let (least, most) = (pcts.iter().copied().fold(f64::INFINITY, f64::min), largest(&pcts));
    let ordered = |claim, orders: &[&[&str]], of: fn(&Row) -> u64, reason| {
        let holds = |it: &Played| orders.iter().all(|order| is_ordered(it, order, of));
        six.all(claim, holds, reason)
    };
    let over_afcm: [&[&str]; 2] = [&["afcm", "sccm"], &["afcm", "sfcm"]];
    let below_sfcm: [&[&str]; 2] = [&["sccm", "sfcm"], &["afcm", "sfcm"]];
    vec![
        ordered(DATA, &[&["sfcm", "afcm", "sccm"]], |row| row.totals.pmem_data_bytes, AGAIN),
        ordered(METADATA, &below_sfcm, |row| row.totals.pmem_metadata_bytes, WORDS),
        ordered(LEAST, &over_afcm, Row::pmem_traffic_bytes, ANEW),
        ordered(INDEX, &[&["sccm", "afcm", "sfcm"]], |row| row.index_bytes, KEEPS),
        check(
            ("9", "DRAM for the index of afcm, of the workload"),
            ("0.04 to 2 %".to_owned(), format!("{least:.2} to {most:.2} %")),
            least >= 0.04 * 0.85 && most <= 2.0 * 1.15,
            EXTENTS,
        ),
    ]
}

/// Checks figure 10.
fn gain_grows(iphoto: &Played) -> Option<Check> {
    let gain = |pct| iphoto.ratio_at(("sccm", "afcm"), (super::DRAM_PCT, pct), seconds);
    let gains = super::PMEM_PCTS.map(gain).into_iter().collect::<Option<Vec<_>>>()?;
    let text = |gain: &f64| format!("{gain:.2}");
    Some(check(
        ("10", "iphoto: sccm's time over afcm's at 5, 10, 15, 20 % of persistent memory"),
        ("grows".to_owned(), gains.iter().map(text).collect::<Vec<_>>().join(", ")),
        gains.is_sorted() && gains.first() < gains.last(),
        MADE,
    ))
}

/// Checks figure 11.
fn by_pmem(usr2: &Played) -> Vec<Check> {
    let of = |pct, of| usr2.ratio_at(("sccm", "afcm"), (super::DRAM_PCT, pct), of);
    let rows = [
        (("11", "usr2, 10 % persistent memory: sccm's time over afcm's"), 1.1, of(10.0, seconds)),
        (("11", "usr2, 10 %: sccm's pages to flash over afcm's"), 1.14, of(10.0, written)),
        (("11", "usr2, 20 %: sccm's time over afcm's"), 1.84, of(20.0, seconds)),
        (("11", "usr2, 20 %: sccm's pages to flash over afcm's"), 2.19, of(20.0, written)),
    ];
    times_of_made(rows)
}

/// Checks figure 12.
fn by_dram(usr1: &Played) -> Vec<Check> {
    let gain = |pct| usr1.ratio_at(("sccm", "afcm"), (pct, PMEM_PCT), seconds);
    let from_10_to_50 = |scheme| {
        let at = |pct| usr1.row_at(scheme, pct, PMEM_PCT).map(|row| row.seconds);
        Some(at(10.0)? / at(50.0)?)
    };
    let rows = [
        (("12", "usr1, 30 % DRAM: sccm's time over afcm's"), 1.16, gain(30.0)),
        (("12", "usr1, 50 % DRAM: sccm's time over afcm's"), 1.36, gain(50.0)),
        (("12", "usr1: dram's time with 10 % over that with 50 %"), 1.28, from_10_to_50("dram")),
        (("12", "usr1: afcm's time with 10 % over that with 50 %"), 3.0, from_10_to_50("afcm")),
    ];
    times_of_made(rows)
}

/// Returns rows for factors of the paper's text, on a generated workload.
fn times_of_made(rows: [(Claim, f64, Option<f64>); 4]) -> Vec<Check> {
    let row = |(claim, paper, ours)| about(claim, (paper, ours), "times", MADE);
    rows.into_iter().filter_map(row).collect()
}

/// Checks the crash that `TCoW`'s literal form does not survive.
fn torn_syncs() -> Check {
    let (torn, all) = tcow::torn_crashes();
    check(
        ("3.3", "TCoW by its letter: crashes in a sync of two pages that leave one of them new"),
        ("none".to_owned(), format!("{torn} of {all}")),
        torn == 0,
        "no entry of its log says how many pages a sync has (scheme/tcow.rs)",
    )
}

/// Reason why less is gained than in the paper.
const WHOLE: &str =
    "these traces write mostly whole pages, the paper's Iphoto, Usr1 and Usr2 did not";
/// Reasons why some traces miss the aims.
const OWN_SECONDS: &str = "a small record takes 512 bytes; slots are made free in batches";
const OWN_WRITTEN: &str = "the 44 KiB of headers are a quarter of the smallest pool";
const OWN_STORED: &str = "pages that DRAM gives up unsynced are stored too, which spares flash; a page \
                          costs a header of 64 bytes, and blocks of 512 bytes are stored whole";

fn index_pct(it: &Played) -> Option<f64> {
    let of = |bytes: u64, pages: u64| bytes as f64 * 100.0 / (pages as f64 * 4096.0);
    Some(of(it.row("afcm")?.index_bytes, it.replayed.profile.footprint_pages))
}

/// Reasons why numbers of the generated workloads differ.
const MADE: &str = "a made workload: sizes, popularity and reads of the paper's are not known";
const SIX: &str = "Facebook, Twitter and TPC-C, half of the mean, gain next to nothing here";
const AGAIN: &str = "a page that is written to flash for space is stored again by its next sync";
const ANEW: &str = "fewer pages stay, so more are stored anew";
const KEEPS: &str = "afcm keeps more pages than the others in as much persistent memory";
const EXTENTS: &str = "72 bytes a page, 32 an extent more";
const WORDS: &str = "stores of words are counted, not 512 of 56";
const REUSE: &str = "with this reuse pages that leave persistent memory early cost fewer writes";
const CPU: &str = "a step through the index is 25 ns here; the paper does not say what it took";
const FEW: &str = "few pages leave at all, so a few of them are many percent";
