/* LD_PRELOAD: writes and syncs of files below $FAIL_BELOW fail while the file $FAIL_WITH is there.
 * It holds the error number. Reads and other files are left alone.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* The error that a call on a descriptor is to answer, 0 for none. */
static int error_of(int descriptor) {
    const char *below = getenv("FAIL_BELOW"), *with = getenv("FAIL_WITH");
    char link[64], path[PATH_MAX], text[16] = "";
    if (!below || !with || access(with, F_OK) != 0) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size <= 0) return 0;
    path[size] = 0;
    if (strncmp(path, below, strlen(below)) != 0) return 0;
    int source = syscall(SYS_openat, AT_FDCWD, with, O_RDONLY | O_CLOEXEC);
    if (source < 0) return 0;
    ssize_t got = syscall(SYS_read, source, text, sizeof text - 1);
    syscall(SYS_close, source);
    return got > 0 ? atoi(text) : 0;
}

#define FAILING(ret, name, parameters, arguments)                 \
    ret name parameters {                                         \
        static ret(*real) parameters;                             \
        int saved = errno, failed = error_of(descriptor);         \
        errno = saved;                                            \
        if (failed) {                                             \
            errno = failed;                                       \
            return -1;                                            \
        }                                                         \
        if (!real) real = dlsym(RTLD_NEXT, #name);                \
        return real arguments;                                    \
    }

FAILING(ssize_t, write, (int descriptor, const void *data, size_t size), (descriptor, data, size))
FAILING(ssize_t, pwrite, (int descriptor, const void *data, size_t size, off_t at),
        (descriptor, data, size, at))
FAILING(ssize_t, pwrite64, (int descriptor, const void *data, size_t size, off64_t at),
        (descriptor, data, size, at))
FAILING(ssize_t, writev, (int descriptor, const struct iovec *parts, int count),
        (descriptor, parts, count))
FAILING(int, fsync, (int descriptor), (descriptor))
FAILING(int, fdatasync, (int descriptor), (descriptor))
FAILING(int, sync_file_range, (int descriptor, off64_t at, off64_t size, unsigned flags),
        (descriptor, at, size, flags))
