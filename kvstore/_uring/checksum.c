/* xxh3-64, from the header of the system package libxxhash-dev, and the slot header.

   Offsets in the header (docs/disk-format.md): the first 192 bytes are the identity, then payload
   checksum (192) and header checksum (200, over bytes 0 to 199), then zeros. All little endian. */
#include "engine.h"

#include <endian.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

/* The distribution's header compiles for the oldest processor; wider registers are worth 3 x here,
   and give the same value. Short inputs do not reach the vector loop. */
uint64_t kvs_xxh3_64(const void *data, uint64_t length) {
#if defined(__x86_64__)
    if (length > 1024) {
        if (__builtin_cpu_supports("avx512f")) return kvs_xxh3_64_avx512(data, length);
        if (__builtin_cpu_supports("avx2")) return kvs_xxh3_64_avx2(data, length);
    }
#endif
    return XXH3_64bits(data, length);
}

enum { PAYLOAD_CHECKSUM_AT = 192, HEADER_CHECKSUM_AT = 200, FIELDS_END = 208 };
_Static_assert((int)KVS_IDENTITY_BYTES == (int)PAYLOAD_CHECKSUM_AT,
               "the checksums follow the identity");

static void put64(uint8_t *at, uint64_t value) {
    value = htole64(value);
    memcpy(at, &value, sizeof value);
}

static uint64_t get64(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return le64toh(value);
}

/* Lays the header down before a write, and zeroes the padding so that no stale memory is stored. */
void kvs_seal(const kvs_submission *request) {
    uint8_t *header = (uint8_t *)(uintptr_t)request->address;
    uint8_t *payload = header + KVS_HEADER_BYTES;
    uint64_t bytes = request->payload_bytes;
    bool checksum = !(request->flags & KVS_SUBMIT_NO_CHECKSUM);
    memset(payload + bytes, 0, -bytes & 4095);
    memcpy(header, request->identity, KVS_IDENTITY_BYTES);
    put64(header + PAYLOAD_CHECKSUM_AT, checksum ? kvs_xxh3_64(payload, bytes) : 0);
    put64(header + HEADER_CHECKSUM_AT, kvs_xxh3_64(header, HEADER_CHECKSUM_AT));
    memset(header + FIELDS_END, 0, KVS_HEADER_BYTES - FIELDS_END);
}

/* 0, or KVS_MISMATCH for a torn, stale or misdirected slot (INV-914). */
int32_t kvs_verify(const kvs_submission *request) {
    const uint8_t *header = (const uint8_t *)(uintptr_t)request->address;
    if (memcmp(header, request->identity, KVS_IDENTITY_BYTES) != 0) return KVS_MISMATCH;
    if (request->flags & KVS_SUBMIT_NO_CHECKSUM) return 0;
    uint64_t of_header = kvs_xxh3_64(header, HEADER_CHECKSUM_AT);
    if (get64(header + HEADER_CHECKSUM_AT) != of_header) return KVS_MISMATCH;
    uint64_t of_payload = kvs_xxh3_64(header + KVS_HEADER_BYTES, request->payload_bytes);
    return get64(header + PAYLOAD_CHECKSUM_AT) == of_payload ? 0 : KVS_MISMATCH;
}

int kvs_abi_version(void) { return KVS_ABI_VERSION; }

uint64_t kvs_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}
