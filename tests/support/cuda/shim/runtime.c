// Answers of a CUDA runtime and driver with one device on which nothing runs.
//
// These are the calls that torch makes for fake tensors on "cuda": is there a device, which one is current, make it
// current, is a stream captured. Few tensors are real, constants of one number; they lie in the memory of the host. The
// functions come before those of libcudart when the loader is told to preload this library.

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

typedef int Status;
enum { SUCCESS = 0 };

Status cudaGetDeviceCount(int *count) { *count = 1; return SUCCESS; }
Status cudaGetDevice(int *device) { *device = 0; return SUCCESS; }
Status cudaSetDevice(int device) { return SUCCESS; }
Status cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = 0; return SUCCESS; }
Status cudaDeviceSynchronize(void) { return SUCCESS; }
Status cudaDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
Status cudaGetLastError(void) { return SUCCESS; }
Status cudaPeekAtLastError(void) { return SUCCESS; }

Status cudaMemGetInfo(size_t *free, size_t *total) { *free = *total = (size_t)80 << 30; return SUCCESS; }

Status cudaMalloc(void **memory, size_t size) { *memory = aligned_alloc(512, (size + 511) / 512 * 512); return SUCCESS; }
Status cudaFree(void *memory) { free(memory); return SUCCESS; }
Status cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
    memcpy(to, from, size);
    return SUCCESS;
}

Status cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    static size_t made = 0;
    *stream = (void *)++made;
    return SUCCESS;
}
Status cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return SUCCESS; }
Status cudaStreamIsCapturing(void *stream, int *status) { *status = 0; return SUCCESS; }
Status cudaStreamSynchronize(void *stream) { return SUCCESS; }
Status cudaThreadExchangeStreamCaptureMode(int *mode) { return SUCCESS; }

// The driver's, which torch looks up in libcuda.so.1.
Status cuInit(unsigned flags) { return SUCCESS; }
Status cuDeviceGetCount(int *count) { *count = 1; return SUCCESS; }
Status cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 0; return SUCCESS; }
