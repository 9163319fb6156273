//! The operations that an observer sees, and their moments.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::pmem::{MediaModel, Observer, Region, RegionOptions};

#[derive(Debug, PartialEq, Eq)]
enum Seen {
    Store(u64, Vec<u8>, bool),
    WriteBack(u64, u64),
    Fence,
    Load(u64, u64),
    Relax,
}

#[derive(Default)]
struct Log(Mutex<Vec<Seen>>);

impl Observer for Log {
    fn store(&self, offset: u64, data: &[u8], non_temporal: bool) {
        self.0.lock().push(Seen::Store(offset, data.to_vec(), non_temporal));
    }

    fn write_back(&self, offset: u64, len: u64) {
        self.0.lock().push(Seen::WriteBack(offset, len));
    }

    fn fence(&self) {
        self.0.lock().push(Seen::Fence);
    }

    fn load(&self, offset: u64, len: u64) {
        self.0.lock().push(Seen::Load(offset, len));
    }

    fn relax(&self) {
        self.0.lock().push(Seen::Relax);
    }
}

#[test]
fn every_operation_is_seen_once_in_program_order() {
    let log = Arc::new(Log::default());
    let region = Region::anonymous(1 << 16).unwrap().observed(log.clone());
    region.write(1, b"ab").unwrap();
    region.write_streaming(2, b"cd").unwrap();
    region.store_u32(4, 0x0403_0201).unwrap();
    region.store_u64(8, 1).unwrap();
    region.persist(8, 8).unwrap();
    region.read(0, &mut [0; 5]).unwrap();
    region.load_u32(4).unwrap();
    region.load_u64(8).unwrap();
    region.relax();
    let expected = [
        Seen::Store(1, b"ab".to_vec(), false),
        Seen::Store(2, b"cd".to_vec(), true),
        Seen::Store(4, vec![1, 2, 3, 4], false),
        Seen::Store(8, vec![1, 0, 0, 0, 0, 0, 0, 0], false),
        Seen::WriteBack(8, 8),
        Seen::Fence,
        Seen::Load(0, 5),
        Seen::Load(4, 4),
        Seen::Load(8, 8),
        Seen::Relax,
    ];
    assert_eq!(*log.0.lock(), expected);
}

#[test]
fn zeroes_are_seen_as_streaming_stores_that_cover_the_range() {
    let log = Arc::new(Log::default());
    let region = Region::anonymous(1 << 16).unwrap().observed(log.clone());
    region.zero_streaming(100, 10_000).unwrap();
    let mut next = 100;
    for seen in log.0.lock().iter() {
        let Seen::Store(offset, data, true) = seen else { panic!("{seen:?}") };
        assert_eq!(*offset, next);
        assert!(data.iter().all(|&byte| byte == 0));
        next += data.len() as u64;
    }
    assert_eq!(next, 10_100);
}

#[test]
fn a_refused_operation_is_not_seen() {
    let log = Arc::new(Log::default());
    let region = Region::anonymous(64).unwrap().observed(log.clone());
    region.write(64, b"x").unwrap_err();
    region.write_streaming(60, b"12345").unwrap_err();
    region.store_u32(2, 1).unwrap_err();
    region.load_u64(64).unwrap_err();
    region.write_back(65, 0).unwrap_err();
    assert_eq!(*log.0.lock(), []);
}

/// Looks at the region from inside the observer, before the store happens.
struct Before {
    region: Mutex<Option<Arc<Region>>>,
    checked: Mutex<u32>,
}

impl Observer for Before {
    fn store(&self, offset: u64, _data: &[u8], _non_temporal: bool) {
        let region = self.region.lock().clone();
        let Some(region) = region else { return };
        assert_eq!(region.load_u64(offset).unwrap(), 0, "the store is visible before it is seen");
        *self.checked.lock() += 1;
    }

    fn write_back(&self, _offset: u64, _len: u64) {}
    fn fence(&self) {}
    fn load(&self, _offset: u64, _len: u64) {}
    fn relax(&self) {}
}

#[test]
fn a_store_is_seen_before_it_takes_effect() {
    let before = Arc::new(Before { region: Mutex::default(), checked: Mutex::new(0) });
    let region = Arc::new(Region::anonymous(4096).unwrap().observed(before.clone()));
    *before.region.lock() = Some(region.clone());
    region.store_u64(0, 1).unwrap();
    region.write(8, &[1; 8]).unwrap();
    region.write_streaming(64, &[1; 128]).unwrap();
    // Breaks the cycle: the observer holds the region, which holds the observer.
    *before.region.lock() = None;
    assert_eq!(*before.checked.lock(), 3);
}

#[test]
fn an_observed_region_has_no_delays() {
    // Each operation of this medium takes a second, so that with delays the test would not end.
    let media: MediaModel =
        "custom,read_latency_ns=1000000000,write_latency_ns=1000000000".parse().unwrap();
    let options = RegionOptions { media, ..RegionOptions::default() };
    let region = Region::anonymous_with(4096, &options).unwrap().observed(Arc::new(Log::default()));
    for _ in 0..100 {
        region.write_streaming(0, &[1; 64]).unwrap();
        region.fence().unwrap();
        region.read(0, &mut [0; 64]).unwrap();
    }
    assert_eq!(region.counters().fences, 100);
}
