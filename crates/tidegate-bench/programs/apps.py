"""Programs that people use, with their own benchmarks where they have one.

apps.py APP DIRECTORY SECONDS [WORD...]: runs APP on files in the empty DIRECTORY. The words start a
program behind them: `tidegate run`, or a library without syncs. What they start is the program, or
its server; what only asks a server is started without them. Prints one JSON object of times.
"""
import bisect, json, os, pathlib, re, subprocess, sys, time


def printed(buckets):
    """Prints `buckets`, pairs of nanoseconds and a number of operations that took about as long."""
    buckets = sorted(buckets)
    ends, ops = [], 0
    for _, number in buckets:
        ops += number
        ends.append(ops)
    total_ns = sum(ns * number for ns, number in buckets)
    share = lambda it: int(buckets[min(bisect.bisect_left(ends, it * ops), len(buckets) - 1)][0])
    print(json.dumps({
        "ops": ops, "ops_per_s": ops * 1e9 / total_ns, "mean_ns": total_ns / ops,
        "p50_ns": share(.5), "p99_ns": share(.99), "p999_ns": share(.999),
        "p9999_ns": share(.9999), "max_ns": share(1)}))


def timed(seconds, operation):
    """Prints the times of calls of `operation` with 0, 1 and so on for so many seconds."""
    end, times = time.monotonic() + seconds, []
    while not times or time.monotonic() < end:
        start = time.perf_counter_ns()
        operation(len(times))
        times.append((time.perf_counter_ns() - start, 1))
    printed(times)


def call(*words, **options):
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    if done.returncode:
        sys.exit(f"{words[0]} failed: {done.stdout.strip()[-1000:]}")
    return done.stdout


class Server:
    """A server, once it has said that it is ready; ended by SIGTERM."""

    def __init__(self, words, ready):
        # What it says later is little, and fits the pipe.
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        said = []
        for line in self.process.stdout:
            said.append(line)
            if ready in line:
                return
        sys.exit(f"the server ended: {''.join(said).strip()[-1000:]}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        # `tidegate run` hands it on.
        self.process.terminate()
        self.process.wait()


def redis(directory, seconds, words):
    """SET by one client, each synced before it is answered, by redis-benchmark."""
    path = directory / "socket"
    server = ["redis-server", "--port", "0", "--unixsocket", str(path), "--dir", str(directory),
              "--appendonly", "yes", "--appendfsync", "always", "--save", ""]
    def run(requests):
        text = call("redis-benchmark", "-s", str(path), "-t", "set", "-c", "1", "-d", "100",
                    "-r", "100000", "-n", str(requests))
        reached = [(float(ms), int(number)) for ms, number in
                   re.findall(r"<= ([\d.]+) milliseconds \(cumulative count (\d+)\)", text)]
        before, buckets = 0, []
        for ms, number in reached:
            if number > before:
                buckets.append((ms * 1e6, number - before))
                before = number
        return buckets
    with Server(words + server, "eady to accept connections"):
        trial = run(500)
        mean_ns = sum(ns * number for ns, number in trial) / sum(number for _, number in trial)
        printed(run(max(500, int(seconds * 1e9 / mean_ns))))


def mariadb(directory, seconds, words, *options):
    """Inserts of one row by one client, each a transaction, by sysbench."""
    data, path = directory / "data", directory / "socket"
    call("mariadb-install-db", "--no-defaults", f"--datadir={data}", "--user=root",
         "--auth-root-authentication-method=normal", "--skip-test-db")
    server = ["mariadbd", "--no-defaults", "--user=root", f"--datadir={data}", f"--socket={path}",
              "--skip-networking", *options]
    bench = ["sysbench", "oltp_insert", "--db-driver=mysql", f"--mysql-socket={path}",
             "--mysql-user=root", "--mysql-db=bench", "--tables=1", "--table-size=10000",
             "--threads=1", "--histogram", f"--time={max(1, round(seconds))}"]
    with Server(words + server, "ready for connections"):
        call("mariadb", "--no-defaults", f"--socket={path}", "-u", "root", "-e", "CREATE DATABASE bench")
        call(*bench, "prepare")
        lines = re.findall(r"^\s*([\d.]+) \|[* ]+(\d+)$", call(*bench, "run"), re.MULTILINE)
        printed([(float(ms) * 1e6, int(number)) for ms, number in lines])


def lmdb(directory, seconds, _words):
    """A transaction that puts 100 bytes under a random key."""
    import lmdb as library
    import random
    environment = library.open(str(directory / "lmdb"), map_size=1 << 30)
    def put(_):
        with environment.begin(write=True) as transaction:
            transaction.put(random.randrange(100000).to_bytes(8, "big"), bytes(100))
    timed(seconds, put)


def dpkg(directory, seconds, _words):
    """Installs a package of 20 files over the other version of it."""
    root, made = directory / "root", []
    for version in "1", "2":
        package = directory / version
        (package / "DEBIAN").mkdir(parents=True)
        (package / "DEBIAN/control").write_text(
            f"Package: sample\nVersion: {version}\nArchitecture: all\n"
            "Maintainer: nobody <nobody@localhost>\nDescription: sample\n")
        (package / "usr/share/sample").mkdir(parents=True)
        for number in range(20):
            (package / f"usr/share/sample/{number}").write_bytes(version.encode() * 5000)
        made.append(str(directory / f"{version}.deb"))
        call("dpkg-deb", "--root-owner-group", "-b", str(package), made[-1])
    for name in "var/lib/dpkg/updates", "var/lib/dpkg/info":
        (root / name).mkdir(parents=True)
    for name in "status", "available":
        (root / "var/lib/dpkg" / name).touch()
    timed(seconds, lambda number: call("dpkg", f"--root={root}", "--force-not-root", "--log=/dev/null",
                                       "--force-bad-path", "--refuse-unsafe-io", "-i", made[number % 2]))


def svn(directory, seconds, _words):
    """Commits a changed line."""
    repository, copy = directory / "repository", directory / "copy"
    call("svnadmin", "create", str(repository))
    call("svn", "checkout", "-q", f"file://{repository}", str(copy))
    (copy / "file").touch()
    call("svn", "add", "-q", str(copy / "file"))
    def commit(number):
        (copy / "file").write_text(f"line {number}\n")
        call("svn", "commit", "-q", "-m", "a line", str(copy))
    timed(seconds, commit)


def duckdb(directory, seconds, _words):
    """Inserts one row, a transaction."""
    import duckdb as library
    database = library.connect(str(directory / "rows.duckdb"))
    database.execute("CREATE TABLE rows (number INTEGER, text VARCHAR)")
    timed(seconds, lambda number: database.execute("INSERT INTO rows VALUES (?, ?)", [number, "x" * 100]))


H2 = """
import java.sql.*;
public class Insert {
    public static void main(String[] args) throws Exception {
        Connection it = DriverManager.getConnection("jdbc:h2:" + args[0]);
        it.createStatement().execute("SET WRITE_DELAY 0");
        it.createStatement().execute("CREATE TABLE rows (number INT PRIMARY KEY, text VARCHAR)");
        PreparedStatement insert = it.prepareStatement("INSERT INTO rows VALUES (?, ?)");
        StringBuilder times = new StringBuilder();
        long end = System.nanoTime() + (long) (Double.parseDouble(args[1]) * 1e9);
        for (int number = 0; System.nanoTime() < end; number++) {
            long start = System.nanoTime();
            insert.setInt(1, number);
            insert.setString(2, "x".repeat(100));
            insert.execute();
            times.append(System.nanoTime() - start).append(' ');
        }
        System.out.println(times);
    }
}
"""


def h2(directory, seconds, words):
    """Inserts one row, a transaction, without the delay that H2 has unless it is told."""
    source = directory / "Insert.java"
    source.write_text(H2)
    call("javac", "-d", str(directory), str(source))
    classes = f"/usr/share/java/h2.jar:{directory}"
    times = call(*words, "java", "-cp", classes, "Insert", str(directory / "rows"), str(seconds))
    # Beside what `tidegate run` says.
    lines = re.findall(r"^[\d ]+$", times, re.MULTILINE)
    printed([(int(ns), 1) for ns in lines[0].split()])


SERVERS = {"redis": redis, "mariadb": mariadb, "h2": h2,
           # As `tidegate run` advises.
           "mariadb-advised": lambda *all: mariadb(
               *all, "--innodb-use-native-aio=0", "--innodb-log-file-buffering=ON")}
LIBRARIES = {"lmdb": lmdb, "dpkg": dpkg, "svn": svn, "duckdb": duckdb}


def main():
    app, directory, seconds, *words = sys.argv[1:]
    if app in LIBRARIES and words:
        # This program is the one that syncs.
        os.execvp(words[0], [*words, sys.executable, __file__, app, directory, seconds])
    (SERVERS | LIBRARIES)[app](pathlib.Path(directory), float(seconds), words)


main()
