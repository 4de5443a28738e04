"""Training from features on disk, in this project's ways and with GraphBolt: for `python -m bench store`."""

import itertools
import json
import math
import mmap
import statistics
import subprocess
from functools import partial
from pathlib import Path

import numpy as np
import torch

from bench.contenders import make_ring, trainer
from bench.sampler import LABORS
from bench.tools import alone, forget_pages, print_table, watch, watched_rounds
from disk.cache import LookaheadCache
from disk.files import StoreError
from features import CachedFeatures, expected_visits
from loader import NodeLoader
from run.allocator import keep_freed_memory, trim_memory
from sampler import NeighborSampler
from store import GraphStore, MmapFeatures

AHEAD = {"disk, cache that looks ahead": "lookahead", "disk, the same past the page cache": "past"}
ADVISED = "GraphBolt, mmap advised"
OPTIONS = "fanout", "batch_size", "hidden", "threads"  # of bench/graphbolt.py
ROUNDS = 20


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
    rounds = watched_rounds(step, ROUNDS, max(1, args.batches // ROUNDS))
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


def train_each(path, args, ways):
    """Train --batches batches in each of {name: (how, cache)}, a twentieth of them at a time, each in a process of its
    own and one after another, because pages that one of them reads would serve the others -> {name: figures};
    batches_per_s is of all but the first quarter, by which caches are full, "seconds" and "from_disk" of all."""
    each, figures = max(1, args.batches // ROUNDS), {}
    trainings = {
        name: partial(alone, args.threads, train_from_disk, path, args, *way)
        for name, way in ways.items()
    }
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
