"""--mode pinned-cuda: arrays in host memory, one copy for all processes of a machine, which GPUs read in place (UVA).

    indptr, indices, labels, features = share([indptr, indices, labels, features])
    arrays = place(indptr, indices, labels, features, "pinned-cuda", device="cuda")    # of features.py

To copy this file, also take features.py and extras/__init__.py.
"""

import math
import mmap
import os
import weakref

import torch

from features import copy_rows

PIECE_BYTES = 1 << 30  # host memory registered per call: a single call cannot register very much


def views(arrays, device, spare=0):
    """Map arrays [indptr, indices, ...] for a GPU, see `place` of features.py -> tuple of CUDA tensors."""
    indptr, indices, *_ = arrays
    fits = indptr.nbytes <= spare, indptr.nbytes + indices.nbytes <= spare
    graph = (a.to(device) if fit else gpu_view(a, device) for a, fit in zip(arrays, fits))
    return *graph, *(gpu_view(a, device) for a in arrays[2:])


def share(arrays, *, leads=True, total=lambda *numbers: numbers):
    """Copy arrays into host memory shared by all processes of this machine: one copy, made by one of them.

    The kernel frees it when the last process that maps it has ended, even by a crash. Linux only.

    Args:
        arrays: list of host tensors, or features; the same shapes and dtypes in every process.
        leads: True in the one process that makes the copy.
        total: with several processes, an all-reduce: a function that sums numbers over the processes of this machine
            and returns the sums in each (`Ranks.sum` of ddp.py if there is one machine).

    Returns:
        List of tensors in shared memory: all processes see each other's writes.

    Raises:
        OSError: if the memory cannot be mapped, or the leading process belongs to another user.
    """
    views = []
    for array in (getattr(a, "tensor", a) for a in arrays):
        size = math.prod(array.shape) * array.dtype.itemsize
        mine = 0, 0
        if leads:  # anonymous: leaves nothing behind, and a container's small /dev/shm is no limit
            mine = os.getpid(), os.memfd_create("ringblock")
            os.ftruncate(mine[1], max(size, 1))
        leader, handle = (int(n) for n in total(*mine))
        handle = handle if leads else os.open(f"/proc/{leader}/fd/{handle}", os.O_RDWR)
        memory = torch.frombuffer(mmap.mmap(handle, max(size, 1)), dtype=torch.uint8)
        total(0)  # barrier: the leader keeps its handle open until all have opened it
        os.close(handle)
        views.append(memory[:size].view(array.dtype).view(array.shape))
        if leads:
            copy_rows(array, views[-1])
    total(0)  # barrier: the copies are complete
    return views


def gpu_view(host, device):
    """Map host memory for a GPU to read in place (UVA) -> CUDA tensor that keeps the memory; freeing it unregisters it.

    Args:
        host: tensor from `share`: its memory starts on a page and has its last page to itself.
        device: the GPU.

    Raises:
        ValueError: for memory that does not start on a page.
        RuntimeError: if CUDA refuses to register or to address the memory; nothing stays registered.
    """
    if not host.numel():
        return host.to(device)
    if (first := host.data_ptr()) % mmap.PAGESIZE:
        raise ValueError(f"host memory at {first:#x} does not start on a page: share() it first")
    end = first + -(-host.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    cudart = torch.cuda.cudart()
    array = _HostArray(host)
    registered = []

    def unregister():  # before the memory is unmapped, else registering a later mapping of its address would fail
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # kernels may still be reading it
            for start in registered:
                cudart.cudaHostUnregister(start)

    release = weakref.finalize(array, unregister)
    release.atexit = False  # process exit unregisters everything
    try:
        with torch.cuda.device(device):  # the current device owns the registration
            for start in range(first, end, PIECE_BYTES):
                size = min(PIECE_BYTES, end - start)
                if code := int(cudart.cudaHostRegister(start, size, 2)):  # 2: mapped for the GPU
                    why = cudart.cudaGetErrorString(cudart.cudaError(code))
                    raise RuntimeError(
                        f"cudaHostRegister of {size:,} bytes at {start:#x} failed: "
                        f"CUDA error {code} ({why}); use --mode cpu-cuda"
                    )
                registered.append(start)
            view = torch.as_tensor(array, device=device).view(host.dtype)
        if view.data_ptr() != first:
            raise RuntimeError("this GPU cannot read host memory in place; use --mode cpu-cuda")
    except RuntimeError:
        release()
        raise
    return view


class _HostArray:
    """Host tensor with a __cuda_array_interface__ for torch.as_tensor; the CUDA tensor made of it keeps it alive."""

    def __init__(self, host):
        self.host = host
        # numpy has no bfloat16: declare int16
        array = (host.view(torch.int16) if host.dtype == torch.bfloat16 else host).numpy()
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (host.data_ptr(), False),  # False: not read-only, which torch would refuse
            "version": 3,
        }
