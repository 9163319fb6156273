//! New files and their names: what deliveries of mail, replacements, package managers and `SQLite`
//! do costs no sync that goes to the disk, and is there after a power cut.

use serde_json::Value;

use crate::bed::Bed;
use crate::crash::Workers;
use crate::power::Disk;
use crate::support::{preload_library, succeed, tidegate};

/// The patterns, each a function of a number.
const PATTERNS: &str = "import ctypes, os, sqlite3
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
def made(name, content, prepare=lambda name, file: None):
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    os.write(file, content)
    prepare(name, file)
    os.fsync(file)
    os.close(file)
def sync_directory(name):
    directory = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(directory)
    os.close(directory)
def mail(n):
    made(f'tmp/{n}', b'mail %d' % n * 300)
    os.link(f'tmp/{n}', f'new/{n}')
    os.unlink(f'tmp/{n}')
    sync_directory('new')
def replace(n):
    made('config.new', b'config %d' % n * 100)
    os.rename('config.new', 'config')
    sync_directory('.')
def package(n):
    def prepare(name, file):
        os.fchmod(file, 0o755)
        os.fchown(file, 0, 0)
        os.utime(name, (n, n))
    made('tool.dpkg-new', b'tool %d' % n * 200, prepare)
    os.rename('tool.dpkg-new', 'tool')
    sync_directory('.')
def status(n):
    # As C programs write a file, with lines that are longer than the buffer of the stream.
    text = b'status %d ' % n * 1000
    stream = ctypes.c_void_p(libc.fopen(b'status-new', b'w'))
    libc.fputs(b'#' * 10000, stream)
    libc.rewind(stream)
    libc.fputs(text, stream)
    libc.fflush(stream)
    libc.ftruncate(libc.fileno(stream), len(text))
    libc.fsync(libc.fileno(stream))
    libc.fclose(stream)
    os.rename('status-new', 'status')
    sync_directory('.')
def revision(n):
    made('revision.new', b'revision %d' % n * 50)
    os.chmod('revision.new', 0o444)
    os.utime('revision.new', (n, n))
    os.rename('revision.new', 'revision')
    sync_directory('.')
def database():
    connection = sqlite3.connect('db', isolation_level=None)
    connection.execute('pragma journal_mode=delete')
    connection.execute('pragma synchronous=full')
    connection.execute('create table if not exists t(n integer primary key, v text)')
    connection.execute('insert or ignore into t values(1, ?)', ('x' * 9000,))
    return connection
def transaction(connection, n):
    connection.execute('update t set v = ? where n = 1', (str(n) * 9000,))
    connection.execute('update t set n = n where n = 1')
for name in 'tmp', 'new':
    os.makedirs(name, exist_ok=True)
";

/// What counts the syncs that go to the disk.
const COUNTS: &str = concat!(
    include_str!("programs/supervisor.py"),
    "import time
def steady(act):
    # The first ones make what was pending before durable, and wait for the supervisor, which may be
    # late on a busy machine; a database is covered once it is a second old.
    n, deadline = 0, time.monotonic() + 60
    while True:
        before = ask()
        for n in range(n, n + 40): act(n)
        n += 1
        after = ask()
        if after['fsyncs_done'] == before['fsyncs_done'] or time.monotonic() > deadline: break
    numbers = {name: after[name] - before[name] for name in ('fsyncs_done', 'made', 'fsyncs_skipped')}
    numbers['real'] = {name: number - before['real_syncs'][name]
                       for name, number in after['real_syncs'].items()
                       if number > before['real_syncs'][name]}
    print(json.dumps(numbers))
"
);

/// Some 40 times of `act`, one behind the other, sync nothing for real.
#[track_caller]
fn assert_steady(act: &str) {
    preload_library();
    let bed = Bed::new();
    let mut command = tidegate();
    command.args(["run", "--size=64M", "--pool"]).arg(bed.pool()).current_dir(bed.disk());
    let program = format!("{PATTERNS}{COUNTS}{act}");
    command.args(["--", "/usr/bin/python3", "-c", &program]);
    let printed = succeed(&mut command);
    let numbers: Value = serde_json::from_str(&printed).expect("one JSON object");
    assert_eq!(numbers["fsyncs_done"], 0, "{numbers}");
    assert!(numbers["made"].as_u64().is_some_and(|made| made >= 40), "{numbers}");
}

#[test]
fn deliveries_of_mail_wait_for_no_disk() {
    assert_steady("steady(mail)");
}

#[test]
fn replacements_wait_for_no_disk() {
    assert_steady("steady(replace)");
}

#[test]
fn files_with_attributes_of_their_own_wait_for_no_disk() {
    assert_steady("steady(package)");
}

#[test]
fn files_that_streams_write_wait_for_no_disk() {
    assert_steady("steady(status)");
}

#[test]
fn files_whose_attributes_change_behind_their_sync_wait_for_no_disk() {
    assert_steady("steady(revision)");
}

/// What a stream writes behind a sync is in no record: the next sync of the file is real, and so is
/// that of another process.
#[test]
fn what_a_stream_writes_behind_a_sync_is_synced_for_real() {
    let bed = Bed::new();
    preload_library();
    let program = format!(
        "{PATTERNS}{}for other in False, True:
    for name in 'one', 'two':
        stream = ctypes.c_void_p(libc.fopen(name.encode(), b'w'))
        libc.fputs(b'a' * 9000, stream)
        libc.fflush(stream)
        libc.fsync(libc.fileno(stream))
        before = ask()['fsyncs_done']
        libc.fputs(b'b' * 9000, stream)
        libc.fflush(stream)
        if other:
            file = os.open(name, os.O_RDONLY)
            os.fsync(file)
            os.close(file)
        else:
            libc.fsync(libc.fileno(stream))
        assert ask()['fsyncs_done'] > before, (other, name)
        libc.fclose(stream)
        os.unlink(name)
",
        include_str!("programs/supervisor.py")
    );
    let mut command = tidegate();
    command.args(["run", "--size=64M", "--pool"]).arg(bed.pool()).current_dir(bed.disk());
    succeed(command.args(["--", "/usr/bin/python3", "-c", &program]));
}

#[test]
fn a_database_with_a_rollback_journal_waits_for_no_disk() {
    assert_steady(
        "connection = database()
steady(lambda n: transaction(connection, n))",
    );
}

/// What is left of a pattern when the power fails behind its `count`-th time.
fn cut(act: &str, count: u32, check: &str) {
    let mut disk = Disk::new();
    let program = format!("{PATTERNS}{act}");
    let file = disk.dir.path().join("program.py");
    std::fs::write(&file, program).expect("the directory is there");
    let script =
        format!("/usr/bin/python3 {} && echo records.0 1; exec sleep 1000", file.display());
    let mut workers = Workers::start_script(&disk.pool(), &disk.mount_point(), &script);
    workers.wait_for("records.0", 1);
    disk.cut(workers, "none");
    let check = format!("import os, sqlite3\ncount = {count}\n{check}");
    let mut checked = crate::support::tool("python3", "python3");
    succeed(checked.args(["-c", &check]).current_dir(disk.mount_point()));
}

#[test]
fn mail_that_was_delivered_survives_a_power_cut() {
    cut(
        "for n in range(30): mail(n)",
        30,
        "assert sorted(os.listdir('new'), key=int) == [str(n) for n in range(count)], os.listdir('new')
assert os.listdir('tmp') == [], os.listdir('tmp')
for n in range(count): assert open(f'new/{n}', 'rb').read() == b'mail %d' % n * 300, n",
    );
}

#[test]
fn what_was_replaced_survives_a_power_cut() {
    cut(
        "for n in range(30): replace(n); package(n); status(n); revision(n)",
        30,
        "last = count - 1
assert open('status', 'rb').read() == b'status %d ' % last * 1000
assert open('revision', 'rb').read() == b'revision %d' % last * 50
found = os.stat('revision')
assert (found.st_mode & 0o7777, found.st_mtime) == (0o444, last), found
assert open('config', 'rb').read() == b'config %d' % last * 100
assert open('tool', 'rb').read() == b'tool %d' % last * 200
found = os.stat('tool')
assert (found.st_mode & 0o7777, found.st_mtime) == (0o755, last), found
assert not os.path.exists('config.new') and not os.path.exists('tool.dpkg-new')",
    );
}

#[test]
fn transactions_with_a_rollback_journal_survive_a_power_cut() {
    cut(
        "connection = database()
for n in range(30): transaction(connection, n)",
        30,
        "row = sqlite3.connect('db').execute('select v from t').fetchall()
assert row == [(str(count - 1) * 9000,)], row",
    );
}
