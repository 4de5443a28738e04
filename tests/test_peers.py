"""Tests: extras/peers.py: one table in the memory of several GPUs, with a stand-in for their driver, tests/peers.c."""

import ctypes
import os
import re
import shutil
import socket
import subprocess
from types import SimpleNamespace

import pytest
import torch

import ddp
from disk.files import StoreError
from extras import peers
from native import build
from tests.common import HERE, _end, _fork


class _Features:
    """Features as a store's, which count the rows that are read."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.read = 0

    def gather(self, ids):
        self.read += len(ids)
        return self.tensor[ids]


@pytest.fixture
def driver(tmp_path):
    """Compile the stand-in -> its path."""
    if not shutil.which("cc"):
        pytest.skip("no C compiler")
    path = tmp_path / "libcuda.so.1"
    source = HERE / "tests/peers.c"
    subprocess.run(["cc", "-Wall", "-shared", "-fPIC", "-o", path, source], check=True)
    return str(path)


def _use(driver):
    """Have a process use the stand-in, whose memory is the host's -> the library."""
    library = ctypes.CDLL(driver)
    build.load_driver = peers.load_driver = lambda: library
    peers.CUDA = 1  # kDLCPU
    torch.cuda.synchronize = lambda gpu: None
    return library


def _open_files():
    return len(os.listdir("/proc/self/fd"))


def _tables(ranks, driver):
    """Check tables of several sizes, one after another: all pages full, parts that hold none of it, rows across parts."""
    library = _use(driver)
    before = _open_files()
    ranks = ranks._replace(gpus=ranks.world)
    for V, F, dtype in (
        (30000, 100, torch.float32),
        (7, 5, torch.bfloat16),
        (1 << 21, 2, torch.int8),
    ):
        whole = torch.randn(V, F, generator=torch.Generator().manual_seed(V)).mul(9).to(dtype)
        features = _Features(whole)
        table = peers.shared_table(features, ranks)
        assert torch.equal(table, whole)
        assert ranks.sum(features.read)[0] <= V + ranks.world  # rows at the ends of parts: by both
        rows = table[V // 2 :]
        del table
        assert library.left() and torch.equal(rows, whole[V // 2 :])  # the memory is still in use
        del rows
        assert not library.left() and _open_files() == before
    empty = peers.shared_table(_Features(torch.empty(0, 4)), ddp.Ranks())
    assert empty.shape == (0, 4)
    return 0


@pytest.mark.parametrize("gpus", [1, 2, 3])
def test_gpus_hold_a_table_together(driver, tmp_path, gpus):
    """In pages, not rows; what one process frees, others may still read; no memory, handle or file is left."""
    _end(_fork(tmp_path / "out", ddp.launch, _tables, gpus, driver))


def _refused(ranks, driver, setting, everywhere):
    """Print what over_gpus refuses where all ranks, or rank 1 alone, have a setting."""
    if everywhere or ranks.rank == 1:
        os.environ.update(setting)
    _use(driver)
    try:
        peers.over_gpus(ranks._replace(gpus=3), _Features(torch.zeros(30000, 100)))
    except StoreError as error:
        print(f"rank {ranks.rank}: {error}\n", end="", flush=True)  # at once
        if everywhere:
            ranks.barrier()
    return 0 if everywhere else 2


def test_gpus_without_access_and_memory_that_is_full_are_named(driver, tmp_path):
    """Where one GPU is full, and the others lose a rank, the advice is not for these."""
    blocked = "GPU 0 cannot access the memory of GPU 2 over NVLink or PCIe"
    full = {"FREE": "1000000"}, "cuMemCreate: CUDA error 2 (out of memory)"
    for setting, said, everywhere in (
        ({"BLOCKED": "0 2"}, blocked, True),
        (*full, True),
        (*full, False),
    ):
        given = 3, driver, setting, everywhere
        process = _fork(tmp_path / f"{setting}{everywhere}", ddp.launch, _refused, *given)
        printed = _end(process, *([0] if everywhere else [1, 2]))
        lines = re.findall(r"rank (\d): --split-features: (.*)", printed)
        ranks = "012" if everywhere else "1"
        assert sorted(rank for rank, _ in lines) == [*ranks], printed
        assert all(line.startswith(said) for _, line in lines), printed


def test_a_handle_that_finds_no_room_among_open_files_is_a_sentence():
    """The system passes the message on without the descriptor. One from a stranger is closed."""
    kind = socket.AF_UNIX, socket.SOCK_DGRAM
    before = _open_files()
    with socket.socket(*kind) as other, socket.socket(*kind) as stranger:
        other.bind("")

        def gather_here(own):
            stranger.connect(own)
            socket.send_fds(stranger, [b"part"], [0])
            other.sendto(b"part", own)
            return [own, other.getsockname()]

        with pytest.raises(OSError, match="Too many open files"):
            peers._exchange(0, SimpleNamespace(gather_here=gather_here))
    assert _open_files() == before
