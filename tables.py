"""Tables in files -> chunks of rows, never in memory as a whole."""

from __future__ import annotations

import collections
import gzip
import itertools
import os
import warnings
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from disk import StoreError



def table(file, dtype):
    """Chunks of rows of a .csv or .csv.gz file; a first line that is no number names the columns."""
    with gzip.open(file) if str(file).endswith(".gz") else open(file, "rb") as table:
        try:
            float(table.readline().partition(b",")[0])
            table.seek(0)
        except ValueError:
            pass
        yield from csv_chunks(table, dtype)


def spool_csv(target, file, dtype) -> np.memmap:
    """A table as a temporary array on disk, so that it never has to fit into memory."""
    chunks = table(file, dtype)
    first = next(chunks, None)
    if first is None:
        raise StoreError(f"{file} is empty")
    return spool(target, (None, first.shape[1]), dtype, itertools.chain([first], chunks))


def csv_chunks(file, dtype):
    """Yield [r, columns] arrays from a table of numbers, some megabytes of text at a time."""
    rest = b""
    while data := _read(file, 1 << 24):
        text, _, rest = (rest + data).rpartition(b"\n")
        yield from _parse_csv(file, text, dtype)
    yield from _parse_csv(file, rest, dtype)


def _parse_csv(file, text, dtype):
    text = text.strip()
    if text:
        columns = text.partition(b"\n")[0].count(b",") + 1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                yield np.fromstring(text.replace(b"\n", b","), dtype, sep=",").reshape(-1, columns)
        except (ValueError, DeprecationWarning) as error:
            raise StoreError(f"{file.name} is no table of {columns} columns of {np.dtype(dtype)}: {error}") from error


def npy_chunks(file, name):
    """(shape, dtype, chunks of rows) of an array in an .npz file; a row of more than 2^22 numbers comes in pieces."""
    data = zipfile.ZipFile(file).open(f"{name}.npy")
    read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    shape, fortran_order, dtype = read_header[np.lib.format.read_magic(data)](data)
    if fortran_order or len(shape) != 2:
        raise StoreError(f"array {name} in {file.name} is {list(shape)}: two dimensions in C order are needed")
    width = shape[1] if shape[1] <= 1 << 22 else 1

    def chunks():
        left, step = shape[0] * shape[1], (1 << 22) // width * width
        while left:
            count = min(step, left)
            raw = _read(data, count * dtype.itemsize)
            if len(raw) < count * dtype.itemsize:
                raise StoreError(f"array {name} in {file.name} ends early; remove the archive to download it again")
            yield np.frombuffer(raw, dtype).reshape(-1, width)
            left -= count

    return shape, dtype, chunks()


def _read(file, size) -> bytes:
    try:
        return file.read(size)
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise StoreError(f"{file.name} is damaged: {error}; remove its archive to have it downloaded again") from error


def spool(file, shape, dtype, chunks) -> np.memmap:
    """Put chunks into a temporary file, for an array that is read several times and does not fit into memory."""
    with open(file, "wb") as out:
        out.writelines(np.ascontiguousarray(chunk, dtype).reshape(-1).data for chunk in chunks)
    if shape[0] is None:
        shape = (file.stat().st_size // (shape[1] * np.dtype(dtype).itemsize), shape[1])
    if file.stat().st_size != shape[0] * shape[1] * np.dtype(dtype).itemsize:
        raise StoreError(f"the edge list has {file.stat().st_size} bytes, which is not {list(shape)} numbers; remove "
                         "its archive to have it downloaded again")
    return np.memmap(file, dtype, "r", shape=tuple(shape))


def entry(data, file, *names, **default):
    """The first of several entries that is there."""
    for name in names:
        if name in data:
            return data[name]
    if default:
        return default["default"]
    raise StoreError(f"{file} has no entry {' or '.join(names)}; its entries are {', '.join(data)}")


def ahead(function, stop, step):
    """function(0), function(step), ... in order, computed a little ahead on threads (numpy releases the GIL)."""
    threads = min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool:
        pending = collections.deque()
        for first in range(0, stop, step):
            pending.append(pool.submit(function, first))
            if len(pending) > threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
