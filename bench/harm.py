"""Random single faults in a file, a store or a value, which bench/attack.py tries out."""

import hashlib
import json
import os
import re
import struct
import zipfile
import zlib

import numpy as np
import torch

from disk.files import dump_meta

NUMBERS = (0, 1, -1, 2, 159, 160, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, -(2**63))
REALS = (0.5, -1.0, 1e30, 1e308, float("nan"), float("inf"))
WORDS = ("", "x", "../strewn", "/dev/zero", "-1", "float64", "int32", "a\nb", "x" * 5000)
STRANGE = (None, True, [], {}, [[]], *REALS, *NUMBERS, *WORDS)
CELLS = "1e999 1.5 1e3 0x10 1_0 , \r \0 \xff \ufeff \" ' # ; true".split(" ")
DTYPES = "f8 f4 f2 i1 u1 i2 i8 u8 >i8 c8 ? U5 O".split()
IN_PLACE = {  # what is put under a file's name
    "a link to zeros": lambda file: file.symlink_to("/dev/zero"),
    "a link to nothing": lambda file: file.symlink_to("../strewn"),
    "a folder": os.mkdir,
    "a pipe": os.mkfifo,
    "nothing": lambda file: None,
}


class Code:
    """An object that unpickles as a call of os.system."""

    def __reduce__(self):
        return os.system, ("touch strewn",)


def pick(choices, random):
    """Return a random element of a sequence, with its own type."""
    return choices[int(random.integers(len(choices)))]


def other_bytes(data, random):
    """Change one thing in bytes -> (bytes, description)."""
    size = len(data)
    length = int(2 ** random.uniform(0, 12))
    width = pick((2, 4, 8), random)
    at = int(random.integers(max(size, 1)))
    # in a file header, LMDB's second meta page or an archive's directory
    if random.random() < 0.4:
        at = max(0, min(size - 1, pick((0, 4096, size - 1024), random) + at % 200))
    page = at // 4096 * 4096
    other = 4096 * int(random.integers(size // 4096 + 1))
    number = (pick(NUMBERS, random) % 2 ** (8 * width)).to_bytes(width, "little")
    word = at - len(re.search(rb"[^, \n]*$", data[max(0, at - 99) : at])[0])
    after = at + len(re.match(rb"[^, \n]*", data[at : at + 99])[0])
    cell = str(pick((*CELLS, *STRANGE), random))
    cell = cell.encode(pick(("utf-8", "latin-1"), random), "replace")
    ways = {  # (start of the change, bytes written, start of the rest)
        "a bit flipped": (at, bytes(b ^ 1 << width - 1 for b in data[at : at + 1]), at + 1),
        "cut": (pick((at, page), random), b"", size),
        "longer": (size, random.bytes(length), size),
        "other bytes": (at, random.bytes(length), at + length),
        "zeros": (at, bytes(length), at + length),
        "taken out": (at, b"", at + length),
        "a number": (at // width * width, number, at // width * width + width),
        "another page": (page, data[other : other + 4096], page + 4096),
        "a word": (word, cell, after),
    }
    way = pick(list(ways), random)
    start, new, rest = ways[way]
    return data[:start] + new + data[rest:], f"{way} at {start} of {size}"


def other_array(array, random):
    """Return an array or a tensor with one thing wrong."""
    good = np.array(array)
    is_tensor = isinstance(array, torch.Tensor)
    real = good.dtype.kind == "f"
    flat = good.reshape(-1)
    wrong = good.astype("f8" if real else "i8")
    if good.size:
        where = slice(None) if random.random() < 0.2 else int(random.integers(good.size))
        wrong.reshape(-1)[where] = pick(REALS if real else NUMBERS, random)
    with np.errstate(all="ignore"):
        cast = good.astype("?" if is_tensor else pick(DTYPES, random))
    ways = [wrong, wrong, flat, good.T, good[None], flat[:0], flat[1:], flat[:1].sum(), cast]
    if is_tensor:
        ways = [torch.as_tensor(way) for way in ways] + [array.to("meta"), array.tolist(), "x"]
        ways += [array.reshape(-1).to_sparse(), torch.zeros(1).expand(1 << 40)]
    return pick(ways, random)


def leaves(tree, path=""):
    """List every place in nested dicts and lists -> [(container, key, path)]."""
    places = []
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        places.append((tree, key, f"{path}/{key}"))
        places += leaves(value, places[-1][2]) if isinstance(value, dict | list) else []
    return places


def other_value(tree, random):
    """Change or remove one value of nested dicts and lists, in place -> description."""
    container, key, path = pick(leaves(tree), random)
    value = container[key]
    strange = pick(STRANGE, random)
    if isinstance(value, np.ndarray | torch.Tensor):
        strange = other_array(value, random)
    elif type(value) is int and random.random() < 0.5:
        strange = value + pick((-1, 1, 100), random)
    container[key] = strange
    if random.random() < 0.1:
        del container[key]
        strange = "taken out"
    return f"{path[1:200]} is {str(strange)[:60]!r}"


def harm_bytes(file, random):
    """Damage the bytes of a file, or of one member of an archive -> (description, whether checksums are valid)."""
    if file.suffix not in (".npz", ".pt") or random.random() < 0.6:
        data, what = other_bytes(file.read_bytes(), random)
        file.write_bytes(data)
        return f"{file.name}: {what}", False
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = pick(list(members), random)
    members[name], what = other_bytes(members[name], random)
    with zipfile.ZipFile(file, "w", pick((0, zipfile.ZIP_DEFLATED), random)) as archive:
        for member, data in members.items():
            archive.writestr(member, data)
    return f"{name}: {what}", True


def harm_values(file, random):
    """Put a strange array into an .npz file, or a strange value or code into a checkpoint -> (description, content)."""
    is_npz = file.suffix == ".npz"
    state = dict(np.load(file)) if is_npz else torch.load(file, weights_only=True)
    what = other_value(state, random)
    if not is_npz and random.random() < 0.1:
        state = pick([Code(), [state], {"model": Code()}, None], random)
        what = "something else"
    if is_npz:
        np.savez(file, **state)
    else:
        torch.save(state, file)
    return what, state


def harm_store(path, random):
    """Do one damage to a store -> (description, whether its checksums were made valid)."""
    how = random.random()
    file = pick(sorted(path.iterdir()), random)
    if how < 0.65 or how > 0.75 and file.name == "meta.json":  # a checksum guards all its entries
        return harm_bytes(file, random)
    if how < 0.75:
        what = pick(list(IN_PLACE), random)
        file.unlink()
        IN_PLACE[what](file)
        return f"{what} as {file.name}", False
    meta = json.loads((path / "meta.json").read_text())
    entry = meta["files"].get(file.name, {})
    if file.suffix == ".lmdb":
        import lmdb

        head = 16 if file.name == "graphs.lmdb" else 20  # ends with the CRC of the rest
        database = lmdb.open(str(file), subdir=False, lock=False)
        with database, database.begin(write=True) as txn:
            key = int(random.integers(txn.stat()["entries"])).to_bytes(8, "big")
            body, what = other_bytes(txn.get(key)[head:], random)
            crc = struct.pack("<I", zlib.crc32(body)) if random.random() < 0.7 else random.bytes(4)
            txn.put(key, txn.get(key)[: head - 4] + crc + body)
    else:  # keep its header and its size
        data = file.read_bytes()
        body = data[128:]
        new, what = other_bytes(body, random)
        file.write_bytes(data[:128] + new[: len(body)].ljust(len(body), b"\0"))
    if entry.get("sha256"):
        entry["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    (path / "meta.json").write_bytes(dump_meta(meta))
    return f"{file.name}, with checksums that fit: {what}", True
