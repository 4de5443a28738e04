"""Memory allocators: what is set before torch is imported, what glibc keeps, when it gives memory back.

Nothing happens on import. `before_torch` has to run before torch is imported, so this file imports nothing but the
standard library.
"""

import ctypes
import os
import sys
from pathlib import Path


def before_torch():
    """Set the variables that torch and oneDNN read when they are loaded, unless the user has; spawned ranks inherit
    them.

    CUDA segments that grow need NVIDIA's libnvidia-ml: without it torch 2.13 ends with a segmentation fault.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ) and _loads("libnvidia-ml.so.1"):
        os.environ["PYTORCH_ALLOC_CONF"] = os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    os.environ.setdefault(
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "0"
    )  # products compiled for one batch's size are not kept:
    os.environ.setdefault("LRU_CACHE_CAPACITY", "1")  # see linear() in model.py; 0 is more than this one bears


def _loads(library):
    try:
        return bool(ctypes.CDLL(library))
    except OSError:
        return False


def keep_freed_memory(mmap_threshold=1 << 30, trim_threshold=2**31 - 1):
    """Make glibc keep freed memory up to these many bytes: a fresh large tensor costs more in page faults than in work.

    Returns:
        True where there is a glibc to be told.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and bool(mallopt(-3, mmap_threshold) and mallopt(-1, trim_threshold))


def trim_memory(level):
    """Give free memory back to the system once the process has grown by 4 %: batches of different sizes leave gaps in
    the heap between what stays, and the gaps add up over the epochs.

    Args:
        level: resident bytes to compare with; 0 the first time.

    Returns:
        The level for the next time.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is None:
        return 0
    now = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    if level and now > 1.04 * level:
        trim(0)
    return level or now
