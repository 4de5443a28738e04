"""Training from features on disk, in this project's ways and with GraphBolt: for `python -m bench store`."""

import functools
import itertools
import json
import math
import statistics
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch

from bench.contenders import Ours
from bench.sampler import LABORS
from bench.tools import (
    OwnProcess,
    bytes_from_disk,
    forget_pages,
    memory_of_process,
    print_table,
    watch,
)
from disk.cache import LookaheadCache
from disk.files import StoreError
from features import CachedFeatures, expected_visits
from loader import NodeLoader
from run.allocator import keep_freed_memory, trim_memory
from sampler import NeighborSampler
from store import GraphStore, MmapFeatures

AHEAD = {"disk, cache that looks ahead": "lookahead", "disk, the same past the page cache": "past"}
ADVISED = "GraphBolt, mmap advised"


class FromDisk:
    """Trains on features that stay on disk, `cache` bytes of them in memory; called with a number of batches ->
    figures.

    how: "map" reads through the memory map, "disk" many rows at a time, "lookahead" so behind a cache that looks ahead,
    "past" so too and past the page cache. cache: None for the default of train.py. drawn: by the sampler of
    bench/sampler.py's LABORS with this name.
    """

    def __init__(self, path, args, how, cache, drawn="uniform"):
        keep_freed_memory()
        store = GraphStore.open(path)
        table, nodes, mapped = store.features, store.split["train"], []
        if isinstance(table, MmapFeatures):  # on disk also where they would fit
            array = np.load(store.path / "features.npy", mmap_mode="r")
            mapped = [torch.from_numpy(array)]
            cache = table.default_cache() if cache is None else cache
            beside = math.inf if how == "past" else table.beside + cache
            file = [] if how == "map" else [store.path, array.offset, beside]
            table = MmapFeatures(*mapped, True, *file)
        with watch() as seen:
            if cache:
                visits = expected_visits(
                    store.indptr, store.indices, nodes, args.fanout, args.batch_size
                )
                if how in AHEAD.values():
                    table = LookaheadCache(table, cache, None, visits)
                else:
                    table = CachedFeatures(table, visits, cache)
                del visits
                trim_memory(1)  # what that took, as train.py does
        self.table, self.peak = table, seen.peak  # making the cache takes memory, too
        self.ours = Ours(args, store, features=table, slots=3)
        options = {**LABORS[drawn], "check": False, "threads": args.threads}
        sampler = NeighborSampler(store.indptr, store.indices, args.fanout, **options)
        options = {"batch_size": args.batch_size, "sampler": sampler, "ring": self.ours.kept_ring}
        loader = NodeLoader(store, nodes, args.fanout, **options)
        self.batches = itertools.chain.from_iterable(itertools.repeat(loader))  # epoch after epoch
        forget_pages(path, mapped)

    def __call__(self, count):
        aggregated = self.ours.kept_ring.first_hop
        with watch() as seen:
            batches = itertools.islice(self.batches, count)
            losses = [self.ours.train(batch, aggregated) for batch in batches]
        counts = self.table.counts() if isinstance(self.table, LookaheadCache) else {}
        return {
            "batches_per_s": count / seen.seconds,
            "peak_anonymous": max(self.peak, seen.peak),
            "mapped": seen.mapped,
            "major_faults": seen.faults,
            "from_disk": seen.read,
            "losses": losses,
            "cache_hit_rate": getattr(self.table, "hit_rate", None),
            "lookahead": getattr(self.table, "lookahead", None),
            **counts,
        }


class GraphBolt:
    """Trains in the interpreter `--graphbolt`, called as `FromDisk` is.

    how: "documented", or "advised": with a word to the kernel not to read ahead of each row.
    """

    def __init__(self, path, args, how):
        nodes, random = GraphStore.open(path).split["train"], torch.Generator().manual_seed(0)
        epochs = -(-(args.batches + 3) * args.batch_size // nodes.numel())
        seeds = [nodes[torch.randperm(nodes.numel(), generator=random)] for _ in range(epochs)]
        words = [",".join(map(str, args.fanout)), args.batch_size, args.hidden, args.threads, how]
        with tempfile.NamedTemporaryFile(suffix=".npy") as order:
            np.save(order, torch.cat(seeds).numpy())
            order.flush()
            script = Path(__file__).with_name("graphbolt.py")
            command = [args.graphbolt, script, path, order.name, *words]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            try:
                self.process = subprocess.Popen(list(map(str, command)), text=True, **pipes)
                ready = self.process.stdout.readline() == "ready\n"
            except OSError as error:
                said = f"--graphbolt {args.graphbolt} cannot be started: {error.strerror}"
                raise StoreError(said) from error
        if not ready:
            said = "cannot run bench/graphbolt.py; its words are above"
            raise StoreError(f"--graphbolt {args.graphbolt} {said}")
        self.faults, self.read = 0, bytes_from_disk(self.process.pid)
        forget_pages(path)

    def __call__(self, count):
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise StoreError("GraphBolt ended before its batches were trained; its words are above")
        answer, pid, faults, read = json.loads(line), self.process.pid, self.faults, self.read
        memory, stat = memory_of_process("status", pid), Path(f"/proc/{pid}/stat").read_text()
        self.read, self.faults = bytes_from_disk(pid), int(stat.rpartition(")")[2].split()[9])
        return {
            "batches_per_s": count / answer["seconds"],
            "peak_anonymous": memory["RssAnon"],
            "losses": answer["losses"],
            "mapped": memory["RssFile"],
            "major_faults": self.faults - faults,
            "from_disk": self.read - read,
            "cache_hit_rate": None,
        }

    def shutdown(self):
        """End the process."""
        self.process.communicate()


def train_each(path, args, ways):
    """Train --batches batches in each of {name: (how, cache)}, a twentieth of them at a time, each in a process of its
    own and one after another, because pages that one of them reads would serve the others -> {name: figures};
    batches_per_s is of all but the first quarter, by which caches are full, "seconds" and "from_disk" of all."""
    start = functools.partial(OwnProcess, args.threads, FromDisk, path, args)
    starts = {name: functools.partial(start, *way) for name, way in ways.items()}
    if args.graphbolt and len(ways) > 1:
        starts[ADVISED] = functools.partial(GraphBolt, path, args, "advised")
    figures, each = {}, max(1, args.batches // 20)
    for name, start in starts.items():
        process = start()
        rounds = [process(each) for _ in range(20)]
        process.shutdown()
        timed = rounds[5:]
        rates = [f["batches_per_s"] for f in timed]
        figures[name] = {
            **rounds[-1],
            "batches_per_s": statistics.median(rates),
            "rates": rates,
            "seconds": sum(each / f["batches_per_s"] for f in rounds),
            "from_disk": sum(f["from_disk"] for f in rounds),
            "peak_anonymous": max(f["peak_anonymous"] for f in rounds),
            "major_faults": sum(f["major_faults"] for f in timed),
            "losses": [loss for f in rounds for loss in f["losses"]],
        }
    if ADVISED in starts:
        documented = GraphBolt(path, args, "documented")
        rate = documented(3)["batches_per_s"]
        print(f"GraphBolt, without advice: {rate:.4f} batches/s, of three batches")
        documented.shutdown()
    return figures


def print_training(trained, what):
    """Print the table, ratios, and whether the losses are the same."""
    gb, rows = (lambda size: f"{size / 1e9:.2f} GB"), []
    for name, f in trained.items():
        hits = "" if f["cache_hit_rate"] is None else f"{f['cache_hit_rate']:.3f}"
        memory = [gb(f["peak_anonymous"]), gb(f["mapped"]), gb(f["from_disk"])]
        rows.append([name, f"{f['batches_per_s']:.2f}", f"{f['seconds']:.0f}", *memory, hits])
    header = ["batches/s", "s in all", "anonymous", "mapped", "from the disk", "hits"]
    print_table(rows, [what, *header])
    for name, other in itertools.product(trained, ("mmap, RAM cache", ADVISED)):
        if name.startswith(("disk", "LABOR")) and other in trained:
            ratio = trained[name]["batches_per_s"] / trained[other]["batches_per_s"]
            print(f"{name}: {ratio:.2f} times the batches/s of {other}")
    first = next(iter(trained))
    curves = {name: f.pop("losses") for name, f in trained.items()}
    for name, curve in curves.items():
        trained[name] |= {"first_loss": curve[0], "last_loss": curve[-1]}
        if len(curves) > 1 and not name.startswith(("GraphBolt", "LABOR")):
            same = "the same bits as" if curve == curves[first] else "NOT the same bits as"
            print(f"{name}: loss {curve[0]:.6f} .. {curve[-1]:.6f}, {same} {first}")
