//! The report in a browser: at the width of a desk and of a phone, light and dark.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tidegate_replay::report::{Axis, Bar, Bars, Line, Lines, Plot, Report, Section, Table, write};

const DESK: u32 = 1280;
const PHONE: u32 = 390;
const HEIGHT: u32 = 2400;

const SCHEMES: [&str; 6] = ["dram", "sccm", "sfcm", "afcm", "tidegate", "log"];
const SIZES: [&str; 4] = ["5 %", "10 %", "15 %", "20 %"];

/// A page as a replay of some schemes makes it.
fn report() -> Report {
    let value = |scheme: u32, size: u32| 90.0 / (1.0 + f64::from(scheme) * 0.6 + f64::from(size));
    let line = |(scheme, name): (u32, &&str)| {
        let values: Vec<_> = (0..4).map(|size| Some(value(scheme, size))).collect();
        Line::of_columns(*name, &values)
    };
    let plot = |title: &str, y: Axis| {
        Plot::Lines(Lines {
            title: title.to_owned(),
            x_label: "persistent memory, % of the footprint".to_owned(),
            x: Axis::Columns(SIZES.map(str::to_owned).into()),
            y_label: "seconds".to_owned(),
            y,
            lines: (0..).zip(&SCHEMES).map(line).collect(),
        })
    };
    let traffic = |(scheme, name): (u32, &&str)| Bar {
        name: (**name).to_owned(),
        parts: vec![
            ("data".to_owned(), value(scheme, 0) * 1e9),
            ("metadata".to_owned(), value(5 - scheme, 0) * 1e8),
        ],
    };
    let bars = Plot::Bars(Bars {
        title: "Traffic to persistent memory at 10 %".to_owned(),
        label: "bytes".to_owned(),
        bars: (0..).zip(&SCHEMES).map(traffic).collect(),
    });
    let headers = [
        "scheme",
        "dram_pages",
        "pmem_bytes",
        "reads",
        "read_hits",
        "writes",
        "syncs",
        "synced_pages",
        "ssd_pages_written",
        "ssd_pages_read",
        "pmem_data_bytes",
        "seconds",
    ];
    let mut table = Table::new("rows", "", &headers);
    for (number, name) in SCHEMES.iter().enumerate() {
        let cells =
            (1..headers.len()).map(|column| (1_234_567 * column / (number + 1)).to_string());
        table.push(std::iter::once((*name).to_owned()).chain(cells).collect());
    }
    Report {
        title: "A replay of tpcc.csv.zst".to_owned(),
        asked: "What would each scheme do for this workload, with persistent memory of 5 to 20 % \
                of the 123 MiB that it touches?\n123,694 operations, none of them bad lines."
            .to_owned(),
        command_line: "tidegate replay tpcc.csv.zst --schemes dram,sccm,sfcm,afcm,tidegate,log \
                       --dram 10 --sweep-pmem 5,10,15,20 --report out"
            .to_owned(),
        verdict: "tidegate is best: 1.02 times as fast as afcm, 1.84 times as fast as sccm, with \
                  63 % fewer pages written to flash."
            .to_owned(),
        sections: vec![Section {
            title: "By size of the persistent memory".to_owned(),
            text: "Less is better in all three.".to_owned(),
            plots: vec![plot("Time", Axis::Linear), plot("Time, by powers", Axis::Log), bars],
            table: Some(table),
        }],
    }
}

fn browser() -> &'static str {
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let is_there = |name: &&str| Command::new(name).arg("--version").output().is_ok();
    names
        .into_iter()
        .find(is_there)
        .expect("a browser: scripts/install-deps test installs chromium")
}

/// Runs the browser on `page`, in a window of this width; returns what it prints.
fn browse(page: &Path, width: u32, is_dark: bool, arguments: &[String]) -> String {
    let profile = tempfile::tempdir().unwrap();
    // 0 is dark, 1 is light.
    let scheme = u32::from(!is_dark);
    let output = Command::new(browser())
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"])
        .args(["--hide-scrollbars", "--no-first-run", "--disable-dev-shm-usage"])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .arg(format!("--window-size={width},{HEIGHT}"))
        .arg(format!("--blink-settings=preferredColorScheme={scheme}"))
        .args(arguments)
        .arg(format!("file://{}", page.display()))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// A page that shows `page` in a frame of this width: a window of its own is never as narrow as
/// that of a phone. Its body's text becomes what a script finds, for [`measured`].
fn framed(page: &Path, folder: &Path, width: u32, script: &str) -> PathBuf {
    let text = fs::read_to_string(page).unwrap().replace('&', "&amp;").replace('"', "&quot;");
    let frame = format!(
        "<!DOCTYPE html><body style=\"margin:0\"><iframe id=\"f\" style=\"border:0;display:block;\
         width:{width}px;height:{HEIGHT}px\" srcdoc=\"{text}\"></iframe>{script}</body>"
    );
    let file = folder.join("framed.html");
    fs::write(&file, frame).unwrap();
    file
}

/// The width of the widest element and of the frame in which the page stands, and the colours of
/// page and text.
fn measured(page: &Path, folder: &Path, width: u32, is_dark: bool) -> [String; 4] {
    const SCRIPT: &str = "<script>addEventListener('load',()=>{\
        const w=document.getElementById('f').contentWindow,d=w.document;\
        const style=w.getComputedStyle(d.body);\
        const found=[d.documentElement.scrollWidth,w.innerWidth,style.backgroundColor,style.color];\
        document.body.textContent='measured|'+found.join('|')+'|'})</script>";
    let framed = framed(page, folder, width, SCRIPT);
    let dom = browse(&framed, width, is_dark, &["--dump-dom".to_owned()]);
    let found = dom.split("measured|").last().unwrap();
    let mut fields = found.split('|').map(str::to_owned);
    std::array::from_fn(|_| fields.next().expect("four fields"))
}

/// Width, height, and length of the PNG at `path`, whose header has them.
fn picture(path: &Path) -> (u32, u32, usize) {
    let bytes = fs::read(path).unwrap();
    assert!(bytes.starts_with(b"\x89PNG\r\n\x1a\n"), "a PNG");
    let number = |at: usize| bytes[at..at + 4].iter().fold(0, |n, byte| n << 8 | u32::from(*byte));
    (number(16), number(20), bytes.len())
}

/// Pictures stay where `TIDEGATE_PICTURES` says, to be looked at.
fn pictures(folder: &Path) -> PathBuf {
    let kept = std::env::var_os("TIDEGATE_PICTURES").map(PathBuf::from);
    let pictures = kept.unwrap_or_else(|| folder.join("pictures"));
    fs::create_dir_all(&pictures).unwrap();
    pictures
}

/// Has the browser show `page` at this width; its picture gets `name`.
fn shows(page: &Path, name: &str, (width, is_dark): (u32, bool)) {
    let folder = tempfile::tempdir().unwrap();
    let [page_width, window_width, back, ink] = measured(page, folder.path(), width, is_dark);
    assert_eq!(window_width, width.to_string());
    assert_eq!(page_width, window_width, "{name}: the page is wider than its window");
    let expected = if is_dark { "rgb(20, 24, 29)" } else { "rgb(255, 255, 255)" };
    assert_eq!(back, expected);
    assert_ne!(ink, back);
    let light = if is_dark { "dark" } else { "light" };
    let file = pictures(folder.path()).join(format!("{name}-{width}-{light}.png"));
    let framed = framed(page, folder.path(), width, "");
    browse(&framed, width, is_dark, &[format!("--screenshot={}", file.display())]);
    let (shown_width, height, bytes) = picture(&file);
    assert!(shown_width >= width && height == HEIGHT, "{shown_width} x {height}");
    // An empty page of this size has less than 20 kB.
    assert!(bytes > 40_000, "{name}: a picture of {bytes} bytes shows nothing");
}

#[test]
fn a_browser_shows_the_report_at_the_width_of_a_desk_and_of_a_phone_light_and_dark() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &report()).unwrap();
    let page = folder.path().join("index.html");
    for window in [(DESK, false), (DESK, true), (PHONE, false), (PHONE, true)] {
        shows(&page, "made", window);
    }
}

/// Has the program write a report by the arguments in `words`, and the browser show it.
fn shows_report_of(name: &str, words: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate-replay"));
    let output = command.args(words).arg("--report").arg(folder.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for window in [(DESK, true), (PHONE, false)] {
        shows(&folder.path().join("index.html"), name, window);
    }
}

#[test]
fn a_browser_shows_a_replay() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace.csv");
    let mut lines = String::from("ts_us,tid,op,file,offset,len\n");
    for at in 0..2000_u64 {
        let offset = at * 7919 % 997 * 4096;
        let line = format!("{at},1,write,/data,{offset},4096\n{at},1,fsync,/data,0,0\n");
        lines.push_str(&line);
    }
    fs::write(&trace, lines).unwrap();
    let trace = trace.to_str().unwrap();
    shows_report_of("replay", &["replay", trace, "--sweep-pmem=5,10,15", "--sweep-dram=10,30"]);
}

#[test]
fn a_browser_shows_the_papers_and_a_model() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/papers.md");
    shows_report_of("papers", &["papers", "--page", page]);
    let machine = ["model", "--cores=4", "--jobs=1,4", "--iodepth=1,8", "--size=64M", "--cache=8M"];
    shows_report_of("model", &machine);
}
