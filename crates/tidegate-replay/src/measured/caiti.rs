//! The figures of the Caiti paper's programs, on the bench's block devices: 8, 9 and 10.
//!
//! `RocksDB` stands for `LevelDB`. The numbers are from the paper's text; where the text has no
//! number, the row quotes its words.

use super::{Claim, Figure, Ours, TOLERANCE, figure, ratio, slower};

/// A policy of the bench that Caiti, the policy `transit`, is compared with, and the policy's name
/// in the paper.
type Other = (&'static str, &'static str);

const OTHERS: [Other; 5] =
    [("btt", "BTT"), ("pmbd", "PMBD"), ("pmbd70", "PMBD-70"), ("lru", "LRU"), ("coactive", "COA")];
/// The policies of [`OTHERS`], and the caches among them.
const POLICIES: [&str; 5] = ["btt", "pmbd", "pmbd70", "lru", "coactive"];
const CACHES: [&str; 4] = ["pmbd", "pmbd70", "lru", "coactive"];

const SERVED: &str = "loop device, FUSE and NBD take most of a request here, on the two CPUs that \
                      the threads that write back need; the page cache takes what is not synced";
const GUEST: &str = "the same, and a guest with eight CPUs does not fit the machines that this \
                     runs on";
const LEVELDB: &str = "LevelDB (ours: RocksDB)";
const FILEBENCH: &str = "Filebench in a virtual machine (ours: no guest)";

/// Returns the figures, in the order of the paper.
pub(super) fn figures() -> Vec<Figure> {
    let mut figures = figure_8();
    figures.extend(figure_9());
    figures.extend(figure_10());
    figures
}

/// Time that Caiti saves in a case, in percent, by policy of [`OTHERS`].
type LessPcts = [f64; 5];

fn figure_8() -> Vec<Figure> {
    let what = |name| format!("{LEVELDB}, {name} of 2 KiB (1 KiB)");
    let [fill, overwrite] = ["fillrandom", "overwrite"].map(what);
    let mut rows = less_time(
        ("Caiti 8", &fill, SERVED),
        "program-rocksdb-fillrandom-1024",
        [40.6, 20.0, 17.8, 19.6, 48.8],
    );
    let overwrite = ("Caiti 8", &*overwrite, SERVED);
    rows.push(less("program-rocksdb-overwrite-1024", overwrite, (OTHERS[0], 38.2)));
    rows.push(comparable(
        ("Caiti 8c", &format!("{LEVELDB}, readrandom of 1 KiB"), SERVED),
        "program-rocksdb-readrandom-1024",
        ("comparable", &POLICIES),
    ));
    rows
}

fn figure_9() -> Vec<Figure> {
    let tail = figure(
        "Caiti 9a",
        format!("{LEVELDB}, fillrandom of 4 KiB: shortest p99.99 of the others over Caiti's"),
        (Claim::MoreThan(1.0, "above 1"), "x"),
        Ours::OverBestTail(("transit", "program-rocksdb-fillrandom-4096", 0), &POLICIES),
        SERVED,
    );
    let load = |((policy, name), paper): (Other, f64)| {
        let what = format!("{LEVELDB}, YCSB's load: rate of Caiti over {name}");
        let ours = ratio(["transit", policy], ["program-ycsb-load"; 2], 0);
        figure("Caiti 9", what, (Claim::Is(paper), "x"), ours, SERVED)
    };
    let mixed = |(name, case)| {
        let what = format!("{LEVELDB}, YCSB's {name}");
        comparable(("Caiti 9", &what, SERVED), case, ("higher or comparable", &CACHES))
    };
    let mut rows = vec![tail];
    rows.extend(OTHERS.into_iter().skip(1).zip([1.66, 1.40, 1.66, 1.52]).map(load));
    rows.extend([("A", "program-ycsb-a"), ("F", "program-ycsb-f")].map(mixed));
    rows
}

fn figure_10() -> Vec<Figure> {
    let personalities: [(&str, &str, LessPcts); 3] = [
        ("Fileserver", "program-filebench-fileserver", [43.9, 52.4, 48.6, 53.1, 43.2]),
        ("Varmail", "program-filebench-varmail", [22.4, 26.8, 31.8, 8.2, 30.9]),
        ("Webproxy", "program-filebench-webproxy", [14.3, 11.9, 15.3, 9.6, 13.4]),
    ];
    let rows = personalities.into_iter().flat_map(|(name, case, pcts)| {
        less_time(("Caiti 10", &format!("{FILEBENCH}, {name}"), GUEST), case, pcts)
    });
    let mut rows: Vec<_> = rows.collect();
    rows.push(comparable(
        ("Caiti 10", &format!("{FILEBENCH}, Webserver"), GUEST),
        "program-filebench-webserver",
        ("comparable", &POLICIES),
    ));
    rows
}

/// The figure of a row, the workload, and the reason why our result may differ.
type Of<'a> = (&'static str, &'a str, &'static str);

/// Returns the rows of a case: Caiti beside each policy of [`OTHERS`].
fn less_time(of: Of<'_>, case: &'static str, pcts: LessPcts) -> Vec<Figure> {
    OTHERS.into_iter().zip(pcts).map(|other| less(case, of, other)).collect()
}

/// Returns a row of a case: the time that Caiti saves over another policy.
fn less(
    case: &'static str,
    (name, what, reason): Of<'_>,
    ((policy, other), pct): (Other, f64),
) -> Figure {
    let what = format!("{what}: less time with Caiti than with {other}");
    let ours = slower([policy, "transit"], [case; 2], 0);
    figure(name, what, (Claim::Is(pct), "%"), ours, reason)
}

/// Returns a row of a case where the paper finds Caiti's rate comparable to that of `others`.
fn comparable(
    (name, what, reason): Of<'_>,
    case: &'static str,
    (words, others): (&'static str, &'static [&'static str]),
) -> Figure {
    let others_are =
        if others.contains(&"btt") { "BTT and the other caches" } else { "the others" };
    let what = format!("{what}: rate of Caiti over the highest of {others_are}");
    let ours = Ours::OverBest(("transit", case, 0), others);
    figure(name, what, (Claim::MoreThan(1.0 - TOLERANCE, words), "x"), ours, reason)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{report, row};
    use super::super::{Row, check};
    use super::*;

    /// Returns rows of the cases that `scripts/papers` runs: a rate of 100, and 80 for `transit`.
    fn rows() -> Vec<Row> {
        let programs = ["fillrandom-1024", "fillrandom-4096", "overwrite-1024", "readrandom-1024"];
        let programs = programs.map(|it| format!("program-rocksdb-{it}"));
        let ycsb = ["load", "a", "f"].map(|it| format!("program-ycsb-{it}"));
        let filebench = ["fileserver", "varmail", "webproxy", "webserver"];
        let filebench = filebench.map(|it| format!("program-filebench-{it}"));
        let cases: Vec<_> = programs.into_iter().chain(ycsb).chain(filebench).collect();
        let policies = POLICIES.into_iter().chain(["transit"]);
        let of = |policy: &str| {
            let ops_per_s = if policy == "transit" { 80.0 } else { 100.0 };
            cases.iter().map(|case| row(policy, case, ops_per_s)).collect::<Vec<_>>()
        };
        policies.flat_map(of).collect()
    }

    #[test]
    fn each_case_that_the_bench_measures_has_rows_of_all_policies() {
        let reports = [report(rows())];
        let checks: Vec<_> = figures().iter().map(|it| check(it, &reports)).collect();
        let open: Vec<_> =
            checks.iter().filter(|it| it.ours.is_empty()).map(|it| &it.what).collect();
        assert!(open.is_empty(), "not measured: {open:?}");
        let count = |figure| checks.iter().filter(|it| it.figure == figure).count();
        let counts = ["Caiti 8", "Caiti 8c", "Caiti 9a", "Caiti 9", "Caiti 10"].map(count);
        assert_eq!(counts, [6, 1, 1, 6, 16]);
    }

    #[test]
    fn reads_are_comparable_above_85_percent_of_the_best() {
        let comparable = |transit: f64| {
            let mut rows = rows();
            rows.iter_mut()
                .filter(|it| it.policy == "transit")
                .for_each(|it| it.ops_per_s = transit);
            let figures = figures();
            let figure = figures.iter().find(|it| it.name == "Caiti 8c").expect("there is one");
            let check = check(figure, &[report(rows)]);
            (check.ours, check.verdict.into_owned())
        };
        assert_eq!(comparable(90.0), ("0.90 x".into(), "holds".into()));
        assert_eq!(comparable(80.0), ("0.80 x".into(), "does not hold".into()));
    }
}
