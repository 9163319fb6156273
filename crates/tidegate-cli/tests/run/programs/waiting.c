/* A program without a dynamic linker, which waits until it is killed. */
#include <unistd.h>

int main(void)
{
    for (;;)
        pause();
}
