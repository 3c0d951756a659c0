/* A table that grows in chunks, so that its items never move. */
#ifndef KVS_TABLE_H
#define KVS_TABLE_H

#include "uring.h"

enum { KVS_CHUNK_ITEMS = 128 };

typedef struct {
    uint8_t **chunks;
    size_t item_bytes;
    uint32_t chunk_count;
} kvs_table;

static inline uint32_t kvs_table_capacity(const kvs_table *table) {
    return table->chunk_count * KVS_CHUNK_ITEMS;
}

static inline void *kvs_table_at(const kvs_table *table, uint32_t index) {
    assert(index < kvs_table_capacity(table));
    return table->chunks[index / KVS_CHUNK_ITEMS] + index % KVS_CHUNK_ITEMS * table->item_bytes;
}

/* Makes room for `count` zeroed items; 0 or -ENOMEM, and then nothing is lost. */
static inline int kvs_table_reserve(kvs_table *table, uint32_t count) {
    uint32_t wanted = (count + KVS_CHUNK_ITEMS - 1) / KVS_CHUNK_ITEMS;
    if (wanted <= table->chunk_count) return 0;
    uint8_t **chunks = realloc(table->chunks, wanted * sizeof *chunks);
    if (!chunks) return -ENOMEM;
    table->chunks = chunks;
    while (table->chunk_count < wanted) {
        uint8_t *chunk = calloc(KVS_CHUNK_ITEMS, table->item_bytes);
        if (!chunk) return -ENOMEM;
        chunks[table->chunk_count++] = chunk;
    }
    return 0;
}

static inline void kvs_table_free(kvs_table *table) {
    for (uint32_t i = 0; i < table->chunk_count; i++) free(table->chunks[i]);
    free(table->chunks);
    table->chunks = NULL;
    table->chunk_count = 0;
}

#endif
