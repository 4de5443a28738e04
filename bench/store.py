"""python -m bench store: building a graph on disk, training from features on disk. Every figure comes from a separate process."""

import math
import mmap
import statistics
import tempfile
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import torch

from bench import graphbolt, tools
from bench.sampler import LABORS
from bench.step import network, training
from bench.tools import Elsewhere, forget_pages, watch
from disk.lookahead import LookaheadCache
from features import CachedFeatures, expected_visits
from model import self_and_mean
from run.allocator import keep_freed_memory, trim_memory
from sampler import NeighborSampler
from sources import prepare
from store import GraphStore, MmapFeatures, build_store

WAYS = {  # name: (how features are read, whether they have a cache of --cache-gb, key of LABORS)
    "mmap": ("map", False, "uniform"),
    "mmap, RAM cache": ("map", True, "uniform"),
    "disk, RAM cache": ("disk", True, "uniform"),
    "disk, cache that looks ahead": ("lookahead", True, "uniform"),
    "disk, the same past the page cache": ("past", True, "uniform"),
    "LABOR": ("lookahead", True, "LABOR"),
    "LABOR, layer, batch 4": ("lookahead", True, "LABOR, layer, batch 4"),
    "disk, cache of train.py's default": ("lookahead", None, "uniform"),
}
ROUNDS = 20


def build_edges(args, folder):
    """Build a store of random edges and their reverses -> function: its figures."""
    num_edges, random = args.edges, np.random.default_rng(0)
    num_nodes = max(2, num_edges // 25)
    edges = np.memmap(folder / "edges", np.int32, "w+", shape=(2, num_edges))
    for part in np.array_split(edges, -(-num_edges >> 22), 1):
        part[:] = random.integers(0, num_nodes, part.shape, np.int32)
    edges.flush()
    build = partial(
        build_store,
        folder / "built",
        edge_index=edges,
        features=np.zeros((num_nodes, 1), np.float32),
        labels=np.zeros(num_nodes, np.int64),
        split={"train": [0]},
        symmetrize=True,
    )
    figures = watch(build)[1]
    return lambda i: {"input_edges_per_s": num_edges / figures["seconds"], **figures}


def train_from_disk(args, path, each, how, cached, drawn):
    """Prepare rounds of `each` training steps with features that stay on disk -> what `tools.watched` returns.

    how: "map" reads through the memory map, "disk" many rows at a time, "lookahead" so behind a look-ahead cache,
    "past" so too and past the page cache. cached: whether there is a cache; None: one of train.py's default size.
    """
    keep_freed_memory()
    store = GraphStore.open(path)
    csc, nodes = (store.indptr, store.indices), store.split["train"]
    array = np.load(store.path / "features.npy", mmap_mode="r")  # on disk even if they would fit
    rows = torch.from_numpy(array)
    table = MmapFeatures(rows, True)
    cache = table.default_cache() if cached is None else int(cached and args.cache_gb * 1e9)
    if how != "map":
        beside = math.inf if how == "past" else table.beside + cache
        table = MmapFeatures(rows, True, store.path, array.offset, beside)

    def with_cache():
        if not cache:
            return table
        visits = expected_visits(*csc, nodes, args.fanout, args.batch_size)
        if how in ("lookahead", "past"):
            return LookaheadCache(table, cache, None, visits)
        return CachedFeatures(table, visits, cache)

    table, made = watch(with_cache)
    trim_memory(1)  # return freed heap pages, as train.py does
    options = {**LABORS[drawn], "check": False, "threads": args.threads}
    sampler, net = NeighborSampler(*csc, args.fanout, **options), network(args, store, None, 0.5)
    options = {"features": table, "aggregate": self_and_mean, "depth": 2}
    step = training(args, store, sampler, net, nodes, **options)
    array._mmap.madvise(mmap.MADV_DONTNEED)
    forget_pages(path)
    return tools.watched(step, each, made["peak_anonymous"])


def part_build(args, folder):
    """Time a build -> figures."""
    with closing(Elsewhere(build_edges, args, folder)) as process:
        return tools.print_table("build", {"random edges": process(0)})


def part_train(args, folder):
    """Train --batches batches in each way, a twentieth of them per round; ways run one after
    another, as pages read by one would serve the others -> {name: figures}. batches_per_s leaves
    out the first quarter, in which caches fill; "seconds" and "from_disk" are of all."""
    nodes, each = max(1000, int(args.features_gb * 1e9) // 1024), max(1, args.batches // ROUNDS)
    dataset = f"synthetic:nodes={nodes},degree=8,features=256,classes=47"
    path, figures = prepare.prepare(dataset, folder), {}
    ours = partial(Elsewhere, train_from_disk, args, path, each)
    runs = {name: (ROUNDS, partial(ours, *way)) for name, way in WAYS.items()}
    if args.graphbolt:
        theirs = partial(Elsewhere, graphbolt.training_from_disk, args, path, python=args.graphbolt)
        runs["GraphBolt, mmap advised"] = (ROUNDS, partial(theirs, ROUNDS, each, advised=True))
        runs["GraphBolt, three batches"] = (1, partial(theirs, 1, 3, advised=False))
    for name, (count, start) in runs.items():
        with tools.without_others(name), closing(start()) as process:
            rounds = [process(i) for i in range(count)]
            rates = [figure["batches_per_s"] for figure in rounds[count // 4 :]]
            # `mapped` and `last_loss` are of the last round; last_loss is equal for all that draw uniformly
            figures[name] = row = {**rounds[-1], "batches_per_s": statistics.median(rates)}
            row |= {what: sum(f[what] for f in rounds) for what in ("seconds", "from_disk")}
            row["peak_anonymous"] = max(figure["peak_anonymous"] for figure in rounds)
            row["rates"] = rates
            row["rate / mmap"] = row["batches_per_s"] / figures["mmap"]["batches_per_s"]
    return tools.print_table(f"{args.features_gb:g} GB of features", figures)


PARTS = {"build": part_build, "train": part_train}


def bench_store(args):
    """Time a build, and training from disk -> {part: figures}."""
    figures = {}
    Path(args.root).mkdir(parents=True, exist_ok=True)
    for part in tools.chosen_parts(args, PARTS):
        with tempfile.TemporaryDirectory(dir=args.root, prefix="bench-store-") as folder:
            figures[part] = PARTS[part](args, Path(folder).resolve())
    return figures
