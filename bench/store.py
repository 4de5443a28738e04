"""python -m bench store: building a graph on disk, training from features on disk. Every figure comes from a separate process."""

import math
import mmap
import tempfile
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from bench import graphbolt, tools
from bench.pages import part_pages
from bench.sampler import LABORS
from bench.step import network, training
from bench.tools import watch
from extras.lookahead import LookaheadCache, settled_tiers
from features import CachedFeatures, expected_visits
from model import self_and_mean
from run.allocator import keep_freed_memory, trim_memory
from sampler import NeighborSampler
from sources import prepare
from store import GraphStore, MmapFeatures, build_store

ROUNDS = 20


class Way(NamedTuple):
    """A way to train from features on disk.

    how: "map" reads through the memory map, "disk" many rows at a time, "lookahead" so behind a look-ahead cache,
    "past" so too and past the page cache. cached: whether there is a cache of --cache-gb; None: one of train.py's
    default size. drawn: key of LABORS.
    """

    how: str
    cached: bool | None = True
    drawn: str = "uniform"


WAYS = {
    "mmap": Way("map", cached=False),
    "mmap, RAM cache": Way("map"),
    "disk, RAM cache": Way("disk"),
    "disk, cache that looks ahead": Way("lookahead"),
    "disk, the same past the page cache": Way("past"),
    "LABOR": Way("lookahead", drawn="LABOR"),
    "LABOR, layer, batch 4": Way("lookahead", drawn="LABOR, layer, batch 4"),
    "disk, cache of train.py's default": Way("lookahead", cached=None),
}


def build_edges(args, folder):
    """Build a store of random edges and their reverses -> figures."""
    num_edges = args.edges
    random = np.random.default_rng(0)
    num_nodes = max(2, num_edges // 25)
    edges = np.memmap(folder / "edges", np.int32, "w+", shape=(2, num_edges))
    for part in np.array_split(edges, -(-num_edges >> 22), 1):
        part[:] = random.integers(0, num_nodes, part.shape, np.int32)
    edges.flush()
    build = partial(
        build_store,
        folder / "built",
        edge_index=edges,
        symmetrize=True,
        features=np.zeros((num_nodes, 1), np.float32),
        labels=np.zeros(num_nodes, np.int64),
        split={"train": [0]},
    )
    figures = watch(build)[1]
    return {"input_edges_per_s": num_edges / figures["seconds"], **figures}


def train_from_disk(args, path, rounds, each, way):
    """Take rounds of `each` training steps in a `Way`, with features that stay on disk -> figures of `take_rounds`."""
    keep_freed_memory()
    store = GraphStore.open(path)
    csc = store.indptr, store.indices
    nodes = store.split["train"]
    array = np.load(store.path / "features.npy", mmap_mode="r")  # on disk even if they would fit
    rows = torch.from_numpy(array)
    table = MmapFeatures(rows, True)
    visits = expected_visits(*csc, nodes, args.fanout, args.batch_size)
    if way.cached is None:
        cache = settled_tiers(MmapFeatures(rows, True, store.path, array.offset), visits).host
    else:
        cache = int(way.cached and args.cache_gb * 1e9)
    if way.how != "map":
        beside = math.inf if way.how == "past" else table.beside + cache
        table = MmapFeatures(rows, True, store.path, array.offset, beside)

    def with_cache():
        if not cache:
            return table
        if way.how in ("lookahead", "past"):
            return LookaheadCache(table, cache, hot=visits)
        return CachedFeatures(table, visits, cache)

    table, made = watch(with_cache)
    trim_memory(1)  # return freed heap pages, as train.py does
    options = {**LABORS[way.drawn], "check": False, "threads": args.threads}
    sampler = NeighborSampler(*csc, args.fanout, **options)
    net = network(args, store, None, 0.5)
    options = {"features": table, "aggregate": self_and_mean, "depth": 2}
    step = training(args, store, sampler, net, nodes, **options)
    array._mmap.madvise(mmap.MADV_DONTNEED)
    figures = tools.take_rounds(step, path, rounds, each)
    return figures | {"peak_anonymous": max(made["peak_anonymous"], figures["peak_anonymous"])}


def part_build(args, folder):
    """Time a build -> figures."""
    figures = tools.elsewhere(build_edges, args, folder)
    return tools.print_table("build", {"random edges": figures})


def part_train(args, folder):
    """Train --batches batches in each way, one way after another, as pages read by one would serve the others
    -> {name: figures}."""
    nodes = max(1000, int(args.features_gb * 1e9) // 1024)
    each = max(1, args.batches // ROUNDS)
    dataset = f"synthetic:nodes={nodes},degree=8,features=256,classes=47"
    path = prepare.prepare(dataset, folder)
    ours = partial(tools.elsewhere, train_from_disk, args, path, ROUNDS, each)
    runs = {name: partial(ours, way) for name, way in WAYS.items()}
    if args.graphbolt:
        theirs = partial(tools.elsewhere, graphbolt.train_from_disk, args, path)
        theirs = partial(theirs, python=args.graphbolt)
        runs["GraphBolt, mmap advised"] = partial(theirs, ROUNDS, each, advised=True)
        runs["GraphBolt, three batches"] = partial(theirs, 1, 3, advised=False)
    figures = {}
    for name, run in runs.items():
        with tools.without_others(name):
            figures[name] = row = run()
            row["rate / mmap"] = row["batches_per_s"] / figures["mmap"]["batches_per_s"]
    return tools.print_table(f"{args.features_gb:g} GB of features", figures)


PARTS = {"build": part_build, "train": part_train, "pages": part_pages}


def bench_store(args):
    """Time a build, and training from disk -> {part: figures}."""
    figures = {}
    Path(args.root).mkdir(parents=True, exist_ok=True)
    for part in tools.chosen_parts(args, PARTS):
        with tempfile.TemporaryDirectory(dir=args.root, prefix="bench-store-") as folder:
            figures[part] = PARTS[part](args, Path(folder).resolve())
    return figures
