/* SQLite, one insert a transaction: `sqlite DATABASE JOURNAL_MODE SYNCHRONOUS SECONDS`; prints
 * the times. In C, so that nothing is measured but SQLite: an interpreter has signal handlers
 * and garbage of its own. */
#include <string.h>

#include "times.h"

/* Of sqlite3.h, which the library's package does not have. */
typedef struct sqlite3 sqlite3;
typedef struct sqlite3_stmt sqlite3_stmt;
int sqlite3_open(const char *, sqlite3 **);
int sqlite3_exec(sqlite3 *, const char *, int (*)(void *, int, char **, char **), void *, char **);
int sqlite3_prepare_v2(sqlite3 *, const char *, int, sqlite3_stmt **, const char **);
int sqlite3_bind_text(sqlite3_stmt *, int, const char *, int, void (*)(void *));
int sqlite3_step(sqlite3_stmt *);
int sqlite3_reset(sqlite3_stmt *);
int sqlite3_finalize(sqlite3_stmt *);
int sqlite3_close(sqlite3 *);
const char *sqlite3_errmsg(sqlite3 *);
enum { SQLITE_OK = 0, SQLITE_DONE = 101 };

enum { WARM_UP = 50, TIMES_MAX = 10000000 };

static sqlite3 *database;

static void expect(int wanted, int found)
{
    if (wanted != found) {
        fprintf(stderr, "sqlite: %s\n", sqlite3_errmsg(database));
        exit(1);
    }
}

static void pragma(const char *name, const char *value)
{
    char text[64];
    snprintf(text, sizeof text, "pragma %s=%s", name, value);
    expect(SQLITE_OK, sqlite3_exec(database, text, NULL, NULL, NULL));
}

/* Inserts for so long; how many times there are. */
static uint64_t insert(sqlite3_stmt *statement, uint64_t duration_ns, uint64_t *times)
{
    uint64_t count = 0, begun = now_ns(), before = begun;
    for (uint64_t row = 0; before - begun < duration_ns && count < TIMES_MAX; row++) {
        expect(SQLITE_DONE, sqlite3_step(statement));
        expect(SQLITE_OK, sqlite3_reset(statement));
        uint64_t now = now_ns();
        if (row >= WARM_UP)
            times[count++] = now - before;
        else
            begun = now;
        before = now;
    }
    return count;
}

int main(int argc, char **argv)
{
    if (argc != 5) {
        fprintf(stderr, "usage: sqlite DATABASE JOURNAL_MODE SYNCHRONOUS SECONDS\n");
        return 2;
    }
    sqlite3_stmt *statement;
    char text[100];
    memset(text, 'x', sizeof text);
    expect(SQLITE_OK, sqlite3_open(argv[1], &database));
    pragma("journal_mode", argv[2]);
    pragma("synchronous", argv[3]);
    const char *table = "create table rows(number integer primary key, text)";
    expect(SQLITE_OK, sqlite3_exec(database, table, NULL, NULL, NULL));
    const char *row = "insert into rows(text) values(?)";
    expect(SQLITE_OK, sqlite3_prepare_v2(database, row, -1, &statement, NULL));
    expect(SQLITE_OK, sqlite3_bind_text(statement, 1, text, sizeof text, NULL));
    /* Pages of it are touched when they are used. */
    uint64_t *times = calloc(TIMES_MAX, sizeof *times);
    uint64_t count = times == NULL ? 0 : insert(statement, strtod(argv[4], NULL) * 1e9, times);
    if (count == 0) {
        fprintf(stderr, "sqlite: nothing was inserted in %s s\n", argv[4]);
        return 1;
    }
    print_times(times, count, 1);
    sqlite3_finalize(statement);
    sqlite3_close(database);
    return 0;
}
