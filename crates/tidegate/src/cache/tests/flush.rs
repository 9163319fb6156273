//! Flushes of the backing that fail: pages that they lost stay dirty, and a client learns of the
//! writes around the cache that they may have lost.

use std::sync::atomic::Ordering::SeqCst;

use super::*;
use super::{binding, memory, memory_of, open, pool, pool_of, read, write};

/// A backing that loses all unflushed writes when a flush fails, and then succeeds again, as a
/// disk's page cache does.
struct Losing {
    durable: Arc<MemoryDevice>,
    unflushed: Mutex<Vec<(u64, Vec<u8>)>>,
    fails: StdAtomicBool,
    /// Called once, after the next write.
    after_write: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl Losing {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            durable: memory(),
            unflushed: Mutex::default(),
            fails: StdAtomicBool::new(false),
            after_write: Mutex::default(),
        })
    }

    fn flush_all(&self) -> Result<()> {
        let unflushed = std::mem::take(&mut *self.unflushed.lock());
        if self.fails.swap(false, SeqCst) {
            return Err(DeviceError::new(DeviceErrorKind::Io, "all is lost"));
        }
        let keep = |(offset, data): &(u64, Vec<u8>)| {
            self.durable.write(*offset, data, WriteFlags::default())
        };
        unflushed.iter().try_for_each(keep)
    }
}

impl BlockDevice for Losing {
    fn geometry(&self) -> Geometry {
        self.durable.geometry()
    }

    fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        match operation {
            Operation::Write { offset, data, .. } => {
                self.unflushed.lock().push((*offset, data.to_vec()));
                let hook = self.after_write.lock().take();
                if let Some(hook) = hook {
                    hook();
                }
                Ok(())
            }
            Operation::Flush => self.flush_all(),
            other => self.durable.run(other),
        }
    }
}

/// A cache over `backing` with a write around it that is not flushed. After the next write to the
/// backing, another client's flush fails and loses all.
fn with_flush_that_loses(backing: &Arc<Losing>, mode: Mode) -> Arc<CacheDevice> {
    let device = Arc::new(open(&pool(64), backing));
    device.set_mode(Mode::WriteInvalidate).unwrap();
    write(&device, 9, 9);
    device.set_mode(mode).unwrap();
    let (client, losing) = (Arc::downgrade(&device), Arc::downgrade(backing));
    *backing.after_write.lock() = Some(Box::new(move || {
        losing.upgrade().unwrap().fails.store(true, SeqCst);
        client.upgrade().unwrap().flush().expect_err("the write around the cache is lost");
    }));
    device
}

#[test]
fn a_cleaner_keeps_pages_dirty_that_another_flush_lost() {
    let backing = Losing::new();
    let device = with_flush_that_loses(&backing, Mode::WriteBack);
    (1..4).for_each(|page| write(&device, page, 7));
    let error = device.clean_all().unwrap_err().to_string();
    assert!(error.contains("another flush of the backing failed meanwhile"), "{error}");
    assert_eq!(device.core.pages.usage().dirty, 3);
    device.flush().expect("the loss is reported");
    device.clean_all().unwrap();
    assert_eq!(device.core.pages.usage().dirty, 0);
    (1..4).for_each(|page| assert_eq!(read(&*backing.durable, page), 7));
}

#[test]
fn a_page_written_through_stays_dirty_that_another_flush_lost() {
    let backing = Losing::new();
    let device = with_flush_that_loses(&backing, Mode::WriteThrough);
    write(&device, 1, 7);
    device.flush().expect("the page is durable in the pool");
    assert_eq!(device.core.pages.usage().dirty, 1);
    device.clean_all().unwrap();
    assert_eq!((device.core.pages.usage().dirty, read(&*backing.durable, 1)), (0, 7));
    write(&device, 2, 8);
    device.flush().unwrap();
    assert_eq!((device.core.pages.usage().dirty, read(&*backing.durable, 2)), (0, 8));
}

/// The server before had written around the cache, and the backing reports the loss to the open.
#[test]
fn a_loss_that_the_open_meets_is_reported_to_a_client() {
    let (region, backing) = (pool(64), Losing::new());
    backing.fails.store(true, SeqCst);
    let device = open(&region, &backing);
    let error = device.flush().unwrap_err().to_string();
    assert!(error.contains("all is lost"), "{error}");
    device.flush().unwrap();
}

/// Flushes that wait while one is at the backing share the next one.
#[test]
fn waiting_flushes_share_one() {
    const CLIENTS: usize = 6;
    let fault = Arc::new(Fault::new(memory(), 1));
    let options = CacheDeviceOptions::default();
    let device = CacheDevice::open(pool(64), fault.clone(), binding(), options).unwrap();
    fault.add(Rule::new(&[Op::Flush], When::Always, Effect::Hang));
    let flushes = &device.core.backing.flushes;
    let (called, since) = (StdAtomicU64::new(0), flushes.moment());
    std::thread::scope(|scope| {
        let flush = || device.core.pages.flush_backing(Caller::Client).unwrap();
        let first = scope.spawn(flush);
        fault.wait_until_hung(1);
        let others: Vec<_> = (0..CLIENTS)
            .map(|_| {
                scope.spawn(|| {
                    let call = flushes.call();
                    called.fetch_add(1, SeqCst);
                    let last = flushes.last.lock();
                    device.core.backing.flush(last, (since, call), Caller::Client).unwrap();
                })
            })
            .collect();
        while called.load(SeqCst) < CLIENTS as u64 {
            std::thread::yield_now();
        }
        fault.release();
        first.join().unwrap();
        fault.wait_until_hung(1);
        fault.release();
        for other in others {
            other.join().unwrap();
        }
    });
    assert_eq!(fault.injected(), 2);
}

/// Only a flush that fails may have lost writes around the cache: a page that the backing refuses
/// stays in the pool.
#[test]
fn a_refused_page_fails_no_flush() {
    let fault = Arc::new(Fault::new(memory(), 1));
    let device = open(&pool(64), &fault);
    write(&device, 3, 7);
    device.set_mode(Mode::WriteInvalidate).unwrap();
    fault.add(Rule {
        range: 3 * PAGE_BYTES..4 * PAGE_BYTES,
        ..Rule::new(&[Op::Write], When::Always, Effect::Fail(DeviceErrorKind::Io))
    });
    for page in 10..15 {
        write(&device, page, 1);
        device.clean_all().unwrap_err();
        device.flush().expect("all writes were flushed");
    }
    assert_eq!(device.core.pages.usage().dirty, 1);
}

/// Makes the backing refuse writes of `pages`.
fn refuse(fault: &Fault, pages: std::ops::Range<u64>) {
    let range = pages.start * PAGE_BYTES..pages.end * PAGE_BYTES;
    let fail = Effect::Fail(DeviceErrorKind::Io);
    fault.add(Rule { range, ..Rule::new(&[Op::Write], When::Always, fail) });
}

#[test]
fn a_refused_page_holds_up_no_others() {
    let (backing, region) = (memory(), pool(300));
    let fault = Arc::new(Fault::new(backing.clone(), 1));
    let device = open(&region, &fault);
    refuse(&fault, 7..8);
    (0..PAGES).for_each(|page| write(&device, page, 7));
    for _ in 0..2 {
        device.clean_all().unwrap_err();
        assert_eq!(device.core.pages.usage().dirty, 1);
    }
    let is_refused = |page: &u64| *page == 7;
    let others = (0..PAGES).filter(|page| !is_refused(page));
    others.for_each(|page| assert_eq!(read(&*backing, page), 7));
    device.shutdown().unwrap_err();
    fault.heal();
    device.clean_all().unwrap();
    assert_eq!((device.core.pages.usage().dirty, read(&*backing, 7)), (0, 7));
}

/// A failed write of many pages is followed by one of each page, and no more.
#[test]
fn a_backing_that_refuses_all_pages_is_asked_twice_at_most() {
    let fault = Arc::new(Fault::new(memory(), 1));
    let device = open(&pool(300), &fault);
    (0..PAGES).for_each(|page| write(&device, page, 7));
    refuse(&fault, 0..PAGES);
    device.clean_all().unwrap_err();
    assert!(fault.injected() <= 2 * PAGES, "{}", fault.injected());
    assert_eq!(device.core.pages.usage().dirty, PAGES);
}

#[test]
fn writers_of_a_full_cache_do_not_fail_because_of_a_refused_page() {
    for no_thread in [true, false] {
        let fault = Arc::new(Fault::new(memory(), 1));
        let options = CacheDeviceOptions { no_thread, ..Default::default() };
        let device = CacheDevice::open(pool(16), fault.clone(), binding(), options).unwrap();
        refuse(&fault, 3..5);
        for round in 1..4 {
            (0..PAGES).for_each(|page| write(&device, page, round));
            (0..PAGES).for_each(|page| assert_eq!(read(&device, page), round));
        }
        device.clean_all().unwrap_err();
        assert_eq!(device.core.pages.usage().dirty, 2);
    }
}

/// A record of a page that cannot be read stays, and records of other pages are cleaned.
#[test]
fn a_base_that_cannot_be_read_holds_up_no_others() {
    let fault = Arc::new(Fault::new(memory_of(4096), 1));
    let device = open(&pool_of(300, 512), &fault);
    for page in 0..20 {
        device.write(page * PAGE_BYTES + 512, &[1; 512], WriteFlags::default()).unwrap();
    }
    assert_eq!(device.core.pages.usage().dirty, 20);
    let range = 5 * PAGE_BYTES..6 * PAGE_BYTES;
    let fail = Effect::Fail(DeviceErrorKind::Io);
    fault.add(Rule { range, ..Rule::new(&[Op::Read], When::Always, fail) });
    device.clean_all().unwrap_err();
    assert_eq!(device.core.pages.usage().dirty, 1);
    fault.heal();
    device.clean_all().unwrap();
    let mut data = [0; 4096];
    device.read(5 * PAGE_BYTES, &mut data).unwrap();
    assert_eq!((data[0], data[512], data[1024]), (0, 1, 0));
}

#[test]
fn no_version_is_dirty_after_a_shutdown() {
    for granularity in ["page", "record"] {
        let (region, backing) = (pool_of(64, 512), memory_of(512));
        let device = open(&region, &backing);
        device.set("granularity", granularity).unwrap();
        for round in 1..4 {
            for page in 0..8 {
                let data = [round; 512];
                device.write(page * PAGE_BYTES + 512, &data, WriteFlags::default()).unwrap();
            }
        }
        let dirty = || check(&region).unwrap().dirty_slots;
        assert!(dirty() > 8, "{granularity}: older versions are there");
        device.shutdown().unwrap();
        assert_eq!(dirty(), 0, "{granularity}");
    }
}
