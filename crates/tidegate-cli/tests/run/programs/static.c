/* A program without a dynamic linker: nothing can be preloaded into it. Appends to the file that
 * it is given. */
#include <fcntl.h>
#include <unistd.h>

int main(int count, char **arguments)
{
    if (count < 2)
        return write(1, "started\n", 8) != 8;
    int fd = open(arguments[1], O_WRONLY | O_APPEND);
    return fd < 0 || write(fd, " two ", 5) != 5 || fsync(fd) != 0;
}
