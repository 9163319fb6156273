/* Locks all of its memory. */
#include <sys/mman.h>

int main(void) { return mlockall(MCL_CURRENT | MCL_FUTURE) != 0; }
