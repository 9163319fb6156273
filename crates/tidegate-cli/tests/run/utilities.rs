//! Programs of every day: git, tar, cp, rsync, gcc, Python with `SQLite`.

use crate::bed::Bed;
use crate::programs::source;
use crate::support::tool;

/// A script that makes files of many kinds and sizes, the same each time.
const MAKE_FILES: &str = r#"
mkdir -p files/deep/er && cd files
for n in $(seq 60); do seq $((n * n)) > "number $n"; done
seq 300000 > large; head -c 1000000 /dev/zero > zeroes; truncate -s 10M holes; printf end >> holes
ln large deep/hard; ln -s ../large deep/soft; : > empty; mkfifo deep/fifo
chmod 600 empty; chmod 751 deep/er; cp large deep/er/copy; touch -d 2001-02-03 "number 1"
cd ..
"#;

/// Does `script` plain and under `run`: transcript and files are equal. Fails where one of `needs`
/// is not installed.
fn same(needs: &[(&str, &str)], script: &str) {
    for (name, package) in needs {
        drop(tool(name, package));
    }
    let printed =
        Bed::new().same(|runner, dir| runner.script(&format!("set -e\numask 022\n{script}"), dir));
    assert!(printed.ends_with("exit status: 0\n"), "fails without Tidegate too:\n{printed}");
}

#[test]
fn git_clones_packs_and_checks() {
    same(
        &[("git", "git")],
        r#"
export HOME="$PWD" GIT_CONFIG_NOSYSTEM=1 GIT_AUTHOR_DATE='2020-01-01 00:00 +0000' GIT_COMMITTER_DATE='2020-01-01 00:00 +0000'
git config --global user.name tester; git config --global user.email tester@example.org
git config --global core.fsync all; git config --global core.fsyncMethod fsync; git config --global gc.auto 0
git config --global pack.threads 1; git config --global init.defaultBranch main
git init -q origin; cd origin
for commit in $(seq 12); do
    seq $((commit * 500)) > "file $((commit % 4))"; echo "$commit" >> log; git add .; git commit -q -m "commit $commit"
done
git branch side HEAD~5; cd ..
git clone -q --no-local origin clone; cd clone
git checkout -q -b work origin/side; echo more >> log; git commit -q -am more; git merge -q -s ours -m merge origin/main
git gc -q --prune=now; git fsck --strict --no-progress; git log --format=%H%s; git status --short; git stash list
git push -q origin work; cd ../origin; git fsck --strict --no-progress; git log --format=%H work | head -n1
rm -f .git/index ../clone/.git/index # they hold times
"#,
    );
}

#[test]
fn tar_and_cp_copy_trees() {
    same(
        &[("tar", "tar"), ("cp", "coreutils")],
        &format!(
            r#"{MAKE_FILES}
cp -a files copied; diff -r --no-dereference files copied -x fifo
tar -cf all.tar --sort=name --sparse --mtime=@0 --format=gnu files; cksum all.tar
mkdir out; tar -xpf all.tar -C out; diff -r --no-dereference files out/files -x fifo
tar -czf - files | tar -tzf - | sort | cksum
stat -c '%Y %n' "copied/number 1"; stat -c '%n %s %h' out/files/* | sort
cp --sparse=always files/zeroes sparse; cp --reflink=auto files/large reflinked; mv copied moved; sync moved/large
dd if=files/large of=dd.out bs=4000 conv=fsync status=none; dd if=files/large of=dd.out bs=512 seek=10 count=9 conv=notrunc oflag=sync status=none
cat files/large >> dd.out; tee -a dd.out < files/empty; sort -rn files/large -o sorted; install -m 640 sorted installed; shred -n1 -u sorted
split -b 300000 files/large part.; cat part.* | cmp - files/large; truncate -s 1000 part.aa; sed -i s/1/one/ part.ab
"#
        ),
    );
}

#[test]
fn rsync_copies_updates_and_deletes() {
    same(
        &[("rsync", "rsync")],
        &format!(
            r#"{MAKE_FILES}
rsync -aH --fsync files/ mirror/; diff -r --no-dereference files mirror -x fifo
echo more >> files/large; rm "files/number 5"; mv "files/number 6" files/renamed
rsync -aH --delete --checksum files/ mirror/; diff -r --no-dereference files mirror -x fifo
rsync -aH --inplace --no-whole-file --append-verify files/large mirror/large; cmp files/large mirror/large
"#
        ),
    );
}

#[test]
fn gcc_and_make_build_a_program() {
    same(
        &[("gcc", "gcc"), ("make", "make"), ("ar", "binutils")],
        &format!(
            r"
cp {}/*.[ch] .
cat > Makefile <<'END'
posix: libposix.a posix.o ; $(CC) -pthread -o $@ posix.o libposix.a
libposix.a: errors.o kernel.o names.o processes.o streams.o writes.o ; $(AR) rcsD $@ $^
%.o: %.c posix.h ; $(CC) -O0 -w -pthread -c -o $@ $<
END
make -s; ./posix duplicates; cp posix stripped; strip stripped; ./stripped sizes; size stripped
",
            source("posix").display()
        ),
    );
}

#[test]
fn python_keeps_a_database() {
    same(
        &[("python3", "python3")],
        r#"
cat > program.py <<'END'
import sqlite3, os, json, shutil, tempfile, pickle, zipfile
for mode in "delete", "truncate", "persist", "wal", "memory":
    database = sqlite3.connect(f"{mode}.db", isolation_level=None)
    print(database.execute(f"pragma journal_mode={mode}").fetchone())
    database.execute("pragma synchronous=full")
    database.execute("create table t(n integer primary key, text)")
    for n in range(100):
        database.execute("insert into t values(?, ?)", (n, str(n) * 50))
    database.execute("delete from t where n % 3 = 0")
    database.execute("vacuum")
    print(database.execute("select count(*), sum(n) from t").fetchone(), database.execute("pragma integrity_check").fetchone())
    database.close()
os.remove("persist.db-journal") # its head is a random number
with tempfile.NamedTemporaryFile("w", dir=".", delete=False) as file:
    json.dump(list(range(1000)), file); file.flush(); os.fsync(file.fileno())
os.replace(file.name, "numbers.json")
pickle.dump({"a": 1}, open("pickle", "wb")); print(os.path.getsize("numbers.json"))
with zipfile.ZipFile("archive.zip", "w") as archive:
    archive.writestr(zipfile.ZipInfo("numbers"), open("numbers.json").read())
shutil.copytree(".", "copy", ignore=shutil.ignore_patterns("copy")); print(sorted(os.listdir("copy")))
END
/usr/bin/python3 -B program.py
"#,
    );
}
