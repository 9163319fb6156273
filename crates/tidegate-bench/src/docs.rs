//! Measured tables in documentation: every number on a page comes from a run.

use crate::error::{BenchError, Result};
use crate::report::Report;

const BEGIN: &str = "<!-- table: ";
const END: &str = "<!-- end -->";

/// Returns `page` with the text between each `<!-- table: NAME -->` and the next `<!-- end -->`
/// replaced by the table NAME of `report`. `machine` is the machine; `machine-programs` and
/// `machine-run` are the machines of runs that measured such programs. Tables that the run did not
/// measure stay unchanged.
///
/// # Errors
/// [`BenchError::Usage`] if a marker has no name or no end.
pub fn update(page: &str, report: &Report) -> Result<String> {
    let mut updated = String::new();
    let mut rest = page;
    while let Some(begin) = rest.find(BEGIN) {
        let (before, marker) = rest.split_at(begin);
        let wrong = |what| BenchError::Usage(format!("marker at \"{:.40}\" {what}", marker.trim()));
        let name_end = marker.find(" -->").ok_or_else(|| wrong("has no -->"))?;
        let end = marker.find(END).ok_or_else(|| wrong("has no <!-- end -->"))?;
        let head = &marker[..name_end + " -->".len()];
        updated += before;
        updated += head;
        let old = marker.get(head.len()..end).ok_or_else(|| wrong("ends before it begins"))?;
        match content(&marker[BEGIN.len()..name_end], report) {
            Some(content) => updated.extend(["\n", &content]),
            None => updated += old,
        }
        updated += END;
        rest = &marker[end + END.len()..];
    }
    Ok(updated + rest)
}

fn content(name: &str, report: &Report) -> Option<String> {
    if let Some(machine) = report.machine_at(name) {
        return Some(format!("```text\n{machine}\n```\n"));
    }
    report.tables().iter().find(|table| table.name == name).map(crate::table::Table::markdown)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Machine;
    use crate::measure::{Amount, Key, Op};
    use crate::report::tests::report;
    use crate::timeline::TimelineRow;

    /// The pages of docs/benchmarks/, one behind the other.
    const PAGES: &str = concat!(
        include_str!("../../../docs/benchmarks/block.md"),
        include_str!("../../../docs/benchmarks/cache.md"),
        include_str!("../../../docs/benchmarks/run.md"),
        include_str!("../../../docs/benchmarks/programs.md"),
    );
    const PAGE: &str = "# P\n<!-- table: block-write -->\nold\n<!-- end -->\n\n<!-- table: open -->\nkept\n<!-- end -->\nlast\n";

    #[test]
    fn measured_tables_replace_what_was_there_again_and_again() {
        let once = update(PAGE, &report()).unwrap();
        assert!(once.starts_with("# P\n<!-- table: block-write -->\n| policy"), "{once}");
        assert!(
            !once.contains("old") && once.contains("kept") && once.ends_with("\nlast\n"),
            "{once}"
        );
        assert_eq!(update(&once, &report()).unwrap(), once);
    }

    #[test]
    fn the_pages_of_benchmarks_take_every_table_of_a_run() {
        let report = report();
        let updated = update(PAGES, &report).unwrap();
        for table in report.tables() {
            assert!(updated.contains(&table.markdown()), "{} has no place on the page", table.name);
        }
        assert!(updated.contains(&report.machine.cpu));
    }

    #[test]
    fn programs_have_a_table_of_the_machine_of_their_own() {
        let page = "<!-- table: machine -->\nkept\n<!-- end --><!-- table: machine-programs -->\n<!-- end -->";
        let mut report = report();
        report.series.truncate(1);
        report.series[0].key.case = "program-fio-write".to_owned();
        let updated = update(page, &report).unwrap();
        assert!(updated.starts_with("<!-- table: machine -->\nkept\n"), "{updated}");
        assert!(updated.contains(&report.machine.kernel), "{updated}");
        let table = update("<!-- table: programs -->\n<!-- end -->", &report).unwrap();
        assert!(table.contains("| fio-write |"), "{table}");
    }

    #[test]
    fn the_pages_of_benchmarks_take_every_table_of_programs_under_run() {
        let mut report = report();
        let one = report.series[0].clone();
        let cases = [
            "log-append-128",
            "log-batch",
            "run-write-dsync",
            "run-full-random",
            "run-steady-2g",
            "run-unsynced-tar",
            "run-read-dirty",
            "run-names-mail",
            "run-sqlite-wal",
            "run-recovery",
        ];
        report.series = cases.map(|_| one.clone()).into();
        for (series, case) in report.series.iter_mut().zip(cases) {
            (series.key.policy, series.key.case) = ("run".to_owned(), case.to_owned());
        }
        let (policy, values) = ("run".to_owned(), vec![1.0]);
        report.log.machine = Some(Machine { repetitions: 77, ..report.machine.clone() });
        let timeline =
            TimelineRow { policy: policy.clone(), requests: vec![1], ..TimelineRow::default() };
        report.log.timelines.push(timeline);
        report.log.amounts.0.push(Amount {
            measure: "a number".into(),
            policy,
            unit: "ms",
            values,
        });
        let names: Vec<_> = report.tables().into_iter().map(|table| table.name).collect();
        assert_eq!(names.len(), cases.len() + 3, "with seconds, numbers and targets: {names:?}");
        let updated = update(PAGES, &report).unwrap();
        for table in report.tables() {
            assert!(updated.contains(&table.markdown()), "{} has no place on the page", table.name);
        }
        assert!(updated.contains("<!-- table: machine-run -->\n```text\na CPU"), "{updated}");
        assert_eq!(updated.matches("77 runs").count(), 1, "other machines stay: {updated}");
    }

    #[test]
    fn the_pages_of_benchmarks_take_every_table_of_caches() {
        let mut report = report();
        let one = report.series[0].clone();
        let [read, write] = [Op::Read, Op::Write];
        let mut cases = vec![
            ("miss".to_owned(), write, 4096),
            ("cache-nbd-random".to_owned(), write, 4096),
            ("cache-nbd-random".to_owned(), read, 4096),
            ("cache-full-file".to_owned(), write, 4096),
            ("cache-fill-90pct-file".to_owned(), write, 4096),
            ("cache-read-miss".to_owned(), read, 4096),
            ("cache-open".to_owned(), read, 4 << 30),
        ];
        let sizes = [4 << 10, 16 << 10, 64 << 10, 512 << 10, 1 << 20];
        cases.extend(sizes.map(|bytes| ("study-50pct-1st".to_owned(), write, bytes)));
        report.series = cases.iter().map(|_| one.clone()).collect();
        for (series, (case, op, block_bytes)) in report.series.iter_mut().zip(cases) {
            let policy = "cache".to_owned();
            series.key = Key { policy, case, op, block_bytes, ..series.key.clone() };
        }
        report.cache.amounts.add("a number", "%", "cache", 1.0);
        report.cache.machine = Some(Machine { repetitions: 77, ..report.machine.clone() });
        let names: Vec<_> = report.tables().into_iter().map(|table| table.name).collect();
        assert_eq!(names.len(), 5 + 10, "{names:?}");
        let updated = update(PAGES, &report).unwrap();
        for table in report.tables() {
            assert!(updated.contains(&table.markdown()), "{} has no place on the page", table.name);
        }
        assert_eq!(updated.matches("77 runs").count(), 1, "other machines stay: {updated}");
    }

    #[test]
    fn the_page_of_policies_takes_measured_cost_and_the_other_pages_keep_their_machine() {
        let mut report = report();
        report.series.truncate(1);
        let key = &mut report.series[0].key;
        (key.policy, key.case) = ("cache-cost".to_owned(), "cache-cost-cxl-write".to_owned());
        let machine = Machine { media: "of each row".to_owned(), ..report.machine.clone() };
        report.cache.machine = Some(report.machine.clone());
        report.cache.machine_by_cost = Some(machine);
        let policies = update(include_str!("../../../docs/policies/cache.md"), &report).unwrap();
        let tables = report.tables();
        assert_eq!(tables.iter().map(|table| table.name).collect::<Vec<_>>(), ["cache-cost"]);
        assert!(policies.contains(&tables[0].markdown()), "{policies}");
        assert!(policies.contains("media model of each row"), "{policies}");
        assert_eq!(update(PAGES, &report).unwrap(), PAGES);
    }

    #[test]
    fn a_marker_without_its_end_is_told() {
        for page in
            ["<!-- table: block-write -->\n", "<!-- table: x", "<!-- table: <!-- end --> -->"]
        {
            assert!(update(page, &report()).is_err(), "{page}");
        }
    }
}
