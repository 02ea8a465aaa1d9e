/* Real short and torn writes, for files below one folder (LD_PRELOAD).
 *
 * SHIM_UNDER  the folder; if unset, no write is changed
 * SHIM_NTH    number of the write, from 1, counted over all files in the folder
 * SHIM_KEEP   number of its bytes that are written; negative: number that are left out
 * SHIM_THEN   short: the write returns that count; kill: the process is killed;
 *             full: it returns that count, and every later write fails with ENOSPC
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int seen;

static int below(int fd, const char *folder)
{
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return strncmp(path, folder, strlen(folder)) == 0;
}

ssize_t write(int fd, const void *text, size_t length)
{
    static ssize_t (*really)(int, const void *, size_t);
    if (!really)
        really = (ssize_t (*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write");
    const char *folder = getenv("SHIM_UNDER");
    if (!folder || !below(fd, folder))
        return really(fd, text, length);

    int number = __atomic_add_fetch(&seen, 1, __ATOMIC_SEQ_CST), nth = atoi(getenv("SHIM_NTH"));
    const char *then = getenv("SHIM_THEN");
    if (number > nth && strcmp(then, "full") == 0) {
        errno = ENOSPC;
        return -1;
    }
    if (number != nth)
        return really(fd, text, length);

    long keep = atol(getenv("SHIM_KEEP"));
    if (keep < 0)
        keep += (long)length;
    if (keep < 0 || keep > (long)length)
        keep = (long)length / 2;
    ssize_t kept = keep ? really(fd, text, (size_t)keep) : 0;
    if (strcmp(then, "kill") == 0)
        kill(getpid(), SIGKILL);
    if (kept == 0) {
        errno = ENOSPC;
        return -1;
    }
    return kept;
}
