"""One table in the memory of several GPUs: each GPU holds a part, and all read it as one tensor.

    table = shared_table(features, ranks)     # [V, F], in one process for each GPU

Each process allocates a part in its GPU's memory (cuMemCreate), passes a handle to the others over a Unix socket and maps all
parts, one after another, to one range of addresses (cuMemMap). Kernels read the range like any other memory: what another GPU
holds arrives over NVLink or PCIe. Parts are whole pages of 2 MiB, so a row may begin on one GPU and end on the next.
"""

import ctypes
import errno
import os
import socket
import struct

import torch

from ddp import lost_another
from disk.files import StoreError
from native.build import check_driver, load_driver

CHUNK_BYTES = 1 << 24  # rows copied at a time
TIMEOUT = 60  # seconds to wait for the handle of another process
# constants of cuda.h and dlpack.h
PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
FILE = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
ON_GPU = 1  # CU_MEM_LOCATION_TYPE_DEVICE
READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
RECOMMENDED = 1  # CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
CUDA = 2  # kDLCUDA
BYTES = 1 | 8 << 8 | 1 << 16  # kDLUInt, 8 bits, 1 lane


def shared_table(features, ranks):
    """Copy features into the memory of several GPUs together -> [V, F], in each process a tensor on its own GPU.

    Args:
        features: an object with .shape, .dtype and .gather(ids); each process reads the rows of its part.
        ranks: of a process for each GPU of this machine: .device, .local_rank and .gather_here(value), which gathers a value
            from all of them, by local rank; see `Ranks` of ddp.py.

    Raises:
        RuntimeError: if a GPU cannot access the memory of another, or the driver refuses.
        OSError: if a process cannot reach another, or gets no answer.
    """
    V, F = features.shape
    width = F * features.dtype.itemsize
    if not V * F:
        return torch.empty(V, F, dtype=features.dtype, device=ranks.device)
    starts = _starts(V * width, ranks)
    memory = _tensor(_map(starts, ranks), starts[-1], ranks.device.index)
    table = memory[: V * width].view(features.dtype).view(V, F)
    first, last = starts[ranks.local_rank : ranks.local_rank + 2]  # bytes of this part
    end = min(V, -(-last // width))
    step = max(1, CHUNK_BYTES // width)
    for row in range(first // width, end, step):
        rows = features.gather(torch.arange(row, min(row + step, end)))
        data = rows.view(torch.uint8).flatten()
        begin = row * width
        low = max(begin, first)
        high = min(begin + len(data), last)
        memory[low:high] = data[low - begin : high - begin]
    torch.cuda.synchronize(ranks.device)
    ranks.gather_here(None)  # a barrier: all parts are complete
    return table


def over_gpus(ranks, features):
    """Copy features into the memory of this machine's GPUs together -> tensor [V, F] on each of them."""
    try:
        return shared_table(features, ranks)
    except (OSError, RuntimeError) as error:
        if lost_another(error):
            raise  # that rank says why
        raise StoreError(
            f"--split-features: {error}; --mode pinned-cuda without it keeps them in host memory"
        ) from error


def _starts(size, ranks):
    """Cut `size` bytes into a part of whole pages for each GPU -> [first byte of part 0, ..., end of the last]. RuntimeError
    unless every GPU can access the memory of every other."""
    gpu = ranks.device.index
    gpus = ranks.gather_here(gpu)
    blocked = []
    for peer in sorted({*gpus} - {gpu}):
        access = ctypes.c_int()
        _call("cuDeviceCanAccessPeer", ctypes.byref(access), gpu, peer)
        if not access.value:
            blocked.append(f"GPU {gpu} cannot access the memory of GPU {peer}")
    if blocked := sum(ranks.gather_here(blocked), []):
        raise RuntimeError(f"{blocked[0]} over NVLink or PCIe (nvidia-smi topo -p2p r)")
    page = ctypes.c_size_t()
    _call("cuMemGetAllocationGranularity", ctypes.byref(page), _properties(gpu), RECOMMENDED)
    page = max(ranks.gather_here(page.value))
    pages = max(len(gpus), -(-size // page))
    return [page * (pages * i // len(gpus)) for i in range(len(gpus) + 1)]


def _map(starts, ranks):
    """Allocate this GPU's part and map the parts of all -> address of the first byte."""
    sizes = [b - a for a, b in zip(starts, starts[1:])]
    me = ranks.local_rank
    gpu = ranks.device.index
    own = ctypes.c_uint64()
    exported = ctypes.c_int()
    _call("cuMemCreate", ctypes.byref(own), sizes[me], _properties(gpu), 0)
    _call("cuMemExportToShareableHandle", ctypes.byref(exported), own, FILE, 0)
    address = ctypes.c_uint64()
    _call("cuMemAddressReserve", ctypes.byref(address), starts[-1], 0, 0, 0)
    for i, file in enumerate(_exchange(exported.value, ranks)):
        part = own
        if i != me:
            part = ctypes.c_uint64()
            _call("cuMemImportFromShareableHandle", ctypes.byref(part), file, FILE)
        os.close(file)
        _call("cuMemMap", address.value + starts[i], sizes[i], 0, part, 0)
        _call("cuMemRelease", part)  # the memory is freed when no process maps it any more
    _call("cuMemSetAccess", address, starts[-1], struct.pack("3i", ON_GPU, gpu, READ_WRITE), 1)
    return address.value


def _exchange(file, ranks):
    """Pass a file descriptor to every other process of this machine -> theirs and this one, by local rank."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mailbox:
        mailbox.bind("")  # to an unused name
        mailbox.settimeout(TIMEOUT)
        own = mailbox.getsockname()
        names = ranks.gather_here(own)
        files = {own: file}
        message = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", file))]
        for name in {*names} - {own}:
            # one out, one in: mailboxes are small
            mailbox.sendmsg([b"part"], message, 0, name)
            while True:
                _, received, _, sender = socket.recv_fds(mailbox, 4, 1)
                if sender in names:
                    break
                for stranger in received:  # any process of this machine may write to it
                    os.close(stranger)
            if not received:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            files[sender] = received[0]
        return [files[name] for name in names]


_mapped = {}  # address: what the tensor there needs until it is freed


def _tensor(address, size, gpu):
    """Make a tensor of `size` bytes that are mapped at an address. It is a tensor of this GPU, although the first bytes may be
    another's: DLPack states the device, of __cuda_array_interface__ torch asks the driver. `_unmap` frees them."""
    shape = (ctypes.c_int64 * 2)(size, 1)  # and strides
    at = ctypes.addressof(shape)
    deleter = ctypes.cast(_unmap, ctypes.c_void_p).value
    managed = struct.pack("P3iI2PQ2P", address, CUDA, gpu, 1, BYTES, at, at + 8, 0, 0, deleter)
    managed = ctypes.create_string_buffer(managed)
    _mapped[address] = size, gpu, shape, managed
    make = ctypes.pythonapi.PyCapsule_New
    make.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    make.restype = ctypes.py_object
    return torch.from_dlpack(make(ctypes.addressof(managed), b"dltensor", None))


@ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_uint64))
def _unmap(managed):
    """Unmap a tensor's memory, as its DLManagedTensor's deleter. The others may still have it mapped."""
    address = managed[0]
    size, gpu, *_ = _mapped.pop(address)
    torch.cuda.synchronize(gpu)  # kernels may still read it
    _call("cuMemUnmap", address, size)
    _call("cuMemAddressFree", address, size)


def _properties(gpu):
    """Return a CUmemAllocationProp: memory of a GPU that other processes may map."""
    return struct.pack("4iPQ", PINNED, FILE, ON_GPU, gpu, 0, 0)


def _call(name, *values):
    """Call a function of the driver, with numbers as 64 bits, which are those that it expects or more."""
    values = [ctypes.c_uint64(v) if isinstance(v, int) else v for v in values]
    check_driver(getattr(load_driver(), name)(*values), name)
