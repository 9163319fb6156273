/* Filebench's personalities, as its own files describe them: `filebench DIRECTORY PERSONALITY BYTES
 * SECONDS`; prints the times of their loops. Files have the mean size of Filebench's. Each thread
 * has files of its own, so that none removes what another reads.
 *
 * fileserver  50 threads; a file of 128 KiB removed and one made, another appended to, another
 *             read, one looked at
 * varmail     16 threads; a file of 16 KiB removed; one made, appended to, synced; one read,
 *             appended to, synced; one read
 * webproxy    100 threads; a file of 16 KiB removed and made again, five read, a log appended to
 * webserver   100 threads; ten files of 16 KiB read, a log appended to */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "times.h"

enum { THREADS_MAX = 100, TIMES_MAX = 1 << 16, APPEND_BYTES = 16 << 10, IO_BYTES = 1 << 20, NAME_BYTES = 32 };

struct worker {
    pthread_t thread;
    unsigned number, files, removed;
    uint64_t random, count, *times;
    char *buffer;
};

struct personality {
    const char *name;
    unsigned threads;
    uint64_t file_bytes;
    void (*loop)(struct worker *);
};

static const struct personality *personality;
static uint64_t end_ns;
static int log_file;

static void check(int is_fine, const char *what)
{
    if (!is_fine) {
        perror(what);
        exit(1);
    }
}

/* xorshift64*. */
static uint64_t below(struct worker *worker, uint64_t limit)
{
    worker->random ^= worker->random >> 12;
    worker->random ^= worker->random << 25;
    worker->random ^= worker->random >> 27;
    return (worker->random * 0x2545F4914F6CDD1D >> 32) % limit;
}

/* A file of the worker that is there. */
static unsigned any(struct worker *worker)
{
    unsigned file = below(worker, worker->files - 1);
    return file + (file >= worker->removed);
}

static int opened(struct worker *worker, unsigned file, int flags)
{
    char name[NAME_BYTES];
    snprintf(name, sizeof name, "%u/%u", worker->number, file);
    int descriptor = open(name, flags | O_CLOEXEC, 0644);
    check(descriptor >= 0, name);
    return descriptor;
}

static void write_all(struct worker *worker, int file, uint64_t bytes)
{
    check(write(file, worker->buffer, bytes) == (ssize_t)bytes, "write");
}

static void append(struct worker *worker, int file)
{
    write_all(worker, file, 1 + below(worker, APPEND_BYTES));
}

static void read_all(struct worker *worker, int file)
{
    ssize_t bytes;
    while ((bytes = read(file, worker->buffer, IO_BYTES)) > 0)
        ;
    check(bytes == 0, "read");
}

static void done(int file)
{
    check(close(file) == 0, "close");
}

static void synced(int file)
{
    check(fsync(file) == 0, "fsync");
    done(file);
}

static void read_any(struct worker *worker)
{
    int file = opened(worker, any(worker), O_RDONLY);
    read_all(worker, file);
    done(file);
}

static void remove_any(struct worker *worker)
{
    char name[NAME_BYTES];
    unsigned file = any(worker);
    snprintf(name, sizeof name, "%u/%u", worker->number, file);
    check(unlink(name) == 0, name);
    worker->removed = file;
}

static int made(struct worker *worker)
{
    int file = opened(worker, worker->removed, O_WRONLY | O_CREAT | O_EXCL | O_APPEND);
    worker->removed = worker->files;
    return file;
}

static void make_whole(struct worker *worker)
{
    int file = made(worker);
    write_all(worker, file, personality->file_bytes);
    done(file);
}

static void fileserver(struct worker *worker)
{
    remove_any(worker);
    make_whole(worker);
    int file = opened(worker, any(worker), O_WRONLY | O_APPEND);
    append(worker, file);
    done(file);
    read_any(worker);
    struct stat stat;
    file = opened(worker, any(worker), O_PATH);
    check(fstat(file, &stat) == 0, "fstat");
    done(file);
}

static void varmail(struct worker *worker)
{
    remove_any(worker);
    int file = made(worker);
    append(worker, file);
    synced(file);
    file = opened(worker, any(worker), O_RDWR | O_APPEND);
    read_all(worker, file);
    append(worker, file);
    synced(file);
    read_any(worker);
}

static void webproxy(struct worker *worker)
{
    remove_any(worker);
    int file = made(worker);
    append(worker, file);
    done(file);
    for (int reads = 0; reads < 5; reads++)
        read_any(worker);
    append(worker, log_file);
}

static void webserver(struct worker *worker)
{
    for (int reads = 0; reads < 10; reads++)
        read_any(worker);
    append(worker, log_file);
}

static const struct personality personalities[] = {
    {"fileserver", 50, 128 << 10, fileserver},
    {"varmail", 16, 16 << 10, varmail},
    {"webproxy", 100, 16 << 10, webproxy},
    {"webserver", 100, 16 << 10, webserver},
};

static void prepare(struct worker *worker, unsigned number, uint64_t files)
{
    char name[NAME_BYTES];
    *worker = (struct worker){.number = number, .files = files, .random = number + 1};
    worker->buffer = malloc(IO_BYTES);
    worker->times = calloc(TIMES_MAX, sizeof *worker->times);
    check(worker->buffer != NULL && worker->times != NULL, "memory");
    memset(worker->buffer, 'x', IO_BYTES);
    snprintf(name, sizeof name, "%u", number);
    check(mkdir(name, 0755) == 0, name);
    for (worker->removed = 0; worker->removed < worker->files;) {
        unsigned next = worker->removed + 1;
        make_whole(worker);
        worker->removed = next;
    }
}

static void *work(void *argument)
{
    struct worker *worker = argument;
    uint64_t before = now_ns();
    while (before < end_ns && worker->count < TIMES_MAX) {
        personality->loop(worker);
        uint64_t now = now_ns();
        worker->times[worker->count++] = now - before;
        before = now;
    }
    return NULL;
}

static void run(struct worker *workers)
{
    uint64_t count = 0, *times = calloc((size_t)personality->threads * TIMES_MAX, sizeof *times);
    check(times != NULL, "memory");
    for (unsigned number = 0; number < personality->threads; number++)
        check(pthread_create(&workers[number].thread, NULL, work, &workers[number]) == 0, "pthread_create");
    for (unsigned number = 0; number < personality->threads; number++) {
        check(pthread_join(workers[number].thread, NULL) == 0, "pthread_join");
        memcpy(times + count, workers[number].times, workers[number].count * sizeof *times);
        count += workers[number].count;
    }
    check(count > 0, "no loop was done");
    print_times(times, count, personality->threads);
}

int main(int argc, char **argv)
{
    for (size_t at = 0; argc == 5 && at < sizeof personalities / sizeof *personalities; at++)
        if (strcmp(argv[2], personalities[at].name) == 0)
            personality = &personalities[at];
    if (personality == NULL) {
        fprintf(stderr, "usage: filebench DIRECTORY fileserver|varmail|webproxy|webserver BYTES SECONDS\n");
        return 2;
    }
    check(mkdir(argv[1], 0755) == 0 && chdir(argv[1]) == 0, argv[1]);
    uint64_t files = strtoull(argv[3], NULL, 10) / personality->file_bytes / personality->threads;
    log_file = open("log", O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    check(log_file >= 0, "log");
    static struct worker workers[THREADS_MAX];
    for (unsigned number = 0; number < personality->threads; number++)
        prepare(&workers[number], number, files < 8 ? 8 : files);
    sync();
    end_ns = now_ns() + strtod(argv[4], NULL) * 1e9;
    run(workers);
    return 0;
}
