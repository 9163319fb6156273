/* A program that ends at once, and leaves a child that waits for the end of its input. */
#include <unistd.h>

int main(void)
{
    char byte;
    if (fork() == 0)
        while (read(0, &byte, 1) > 0)
            ;
    return 0;
}
