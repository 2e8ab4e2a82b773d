// Preloaded before libc by LD_PRELOAD: makes a process's writes below chosen paths fail or wait.
//
//     DISK_FAULT  CALL:ERRNO:BYTES:PART
//
// CALL is write or fsync. It fails with ERRNO for files whose path contains PART, a pattern of fnmatch. Writes
// fail once the process has written BYTES to such files, after a short write, as on a disk that becomes full.
// With ERRNO 0 the call waits for BYTES microseconds instead.

#include <dlfcn.h>
#include <fnmatch.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

struct Fault {
    int error = 0;
    long bytes = 0;
};

bool fault_of(const char* call, int descriptor, Fault& fault) {
    const char* spec = std::getenv("DISK_FAULT");
    char name[16];
    int part = 0;
    if (spec == nullptr ||
        std::sscanf(spec, "%15[a-z]:%d:%ld:%n", name, &fault.error, &fault.bytes, &part) < 3 ||
        part == 0 || std::strcmp(name, call) != 0) {
        return false;
    }
    char link[64], path[4096];
    std::snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    const ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) {
        return false;
    }
    path[length] = '\0';
    const std::string pattern = std::string("*") + (spec + part) + "*";
    return fnmatch(pattern.c_str(), path, 0) == 0;
}

std::atomic<long> written{0};

}  // namespace

extern "C" ssize_t write(int descriptor, const void* data, size_t size) {
    static const auto real =
        reinterpret_cast<ssize_t (*)(int, const void*, size_t)>(dlsym(RTLD_NEXT, "write"));
    Fault fault;
    if (fault_of("write", descriptor, fault)) {
        if (fault.error == 0) {
            usleep(static_cast<useconds_t>(fault.bytes));
            return real(descriptor, data, size);
        }
        const long room = fault.bytes - written.load();
        if (room <= 0) {
            errno = fault.error;
            return -1;
        }
        size = size < static_cast<size_t>(room) ? size : static_cast<size_t>(room);
        written += static_cast<long>(size);
    }
    return real(descriptor, data, size);
}

extern "C" int fsync(int descriptor) {
    static const auto real = reinterpret_cast<int (*)(int)>(dlsym(RTLD_NEXT, "fsync"));
    Fault fault;
    if (fault_of("fsync", descriptor, fault)) {
        if (fault.error == 0) {
            usleep(static_cast<useconds_t>(fault.bytes));
            return real(descriptor);
        }
        errno = fault.error;
        return -1;
    }
    return real(descriptor);
}
