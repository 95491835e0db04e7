// Copies the tensors of a message, and then writes the number that says so. `copy_kernel.py` launches it; `make ptx`
// translates it to `copy_kernel.ptx`, which the driver compiles for the GPU it finds.

typedef unsigned long long u64;

const int MOST_PIECES = 32;

struct Piece {
    const char *source;
    char *target;
    u64 nbytes;
};

struct Work {
    unsigned int *number;       // in host memory that both processes see
    unsigned int *blocks_done;  // in device memory; 0 between two launches
    unsigned int value;
    unsigned int count;
    Piece pieces[MOST_PIECES];
};

// Four words on their way at a time: one would leave the memory idle while it is awaited.
__device__ u64 copy_words(const uint4 *__restrict__ source, uint4 *__restrict__ target, u64 words, u64 first, u64 step) {
    u64 at = first;
    for (; at + 3 * step < words; at += 4 * step) {
        uint4 a = source[at], b = source[at + step], c = source[at + 2 * step], d = source[at + 3 * step];
        target[at] = a, target[at + step] = b, target[at + 2 * step] = c, target[at + 3 * step] = d;
    }
    for (; at < words; at += step) target[at] = source[at];
    return words * sizeof(uint4);
}

extern "C" __global__ void copy_and_tell(const __grid_constant__ Work work) {
    const u64 first = blockIdx.x * (u64)blockDim.x + threadIdx.x, step = gridDim.x * (u64)blockDim.x;
    for (unsigned int i = 0; i < work.count; i++) {
        const Piece piece = work.pieces[i];
        u64 copied = 0;
        if (((u64)piece.source | (u64)piece.target) % sizeof(uint4) == 0)
            copied = copy_words((const uint4 *)piece.source, (uint4 *)piece.target, piece.nbytes / 16, first, step);
        for (u64 at = copied + first; at < piece.nbytes; at += step) piece.target[at] = piece.source[at];
    }
    if (work.number == nullptr) return;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();  // what this block has written is seen before it counts as done
        if (atomicInc(work.blocks_done, gridDim.x - 1) == gridDim.x - 1) {  // the last one; leaves 0 again
            __threadfence_system();
            *(volatile unsigned int *)work.number = work.value;
        }
    }
}
