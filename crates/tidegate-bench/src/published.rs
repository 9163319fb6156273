//! The numbers of targets in docs/benchmarks/: the results of the last release.

/// The pages with tables of targets.
const PAGES: [&str; 4] = [
    include_str!("../../../docs/benchmarks/block.md"),
    include_str!("../../../docs/benchmarks/cache.md"),
    include_str!("../../../docs/benchmarks/run.md"),
    include_str!("../../../docs/policies/dram.md"),
];

/// Returns the number that the last release measured for `target`, as its page prints it.
pub(crate) fn of_target(target: &str) -> Option<&'static str> {
    find(PAGES, target)
}

fn find<'a>(pages: impl IntoIterator<Item = &'a str>, target: &str) -> Option<&'a str> {
    pages.into_iter().flat_map(str::lines).find_map(|row| {
        let cells: Vec<_> = row.split('|').map(str::trim).collect();
        let [_, name, .., measured, "PASS" | "MISS", _] = cells[..] else { return None };
        (without_case(name) == without_case(target)).then_some(measured)
    })
}

/// Returns the name of a target without the case that was worst in that run.
fn without_case(target: &str) -> &str {
    target.split_once(" (worst: ").map_or(target, |(name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_found_whatever_case_was_worst() {
        let pages = [
            "| target | wanted | measured | verdict |\n| a: b / c (worst: x) | at least 1 | 1.59 | MISS |\n| d | at most 2 | 1.00 | 1.10 | PASS |\n",
        ];
        assert_eq!(find(pages, "a: b / c (worst: y)"), Some("1.59"));
        assert_eq!(find(pages, "d"), Some("1.10"), "beside an earlier number");
        assert_eq!(find(pages, "e"), None);
    }

    #[test]
    fn each_page_has_its_targets() {
        let one_of_each = [
            "btt read, 1 thread: throughput / libpmemblk",
            "miss: bytes to the memory a byte",
            "run: true: ms more than plain",
            "idle CPU of transit, %",
        ];
        for (page, target) in PAGES.into_iter().zip(one_of_each) {
            assert!(find([page], target).is_some_and(|found| found.parse::<f64>().is_ok()));
        }
    }
}
