"""Settings made before torch is imported, and glibc's malloc: how much memory it keeps, when it returns it.

Nothing happens on import. `before_torch` runs before torch is imported, so this file imports only the standard library.
"""

import ctypes
import gc
import os
from contextlib import suppress
from pathlib import Path


def before_torch():
    """Set environment variables that torch and oneDNN read, unless the user has; spawned ranks inherit them."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    with suppress(OSError):
        if not {*names} & set(os.environ):
            ctypes.CDLL("libnvidia-ml.so.1")  # for expandable segments: torch 2.13 crashes without
            os.environ.update(dict.fromkeys(names, "expandable_segments:True"))
    # the profiler's library would print a line for each start and stop of a --profile that is fine
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    # do not cache oneDNN kernels compiled for one batch size, see product() in native/layers.py; the second cannot be 0
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "0")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "1")


def glibc(name):
    """Return a function of the C library, None where it has none of the name."""
    return getattr(ctypes.CDLL(None), name, None)


def keep_freed_memory():
    """Make glibc reuse freed memory instead of returning it: fresh large tensors cost more in page faults than in work
    -> whether it worked."""
    mallopt = glibc("mallopt")
    # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD in bytes, see mallopt(3)
    return mallopt is not None and bool(mallopt(-3, 1 << 30) and mallopt(-1, 2**31 - 1))


def announce(ranks, args):
    """With --allocator tuned make malloc keep freed memory, on CPU; --verbose prints the settings."""
    setting = "left alone"
    if args.allocator == "tuned" and ranks.gpus:
        setting = f"CUDA {os.environ.get('PYTORCH_CUDA_ALLOC_CONF', 'default')}"
    elif args.allocator == "tuned":
        setting = "freed memory is kept (mallopt)" if keep_freed_memory() else "no glibc to tune"
    ranks.say(args.verbose and f"memory  allocator: {setting}; --allocator system leaves it alone")


def trim_memory(level):
    """Return freed heap pages to the system once resident memory exceeds `level` bytes (0: first call) by 4 %: batches
    of different sizes fragment the heap more with every epoch -> the level to pass to the next call."""
    trim = glibc("malloc_trim")
    if trim is None:
        return 0
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    if level and resident > 1.04 * level:
        trim(0)
    return level or resident


def release_memory():
    """Release what an ended run of this process holds on a GPU."""
    import torch

    gc.collect()  # a GPU sampler and its frames hold each other, and with them the graph
    # or the next run counts as used what torch keeps, for cuBLAS 33 MiB a stream
    with suppress(AttributeError):  # torch's CPU build
        torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
