/* What a store keeps over crashes: `work DB SEED` writes until it is killed, `verify DB SEED`
 * tells what is there. Built for a store by -DSTORE=leveldb or -DSTORE=rocksdb, whose C
 * interfaces are equal but for the names.
 *
 * Each of WRITERS threads has keys of its own. What its operation number N does follows from the
 * seed: it puts, overwrites or removes up to 8 keys, synced, as one batch, which also says N under
 * a key of its own. So the number that is found tells what all the other keys must be. `work` goes
 * on from there. Now and then a thread reads what it wrote, and one of them compacts. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PASTED(store, name) store##_##name
#define EXPANDED(store, name) PASTED(store, name)
#define DB(name) EXPANDED(STORE, name)
#define HEADER(store) <store/c.h>
#include HEADER(STORE)

enum { WRITERS = 3, KEYS = 400, MOST_CHANGES = 8, MOST_BYTES = 3000 };

static DB(t) *database;
static uint64_t seed;

static void fail(const char *what, const char *why)
{
    printf("%s: %s\n", what, why);
    exit(1);
}

static void check(char *error)
{
    if (error)
        fail("the store", error);
}

/* splitmix64 */
static uint64_t next(uint64_t *state)
{
    uint64_t mixed = *state += 0x9E3779B97F4A7C15;
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9;
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB;
    return mixed ^ mixed >> 31;
}

struct change { int key; int removed; };

/* What operation `number` of a writer changes; how many keys. */
static int changes_of(int writer, uint64_t number, struct change *changes)
{
    uint64_t state = seed * 1000003 + number * WRITERS + writer;
    int count = 1 + next(&state) % MOST_CHANGES;
    for (int at = 0; at < count; at++) {
        changes[at].key = next(&state) % KEYS;
        changes[at].removed = next(&state) % 4 == 0;
    }
    return count;
}

static size_t value_of(char *value, int writer, int key, uint64_t number)
{
    uint64_t state = number * KEYS + key;
    size_t length = sprintf(value, "writer %d key %d number %llu ", writer, key, (unsigned long long)number);
    size_t more = next(&state) % (MOST_BYTES - length);
    memset(value + length, 'a' + next(&state) % 26, more);
    return length + more;
}

static size_t key_name(char *name, int writer, int key)
{
    return sprintf(name, "%d/%05d", writer, key);
}

static size_t number_name(char *name, int writer)
{
    return sprintf(name, "%d/number", writer);
}

static char *get(const char *name, size_t name_length, size_t *length)
{
    char *error = NULL;
    DB(readoptions_t) *options = DB(readoptions_create)();
    DB(readoptions_set_verify_checksums)(options, 1);
    char *found = DB(get)(database, options, name, name_length, length, &error);
    DB(readoptions_destroy)(options);
    check(error);
    return found;
}

static uint64_t last_number(int writer)
{
    char name[32];
    size_t length;
    uint64_t number = 0;
    char *found = get(name, number_name(name, writer), &length);
    if (found) {
        if (length != sizeof number)
            fail(name, "no number");
        memcpy(&number, found, length);
    }
    DB(free)(found);
    return number;
}

static void perform(int writer, uint64_t number, const DB(writeoptions_t) *synced)
{
    struct change changes[MOST_CHANGES];
    char name[32], value[MOST_BYTES], *error = NULL;
    DB(writebatch_t) *batch = DB(writebatch_create)();
    int count = changes_of(writer, number, changes);
    for (int at = 0; at < count; at++) {
        size_t length = key_name(name, writer, changes[at].key);
        if (changes[at].removed)
            DB(writebatch_delete)(batch, name, length);
        else
            DB(writebatch_put)(batch, name, length, value, value_of(value, writer, changes[at].key, number));
    }
    DB(writebatch_put)(batch, name, number_name(name, writer), (char *)&number, sizeof number);
    DB(write)(database, synced, batch, &error);
    DB(writebatch_destroy)(batch);
    check(error);
}

/* newest[key]: the number of the operation that put it, 0 where it is not there. */
static void model(int writer, uint64_t last, uint64_t *newest)
{
    struct change changes[MOST_CHANGES];
    memset(newest, 0, KEYS * sizeof *newest);
    for (uint64_t number = 1; number <= last; number++) {
        int count = changes_of(writer, number, changes);
        for (int at = 0; at < count; at++)
            newest[changes[at].key] = changes[at].removed ? 0 : number;
    }
}

static void verify_writer(int writer, uint64_t last)
{
    uint64_t newest[KEYS];
    model(writer, last, newest);
    for (int key = 0; key < KEYS; key++) {
        char name[32], value[MOST_BYTES];
        size_t length;
        char *found = get(name, key_name(name, writer, key), &length);
        if (!found != !newest[key])
            fail(name, found ? "was removed, and is there" : "is missing");
        if (found && (length != value_of(value, writer, key, newest[key]) || memcmp(found, value, length)))
            fail(name, "has another value");
        DB(free)(found);
    }
}

/* There are no keys but those that were put: read in order, each once. */
static void verify_order(uint64_t keys)
{
    char *error = NULL, before[32] = "";
    uint64_t seen = 0;
    DB(readoptions_t) *options = DB(readoptions_create)();
    DB(iterator_t) *at = DB(create_iterator)(database, options);
    for (DB(iter_seek_to_first)(at); DB(iter_valid)(at); DB(iter_next)(at), seen++) {
        size_t length;
        const char *name = DB(iter_key)(at, &length);
        if (length >= sizeof before || strncmp(before, name, length) >= 0)
            fail(before, "is followed by a smaller key");
        memcpy(before, name, length);
        before[length] = 0;
    }
    DB(iter_get_error)(at, &error);
    check(error);
    DB(iter_destroy)(at);
    DB(readoptions_destroy)(options);
    if (seen != keys)
        fail("keys", "there are others than were put");
}

static void verify(void)
{
    uint64_t keys = 0;
    for (int writer = 0; writer < WRITERS; writer++) {
        uint64_t newest[KEYS], last = last_number(writer);
        verify_writer(writer, last);
        model(writer, last, newest);
        for (int key = 0; key < KEYS; key++)
            keys += newest[key] != 0;
        keys += last > 0;
        printf("store.%d %llu\n", writer, (unsigned long long)last);
    }
    verify_order(keys);
}

static void *write_on(void *argument)
{
    int writer = (int)(intptr_t)argument;
    DB(writeoptions_t) *synced = DB(writeoptions_create)();
    DB(writeoptions_set_sync)(synced, 1);
    for (uint64_t number = last_number(writer) + 1;; number++) {
        char line[48];
        perform(writer, number, synced);
        int length = sprintf(line, "store.%d %llu\n", writer, (unsigned long long)number);
        if (write(1, line, length) != length)
            exit(1);
        if (number % 100 == 0)
            verify_writer(writer, number);
        if (writer == 0 && number % 40 == 0)
            DB(compact_range)(database, NULL, 0, NULL, 0);
    }
    return NULL;
}

static void work(void)
{
    pthread_t writers[WRITERS];
    for (intptr_t writer = 0; writer < WRITERS; writer++)
        pthread_create(&writers[writer], NULL, write_on, (void *)writer);
    for (int writer = 0; writer < WRITERS; writer++)
        pthread_join(writers[writer], NULL);
}

static void open_database(const char *path)
{
    char *error = NULL;
    DB(options_t) *options = DB(options_create)();
    DB(options_set_create_if_missing)(options, 1);
    DB(options_set_write_buffer_size)(options, 128 << 10);
    DB(options_set_paranoid_checks)(options, 1);
    DB(options_set_compression)(options, 0);
    database = DB(open)(options, path, &error);
    check(error);
}

int main(int count, char **arguments)
{
    if (count != 4)
        return 2;
    open_database(arguments[2]);
    seed = strtoull(arguments[3], NULL, 10);
    if (!strcmp(arguments[1], "work"))
        work();
    else
        verify();
    DB(close)(database);
    return 0;
}
