/* A program that does nothing until it is killed: it runs from a file of the test. */
void _start(void)
{
    for (;;) {
#ifdef __x86_64__
        long number = 34; /* pause */
        __asm__ volatile("syscall" : "+a"(number) : : "rcx", "r11", "memory");
#else
        __asm__ volatile("wfi");
#endif
    }
}
