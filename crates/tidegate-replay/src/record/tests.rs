//! Events by hand, and their rows.

use std::io::{self, Write};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidegate::glob::Filter;
use tidegate_record::event::{Event, FOLDER, Kind, Unseen};
use tidegate_record::rings::Told;

use super::recorder::Trace;
use super::rows::Rows;
use super::summary::Summary;

/// A writer that keeps the written bytes.
#[derive(Clone, Default)]
struct Written(Arc<Mutex<Vec<u8>>>);

impl Write for Written {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Events, a microsecond apart.
struct Script {
    trace: Trace,
    written: Written,
    time_us: u64,
}

const DEVICE: u64 = 1;
const PROCESS: u32 = 100;

impl Script {
    fn with(filter: Filter) -> Self {
        let written = Written::default();
        let trace = Trace::new(filter, Rows::to(written.clone()));
        Self { trace, written, time_us: 0 }
    }

    fn new() -> Self {
        Self::with(Filter::default())
    }

    fn tell(&mut self, event: Event, text: &str) {
        self.time_us += 1;
        let event = Event { time_ns: self.time_us * 1000, thread: 7, process: PROCESS, ..event };
        self.trace.push(Told { event, text: text.as_bytes().into() });
    }

    /// Opens file `number`; its inode and its descriptor have this number, too.
    fn open(&mut self, number: u32, path: &str) {
        let (fd, inode) = (u64::from(number), u64::from(number));
        let event = Event::new(Kind::Opened).of_file(number);
        self.tell(event.with([fd, DEVICE, inode, 0, 0]), path);
    }

    fn write(&mut self, number: u32) {
        self.tell(Event::new(Kind::Write).of_file(number).with([0, 1]), "");
    }

    fn close(&mut self, number: u32) {
        self.tell(Event::new(Kind::Closed).of_file(number).with([number.into()]), "");
    }

    fn unlink(&mut self, number: u32, names: u64, path: &str) {
        let event = Event::new(Kind::Removed).with([DEVICE, number.into(), 0, names]);
        self.tell(event, &format!("/d\0{path}"));
    }

    fn rename(&mut self, event: Event, numbers: [u64; 2], [old, new]: [&str; 2]) {
        let event = event.with([DEVICE, numbers[0], 0, numbers[1], 0]);
        self.tell(event, &format!("/d\0{old}\0/d\0{new}"));
    }

    /// Returns the rows, without their times and threads, and the summary.
    fn end(mut self) -> (Vec<String>, Summary) {
        self.trace.write_until(u64::MAX);
        let summary = self.trace.end(0);
        let text = String::from_utf8(self.written.0.lock().unwrap().clone()).unwrap();
        let rows = text.lines().map(|line| line.splitn(3, ',').nth(2).unwrap_or("").to_owned());
        (rows.collect(), summary)
    }

    fn rows(self) -> Vec<String> {
        self.end().0
    }
}

const RENAMED: Event = Event::new(Kind::Renamed);

#[test]
fn events_of_several_rings_become_rows_in_the_order_of_time() {
    let mut script = Script::new();
    script.open(1, "/d/a");
    for time_ns in [5000, 3000, 9000, 4000] {
        let event = Event::new(Kind::Write).of_file(1).with([time_ns, 1]);
        script.trace.push(Told { event: Event { time_ns, ..event }, text: Box::default() });
    }
    script.trace.write_until(5000);
    let early = String::from_utf8(script.written.0.lock().unwrap().clone()).unwrap();
    assert_eq!(early, "2,0,write,/d/a,3000,1\n3,0,write,/d/a,4000,1\n");
    assert_eq!(script.rows()[2..], ["write,/d/a,5000,1", "write,/d/a,9000,1"]);
}

#[test]
fn a_name_that_is_used_again_is_another_file() {
    let mut script = Script::new();
    script.open(1, "/d/a");
    script.write(1);
    script.close(1);
    script.unlink(1, 1, "a");
    script.open(2, "/d/a");
    script.write(2);
    // No event reported the removal of its name.
    script.open(3, "/d/a");
    script.write(3);
    script.write(2);
    let rows = script.rows();
    let expected = [
        "write,/d/a,0,1",
        "unlink,/d/a,0,0",
        "write,/d/a,0,1",
        "rename,/d/a,0,/d/a (unlinked 1)",
        "write,/d/a,0,1",
        "write,/d/a (unlinked 1),0,1",
        "unlink,/d/a (unlinked 1),0,0",
    ];
    assert_eq!(rows, expected);
}

#[test]
fn a_file_without_a_name_goes_with_the_process_that_has_it_open() {
    let mut script = Script::new();
    script.open(1, "/d/a (deleted)");
    script.write(1);
    script.tell(Event::new(Kind::Ended), "");
    script.open(2, "/d/b");
    script.write(2);
    assert_eq!(
        script.rows(),
        ["write,/d/a (unlinked 1),0,1", "unlink,/d/a (unlinked 1),0,0", "write,/d/b,0,1"]
    );
}

#[test]
fn a_file_with_two_names_loses_one_and_stays() {
    let mut script = Script::new();
    script.open(1, "/d/a");
    script.write(1);
    script.close(1);
    script.tell(Event::new(Kind::Linked).with([DEVICE, 1, 0]), "\0/d/x/../b");
    script.unlink(1, 2, "a");
    script.unlink(1, 1, "b");
    assert_eq!(script.rows(), ["write,/d/a,0,1", "rename,/d/a,0,/d/b", "unlink,/d/b,0,0"]);
}

#[test]
fn renames_replace_exchange_and_move_what_is_below() {
    let mut script = Script::new();
    for (number, path) in [(1, "/d/a"), (2, "/d/b"), (3, "/d/e/f"), (4, "/d/ef")] {
        script.open(number, path);
        script.write(number);
        script.close(number);
    }
    script.rename(RENAMED, [1, 2], ["a", "b"]);
    script.rename(Event { flags: FOLDER, ..RENAMED }, [9, 0], ["e", "./g"]);
    script.rename(RENAMED.flagged(true), [1, 4], ["b", "ef"]);
    script.write(1);
    script.write(4);
    assert_eq!(
        script.rows()[4..],
        [
            "unlink,/d/b,0,0",
            "rename,/d/a,0,/d/b",
            "rename,/d/e/f,0,/d/g/f",
            "rename,/d/ef,0,/d/ef (unlinked 1)",
            "rename,/d/b,0,/d/ef",
            "rename,/d/ef (unlinked 1),0,/d/b",
            "write,/d/ef,0,1",
            "write,/d/b,0,1",
        ]
    );
}

#[test]
fn names_are_escaped_and_what_is_no_storage_is_left_out() {
    let mut script = Script::with(Filter { include: b"", exclude: b"/d/secret" });
    for (number, path) in [(1, "/d/a,b%\n"), (2, "/dev/null"), (3, "/memfd:x (deleted)")] {
        script.open(number, path);
        script.write(number);
    }
    script.open(4, "/d/secret");
    script.write(4);
    let (rows, summary) = script.end();
    assert_eq!(rows, ["write,/d/a%2Cb%25%0A,0,1"]);
    assert_eq!(summary.files, 1);
}

#[test]
fn any_text_and_numbers_are_survived_and_counted() {
    let mut script = Script::new();
    script.write(77);
    script.tell(Event::new(Kind::Renamed), "");
    script.tell(Event::new(Kind::Removed), "\0\0\0\0\0");
    script.tell(Event::new(Kind::Opened).with([u64::MAX; 5]), "");
    script.tell(Event::new(Kind::Closed).with([u64::MAX; 5]), "");
    script.tell(Event::new(Kind::Unseen).with([u64::from(Unseen::IoUring as u8)]), "");
    script.tell(Event::new(Kind::Unseen).with([u64::MAX]), "");
    let (rows, summary) = script.end();
    assert_eq!(rows, Vec::<String>::new());
    let said = summary.lines(Path::new("t.csv"), Duration::from_secs(1)).join("\n");
    assert!(said.contains("1 set-ups of io_uring") && said.contains("1 events that were lost"));
    assert!(!said.contains("go on with"), "{said}");
}
