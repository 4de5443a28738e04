"""One thing wrong: with the bytes of a file, a store, an input, a checkpoint. bench_attack.py tries what comes of it.

Everything is drawn from a generator of random numbers that the caller seeds. Every function does one thing to files, or
to a value, and says in words what it was.
"""

import contextlib
import hashlib
import io
import json
import os
import re
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch

from disk import DTYPES, dump_meta
from graphs import GraphDataset
from store import GraphStore, build_store, main

NODES, WIDTH = 160, 40  # of the graph that is attacked
TABLES = {"edges": "edge_index", "features": "features", "labels": "labels", "train": "train_idx", "valid": "val_idx"}
ODD = (0, 1, -1, 2, NODES - 1, NODES, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, -(2**63))
WORDS = ("", "x", "../victim", "/dev/null", "victim", "-1", "float64", "int32", "bfloat16", "inf", "a\nb", "x" * 5000)
NUMBERS = (0.5, -1.0, 1e308, float("nan"), float("inf"))
STRANGE = (None, True, False, [], {}, [[]], [1] * 100, {"": None}, *NUMBERS, *ODD, *WORDS)
CELLS = (
    "nan", "inf", "1e999", "-1", "-2", "7", "160", "99999999999", "9" * 30, "0x10", "1_0", "1.5", "1e3", "", " ", ",",
    ",,", "\n", "\n\n", "\r\n", "\r", "\0", "\xff", "\ufeff", '"', "'", "#", ";", "\t", "x", "true", "9" * 5000,
    "1," * 4000,
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# what is good


def random_graph(random):
    """Arrays of a graph -> dict with the names of an .npz file."""
    parts = np.split(random.permutation(NODES), [64, 96])
    features = random.standard_normal((NODES, WIDTH)).astype(np.float32)
    return dict(edge_index=random.integers(0, NODES, (2, 600)), features=features, labels=random.integers(0, 4, NODES),
                **dict(zip(("train_idx", "val_idx", "test_idx"), parts)))  # fmt: skip


def random_molecules(random, count=40):
    """Arrays of small graphs -> dict with the names of an .npz file."""
    nodes, bonds = random.integers(2, 9, count), random.integers(0, 9, count)
    ends = np.stack([np.zeros(bonds.sum(), np.int64), random.integers(1, np.repeat(nodes, bonds))])
    atoms, each = random.integers(0, 9, (nodes.sum(), 3), np.uint8), random.random((bonds.sum(), 2), np.float32)
    return dict(node_offsets=np.append(0, nodes.cumsum()), bond_offsets=np.append(0, bonds.cumsum()), atom_feat=atoms,
                bond_feat=each, bond_index_local=ends, targets=nodes.astype(np.float32))  # fmt: skip


def random_crystals(random, count=20):
    """Arrays of periodic cells -> dict with the names of an .npz file."""
    atoms = random.integers(1, 5, count)
    return dict(atom_offsets=np.append(0, atoms.cumsum()), Z=random.integers(1, 80, atoms.sum()),
                frac_coords=random.random((atoms.sum(), 3)), lattice=4 * np.eye(3) + 0.5 * random.random((count, 3, 3)),
                energy=random.standard_normal(count) * atoms)  # fmt: skip


def arguments(arrays):
    """Arrays of an .npz file as arguments of `build_store`."""
    split = {"train": arrays["train_idx"], "valid": arrays["val_idx"], "test": arrays["test_idx"]}
    return dict({name: arrays[name] for name in ("edge_index", "features", "labels")}, split=split)


def make_good(base):
    """Make the inputs and the stores that cases take copies of."""
    random = np.random.default_rng(0)
    for kind, make in (("npz", random_graph), ("molecules", random_molecules), ("crystals", random_crystals)):
        np.savez(base / f"{kind}.npz", **make(random))
    arrays = dict(np.load(base / "npz.npz"))
    (base / "csv").mkdir()
    for name, entry in TABLES.items():
        rows = arrays[entry].T if name == "edges" else arrays[entry].reshape(len(arrays[entry]), -1)
        (base / "csv" / f"{name}.csv").write_text("".join(",".join(map(repr, row)) + "\n" for row in rows.tolist()))
    if main(["build", str(base / "molecules.npz"), str(base / "graphs")]):
        raise RuntimeError("the molecules cannot be built")
    many = GraphDataset.open(base / "graphs")
    many.append(many.batch(range(10)))
    for kind, backend, rows in (("mmap", "mmap", None), ("lmdb", "lmdb", 2), ("changed", "lmdb", 30)):
        build_store(base / kind, backend=backend, block_rows=rows, **arguments(arrays))  # many values, or large ones
    features = GraphStore.open(base / "changed").features
    for number in range(3):
        features.put_rows(torch.arange(0, NODES, 7), torch.full((23, WIDTH), float(number)))
    for lock in base.glob("*/*-lock"):
        lock.unlink()


# ---------------------------------------------------------------------------------------------------------------------
# bytes


def other_bytes(data, random):
    """One thing wrong with a file's bytes -> (bytes, what)."""
    size, at = len(data), int(random.integers(max(len(data), 1)))
    if random.random() < 0.4:  # where a head is, that of LMDB's second page as well, or the directory of an archive
        at = min(size - 1, int(random.choice([0, 4096, max(size - 1024, 0)])) + int(random.integers(200)))
    length, bad, choice = int(2 ** random.uniform(0, 12)), bytearray(data), int(random.integers(9))
    if not size or choice == 0:
        return data + random.bytes(length), f"{length} bytes behind its end"
    if choice == 1:
        keep = at // 4096 * 4096 if random.random() < 0.3 else at
        return data[:keep], f"cut to {keep} of {size} bytes"
    if choice <= 4:
        places = {at, *random.integers(0, size, (0, 0, 2)[choice - 2]).tolist()}
        for place in places:
            bad[place] ^= 1 << int(random.integers(8))
        return bytes(bad), f"a bit flipped in each of the bytes {sorted(places)}"
    if choice == 5:
        number, width = int(random.choice(ODD)), int(random.choice([2, 4, 8]))
        first = at // width * width
        bad[first:first + width] = (number % 2 ** (8 * width)).to_bytes(width, "little")
        return bytes(bad[:size]), f"{number} as {width} bytes at {first}"
    if choice == 6:
        bad[at:at + length] = bytes(length) if random.random() < 0.5 else random.bytes(length)
        return bytes(bad[:size]), f"{length} other bytes at {at}"
    if choice == 7:
        del bad[at:at + length]
        return bytes(bad), f"{length} bytes taken out at {at}"
    one, other = (slice(page, page + 4096) for page in (4096 * random.integers(0, size // 4096 + 1, 2)).tolist())
    bad[one], bad[other] = data[other], data[one]
    return bytes(bad), f"pages at {one.start} and {other.start} exchanged"


def rewrite(file, data):
    """Put bytes into a file that no mapping has seen."""
    file.unlink()
    file.write_bytes(data)


def deflated(block, times=1):
    """A deflate stream of block * times, made in no time."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return (packer.compress(block) + packer.flush(zlib.Z_FULL_FLUSH)) * times + b"\3\0"


def bomb(name, head, size):
    """An archive of a member that is `head` and `size` zeros, a whole number of MiB."""
    stream = deflated(head)[:-2] + deflated(bytes(1 << 20), size >> 20)
    fields = struct.pack("<HHHHHIII", 20, 0, 8, 0, 33, 0, len(stream), len(head) + size)
    local = b"PK\3\4" + fields + struct.pack("<HH", len(name), 0) + name.encode() + stream
    central = b"PK\1\2\24\0" + fields + struct.pack("<HHHHHII", len(name), 0, 0, 0, 0, 0, 0) + name.encode()
    return local + central + b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 1, 1, len(central), len(local), 0)


def leaves(tree, path=()):
    """Every place in nested dicts and lists -> [(container, key, path)]."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place for key, value in items for place in [(tree, key, (*path, key)), *leaves(value, (*path, key))]]


def pick(choices, random):
    """One of a sequence, as it is."""
    return choices[int(random.integers(len(choices)))]


def other_value(tree, random):
    """Change one value of nested dicts and lists, take it out, or put one in -> what."""
    container, key, path = pick(leaves(tree), random)
    where, how, value = "/".join(map(str, path))[:200], random.random(), pick(STRANGE, random)
    if how < 0.1:
        del container[key]
        return f"{where} is taken out"
    if how < 0.15 and isinstance(container, dict):
        container["strange"] = value
        return f"{where} has a strange neighbour"
    if type(container[key]) is int and random.random() < 0.5:
        value = container[key] + pick((-1, 1, 100), random)
    elif container[key] in DTYPES and random.random() < 0.5:
        value = pick(DTYPES, random)
    container[key] = value
    return f"{where} is {value!r:.60}"


# ---------------------------------------------------------------------------------------------------------------------
# stores


def harm_store(path, random):
    """Do one thing to a store -> (what, whether its checksums were made to fit)."""
    file, how = Path(pick(sorted(path.iterdir()), random)), random.random()
    if how < 0.7:
        data, what = other_bytes(file.read_bytes(), random)
        rewrite(file, data)
        return f"{file.name}: {what}", False
    if how < 0.78:
        return f"{file.name}: {put_in_its_place(file, random)}", False
    meta = json.loads((path / "meta.json").read_text())
    if how < 0.88:
        what = other_value(meta, random)
        rewrite(path / "meta.json", dump_meta(meta))
        return f"meta.json, with a checksum that fits: {what}", True
    file = pick([file for file in sorted(path.iterdir()) if file.name != "meta.json"], random)
    if file.suffix == ".lmdb":
        what = other_value_in_lmdb(file, random)
    else:
        data = file.read_bytes()
        body, what = other_bytes(data[128:], random)
        rewrite(file, data[:128] + body[:len(data) - 128].ljust(len(data) - 128, b"\0"))
    if meta["files"][file.name].get("sha256"):
        meta["files"][file.name]["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    rewrite(path / "meta.json", dump_meta(meta))
    return f"{file.name}, with checksums that fit: {what}", True


def put_in_its_place(file, random):
    """Put something that is no such file under its name -> what."""
    choice = pick(("nothing", "an empty file", "a folder", "a pipe", "a link to /dev/zero", "a link to itself"), random)
    file.unlink()
    if choice == "an empty file":
        file.touch()
    elif choice == "a folder":
        file.mkdir()
    elif choice == "a pipe":
        os.mkfifo(file)
    elif choice.startswith("a link"):
        file.symlink_to(file if choice == "a link to itself" else "/dev/zero")
    return f"{choice} in its place"


def other_value_in_lmdb(file, random):
    """Change the bytes of one value of an LMDB file and, mostly, make its CRC fit -> what."""
    import lmdb

    head = 16 if file.name == "graphs.lmdb" else 20  # the CRC is the last number of both headers
    environment = lmdb.open(str(file), subdir=False, lock=False)
    with contextlib.closing(environment), environment.begin(write=True) as txn:
        number = int(random.integers(txn.stat()["entries"]))
        key = number.to_bytes(8, "big")
        value = txn.get(key)
        if random.random() < 0.3:
            data, what = other_bytes(value, random)
        else:
            body, what = other_bytes(value[head:], random)
            data = value[:head - 4] + struct.pack("<I", zlib.crc32(body)) + body
        txn.put(key, data)
    return f"value {number}: {what}"


# ---------------------------------------------------------------------------------------------------------------------
# inputs


def harm_npz(file, random):
    """Do one thing to an .npz file -> (what, the arrays it then holds; None where they are not to be had)."""
    how = random.random()
    if how < 0.35:
        data, what = other_bytes(file.read_bytes(), random)
        rewrite(file, data)
        return what, None
    arrays = dict(np.load(file))
    name = pick(sorted(arrays), random)
    entries = {entry: npy_bytes(array) for entry, array in arrays.items()}
    if how < 0.4:
        size = 1 << 30
        rewrite(file, bomb(f"{name}.npy", npy_bytes(np.zeros(0, np.float32), shape=(size // 4,)), size))
        return f"{name}, the only entry, is {size >> 20} MiB of zeros", {}
    if how < 0.5:
        shape = pick([(2**40,), (2**31, 2**31), (2**62,), (-1,), (0, 2**40), (2**28, 1)], random)
        entries[name], arrays, what = npy_bytes(arrays[name], shape=shape), {}, f"declares {shape}"
    elif how < 0.55:
        del entries[name]
        arrays, what = {}, "is taken out"
    else:
        arrays[name], what = other_array(arrays[name], random)
        entries[name] = npy_bytes(arrays[name])
    method = pick((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA), random)
    with zipfile.ZipFile(file, "w", method) as archive:
        for entry, data in entries.items():
            archive.writestr(f"{entry}.npy", data)
    return f"{name} {what}", arrays


def npy_bytes(array, shape=None):
    """An array as the bytes of a .npy file, whose header may declare another shape."""
    data = io.BytesIO()
    np.save(data, array, allow_pickle=True)
    if shape is None:
        return data.getvalue()
    head = io.BytesIO()
    declared = {"descr": array.dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(head, declared)
    return head.getvalue() + data.getvalue()[128:]


def other_array(array, random):
    """One thing wrong with an array -> (array, what)."""
    how = int(random.integers(4))
    if how == 0:
        dtypes = "f8 f4 f2 i1 u1 i2 u8 >i8 >f4 c8 ? U5 S3 O M8[s]".split()
        dtype = pick(dtypes, random)
        with np.errstate(all="ignore"):
            return array.astype(dtype), f"as {dtype}"
    if how == 1:
        name, change = pick([
            ("flat", np.ravel), ("transposed", np.transpose), ("in one more dimension", lambda a: a[None]),
            ("empty", lambda a: a[:0]), ("of no columns", lambda a: a[..., :0]), ("one row short", lambda a: a[:-1]),
            ("one row longer", lambda a: np.concatenate([a, a[-1:]])), ("a scalar", lambda a: a.reshape(-1)[0]),
            ("one column short", lambda a: a[..., :-1]), ("backwards", lambda a: a[::-1]),
            ("in Fortran order", np.asfortranarray), ("all zeros", np.zeros_like),
        ], random)  # fmt: skip
        return np.asarray(change(array)), name
    value = pick((-1, -2, 3, 7, 10**6, 10**7, 10**12, 2**31, 2**40, 2**62, -(2**62)), random)
    if array.dtype.kind == "f":
        value = pick((np.nan, np.inf, -np.inf, 1e30, -1e30, 1e-30, 0.0, 60.0), random)
    wider = array.astype(np.int64) if array.dtype.kind in "iu" else array.copy()
    everywhere, place = random.random() < 0.15, int(random.integers(max(array.size, 1)))
    with np.errstate(all="ignore"):
        wider.reshape(-1)[slice(None) if everywhere else place] = value
    return wider, f"holds {value} {'everywhere' if everywhere else f'at {place}'}"


def harm_csv(folder, random):
    """Do one thing to one of the tables in a folder -> what."""
    file = folder / f"{pick(sorted(TABLES), random)}.csv"
    data, how = file.read_bytes(), random.random()
    if how < 0.1:
        line = pick((b"1,", b"1\n", b"1", b"\n", b"#", b'"', b" "), random)
        size = 1 << (26 if b"\n" in line else 30)
        file.unlink()
        packed = deflated(line * 65536, size // 65536 // len(line))
        file.with_suffix(".csv.gz").write_bytes(b"\x1f\x8b\x08\0\0\0\0\0\0\3" + packed + bytes(8))
        return f"{file.name}.gz is {size >> 20} MiB of {line!r}"
    if how < 0.4:
        bad, what = other_bytes(data, random)
    else:
        cell = pick(CELLS, random).encode("latin-1" if random.random() < 0.5 else "utf-8", "replace")
        cells = [found.span() for found in re.finditer(rb"[^,\n]+", data)]
        a, b = pick(cells, random) if random.random() < 0.8 else cells[0]
        a = b if random.random() < 0.2 else a
        bad, what = data[:a] + cell + data[b:], f"{cell[:20]!r} for {data[a:b]!r} at {a}"
    rewrite(file, bad)
    return f"{file.name}: {what}"


def read_slowly(folder):
    """The tables in a folder as arrays, where every cell is a plain number; else None."""
    arrays = {}
    for name, entry in TABLES.items():
        whole = name != "features"
        cell = re.compile(r"-?[0-9]{1,18}" if whole else r"-?[0-9]+(\.[0-9]+)?(e-?[0-9]+)?")
        try:
            text = (folder / f"{name}.csv").read_text("ascii").rstrip("\n")
        except (UnicodeDecodeError, FileNotFoundError):
            return None
        rows = [line.split(",") for line in text.split("\n")]
        if not all(cell.fullmatch(text) for row in rows for text in row) or len({len(row) for row in rows}) > 1:
            return None
        array = np.array([[(int if whole else float)(text) for text in row] for row in rows])
        arrays[entry] = array.T if name == "edges" else array if name == "features" else array[:, 0]
    return arrays


# ---------------------------------------------------------------------------------------------------------------------
# checkpoints


class _Code:
    """What pickles as a call."""

    def __reduce__(self):
        return os.system, ("touch victim",)


def harm_checkpoint(file, random):
    """Do one thing to the bytes of a checkpoint -> what."""
    data, what = other_bytes(file.read_bytes(), random)
    if random.random() < 0.03:
        data, what = bomb("archive/data.pkl", b"", 1 << 30), "a GiB of zeros"
    rewrite(file, data)
    return what


def forge_checkpoint(file, random):
    """Do one thing to the contents of a checkpoint -> what."""
    state, what = _forged(torch.load(file, weights_only=True), random)
    file.unlink()
    torch.save(state, file)
    return what


def _forged(state, random):
    """The contents of a checkpoint -> (contents with one thing wrong, what)."""
    how, strange = random.random(), pick(STRANGE, random)
    flags = next(value for value in state.values() if isinstance(value, dict) and "hidden" in value)
    if how < 0.05:
        return _Code(), "it is code"
    if how < 0.1:
        return pick([state, [state], "x", 7, None, {}, torch.zeros(3)], random), "it is something else"
    if how < 0.25:
        name = pick("checkpoint log predict timeline profile tensorboard root resume procs".split(), random)
        flags[name] = pick(("victim", "victim.npy", "victim.png", "/dev/null"), random)
        return state, f"its flags have {name} {flags[name]}"
    if how < 0.5:
        name = pick(sorted(flags), random)
        unheard = ("victim.npz", "/dev/zero", "synthetic:nodes=1e15", 7, ["x"])
        flags[name] = pick(unheard, random) if name == "dataset" else strange
        return state, f"its flag {name} is {flags[name]!r:.60}"
    tensors = [place for place in leaves(state) if isinstance(place[0][place[1]], torch.Tensor)]
    if how > 0.8 or not tensors:
        return state, other_value(state, random)
    container, key, path = pick(tensors, random)
    good = container[key]
    name, change = pick([
        ("one number longer", lambda: torch.cat([good.reshape(-1), good.reshape(-1)[:1]])), ("flat", good.flatten),
        ("empty", lambda: good.reshape(-1)[:0]), ("int64", good.long), ("complex", lambda: good.to(torch.complex64)),
        ("bool", good.bool), ("float64", good.double), ("sparse", lambda: good.reshape(-1).to_sparse()),
        ("2^40 numbers on one", lambda: torch.zeros(1).expand(1 << 40)), ("a scalar", lambda: torch.tensor(1.0)),
        ("on the meta device", lambda: good.to("meta")), ("a list", good.tolist), ("a string", lambda: "victim"),
        ("transposed", lambda: good.reshape(good.shape[::-1])), ("nothing", lambda: None),
        ("a parameter", lambda: torch.nn.Parameter(good.float())), ("not finite", lambda: good.float() * float("inf")),
    ], random)  # fmt: skip
    container[key] = change()
    return state, f"{'/'.join(map(str, path))} is {name}"
