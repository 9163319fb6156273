//! Samples of each format, and their events by hand.

use std::fmt::Write as _;
use std::io::{Cursor, Write as _};
use std::path::{Path, PathBuf};

use proptest::prelude::*;

use super::*;

fn traced(text: &[u8], format: Option<Format>) -> Result<Trace, Error> {
    read(Path::new("sample"), Cursor::new(text.to_vec()), format)
}

/// Formats an event as `time stream op file offset+length`.
fn shown(event: Event) -> String {
    let mut text = format!("{} {} ", event.time_us, event.stream);
    let result = match event.op {
        Op::Read { file, offset_bytes, len_bytes } => {
            write!(text, "read {} {offset_bytes}+{len_bytes}", file.0)
        }
        Op::Write { file, offset_bytes, len_bytes } => {
            write!(text, "write {} {offset_bytes}+{len_bytes}", file.0)
        }
        Op::Sync { file } => write!(text, "sync {}", file.0),
        Op::SyncAll => write!(text, "sync-all"),
        Op::Resize { file, len_bytes } => write!(text, "resize {} {len_bytes}", file.0),
        Op::Remove { file } => write!(text, "remove {}", file.0),
    };
    result.unwrap();
    text
}

fn shown_all(events: impl Iterator<Item = Result<Event, Error>>) -> Vec<String> {
    events.map(|event| shown(event.unwrap())).collect()
}

/// Checks that the sample is detected as `format`, and has these events and bad lines.
#[track_caller]
fn check(format: Format, sample: &str, events: &[&str], bad: &[(u64, &str)]) {
    let mut trace = traced(sample.as_bytes(), None).unwrap();
    assert_eq!(trace.format(), format);
    assert_eq!(shown_all(&mut trace), events);
    let expected: Vec<_> = bad.iter().map(|(line, why)| (*line, (*why).to_owned())).collect();
    let found = trace.bad_lines();
    assert_eq!((found.count, &found.first), (bad.len() as u64, &expected));
}

const CSV: &str = "\
ts_us,tid,op,file,offset,len
100,7,read,a,0,4096
250,7,write,a,b.db,10,20
260,8,fdatasync,a,b.db,0,0
270,8,sync_file_range,a,0,8192
280,8,fallocate,a,0,8192
290,8,truncate,a,100,0
300,9,rename,a,0,b
310,9,write,b,100,1
320,9,rename,c,0,b
330,9,write,b,0,1
340,9,rename,b,0,b
350,9,unlink,b,0,0
355,9,unlink,never,0,0
360,9,write,b,0,1
370,9,read,b,1,0
380,9,sync,,0,0
";

#[test]
fn csv() {
    let events = [
        "0 7 read 0 0+4096",
        "150 7 write 1 10+20",
        "160 8 sync 1",
        "190 8 resize 0 100",
        "210 9 write 0 100+1",
        "220 9 remove 0",
        "230 9 write 2 0+1",
        "250 9 remove 2",
        "260 9 write 3 0+1",
        "280 9 sync-all",
    ];
    check(Format::Csv, CSV, &events, &[]);
}

#[test]
fn csv_bad_lines_are_told_and_give_no_events() {
    let sample = "\
5,1,write,a,0,1
6,1,write,a,0,x
7,1,write,a,9223372036854775807,1
8,1,write,a,0,2147483649
9,1,wrote,a,0,1
10,1,write,,0,1
11,1,rename,a,b,0,c
3,1,fsync,a,0,0
99999999999999999999,1,write,a,0,1
12,4294967296,write,a,0,1
13,1,write,a,0,1
14,1,write,a,0,1
15,1,write,a,0,1
16,1,write,a,0,1
17,1,write,a,0,1
18,1,write,a,0,1
19,1,write,a,0,1
";
    let events = [
        "0 1 write 0 0+1",
        "0 1 sync 0",
        "8 1 write 0 0+1",
        "9 1 write 0 0+1",
        "10 1 write 0 0+1",
        "11 1 write 0 0+1",
        "12 1 write 0 0+1",
        "13 1 write 0 0+1",
        "14 1 write 0 0+1",
    ];
    let bad = [
        (2, "the length is not a number that it can be"),
        (3, "the request ends behind the last offset that a file can have"),
        (4, "a request of more than 2 GiB, which is more than one can be"),
        (5, "the operation is not one of this format"),
        (6, "not a line of this format"),
        (7, "not a line of this format"),
        (9, "the time is not a number that it can be"),
        (10, "the thread is not a number that it can be"),
    ];
    check(Format::Csv, sample, &events, &bad);
}

#[test]
fn mobigen() {
    // Thread 2 begins before thread 1 ends; 9 was opened before the trace began.
    let sample = "\
1 0 open /data/data O_WRONLY|O_CREAT|O_TRUNC|O_LARGEFILE 9
1 0 write 9 4
1 500 open \"/data/a.db\" O_RDWR|O_CREAT|O_EXCL|O_LARGEFILE 5
1 600 write 5 100
1 650 open \"/data/missing\" O_RDONLY -1
1 700 access \"/data/a.db-journal\" -1
1 710 fstat64 5 0
1 900 close 5 0
2 610 open /data/data O_WRONLY|O_CREAT|O_TRUNC|O_LARGEFILE 5
2 620 read 5 10
2 630 pwrite 5 4096 4096
2 640 read 5 -1
2 800 fsync 5 0
2 910 write 77 1
2 920 unlink \"/data/a.db\" 0
2 930 open \"/dev/urandom\" O_RDONLY 6
2 940 read 6 16
2 950 open \"/data/log\" O_WRONLY|O_CREAT|O_APPEND 7
2 960 write 7 10
2 970 open \"/data/log\" O_WRONLY|O_TRUNC|O_APPEND|O_SYNC 8
2 980 write 8 10
2 990 write 7 5
";
    let events = [
        "0 1 resize 0 0",
        "0 1 write 0 0+4",
        "600 1 write 1 0+100",
        "620 2 read 1 100+10",
        "630 2 write 1 4096+4096",
        "800 2 sync 1",
        "920 2 remove 1",
        "970 2 resize 2 0",
        "980 2 write 2 0+10",
        "980 2 sync 2",
        "990 2 write 2 10+5",
    ];
    let bad = [
        (14, "descriptor 77: the trace does not show what it is"),
        (19, "descriptor 7: an append to a file whose length the trace does not show"),
    ];
    check(Format::Mobigen, sample, &events, &bad);
}

#[test]
fn dbench() {
    let sample = r#"Deltree "\clients\client1" NT_STATUS_OK
Mkdir "\clients" NT_STATUS_OK
NTCreateX "\clients\d" 0x1 0x2 1 NT_STATUS_OK
NTCreateX "\clients\d\a b" 0x40 0x2 2 NT_STATUS_OK
NTCreateX "\clients\d\no" 0x40 0x1 3 NT_STATUS_OBJECT_NAME_NOT_FOUND
WriteX 2 65534 1 1 NT_STATUS_OK
ReadX 2 0 4096 100 NT_STATUS_OK
Flush 2 NT_STATUS_OK
QUERY_FILE_INFORMATION 2 258 NT_STATUS_OK
WriteX 3 0 1 1 NT_STATUS_OK
NTCreateX "\clients\d\a b" 0x40 0x5 4 NT_STATUS_OK
Unlink "\clients\d\a b" 0x6 NT_STATUS_OK
WriteX 4 0 10 10 NT_STATUS_OK
Close 2 NT_STATUS_OK
Close 4 NT_STATUS_OK
NTCreateX "\clients\d\x" 0x40 0x2 5 NT_STATUS_OK
Rename "\clients\d\x" "\clients\d\y" NT_STATUS_OK
Rename "\clients\d" "\clients\e" NT_STATUS_OK
NTCreateX "\clients\e\y" 0x40 0x1 6 NT_STATUS_OK
WriteX 6 0 5 5 NT_STATUS_OK
Unlink "\clients\*" 0x6 NT_STATUS_OK
Close 5 NT_STATUS_OK
Close 6 NT_STATUS_OK
Close 1 NT_STATUS_OK
Deltree "\clients" NT_STATUS_OK
"#;
    let events = [
        "0 0 write 1 65534+1",
        "0 0 read 1 0+100",
        "0 0 sync 1",
        "0 0 resize 1 0",
        "0 0 write 1 0+10",
        "0 0 remove 1",
        "0 0 write 2 0+5",
        "0 0 remove 0",
        "0 0 remove 2",
    ];
    let bad = [
        (10, "descriptor 3: the trace does not show what it is"),
        (21, "the operation is not one of this format"),
    ];
    check(Format::Dbench, sample, &events, &bad);
    let timed = "0.5 NTCreateX \"\\a\" 0x40 0x2 2 NT_STATUS_OK\n1.5 Flush 2 NT_STATUS_OK\n\
                 1.75 Flush 2 NT_STATUS_OK\n";
    check(Format::Dbench, timed, &["0 0 sync 0", "250000 0 sync 0"], &[]);
}

#[test]
fn mqsim() {
    let sample = "\
938513000 4 264719034 16 0
938828999 3 197570570 16 1
938944000 4 18014398509481984 32 0
938945000 4 8 32 2
939010000 3 230420970 8 0
";
    let events = [
        "0 0 write 0 135536145408+8192",
        "315 1 read 1 101156131840+8192",
        "497 1 write 1 117975536640+4096",
    ];
    let bad = [
        (3, "the request ends behind the last offset that a file can have"),
        (4, "the operation is not one of this format"),
    ];
    check(Format::Mqsim, sample, &events, &bad);
}

#[test]
fn cloudphysics() {
    let sample = "\
version,time,op,size,lbn
1,5633898,2a,512,42932745
1,5633899,28,6656,8
1,5633899,35,0,0
1,5633900,12,512,8
2,5633901,8a,512,8
";
    let events = [
        "0 0 write 0 21981565440+512",
        "1000000 0 read 0 4096+6656",
        "1000000 0 sync 0",
        "3000000 0 write 0 4096+512",
    ];
    let bad = [(5, "the operation is not one of this format")];
    check(Format::Cloudphysics, sample, &events, &bad);
}

#[test]
fn mobileblock() {
    let sample = "\
proces,device,rw_flag,sector,size,timestamp
loop40-2757,8388608,R,8,8,653406.907265
a,b-1,8388608,W,16,16,653406.907266
loop40-2757,259,W,8,8,653406.90726750003
\"preconditioning_ended\"
<...>-1,8388608,D,8,8,653406.907268
loop40-2757,8388608,R,0,8,653407
";
    let events = [
        "0 0 read 0 4096+4096",
        "1 1 write 0 8192+8192",
        "3 0 write 1 4096+4096",
        "92735 0 read 0 0+4096",
    ];
    let bad = [(6, "the operation is not one of this format")];
    check(Format::Mobileblock, sample, &events, &bad);
}

#[test]
fn fiu() {
    let sample = "\
1 1000500 OPEN 77 8192
2 2000500 READ 77 8192 0 4096 MISS
3 2001600 WRITE 77 8192 4096 100 HIT
4 2002600 WRITE 9 0 0 100 APPEND
5 2003600 FSYNC 77 8192
6 2004600 FDATASYNC 9 100
7 2005600 CLOSE 77 8192
8 2005600 WRITE 9 100 100 -1 APPEND
9 2005600 WRITE 9 100
";
    let events = [
        "0 0 read 0 0+4096",
        "1 0 write 0 4096+100",
        "2 0 write 1 0+100",
        "3 0 sync 0",
        "4 0 sync 1",
    ];
    let bad = [
        (8, "the length is not a number that it can be"),
        (9, "the operation is not one of this format"),
    ];
    check(Format::Fiu, sample, &events, &bad);
}

#[test]
fn msr() {
    let sample = "\
128166372003061629,usr,0,Read,7014609920,24576,41286\r
128166372003061649,usr,1,Write,1317441536,8192,1963\r
128166372003061659,usr,0,Trim,0,8192,1963\r
128166372003071629,usr,0,Write,0,4096,1\r
";
    let events =
        ["0 0 read 0 7014609920+24576", "2 1 write 1 1317441536+8192", "1000 0 write 0 0+4096"];
    check(Format::Msr, sample, &events, &[(3, "the operation is not one of this format")]);
}

#[test]
fn alibaba() {
    let sample = "\
419,W,8792731648,16384,1577808144360767
725,R,59110326272,360448,1577808144360813
419,W,8792731648,16384,1577808144360000
";
    let events = [
        "0 0 write 0 8792731648+16384",
        "46 1 read 1 59110326272+360448",
        "46 0 write 0 8792731648+16384",
    ];
    check(Format::Alibaba, sample, &events, &[]);
}

#[test]
fn strace_of_one_process() {
    let sample = r#"1.000000 execve("/bin/x", ["x"], 0x7ffd /* 20 vars */) = 0
1.000001 openat(AT_FDCWD, "dir/a\tb", O_RDWR|O_CREAT|O_TRUNC|O_CLOEXEC, 0644) = 3
1.000002 write(3, "abc\") = 9\n"..., 100) = 60
1.000003 writev(3, [{iov_base="a", iov_len=1}, {iov_base="b", iov_len=1}], 2) = 2
1.000004 lseek(3, 0, SEEK_SET) = 0
1.000005 read(3, ""..., 4096) = 62
1.000006 pwrite64(3, "x", 1, 4096) = 1
1.000007 fcntl(3, F_DUPFD_CLOEXEC, 10) = 10
1.000008 write(10, "y", 1) = 1
1.000009 close(3) = 0
1.000010 fsync(10) = 0
1.000011 openat(AT_FDCWD, "dir/missing", O_RDONLY) = -1 ENOENT (No such file or directory)
1.000012 chdir("/base") = 0
1.000013 openat(AT_FDCWD, "log", O_WRONLY|O_APPEND) = 4
1.000014 write(4, "?", 1) = 1
1.000015 fstat(4, {st_mode=S_IFREG|0644, st_size=1000, ...}) = 0
1.000016 write(4, "?", 1) = 1
1.000017 rename("/base/log", "/base/./old") = 0
1.000018 ftruncate(4, 10) = 0
1.000019 unlinkat(AT_FDCWD, "old", 0) = 0
1.000020 write(4, "?", 1) = 1
1.000021 close(4) = 0
1.000022 socket(AF_UNIX, SOCK_STREAM, 0) = 4
1.000023 write(4, "hello", 5) = 5
1.000024 write(1, "out", 3) = 3
1.000025 openat(AT_FDCWD, "/s", O_WRONLY|O_DSYNC) = 5
1.000026 pwritev2(5, [{iov_base="a", iov_len=1}], 1, -1, 0) = 1
1.000027 sendfile(5, 10, [0] => [4], 4) = 4
1.000028 sync() = 0
1.000029 --- SIGCHLD {si_signo=SIGCHLD} ---
1.000030 copy_file_range(10, [8], 10, [16], 4, 0) = 4
1.000031 exit_group(0) = ?
1.000032 +++ exited with 0 +++
"#;
    let events = [
        "0 0 resize 0 0",
        "1 0 write 0 0+60",
        "2 0 write 0 60+2",
        "4 0 read 0 0+62",
        "5 0 write 0 4096+1",
        "7 0 write 0 62+1",
        "9 0 sync 0",
        "15 0 write 1 1000+1",
        "17 0 resize 1 10",
        "19 0 write 1 10+1",
        "20 0 remove 1",
        "25 0 write 2 0+1",
        "25 0 sync 2",
        "26 0 read 0 0+4",
        "26 0 write 2 1+4",
        "26 0 sync 2",
        "27 0 sync-all",
        "29 0 read 0 8+4",
        "29 0 write 0 16+4",
    ];
    let bad = [
        (15, "descriptor 4: an append to a file whose length the trace does not show"),
        (25, "descriptor 1: the trace does not show what it is"),
    ];
    check(Format::Strace, sample, &events, &bad);
}

#[test]
fn strace_of_processes_that_share_and_inherit() {
    let sample = r#"10 1.000000 openat(AT_FDCWD, "/a", O_RDWR) = 3
10 1.000001 clone(child_stack=NULL, flags=CLONE_CHILD_SETTID|SIGCHLD <unfinished ...>
strace: Process 11 attached
11 1.000002 write(3, "ab", 2 <unfinished ...>
10 1.000003 <... clone resumed>, child_tidptr=0x7f) = 11
10 1.000004 write(3, "c", 1) = 1
11 1.000005 <... write resumed>) = 2
11 1.000006 close(3) = 0
11 1.000007 write(3, "d", 1) = 1
10 1.000008 clone3({flags=CLONE_VM|CLONE_FILES|CLONE_THREAD, stack=0x7f}, 88) = 12
12 1.000009 openat(AT_FDCWD</w>, "t", O_RDWR) = 4</w/t>
10 1.000010 pwrite64(4</w/t>, "e", 1, 7) = 1
11 1.000011 +++ exited with 0 +++
10 1.000012 unlink("/w/t") = 0
13 1.000013 fdatasync(9</b>) = 0
13 1.000014 write(9</b>, "f", 1) = 1
13 1.000015 write(2</dev/pts/0<char 136:0>>, "f", 1) = 1
12 1.000016 +++ exited with 0 +++
10 1.000017 +++ killed by SIGKILL +++
"#;
    let events = [
        "0 10 write 0 0+1",
        "1 11 write 0 1+2",
        "6 10 write 1 7+1",
        "9 13 sync 2",
        "13 10 remove 1",
    ];
    let bad = [
        (9, "descriptor 3: the trace does not show what it is"),
        (16, "descriptor 9: the trace does not show its position"),
    ];
    check(Format::Strace, sample, &events, &bad);
}

#[test]
fn strace_files_of_processes_are_merged() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out");
    let parent = "1.000000 openat(AT_FDCWD, \"/a\", O_RDWR) = 3\n\
                  1.000001 fork() = 70\n1.000005 write(3, \"c\", 1) = 1\n";
    let child = "1.000003 write(3, \"ab\", 2) = 2\n1.000004 +++ exited with 0 +++\n";
    std::fs::write(folder.path().join("out.69"), parent).unwrap();
    std::fs::write(folder.path().join("out.70"), child).unwrap();
    let mut trace = open(&path, None).unwrap();
    assert_eq!(trace.format(), Format::Strace);
    assert_eq!(shown_all(&mut trace), ["0 70 write 0 0+2", "2 69 write 0 2+1"]);
    assert_eq!(trace.bad_lines(), &BadLines { lines: 5, ..BadLines::default() });
    let bytes = (parent.len() + child.len()) as u64;
    assert_eq!(trace.progress(), (bytes, bytes));
}

#[test]
fn compressed_files_are_read_as_plain_ones() {
    let folder = tempfile::tempdir().unwrap();
    let plain = CSV.as_bytes();
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(plain).unwrap();
    let mut xz = liblzma::write::XzEncoder::new(Vec::new(), 1);
    xz.write_all(plain).unwrap();
    let (first, second) = plain.split_at(100);
    let parts = [zstd::encode_all(first, 1).unwrap(), zstd::encode_all(second, 1).unwrap()];
    let expected = shown_all(traced(plain, None).unwrap());
    for (name, bytes) in [
        ("plain", plain.to_vec()),
        ("gz", gzip.finish().unwrap()),
        ("xz", xz.finish().unwrap()),
        ("zst", parts.concat()),
    ] {
        let path = folder.path().join(name);
        std::fs::write(&path, &bytes).unwrap();
        let mut trace = open(&path, None).unwrap();
        assert_eq!(shown_all(&mut trace), expected, "{name}");
        assert_eq!(trace.progress(), (bytes.len() as u64, bytes.len() as u64), "{name}");
        if name != "plain" {
            let cut = traced(&bytes[..bytes.len() - 5], Some(Format::Csv));
            let last = cut.map(Iterator::last);
            let told = matches!(last, Err(Error::Io { .. }) | Ok(Some(Err(Error::Io { .. }))));
            assert!(told, "{name}: a file that ends early is an error");
        }
    }
}

#[test]
fn what_is_no_trace_names_the_formats() {
    for text in ["", "\n\n", "no trace\nat all\n", "1,2,3\n"] {
        let error = traced(text.as_bytes(), None).err().expect("not a trace").to_string();
        assert!(error.contains("--format") && error.contains("mobileblock"), "{error}");
    }
    let gone = open(&PathBuf::from("/nonexistent/trace"), None).err().expect("no file");
    assert!(matches!(gone, Error::Io { .. }), "{gone}");
}

#[test]
fn a_trace_that_is_mostly_bad_is_an_error() {
    let good = "419,W,0,1,1\n";
    let half = format!("{}{}", good.repeat(4), "bad\n".repeat(4));
    let trace = traced(half.as_bytes(), Some(Format::Alibaba)).unwrap();
    assert_eq!(trace.filter_map(Result::ok).count(), 4);
    let more = format!("{half}bad\n");
    let mut trace = traced(more.as_bytes(), Some(Format::Alibaba)).unwrap();
    let error = trace.by_ref().last().unwrap().unwrap_err().to_string();
    assert!(error.contains("5 of 9 lines") && error.contains("--format"), "{error}");
    assert!(trace.next().is_none());
    let many = format!("{}{}", good.repeat(50), "bad\n".repeat(30));
    let mut trace = traced(many.as_bytes(), None).unwrap();
    assert_eq!(trace.by_ref().count(), 50);
    let bad = trace.bad_lines();
    assert_eq!((bad.count, bad.first.len(), bad.lines), (30, 10, 80));
    assert_eq!(bad.pct().to_bits(), 37.5_f64.to_bits());
}

#[test]
fn merged_traces_keep_their_files_and_streams_apart() {
    let one = traced(b"10,1,write,a,0,1\n30,1,write,a,1,1\n", None).unwrap();
    let two = traced(b"500,1,write,a,0,2\n515,2,write,b,0,2\n520,1,fsync,a,0,0\n", None).unwrap();
    let mut merged = merge(vec![one, two]);
    let expected = [
        "0 0 write 0 0+1",
        "0 1 write 1 0+2",
        "15 2 write 2 0+2",
        "20 0 write 0 1+1",
        "20 1 sync 1",
    ];
    assert_eq!(shown_all(&mut merged), expected);
    assert_eq!(merged.traces().count(), 2);
}

#[test]
fn lines_of_any_length_are_counted() {
    let long = format!("5,1,write,{},0,1\n", "n".repeat(1 << 20));
    let text = format!("{}{long}7,1,write,a,0,1\n", "5,1,write,a,0,1\n".repeat(2000));
    let mut trace = traced(text.as_bytes(), None).unwrap();
    assert_eq!(trace.by_ref().count(), 2001);
    assert_eq!(trace.bad_lines().first, [(2001, "more than 65536 bytes long".to_owned())]);
}

/// Returns lines of every format, whose parts are mixed.
fn corpus() -> Vec<&'static str> {
    CSV.lines()
        .chain([
            "1 0 open /data/data O_WRONLY|O_CREAT|O_TRUNC 9",
            "1 5 pwrite 9 4096 4096",
            "NTCreateX \"\\a b\" 0x40 0x2 2 NT_STATUS_OK",
            "WriteX 2 65534 1 1 NT_STATUS_OK",
            "938513000 4 264719034 16 0",
            "1,5633898,2a,512,42932745",
            "loop40-2757,8388608,R,8,8,653406.907265",
            "2 2000500 READ 77 8192 0 4096 MISS",
            "128166372003061629,usr,0,Read,7014609920,24576,41286",
            "419,W,8792731648,16384,1577808144360767",
            "10 1.000000 openat(AT_FDCWD</w>, \"/a\", O_RDWR) = 3</w/a>",
            "[pid 11] 1.000002 pwrite64(3, \"ab\", 2, 8 <unfinished ...>",
            "11 1.000005 <... write resumed>) = 2",
            "10 1.0 clone3({flags=CLONE_FILES}, 88) = 12",
            "10 1.0 pipe2([3, 4], O_CLOEXEC) = 0",
            "12 1.000016 +++ exited with 0 +++",
        ])
        .collect()
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
        fuzzing::any_trace(&bytes);
    }

    #[test]
    fn mixed_lines_never_panic(
        format in 0u8..11,
        lines in prop::collection::vec(prop::sample::select(corpus()), 1..60),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
    ) {
        let mut bytes = vec![format];
        bytes.extend(lines.join("\n").into_bytes());
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        fuzzing::any_trace(&bytes);
    }
}
