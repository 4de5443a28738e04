"""python bench.py store: building a store, training from features on disk, writing and reading many small graphs."""

import functools
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import datasets
from allocator import keep_freed_memory
from bench_tools import OwnProcess, forget_pages, print_table, watch
from bench_training import Ours
from features import CachedFeatures, expected_visits, prefetch
from graphs import GraphDataset, block_diagonal, build_graphs
from store import GraphStore, build_store


def build_edges(folder, num_edges):
    """Build a store of random edges and the reverse of each -> figures."""
    num_nodes, random = max(2, num_edges // 25), np.random.default_rng(0)
    edges = np.memmap(folder / "edges", np.int32, "w+", shape=(2, num_edges))
    for a in range(0, num_edges, 1 << 22):
        b = min(a + (1 << 22), num_edges)
        edges[:, a:b] = random.integers(0, num_nodes, (2, b - a), np.int32)
    edges.flush()
    x, y = np.zeros((num_nodes, 1), np.float32), np.zeros(num_nodes, np.int64)
    with watch() as seen:
        build_store(folder / "built", edge_index=edges, symmetrize=True, features=x, labels=y, split={"train": [0]})
    stored = GraphStore.open(folder / "built").num_edges
    return {"input_edges": num_edges, "stored_edges": stored, "seconds": seen.seconds,
            "input_edges_per_s": num_edges / seen.seconds, "peak_anonymous": seen.peak}  # fmt: skip


def train_from_disk(path, args, cache):
    """Train --batches batches on features that stay on disk, `cache` bytes of them in memory -> figures."""
    keep_freed_memory()
    store = GraphStore.open(path)
    table, nodes = getattr(store.features, "tensor", store.features), store.split["train"]
    if cache:
        visits = expected_visits(store.indptr, store.indices, nodes, args.fanout, args.batch_size)
        table = CachedFeatures(store.features, visits, cache)
    torch.manual_seed(0)
    order = nodes[torch.randperm(len(nodes))].repeat(-(-args.batches * args.batch_size // len(nodes)))
    seeds = [batch.unique() for batch in order.split(args.batch_size)[: args.batches]]
    ours = Ours(store, seeds, args, features=table, slots=3)
    forget_pages(path)
    with watch() as seen:
        for batch in prefetch(ours.load, range(args.batches), depth=2):
            loss = ours.train(batch)
    return {"batches_per_s": args.batches / seen.seconds, "peak_anonymous": seen.peak, "mapped": seen.mapped,
            "major_faults": seen.faults, "loss": loss, "cache_hit_rate": getattr(table, "hit_rate", None)}  # fmt: skip


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
            x, e = random.integers(0, 100, (V, 9), np.uint8), random.integers(0, 5, (2 * V, 3), np.uint8)
            batch = block_diagonal(nodes, edges, ends, x, e, random.random((len(nodes), 1), np.float32))
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
    rate = len(graphs) / seen.seconds
    return {"graphs_per_s": rate, "peak_anonymous": seen.peak, "grown": seen.grown, "mapped": seen.mapped}


def bench_store(args):
    """Build, train from disk, write and read small graphs, each in a process of its own; returns the figures."""
    alone = lambda function, *words: OwnProcess(args.threads, functools.partial, function, *words)()  # noqa: E731
    gb = lambda size: f"{size / 1e9:.2f} GB"  # noqa: E731
    Path(args.root).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.root, prefix="bench-store-") as folder:
        folder = Path(folder)
        built = alone(build_edges, folder, args.edges)
        print(f"build: {built['input_edges']:,} edges -> {built['stored_edges']:,} in {built['seconds']:.1f} s, "
              f"{built['input_edges_per_s'] / 1e6:.1f} M input edges/s, "
              f"at most {gb(built['peak_anonymous'])} anonymous memory")  # fmt: skip
        shutil.rmtree(folder / "built")
        (folder / "edges").unlink()

        nodes, cache = max(1000, int(args.features_gb * 1e9) // 1024), int(args.cache_gb * 1e9)
        trained, sizes = {}, {}
        for backend, ways in (("mmap", {"mmap": 0, "mmap, RAM cache": cache}), ("lmdb", {"LMDB": 0})):
            dataset = f"synthetic:nodes={nodes},degree=8,features=256,classes=47"
            path = datasets.prepare(dataset, folder, backend=backend)  # one at a time: both may not fit on the disk
            sizes[backend] = sum(file.stat().st_size for file in path.iterdir())
            for name, budget in ways.items():
                trained[name] = alone(train_from_disk, path, args, budget)
            shutil.rmtree(path)
        rows = [[name, f"{f['batches_per_s']:.2f}", gb(f["peak_anonymous"]), gb(f["mapped"]), f"{f['major_faults']:,}"]
                for name, f in trained.items()]  # fmt: skip
        title = f"{args.features_gb:g} GB of features"
        print_table(rows, [title, "batches/s", "anonymous", "mapped", "major page faults"])

        graphs = {"write": alone(write_graphs, folder / "many", args.graphs)}
        graphs["read"] = alone(read_graphs, folder / "many")
        for name, f in graphs.items():
            print(f"graphs: {name} {f['graphs_per_s']:,.0f}/s of {args.graphs:,}, anonymous memory at most "
                  f"{gb(f['peak_anonymous'])}, {f['grown'] / 1e6:+.0f} MB from first to last")  # fmt: skip
    return {"build": built, "training": trained, "store_bytes": sizes, "cache_bytes": cache, "graphs": graphs}
