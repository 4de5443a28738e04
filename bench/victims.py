"""What bench/attack.py attacks: good inputs, stores and checkpoints, and what a case does with one that is harmed."""

import contextlib
import gzip
import hashlib
import json
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import torch

import store
import train
from bench.harm import harm_bytes, harm_store, harm_values, pick
from bench.tools import end_with_the_parent, exit_code
from disk import graphs
from disk.files import StoreError
from disk.graphs import GraphDataset
from store import GraphStore, build_store

# by turns: they differ in what they read before, while and after they are trained
MODELS = "sage", "gcn", "gat --heads 2", "sage --cache 2000 --sample-threads 2"
NODES, WIDTH = 160, 40
PARTS = {"train": "train_idx", "valid": "val_idx", "test": "test_idx"}
TABLES = {"edges": "edge_index", "features": "features", "labels": "labels", **PARTS}
MANY = "graphs", "molecules", "crystals", "append"  # kinds with many small graphs


def make_good(case):
    """Make the inputs, stores and checkpoints that cases take copies of; C code is compiled on the way."""
    base, random = case.base, np.random.default_rng(0)
    graph = {
        "edge_index": random.integers(0, NODES, (2, 600)),
        "features": random.standard_normal((NODES, WIDTH)).astype(np.float32),
        "labels": random.integers(0, 4, NODES),
        **dict(zip(PARTS.values(), np.split(random.permutation(NODES), [64, 96]))),
    }
    np.savez(base / "npz.npz", **graph)
    (base / "csv").mkdir()
    for name, entry in TABLES.items():
        rows = graph[entry].T if name == "edges" else graph[entry]
        np.savetxt(base / "csv" / f"{name}.csv", rows, "%.9g", ",")
    # far more than such a file is large
    np.savez_compressed(base / "bomb.npz", **graph | {"labels": np.zeros(1 << 27)})
    (base / "bomb.csv.gz").write_bytes(gzip.compress(b"1,2\n" * (1 << 24), 1))
    nodes, bonds, cells = (random.integers(a, b, 40) for a, b in ((2, 9), (0, 9), (1, 5)))
    np.savez(
        base / "molecules.npz",
        node_offsets=np.append(0, nodes.cumsum()),
        bond_offsets=np.append(0, bonds.cumsum()),
        atom_feat=random.integers(0, 9, (nodes.sum(), 3), np.uint8),
        bond_feat=random.random((bonds.sum(), 2), np.float32),
        bond_index_local=random.integers([[0], [1]], [[1] * bonds.sum(), nodes.repeat(bonds)]),
        targets=nodes.astype(np.float32),
    )
    np.savez(
        base / "crystals.npz",
        atom_offsets=np.append(0, cells.cumsum()),
        Z=random.integers(1, 80, cells.sum()),
        frac_coords=random.random((cells.sum(), 3)),
        lattice=4 * np.eye(3) + 0.5 * random.random((40, 3, 3)),
        energy=random.standard_normal(40) * cells,
    )
    exit_code(store.main, ["build", base / "molecules.npz", base / "graphs"])
    many = GraphDataset.open(base / "graphs")
    many.append(many.batch(range(10)))
    build_in(base / "mmap", graph, "mmap")
    build_in(base / "lmdb", graph, "lmdb", 2)  # many values
    build_in(base / "changed", graph, "lmdb", 30)
    features = GraphStore.open(base / "changed").features
    for number in range(3):
        features.put_rows(torch.arange(0, NODES, 7), torch.full((23, WIDTH), float(number)))
    for lock in base.glob("*/*-lock"):
        lock.unlink()
    for task, words in {"node": [], "link": ["--scorer", "mlp", "--early-stop", 5]}.items():
        words += ["--checkpoint", base / f"{task}.pt"]
        exit_code(train.main, command(base / "mmap", 1, *words, task=task))


def build_in(path, arrays, backend="lmdb", block_rows=None):
    """Build a store from the arrays of npz.npz."""
    split = {part: arrays[name] for part, name in PARTS.items() if name in arrays}
    kept = {name: arrays[name] for name in ("edge_index", "features", "labels")}
    build_store(path, backend=backend, block_rows=block_rows, split=split, **kept)


def take(case, source, target, harm=None):
    """Copy what is good and, unless nothing is to be wrong, harm it -> the second of what harm(path, random) returned."""
    good, forged = case.base / source, None
    (shutil.copytree if good.is_dir() else shutil.copyfile)(good, target)
    if harm and (random := case.random()):
        what, forged = harm(Path(target), random)
        case.note(what=what, forged=bool(forged))
    return forged


def attack_store(case):
    """Verify, read and train on a store."""
    take(case, case.kind, "store", harm_store)
    case.note(verified=exit_code(store.main, ["verify", "store"]))
    train_on(case, "store")


def attack_input(case):
    """Build a store from files, verify it and train on it. What is read of damaged tables is compared in
    tests/test_tables.py, of arrays here."""
    table = case.kind == "csv"
    source = "csv" if table else f"{case.kind}.npz"

    def harm(path, random):
        file, how = path / f"{pick(list(TABLES), random)}.csv" if table else path, random.random()
        if how < 0.05:
            file.unlink()
            bomb = "bomb.csv.gz" if table else "bomb.npz"
            shutil.copyfile(case.base / bomb, f"{file}.gz" if table else file)
            return f"{bomb} for {file.name}", table
        if not table and how >= 0.5:
            return harm_values(file, random)
        what, forged = harm_bytes(file, random)
        return what, forged or table

    words, written = [source, "built"], take(case, source, source, harm)
    if table:
        edges, *others = (next(Path("csv").glob(f"{name}.csv*")) for name in TABLES)
        pairs = zip([f"--{name}" for name in list(TABLES)[1:]], others)
        words = [edges, "built", *(word for pair in pairs for word in pair)]
    code = exit_code(store.main, ["build", *words])
    case.note(code=code, strewn=["built"] if code and Path("built").exists() else [])
    if code == 0:
        many = case.kind in MANY
        wrong = (graphs if many else store).verify("built")
        case.note(wrong=wrong or (isinstance(written, dict) and not many and differs(written)))
        train_on(case, "built")


def attack_checkpoint(case):
    """Go on from a checkpoint."""
    task = ("node", "link")[case.model() % 2]
    take(case, f"{task}.pt", "bad.pt", harm_values if case.kind == "forged" else harm_bytes)
    words = ["--resume", "bad.pt", "--checkpoint", "out.pt"]
    run_train(case, case.base / "mmap", 2, *words, task=task)


def attack_process(case):
    """Kill a process at work, look at what it left, and bring the work to its end."""
    work, problems, good = WORK[case.kind]
    if good:
        take(case, good, "store")
    if random := case.random():
        after, child = random.uniform(0, 1.1 * case.usual), os.fork()
        if not child:
            end_with_the_parent()
            with contextlib.suppress(BaseException):
                work(case)
            os._exit(0)
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        what = f"killed after {1e3 * after:.0f} of about {1e3 * case.usual:.0f} ms"
        case.note(what=what, wrong=problems())
        for left in Path().rglob(".*"):  # what a killed writer leaves is removed a day later
            os.utime(left, (0, time.time() - 2 * 86400))
    began = time.monotonic()
    work(case)
    case.note(seconds=time.monotonic() - began)
    case.note(strewn=sorted(file.name for file in Path().rglob(".*")))
    if case.kind != "train":
        train_on(case, "store")


def build_it(case):
    """Build a store, unless it is there."""
    if not Path("store").exists():
        build_in("store", dict(np.load(case.base / "npz.npz")))


def put_it(case):
    """Put rows that all hold the next number, up to 40."""
    features = GraphStore.open("store").features
    for number in range(int(features.gather(torch.tensor([0]))[0, 0]) + 1, 41):
        features.put_rows(torch.arange(NODES), torch.full((NODES, WIDTH), float(number)))


def append_it(case):
    """Append graphs, forty at a time, until there are 1,050."""
    many = GraphDataset.open("store")
    while len(many) < 1050:
        many.append(many.batch(range(40)))


def train_it(case):
    """Train, or go on with it, with a checkpoint after every step."""
    words = ["--checkpoint", "out.pt", "--checkpoint-every", 1, "--resume", "auto"]
    run_train(case, case.base / "mmap", 4, *words)


def torn():
    """What is wrong with rows that were being put: those of one moment are the same, at first every seventh."""
    rows = GraphStore.open("store").features.gather(torch.arange(NODES))
    same = rows[::7].eq(2).all() or rows.eq(rows[0, 0]).all()
    return store.verify("store") + ([] if same else ["rows of two moments"])


WORK = {  # what is killed, what is wrong with what it left, and the store that it changes
    "build": (build_it, lambda: store.verify("store") if Path("store").exists() else [], None),
    "put": (put_it, torn, "changed"),
    "append": (append_it, lambda: graphs.verify("store"), "graphs"),
    "train": (train_it, list, None),  # going on from the checkpoint says more
}
ATTACKS = {  # kind: (cases in a round, what one does)
    **dict.fromkeys(("mmap", "lmdb", "changed", "graphs"), (5, attack_store)),
    **dict.fromkeys(("npz", "csv"), (3, attack_input)),
    **dict.fromkeys(("molecules", "crystals"), (2, attack_input)),
    **dict.fromkeys(("damaged", "forged"), (5, attack_checkpoint)),
    **dict.fromkeys(WORK, (1 / 4, attack_process)),
}


def command(dataset, epochs, *words, task="node"):
    """The command line of a small training run -> list of words."""
    layers = ["--num-layers", 2] if task == "graph" else ["--fanout", "3,3"]
    sizes = [*layers, "--batch-size", 32, "--hidden", 8, "--gpus", 0, "--epochs", epochs]
    return ["--task", task, "--dataset", dataset, *sizes, *words]


def train_on(case, dataset):
    """Train on a store, and note what came of it."""
    task, words = "graph", ["--checkpoint", "out.pt"]
    if case.kind not in MANY:
        task, scores = "node", ["--predict", "out.npy", "--predict-what", "scores"]
        words += [*scores, "--model", *MODELS[case.model()].split()]
    run_train(case, dataset, 1, *words, task=task)


def run_train(case, dataset, epochs, *words, task="node"):
    """Run train.py and note its exit code and a digest of what it left: the weights, and the scores of all nodes."""
    code = exit_code(train.main, command(dataset, epochs, *words, task=task))
    case.note(code=code)
    if code == 0 and Path("out.pt").exists():
        weights = torch.load("out.pt", weights_only=True)["model"].values()
        digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in weights))
        digest.update(Path("out.npy").read_bytes() if Path("out.npy").exists() else b"")
        case.note(result=digest.hexdigest())


def differs(arrays):
    """The files of the store `built` that are not those of one from the arrays themselves."""
    try:
        build_in("plain", arrays, "mmap")
    except (StoreError, KeyError, TypeError, ValueError):
        return []
    metas = [json.loads(Path(path, "meta.json").read_text()) for path in ("built", "plain")]
    built, plain = (meta["files"] for meta in metas)
    files = ("indptr.npy", "indices.npy", "labels.npy", "features.npy")
    return [name for name in files if built[name] != plain[name]]
