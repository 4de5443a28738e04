// A stand-in for libcuda.so.1, as far as extras/peers.py uses it: memory of a GPU is a file in memory, kept while it is mapped.
// What CUDA refuses is an error. BLOCKED="0 2": these two GPUs cannot access each other's memory. FREE: bytes of each GPU.
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
typedef int R;
typedef uint64_t u64;
enum { INVALID = 1, OUT_OF_MEMORY = 2, PAGE = 2 << 20 };
struct prop {  // CUmemAllocationProp, 32 bytes
  int type, handle, location, device;
  void *windows;
  unsigned char compression, rdma;
  unsigned short usage;
  unsigned char reserved[4];
};
struct access {  // CUmemAccessDesc, 12 bytes
  int location, device, flags;
};
// of this process
static struct {
  char *first;
  u64 size, mapped, readable;
} range;  // one at a time
static int handles[64];  // file + 1 of each that is not released
static int open_handles;

static int bad(const struct prop *p) {
  char zero[8] = {0};
  return p->type != 1 || p->handle != 1 || p->location != 1 || p->windows || memcmp(&p->compression, zero, 8);
}
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
R cuMemGetAllocationGranularity(size_t *size, const struct prop *p, int option) {
  *size = PAGE;
  return bad(p) ? INVALID : 0;
}
static R keep(u64 *handle, int file) {
  for (int i = 0; i < 64; i++)
    if (!handles[i]) {
      handles[i] = file + 1;
      *handle = i + 1000;
      open_handles++;
      return 0;
    }
  return OUT_OF_MEMORY;
}
R cuMemCreate(u64 *handle, size_t size, const struct prop *p, u64 flags) {
  if (bad(p) || !size || size % PAGE || flags) return INVALID;
  if (getenv("FREE") && size > strtoull(getenv("FREE"), 0, 10)) return OUT_OF_MEMORY;
  int file = memfd_create("gpu", 0);
  return ftruncate(file, size) ? OUT_OF_MEMORY : keep(handle, file);
}
static int file_of(u64 handle) { return handle - 1000 < 64 ? handles[handle - 1000] - 1 : -1; }
R cuMemExportToShareableHandle(int *out, u64 handle, int type, u64 flags) {
  if (file_of(handle) < 0 || type != 1 || flags) return INVALID;
  *out = dup(file_of(handle));
  return 0;
}
R cuMemImportFromShareableHandle(u64 *handle, void *file, int type) {
  int own = dup((int)(intptr_t)file);
  return own < 0 || type != 1 ? INVALID : keep(handle, own);
}
R cuMemRelease(u64 handle) {
  int file = file_of(handle);
  if (file < 0) return INVALID;
  handles[handle - 1000] = 0;
  open_handles--;
  return close(file) ? INVALID : 0;
}
R cuMemAddressReserve(u64 *first, size_t size, size_t alignment, u64 address, u64 flags) {
  if (range.first || size % PAGE || alignment || address || flags) return INVALID;
  char *p = mmap(0, size + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  range.first = (char *)(((u64)p + PAGE - 1) & ~(u64)(PAGE - 1));
  range.size = size;
  *first = (u64)range.first;
  return 0;
}
R cuMemMap(u64 address, size_t size, size_t offset, u64 handle, u64 flags) {
  struct stat status;
  char *p = (char *)address;
  if (file_of(handle) < 0 || fstat(file_of(handle), &status) || (u64)status.st_size != size || offset || flags) return INVALID;
  if (p != range.first + range.mapped || range.mapped + size > range.size) return INVALID;  // one behind the other
  range.mapped += size;
  return mmap(p, size, PROT_NONE, MAP_SHARED | MAP_FIXED, file_of(handle), 0) == p ? 0 : INVALID;
}
R cuMemSetAccess(u64 address, size_t size, const struct access *a, size_t count) {
  if ((char *)address != range.first || size != range.mapped || count != 1) return INVALID;
  if (a->location != 1 || a->flags != 3) return INVALID;
  range.readable = size;
  return mprotect(range.first, size, PROT_READ | PROT_WRITE) ? INVALID : 0;
}
R cuMemUnmap(u64 address, size_t size) {
  if ((char *)address != range.first || size != range.mapped) return INVALID;
  range.mapped = 0;
  return mmap(range.first, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED;
}
R cuMemAddressFree(u64 address, size_t size) {
  if ((char *)address != range.first || size != range.size || range.mapped) return INVALID;
  range.first = 0;
  return munmap((void *)address, size) ? INVALID : 0;
}
int left(void) { return open_handles + (range.first != 0) + (range.mapped != 0); }
