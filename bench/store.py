"""python -m bench store: building a store, reading rows and training from features on disk, writing and reading many
small graphs. What trains is in bench/store_train.py."""

import ctypes
import functools
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from bench.store_train import AHEAD, print_training, train_each
from bench.tools import OwnProcess, forget_pages, interleave, print_table, watch
from disk.files import StoreError, map_npy
from disk.graphs import GraphDataset, block_diagonal, build_graphs
from disk.reader import open_rows
from disk.sort import Rows, ahead
from native import build
from sampler import NeighborSampler
from sources import prepare
from store import SAMPLERS, GraphStore, build_store

# without --parts; "papers" takes half an hour and much disk
PARTS = ("build", "reads", "train", "lmdb", "graphs")
# ogbn-papers100M
PAPERS = dict(nodes=111_059_956, edges=1_615_685_872, features=128, classes=172, train=1_207_179)
GRAPHS = "in memory", "on disk, map that reads ahead", "on disk, where memory is short"


def gb(size):
    """Bytes in words."""
    return f"{size / 1e9:.2f} GB"


def build_edges(folder, num_edges):
    """Build a store of random edges and the reverse of each -> figures."""
    num_nodes, random = max(2, num_edges // 25), np.random.default_rng(0)
    edges = np.memmap(folder / "edges", np.int32, "w+", shape=(2, num_edges))
    for a in range(0, num_edges, 1 << 22):
        b = min(a + (1 << 22), num_edges)
        edges[:, a:b] = random.integers(0, num_nodes, (2, b - a), np.int32)
    edges.flush()
    nodes = {
        "features": np.zeros((num_nodes, 1), np.float32),
        "labels": np.zeros(num_nodes, np.int64),
    }
    with watch() as seen:
        build_store(
            folder / "built", edge_index=edges, symmetrize=True, split={"train": [0]}, **nodes
        )
    figures = {
        "input_edges": num_edges,
        "stored_edges": GraphStore.open(folder / "built").num_edges,
    }
    rate = num_edges / seen.seconds
    return {
        **figures,
        "seconds": seen.seconds,
        "input_edges_per_s": rate,
        "peak_anonymous": seen.peak,
    }


def sample_graph(path, args, where):
    """Milliseconds to sample a batch from a graph in the page cache, or from one of which all is on the disk."""
    graph = GraphStore.open(path)
    indices, threads = graph.indices, args.threads
    if where == GRAPHS[2]:  # what GraphStore does
        file = graph.meta["files"]["indices.npy"]
        indices, threads = map_npy(path, "indices.npy", file, "int32", None, ahead=False), SAMPLERS
    sampler = NeighborSampler(graph.indptr, indices, args.fanout, check=False, threads=threads)
    forget_pages(path)
    graph.indptr.sum(), where == GRAPHS[0] and indices.sum()
    seeds = torch.randint(graph.num_nodes, (args.batch_size,)).unique()
    start = time.perf_counter()
    sampler.sample(seeds, 0)
    return 1e3 * (time.perf_counter() - start)


def part_build(args, folder, alone):
    """Build and sample -> figures."""
    built = alone(build_edges, folder, args.edges)
    said = (
        f"{built['input_edges']:,} edges -> {built['stored_edges']:,} in {built['seconds']:.1f} s"
    )
    rate = f"{built['input_edges_per_s'] / 1e6:.1f} M input edges/s"
    print(f"build: {said}, {rate}, at most {gb(built['peak_anonymous'])} anonymous memory")
    built["sample_ms"] = {}
    for where in GRAPHS:
        times = [alone(sample_graph, folder / "built", args, where) for _ in range(3)]
        built["sample_ms"][where] = statistics.median(times)
    rows = [[where, f"{ms:.0f}"] for where, ms in built["sample_ms"].items()]
    print_table(rows, ["graph", "ms to sample a batch"])
    shutil.rmtree(folder / "built")
    (folder / "edges").unlink()
    return built


def read_rows(folder, args):
    """Rows from random places of a file on disk, beside a plain reader of blocks of their size, in turn -> figures."""
    file, size = folder / "table", int(args.features_gb * 1e9) // 4096 * 4096
    block, random = np.random.default_rng(0).bytes(1 << 24), torch.Generator().manual_seed(0)
    # of random bytes: a file with holes would not be read from the disk
    with open(file, "wb") as out:
        for a in range(0, size, len(block)):
            out.write(block[: size - a])
        os.fsync(out.fileno())
    types = ctypes.c_long, ctypes.c_int, ctypes.c_void_p, *[ctypes.c_long] * 3
    source, flags = (
        Path(__file__).with_name("plain_read.c").read_text(),
        ["-O2", "-fPIC", "-shared"],
    )
    plain = build.load_c("plain_read", source, flags, {"plain_read": types})
    handle, figures = os.open(file, os.O_RDONLY | os.O_DIRECT), {}
    for row_bytes, run in ((400, 1), (1024, 1), (4096, 1), (1024, 8), (1024, 32)):
        rows, count = (size - 4096) // row_bytes, args.reads // run
        span = -(-row_bytes * run // 512) * 512
        starts = lambda end: torch.randint(end, (count,), generator=random)  # noqa: B023, E731
        ids = (starts(rows - run).unsqueeze(1) + torch.arange(run)).flatten()
        out = torch.zeros(count * run, row_bytes, dtype=torch.uint8)
        reader = open_rows(file, 4096, row_bytes, rows)

        def theirs(i):
            offsets = starts((size - span) // 512) * 512  # noqa: B023
            if plain.plain_read(handle, offsets.data_ptr(), count, span, 64) != count * span:  # noqa: B023
                raise StoreError(f"the plain reader could not read {file}")

        runs = {"plain": theirs, "threads": lambda i: reader.read(ids, out)}  # noqa: B023
        times = interleave(runs, args.rounds, warmup=1)
        name = f"{row_bytes} B" if run == 1 else f"{run} x {row_bytes} B side by side"
        figures[name] = {who: count / statistics.median(seconds) for who, seconds in times.items()}
    os.close(handle)
    file.unlink()
    return figures


def part_reads(args, folder, alone):
    """Read rows -> figures."""
    read, rows = alone(read_rows, folder, args), []
    for name, f in read.items():
        cells = [f"{f['plain']:,.0f}", f"{f['threads']:,.0f}", f"{f['threads'] / f['plain']:.2f}"]
        rows.append([name, *cells])
    print_table(rows, ["rows", "plain, reads/s", "threads, reads/s", "threads / plain"])
    return read


class RandomEdges:
    """Edges [2, M] in random order, drawn where they are read: half of them between nodes of the same thousand, the
    others from node V u^3, so that low ids are hubs."""

    dtype, ndim = np.dtype(np.int32), 2

    def __init__(self, num_nodes, num_edges):
        self.num_nodes, self.shape = num_nodes, (2, num_edges)

    def __getitem__(self, key):
        first, last, _ = key[1].indices(self.shape[1])
        random = np.random.Generator(np.random.SFC64([5, first]))
        src, dst = random.integers(0, self.num_nodes, (2, last - first), np.int32)
        far = (random.random(last - first) ** 3 * self.num_nodes).astype(np.int32)
        near = np.minimum(dst // 1000 * 1000 + src % 1000, self.num_nodes - 1)
        return np.stack([np.where(src & 1024, near, far), dst])


def build_papers(path, p):
    """Build a store of the size of ogbn-papers100M from edges in random order and float16 features -> figures."""
    V, random = p["nodes"], np.random.Generator(np.random.SFC64(0))
    labels = random.permutation(np.arange(-(-V // 1000)) % p["classes"]).repeat(1000)[:V]
    # of each class there are 64 rows around a centre
    shapes = (p["classes"], 1, p["features"]), (p["classes"], 64, p["features"])
    table = sum(random.standard_normal(shape, np.float32) for shape in shapes).astype(np.float16)

    def rows(first):
        own = np.random.Generator(np.random.SFC64([6, first]))
        of_class = labels[first : first + (1 << 15)]
        return table[of_class, own.integers(0, 64, len(of_class))]

    edges = RandomEdges(V, p["edges"])
    features = Rows([V, p["features"]], np.float16, ahead(rows, V, 1 << 15))
    split = {"train": np.sort(random.choice(V, p["train"], replace=False))}
    nodes = {"features": features, "labels": labels, "num_classes": p["classes"], "split": split}
    with watch() as seen:
        build_store(
            path, edge_index=edges, source="random, as ogbn-papers100M", progress=True, **nodes
        )
    size, rate = sum(file.stat().st_size for file in path.iterdir()), p["edges"] / seen.seconds
    return {
        "seconds": seen.seconds,
        "edges_per_s": rate,
        "peak_anonymous": seen.peak,
        "bytes": size,
    }


def part_papers(args, folder, alone):
    """Build that store and train --batches batches of 1,024 with fanout 15,10,5 from it -> figures."""
    p = {name: n if n <= 1000 else max(2000, int(n * args.papers)) for name, n in PAPERS.items()}
    needed = 12 * p["edges"] + 2 * p["nodes"] * (p["features"] + 8)
    if (free := shutil.disk_usage(folder).free) < needed:
        raise StoreError(
            f"--parts papers takes {needed / 1e9:.0f} GB of disk, {folder} has {free / 1e9:.0f} GB left"
        )
    args.fanout, args.batch_size, args.graphbolt = [15, 10, 5], 1024, None
    built = alone(build_papers, folder / "papers", p)
    ways = {name: (how, int(args.cache_gb * 1e9)) for name, how in AHEAD.items()}
    training = train_each(folder / "papers", args, ways)
    trained = next(iter(training.values()))
    epoch = -(-p["train"] // args.batch_size) / trained["batches_per_s"]
    size, rate = (
        f"{p['nodes']:,} nodes, {p['edges']:,} edges",
        f"{built['edges_per_s'] / 1e6:.1f} M edges/s",
    )
    memory = f"at most {gb(built['peak_anonymous'])} anonymous memory; {gb(built['bytes'])} on disk"
    print(f"papers: {size} built in {built['seconds']:.0f} s, {rate}, {memory}")
    rate = f"{trained['batches_per_s']:.2f} batches/s, an epoch of {p['train']:,} nodes in {epoch / 3600:.2f} h"
    memory = f"at most {gb(trained['peak_anonymous'])} anonymous and {gb(trained['mapped'])} mapped"
    print(f"papers: {rate}; {memory}")
    print_training(training, f"{gb(built['bytes'])} on disk")
    shutil.rmtree(folder / "papers")
    return {"build": built, "training": training, "epoch_s": epoch, **p}


def part_training(args, part):
    """Train from a store under --root, removed at the end unless it was there before -> figures."""
    nodes, cache = max(1000, int(args.features_gb * 1e9) // 1024), int(args.cache_gb * 1e9)
    ways = {"LMDB": ("map", 0)}
    if part == "train":
        ways = {
            "mmap": ("map", 0),
            "mmap, RAM cache": ("map", cache),
            "disk, RAM cache": ("disk", cache),
        }
        ways |= {name: (how, cache) for name, how in AHEAD.items()}
        ways |= {name: ("lookahead", cache, name) for name in ("LABOR", "LABOR, layer, batch 4")}
        ways["disk, cache of train.py's default"] = ("lookahead", None)
    there = set(Path(args.root).iterdir())
    dataset = f"synthetic:nodes={nodes},degree=8,features=256,classes=47"
    path = prepare.prepare(dataset, args.root, backend="lmdb" if part == "lmdb" else "mmap")
    try:
        return train_each(path, args, ways)
    finally:
        if path not in there:
            shutil.rmtree(path)


def write_graphs(path, count):
    """Write random graphs of about 30 nodes in batches of 4,096 -> figures; making them is not timed."""
    random, making = np.random.default_rng(0), 0.0

    def batches():
        nonlocal making
        for first in range(0, count, 4096):
            start = time.perf_counter()
            nodes = random.integers(20, 41, min(4096, count - first))
            V, edges = nodes.sum(), 2 * nodes
            ends = random.integers(0, np.repeat(nodes, edges), (2, 2 * V))
            x, e = (
                random.integers(0, 100, (V, 9), np.uint8),
                random.integers(0, 5, (2 * V, 3), np.uint8),
            )
            y = random.random((len(nodes), 1), np.float32)
            batch = block_diagonal(nodes, edges, ends, x, e, y)
            making += time.perf_counter() - start
            yield batch

    with watch() as seen:
        build_graphs(path, batches())
    rate = count / (seen.seconds - making)
    return {"graphs": count, "graphs_per_s": rate, "peak_anonymous": seen.peak, "grown": seen.grown}


def read_graphs(path, batch_size=256):
    """Read every graph once, in random order -> figures."""
    graphs = GraphDataset.open(path)
    order = torch.randperm(len(graphs)).split(batch_size)
    for ids in order[:8]:
        graphs.batch(ids)
    with watch() as seen:
        for ids in order:
            graphs.batch(ids)
    figures = {"graphs_per_s": len(graphs) / seen.seconds, "peak_anonymous": seen.peak}
    return figures | {"grown": seen.grown, "mapped": seen.mapped}


def part_graphs(args, folder, alone):
    """Write and read many small graphs -> figures."""
    graphs = {"write": alone(write_graphs, folder / "many", args.graphs)}
    graphs["read"] = alone(read_graphs, folder / "many")
    for name, f in graphs.items():
        memory = f"{gb(f['peak_anonymous'])}, {f['grown'] / 1e6:+.0f} MB from first to last"
        rate = f"{f['graphs_per_s']:,.0f}/s of {args.graphs:,}"
        print(f"graphs: {name} {rate}, anonymous memory at most {memory}")
    return graphs


def bench_store(args):
    """Build, read rows, train from disk, write and read small graphs, each in its own process; returns the figures."""

    def alone(function, *words):
        return OwnProcess(args.threads, functools.partial, function, *words)()

    parts = set(args.parts.split(",")) if args.parts else set(PARTS)
    if unknown := parts - {*PARTS, "papers"}:
        known = f"{','.join(PARTS)},papers"
        raise StoreError(f"--parts {','.join(sorted(unknown))}: choose from {known}")
    Path(args.root).mkdir(parents=True, exist_ok=True)
    figures, trained = {}, {}
    with tempfile.TemporaryDirectory(dir=args.root, prefix="bench-store-") as folder:
        folder = Path(folder)
        for part, run in (("build", part_build), ("reads", part_reads), ("graphs", part_graphs)):
            if part in parts:
                figures[part] = run(args, folder, alone)
        for part in ("train", "lmdb"):  # one at a time: both may not fit on the disk
            trained |= part_training(args, part) if part in parts else {}
        if trained:
            print_training(trained, f"{args.features_gb:g} GB of features")
        if "papers" in parts:
            figures["papers"] = part_papers(args, folder, alone)
    return {**figures, "training": trained, "cache_bytes": int(args.cache_gb * 1e9)}
