// A plain reader to compare with, as fio's libaio engine is one: `depth` requests in flight, each into its own buffer.
#define _GNU_SOURCE
#include <linux/aio_abi.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

long plain_read(int file, const long *offsets, long n, long bytes, long depth) {  // -> bytes read
  aio_context_t context = 0;
  struct iocb requests[depth], *submitted[depth];
  struct io_event events[depth];
  long idle[depth], num_idle = 0, next = 0, done = 0, total = 0;
  char *buffers;
  if (syscall(SYS_io_setup, depth, &context) || posix_memalign((void **)&buffers, 4096, depth * bytes)) return -1;
  while (num_idle < depth) idle[num_idle] = num_idle, num_idle++;
  while (done < n) {
    long count = 0;
    for (; num_idle && next < n; count++) {
      long slot = idle[--num_idle];
      memset(&requests[slot], 0, sizeof requests[slot]);
      requests[slot].aio_fildes = file;
      requests[slot].aio_lio_opcode = IOCB_CMD_PREAD;
      requests[slot].aio_buf = (unsigned long)(buffers + slot * bytes);
      requests[slot].aio_nbytes = bytes;
      requests[slot].aio_offset = offsets[next++];
      requests[slot].aio_data = slot;
      submitted[count] = &requests[slot];
    }
    if (count && syscall(SYS_io_submit, context, count, submitted) != count) return -1;
    long found = syscall(SYS_io_getevents, context, 1, depth, events, 0);
    for (long i = 0; i < found; i++) {
      idle[num_idle++] = events[i].data;
      total += events[i].res;
    }
    done += found > 0 ? found : 0;
  }
  syscall(SYS_io_destroy, context);
  free(buffers);
  return total;
}
