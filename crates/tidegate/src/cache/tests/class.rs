//! IO classes: what they may use, which of them give up slots, their modes, and their change
//! online.

use std::ops::Range;
use std::sync::mpsc::channel;

use proptest::prelude::*;

use super::*;
use super::{NO_THREAD, PAGES, binding, memory, memory_of, open, pool, pool_of, read, work, write};
use crate::cache::store::layout::PAGE_BYTES;
use crate::device::{IoBuffer, OwnedOperation};
use crate::stats::Collector;
use crate::tier::Tier;

const HEADER: &str = "IO class id,IO class name,Eviction priority,Allocation,Cache mode,Minimum";

/// A table of `lines`, which may lack columns at their end.
fn table(lines: &str) -> String {
    let line = |line: &str| format!(";{line}{}", ",".repeat(5 - line.matches(',').count()));
    HEADER.to_owned() + &lines.split(';').map(line).collect::<String>()
}

fn set(device: &CacheDevice, lines: &str) {
    device.set("io-classes", &table(lines)).unwrap();
}

fn value(device: &CacheDevice) -> String {
    let all = device.settings();
    all.into_iter().find(|it| it.key == "io-classes").map(|it| it.value).unwrap()
}

/// Slots that the classes use, and how many of them are dirty.
fn usage(device: &CacheDevice, class: usize) -> (u64, u64) {
    let shards = 0..device.core.pages.shards.count();
    let of = shards.map(|it| device.core.pages.shards.lock(it).orders.usage[class]);
    of.fold((0, 0), |sum, one| (sum.0 + one.live(), sum.1 + one.dirty()))
}

fn cached(device: &CacheDevice, pages: Range<u64>) -> usize {
    pages.filter(|page| device.core.pages.find(*page).is_some()).count()
}

#[test]
fn a_class_at_its_allocation_replaces_its_own_pages() {
    let (region, backing) = (pool(64), memory());
    let device = open(&region, &backing);
    set(&device, "1,io_direction:write,10,0.25");
    for page in 0..PAGES {
        write(&device, page, 1);
        assert!(usage(&device, 1).0 <= 16, "page {page}: {:?}", usage(&device, 1));
    }
    assert_eq!(usage(&device, 1).0, 16, "it uses all that it may");
    (0..PAGES).for_each(|page| assert_eq!(read(&device, page), 1));
    work(&device);
    let (of_writes, of_reads) = (usage(&device, 1).0, usage(&device, 0).0);
    assert!(of_writes <= 16 && of_reads > 16, "{of_writes} {of_reads}");
    device.shutdown().unwrap();
    (0..PAGES).for_each(|page| assert_eq!(read(&*backing, page), 1));
}

/// Seven records of a block take as much of an allocation as one page.
#[test]
fn records_count_as_what_they_take_of_a_slot() {
    let (region, backing) = (pool_of(64, 512), memory_of(512));
    let device = open(&region, &backing);
    device.set("by-content", "off").unwrap();
    set(&device, "1,io_direction:write,10,0.25");
    let records = 0..7 * 15;
    for page in records.clone() {
        device.write(page * PAGE_BYTES, &[1; 512], WriteFlags::default()).unwrap();
    }
    assert_eq!((cached(&device, records.clone()), usage(&device, 1)), (7 * 15, (15, 15)));
    for page in 120..122 {
        device.write(page * PAGE_BYTES, &[1; PAGE], WriteFlags::default()).unwrap();
    }
    assert!(usage(&device, 1).0 <= 16 && cached(&device, 120..122) == 2);
    assert!(cached(&device, records) < 7 * 15, "others made place for the pages");
}

#[test]
fn a_large_write_of_a_class_goes_around_where_it_cannot_fit() {
    let backing = memory();
    let device = open(&pool(64), &backing);
    set(&device, "1,request_size:ge:64K,10,0.10;2,request_size:eq:8K,10,0.00");
    device.write(0, &vec![5; 16 * 4096], WriteFlags::default()).unwrap();
    device.write(32 * 4096, &[6; 8192], WriteFlags::default()).unwrap();
    assert_eq!(cached(&device, 0..PAGES), 0);
    assert_eq!([read(&*backing, 3), read(&*backing, 33)], [5, 6]);
    write(&device, 3, 7);
    assert_eq!((read(&device, 3), usage(&device, 0).0), (7, 1));
    assert_eq!(device.core.pages.counters.get(counters::Counter::ClassFull), 2);
}

#[test]
fn pinned_pages_stay_and_less_important_ones_go_first() {
    for slots in [100, 160] {
        let device = open(&pool(slots), &memory());
        set(&device, "0,unclassified,200,1.00;1,lba:lt:160,,0.30;2,lba:lt:320&lba:ge:160,5,0.30");
        (0..40).for_each(|page| write(&device, page, 1));
        for round in 0..6 {
            for page in 40..PAGES {
                write(&device, page, round);
                work(&device);
            }
        }
        assert_eq!(cached(&device, 0..20), 20, "pinned");
        assert_eq!(cached(&device, 20..40), 20, "more important");
        (0..40).for_each(|page| assert_eq!(read(&device, page), 1));
    }
}

#[test]
fn a_page_is_of_the_class_that_used_it_last() {
    let device = open(&pool(64), &memory());
    set(&device, "1,io_direction:write,10,1.00;2,io_direction:read,10,1.00");
    (0..8).for_each(|page| write(&device, page, 1));
    assert_eq!([usage(&device, 1), usage(&device, 2)], [(8, 8), (0, 0)]);
    (0..3).for_each(|page| assert_eq!(read(&device, page), 1));
    assert_eq!([usage(&device, 1), usage(&device, 2)], [(5, 5), (3, 3)]);
    device.clean_all().unwrap();
    assert_eq!([usage(&device, 1), usage(&device, 2)], [(5, 0), (3, 0)]);
    write(&device, 0, 2);
    assert_eq!([usage(&device, 1), usage(&device, 2)], [(6, 1), (2, 0)]);
}

#[test]
fn a_class_has_its_mode() {
    let backing = memory();
    let device = open(&pool(64), &backing);
    set(&device, "1,lba:lt:80,10,1.00,wt;2,lba:ge:800,10,1.00,pt");
    for page in [1, 20, 101] {
        write(&device, page, 9);
    }
    assert_eq!([1, 20, 101].map(|page| read(&*backing, page)), [9, 0, 9]);
    assert_eq!([1, 20, 101].map(|page| cached(&device, page..page + 1)), [1, 1, 0]);
    device.set("mode", "pt").unwrap();
    write(&device, 2, 8);
    assert_eq!(cached(&device, 2..3), 1, "the class's own mode");
}

#[test]
fn a_class_is_found_by_its_queue() {
    let device = Arc::new(open(&pool(64), &memory()));
    set(&device, "1,queue:eq:3,10,1.00");
    for queue in [3, 4] {
        let mut buffer = IoBuffer::new(4096);
        buffer.data_mut().fill(1);
        let (told, ended) = channel();
        let offset = u64::from(queue) * PAGE_BYTES;
        let operation = OwnedOperation::Write { offset, buffer, flags: WriteFlags::default() };
        let context = Context { queue, class: 0 };
        let request = AsyncRequest::new(operation, context, move |_, it| told.send(it).unwrap());
        Arc::clone(&device).start(request);
        ended.recv().unwrap().unwrap();
        let data = [2; 4096];
        let mut hit = Operation::Write { offset, data: &data, flags: WriteFlags::default() };
        device.attempt(&mut hit, context).done().unwrap().unwrap();
    }
    assert_eq!([usage(&device, 0).0, usage(&device, 1).0], [1, 1]);
}

#[test]
fn classes_are_kept_changed_and_counted() {
    let (region, backing) = (pool(64), memory());
    let device = open(&region, &backing);
    assert_eq!(value(&device), "none");
    set(&device, "1,lba:lt:80,10,0.50");
    (0..20).for_each(|page| write(&device, page, 1));
    (0..5).for_each(|page| write(&device, page, 2));
    let mut collector = Collector::default();
    device.metrics(&mut collector);
    let readings = collector.finish();
    let of_class = |name: &str| {
        let is_it = |it: &&crate::stats::Reading| {
            it.metric.name == name && it.labels.get("io_class").is_some_and(|id| id == "1")
        };
        readings.iter().find(is_it).map(|it| format!("{:?}", it.value)).unwrap_or_default()
    };
    assert!(of_class("cache_write_hits").contains('5'), "{}", of_class("cache_write_hits"));
    assert!(of_class("cache_write_full_misses").contains("10"));
    assert!(of_class("cache_occupancy_bytes").contains("40960"));
    assert!(device.state().lines.iter().any(|(label, _)| label == "io class 1"));
    drop(device);
    let device = open(&region, &backing);
    assert!(value(&device).contains("1,lba:lt:80,10,0.50"), "{}", value(&device));
    assert_eq!(usage(&device, 0).0, 20, "the medium keeps no classes");
    (0..3).for_each(|page| write(&device, page, 3));
    assert_eq!(usage(&device, 1).0, 3);
    set(&device, "2,lba:lt:8,10,0.50");
    assert_eq!([usage(&device, 0).0, usage(&device, 1).0], [20, 0], "class 1 is no more");
    device.set("eviction", "lru").unwrap();
    device.set("io-classes", "none").unwrap();
    assert_eq!(
        (value(&device).as_str(), device.core.router.admission.is_choosy()),
        ("none", false)
    );
    (0..5).for_each(|page| assert_eq!(read(&device, page), if page < 3 { 3 } else { 2 }));
}

#[test]
fn tables_that_do_not_do_change_nothing() {
    let device = open(&pool(64), &memory());
    let error = device.set("io-classes", &table("1,lba:lt:x,1,1.00")).unwrap_err();
    assert!(error.to_string().contains("1,lba:lt:x,1,1.00,,"), "{error}");
    let rule = ["lba:lt:80"; 40].join("&");
    let many: Vec<_> = (1..33).map(|id| format!("{id},{rule},1,1.00")).collect();
    device.set("io-classes", &table(&many.join(";"))).unwrap_err();
    assert_eq!(value(&device), "none");
    let options = CacheDeviceOptions { atomic_flush: true, ..NO_THREAD };
    let region = pool(64);
    let device = CacheDevice::open(region.clone(), memory(), binding(), options).unwrap();
    device.set("io-classes", &table("1,lba:lt:8,1,1.00,wt")).unwrap_err();
    set(&device, "1,lba:lt:8,1,0.10,wo");
    drop(device);
    set(&open(&region, &memory()), "1,lba:lt:8,1,1.00,wt");
    let refused = CacheDevice::open(region, memory(), binding(), options).err().unwrap();
    assert!(matches!(refused, CacheError::NotAtomic { mode: Mode::WriteThrough }), "{refused}");
}

const TABLES: [&str; 4] = [
    "1,io_direction:write,10,0.25",
    "1,lba:lt:256,,0.30;2,request_size:gt:4K,200,0.10;3,io_direction:read,5,0.50,wt",
    "0,unclassified,255,0.20;4,request_size:le:8K,1,0.40,,0.20;9,lba:gt:700,3,0.00",
    "5,lba:lt:512,1,0.50,wo;6,lba:ge:512,2,0.50,wa",
];

#[derive(Debug, Clone)]
enum Step {
    Write(u64, u64, u8),
    Read(u64),
    Zero(u64),
    Clean,
    Work,
    Table(usize),
    None,
    Reopen,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => (0..PAGES - 8, 1..8_u64, any::<u8>()).prop_map(|(at, n, byte)| Step::Write(at, n, byte)),
        6 => (0..PAGES).prop_map(Step::Read),
        1 => (0..PAGES).prop_map(Step::Zero),
        1 => Just(Step::Clean),
        2 => Just(Step::Work),
        1 => (0..TABLES.len()).prop_map(Step::Table),
        1 => Just(Step::None),
        1 => Just(Step::Reopen),
    ];
    prop::collection::vec(step, 1..120)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn with_any_classes_it_is_a_map_of_blocks(slots in 24..90_u64, steps in steps()) {
        let (region, backing) = (pool(slots), memory());
        let (mut device, mut model) = (open(&region, &backing), vec![0; usize::try_from(PAGES).unwrap()]);
        for step in steps {
            match step {
                Step::Write(at, pages, byte) => {
                    let data = vec![byte; usize::try_from(pages).unwrap() * 4096];
                    device.write(at * PAGE_BYTES, &data, WriteFlags::default()).unwrap();
                    (at..at + pages).for_each(|page| model[usize::try_from(page).unwrap()] = byte);
                }
                Step::Read(page) => {
                    prop_assert_eq!(read(&device, page), model[usize::try_from(page).unwrap()]);
                }
                Step::Zero(page) => {
                    device.discard(page * PAGE_BYTES, PAGE_BYTES).unwrap();
                    model[usize::try_from(page).unwrap()] = 0;
                }
                Step::Clean => device.clean_all().unwrap(),
                Step::Work => work(&device),
                Step::Table(at) => set(&device, TABLES[at]),
                Step::None => device.set("io-classes", "none").unwrap(),
                Step::Reopen => {
                    drop(device);
                    device = open(&region, &backing);
                }
            }
            let all: u64 = (0..crate::cache::policy::classes::CLASSES).map(|it| usage(&device, it).0).sum();
            let dirty: u64 = (0..crate::cache::policy::classes::CLASSES).map(|it| usage(&device, it).1).sum();
            let counted = device.core.pages.usage();
            prop_assert_eq!((all, dirty), (counted.live, counted.dirty));
        }
        for page in 0..PAGES {
            prop_assert_eq!(read(&device, page), model[usize::try_from(page).unwrap()]);
        }
        device.shutdown().unwrap();
        for page in 0..PAGES {
            prop_assert_eq!(read(&*backing, page), model[usize::try_from(page).unwrap()]);
        }
    }
}
