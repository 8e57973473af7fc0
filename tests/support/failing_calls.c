/* LD_PRELOAD: writes and syncs of files below $FAIL_BELOW fail while the file $FAIL_WITH is there.
 * It holds the error number; a negative one is the time in ms by which syncs are late instead.
 * Reads and other files are left alone.
 *
 * $WRITES is a file that gets a record for each pwritev and sync below $FAIL_BELOW that succeeded, so
 * that a test can take back what was not synced: kind ('w' or 's'), inode, offset and length.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* Whether a descriptor is of a file below $FAIL_BELOW. */
static int is_below(int descriptor) {
    const char *below = getenv("FAIL_BELOW");
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t size = below ? readlink(link, path, sizeof path - 1) : 0;
    if (size <= 0) return 0;
    path[size] = 0;
    return strncmp(path, below, strlen(below)) == 0;
}

/* Record a call that succeeded. */
static void record(long kind, int descriptor, long offset, long length) {
    static int records = -1;
    const char *name = getenv("WRITES");
    struct stat found;
    if (!name || !is_below(descriptor) || fstat(descriptor, &found) != 0) return;
    if (records < 0)
        records = syscall(SYS_openat, AT_FDCWD, name, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    long fields[4] = {kind, found.st_ino, offset, length};
    syscall(SYS_write, records, fields, sizeof fields);
}

/* The error that a call on a descriptor is to answer, 0 for none. */
static int error_of(int descriptor) {
    const char *with = getenv("FAIL_WITH");
    char text[16] = "";
    if (!with || access(with, F_OK) != 0 || !is_below(descriptor)) return 0;
    int source = syscall(SYS_openat, AT_FDCWD, with, O_RDONLY | O_CLOEXEC);
    if (source < 0) return 0;
    ssize_t got = syscall(SYS_read, source, text, sizeof text - 1);
    syscall(SYS_close, source);
    return got > 0 ? atoi(text) : 0;
}

/* Be late by -failed ms. */
static void wait_for(int failed) {
    struct timespec time = {-failed / 1000, -failed % 1000 * 1000000L};
    nanosleep(&time, NULL);
}

#define CALL(ret, name, parameters, arguments, when_late, when_done) \
    ret name parameters {                                         \
        static ret(*real) parameters;                             \
        int saved = errno, failed = error_of(descriptor);         \
        errno = saved;                                            \
        if (failed > 0) {                                         \
            errno = failed;                                       \
            return -1;                                            \
        }                                                         \
        if (failed < 0) when_late;                                \
        if (!real) real = dlsym(RTLD_NEXT, #name);                \
        ret result = real arguments;                              \
        saved = errno;                                            \
        if (result >= 0) when_done;                               \
        errno = saved;                                            \
        return result;                                            \
    }
#define FAILING(ret, name, parameters, arguments) \
    CALL(ret, name, parameters, arguments, (void)0, (void)0)
#define SYNC(name) \
    CALL(int, name, (int descriptor), (descriptor), wait_for(failed), record('s', descriptor, 0, 0))
#define GATHERED(name, parameters, arguments) \
    CALL(ssize_t, name, parameters, arguments, (void)0, record('w', descriptor, at, result))

FAILING(ssize_t, write, (int descriptor, const void *data, size_t size), (descriptor, data, size))
FAILING(ssize_t, pwrite, (int descriptor, const void *data, size_t size, off_t at),
        (descriptor, data, size, at))
FAILING(ssize_t, pwrite64, (int descriptor, const void *data, size_t size, off64_t at),
        (descriptor, data, size, at))
FAILING(ssize_t, writev, (int descriptor, const struct iovec *parts, int count),
        (descriptor, parts, count))
GATHERED(pwritev, (int descriptor, const struct iovec *parts, int count, off_t at),
         (descriptor, parts, count, at))
GATHERED(pwritev64, (int descriptor, const struct iovec *parts, int count, off64_t at),
         (descriptor, parts, count, at))
GATHERED(pwritev2, (int descriptor, const struct iovec *parts, int count, off_t at, int flags),
         (descriptor, parts, count, at, flags))
GATHERED(pwritev64v2, (int descriptor, const struct iovec *parts, int count, off64_t at, int flags),
         (descriptor, parts, count, at, flags))
SYNC(fsync)
SYNC(fdatasync)
FAILING(int, sync_file_range, (int descriptor, off64_t at, off64_t size, unsigned flags),
        (descriptor, at, size, flags))
