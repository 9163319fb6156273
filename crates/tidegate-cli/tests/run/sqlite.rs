//! `SQLite`: its command line in every journal mode, and its own test suite. The suite's
//! `testfixture` is built by scripts/build-testfixture into target/tools/sqlite.

use std::path::{Path, PathBuf};

use crate::bed::{Bed, Runner};
use crate::fsx::built_tool;
use crate::programs::source;

/// Its tables are checked, vacuumed and read by a second process; files that hold random numbers
/// are taken away.
pub(crate) const SESSION: &str = r#"
sqlite3 -batch my.db <<'END'
.bail on
pragma journal_mode=MODE;
pragma synchronous=full;
create table t(n integer primary key, text, data blob);
create index by_text on t(text);
with recursive c(n) as (select 1 union all select n + 1 from c where n < 3000)
  insert into t select n, 'row ' || (n * 7919 % 3001), zeroblob(n % 500) from c;
begin; update t set text = text || '!' where n % 3 = 0; savepoint one; delete from t where n % 2; rollback to one; commit;
begin; delete from t; rollback;
pragma integrity_check;
END
for n in 1 2 3 4 5; do sqlite3 my.db "pragma synchronous=full; insert into t values(10000 + $n, 'later', zeroblob(3))"; done
sqlite3 my.db "select count(*), sum(n), sum(length(data)) from t; vacuum; pragma integrity_check; pragma journal_mode"
sqlite3 my.db .dump | cksum; sqlite3 my.db ".backup copy.db"; sqlite3 copy.db "select count(*) from t"
ls; rm -f my.db-journal my.db-wal my.db-shm
"#;

fn session(mode: &str) {
    let printed = Bed::new().same(|runner, dir| runner.script(&SESSION.replace("MODE", mode), dir));
    assert!(printed.ends_with("exit status: 0\n"), "fails without Tidegate too:\n{printed}");
}

#[test]
fn delete_mode() {
    session("delete");
}

/// `NVCache` lost the last transaction after a clean close.
#[test]
fn truncate_mode() {
    session("truncate");
}

#[test]
fn persist_mode() {
    session("persist");
}

/// `NVCache` ended in SIGBUS.
#[test]
fn wal_mode() {
    session("wal");
}

/// Shells on one database at once, each in a tree of its own.
#[test]
fn shells_in_several_trees_share_a_database() {
    for mode in ["delete", "wal"] {
        let bed = Bed::new();
        let dir = bed.disk();
        let pool = bed.pool();
        let insert = |first: usize| {
            let statements: String = (first..first + 60)
                .map(|n| format!("insert into t values({n});\n"))
                .collect::<Vec<_>>()
                .concat();
            std::fs::write(dir.join(format!("{first}.sql")), statements).unwrap();
            let script = format!("sqlite3 -cmd '.timeout 120000' my.db < {first}.sql");
            move || Runner::Run(&pool.clone()).script(&script, dir)
        };
        let made = Runner::Plain.script(
            &format!(
                "sqlite3 my.db 'pragma journal_mode={mode}; create table t(n integer primary key)'"
            ),
            dir,
        );
        assert!(made.ends_with("exit status: 0\n"), "{made}");
        std::thread::scope(|scope| {
            let trees = [0, 100, 200].map(|first| scope.spawn(insert.clone()(first)));
            for tree in trees {
                assert_eq!(tree.join().unwrap(), "exit status: 0\n");
            }
        });
        let found = Runner::Plain
            .script("sqlite3 my.db 'select count(*), sum(n) from t; pragma integrity_check'", dir);
        let sum: usize = [0, 100, 200].iter().flat_map(|first| *first..first + 60).sum();
        assert_eq!(found, format!("180|{sum}\nok\nexit status: 0\n"));
    }
}

/// Files of the suite's groups that take no more than a second each.
const SHORT: [&str; 14] = [
    "wal",
    "wal2",
    "walbak",
    "crash2",
    "crash8",
    "journal1",
    "journal2",
    "pager2",
    "rollback",
    "rollback2",
    "savepoint",
    "lock",
    "lock2",
    "vacuum",
];
const GROUPS: [&str; 8] =
    ["wal", "crash", "journal", "pager", "rollback", "savepoint", "lock", "vacuum"];

#[test]
fn its_own_tests_have_the_results_they_have_without() {
    let suite = built_tool("testfixture").with_file_name("../sqlite/test");
    let all = std::env::var("TIDEGATE_SQLITE_TESTS").is_ok_and(|value| value == "all");
    let files: Vec<_> = if all {
        whole_groups(&suite)
    } else {
        SHORT.map(|name| suite.join(format!("{name}.test"))).into()
    };
    for file in files {
        println!("{}", file.display());
        let bed = Bed::new();
        let script = format!(
            "mkdir t; cd t; {} {} {}; cd ..; rm -rf t",
            built_tool("testfixture").display(),
            source("suite.tcl").display(),
            file.display()
        );
        let printed = bed.same(|runner, dir| results(&runner.script(&script, dir)));
        assert!(printed.contains("errors out of"), "fails without Tidegate too:\n{printed}");
    }
}

fn whole_groups(suite: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(suite).expect("the suite is there");
    let mut files: Vec<_> = entries.map(|entry| entry.expect("it can be read").path()).collect();
    files.retain(|path| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        path.extension().is_some_and(|kind| kind == "test")
            && GROUPS.iter().any(|group| name.starts_with(group) || name.contains("vacuum"))
    });
    files.sort();
    files
}

/// Each test's name and result, each failure's details, and the counts; no times and no memory.
fn results(printed: &str) -> String {
    let of_interest = |line: &&str| {
        line.ends_with("... Ok")
            || line.starts_with('!')
            || line.contains("errors out of")
            || line.contains("Omitted")
    };
    printed.lines().filter(of_interest).collect::<Vec<_>>().join("\n")
}
