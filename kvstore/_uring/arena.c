/* Arenas: anonymous memory that the kernel, the ring and the device can all pin (INV-138); and the
   blocks of slot files. */
#include "uring.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define HUGE_PAGE ((uint64_t)2 << 20)
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
enum { KVS_MPOL_PREFERRED = 1 };

int kvs_arena_map(uint64_t length, int numa_node, uint64_t *address) {
    assert(length > 0 && length % 4096 == 0);
    uint64_t mapped = length + HUGE_PAGE;
    uint8_t *raw = mmap(NULL, mapped, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) return -errno;
    uint64_t base = ((uint64_t)(uintptr_t)raw + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1);
    uint64_t before = base - (uint64_t)(uintptr_t)raw, after = mapped - before - length;
    if (before) munmap(raw, before);
    if (after) munmap((void *)(uintptr_t)(base + length), after);
    void *start = (void *)(uintptr_t)base;
    madvise(start, length, MADV_HUGEPAGE); /* a wish; the system may not have them */
    if (madvise(start, length, MADV_DONTFORK) != 0) {
        int error = errno;
        munmap(start, length);
        return -error;
    }
    if (numa_node >= 0) {
        unsigned long mask[16] = {0};
        if ((unsigned)numa_node >= sizeof mask * 8) {
            munmap(start, length);
            return -EINVAL;
        }
        mask[(unsigned)numa_node / 64] = 1ul << ((unsigned)numa_node % 64);
        if (syscall(SYS_mbind, start, length, KVS_MPOL_PREFERRED, mask, sizeof mask * 8, 0) != 0 &&
            errno != ENOSYS && errno != EPERM) {
            int error = errno;
            munmap(start, length);
            return -error;
        }
    }
    *address = base;
    return 0;
}

typedef struct {
    pthread_t thread;
    uint64_t address, length;
    int result;
} kvs_prefault_part;

static void *prefault_part(void *argument) {
    kvs_prefault_part *part = argument;
    if (madvise((void *)(uintptr_t)part->address, part->length, MADV_POPULATE_WRITE) == 0)
        return NULL;
    if (errno != EINVAL) { /* EINVAL: kernel before 5.14; ENOMEM and kin are real */
        part->result = -errno;
        return NULL;
    }
    for (uint64_t at = 0; at < part->length; at += 4096)
        atomic_fetch_or_explicit((_Atomic uint8_t *)(uintptr_t)(part->address + at), 0,
                                 memory_order_relaxed);
    return NULL;
}

int kvs_arena_prefault(uint64_t address, uint64_t length, uint32_t threads) {
    assert(threads >= 1 && threads <= 64);
    kvs_prefault_part parts[64] = {0};
    uint64_t share = (length / threads + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1);
    uint32_t count = 0;
    for (uint64_t at = 0; at < length; at += parts[count++].length) {
        parts[count].address = address + at;
        parts[count].length = length - at < share ? length - at : share;
        assert(count < threads);
    }
    uint32_t started = 0;
    while (started + 1 < count &&
           pthread_create(&parts[started].thread, NULL, prefault_part, &parts[started]) == 0)
        started++;
    for (uint32_t i = started; i < count; i++) prefault_part(&parts[i]);
    int result = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (i < started) pthread_join(parts[i].thread, NULL);
        if (parts[i].result && !result) result = parts[i].result;
    }
    return result;
}

int kvs_arena_unmap(uint64_t address, uint64_t length) {
    return munmap((void *)(uintptr_t)address, length) == 0 ? 0 : -errno;
}

static int write_zeros(int fd, uint64_t offset, uint64_t length) {
    static const size_t part = 1u << 20;
    uint8_t *zeros = calloc(1, part);
    if (!zeros) return -ENOMEM;
    int result = 1;
    while (length > 0) {
        size_t bytes = length < part ? (size_t)length : part;
        ssize_t written = pwrite(fd, zeros, bytes, (off_t)offset);
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) {
            result = written < 0 ? -errno : -EIO;
            break;
        }
        offset += (uint64_t)written;
        length -= (uint64_t)written;
    }
    free(zeros);
    return result;
}

int kvs_allocate(int fd, uint64_t offset, uint64_t length) {
    int result;
    do result = fallocate(fd, 0, (off_t)offset, (off_t)length);
    while (result != 0 && errno == EINTR);
    if (result == 0) return 0;
    if (errno != EOPNOTSUPP && errno != ENOSYS) return -errno;
    return write_zeros(fd, offset, length);
}
