// The device: an H100 SXM, as far as torch and Inductor ask. Its struct differs from one CUDA to the next, so this file
// needs the headers of the runtime that torch was built with.

#include <cuda_runtime_api.h>
#include <string.h>

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    memset(found, 0, sizeof *found);
    strcpy(found->name, "NVIDIA H100 80GB HBM3");
    found->major = 9;
    found->minor = 0;
    found->totalGlobalMem = (size_t)80 << 30;
    found->l2CacheSize = 50 << 20;
    found->multiProcessorCount = 132;
    found->warpSize = 32;
    found->maxThreadsPerMultiProcessor = 2048;
    found->maxThreadsPerBlock = 1024;
    found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
    found->maxThreadsDim[2] = 64;
    found->maxGridSize[0] = 2147483647;
    found->maxGridSize[1] = found->maxGridSize[2] = 65535;
    found->regsPerMultiprocessor = found->regsPerBlock = 65536;
    found->sharedMemPerBlock = 48 << 10;
    found->sharedMemPerBlockOptin = 227 << 10;
    found->sharedMemPerMultiprocessor = 228 << 10;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9 : attribute == cudaDevAttrMultiProcessorCount ? 132 : 0;
    return cudaSuccess;
}
