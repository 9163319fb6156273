/* Wrong calls: the same errors, and nothing done. */
#include "posix.h"

static void wrong_arguments(void)
{
    int fd = open_file("file", 0), reader = MUST(open("file", O_RDONLY)), path = MUST(open("file", O_PATH));
    TELL(write(fd, "0123456789", 10));
    TELL(write(reader, "x", 1));
    TELL(pwrite(reader, "x", 1, 0));
    TELL(ftruncate(reader, 0));
    TELL(fallocate(reader, 0, 0, 10));
    TELL(write(path, "x", 1));
    TELL(fsync(path));
    TELL(write(-1, "x", 1));
    TELL(write(999, "x", 1));
    TELL(fsync(999));
    TELL(fdatasync(-1));
    TELL(close(999));
    TELL(dup(999));
    TELL(lseek(fd, -1, SEEK_SET));
    TELL(lseek(fd, 0, 99));
    TELL(pwrite(fd, "x", 1, -1));
    TELL(write(fd, "", 0));
    TELL(pwrite(fd, NULL, 0, 100));
    TELL(lseek(fd, 0, SEEK_END));
    TELL(write(fd, NULL, 10));
    TELL(pwrite(fd, (void *)8, 4096, 0));
    struct iovec parts[2] = {{"good", 4}, {(void *)8, 4}};
    TELL(pwritev(fd, parts, 2, 0) >= -1); /* the kernel may take the good part or none */
    TELL(pwritev(fd, (void *)8, 2, 0));
    TELL(fallocate(fd, 0, -1, 10));
    TELL(fallocate(fd, 0x1000, 0, 10));
    TELL(fsync(reader));
    TELL(pwrite(fd, "0123", 4, 0));
    show("file");
}

/* A buffer whose end cannot be read: the kernel writes what it can. */
static void half_readable_buffer(void)
{
    long page = sysconf(_SC_PAGESIZE);
    char *pages = mmap(NULL, 3 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(pages, 'a', 2 * page);
    MUST(munmap(pages + 2 * page, page));
    int fd = open_file("file", 0);
    TELL(write(fd, pages + 2 * page, 10));
    TELL(write(fd, pages + page, page));
    TELL(write(fd, pages + 2 * page - 1, 1));
    ssize_t wrote = pwrite(fd, pages + page, 2 * page, 0);
    TELL(wrote == page || wrote == -1);
    TELL(fsync(fd));
    TELL(lseek(fd, 0, SEEK_END));
    show("file");
}

static void wrong_names(void)
{
    char deep[5000];
    memset(deep, 'x', sizeof deep - 1);
    deep[sizeof deep - 1] = 0;
    MUST(mkdir("directory", 0755));
    MUST(symlink("loop", "loop"));
    open_file("file", 0);
    TELL(open("directory", O_WRONLY));
    TELL(open("directory", O_CREAT | O_RDWR, 0600));
    TELL(open("file/below", O_CREAT | O_RDWR, 0600));
    TELL(open("absent/below", O_CREAT | O_RDWR, 0600));
    TELL(open("loop", O_RDWR));
    TELL(open(deep, O_CREAT | O_RDWR, 0600));
    TELL(open("", O_RDWR));
    TELL(open(NULL, O_RDWR));
    TELL(unlink("absent"));
    TELL(unlink("directory"));
    TELL(unlink(deep));
    TELL(rename("file", deep));
    TELL(rename(deep, "file"));
    TELL(rename("directory", "directory/inside"));
    TELL(link("directory", "hard"));
    TELL(link("absent", "hard"));
    TELL(rename(NULL, "file"));
    TELL(rmdir("file"));
    TELL(truncate("directory", 0));
    TELL(openat(999, "file", O_RDWR));
    TELL(openat(MUST(open("file", O_RDONLY)), "below", O_RDWR));
    TELL(mkdir("file", 0700));
    TELL(open("file/", O_RDWR));
    TELL(rename("file", "file/"));
}

const struct section error_sections[] = {
    {"wrong_arguments", wrong_arguments},
    {"half_readable_buffer", half_readable_buffer},
    {"wrong_names", wrong_names},
    {NULL, NULL},
};
