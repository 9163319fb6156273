/* Fills the database DB, overwrites, compacts and reads. */
#include <leveldb/c.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static leveldb_t *database;

static void check(char *error)
{
    if (error) {
        printf("leveldb: %s\n", error);
        exit(1);
    }
}

static void open_database(const char *path)
{
    char *error = NULL;
    leveldb_options_t *options = leveldb_options_create();
    leveldb_options_set_create_if_missing(options, 1);
    leveldb_options_set_write_buffer_size(options, 256 << 10);
    leveldb_options_set_paranoid_checks(options, 1);
    leveldb_options_set_compression(options, leveldb_no_compression);
    database = leveldb_open(options, path, &error);
    check(error);
}

static int value_of(char *value, int number, int version)
{
    int length = sprintf(value, "value %d version %d ", number, version);
    memset(value + length, 'a' + number % 26, number % 300);
    return length + number % 300;
}

static void put(int number, int version, int sync)
{
    char key[32], value[512], *error = NULL;
    leveldb_writeoptions_t *options = leveldb_writeoptions_create();
    leveldb_writeoptions_set_sync(options, sync);
    leveldb_put(database, options, key, sprintf(key, "key %08d", number), value, value_of(value, number, version), &error);
    leveldb_writeoptions_destroy(options);
    check(error);
}

static int has(int number, int version)
{
    char key[32], value[512], *error = NULL;
    size_t length;
    leveldb_readoptions_t *options = leveldb_readoptions_create();
    leveldb_readoptions_set_verify_checksums(options, 1);
    char *found = leveldb_get(database, options, key, sprintf(key, "key %08d", number), &length, &error);
    leveldb_readoptions_destroy(options);
    check(error);
    int same = found && (int)length == value_of(value, number, version) && !memcmp(found, value, length);
    free(found);
    return same;
}

static void session(const char *path)
{
    open_database(path);
    for (int number = 0; number < 20000; number++)
        put(number * 7919 % 20000, 1, number % 10 == 0);
    for (int number = 0; number < 20000; number += 3)
        put(number, 2, number % 30 == 0);
    leveldb_compact_range(database, NULL, 0, NULL, 0);
    leveldb_close(database);
    open_database(path);
    int good = 0;
    for (int number = 0; number < 20000; number++)
        good += has(number, number % 3 ? 1 : 2);
    printf("%d of 20000 are right\n", good);
    leveldb_close(database);
}

int main(int count, char **arguments)
{
    if (count != 2)
        return 2;
    session(arguments[1]);
    return 0;
}
