"""python -m bench step | link | features | scaling: a training step beside DGL's, of nodes and of links; the ring beside
a plain copy; several processes beside one."""

import collections
import os
import statistics
from functools import partial

import torch

from bench import tools
from bench.contenders import dgl, ours, training_log
from bench.tools import alone, in_own_process, interleave, medians, opened, print_table
from ddp import Ranks
from features import FeatureRing
from model import gather_rows
from run.allocator import keep_freed_memory
from sampler import Block, NeighborSampler

NONE = dict(native_sampler=False, first_hop=False, kept_buffers=False, native_layers=False)
TRICKS = {  # options of `ours`
    "all tricks": {},
    "without the native sampler": {"native_sampler": False},
    "without the first hop from the table": {"first_hop": False},
    "without kept buffers": {"kept_buffers": False},
    "without native layers and dropout": {"native_layers": False},
    "none of them": NONE,
}
RATIOS = {  # pairs that compare like with like: (DGL's, ours)
    "fp32, dropout 0.5, DGL as shipped": ("DGL as shipped", "all tricks"),
    "fp32, dropout 0.5, DGL with malloc kept": ("DGL, malloc kept", "all tricks"),
    "fp32, no dropout, DGL as shipped": ("DGL as shipped, no dropout", "no dropout"),
    "fp32, no dropout, DGL with malloc kept": ("DGL, malloc kept, no dropout", "no dropout"),
    "bf16, dropout 0.5, DGL as shipped (fp32)": ("DGL as shipped", "bf16"),
}


def time_steps(args, contenders, ratios):
    """Time a step of every contender -> figures; ratios: {name: (DGL's, ours)}.

    This process keeps freed memory, as train.py does; contenders "as shipped" run in processes of their own, in which
    glibc gives freed memory back as it does in any program.
    """
    keep_freed_memory()
    times = interleave(tools.prepared(contenders), args.rounds, twice=True)
    figures, median = tools.turned(tools.print_times("one step", times)), medians(times)
    ratios = {name: median[a] / median[b] for name, (a, b) in ratios.items() if a in median}
    print_table("DGL's time / ours", {name: {"ratio": ratio} for name, ratio in ratios.items()})
    return figures | {"ratios": ratios}


def bench_step(args):
    """Time a training step of every contender; returns the figures."""
    as_shipped = partial(in_own_process, args.threads)
    contenders = {name: partial(ours, args, **options) for name, options in TRICKS.items()} | {
        "without kept malloc memory": partial(as_shipped, ours, args),
        "none of them, nor kept memory": partial(as_shipped, ours, args, **NONE),
        "bf16": partial(ours, args, bf16=True),
        "no dropout": partial(ours, args, dropout=0.0),
        "DGL as shipped": partial(as_shipped, dgl, args),
        "DGL, malloc kept": partial(dgl, args),
        "DGL as shipped, no dropout": partial(as_shipped, dgl, args, dropout=0.0),
        "DGL, malloc kept, no dropout": partial(dgl, args, dropout=0.0),
    }
    figures = time_steps(args, contenders, RATIOS)
    losses = {}  # without dropout they are the same within rounding
    for name in ("all tricks", "none of them"):
        step = ours(args, **TRICKS[name], dropout=0.0)
        losses[name] = [step(i) for i in range(min(10, 2 * args.rounds))]
    apart = max(abs(a / b - 1) for a, b in zip(*losses.values()))
    print(f"losses of ten steps, all tricks against none: at most {apart:.1e} apart (relative)")
    return figures | {"losses": losses | {"largest_relative_difference": apart}}


def bench_link(args):
    """Time a step of link prediction of every contender; returns the figures. The graph has every edge's reverse."""
    contenders = {
        "ours": partial(ours, args, "exclude", dropout=0.0),
        "ours, nothing excluded": partial(ours, args, "keep", dropout=0.0),
        "DGL as shipped": partial(in_own_process, args.threads, dgl, args, True, dropout=0.0),
        "DGL, malloc kept": partial(dgl, args, True, dropout=0.0),
    }
    return time_steps(args, contenders, {name: (name, "ours") for name in list(contenders)[2:]})


def fetch(ring, slot, ids):
    """Fetch rows `ids` as those of a batch with one seed."""
    return ring.fetch(slot, [Block(torch.zeros(2), ids[:1], ids)])


def bench_features(args):
    """Gather rows through the ring beside a plain copy, in the same run; returns the figures."""
    size, figures = 1 << 28, {}
    source, copied = torch.ones(2, size, dtype=torch.uint8)
    for row_bytes in (64, 400, 2048):
        table = torch.ones((1 << 30) // row_bytes, row_bytes // 4)
        labels = torch.zeros(len(table), dtype=torch.int64)
        ring = FeatureRing(table, labels, slots=3, log=lambda line: None, gather=gather_rows)
        picks = [torch.randint(len(table), (size // row_bytes,)) for _ in range(3)]
        steps = {
            "ring": lambda i: fetch(ring, i % 3, picks[i % 3]),
            "fresh tensor": lambda i: table[picks[i % 3]],
            "copy": lambda i: copied.copy_(source),
        }
        times = interleave(steps, args.rounds, warmup=3)
        # of one round
        share = statistics.median(copy / ring for copy, ring in zip(times["copy"], times["ring"]))
        rate = {name: size / seconds / 1e9 for name, seconds in medians(times).items()}
        figures[row_bytes] = rate | {"share_of_copy": share}
    print_table("GB/s by bytes a row", figures)
    features = opened(args.shared, args.root).meta["files"]["features.npy"]["bytes"]
    words = args.threads, read_all, args.shared, args.root
    memory = [reader() for reader in [in_own_process(*words) for _ in range(4)]]
    pss, own = (sum(figures[field] for figures in memory) for field in ("Pss", "Pss_Anon"))
    shared = {"feature_bytes": features, "pss": pss, "own": own, "ratio": pss / (features + own)}
    print_table("four processes", {"summed PSS / (features + own)": shared})
    return {"gb_per_s": figures, "memory": shared}


def read_all(dataset, root):
    """Read every feature row of a store once through a ring -> function: the memory of this process, which keeps both."""
    store = opened(dataset, root)
    ring = FeatureRing(store.features.tensor, store.labels, slots=3, log=lambda line: None)
    for i, ids in enumerate(torch.arange(store.num_nodes).split(1 << 18)):
        fetch(ring, i % 3, ids)
    return lambda ring=ring: tools.memory_of_process("smaps_rollup")


def bench_scaling(args):
    """Epochs of train.py with each number of processes and the same total batch; returns the figures."""
    store, random = opened(args.dataset, args.root), torch.Generator().manual_seed(0)
    nodes, epochs, figures = store.split["train"], collections.defaultdict(list), {}
    seeds = nodes[torch.randperm(nodes.numel(), generator=random)[: args.batch_size]]
    draw, first = NeighborSampler(store.indptr, store.indices, args.fanout, check=False), {}
    for procs in args.procs * args.rounds:
        epochs[procs] += alone(args.threads, epochs_of, args, procs)
    for procs, entries in epochs.items():
        seconds = [entry["seconds"] for entry in entries]
        # what the parts of a batch have in common is computed more than once
        parts = [seeds[Ranks(rank, procs).part(seeds.numel())] for rank in range(procs)]
        rows = sum(block.num_dst for part in parts for block in draw.sample(part, 0))
        row = {"n": len(seconds), "median_s": statistics.median(seconds), "min_s": min(seconds)}
        first = first or row | {"rows": rows}
        row |= {
            "speedup": first["median_s"] / row["median_s"],
            "rows / first": rows / first["rows"],
        }
        for stage in ("exchange", "stall", "optimizer"):
            row[f"{stage}_s"] = statistics.median(entry.get(stage, 0) for entry in entries)
        figures[procs] = row
    return {"scaling": print_table("processes", figures)}


def epochs_of(args, procs):
    """Run four epochs of train.py in `procs` processes -> the log entries of the last three."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # ranks print by themselves
    words = ["--dataset", args.dataset, "--root", args.root, "--hidden", args.hidden]
    words += ["--fanout", ",".join(map(str, args.fanout)), "--epochs", 4]
    words += ["--batch-size", args.batch_size // procs, "--gpus", procs if args.gpus else 0]
    entries, _ = training_log([*words, "--procs", 1 if args.gpus else procs])
    return [entry for entry in entries if "epoch" in entry][1:4]
