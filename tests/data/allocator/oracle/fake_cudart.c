/* A CUDA runtime without a device: it counts bytes, hands out addresses and lets events pass when told to.
 *
 * PyTorch's libc10_cuda.so runs on it unchanged, so the caching allocator in it can be asked what it does.
 * Addresses come in no order, so that the age of a segment and its address break ties differently.
 */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#undef cudaGetDeviceProperties

uint64_t fake_total_bytes = 24ull << 30, fake_other_bytes = 0;
static uint64_t held_bytes = 0, nth = 0;

enum { SLOTS = 16384, MAX_STREAMS = 4096 };
static uint64_t segment_bytes[SLOTS];
static uint64_t recorded[MAX_STREAMS], completed[MAX_STREAMS];
static cudaError_t last_error = cudaSuccess;

static cudaError_t fail(cudaError_t error) { return last_error = error; }
static uint64_t free_bytes(void) { return fake_total_bytes - fake_other_bytes - held_bytes; }

cudaError_t cudaMalloc(void **pointer, size_t size) {
  if (size > free_bytes()) return fail(cudaErrorMemoryAllocation);
  uint64_t slot = nth++ * 7919 % SLOTS;
  segment_bytes[slot] = size;
  held_bytes += size;
  *pointer = (void *)((1ull << 46) + slot * (8ull << 30));
  return cudaSuccess;
}

cudaError_t cudaFree(void *pointer) {
  if (pointer) held_bytes -= segment_bytes[((uint64_t)pointer - (1ull << 46)) / (8ull << 30)];
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
  *free = free_bytes();
  *total = fake_total_bytes;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
  (void)device;
  memset(properties, 0, sizeof *properties);
  properties->totalGlobalMem = fake_total_bytes;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { (void)device; return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { *version = 13000; return cudaSuccess; }
cudaError_t cudaDeviceSynchronize(void) { return cudaSuccess; }
cudaError_t cudaGetLastError(void) { cudaError_t error = last_error; last_error = cudaSuccess; return error; }
const char *cudaGetErrorName(cudaError_t error) { (void)error; return "cudaError"; }
const char *cudaGetErrorString(cudaError_t error) { (void)error; return "error"; }

/* Streams and events: an event passes when its stream was told that all work recorded so far has ended. */
typedef struct { int stream; uint64_t at; } Event;
static int index_of(cudaStream_t stream) { return (int)(((uintptr_t)stream >> 4) % MAX_STREAMS); }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  (void)flags;
  *event = (cudaEvent_t)calloc(1, sizeof(Event));
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) { free(event); return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Event *e = (Event *)event;
  e->stream = index_of(stream);
  e->at = ++recorded[e->stream];
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  Event *e = (Event *)event;
  return completed[e->stream] >= e->at ? cudaSuccess : fail(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Event *e = (Event *)event;
  if (completed[e->stream] < e->at) completed[e->stream] = e->at;
  return cudaSuccess;
}
void fake_finish(cudaStream_t stream) { completed[index_of(stream)] = recorded[index_of(stream)]; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { (void)stream; return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  (void)stream;
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { (void)mode; return cudaSuccess; }

/* PyTorch makes its pool of streams as soon as one is asked for; the programs name their streams themselves. */
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = *greatest = 0; return cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  (void)flags; (void)priority;
  *stream = NULL;
  return cudaSuccess;
}

/* The driver calls behind expandable segments. */
static CUresult create(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *p,
                       unsigned long long flags) {
  (void)p; (void)flags;
  if (size > free_bytes()) return CUDA_ERROR_OUT_OF_MEMORY;
  held_bytes += size;
  *handle = (CUmemGenericAllocationHandle)size;
  return CUDA_SUCCESS;
}
static CUresult release(CUmemGenericAllocationHandle handle) { held_bytes -= (uint64_t)handle; return CUDA_SUCCESS; }
static CUresult reserve(CUdeviceptr *pointer, size_t size, size_t align, CUdeviceptr hint, unsigned long long flags) {
  (void)size; (void)align; (void)hint; (void)flags;
  *pointer = (CUdeviceptr)((1ull << 45) + (nth++ << 38));
  return CUDA_SUCCESS;
}
static CUresult attribute(int *value, CUdevice_attribute a, CUdevice d) { (void)a; (void)d; *value = 0; return CUDA_SUCCESS; }
static CUresult succeed(void) { return CUDA_SUCCESS; }

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *status) {
  (void)version; (void)flags;
  if (status) *status = cudaDriverEntryPointSuccess;
  *function = !strcmp(name, "cuMemCreate") ? (void *)create
            : !strcmp(name, "cuMemRelease") ? (void *)release
            : !strcmp(name, "cuMemAddressReserve") ? (void *)reserve
            : !strcmp(name, "cuDeviceGetAttribute") ? (void *)attribute
                                                    : (void *)succeed;
  return cudaSuccess;
}
