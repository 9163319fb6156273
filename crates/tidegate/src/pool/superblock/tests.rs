//! Tests of the superblock with arbitrary bytes and with crashes.

use super::*;

const POOL_BYTES: u64 = 64 << 10;
const SECOND: u64 = POOL_BYTES - PAGE_BYTES;

fn made() -> (Region, Superblock) {
    let region = Region::anonymous(POOL_BYTES).unwrap();
    erase(&region).unwrap();
    let uuid = Uuid::from_u128(0x1234);
    let mut superblock = Superblock::plan(&region, EngineCode(1), uuid, 512).unwrap();
    superblock.write(&region).unwrap();
    (region, superblock)
}

fn page(region: &Region, offset: u64) -> [u8; 4096] {
    let mut page = [0; 4096];
    region.read(offset, &mut page).unwrap();
    page
}

/// Writes a copy with one changed field and a correct checksum.
fn forge(region: &Region, change: impl Fn(&mut SuperblockBytes)) {
    let (_, superblock) = made();
    let mut bytes = superblock.encode();
    change(&mut bytes);
    bytes.checksum = U64::new(bytes.expected_checksum());
    for offset in [0, SECOND] {
        region.write(offset, bytes.as_bytes()).unwrap();
    }
}

#[test]
fn what_was_written_is_read() {
    let (region, superblock) = made();
    let found = Superblock::read(&region).unwrap();
    assert_eq!(found.superblock, superblock);
    assert!(found.is_whole());
    assert_eq!(superblock.data_offset, 8192);
    assert_eq!(superblock.data_bytes, POOL_BYTES - 8192 - 4096);
}

#[test]
fn each_flipped_byte_of_either_copy_is_seen_and_survived() {
    let (region, superblock) = made();
    for start in [0, SECOND] {
        let whole = page(&region, start);
        for at in 0..4096 {
            let mut broken = whole;
            broken[at] ^= 0xFF;
            region.write(start, &broken).unwrap();
            let found = Superblock::read(&region).unwrap();
            assert_eq!(found.superblock, superblock, "byte {at} of the copy at {start}");
            assert!(!found.is_whole(), "byte {at} of the copy at {start} was not seen");
            assert_eq!(found.first.is_some(), start == 0);
        }
        region.write(start, &whole).unwrap();
    }
}

#[test]
fn two_damaged_copies_are_reported_one_by_one() {
    let (region, _) = made();
    region.write(100, &[1]).unwrap();
    region.write(SECOND + 3, &[1]).unwrap();
    let error = Superblock::read(&region).unwrap_err();
    assert!(
        matches!(
            error,
            PoolError::Damaged { first: CopyFault::Checksum { .. }, second: CopyFault::NoMagic }
        ),
        "{error:?}"
    );
}

/// Tries every prefix of an update's stores, a page at a time, also torn within a page.
#[test]
fn a_crash_in_an_update_leaves_the_old_or_the_new() {
    let (region, old) = made();
    let mut new = old;
    new.compatible = 6;
    let after = {
        let (scratch, _) = made();
        new.write(&scratch).unwrap();
        page(&scratch, 0)
    };
    let steps: [&[(u64, usize)]; 5] = [
        &[],
        &[(SECOND, 60)],
        &[(SECOND, 4096)],
        &[(SECOND, 4096), (0, 60)],
        &[(SECOND, 4096), (0, 4096)],
    ];
    for (index, stores) in steps.into_iter().enumerate() {
        let (region, _) = made();
        for (offset, len) in stores {
            region.write(*offset, &after[..*len]).unwrap();
        }
        let found = Superblock::read(&region).unwrap();
        assert_eq!(found.superblock, if index < 2 { old } else { new }, "after {stores:?}");
        assert_eq!(found.is_whole(), [0, 4].contains(&index), "after {stores:?}");
    }
    assert_eq!(Superblock::read(&region).unwrap().superblock, old);
}

/// Returns `old` with each word of `new` that `is_new` takes.
fn torn(old: &[u8], new: &[u8], is_new: impl Fn(usize) -> bool) -> Vec<u8> {
    let words = old.chunks(8).zip(new.chunks(8)).enumerate();
    words.flat_map(|(at, (old, new))| if is_new(at) { new } else { old }.to_vec()).collect()
}

#[test]
fn what_an_update_leaves_when_it_is_cut_off_is_no_damage() {
    let (region, mut superblock) = made();
    let old = page(&region, 0);
    superblock.compatible = 6;
    // No word changes by one bit alone, as a flip does.
    superblock.backing = Some(BackingIdentity::new(7, "null:7"));
    superblock.write(&region).unwrap();
    let new = page(&region, 0);
    for at in 0..=512 {
        for is_new in [&(|it| it < at) as &dyn Fn(usize) -> bool, &|it| it >= at, &|it| it == at] {
            let torn = torn(&old, &new, is_new);
            for (first, second) in [(&old[..], &torn[..]), (&torn[..], &new[..])] {
                region.write(0, first).unwrap();
                region.write(SECOND, second).unwrap();
                let found = Superblock::read(&region).unwrap();
                assert_eq!(found.findings(), Vec::<String>::new(), "word {at}");
            }
        }
    }
}

#[test]
fn a_flipped_bit_of_a_copy_is_damage() {
    let (region, superblock) = made();
    // The last bit of the number makes it that of an update before, which ends as this one does.
    let sequence_bit = 56 * 8;
    for start in [0, SECOND] {
        let whole = page(&region, start);
        for bit in (0..4096 * 8).filter(|bit| *bit != sequence_bit) {
            let mut flipped = whole;
            flipped[bit / 8] ^= 1 << (bit % 8);
            region.write(start, &flipped).unwrap();
            let found = Superblock::read(&region).unwrap();
            assert_eq!((found.superblock, found.findings().len()), (superblock, 1), "bit {bit}");
        }
        region.write(start, &whole).unwrap();
    }
}

/// Tries every prefix of the stores of a resize, a page at a time, also torn within a page, in a
/// region as long as the larger pool or longer than both.
#[test]
fn a_crash_in_a_change_of_the_size_leaves_the_old_or_the_new() {
    for region_bytes in [2 * POOL_BYTES, 3 * POOL_BYTES] {
        for (from_bytes, to_bytes) in [(POOL_BYTES, 2 * POOL_BYTES), (2 * POOL_BYTES, POOL_BYTES)] {
            for torn in [0, 16, 60, 72, 4088, 4096] {
                let region = Region::anonymous(region_bytes).unwrap();
                let plan = Superblock::plan(&region, EngineCode(1), Uuid::nil(), 512).unwrap();
                let mut old = plan.resized(from_bytes).unwrap();
                old.write(&region).unwrap();
                let old_first = page(&region, 0);
                let mut new = old.resized(to_bytes).unwrap();
                new.write(&region).unwrap();
                assert_eq!(Superblock::read(&region).unwrap().superblock, new);
                let mut first = page(&region, 0);
                first[torn..].copy_from_slice(&old_first[torn..]);
                region.write(0, &first).unwrap();
                let found = Superblock::read(&region).unwrap().superblock;
                let sizes = [old.pool_bytes, new.pool_bytes];
                assert!(sizes.contains(&found.pool_bytes), "{found:?} at {torn}");
                assert!([old, new].contains(&found), "{found:?} at {torn}");
            }
        }
    }
}

/// Checks the order: the other copy is durable before the copy that counts is overwritten.
#[test]
fn the_copy_that_counts_is_touched_last() {
    use std::sync::{Arc, Mutex};

    #[derive(Default)]
    struct Order(Mutex<Vec<String>>);
    impl crate::pmem::Observer for Order {
        fn store(&self, offset: u64, data: &[u8], _non_temporal: bool) {
            self.0.lock().unwrap().push(format!("{} at {offset}", data.len()));
        }
        fn write_back(&self, _offset: u64, _len: u64) {}
        fn fence(&self) {
            self.0.lock().unwrap().push("fence".into());
        }
        fn load(&self, _offset: u64, _len: u64) {}
        fn relax(&self) {}
    }
    let order = Arc::new(Order::default());
    let region = Region::anonymous(POOL_BYTES).unwrap().observed(Arc::clone(&order) as _);
    let mut superblock = Superblock::plan(&region, EngineCode(1), Uuid::nil(), 512).unwrap();
    let second = format!("4096 at {SECOND}");
    superblock.write(&region).unwrap();
    let stores = || std::mem::take(&mut *order.0.lock().unwrap());
    assert_eq!(stores(), [&second, "fence", "4096 at 0", "fence"]);
    region.write(0, &[7; 4096]).unwrap();
    stores();
    superblock.write(&region).unwrap();
    assert_eq!(stores(), ["4096 at 0", "fence", &second, "fence"], "the first is damaged");
}

#[test]
fn a_pool_that_grew_keeps_its_second_copy() {
    let (small, superblock) = made();
    let region = Region::anonymous(2 * POOL_BYTES).unwrap();
    for offset in [0, SECOND] {
        region.write(offset, &page(&small, offset)).unwrap();
    }
    let found = Superblock::read(&region).unwrap();
    assert_eq!((found.superblock, found.is_whole()), (superblock, true));
    erase(&region).unwrap();
    assert_eq!(page(&region, SECOND), [0; 4096], "the old second copy is still there");
}

#[test]
fn a_truncated_pool_is_reported() {
    let (large, _) = made();
    let region = Region::anonymous(POOL_BYTES / 2).unwrap();
    region.write(0, &page(&large, 0)).unwrap();
    let error = Superblock::read(&region).unwrap_err();
    assert!(matches!(
        error,
        PoolError::Truncated { expected_bytes: POOL_BYTES, found_bytes } if found_bytes == POOL_BYTES / 2
    ));
}

#[test]
fn the_backing_is_kept_with_as_much_of_its_name_as_fits() {
    let (region, mut superblock) = made();
    for (name, kept_bytes) in [("null:16M", 8), (&*"ü".repeat(300), 512), (&*"x€".repeat(200), 512)]
    {
        superblock.backing = Some(BackingIdentity::new(7, name));
        superblock.write(&region).unwrap();
        let found = Superblock::read(&region).unwrap().superblock.backing.unwrap();
        assert_eq!((found.identity, found.name.len()), (7, kept_bytes));
        assert!(name.starts_with(found.name.as_str()));
    }
}

/// With a correct checksum and fields that make no sense, the sensible fields are kept.
#[test]
fn a_forged_backing_is_read_without_harm() {
    let region = Region::anonymous(POOL_BYTES).unwrap();
    forge(&region, |bytes| {
        bytes.backing_identity = U64::new(5);
        bytes.backing_name_bytes = U32::new(u32::MAX);
        bytes.backing_name.fill(0xFF);
    });
    let mut superblock = Superblock::read(&region).unwrap().superblock;
    assert!(superblock.backing.is_some_and(|it| it.identity == 5 && it.name.len() <= 512));
    superblock.write(&region).unwrap();
    assert!(Superblock::read(&region).unwrap().is_whole());
}

#[test]
fn forged_fields_are_refused_by_name() {
    type Change = fn(&mut SuperblockBytes);
    let cases: [(&str, Change); 13] = [
        ("version 2", |it| it.version = U32::new(2)),
        ("incompatible features 0x10", |it| it.incompatible = U64::new(16)),
        ("incompatible features 0x4", |it| it.incompatible = U64::new(4 | CLUSTERS)),
        ("read-only-compatible features 0x1", |it| it.read_only_compatible = U64::new(1)),
        ("block_bytes is 0", |it| it.block_bytes = U32::ZERO),
        ("block_bytes is 513", |it| it.block_bytes = U32::new(513)),
        ("pool_bytes is 65535", |it| it.pool_bytes = U64::new(POOL_BYTES - 1)),
        ("only 65536 are there", |it| it.pool_bytes = U64::new(u64::MAX - 4095)),
        ("data_offset is 4096", |it| it.data_offset = U64::new(4096)),
        ("data_bytes is 511", |it| it.data_bytes = U64::new(511)),
        ("data_bytes is 65536", |it| it.data_bytes = U64::new(POOL_BYTES)),
        ("data_bytes is 18446744073709551104", |it| it.data_bytes = U64::new(u64::MAX - 511)),
        ("sequence", |it| it.sequence = U64::new(u64::MAX)),
    ];
    for (told, change) in cases {
        let region = Region::anonymous(POOL_BYTES).unwrap();
        forge(&region, change);
        let text = Superblock::read(&region).unwrap_err().to_string();
        assert!(text.contains(told), "{told}: {text}");
    }
}

#[test]
fn features_that_any_program_may_ignore_are_ignored() {
    let region = Region::anonymous(POOL_BYTES).unwrap();
    forge(&region, |it| it.compatible = U64::new(u64::MAX));
    let found = Superblock::read(&region).unwrap();
    assert_eq!(found.superblock.compatible, u64::MAX);
}

#[test]
fn what_is_no_pool_says_what_it_is() {
    for (offset, bytes, told) in
        [(0, &b""[..], "zeroes"), (0, b"XFSB", "XFS"), (1080, b"\x53\xef", "ext4")]
    {
        let region = Region::anonymous(POOL_BYTES).unwrap();
        region.write(offset, bytes).unwrap();
        let text = Superblock::read(&region).unwrap_err().to_string();
        assert!(text.contains(told), "{text}");
    }
}

#[test]
fn a_file_system_made_over_a_pool_is_not_that_pool() {
    let (region, _) = made();
    region.zero_streaming(0, 4096).unwrap();
    region.write(0, b"XFSB").unwrap();
    let error = Superblock::read(&region).unwrap_err();
    assert!(matches!(error, PoolError::NotAPool { found } if found.is_foreign()), "{error:?}");
}

#[test]
fn regions_without_space_are_refused() {
    for bytes in [4096, 8192, 12288] {
        let region = Region::anonymous(bytes).unwrap();
        assert!(matches!(Superblock::read(&region), Err(PoolError::NotAPool { .. })));
        assert!(matches!(erase(&region), Err(PoolError::TooSmall { .. })));
        let plan = Superblock::plan(&region, EngineCode(1), Uuid::nil(), 512);
        assert!(matches!(plan, Err(PoolError::TooSmall { .. })));
    }
}

proptest::proptest! {
    #[test]
    fn random_pages_never_panic(
        first in proptest::collection::vec(proptest::num::u8::ANY, 4096),
        valid in proptest::bool::ANY,
    ) {
        let region = Region::anonymous(POOL_BYTES).unwrap();
        let mut bytes = SuperblockBytes::new_zeroed();
        bytes.as_mut_bytes().copy_from_slice(&first);
        if valid {
            // Corrects the checksum, so that the fields are the fuzzer's.
            bytes.magic = MAGIC;
            bytes.version = U32::new(VERSION);
            bytes.engine = U32::new(1);
            bytes.incompatible = U64::ZERO;
            bytes.read_only_compatible = U64::ZERO;
            bytes.checksum = U64::new(bytes.expected_checksum());
        }
        region.write(0, bytes.as_bytes()).unwrap();
        proptest::prop_assert!(Superblock::read(&region).is_err());
    }
}
