"""python -m bench store: building a graph on disk, training from features on disk. Every figure comes from a separate process."""

import math
import mmap
import tempfile
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import ddp
from bench import graphbolt, tools
from bench.pages import part_pages
from bench.sampler import LABORS
from bench.step import network, training
from bench.tools import watch
from extras.lookahead import (
    LookaheadCache,
    Together,
    read_in_order,
    reads_per_second,
    settled_tiers,
)
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
TOGETHER = {  # processes, way: all with the same batches and rows in memory, and the first two with the same planned pages
    "two processes, planned pages": (2, Way("lookahead")),
    "one process, planned pages": (1, Way("lookahead")),
    "two processes, the kernel's pages": (2, Way("disk")),
}
ALONE = ddp.Ranks()


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


def train_from_disk(args, path, rounds, each, way, ranks=ALONE, passes=1, **planned):
    """Take rounds of `each` training steps in a `Way`, with features that stay on disk -> figures of `take_rounds`. planned:
    room and lookahead of a cache, as other figures have them."""
    keep_freed_memory()
    store = GraphStore.open(path)
    csc = store.indptr, store.indices
    nodes = store.split["train"]
    array = np.load(store.path / "features.npy", mmap_mode="r")  # on disk even if they would fit
    rows = torch.from_numpy(array)
    table = MmapFeatures(rows, True)
    visits = expected_visits(*csc, nodes, args.fanout, args.batch_size)
    together = Together(ranks.group_here()) if ranks.world > 1 else None
    if way.cached is None:
        cache = settled_tiers(MmapFeatures(rows, True, store.path, array.offset), visits).host
    else:
        cache = int(way.cached and args.cache_gb * 1e9) * passes
    if way.how != "map":
        beside = math.inf if way.how == "past" else table.beside + cache * ranks.world
        table = MmapFeatures(rows, True, store.path, array.offset, beside)

    def with_cache():
        if not cache:
            return table
        if way.how in ("lookahead", "past"):
            size = cache * ranks.world
            return LookaheadCache(table, size, hot=visits, together=together, **planned)
        return CachedFeatures(table, visits, cache)

    trim_memory(1)  # return freed heap pages, as train.py does
    table, made = watch(with_cache)
    options = {**LABORS[way.drawn], "check": False, "threads": args.threads}
    sampler = NeighborSampler(*csc, args.fanout, **options)
    net = ranks.wrap(network(args, store, None, 0.5))
    options = {"features": table, "aggregate": self_and_mean, "depth": 2}
    share = {"rank": ranks.rank, "world": ranks.world, "accumulate": passes}
    step = training(args, store, sampler, net, nodes, share=share, **options)
    array._mmap.madvise(mmap.MADV_DONTNEED)
    begin = int
    if together and way.how == "disk":  # as planned pages begin
        begin = partial(
            read_in_order, table.features.reader(), table.features.room() // mmap.PAGESIZE
        )
    figures = tools.take_rounds(step, path, rounds, each, begin)
    figures |= {name: getattr(table, name, 0) for name in ("room", "lookahead")}
    return figures | {"peak_anonymous": max(made["peak_anonymous"], figures["peak_anonymous"])}


def part_build(args, folder):
    """Time a build -> figures."""
    figures = tools.elsewhere(build_edges, args, folder)
    return tools.print_table("build", {"random edges": figures})


def on_disk(args, folder):
    """Make a store with --features-gb of features -> its path."""
    nodes = max(1000, int(args.features_gb * 1e9) // 1024)
    return prepare.prepare(f"synthetic:nodes={nodes},degree=8,features=256,classes=47", folder)


def part_train(args, folder):
    """Train --batches batches in each way, one way after another, as pages read by one would serve the others
    -> {name: figures}."""
    each = max(1, args.batches // ROUNDS)
    path = on_disk(args, folder)
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


def rank_of_run(ranks, args, path, each, way, file):
    """Train as one of several processes, or with two batches a step; the first writes the sums of their figures to a file,
    from which one process takes room and lookahead."""
    tools.settle(1)
    planned = {}
    passes = 3 - ranks.world
    if passes > 1:
        before = tools.read_json(file)
        planned = {"room": int(before["room"] / 2), "lookahead": int(before["lookahead"])}
    figures = train_from_disk(args, path, ROUNDS, each * passes, way, ranks, passes, **planned)
    del figures["rates"]
    total = dict(zip(figures, ranks.sum(*figures.values())))
    if ranks.leads:
        tools.write_json(file, total)


def part_procs(args, folder):
    """Train --batches steps of two batches each, by one process or by two, on a store that stays in --root -> {name: figures};
    "disk allows": batches/s if pages from the disk were all that takes time."""
    path = on_disk(args, args.root)
    table = GraphStore.open(path).features
    file = folder / "figures"
    figures = {}
    for name, (procs, way) in TOGETHER.items():
        words = args, path, max(1, args.batches // ROUNDS), way, file
        tools.elsewhere(partial(ddp.launch, rank_of_run, procs), *words)
        total = tools.read_json(file)
        pages = total["read"] / procs / mmap.PAGESIZE
        figures[name] = {
            "batches_per_s": total["batches_per_s"],
            "MB read a batch": pages * mmap.PAGESIZE / 1e6,
            "disk allows": reads_per_second(table) / max(pages, 1e-9),
            "cpu ms a batch": 1e3 * total["cpu"] / procs,
            "GB of planned pages": total["room"] / procs / 1e9,
        }
    return tools.print_table(f"{args.features_gb:g} GB of features", figures)


PARTS = {"build": part_build, "train": part_train, "procs": part_procs, "pages": part_pages}


def bench_store(args):
    """Time a build, and training from disk -> {part: figures}."""
    figures = {}
    Path(args.root).mkdir(parents=True, exist_ok=True)
    for part in tools.chosen_parts(args, PARTS):
        with tempfile.TemporaryDirectory(dir=args.root, prefix="bench-store-") as folder:
            figures[part] = PARTS[part](args, Path(folder).resolve())
    return figures
