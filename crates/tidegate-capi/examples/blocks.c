/*
 * Keeps a counter in a block of persistent memory:
 *
 *     cc -o blocks blocks.c -ltidegate
 *     ./blocks /dev/shm/counter        # prints 1, then 2, and so on
 *
 * After a kill or a power cut the counter is the last one that was printed, or the next.
 */
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tidegate.h>

static int failed(const char *what)
{
	fprintf(stderr, "blocks: %s: %s\n", what, tidegate_errormsg());
	return 1;
}

static int count(tidegate_pool *pool)
{
	uint32_t bytes = tidegate_block_bytes(pool);
	unsigned char *block = malloc(bytes);
	uint64_t counter;
	int result = 0;

	if (block == NULL)
		return 1;
	if (tidegate_read(pool, block, 0, bytes) != 0) {
		result = failed("read");
	} else {
		memcpy(&counter, block, sizeof(counter));
		counter++;
		memcpy(block, &counter, sizeof(counter));
		if (tidegate_write(pool, block, 0, bytes) != 0)
			result = failed("write");
		else
			printf("%llu\n", (unsigned long long)counter);
	}
	free(block);
	return result;
}

int main(int argc, char **argv)
{
	tidegate_pool *pool;
	int result;

	if (argc != 2) {
		fprintf(stderr, "usage: blocks POOL\n");
		return 2;
	}
	if (tidegate_create(argv[1], "btt", 32 << 20, "block-size=4096") != 0 && errno != EEXIST)
		return failed("create");
	pool = tidegate_open(argv[1], NULL, NULL, 0);
	if (pool == NULL)
		return failed("open");
	result = count(pool);
	if (tidegate_close(pool) != 0)
		return failed("close");
	return result;
}
