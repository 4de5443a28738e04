"""python -m bench step | link | features | scaling: a training step beside DGL's, of nodes and of links; the ring beside
a plain copy; several processes beside one."""

import functools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from bench.contenders import Dgl, Ours, as_shipped
from bench.tools import (
    OwnProcess,
    interleave,
    made,
    medians,
    memory_of_process,
    opened,
    print_table,
    print_times,
)
from ddp import Ranks
from features import FeatureRing
from model import gather_rows
from run.allocator import keep_freed_memory
from sampler import Block, NeighborSampler

NONE = dict(native_sampler=False, first_hop=False, kept_buffers=False, native_layers=False)
TRICKS = {  # options of Ours
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


def bench_step(args):
    """Time a training step of every contender; returns the figures.

    This process keeps freed memory, as train.py does; contenders "as shipped" run in processes of their own.
    """
    keep_freed_memory()
    ours = functools.partial(Ours, args, opened(args.dataset, args.root))
    runs = {name: ours(**options) for name, options in TRICKS.items()}
    runs["without kept malloc memory"] = as_shipped(Ours, args)
    runs["none of them, nor kept memory"] = as_shipped(Ours, args, **NONE)
    runs |= {"bf16": ours(bf16=True), "no dropout": ours(dropout=0.0)}
    runs |= made(
        {
            "DGL as shipped": lambda: as_shipped(Dgl, args),
            "DGL, malloc kept": lambda: Dgl(args),
            "DGL as shipped, no dropout": lambda: as_shipped(Dgl, args, dropout=0.0),
            "DGL, malloc kept, no dropout": lambda: Dgl(args, dropout=0.0),
        }
    )
    median, least = print_times("one step", interleave(runs, args.rounds, twice=True), "ms", 0)
    pairs = {name: pair for name, pair in RATIOS.items() if pair[0] in median}
    ratios = {name: median[theirs] / median[own] for name, (theirs, own) in pairs.items()}
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f} times as fast as DGL")
    return {
        "median_ms": median,
        "min_ms": least,
        "ratios": ratios,
        "losses": step_losses(args, ours),
    }


def step_losses(args, ours):
    """The loss curve of ten steps with all tricks and with none of them, dropout 0: the same within rounding."""
    curves, count = {}, min(10, 2 * args.rounds)
    for name in ("all tricks", "none of them"):
        run = ours(**TRICKS[name], dropout=0.0)
        curves[name] = [run(i) for i in range(count)]
    apart = max(abs(a / b - 1) for a, b in zip(*curves.values()))
    first, *_, last = curves["all tricks"]
    said = (
        f"all tricks against none: {first:.6f} .. {last:.6f}, at most {apart:.1e} apart (relative)"
    )
    print(f"loss over {count} steps, {said}")
    return {**curves, "largest_relative_difference": apart}


def bench_link(args):
    """Time a step of link prediction of every contender; returns the figures. The graph has every edge's reverse."""
    keep_freed_memory()
    store = opened(args.dataset, args.root)
    ours = {"ours": "exclude", "ours, nothing excluded": "keep"}
    runs = {name: Ours(args, store, dropout=0.0, link=link) for name, link in ours.items()}
    theirs = {"dropout": 0.0, "link": True}
    runs |= made(
        {
            "DGL as shipped": lambda: as_shipped(Dgl, args, **theirs),
            "DGL, malloc kept": lambda: Dgl(args, **theirs),
        }
    )
    median, least = print_times("one step", interleave(runs, args.rounds, twice=True), "ms", 0)
    ratios = {name: median[name] / median["ours"] for name in median if name.startswith("DGL")}
    for name, ratio in ratios.items():
        print(f"{ratio:.2f} times as fast as {name}")
    return {"median_ms": median, "min_ms": least, "ratios": ratios}


# ---------------------------------------------------------------------------------------------------------------------
# features


def fetch(ring, slot, ids):
    """Fetch rows `ids` as those of a batch with one seed."""
    return ring.fetch(slot, [Block(torch.zeros(2), ids[:1], ids)])


def bench_features(args):
    """Gather rows through the ring beside a plain copy, in the same run; returns the figures."""
    source = torch.ones(1 << 28, dtype=torch.uint8)
    copied, figures, rows = torch.empty_like(source), {}, []
    for row_bytes in (64, 400, 2048):
        num_rows, n = (1 << 30) // row_bytes, (1 << 28) // row_bytes
        table, labels = (
            torch.ones(num_rows, row_bytes // 4),
            torch.zeros(num_rows, dtype=torch.int64),
        )
        ring = FeatureRing(table, labels, slots=3, log=lambda line: None, gather=gather_rows)
        picks = [torch.randint(num_rows, (n,)) for _ in range(3)]
        run = {
            "ring": lambda i: fetch(ring, i % 3, picks[i % 3]),  # noqa: B023  run within this iteration
            "fresh tensor": lambda i: table[picks[i % 3]],  # noqa: B023
            "copy": lambda i: copied.copy_(source),
        }
        times = interleave(run, args.rounds, warmup=3)
        rate = {name: (1 << 28) / seconds / 1e9 for name, seconds in medians(times).items()}
        # of one round
        share = statistics.median(copy / ring for copy, ring in zip(times["copy"], times["ring"]))
        figures[row_bytes] = {**rate, "share_of_copy": share}
        rows.append([str(row_bytes), *(f"{rate[name]:.1f}" for name in run), f"{100 * share:.0f}%"])
    header = ["bytes a row", "ring GB/s", "fresh tensor GB/s", "plain copy GB/s", "ring / copy"]
    print_table(rows, header)
    return {"gb_per_s": figures, "memory": memory_of_processes(args)}


class Reader:
    """Reads every feature row of a store once through a ring, and keeps what it has read."""

    def __init__(self, dataset, root):
        store = self.store = opened(dataset, root)
        features, log = store.features.tensor, lambda line: None
        self.ring = FeatureRing(features, store.labels, slots=3, log=log)
        for i, ids in enumerate(torch.arange(store.num_nodes).split(1 << 18)):
            fetch(self.ring, i % 3, ids)

    def __call__(self):
        return memory_of_process("smaps_rollup")


def memory_of_processes(args, procs=4):
    """Memory of processes that have read all of one store, each page counted once, over what has to be there."""
    if not Path("/proc/self/smaps_rollup").exists():
        return None
    feature_bytes = opened(args.shared, args.root).meta["files"]["features.npy"]["bytes"]
    readers = [OwnProcess(args.threads, Reader, args.shared, args.root) for _ in range(procs)]
    memory = [reader() for reader in readers]
    pss, own = (sum(figures[field] for figures in memory) for field in ("Pss", "Pss_Anon"))
    ratio = pss / (feature_bytes + own)
    said = f"summed PSS {pss / 1e9:.2f} GB, of it {own / 1e9:.2f} GB of their own"
    print(
        f"{procs} processes on {feature_bytes / 1e9:.2f} GB of features: {said}; {ratio:.2f} times features plus own"
    )
    sizes = {"feature_bytes": feature_bytes, "pss": pss, "own": own}
    return {"processes": procs, **sizes, "ratio": ratio}


# ---------------------------------------------------------------------------------------------------------------------
# scaling


def bench_scaling(args):
    """Epochs of train.py with each number of processes and the same total batch; returns the figures."""
    rows, epochs, figures, cells = rows_computed(args), {}, {}, []
    for procs in args.procs * args.rounds:
        epochs.setdefault(procs, []).extend(epochs_of(args, procs))
    first = args.procs[0]
    for procs, found in epochs.items():
        stages = ("seconds", "exchange", "stall", "optimizer")
        seconds, exchange, stall, optimizer = (
            statistics.median(epoch.get(stage, 0) for epoch in found) for stage in stages
        )
        least, repeated = min(epoch["seconds"] for epoch in found), rows[procs] / rows[first]
        speedup = (figures[first]["median_s"] if figures else seconds) / seconds
        # on CPU they share the same cores
        efficiency = speedup * first / procs if args.gpus else speedup
        costs = {
            "rows that several processes compute": seconds * (1 - 1 / repeated),
            "exchange of gradients and waiting for each other": exchange,
            "waiting for data": stall,
            "the optimizer, which every process runs": optimizer,
        }
        ms = [f"{1e3 * s:.0f}" for s in (seconds, least, exchange, stall)]
        ratios = [f"{speedup:.2f}", f"{100 * efficiency:.0f} %"]
        cells.append(
            [f"{procs}", *ms[:2], *ratios, *ms[2:], f"{repeated:.2f}", max(costs, key=costs.get)]
        )
        figures[procs] = {"n": len(found), "median_s": seconds, "min_s": least, "speedup": speedup}
        figures[procs] |= {"efficiency": efficiency, "rows": rows[procs], "costs_s": costs}
    header = [
        "processes",
        "epoch ms",
        "min ms",
        "speed-up",
        "efficiency",
        "exchange ms",
        "stall ms",
    ]
    print_table(cells, [*header, "rows", "costs most"])
    return {"scaling": figures}


def rows_computed(args):
    """Rows of a step by number of processes: what the parts of a batch have in common is computed more than once."""
    store, random = opened(args.dataset, args.root), torch.Generator().manual_seed(0)
    nodes = store.split["train"]
    seeds = nodes[torch.randperm(nodes.numel(), generator=random)[: args.batch_size]]
    draw, rows = NeighborSampler(store.indptr, store.indices, args.fanout, check=False), {}
    for procs in args.procs:
        parts = [seeds[Ranks(rank, procs).part(seeds.numel())] for rank in range(procs)]
        rows[procs] = sum(block.num_dst for part in parts for block in draw.sample(part, 0))
    return rows


def epochs_of(args, procs):
    """Run four epochs of train.py with so many processes -> the log entries of the last three."""
    with tempfile.TemporaryDirectory() as folder:
        words = {
            "--dataset": args.dataset,
            "--root": args.root,
            "--fanout": ",".join(map(str, args.fanout)),
            "--hidden": args.hidden,
            "--batch-size": args.batch_size // procs,
            "--epochs": 4,
            "--log": f"{folder}/log",
            "--gpus": procs if args.gpus else 0,
            "--procs": 1 if args.gpus else procs,
        }
        command = [sys.executable, Path(__file__).parent.with_name("train.py")]
        command += [str(word) for pair in words.items() for word in pair]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return [entry for entry in map(json.loads, open(f"{folder}/log")) if "epoch" in entry][1:4]
