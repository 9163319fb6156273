//! Histories of a session, its clock and processes outside. No timestamp of the session may be
//! taken for one from outside, and one from outside must be noticed once the clock of file
//! timestamps has moved on. If a record has the file's timestamp, any later one must be noticed:
//! like Linux since 6.13, the kernel here gives a file whose timestamp was read a later one at its
//! next change.

use zerocopy::IntoBytes;

use crate::log::recover::dates::LATE_NS;
use crate::log::recover::{FilePlan, Payload, Planner};
use crate::log::{
    Attributes, Definition, FileHandle, Header, Heartbeat, Make, NameAt, RecordKind, Timestamp,
};

const MS: u64 = 1_000_000;
/// Tick of the clock of file timestamps.
const TICK_NS: u64 = 4 * MS;
/// Interval of heartbeats while an operation is not known to be done.
const BEAT_NS: u64 = 100 * MS;
const FILES: usize = 3;
const EPOCH_NS: u64 = 1_700_000_000_000_000_000;

/// A mistake of the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mistake {
    None,
    /// A heartbeat takes all records for done.
    AllDone,
    /// A heartbeat reads the clock long before the slots.
    ClockFirst,
    /// The session does not notice that the clock is set back.
    StepsUnseen,
    /// The kernel makes a change without a record, as when the supervisor writes again.
    Unannounced,
}

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

#[derive(Default)]
struct File {
    /// Position of the record of an operation that the kernel has not done.
    in_the_middle: Option<u64>,
    /// Timestamps that the session has given the file.
    own: Vec<u64>,
    /// The current timestamp, from the session or from outside.
    time: u64,
    /// The last change of the file itself. The program may have set `time` back since.
    ctime: u64,
    /// A process has read the timestamp since the last change.
    is_asked: bool,
    /// The time from which on a change from outside must be noticed, and whether a record has the
    /// file's timestamp. `None` since the session's last operation.
    confirmed: Option<(u64, bool)>,
    /// Time of the last change from outside, and the file's timestamp from it.
    outside: Option<(u64, u64)>,
}

impl File {
    fn made() -> Self {
        Self { time: EPOCH_NS, ctime: EPOCH_NS, ..Self::default() }
    }
}

struct Session {
    random: Random,
    mistake: Mistake,
    planner: Planner,
    position: u64,
    /// Nanoseconds since the session began. No clock shows them.
    now_ns: u64,
    wall_ahead_ns: u64,
    most_ahead_ns: u64,
    beat: Heartbeat,
    beaten_ns: u64,
    /// The latest timestamp that the kernel has given a file.
    given_ns: u64,
    /// Time of the last record or heartbeat.
    last_word_ns: u64,
    is_supervised: bool,
    files: Vec<File>,
    headers: Vec<(Header, Vec<u8>)>,
}

impl Session {
    fn new(seed: u64, mistake: Mistake) -> Self {
        let mut this = Self {
            random: Random(seed),
            mistake,
            planner: Planner::new(),
            position: 1 << 20,
            now_ns: 0,
            wall_ahead_ns: EPOCH_NS,
            most_ahead_ns: EPOCH_NS,
            beat: Heartbeat::default(),
            beaten_ns: 0,
            given_ns: 0,
            last_word_ns: 0,
            is_supervised: true,
            files: (0..FILES).map(|_| File::made()).collect(),
            headers: Vec::new(),
        };
        for number in 0..FILES {
            this.define(number);
        }
        this
    }

    fn wall_ns(&self) -> u64 {
        self.now_ns + self.wall_ahead_ns
    }

    fn tick_ns(&self) -> u64 {
        self.now_ns - self.now_ns % TICK_NS + self.wall_ahead_ns
    }

    /// Changes a file as the kernel does. Returns the new timestamp.
    fn touch(&mut self, number: usize) -> u64 {
        let (coarse_ns, fine_ns) = (self.tick_ns().max(self.given_ns), self.wall_ns());
        let file = &mut self.files[number];
        let is_fine = file.is_asked && coarse_ns <= file.ctime;
        file.time = if is_fine { fine_ns } else { coarse_ns };
        (file.ctime, file.is_asked) = (file.time, false);
        self.given_ns = self.given_ns.max(file.time);
        file.time
    }

    fn put(&mut self, kind: RecordKind, number: usize, payload: Vec<u8>) -> u64 {
        self.position += 64;
        self.last_word_ns = self.now_ns;
        let is_coarse = matches!(kind, RecordKind::Write | RecordKind::SetSize);
        let wall_ns = if is_coarse { self.tick_ns() } else { self.wall_ns() };
        let (position, file) = (self.position, number as u64 + 1);
        let payload_bytes = u32::try_from(payload.len()).unwrap();
        let header = Header { position, file, wall_ns, payload_bytes, ..Header::of(kind) };
        self.headers.push((header, payload));
        position
    }

    fn define(&mut self, number: usize) {
        let identity = number as u64 + 1;
        let handle = FileHandle::new(1, &identity.to_le_bytes()).unwrap();
        for covered in [false, true] {
            let definition = Definition {
                identity,
                file_system: [7; 16],
                handle,
                covered,
                starts: !covered,
                size_bytes: 0,
                device: 1,
                inode: identity,
                path: b"/a",
            };
            let payload = [definition.encode().as_bytes(), handle.bytes(), b"/a"].concat();
            self.put(RecordKind::Define, number, payload);
        }
    }

    /// Lets time pass, with heartbeats.
    fn pass(&mut self, ns: u64) {
        let until_ns = self.now_ns + ns;
        let is_beating = |it: &Self| it.is_supervised && it.beat.done <= it.position;
        while is_beating(self) && self.beaten_ns + BEAT_NS <= until_ns {
            self.now_ns = self.now_ns.max(self.beaten_ns + BEAT_NS);
            self.beat();
        }
        self.now_ns = until_ns;
    }

    fn beat(&mut self) {
        (self.beaten_ns, self.last_word_ns) = (self.now_ns, self.now_ns);
        let head = self.position + 64;
        let middle = self.files.iter().filter_map(|file| file.in_the_middle);
        let done =
            if self.mistake == Mistake::AllDone { head } else { middle.fold(head, u64::min) };
        let early_ns = if self.mistake == Mistake::ClockFirst { 50 * MS } else { 0 };
        let back_ns = self.most_ahead_ns - self.wall_ahead_ns;
        let back_ns = if self.mistake == Mistake::StepsUnseen { 0 } else { back_ns };
        let set_back_ns = self.beat.set_back_ns.max(back_ns);
        let wall_ns = self.wall_ns() - early_ns;
        self.beat = Heartbeat { wall_ns, done, set_back_ns, recovery_ns: 0 };
    }

    /// Does an operation of the session, as the kernel does.
    fn change(&mut self, number: usize) {
        let time = self.touch(number);
        let file = &mut self.files[number];
        file.own.push(time);
        (file.confirmed, file.outside) = (None, None);
        file.in_the_middle = None;
    }

    fn step(&mut self) {
        let number = usize::try_from(self.random.below(FILES as u64)).unwrap();
        let is_in_the_middle = self.files[number].in_the_middle.is_some();
        match self.random.below(20) {
            0..6 if is_in_the_middle => self.change(number),
            0..4 if !is_in_the_middle => {
                let position = self.put(RecordKind::Write, number, Vec::new());
                self.files[number].in_the_middle = Some(position);
                self.files[number].confirmed = None;
                if !self.is_supervised {
                    // Only a heartbeat bounds a longer operation.
                    let ns = self.random.below(LATE_NS - 2 * TICK_NS);
                    self.now_ns += ns;
                    self.change(number);
                }
            }
            4..9 if !is_in_the_middle => {
                self.put(RecordKind::Mark, number, Vec::new());
                // A sync soon after another one does not read the timestamp.
                let asks = self.random.below(2) == 0;
                let time = self.files[number].time;
                self.confirm(number, asks.then_some(time));
            }
            9 if self.mistake != Mistake::Unannounced && !is_in_the_middle => self.make(number),
            9 if self.mistake == Mistake::Unannounced && !is_in_the_middle => self.change(number),
            10 => self.set_clock(),
            11 if self.files.iter().all(|file| file.in_the_middle.is_none()) => {
                self.is_supervised = false;
            }
            12..15 => {
                self.files[number].outside = Some((self.now_ns, self.touch(number)));
            }
            _ => {
                let most_ns =
                    [MS, 20 * MS, 3000 * MS][usize::try_from(self.random.below(3)).unwrap()];
                let ns = self.random.below(most_ns);
                self.pass(ns);
            }
        }
    }

    /// Marks all operations done by the last record, which has the file's `time` if it was read.
    fn confirm(&mut self, number: usize, time: Option<u64>) {
        let (at_ns, file) = (self.now_ns, &mut self.files[number]);
        file.confirmed = if let (Some(time), Some((header, _))) = (time, self.headers.last_mut()) {
            header.aux = time;
            file.is_asked = true;
            Some((at_ns + 1, true))
        } else {
            // The timestamp in an earlier record still holds.
            let has_time = |confirmed: &(u64, bool)| confirmed.1;
            file.confirmed.filter(has_time).or(Some((at_ns + TICK_NS, false)))
        };
    }

    /// Records the whole file. The program may have set its timestamp back.
    fn make(&mut self, number: usize) {
        if self.random.below(2) == 0 {
            self.touch(number);
            self.files[number].time = EPOCH_NS;
        }
        let attributes = Attributes {
            mode: 0o644,
            owner: 0,
            group: 0,
            accessed: Timestamp::default(),
            modified: Timestamp::of_ns(self.files[number].time),
            extended: b"",
        };
        let at = NameAt { parent: FileHandle::new(1, &[1; 8]).unwrap(), name: b"a" };
        let make = Make { at, parent_changed: Timestamp::default(), attributes };
        let fixed = make.encode();
        let payload = make.parts(&fixed, b"content").into_iter().flat_map(|part| part.to_vec());
        self.put(RecordKind::Make, number, payload.collect());
        self.files[number].confirmed = None;
        let ctime = self.files[number].ctime;
        self.confirm(number, Some(ctime));
    }

    /// Sets the clock while the supervisor lives and no operation is in progress. A heartbeat comes
    /// before the next operation: before it the bound would be that of the former clock.
    fn set_clock(&mut self) {
        let is_quiet = self.files.iter().all(|file| file.in_the_middle.is_none());
        if !self.is_supervised || !is_quiet || self.random.below(4) > 0 {
            return;
        }
        let by_ns = self.random.below(3_600_000 * MS);
        let is_back = self.random.below(2) == 0;
        self.wall_ahead_ns =
            if is_back { self.wall_ahead_ns - by_ns } else { self.wall_ahead_ns + by_ns };
        self.most_ahead_ns = self.most_ahead_ns.max(self.wall_ahead_ns);
        self.beat();
    }

    /// Ends the session without a last record. The kernel may complete operations in progress.
    fn die(&mut self) {
        let ns = self.random.below(BEAT_NS);
        self.pass(ns);
        for number in 0..FILES {
            if self.files[number].in_the_middle.is_some() && self.random.below(2) == 0 {
                self.change(number);
            }
        }
        // Processes outside continue.
        for number in 0..FILES {
            let ns = self.random.below(3000 * MS);
            self.now_ns += ns;
            if self.random.below(3) == 0 {
                self.files[number].outside = Some((self.now_ns, self.touch(number)));
            }
        }
    }

    /// Returns the fault of recovery's judgment about timestamps, if there is one.
    fn judge(mut self) -> Option<String> {
        let mut planner = std::mem::take(&mut self.planner).with_heartbeat(Some(self.beat));
        for (header, payload) in &self.headers {
            planner.add(header, Payload::Whole(payload));
        }
        let plan = planner.finish();
        let plan_of = |number: usize| -> Option<&FilePlan> {
            plan.files().iter().find(|file| file.identity == number as u64 + 1)
        };
        for (number, file) in self.files.iter().enumerate() {
            let Some(found) = plan_of(number) else { continue };
            let until_ns = found.modified_until_ns.expect("all records are dated");
            let is_refused = |time: u64| plan.dates.is_from_outside(time.into(), until_ns);
            if file.outside.is_none()
                && let Some(time) = file.own.iter().find(|time| is_refused(**time))
            {
                return Some(format!(
                    "file {number}: own time {time} is refused, after {until_ns}"
                ));
            }
            let Some((at_ns, time)) = file.outside.filter(|_| self.beat.set_back_ns == 0) else {
                continue;
            };
            let late_ns = self.last_word_ns + LATE_NS + TICK_NS;
            let known_ns = file.confirmed.map_or(late_ns, |(known_ns, _)| known_ns);
            if at_ns >= known_ns && !is_refused(time) {
                return Some(format!("file {number}: {time} from outside is overwritten"));
            }
        }
        None
    }
}

/// Plays a history. Returns its fault, if there is one.
fn played(seed: u64, mistake: Mistake) -> Option<String> {
    let mut session = Session::new(seed, mistake);
    for _ in 0..=session.random.below(60) {
        session.step();
    }
    session.die();
    session.judge()
}

fn first_wrong(histories: u64, mistake: Mistake) -> Option<(u64, String)> {
    let seed = |number: u64| (number + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (0..histories).find_map(|number| Some((number, played(seed(number), mistake)?)))
}

#[test]
fn own_times_are_told_from_those_from_outside() {
    assert_eq!(first_wrong(20_000, Mistake::None), None);
}

#[test]
fn each_mistake_of_the_session_is_noticed() {
    for mistake in
        [Mistake::AllDone, Mistake::ClockFirst, Mistake::StepsUnseen, Mistake::Unannounced]
    {
        assert!(first_wrong(20_000, mistake).is_some(), "{mistake:?}");
    }
}

/// Plans one file whose last record is of this kind and time. Returns its bound on timestamps.
fn until(kind: RecordKind, wall_ns: u64, beat: Option<Heartbeat>) -> Option<u64> {
    let mut session = Session::new(1, Mistake::None);
    session.put(RecordKind::Write, 0, Vec::new());
    session.put(kind, 0, Vec::new());
    session.headers.last_mut().unwrap().0.wall_ns = wall_ns;
    let mut planner = Planner::new().with_heartbeat(beat);
    session
        .headers
        .iter()
        .for_each(|(header, payload)| planner.add(header, Payload::Whole(payload)));
    planner.finish().files()[0].modified_until_ns
}

#[test]
fn a_story_whose_last_record_has_no_date_says_nothing_of_times() {
    assert_eq!(until(RecordKind::Mark, 0, None), None, "of a former release");
    let later_ns = EPOCH_NS + 1000 * MS;
    assert_eq!(until(RecordKind::Mark, later_ns, None), Some(later_ns));
    assert_eq!(until(RecordKind::Write, later_ns, None), Some(later_ns + LATE_NS));
    let beat = Heartbeat { wall_ns: later_ns + MS, done: u64::MAX, ..Heartbeat::default() };
    assert_eq!(until(RecordKind::Write, later_ns, Some(beat)), Some(later_ns + MS));
}

/// Plans one file with a write and these records, each with its `aux`.
fn planned(records: &[(RecordKind, u64)], beat: Heartbeat) -> FilePlan {
    let mut session = Session::new(1, Mistake::None);
    session.put(RecordKind::Write, 0, Vec::new());
    for (kind, aux) in records {
        session.now_ns += 10 * TICK_NS;
        session.put(*kind, 0, Vec::new());
        session.headers.last_mut().unwrap().0.aux = *aux;
    }
    let mut planner = Planner::new().with_heartbeat(Some(beat));
    session
        .headers
        .iter()
        .for_each(|(header, payload)| planner.add(header, Payload::Whole(payload)));
    planner.finish().files.remove(0)
}

#[test]
fn the_time_that_a_sync_saw_is_the_last_one_of_the_session() {
    use RecordKind::{Mark, Write};
    let (beat, shown_ns) = (Heartbeat::default(), EPOCH_NS + 5);
    let of = |records: &[_], beat| {
        let file = planned(records, beat);
        (file.modified_until_ns.unwrap(), file.changed_ns)
    };
    let tick = |count: u64| EPOCH_NS + count * 10 * TICK_NS;
    assert_eq!(of(&[(Mark, shown_ns)], beat), (shown_ns, shown_ns));
    assert_eq!(of(&[(Mark, 0)], beat), (tick(1), EPOCH_NS), "it did not ask");
    assert_eq!(of(&[(Mark, shown_ns), (Mark, 0)], beat), (shown_ns, shown_ns));
    // Bytes written since may have another timestamp, which no sync has promised.
    let written = [(Mark, shown_ns), (Write, 0)];
    assert_eq!(of(&written, beat), (tick(2) + LATE_NS, shown_ns));
    assert_eq!(of(&[(Write, 0)], beat), (tick(1) + LATE_NS, 0));
    let set_back = Heartbeat { set_back_ns: 7, ..beat };
    assert_eq!(of(&[(Mark, shown_ns)], set_back).0, tick(1) + 7, "an older state may be later");
}

#[test]
fn what_an_interrupted_recovery_has_left_is_not_from_outside() {
    let beat = |recovery_ns| Heartbeat { recovery_ns, wall_ns: 1, ..Heartbeat::default() };
    let is_from_outside = |recovery_ns, time: i128| {
        let plan = Planner::new().with_heartbeat(Some(beat(recovery_ns))).finish();
        plan.dates.is_from_outside(time, 100 * MS)
    };
    let ms = i128::from(MS);
    assert!(is_from_outside(0, 101 * ms) && !is_from_outside(0, 100 * ms));
    assert!(is_from_outside(500 * MS, 400 * ms) && !is_from_outside(500 * MS, 495 * ms));
}
