/* Names, links, directories, modes and times. */
#include "posix.h"
#include <sys/file.h>
#include <sys/time.h>

static void removed_while_open(void)
{
    struct stat status;
    int fd = open_file("file", 0);
    TELL(write(fd, "before ", 7));
    TELL(fsync(fd));
    TELL(unlink("file"));
    TELL(write(fd, "after", 5));
    TELL(fsync(fd));
    TELL(ftruncate(fd, 9));
    MUST(fstat(fd, &status));
    say("%ld links, %lld bytes", (long)status.st_nlink, (long long)status.st_size);
    char bytes[16] = "";
    TELL(pread(fd, bytes, 15, 0));
    say("%s", bytes);
    int other = open_file("file", O_EXCL); /* another file of the same name, while the old one is written */
    TELL(write(other, "new", 3));
    TELL(pwrite(fd, "old", 3, 0));
    TELL(fdatasync(fd));
    TELL(close(fd));
    TELL(fsync(other));
    show("file");
    TELL(remove("file"));
    show("file");
}

static void unnamed_files(void)
{
    char path[64], name[] = "made.XXXXXX", other[] = "also.XXXXXX.txt";
    int fd = MUST(open(".", O_TMPFILE | O_RDWR, 0600));
    TELL(write(fd, "no name yet", 11));
    TELL(fsync(fd));
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    TELL(linkat(AT_FDCWD, path, AT_FDCWD, "named", AT_SYMLINK_FOLLOW));
    TELL(pwrite(fd, "A name", 6, 0));
    TELL(fsync(fd));
    show("named");
    fd = MUST(mkstemp(name));
    TELL(write(fd, "mkstemp", 7));
    TELL(rename(name, "mkstemp"));
    TELL(fsync(fd));
    show("mkstemp");
    fd = MUST(mkostemps(other, 4, O_APPEND));
    TELL(write(fd, "mkostemps", 9));
    TELL(rename(other, "mkostemps"));
    show("mkostemps");
    FILE *file = tmpfile();
    TELL(fprintf(file, "temporary"));
    TELL(fflush(file));
    TELL(lseek(fileno(file), 0, SEEK_END));
    TELL(fclose(file));
}

static void renames(void)
{
    int old = open_file("old", 0), new = open_file("new", 0);
    TELL(write(old, "old content", 11));
    TELL(write(new, "new", 3));
    TELL(fsync(old));
    TELL(rename("old", "new"));
    TELL(pwrite(old, "OLD", 3, 0)); /* by the descriptor, after the rename */
    TELL(pwrite(new, "to nowhere", 10, 0));
    TELL(fsync(new));
    show("new");
    show("old");
    open_file("other", 0);
    TELL(renameat2(AT_FDCWD, "new", AT_FDCWD, "other", RENAME_NOREPLACE));
    TELL(renameat2(AT_FDCWD, "new", AT_FDCWD, "other", RENAME_EXCHANGE));
    show("new");
    show("other");
    TELL(rename("absent", "other"));
    TELL(rename("other", "other"));
    MUST(mkdir("directory", 0755));
    TELL(rename("other", "directory"));
    TELL(rename("other", "directory/inside"));
    int inside = open_file("directory/inside", O_APPEND);
    TELL(write(inside, " appended", 9));
    TELL(rename("directory", "moved")); /* a whole directory, under an open file */
    TELL(write(inside, " after the move", 15));
    TELL(fsync(inside));
    show("moved/inside");
    for (int round = 0; round < 50; round++) {
        int fd = open_file("tmp", O_TRUNC);
        MUST(dprintf(fd, "version %d\n", round));
        MUST(fsync(fd));
        close(fd);
        MUST(rename("tmp", "final"));
    }
    show("final");
}

static void links(void)
{
    struct stat status;
    int fd = open_file("one", 0);
    TELL(write(fd, "by the first name ", 18));
    TELL(link("one", "two"));
    TELL(symlink("two", "soft"));
    int other = MUST(open("soft", O_WRONLY | O_APPEND));
    TELL(write(other, "by a link", 9));
    show("one");
    TELL(unlink("one"));
    TELL(write(fd, "After", 5));
    TELL(fsync(fd));
    show("two");
    MUST(fstat(fd, &status));
    TELL(status.st_nlink);
    TELL(link("two", "soft"));
    TELL(linkat(AT_FDCWD, "soft", AT_FDCWD, "three", AT_SYMLINK_FOLLOW));
    TELL(linkat(AT_FDCWD, "soft", AT_FDCWD, "softer", 0));
    TELL(rename("two", "three")); /* two names of one file: does nothing */
    show("two");
    show("three");
    TELL(truncate("soft", 3));
    show("three");
    TELL(open("soft", O_WRONLY | O_NOFOLLOW));
    char target[16] = "";
    TELL(readlink("soft", target, 15));
    say("%s", target);
}

static void directories(void)
{
    MUST(mkdir("a", 0755));
    int directory = MUST(open("a", O_RDONLY | O_DIRECTORY));
    TELL(fsync(directory));
    TELL(fdatasync(directory));
    int fd = MUST(openat(directory, "file", O_CREAT | O_RDWR, 0640));
    TELL(write(fd, "relative", 8));
    TELL(fsync(directory));
    TELL(mkdirat(directory, "b", 0700));
    TELL(renameat(directory, "file", directory, "b/file"));
    TELL(fchdir(directory));
    show("b/file");
    TELL(chdir("b"));
    fd = open_file("here", 0);
    TELL(write(fd, "in b", 4));
    TELL(unlinkat(AT_FDCWD, "file", 0));
    TELL(unlinkat(directory, "b", AT_REMOVEDIR));
    TELL(unlink("here"));
    TELL(rmdir("../b")); /* the working directory is gone */
    TELL(write(fd, "still", 5));
    TELL(open("nowhere", O_CREAT | O_WRONLY, 0600));
    TELL(fsync(fd));
    char path[8];
    TELL(getcwd(path, sizeof path) == NULL ? errno : 0);
    TELL(write(directory, "x", 1));
    TELL(ftruncate(directory, 0));
}

static void modes_and_owners(void)
{
    struct stat status;
    umask(027);
    int fd = MUST(open("file", O_CREAT | O_RDWR, 0666));
    MUST(fstat(fd, &status));
    say("mode %o", status.st_mode);
    TELL(write(fd, "secret", 6));
    TELL(fchmod(fd, 0));
    TELL(write(fd, " more", 5)); /* the descriptor still may */
    TELL(fsync(fd));
    TELL(chmod("file", 06755));
    TELL(write(fd, "!", 1)); /* takes setuid and setgid away, except for root */
    MUST(fstat(fd, &status));
    say("mode %o", status.st_mode);
    if (geteuid() == 0) {
        TELL(fchown(fd, 65534, 65534));
        TELL(write(fd, " of nobody", 10));
        MUST(stat("file", &status));
        say("owner %d", (int)status.st_uid);
    }
    int only_read = MUST(open("read only", O_CREAT | O_RDWR, 0400));
    TELL(write(only_read, "made writable", 13));
    TELL(fsync(only_read));
    show("read only");
    TELL(open("file", O_CREAT | O_EXCL | O_WRONLY, 0600));
}

static bool later(struct timespec before, struct timespec after)
{
    return after.tv_sec > before.tv_sec || (after.tv_sec == before.tv_sec && after.tv_nsec > before.tv_nsec);
}

static void times(void)
{
    struct stat before, after;
    struct timespec past[2] = {{1000000000, 0}, {1100000000, 0}};
    int fd = open_file("file", 0);
    TELL(write(fd, "a", 1));
    TELL(futimens(fd, past));
    MUST(fstat(fd, &before));
    TELL(before.st_mtim.tv_sec);
    TELL(write(fd, "b", 1));
    MUST(fstat(fd, &after));
    TELL(later(before.st_mtim, after.st_mtim));
    TELL(futimens(fd, past)); /* as cp -p and tar do, then close: the time must stay */
    TELL(fsync(fd));
    TELL(close(fd));
    usleep(100000);
    MUST(stat("file", &after));
    TELL(after.st_mtim.tv_sec);
    fd = open_file("file", 0);
    TELL(fsync(fd));
    MUST(stat("file", &after));
    TELL(after.st_mtim.tv_sec);
}

static void wait_for_lock(void)
{
    int fd = open_file("file", 0);
    TELL(flock(fd, LOCK_EX | LOCK_NB));
    struct flock region = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 10, .l_len = 10};
    TELL(fcntl(fd, F_SETLK, &region));
    region.l_start = 30;
    TELL(fcntl(fd, F_SETLK, &region));
    TELL(lockf(fd, F_TEST, 5));
}

/* POSIX locks of a process go when it closes any descriptor of the file, so nobody may do that
 * behind its back. */
static void locks(void)
{
    int fd = open_file("file", 0);
    struct flock region = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 20};
    TELL(fcntl(fd, F_SETLK, &region));
    TELL(flock(fd, LOCK_EX));
    for (int round = 0; round < 3; round++) {
        TELL(write(fd, "locked", 6));
        TELL(fsync(fd));
        in_child(wait_for_lock);
    }
    TELL(truncate("file", 4));
    TELL(rename("file", "renamed"));
    TELL(rename("renamed", "file"));
    in_child(wait_for_lock);
    TELL(close(open_file("file", 0)));
    in_child(wait_for_lock);
}

/* Opens a file so that it is made where it is missing, twice: the second time it is known to be
 * there. */
static void open_twice(const char *path)
{
    for (int round = 0; round < 2; round++)
        MUST(close(MUST(open(path, O_RDWR | O_CREAT, 0640))));
}

/* What is at a path may be another thing whenever it is opened there again. */
static void found_again(void)
{
    struct stat status;
    open_twice("file");
    MUST(unlink("file"));
    int fd = MUST(open("file", O_RDWR | O_CREAT, 0600));
    TELL(write(fd, "made again", 10));
    TELL(fsync(fd));
    MUST(close(fd));
    MUST(stat("file", &status));
    say("mode %o", (unsigned)status.st_mode);
    TELL(open("file", O_RDWR | O_CREAT | O_EXCL, 0600));
    open_twice("file");
    fd = MUST(open("file", O_RDWR | O_CREAT | O_TRUNC, 0600));
    show("file");
    TELL(write(fd, "emptied", 7));
    MUST(close(fd));
    show("file");
    fd = MUST(open("file", O_WRONLY | O_CREAT | O_APPEND, 0600));
    TELL(write(fd, ", appended", 10));
    MUST(close(fd));
    show("file");
    MUST(rename("file", "target"));
    MUST(symlink("target", "file"));
    TELL(open("file", O_RDWR | O_CREAT | O_NOFOLLOW, 0600));
    open_twice("file");
    MUST(unlink("target"));
    MUST(close(MUST(open("file", O_RDWR | O_CREAT, 0600))));
    show("target");
    MUST(unlink("file"));
    MUST(mkdir("file", 0755));
    TELL(open("file", O_RDWR | O_CREAT, 0600));
    TELL(open("file", O_RDONLY | O_CREAT, 0600));
    MUST(rmdir("file"));
    open_twice("file");
    MUST(unlink("file"));
    MUST(mkfifo("file", 0600));
    fd = MUST(open("file", O_RDWR | O_CREAT, 0600));
    char bytes[8] = "";
    TELL(write(fd, "piped", 5));
    TELL(read(fd, bytes, 5));
    say("%s", bytes);
}

static void count_as_locked(void)
{
    struct flock region = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 20};
    MUST(fcntl(MUST(open("file", O_RDONLY)), F_GETLK, &region));
    say("locked: %d", region.l_type != F_UNLCK);
}

/* Files that have become another user's since they were opened there, in a directory for all and
 * in one's own. */
static void found_as_others(void)
{
    struct flock region = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 20};
    MUST(mkdir("all", 0755));
    MUST(chmod("all", 01777));
    open_twice("all/file");
    MUST(chown("all/file", 1234, 1234));
    MUST(chown("all", 1235, 1235));
    int fd = open("all/file", O_RDWR | O_CREAT, 0600);
    say("%s", fd < 0 ? strerror(errno) : "opened");
    open_twice("file");
    fd = open_file("file", 0);
    MUST(fcntl(fd, F_SETLK, &region));
    MUST(chown("file", 1234, 1234));
    /* Nothing that is done for it may close the file: the lock would be gone. */
    MUST(open("file", O_RDWR | O_CREAT, 0600));
    in_child(count_as_locked);
}

static void in_a_new_root(void)
{
    MUST(mkdir("root", 0755));
    if (geteuid() == 0) {
        MUST(chroot("root"));
        MUST(chdir("/"));
    } else
        MUST(chdir("root"));
    int fd = open_file("file", 0);
    TELL(write(fd, "in a root of its own", 20));
    TELL(fsync(fd));
    TELL(rename("file", "renamed"));
    TELL(write(fd, ", renamed", 9));
    TELL(fsync(fd));
    show("renamed");
}

static void new_root(void)
{
    in_child(in_a_new_root);
    show("root/renamed");
}

const struct section name_sections[] = {
    {"removed_while_open", removed_while_open},
    {"unnamed_files", unnamed_files},
    {"renames", renames},
    {"links", links},
    {"directories", directories},
    {"modes_and_owners", modes_and_owners},
    {"times", times},
    {"locks", locks},
    {"found_again", found_again},
    {"found_as_others", found_as_others},
    {"new_root", new_root},
    {NULL, NULL},
};
