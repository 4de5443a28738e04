"""python bench.py store: building a store, reading rows and training from features on disk, writing and reading many
small graphs.
"""

import argparse
import contextlib
import ctypes
import functools
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import datasets
from allocator import keep_freed_memory, trim_memory
import native
from bench_sampler import LABORS
from bench_tools import OwnProcess, bytes_from_disk, forget_pages, interleave, memory_of_process, print_table, watch
from bench_training import Ours
from csc import Rows, ahead
from disk import StoreError, map_npy
from features import CachedFeatures, expected_visits
from graphs import GraphDataset, block_diagonal, build_graphs
from loader import NodeLoader
from lookahead import LookaheadCache
from row_reader import open_rows
from sampler import NeighborSampler
from store import SAMPLERS, GraphStore, MmapFeatures, build_store

PARTS = ("build", "reads", "train", "lmdb", "graphs")  # without --parts; "papers" takes half an hour and much disk
PAPERS = dict(nodes=111_059_956, edges=1_615_685_872, features=128, classes=172, train=1_207_179)  # ogbn-papers100M
AHEAD = {"disk, cache that looks ahead": "lookahead", "disk, the same past the page cache": "past"}
GRAPHS = "in memory", "on disk, map that reads ahead", "on disk, where memory is short"

# A plain reader to compare with, as fio's libaio engine is one: `depth` requests in flight, each into its own buffer.
PLAIN = r"""
#define _GNU_SOURCE
#include <linux/aio_abi.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

long plain_read(int file, const long *offsets, long n, long bytes, long depth) {  // -> bytes read
  aio_context_t context = 0;
  struct iocb requests[depth], *submitted[depth];
  struct io_event events[depth];
  long idle[depth], num_idle = 0, next = 0, done = 0, total = 0;
  char *buffers;
  if (syscall(SYS_io_setup, depth, &context) || posix_memalign((void **)&buffers, 4096, depth * bytes)) return -1;
  while (num_idle < depth) idle[num_idle] = num_idle, num_idle++;
  while (done < n) {
    long count = 0;
    for (; num_idle && next < n; count++) {
      long slot = idle[--num_idle];
      memset(&requests[slot], 0, sizeof requests[slot]);
      requests[slot].aio_fildes = file;
      requests[slot].aio_lio_opcode = IOCB_CMD_PREAD;
      requests[slot].aio_buf = (unsigned long)(buffers + slot * bytes);
      requests[slot].aio_nbytes = bytes;
      requests[slot].aio_offset = offsets[next++];
      requests[slot].aio_data = slot;
      submitted[count] = &requests[slot];
    }
    if (count && syscall(SYS_io_submit, context, count, submitted) != count) return -1;
    long found = syscall(SYS_io_getevents, context, 1, depth, events, 0);
    for (long i = 0; i < found; i++) {
      idle[num_idle++] = events[i].data;
      total += events[i].res;
    }
    done += found > 0 ? found : 0;
  }
  syscall(SYS_io_destroy, context);
  free(buffers);
  return total;
}
"""


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


def read_rows(folder, args):
    """Rows from random places of a file on disk, beside a plain reader of blocks of their size, in turn -> figures."""
    file, size, alone = folder / "table", int(args.features_gb * 1e9) // 4096 * 4096, torch.Generator().manual_seed(0)
    block = np.random.default_rng(0).bytes(1 << 24)
    with open(file, "wb") as out:  # of random bytes: a file with holes would not be read from the disk
        for a in range(0, size, len(block)):
            out.write(block[: size - a])
        os.fsync(out.fileno())
    types = ctypes.c_long, ctypes.c_int, ctypes.c_void_p, *[ctypes.c_long] * 3
    plain = native.load_c("plain_read", PLAIN, ["-O2", "-fPIC", "-shared"], {"plain_read": types})
    handle, figures = os.open(file, os.O_RDONLY | os.O_DIRECT), {}
    for row_bytes, run in ((400, 1), (1024, 1), (4096, 1), (1024, 8), (1024, 32)):
        rows, count = (size - 4096) // row_bytes, args.reads // run
        span = -(-row_bytes * run // 512) * 512
        starts = lambda end: torch.randint(end, (count,), generator=alone)  # noqa: E731
        out = torch.zeros(count * run, row_bytes, dtype=torch.uint8)

        def ours(reader):
            ids = (starts(rows - run).unsqueeze(1) + torch.arange(run)).flatten()
            return lambda i: reader.read(ids, out)

        def theirs(i):
            offsets = starts((size - span) // 512) * 512
            if plain.plain_read(handle, offsets.data_ptr(), count, span, 64) != count * span:
                raise StoreError(f"the plain reader could not read {file}")

        readers = {engine: open_rows(file, 4096, row_bytes, rows, engine=engine) for engine in ("io_uring", "threads")}
        contenders = {"plain": theirs, **{engine: ours(reader) for engine, reader in readers.items()}}
        times = interleave(contenders, args.rounds, warmup=1)
        name = f"{row_bytes} B" if run == 1 else f"{run} x {row_bytes} B side by side"
        figures[name] = {contender: count / statistics.median(seconds) for contender, seconds in times.items()}
    os.close(handle)
    file.unlink()
    return figures


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

    features = Rows([V, p["features"]], np.float16, ahead(rows, V, 1 << 15))
    train = np.sort(random.choice(V, p["train"], replace=False))
    with watch() as seen:
        build_store(path, edge_index=RandomEdges(V, p["edges"]), features=features, labels=labels,
                    num_classes=p["classes"], split={"train": train}, source="random, the size of ogbn-papers100M",
                    progress=True)  # fmt: skip
    size = sum(file.stat().st_size for file in path.iterdir())
    return {"seconds": seen.seconds, "edges_per_s": p["edges"] / seen.seconds, "peak_anonymous": seen.peak,
            "bytes": size}  # fmt: skip


def train_papers(folder, args):
    """Build that store and train --batches batches of 1,024 with fanout 15,10,5 from it -> figures."""
    p = {name: max(2000, int(number * args.papers)) if number > 1000 else number for name, number in PAPERS.items()}
    needed = 8 * p["edges"] + 4 * p["edges"] + 2 * p["nodes"] * (p["features"] + 8)
    if (free := shutil.disk_usage(folder).free) < needed:
        raise StoreError(f"--parts papers takes {needed / 1e9:.0f} GB of disk, {folder} has {free / 1e9:.0f} GB left")
    args = argparse.Namespace(**{**vars(args), "fanout": [15, 10, 5], "batch_size": 1024})
    built = OwnProcess(args.threads, functools.partial, build_papers, folder / "papers", p)()
    how = {name: (how, int(args.cache_gb * 1e9)) for name, how in AHEAD.items()}
    trained = train_each(folder / "papers", argparse.Namespace(**{**vars(args), "graphbolt": None}), how)
    epoch = -(-p["train"] // args.batch_size) / next(iter(trained.values()))["batches_per_s"]
    return {"build": built, "training": trained, "epoch_s": epoch, **p}


def sample_graph(path, args, where):
    """Milliseconds to sample a batch from a graph in the page cache, or from one of which all is on the disk."""
    graph = GraphStore.open(path)
    indices, threads = graph.indices, args.threads
    if where == GRAPHS[2]:  # what GraphStore does
        indices, threads = map_npy(path, "indices.npy", graph.meta["files"]["indices.npy"], ahead=False), SAMPLERS
    sampler = NeighborSampler(graph.indptr, indices, args.fanout, check=False, threads=threads)
    forget_pages(path)
    graph.indptr.sum(), where == GRAPHS[0] and indices.sum()
    seeds = torch.randint(graph.num_nodes, (args.batch_size,)).unique()
    start = time.perf_counter()
    sampler.sample(seeds, 0)
    return 1e3 * (time.perf_counter() - start)


class FromDisk:
    """Trains on features that stay on disk, `cache` bytes of them in memory; called with a number of batches ->
    figures.

    how: "map" reads through the memory map, "disk" many rows at a time, "lookahead" so behind a cache that looks ahead,
    "past" so too and past the page cache. cache: None for the default of train.py. drawn: by the sampler of
    bench_sampler.LABORS with this name.
    """

    def __init__(self, path, args, how, cache, drawn="uniform"):
        keep_freed_memory()
        store = GraphStore.open(path)
        table, nodes = store.features, store.split["train"]
        if isinstance(table, MmapFeatures):  # also where they would fit
            cache = table.default_cache() if cache is None else cache
            beside = math.inf if how == "past" else table.beside + cache
            file = [] if how == "map" else [store.path, table._head, beside]
            table = MmapFeatures(table._table, True, *file)
        with watch() as seen:
            if cache:
                visits = expected_visits(store.indptr, store.indices, nodes, args.fanout, args.batch_size)
                ahead = how in ("lookahead", "past")
                table = LookaheadCache(table, cache, None, visits) if ahead else CachedFeatures(table, visits, cache)
                del visits
                trim_memory(1)  # what that took, as train.py does
        self.peak = seen.peak
        self.table, self.ours = table, Ours(store, [], args, features=table, slots=3)
        options = {**LABORS[drawn], "check": False, "threads": args.threads}
        sampler, ring = NeighborSampler(store.indptr, store.indices, args.fanout, **options), self.ours.ring
        loader = NodeLoader(store, nodes, args.fanout, batch_size=args.batch_size, sampler=sampler, ring=ring)
        self.batches = itertools.chain.from_iterable(itertools.repeat(loader))  # epoch after epoch
        forget_pages(path, [store.features._table] if isinstance(store.features, MmapFeatures) else [])

    def __call__(self, count):
        with watch() as seen:
            losses = [self.ours.train(batch) for batch in itertools.islice(self.batches, count)]
        counts = self.table.counts() if isinstance(self.table, LookaheadCache) else {}
        peak = max(self.peak, seen.peak)  # making the cache takes memory of its own
        return {"batches_per_s": count / seen.seconds, "peak_anonymous": peak, "mapped": seen.mapped,
                "major_faults": seen.faults, "from_disk": seen.read, "losses": losses,
                "cache_hit_rate": getattr(self.table, "hit_rate", None),
                "lookahead": getattr(self.table, "lookahead", None), **counts}  # fmt: skip


class GraphBolt:
    """Trains in the interpreter `--graphbolt`, called as `FromDisk` is: the same seeds in the same order.

    how: "documented", or "advised": with a word to the kernel not to read ahead of each row.
    """

    def __init__(self, path, args, how):
        store = GraphStore.open(path)
        loader = NodeLoader(store, store.split["train"], args.fanout, batch_size=args.batch_size, sampler=(), ring=())
        parts = itertools.chain.from_iterable(loader._parts(epoch, 0) for epoch in itertools.count())
        seeds = torch.cat([part.seeds for part in itertools.islice(parts, args.batches)])
        with tempfile.NamedTemporaryFile(suffix=".npy") as order:
            np.save(order, seeds.numpy())
            order.flush()
            words = [path, order.name, ",".join(map(str, args.fanout)), args.batch_size, args.hidden, args.threads, how]
            script = Path(__file__).with_name("bench_graphbolt.py")
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            try:
                self.process = subprocess.Popen([args.graphbolt, script, *map(str, words)], text=True, **pipes)
            except OSError as error:
                raise StoreError(f"--graphbolt {args.graphbolt} cannot be started: {error.strerror}") from error
            if self.process.stdout.readline() != "ready\n":
                raise StoreError(f"--graphbolt {args.graphbolt} cannot run bench_graphbolt.py; its words are above")
        self.faults = 0
        self.read = bytes_from_disk(self.process.pid)
        forget_pages(path)

    def __call__(self, count):
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise StoreError("GraphBolt ended before its batches were trained; its words are above")
        answer = json.loads(line)
        memory, before, read = memory_of_process("status", self.process.pid), self.faults, self.read
        self.read = bytes_from_disk(self.process.pid)
        self.faults = int(Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[9])
        return {"batches_per_s": count / answer["seconds"], "peak_anonymous": memory["RssAnon"],
                "losses": answer["losses"], "mapped": memory["RssFile"], "major_faults": self.faults - before,
                "from_disk": self.read - read, "cache_hit_rate": None}  # fmt: skip

    def shutdown(self):
        self.process.communicate()


def train_each(path, args, ways):
    """Train --batches batches in each of {name: (how, cache)}, a twentieth of them at a time, each in a process of its
    own and one after another, because pages that one of them reads would serve the others -> {name: figures};
    batches_per_s is of all but the first quarter, by which caches are full, "seconds" and "from_disk" of all."""
    starts = {name: functools.partial(OwnProcess, args.threads, FromDisk, path, args, *way)
              for name, way in ways.items()}  # fmt: skip
    if args.graphbolt and len(ways) > 1:
        starts["GraphBolt, mmap advised"] = functools.partial(GraphBolt, path, args, "advised")
    figures = {}
    for name, start in starts.items():
        process = start()
        each = max(1, args.batches // 20)
        rounds = [process(each) for _ in range(20)]
        process.shutdown()
        timed, last = rounds[5:], rounds[-1]
        rates = [f["batches_per_s"] for f in timed]
        figures[name] = {**last, "batches_per_s": statistics.median(rates), "rates": rates,
                         "seconds": sum(each / f["batches_per_s"] for f in rounds),
                         "from_disk": sum(f["from_disk"] for f in rounds),
                         "peak_anonymous": max(f["peak_anonymous"] for f in rounds),
                         "major_faults": sum(f["major_faults"] for f in timed),
                         "losses": [loss for f in rounds for loss in f["losses"]]}  # fmt: skip
    if "GraphBolt, mmap advised" in starts:
        documented = GraphBolt(path, args, "documented")
        print(f"GraphBolt, without advice: {documented(3)['batches_per_s']:.4f} batches/s, of three batches")
        documented.shutdown()
    return figures


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


def _print_training(trained, what):
    gb = lambda size: f"{size / 1e9:.2f} GB"  # noqa: E731
    rows = []
    for name, f in trained.items():
        hits = "" if f["cache_hit_rate"] is None else f"{f['cache_hit_rate']:.3f}"
        memory = [gb(f["peak_anonymous"]), gb(f["mapped"]), gb(f["from_disk"])]
        rows.append([name, f"{f['batches_per_s']:.2f}", f"{f['seconds']:.0f}", *memory, hits])
    print_table(rows, [what, "batches/s", "s in all", "anonymous", "mapped", "from the disk", "hits"])
    for name, other in itertools.product(trained, ("mmap, RAM cache", "GraphBolt, mmap advised")):
        if name.startswith(("disk", "LABOR")) and other in trained:
            ratio = trained[name]["batches_per_s"] / trained[other]["batches_per_s"]
            print(f"{name}: {ratio:.2f} times the batches/s of {other}")
    curves = {name: f.pop("losses") for name, f in trained.items()}
    for name, curve in curves.items():
        trained[name] |= {"first_loss": curve[0], "last_loss": curve[-1]}
        if len(curves) > 1 and not name.startswith(("GraphBolt", "LABOR")):
            same = "the same bits as" if curve == next(iter(curves.values())) else "NOT the same bits as"
            print(f"{name}: loss {curve[0]:.6f} .. {curve[-1]:.6f}, {same} {next(iter(curves))}")
    for name, f in trained.items():
        if "bytes_min" in f:
            times = f["bytes_read"] / f["bytes_min"]
            print(f"{name}: {gb(f['bytes_read'])} asked for, MIN must read {gb(f['bytes_min'])}: {times:.3f} times as "
                  f"much; looked {f['lookahead']:,} batches ahead")  # fmt: skip


@contextlib.contextmanager
def _store_for(dataset, root, backend):
    """The store of a data set under `root`, removed at the end unless it was there before."""
    there = set(Path(root).iterdir())
    path = datasets.prepare(dataset, root, backend=backend)
    try:
        yield path
    finally:
        if path not in there:
            shutil.rmtree(path)


def bench_store(args):
    """Build, read rows, train from disk, write and read small graphs, each in its own process; returns the figures."""
    alone = lambda function, *words: OwnProcess(args.threads, functools.partial, function, *words)()  # noqa: E731
    gb = lambda size: f"{size / 1e9:.2f} GB"  # noqa: E731
    parts, figures = set(args.parts.split(",")) if args.parts else set(PARTS), {}
    if unknown := parts - {*PARTS, "papers"}:
        raise StoreError(f"--parts {','.join(sorted(unknown))}: choose from {','.join(PARTS)},papers")
    Path(args.root).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.root, prefix="bench-store-") as folder:
        folder = Path(folder)
        if "build" in parts:
            built = figures["build"] = alone(build_edges, folder, args.edges)
            print(f"build: {built['input_edges']:,} edges -> {built['stored_edges']:,} in {built['seconds']:.1f} s, "
                  f"{built['input_edges_per_s'] / 1e6:.1f} M input edges/s, "
                  f"at most {gb(built['peak_anonymous'])} anonymous memory")  # fmt: skip
            built["sample_ms"] = {
                where: statistics.median(alone(sample_graph, folder / "built", args, where) for _ in range(3))
                for where in GRAPHS
            }
            rows = [[where, f"{ms:.0f}"] for where, ms in built["sample_ms"].items()]
            print_table(rows, ["graph", "ms to sample a batch"])
            shutil.rmtree(folder / "built")
            (folder / "edges").unlink()
        if "reads" in parts:
            read = figures["reads"] = alone(read_rows, folder, args)
            plain, *own = names = list(next(iter(read.values())))
            rows = [[name, *(f"{f[how]:,.0f}" for how in names), *(f"{f[how] / f[plain]:.2f}" for how in own)]
                    for name, f in read.items()]  # fmt: skip
            print_table(rows, ["rows", *(f"{how}, reads/s" for how in names), *(f"{how} / {plain}" for how in own)])

        nodes, cache = max(1000, int(args.features_gb * 1e9) // 1024), int(args.cache_gb * 1e9)
        dataset = f"synthetic:nodes={nodes},degree=8,features=256,classes=47"
        ways = {"mmap, RAM cache": ("map", cache), "disk, RAM cache": ("disk", cache),
                **{name: (how, cache) for name, how in AHEAD.items()},
                **{name: ("lookahead", cache, name) for name in ("LABOR", "LABOR, layer, batch 4")},
                "disk, cache of train.py's default": ("lookahead", None)}  # fmt: skip
        trained = figures["training"] = {}
        for part, backend in (("train", "mmap"), ("lmdb", "lmdb")):  # one at a time: both may not fit on the disk
            if part in parts:
                with _store_for(dataset, args.root, backend) as path:
                    name = backend.upper() if backend == "lmdb" else backend
                    trained |= train_each(path, args, {name: ("map", 0), **(ways if part == "train" else {})})
        if trained:
            _print_training(trained, f"{args.features_gb:g} GB of features")

        if "papers" in parts:
            papers = figures["papers"] = train_papers(folder, args)
            built, trained = papers["build"], next(iter(papers["training"].values()))
            print(f"papers: {papers['nodes']:,} nodes, {papers['edges']:,} edges built in {built['seconds']:.0f} s, "
                  f"{built['edges_per_s'] / 1e6:.1f} M edges/s, at most {gb(built['peak_anonymous'])} anonymous "
                  f"memory; {gb(built['bytes'])} on disk")  # fmt: skip
            hours = papers["epoch_s"] / 3600
            print(f"papers: {trained['batches_per_s']:.2f} batches/s, an epoch of {papers['train']:,} nodes in "
                  f"{hours:.2f} h; at most {gb(trained['peak_anonymous'])} anonymous and "
                  f"{gb(trained['mapped'])} mapped")  # fmt: skip
            _print_training(papers["training"], f"{gb(built['bytes'])} on disk")
            shutil.rmtree(folder / "papers")

        if "graphs" in parts:
            graphs = figures["graphs"] = {"write": alone(write_graphs, folder / "many", args.graphs)}
            graphs["read"] = alone(read_graphs, folder / "many")
            for name, f in graphs.items():
                print(f"graphs: {name} {f['graphs_per_s']:,.0f}/s of {args.graphs:,}, anonymous memory at most "
                      f"{gb(f['peak_anonymous'])}, {f['grown'] / 1e6:+.0f} MB from first to last")  # fmt: skip
    return {**figures, "cache_bytes": cache}
