/* Writes "new" to the file `written` by a stream over a descriptor, and lets it go.
 *
 * usage: streams fclose|fcloseall|exit */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef _GNU_SOURCE
int fcloseall(void);
#endif

int main(int count, char **words) {
    if (count != 2) return 2;
    pid_t child = fork();
    if (child == 0) {
        FILE *stream = fdopen(open("written", O_CREAT | O_RDWR, 0644), "w");
        if (!stream || fputs("new", stream) < 0) _exit(1);
        if (!strcmp(words[1], "fclose")) _exit(fclose(stream));
        if (!strcmp(words[1], "fcloseall")) _exit(fcloseall());
        exit(0);
    }
    int status;
    if (waitpid(child, &status, 0) != child || status != 0) return 1;
    puts("done");
    fflush(stdout);
    sleep(1000);
    return 0;
}
