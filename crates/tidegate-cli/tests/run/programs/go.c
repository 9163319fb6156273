// As the programs of Go may be: linked to the C library, with system calls of its own. Writes "new"
// to the beginning of a file, and syncs it.
#include <fcntl.h>
#include <sys/syscall.h>

#ifdef __x86_64__
#define MACHINE_CALL(number, one, two, three, answer) \
    __asm__ volatile("syscall" : "=a"(answer) \
                     : "a"((long)(number)), "D"((long)(one)), "S"(two), "d"((long)(three)) \
                     : "rcx", "r11", "memory")
#else
#define MACHINE_CALL(number, one, two, three, answer) \
    do { \
        register long number_ __asm__("x8") = (number); \
        register long one_ __asm__("x0") = (one); \
        register const void *two_ __asm__("x1") = (two); \
        register long three_ __asm__("x2") = (three); \
        __asm__ volatile("svc 0" : "+r"(one_) : "r"(number_), "r"(two_), "r"(three_) : "memory"); \
        (answer) = one_; \
    } while (0)
#endif

// The note of Go's linker.
__asm__(".pushsection .note.go.buildid, \"a\", %note\n"
        ".long 4, 2, 4\n"
        ".ascii \"Go\\0\\0id\\0\\0\"\n"
        ".popsection");

int main(int count, char **arguments)
{
    if (count < 2)
        return 0;
    int file = open(arguments[1], O_WRONLY);
    long written, synced;
    MACHINE_CALL(SYS_write, file, "new", 3, written);
    MACHINE_CALL(SYS_fsync, file, 0, 0, synced);
    return file < 0 || written != 3 || synced != 0;
}
