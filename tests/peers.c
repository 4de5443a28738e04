// A stand-in for libcuda.so.1, as far as extras/peers.py uses it: memory of a GPU is a file in memory, kept while it is mapped.
// What CUDA refuses is an error. BLOCKED="0 2": these two GPUs cannot access each other's memory. FREE: bytes of each GPU.
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
typedef int R;
typedef uint64_t u64;
enum { INVALID = 1, OUT_OF_MEMORY = 2, PAGE = 2 << 20, HANDLE = 1000 };  // a handle: its file + HANDLE
// of this process
static char *first;  // of a range of addresses, one at a time
static u64 reserved, mapped;
static int open_handles;

// p: CUmemAllocationProp, 32 bytes: type, kind of handle, location, device, nothing else
static int bad(const int *p) { return p[0] != 1 || p[1] != 1 || p[2] != 1 || p[4] || p[5] || p[6] || p[7]; }
R cuGetErrorString(R code, const char **text) {
  *text = code == OUT_OF_MEMORY ? "out of memory" : "invalid argument";
  return 0;
}
R cuDeviceCanAccessPeer(int *can, int a, int b) {
  int c = -1, d = -1;
  if (getenv("BLOCKED")) sscanf(getenv("BLOCKED"), "%d %d", &c, &d);
  *can = !((a == c && b == d) || (a == d && b == c));
  return a == b ? INVALID : 0;
}
R cuMemGetAllocationGranularity(size_t *size, const int *p, int option) {
  *size = PAGE;
  return bad(p) ? INVALID : 0;
}
static R keep(u64 *handle, int file) {
  *handle = file + HANDLE;
  open_handles++;
  return file < 0 ? INVALID : 0;
}
R cuMemCreate(u64 *handle, size_t size, const int *p, u64 flags) {
  if (bad(p) || !size || size % PAGE || flags) return INVALID;
  if (getenv("FREE") && size > strtoull(getenv("FREE"), 0, 10)) return OUT_OF_MEMORY;
  int file = memfd_create("gpu", 0);
  return ftruncate(file, size) ? OUT_OF_MEMORY : keep(handle, file);
}
R cuMemExportToShareableHandle(int *out, u64 handle, int type, u64 flags) {
  *out = dup(handle - HANDLE);
  return *out < 0 || type != 1 || flags ? INVALID : 0;
}
R cuMemImportFromShareableHandle(u64 *handle, void *file, int type) {
  return type != 1 ? INVALID : keep(handle, dup((int)(intptr_t)file));
}
R cuMemRelease(u64 handle) {
  open_handles--;
  return close(handle - HANDLE) ? INVALID : 0;
}
R cuMemAddressReserve(u64 *address, size_t size, size_t alignment, u64 wanted, u64 flags) {
  if (first || size % PAGE || alignment || wanted || flags) return INVALID;
  first = mmap(0, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  reserved = size;
  *address = (u64)first;
  return 0;
}
R cuMemMap(u64 address, size_t size, size_t offset, u64 handle, u64 flags) {
  struct stat status;
  char *p = (char *)address;
  if (fstat(handle - HANDLE, &status) || (u64)status.st_size != size || offset || flags) return INVALID;
  if (p != first + mapped || mapped + size > reserved) return INVALID;  // one behind the other
  mapped += size;
  return mmap(p, size, PROT_NONE, MAP_SHARED | MAP_FIXED, handle - HANDLE, 0) == p ? 0 : INVALID;
}
// a: CUmemAccessDesc, 12 bytes: location, device, flags
R cuMemSetAccess(u64 address, size_t size, const int *a, size_t count) {
  if ((char *)address != first || size != mapped || count != 1 || a[0] != 1 || a[2] != 3) return INVALID;
  return mprotect(first, size, PROT_READ | PROT_WRITE) ? INVALID : 0;
}
R cuMemUnmap(u64 address, size_t size) {
  if ((char *)address != first || size != mapped) return INVALID;
  mapped = 0;
  return mmap(first, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED;
}
R cuMemAddressFree(u64 address, size_t size) {
  if ((char *)address != first || size != reserved || mapped) return INVALID;
  first = 0;
  return munmap((void *)address, size) ? INVALID : 0;
}
int left(void) { return open_handles || first || mapped; }
