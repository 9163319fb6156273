//! Each implementation that this CPU has, compared with a model, at all short lengths and
//! alignments.

use super::*;

/// Space for an unaligned start, the longest copy and guard bytes behind it.
const BYTES: usize = 1024;
const LONGEST: usize = 300;

/// Memory that starts at a cache line.
#[repr(align(64))]
struct Aligned([u8; BYTES]);

fn pattern(seed: usize) -> Aligned {
    let mut state = seed as u64 | 1;
    Aligned(std::array::from_fn(|_| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    }))
}

fn all_copies() -> Vec<Copies> {
    let mut all = Vec::new();
    all.extend(arch::available_copies());
    all.extend(portable::available_copies());
    all
}

/// Runs `op(to, from, bytes)` at all lengths and alignments. Compares all of the destination's
/// memory with the model.
fn check_everywhere(what: &str, op: impl Fn(*mut u8, *const u8, usize)) {
    let source = pattern(1);
    let background = pattern(2);
    let mut memory = pattern(2);
    for bytes in 0..=LONGEST {
        for to in 0..LINE {
            let from = (to * 7 + bytes * 13) % LINE;
            check_one(what, &op, &source, &background, &mut memory, (to, from, bytes));
        }
        for from in 0..LINE {
            let to = (from * 5 + bytes * 3) % LINE;
            check_one(what, &op, &source, &background, &mut memory, (to, from, bytes));
        }
    }
}

fn check_one(
    what: &str,
    op: &impl Fn(*mut u8, *const u8, usize),
    source: &Aligned,
    background: &Aligned,
    memory: &mut Aligned,
    (to, from, bytes): (usize, usize, usize),
) {
    op(memory.0[to..].as_mut_ptr(), source.0[from..].as_ptr(), bytes);
    fence();
    let (before, rest) = memory.0.split_at(to);
    let (copied, behind) = rest.split_at(bytes);
    assert_eq!(copied, &source.0[from..from + bytes], "{what}: {bytes} bytes {from} -> {to}");
    assert_eq!(before, &background.0[..to], "{what}: {bytes} bytes {from} -> {to}: before");
    assert_eq!(behind, &background.0[to + bytes..], "{what}: {bytes} bytes {from} -> {to}: behind");
    memory.0 = background.0;
}

#[test]
fn known_cpus_can_write_back() {
    let known = cfg!(any(target_arch = "x86_64", target_arch = "aarch64"));
    assert_eq!(Cpu::can_write_back(), known);
    let fastest = arch::WriteBack::available().next();
    assert_eq!(fastest, Some(Cpu::detect().write_back));
}

#[test]
fn every_copy_copies_exactly() {
    for copies in all_copies() {
        check_everywhere(copies.name, |to, from, bytes| {
            // SAFETY: both ranges are inside the test's buffers.
            unsafe { (copies.copy)(to, from, bytes) };
        });
    }
}

#[test]
fn every_streaming_copy_with_every_write_back_copies_exactly() {
    for copies in all_copies() {
        for write_back in arch::WriteBack::available() {
            let cpu = Cpu { write_back, copies, ..Cpu::detect() };
            let what = format!("{} with {}", copies.name, write_back.name());
            check_everywhere(&what, |to, from, bytes| {
                // SAFETY: both ranges are inside the test's buffers.
                unsafe { cpu.stream(to, from, bytes, true) };
            });
        }
    }
}

/// Tries all numbers of lines that take different branches, at all alignments of the source.
#[test]
fn streaming_with_a_checksum_copies_exactly_and_sums_what_it_copies() {
    let source = pattern(5);
    let mut memory = pattern(6);
    // A CPU without the instructions never uses them.
    if let Some(stream) = Cpu::detect().stream_with_crc {
        for (from, lines) in (0..LINE).flat_map(|from| (1..=12).map(move |lines| (from, lines))) {
            let bytes = lines * LINE;
            let data = &source.0[from..from + bytes];
            // SAFETY: both ranges are inside the test's buffers, and the second begins at a line.
            let crc = unsafe { (stream.lines)(memory.0.as_mut_ptr(), data.as_ptr(), bytes) };
            fence();
            assert_eq!(&memory.0[..bytes], data);
            assert_eq!(&memory.0[bytes..], &pattern(6).0[bytes..]);
            assert_eq!(u64::from(!crc), crc_of(data), "{lines} lines at {from}");
            let rest = &source.0[from + bytes..][..from % 24];
            // SAFETY: this CPU has the instructions, since `detect` found them.
            let crc = unsafe { (stream.rest)(crc, rest) };
            assert_eq!(u64::from(!crc), crc_of(&source.0[from..][..bytes + rest.len()]));
            memory = pattern(6);
        }
    }
}

fn crc_of(data: &[u8]) -> u64 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, data)
}

#[test]
fn long_copies_take_every_branch_of_the_walk() {
    for copies in all_copies() {
        for start in [0, 1, 15, 32, 63] {
            for bytes in [511, 512, 575, 1023, 1024, 4095, 4096, 4097, 4160, 8191, 9000] {
                check_long(copies, start, bytes);
            }
        }
    }
}

fn check_long(copies: Copies, start: usize, bytes: usize) {
    let cpu = Cpu { copies, ..Cpu::detect() };
    let source = pattern(3).0.repeat(9);
    let mut streamed = vec![0; LINE + source.len()];
    let mut copied = streamed.clone();
    let at = streamed.as_ptr().align_offset(LINE) + start;
    // SAFETY: both ranges are inside the vectors.
    unsafe { cpu.stream(streamed[at..].as_mut_ptr(), source.as_ptr(), bytes, true) };
    let copied_at = copied.as_ptr().align_offset(LINE) + start;
    // SAFETY: both ranges are inside the vectors.
    unsafe { cpu.copy(copied[copied_at..].as_mut_ptr(), source.as_ptr(), bytes) };
    fence();
    for (result, at) in [(streamed, at), (copied, copied_at)] {
        let what = format!("{} {bytes} bytes at {start}", copies.name);
        assert!(result[at..at + bytes] == source[..bytes], "{what}");
        let around = result[..at].iter().chain(&result[at + bytes..]);
        assert!(around.copied().all(|byte| byte == 0), "{what}: around");
    }
}

#[test]
fn write_back_changes_nothing() {
    for write_back in arch::WriteBack::available() {
        let memory = pattern(4);
        let cpu = Cpu { write_back, ..Cpu::detect() };
        // SAFETY: the lines are inside the buffer.
        unsafe { cpu.write_back_lines(memory.0[5..].as_ptr(), (BYTES / LINE) as u64) };
        fence();
        assert_eq!(memory.0, pattern(4).0);
    }
}
