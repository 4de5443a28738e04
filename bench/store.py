"""python -m bench store: building, training from features on disk, many small graphs."""

import itertools
import json
import math
import mmap
import statistics
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

from bench import tools
from bench.sampler import LABORS
from bench.step import make_ring, trainer
from bench.tools import alone, forget_pages, medians, print_table, watch
from disk.cache import LookaheadCache
from disk.files import StoreError, map_npy
from disk.graphs import GraphDataset, block_diagonal, build_graphs
from features import CachedFeatures, expected_visits
from loader import NodeLoader
from run.allocator import keep_freed_memory, trim_memory
from sampler import NeighborSampler
from sources import prepare
from store import SAMPLERS, GraphStore, MmapFeatures, build_store

GRAPHS = "in memory", "on disk, map that reads ahead", "on disk, where memory is short"
AHEAD = {"disk, cache that looks ahead": "lookahead", "disk, the same past the page cache": "past"}
ADVISED = "GraphBolt, mmap advised"
OPTIONS = "fanout", "batch_size", "hidden", "threads"  # of bench/graphbolt.py
ROUNDS = 20


def build_edges(folder, num_edges):
    """Build a store of random edges and the reverse of each -> figures."""
    num_nodes, random = max(2, num_edges // 25), np.random.default_rng(0)
    edges = np.memmap(folder / "edges", np.int32, "w+", shape=(2, num_edges))
    for part in np.array_split(edges, -(-num_edges >> 22), 1):
        part[:] = random.integers(0, num_nodes, part.shape, np.int32)
    edges.flush()
    features, labels = np.zeros((num_nodes, 1), np.float32), np.zeros(num_nodes, np.int64)
    nodes = {"features": features, "labels": labels, "split": {"train": [0]}}
    with watch() as seen:
        build_store(folder / "built", edge_index=edges, symmetrize=True, **nodes)
    rate, stored = num_edges / seen["seconds"], GraphStore.open(folder / "built").num_edges
    return {"input_edges_per_s": rate, "input_edges": num_edges, "stored_edges": stored, **seen}


def sample_graph(path, args, where):
    """Milliseconds to sample a batch from a graph in the page cache, or from one of which all is on the disk."""
    graph = GraphStore.open(path)
    indices, threads = graph.indices, args.threads
    if where == GRAPHS[2]:  # what GraphStore does
        file = graph.meta["files"]["indices.npy"]
        indices, threads = map_npy(path, "indices.npy", file, "int32", None, ahead=False), SAMPLERS
    sampler = NeighborSampler(graph.indptr, indices, args.fanout, check=False, threads=threads)
    forget_pages(path)
    graph.indptr.sum()
    if where == GRAPHS[0]:
        indices.sum()
    seeds = torch.randint(graph.num_nodes, (args.batch_size,)).unique()
    start = time.perf_counter()
    sampler.sample(seeds, 0)
    return 1e3 * (time.perf_counter() - start)


def part_build(args, folder):
    """Build and sample -> figures."""
    built, path = alone(args.threads, build_edges, folder, args.edges), folder / "built"
    print_table("build", {"random edges": built})
    sample = partial(alone, args.threads, sample_graph, path, args)
    times = {where: [sample(where) for _ in range(3)] for where in GRAPHS}
    print_table("graph", {where: {"ms a batch": ms} for where, ms in medians(times).items()})
    return built | {"sample_ms": medians(times)}


def train_from_disk(path, args, how, cache, drawn="uniform"):
    """Train on features that stay on disk, `cache` bytes of them in memory -> figures of each of ROUNDS rounds.

    how: "map" reads through the memory map, "disk" many rows at a time, "lookahead" so behind a cache that looks ahead,
    "past" so too and past the page cache. cache: None for the default of train.py. drawn: by the sampler of
    bench/sampler.py's LABORS with this name.
    """
    keep_freed_memory()
    store = GraphStore.open(path)
    csc, table, nodes = (store.indptr, store.indices), store.features, store.split["train"]
    if isinstance(table, MmapFeatures):  # on disk also where they would fit
        array = np.load(store.path / "features.npy", mmap_mode="r")
        cache = table.default_cache() if cache is None else cache
        beside = math.inf if how == "past" else table.beside + cache
        file = [] if how == "map" else [store.path, array.offset, beside]
        table = MmapFeatures(torch.from_numpy(array), True, *file)
    with watch() as made:
        if cache:
            visits = expected_visits(*csc, nodes, args.fanout, args.batch_size)
            if how in AHEAD.values():
                table = LookaheadCache(table, cache, None, visits)
            else:
                table = CachedFeatures(table, visits, cache)
            del visits
            trim_memory(1)  # what that took, as train.py does
    options = {**LABORS[drawn], "check": False, "threads": args.threads}
    sampler, ring = NeighborSampler(*csc, args.fanout, **options), make_ring(store, table, slots=3)
    options = {"batch_size": args.batch_size, "sampler": sampler, "ring": ring}
    loader, train_on = NodeLoader(store, nodes, args.fanout, **options), trainer(args, store)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))  # epoch after epoch
    if isinstance(store.features, MmapFeatures):
        array._mmap.madvise(mmap.MADV_DONTNEED)
    forget_pages(path)
    step = lambda: train_on(next(batches), ring.first_hop)  # noqa: E731
    rounds = tools.watched_rounds(step, ROUNDS, max(1, args.batches // ROUNDS))
    rounds[0]["peak_anonymous"] = max(made["peak_anonymous"], rounds[0]["peak_anonymous"])
    rounds[-1] |= table.counts() if isinstance(table, LookaheadCache) else {}
    rounds[-1]["cache_hit_rate"] = getattr(table, "hit_rate", None)
    return rounds


def train_graphbolt(path, args, how, rounds, each):
    """The same with GraphBolt in the interpreter `--graphbolt`; how: "documented", or "advised": with a word to the
    kernel not to read ahead of each row."""
    options = {"store": str(Path(path).resolve()), "advised": how == "advised", "rounds": rounds}
    options |= {"each": each} | {name: getattr(args, name) for name in OPTIONS}
    command = [args.graphbolt, "-m", "bench.graphbolt", json.dumps(options)]
    try:
        folder = Path(__file__).parents[1]
        done = subprocess.run(command, cwd=folder, text=True, stdout=subprocess.PIPE, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = f"cannot run bench/graphbolt.py: {error}"
        raise StoreError(f"--graphbolt {args.graphbolt} {said}") from error
    return json.loads(done.stdout.splitlines()[-1])


def train_each(args, folder, backend, ways):
    """Train --batches batches in each of {name: (how, cache)}, a twentieth of them at a time, each in a process of its
    own and one after another, because pages that one of them reads would serve the others -> {name: figures};
    batches_per_s is of all but the first quarter, by which caches are full, "seconds" and "from_disk" of all."""
    each, figures = max(1, args.batches // ROUNDS), {}
    nodes = max(1000, int(args.features_gb * 1e9) // 1024)
    dataset = f"synthetic:nodes={nodes},degree=8,features=256,classes=47"
    path = prepare.prepare(dataset, folder, backend=backend)
    ours = partial(alone, args.threads, train_from_disk, path, args)
    trainings = {name: partial(ours, *way) for name, way in ways.items()}
    if args.graphbolt and len(ways) > 1:
        trainings[ADVISED] = partial(train_graphbolt, path, args, "advised", ROUNDS, each)
    for name, training in trainings.items():
        rounds = training()
        rates = [f["batches_per_s"] for f in rounds[ROUNDS // 4 :]]
        losses = [loss for f in rounds for loss in f["losses"]]
        figures[name] = rounds[-1] | {
            "batches_per_s": statistics.median(rates),
            "rates": rates,
            **{what: sum(f[what] for f in rounds) for what in ("seconds", "from_disk")},
            "peak_anonymous": max(f["peak_anonymous"] for f in rounds),
            "losses": losses,
            "last_loss": losses[-1],
        }
    if ADVISED in trainings:
        (documented,) = train_graphbolt(path, args, "documented", 1, 3)
        rate = documented["batches_per_s"]
        print(f"GraphBolt, without advice: {rate:.4f} batches/s, of three batches")
    return figures


def print_training(trained, what):
    """Print the table, with ratios, and whether the losses are the same bits; curves of losses are dropped."""
    curves, shown = {name: f.pop("losses") for name, f in trained.items()}, {}
    for name, f in trained.items():
        row = shown[name] = dict(f)
        if not name.startswith(("GraphBolt", "LABOR")):
            row["losses"] = "same" if curves[name] == next(iter(curves.values())) else "DIFFER"
        for other in {"mmap, RAM cache", ADVISED} & trained.keys():
            row[f"rate / {other}"] = f["batches_per_s"] / trained[other]["batches_per_s"]
    print_table(what, shown)


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
            x = random.integers(0, 100, (V, 9), np.uint8)
            e = random.integers(0, 5, (2 * V, 3), np.uint8)
            y = random.random((len(nodes), 1), np.float32)
            batch = block_diagonal(nodes, edges, ends, x, e, y)
            making += time.perf_counter() - start
            yield batch

    with watch() as seen:
        build_graphs(path, batches())
    return {"graphs_per_s": count / (seen["seconds"] - making), **seen}


def read_graphs(path, batch_size=256):
    """Read every graph once, in random order -> figures."""
    graphs = GraphDataset.open(path)
    order = torch.randperm(len(graphs)).split(batch_size)
    for ids in order[:8]:
        graphs.batch(ids)
    with watch() as seen:
        for ids in order:
            graphs.batch(ids)
    return {"graphs_per_s": len(graphs) / seen["seconds"], **seen}


def part_graphs(args, folder):
    """Write and read many small graphs -> figures."""
    figures = {"write": alone(args.threads, write_graphs, folder / "many", args.graphs)}
    figures["read"] = alone(args.threads, read_graphs, folder / "many")
    return print_table("graphs", figures)


def part_train(args, folder):
    """Train from features on disk, in every way -> figures."""
    cache = int(args.cache_gb * 1e9)
    ways = {"mmap": ("map", 0), "mmap, RAM cache": ("map", cache)}
    ways |= {name: (how, cache) for name, how in {"disk, RAM cache": "disk", **AHEAD}.items()}
    ways |= {name: ("lookahead", cache, name) for name in ("LABOR", "LABOR, layer, batch 4")}
    ways["disk, cache of train.py's default"] = ("lookahead", None)
    return train_each(args, folder, "mmap", ways)


PARTS = {
    "build": part_build,
    "graphs": part_graphs,
    "train": part_train,
    "lmdb": partial(train_each, backend="lmdb", ways={"LMDB": ("map", 0)}),
}


def bench_store(args):
    """Build, train from disk, write and read small graphs, each in its own process; returns the figures."""
    parts = tools.chosen_parts(args, PARTS)
    Path(args.root).mkdir(parents=True, exist_ok=True)
    figures = {}
    for part in parts:  # what one leaves and the next builds may not both fit on the disk
        with tempfile.TemporaryDirectory(dir=args.root, prefix="bench-store-") as folder:
            figures[part] = PARTS[part](args, Path(folder))
    training = figures.pop("train", {}) | figures.pop("lmdb", {})
    if training:
        print_training(training, f"{args.features_gb:g} GB of features")
    return {**figures, "training": training, "cache_bytes": int(args.cache_gb * 1e9)}
