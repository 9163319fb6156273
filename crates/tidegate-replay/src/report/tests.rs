//! Checks the page as text; tests/report.rs checks it in a browser.

use super::*;

const SCHEMES: [&str; 5] = ["dram", "sccm", "sfcm", "afcm", "<own>"];

fn report() -> Report {
    let line = |(at, name): (u32, &&str)| {
        Line::of_columns(*name, &[Some(f64::from(at) + 1.0), None, Some(f64::from(at) * 2.0)])
    };
    let columns = ["5 %", "10 %", "20 %"].map(str::to_owned);
    let lines = Lines {
        title: "Time by persistent memory".to_owned(),
        x_label: "PMem, % of the footprint".to_owned(),
        x: Axis::Columns(columns.into()),
        y_label: "seconds".to_owned(),
        y: Axis::Log,
        lines: (0..).zip(&SCHEMES).map(line).collect(),
    };
    let parts = |name: &str| Bar {
        name: name.to_owned(),
        parts: vec![("data".to_owned(), 1e9), ("metadata".to_owned(), 2e7)],
    };
    let bars = Bars {
        title: "PMem traffic".to_owned(),
        label: "bytes".to_owned(),
        bars: SCHEMES.iter().map(|name| parts(name)).collect(),
    };
    let mut table = Table::new("rows", "", &["scheme", "seconds"]);
    table.push(vec!["<own>".to_owned(), "1.5".to_owned()]);
    Report {
        title: "Replay of a & b".to_owned(),
        asked: "Two traces.\nFive schemes.".to_owned(),
        command_line: "tidegate replay 'a & b' --report out".to_owned(),
        verdict: "afcm is best: 1.84 times as fast as sccm.".to_owned(),
        sections: vec![Section {
            title: "Sweep".to_owned(),
            text: "Less is better.".to_owned(),
            plots: vec![Plot::Lines(lines), Plot::Bars(bars)],
            table: Some(table),
        }],
    }
}

/// Elements without an end tag.
const VOID: [&str; 2] = ["meta", "!DOCTYPE"];

/// Fails if an element is not closed exactly once.
fn check_nesting(page: &str) {
    let mut open = Vec::new();
    for tag in page.split('<').skip(1) {
        let tag = tag.split('>').next().unwrap();
        let name = tag.trim_start_matches('/').split_whitespace().next().unwrap();
        if tag.starts_with('/') {
            assert_eq!(open.pop(), Some(name), "closed where another is open");
        } else if !VOID.contains(&name) && !tag.ends_with('/') {
            open.push(name);
        }
    }
    assert!(open.is_empty(), "not closed: {open:?}");
}

#[test]
fn a_page_is_whole_and_needs_nothing_from_elsewhere() {
    let page = page(&report());
    check_nesting(&page);
    for outside in ["http:", "https:", "src=", "@import", "url(//", "<script", "<link"] {
        assert!(!page.contains(outside), "{outside}");
    }
    assert!(page.contains("Replay of a &amp; b") && page.contains("'a &amp; b' --report out"));
    assert!(page.contains("prefers-color-scheme:dark") && page.contains("viewport"));
    for words in ["Two traces.", "afcm is best", "Less is better.", "<td>1.5</td>", "seconds"] {
        assert!(page.contains(words), "{words}");
    }
}

#[test]
fn every_scheme_is_named_in_the_legend_and_looks_the_same_in_all_plots() {
    let page = page(&report());
    let figures: Vec<&str> = page.split("<figure>").skip(1).collect();
    let [lines, bars] = figures[..] else { panic!("two figures, not {}", figures.len()) };
    let legend = lines.split("<ul class=\"legend\">").nth(1).unwrap();
    for name in SCHEMES.map(|name| name.replace('<', "&lt;").replace('>', "&gt;")) {
        let (before, _) = legend.split_once(&format!("</svg>{name}</li>")).expect("a legend");
        let (_, after) = bars.split_once(&format!(">{name}</text>")).expect("a bar");
        let colors = (before.rsplit("class=\"c").next(), after.split("class=\"c").nth(1));
        let number = |text: &str| text.split('"').next().unwrap().to_owned();
        assert_eq!(colors.0.map(number), colors.1.map(number), "{name}");
    }
    for part in ["data", "metadata"] {
        assert!(bars.split("<ul class=\"legend\">").nth(1).unwrap().contains(part), "{part}");
    }
    let dashes = legend.matches("stroke-dasharray").count();
    assert_eq!(dashes, SCHEMES.len(), "each has its piece of line");
}

#[test]
fn numbers_that_no_plot_can_show_do_no_harm() {
    let mut report = report();
    let Plot::Lines(lines) = &mut report.sections[0].plots[0] else { unreachable!() };
    lines.lines[0].points = vec![(0.0, f64::NAN), (1.0, -1.0), (2.0, f64::INFINITY)];
    lines.lines.truncate(1);
    let Plot::Bars(bars) = &mut report.sections[0].plots[1] else { unreachable!() };
    bars.bars[0].parts[0].1 = f64::NAN;
    let page = page(&report);
    check_nesting(&page);
    assert!(!page.contains("NaN") && !page.contains("inf\""), "{page}");
}

#[test]
fn a_report_is_one_file() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("new").join("dir");
    write(&dir, &report()).unwrap();
    let names: Vec<_> = fs::read_dir(&dir).unwrap().map(|it| it.unwrap().file_name()).collect();
    assert_eq!(names, ["index.html"]);
    let file = dir.join("index.html");
    let error = write(&file, &report()).unwrap_err();
    assert!(matches!(error, Error::Io { .. }), "{error}");
}
