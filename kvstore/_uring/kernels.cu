/* The few kernels of the CUDA device. Compiled to PTX for compute capability 7.5 and kept as text
   in kernels.ptx.h (scripts in docs/gpu.md, "Kernels"), so that neither a build nor a run needs a
   CUDA compiler: the driver translates the text once at start-up. */

struct kvs_scatter_args {
    unsigned long long staging;    /* pages one after the other, page_bytes apart */
    unsigned long long pieces;     /* device array of piece_count x {base, stride, bytes, offset} */
    unsigned long long page_bytes;
    unsigned int to_pool;
    unsigned int unused;
    int slots[256];
};

struct kvs_piece {
    unsigned long long base, stride, bytes, offset;
};

/* Block (x, y): piece x of page y. Addresses and sizes are multiples of 16 bytes. */
extern "C" __global__ void kvs_scatter(const __grid_constant__ kvs_scatter_args args)
{
    const kvs_piece piece = ((const kvs_piece *)args.pieces)[blockIdx.x];
    unsigned long long slot = (unsigned long long)args.slots[blockIdx.y];
    uint4 *pool = (uint4 *)(piece.base + slot * piece.stride);
    uint4 *stage = (uint4 *)(args.staging + blockIdx.y * args.page_bytes + piece.offset);
    uint4 *target = args.to_pool ? pool : stage;
    const uint4 *source = args.to_pool ? stage : pool;
    for (unsigned long long i = threadIdx.x; i < piece.bytes / 16; i += blockDim.x) {
        target[i] = source[i];
    }
}

static __device__ unsigned long long clock_ns(void)
{
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

/* Stays on its multiprocessor for a while; for tests and measurements. */
extern "C" __global__ void kvs_spin(unsigned long long duration_ns)
{
    unsigned long long end = clock_ns() + duration_ns;
    while (clock_ns() < end) {
    }
}

/* Word i becomes seed + i * 2654435761. */
extern "C" __global__ void kvs_fill(unsigned int *words, unsigned long long count,
                                    unsigned int seed)
{
    unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
         i < count; i += step) {
        words[i] = seed + (unsigned int)i * 2654435761u;
    }
}

/* Adds to *mismatches the words that kvs_fill(seed) would not have written. */
extern "C" __global__ void kvs_check(const unsigned int *words, unsigned long long count,
                                     unsigned int seed, unsigned long long *mismatches)
{
    unsigned long long bad = 0, step = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
         i < count; i += step) {
        bad += words[i] != seed + (unsigned int)i * 2654435761u;
    }
    if (bad) {
        atomicAdd(mismatches, bad);
    }
}

/* Counts the words that are not all ones, the poison of a failed read (INV-219). */
extern "C" __global__ void kvs_check_poison(const unsigned int *words, unsigned long long count,
                                            unsigned long long *mismatches)
{
    unsigned long long bad = 0, step = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
         i < count; i += step) {
        bad += words[i] != 0xffffffffu;
    }
    if (bad) {
        atomicAdd(mismatches, bad);
    }
}

/* Stores outside everything: makes a context fail on purpose, for the test of sticky errors. */
extern "C" __global__ void kvs_fault(void)
{
    *(volatile unsigned int *)16 = 1;
}
