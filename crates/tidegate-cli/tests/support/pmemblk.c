/* Drives a libpmemblk, the original or Tidegate's, by commands on standard input: the answer to
 * each is a line, "ok" with a number, or "error" with errno and the library's message.
 *
 *   pmemblk LIBRARY
 *   create PATH BLOCK_BYTES POOL_BYTES | open PATH BLOCK_BYTES | close | check PATH BLOCK_BYTES
 *   blocks | bytes | write BLOCK BYTE | read BLOCK | zero BLOCK | error BLOCK
 *   duel ROUNDS | storm THREADS
 *
 * A write fills the block with the byte; a read answers with the byte that fills the block. In a
 * duel two threads write block 0 and a third one reads it. A storm writes without an end, and each
 * write of a thread that has returned is a line, "did THREAD".
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static void *(*create)(const char *, size_t, size_t, mode_t);
static void *(*open_pool)(const char *, size_t);
static void (*close_pool)(void *);
static int (*check)(const char *, size_t);
static size_t (*block_bytes)(void *);
static size_t (*blocks)(void *);
static int (*read_block)(void *, void *, long long);
static int (*write_block)(void *, const void *, long long);
static int (*set_zero)(void *, long long);
static int (*set_error)(void *, long long);
static const char *(*message)(void);

static void *pool;
static unsigned char *buffer;

static void *symbol(void *library, const char *name)
{
	void *found = dlvsym(library, name, "LIBPMEMBLK_1.0");
	if (found == NULL) {
		fprintf(stderr, "%s\n", dlerror());
		exit(2);
	}
	return found;
}

static void load(const char *path)
{
	void *library = dlopen(path, RTLD_NOW);
	if (library == NULL) {
		fprintf(stderr, "%s\n", dlerror());
		exit(2);
	}
	create = symbol(library, "pmemblk_create");
	open_pool = symbol(library, "pmemblk_open");
	close_pool = symbol(library, "pmemblk_close");
	check = symbol(library, "pmemblk_check");
	block_bytes = symbol(library, "pmemblk_bsize");
	blocks = symbol(library, "pmemblk_nblock");
	read_block = symbol(library, "pmemblk_read");
	write_block = symbol(library, "pmemblk_write");
	set_zero = symbol(library, "pmemblk_set_zero");
	set_error = symbol(library, "pmemblk_set_error");
	message = symbol(library, "pmemblk_errormsg");
}

static void answer(int failed, long long number)
{
	if (failed)
		printf("error %d %s\n", errno, message());
	else
		printf("ok %lld\n", number);
	fflush(stdout);
}

static void opened(void *found)
{
	if (found != NULL) {
		pool = found;
		buffer = realloc(buffer, block_bytes(pool));
	}
	answer(found == NULL, 0);
}

static int is_torn(const unsigned char *block, size_t bytes)
{
	for (size_t at = 1; at < bytes; at++)
		if (block[at] != block[0])
			return 1;
	return 0;
}

static void read_one(long long block)
{
	size_t bytes = block_bytes(pool);
	int failed = read_block(pool, buffer, block) != 0;
	if (!failed && is_torn(buffer, bytes))
		printf("torn\n"), fflush(stdout);
	else
		answer(failed, buffer[0]);
}

static atomic_int duellers;
static long long rounds;

static void *duel_write(void *byte)
{
	unsigned char *block = malloc(block_bytes(pool));
	uintptr_t failed = 0;
	memset(block, (int)(uintptr_t)byte, block_bytes(pool));
	for (long long round = 0; round < rounds; round++)
		failed |= write_block(pool, block, 0) != 0;
	atomic_fetch_sub(&duellers, 1);
	free(block);
	return (void *)failed;
}

static void duel(void)
{
	pthread_t writers[2];
	void *results[2];
	size_t bytes = block_bytes(pool);
	int failed = 0;
	atomic_store(&duellers, 2);
	for (uintptr_t writer = 0; writer < 2; writer++)
		pthread_create(&writers[writer], NULL, duel_write, (void *)(writer + 1));
	while (atomic_load(&duellers) > 0)
		failed |= read_block(pool, buffer, 0) != 0 || is_torn(buffer, bytes);
	for (int writer = 0; writer < 2; writer++)
		pthread_join(writers[writer], &results[writer]), failed |= results[writer] != NULL;
	answer(failed, 0);
}

/* The write number i of thread t fills block 64 t + i mod 64 with 1 + i mod 251. */
static void *storm(void *thread)
{
	long long first = 64 * (long long)(uintptr_t)thread;
	unsigned char *block = malloc(block_bytes(pool));
	char line[16];
	int length = sprintf(line, "did %d\n", (int)(uintptr_t)thread);
	for (long long i = 0;; i++) {
		memset(block, (int)(1 + i % 251), block_bytes(pool));
		if (write_block(pool, block, first + i % 64) != 0 || write(1, line, length) != length)
			exit(3);
	}
}

static void storms(long long threads)
{
	pthread_t thread;
	for (uintptr_t number = 0; number < (uintptr_t)threads; number++)
		pthread_create(&thread, NULL, storm, (void *)number);
	pthread_join(thread, NULL);
}

static void run(const char *command, const char *path, long long a, long long b)
{
	errno = 0;
	if (strcmp(command, "create") == 0)
		opened(create(path, a, b, 0600));
	else if (strcmp(command, "open") == 0)
		opened(open_pool(path, a));
	else if (strcmp(command, "close") == 0)
		close_pool(pool), answer(0, 0);
	else if (strcmp(command, "check") == 0) {
		int result = check(path, a);
		answer(result < 0, result);
	} else if (strcmp(command, "blocks") == 0)
		answer(0, blocks(pool));
	else if (strcmp(command, "bytes") == 0)
		answer(0, block_bytes(pool));
	else if (strcmp(command, "write") == 0)
		memset(buffer, b, block_bytes(pool)), answer(write_block(pool, buffer, a) != 0, 0);
	else if (strcmp(command, "read") == 0)
		read_one(a);
	else if (strcmp(command, "zero") == 0)
		answer(set_zero(pool, a) != 0, 0);
	else if (strcmp(command, "duel") == 0)
		rounds = a, duel();
	else if (strcmp(command, "storm") == 0)
		storms(a);
	else if (strcmp(command, "error") == 0)
		answer(set_error(pool, a) != 0, 0);
	else
		exit(2);
}

int main(int argc, char **argv)
{
	char line[4352], command[16], path[4096];
	if (argc != 2)
		return 2;
	load(argv[1]);
	while (fgets(line, sizeof(line), stdin) != NULL) {
		long long a = 0, b = 0;
		path[0] = 0;
		if (sscanf(line, "%15s /%4094[^ \n] %lld %lld", command, path + 1, &a, &b) < 2)
			sscanf(line, "%15s %lld %lld", command, &a, &b);
		else
			path[0] = '/';
		run(command, path, a, b);
	}
	return 0;
}
