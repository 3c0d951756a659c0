/* What watch.c needs of cudacopy.c; not part of what Python sees. */
#ifndef KVS_DEVICES_H
#define KVS_DEVICES_H

#include "uring.h"

/* Once, on the watching thread: context current, capture mode relaxed (T7). */
int kvs_cuda_thread_begin(kvs_cuda *device);
/* 0, or the sticky code of a lost context; never blocks. */
int kvs_cuda_probe_error(kvs_cuda *device);
/* As kvs_cuda_event_query, on the watching thread: no change of context. */
int kvs_cuda_event_poll(kvs_cuda_event *event);
void kvs_cuda_event_retain(kvs_cuda_event *event);
bool kvs_device_code_is_sticky(int code);

#endif
