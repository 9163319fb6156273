//! Random sequences on a log against a list of records: what was appended and not retired is found,
//! and nothing else.

use std::collections::BTreeSet;
use std::io::IoSlice;
use std::sync::Arc;

use proptest::prelude::*;

use crate::log::pool::layout::RECORD_ALIGN_BYTES;
use crate::log::ring::Share;
use crate::log::*;
use crate::pmem::{Region, SharedMemory};

const POOL_BYTES: u64 = 128 << 10;
const FILES: u64 = 3;

/// One step of a sequence.
#[derive(Debug, Clone)]
enum Step {
    /// `len` bytes to one file.
    Write { file: u64, offset: u64, len: usize },
    /// A record without a payload.
    Zero { file: u64, offset: u64 },
    /// An operation begins and stays in the middle until the next [`Step::Finish`], if none is
    /// there yet.
    Begin { file: u64 },
    /// It ends.
    Finish,
    /// All is retired that may be.
    Retire,
    /// The log is started anew over what is on the medium, as after a recovery that destaged all
    /// records.
    Restart,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let file = 0..FILES;
    let step = prop_oneof![
        8 => (file.clone(), any::<u32>(), 0..12_000_usize)
            .prop_map(|(file, offset, len)| Step::Write { file, offset: offset.into(), len }),
        2 => (file.clone(), any::<u32>()).prop_map(|(file, offset)| Step::Zero { file, offset: offset.into() }),
        1 => file.prop_map(|file| Step::Begin { file }),
        1 => Just(Step::Finish),
        2 => Just(Step::Retire),
        1 => Just(Step::Restart),
    ];
    proptest::collection::vec(step, 1..120)
}

/// What a record must say.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Expected {
    position: u64,
    end: u64,
    inode: u64,
    kind: RecordKind,
    offset: u64,
    payload: Vec<u8>,
}

/// The log, and what it should hold.
struct Run {
    log: Log,
    records: Vec<Expected>,
    /// What the operation in the middle, if there is one, keeps from being retired.
    held: Option<(FileRef, u64)>,
    stamp: u8,
}

fn key(inode: u64) -> FileKey {
    FileKey { device: 1, inode, identity: 1000 + inode }
}

impl Run {
    fn new() -> Self {
        let region = Arc::new(Region::anonymous(POOL_BYTES).unwrap());
        create(&region, &LogOptions::default()).unwrap();
        Self { log: start(region), records: Vec::new(), held: None, stamp: 0 }
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Write { file, offset, len } => {
                self.stamp = self.stamp.wrapping_add(1);
                let data = vec![self.stamp; len];
                self.append(file, RecordKind::Write, offset, data);
            }
            Step::Zero { file, offset } => self.append(file, RecordKind::Zero, offset, Vec::new()),
            Step::Begin { file } if self.held.is_none() => {
                let file = self.log.entry_for(&key(file)).unwrap();
                let guard = self.log.lock(file).unwrap();
                let ticket = guard.begin().unwrap();
                self.held = Some((file, ticket.bound()));
                std::mem::forget(ticket);
            }
            Step::Begin { .. } => {}
            Step::Finish => self.finish(),
            Step::Retire => self.retire(),
            Step::Restart => self.restart(),
        }
    }

    fn append(&mut self, inode: u64, kind: RecordKind, offset: u64, payload: Vec<u8>) {
        let head = self.log.ring().head();
        let file = self.log.entry_for(&key(inode)).unwrap();
        let guard = self.log.lock(file).unwrap();
        let mut ticket = guard.begin().unwrap();
        if ticket.needs_define() && ticket.define(&crate::log::tests::definition(inode)).is_err() {
            assert!(self.is_full(head, 256, Share::Definitions));
            return;
        }
        let head = self.log.ring().head();
        let appended = match kind {
            RecordKind::Zero => ticket.zero(offset, 7, false),
            _ => ticket.write(offset, &[IoSlice::new(&payload)], false),
        };
        let bytes = RECORD_ALIGN_BYTES + (payload.len() as u64).next_multiple_of(64);
        match appended {
            Ok(position) => {
                let ring_bytes = self.log.ring().pool().ring_bytes();
                assert!(position >= head && position % ring_bytes + bytes <= ring_bytes);
                let end = position + bytes;
                assert!(end - self.log.ring().tail() <= ring_bytes, "into what is not retired");
                self.records.push(Expected { position, end, inode, kind, offset, payload });
            }
            Err(error) => {
                assert_eq!(error, AppendError::Full);
                assert!(
                    self.is_full(head, bytes, Share::Data),
                    "refused though there is free space"
                );
            }
        }
    }

    /// A record of so many bytes has no free space at `head`, or would not end in this lap.
    fn is_full(&self, head: u64, bytes: u64, space: Share) -> bool {
        let ring_bytes = self.log.ring().pool().ring_bytes();
        let left_in_lap = ring_bytes - head % ring_bytes;
        // A lap begins with a record of what the last one has left.
        let skipped = if bytes > left_in_lap { left_in_lap + RECORD_ALIGN_BYTES } else { 0 };
        head + skipped + bytes - self.log.ring().tail() > self.log.ring().usable_bytes(space)
    }

    fn finish(&mut self) {
        if self.held.take().is_some() {
            let interrupted: Vec<_> = self.log.operations().all().collect();
            assert_eq!(interrupted.len(), 1);
            self.log.operations().complete(&interrupted[0]);
        }
    }

    fn retire(&mut self) {
        let safe = self.log.ring().safe_position();
        assert!(
            self.held.is_none_or(|(_, bound)| safe <= bound),
            "past an operation in the middle"
        );
        self.log.ring().retire_to(safe).unwrap();
        self.records.retain(|record| record.position >= safe);
        assert!(self.held.is_some() || safe == self.log.ring().head());
    }

    fn restart(&mut self) {
        self.held = None;
        self.records.clear();
        self.log = start(Arc::clone(self.log.ring().pool().region()));
    }

    /// What is found is what was appended and not retired; each record's file is defined by one
    /// that is found too.
    fn check(&self) {
        let pool = self.log.ring().pool();
        let (tail, limit) = (pool.tail().unwrap(), pool.limit().unwrap());
        assert!(tail == self.log.ring().tail() && self.log.ring().head() <= limit.max(tail));
        let mut scanner = Scanner::new(pool, tail, limit);
        let found: Vec<_> = scanner.by_ref().collect();
        assert_eq!((scanner.torn(), scanner.unreadable_bytes()), (0, 0));
        let (definitions, others): (Vec<_>, Vec<_>) =
            found.into_iter().partition(|record| record.kind == RecordKind::Define);
        let defined: BTreeSet<_> = definitions.iter().map(|record| record.file).collect();
        assert_eq!(others.len(), self.records.len());
        for (record, expected) in others.iter().zip(&self.records) {
            let mut payload = vec![0; record.payload_bytes as usize];
            pool.read_payload(record, 0, &mut payload).unwrap();
            assert!(payload == expected.payload, "the payload of {record:?}");
            let said = (record.position, record.kind, record.offset);
            assert_eq!(said, (expected.position, expected.kind, expected.offset));
            assert_eq!(record.position + record.record_bytes(), expected.end);
            assert!(defined.contains(&record.file), "no definition of the file of {record:?}");
        }
    }
}

fn start(region: Arc<Region>) -> Log {
    let pool = LogPool::open(region).unwrap();
    let all = pool.ring_bytes();
    Ring::start(pool, SharedMemory::anonymous(CONTROL_BYTES).unwrap(), all).map(Log::over).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_was_appended_and_not_retired_is_found(steps in steps()) {
        let mut run = Run::new();
        for step in &steps {
            run.step(step);
            run.check();
        }
    }
}
