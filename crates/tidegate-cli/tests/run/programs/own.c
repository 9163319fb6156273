// As programs of Rust may be: all by the C library, but for a rename by an instruction of its own.
// Replaces a file, and syncs the directory.
#include <fcntl.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

static long own_rename(const char *from, const char *to)
{
#ifdef __x86_64__
    register const char *to_ __asm__("r10") = to;
    long answer;
    __asm__ volatile("syscall" : "=a"(answer)
                     : "a"((long)SYS_renameat), "D"((long)AT_FDCWD), "S"(from), "d"((long)AT_FDCWD),
                       "r"(to_)
                     : "rcx", "r11", "memory");
    return answer;
#else
    register long number_ __asm__("x8") = SYS_renameat2;
    register long directory_ __asm__("x0") = AT_FDCWD;
    register const char *from_ __asm__("x1") = from;
    register long other_ __asm__("x2") = AT_FDCWD;
    register const char *to_ __asm__("x3") = to;
    register long flags_ __asm__("x4") = 0;
    __asm__ volatile("svc 0" : "+r"(directory_)
                     : "r"(number_), "r"(from_), "r"(other_), "r"(to_), "r"(flags_) : "memory");
    return directory_;
#endif
}

int main(int count, char **arguments)
{
    if (count < 3)
        return 0;
    const char *made = arguments[1], *replaced = arguments[2];
    int file = open(made, O_WRONLY | O_CREAT | O_EXCL, 0644);
    if (file < 0 || write(file, "new", 3) != 3 || fsync(file) != 0 || close(file) != 0) {
        perror(made);
        return 1;
    }
    if (own_rename(made, replaced) != 0) {
        fprintf(stderr, "cannot rename %s\n", made);
        return 1;
    }
    int directory = open(".", O_RDONLY);
    return directory < 0 || fsync(directory) != 0;
}
