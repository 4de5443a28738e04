"""The parts of `python -m bench gpu`: each is a function (args, record) that runs in a process of its own."""

import concurrent.futures
import importlib.util
import itertools
import json
import multiprocessing
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch.nn import functional as F

from bench import tools
from bench.gpu_graph import SHAPES, Trained, free, kernels_of, make_graph, tiny, with_columns
from bench.gpu_sums import sums
from bench.tools import print_table, read_json
from features import MODES, FeatureRing, gpu_view, share
from model import SAGE, gather_rows
from run.kinds import plain_layers
from sampler import NeighborSampler
from sources import prepare

START = "spawn"  # CUDA does not survive a fork
HERE = Path(__file__).parents[1]
GPU_MODES = MODES[:3]
PREDICTED = HERE / "results/predicted-h200.json"
TWO_RANKS = ["-m", "bench.two_ranks"]
WINDOW = 20  # steps of the plain version per timing
ENOUGH = 4  # seconds for what is timed up to three times
# Largest relative difference of a loss on GPU and CPU. Between fp32 and fp64 on the CPU it is 1e-7, but 3e-5 once a value within
# rounding of ReLU's kink, or of another maximum, changes sides, and ever more from there on. So runs have few steps: batches of
# links are 1e-4 apart after 300, or 1e-7 with ELU in place of ReLU.
CLOSE = {"fp32": 2e-4, "bf16": 0.03}


def made(args, shape):
    """Make a graph of this name on the GPU, or with --quick a tiny one."""
    return make_graph(tiny(SHAPES[shape]) if args.quick else SHAPES[shape])


def sizes(args):
    """Return the flags of train.py for the sizes of `args`."""
    fanout = ",".join(map(str, args.fanout))
    return "--fanout", fanout, "--hidden", args.hidden, "--batch-size", args.batch_size


def on_gpu(step, i):
    """Run step(i) -> (seconds by CUDA events between two synchronisations, its result)."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    result = step(i)
    end.record()
    torch.cuda.synchronize()
    return max(start.elapsed_time(end) / 1e3, 1e-9), result


OWN = """
from model import Conv, Linear


class Own(Conv):
    padded = True

    def __init__(self, in_dim, out_dim):
        super().__init__()
        self.out_dim = out_dim
        self.linear = Linear(2 * in_dim, out_dim)

    def combine(self, near):
        return self.linear(near.self_and_mean())
"""


def others(args, folder):
    """List what trains otherwise than the models on a graph without columns -> {name: (graph in host memory, flags)}."""
    graph = with_columns(made(args, "small").to("cpu"))
    having = lambda *names: graph._replace(columns={n: graph.columns[n] for n in names})  # noqa: E731
    Path(folder, "own.py").write_text(OWN)
    plain = having()
    return {
        "sage, small graph": (plain, []),
        "links": (plain, ["--task", "link", "--edge-split", "none"]),
        "times": (having("edge_time", "node_time"), []),
        "labor": (plain, ["--sampler", "labor"]),
        "gine": (having("edge_features"), ["--model", "gine"]),
        "rgat": (having("edge_type"), ["--model", "rgat"]),
        "own model": (plain, ["--model", f"{folder}/own.py:Own"]),
    }


# ---- timing, alone on the GPU


def predicted(name, args):
    """Return what bench predict expected of a run in the shape of ogbn-products -> {kernel: us}, "a step" among them."""
    if args.quick:
        return {}
    file = read_json(PREDICTED)
    rows = file.get("runs", {}).get(name, {})
    steps = {"a step": file["steps"][name]} if name in file.get("steps", {}) else {}
    return steps | {kernel: row["us"] for kernel, row in rows.items() if "us" in row}


def repeated(way):
    """Time way(i) three times, or until that took a while -> seconds of the first and the shortest of the others."""
    seconds = []
    while len(seconds) < 3 and sum(seconds) < ENOUGH:
        seconds.append(on_gpu(way, len(seconds))[0])
    return {"first_s": seconds[0], "s": min(seconds[1:], default=seconds[0])}


def kernels(args, record):
    """Time each kernel of a step alone (--prefetch 0: sampling does not overlap with training), beside what was predicted."""
    graph, figures = made(args, "products"), {}
    cases = {
        "sage tf32": (graph, []),
        "sage bf16": (graph.rounded(torch.bfloat16), ["--precision", "bf16"]),
    }
    for model in ("gcn", "gin", "gat", "sage-pool"):
        cases[f"{model} tf32"] = graph, ["--model", model]
    with tempfile.TemporaryDirectory() as folder:
        for name, (run_args, words) in {**cases, **others(args, folder)}.items():
            with record.attempt(name):
                words = ["--mode", "cuda-cuda", "--precision", "tf32", *words, "--prefetch", 0]
                trained = Trained(run_args, *sizes(args), *words)
                trained.epochs(1)
                rows = {}
                expected = predicted(name, args)
                for kernel, (launches, us) in kernels_of(partial(trained.epochs, 1)).items():
                    row = {"launches": launches / trained.steps, "us": us / trained.steps}
                    if kernel in expected:
                        row["predicted us"] = expected[kernel]
                    rows[kernel[:90]] = row
                figures[name] = rows
                record.keep(kernels=figures)
                print_table(name, dict(itertools.islice(rows.items(), 16)))
            trained = None
            free()


def steps(args, record):
    """Time epochs of train.py with every model, precision and mode, and batches sampled at once on the CPU."""
    graph, figures = made(args, "products"), {}
    rounded = graph.rounded(torch.bfloat16)
    in_memory = graph.to("cpu")
    cases = {
        "sage tf32": (graph, []),
        "sage bf16": (rounded, ["--precision", "bf16"]),
        "sage fp32": (graph, ["--precision", "fp32"]),
        "sage tf32, kernels launched one by one": (graph, ["--cuda-graph", "off"]),
        "sage tf32, pinned-cuda": (in_memory, ["--mode", "pinned-cuda"]),
    }
    for model in ("gcn", "gin", "sage-pool", "gat"):
        cases[f"{model} tf32"] = graph, ["--model", model]
    cases["sage tf32, batch of 4,096"] = graph, ["--batch-size", 4096]
    for threads in (1, 2, 4, 8):
        words = ["--mode", "cpu-cuda", "--sample-threads", threads]
        if threads <= max(1, args.threads // 2):
            cases[f"sage tf32, cpu-cuda, {threads} sampled at once"] = in_memory, words
    folder = tempfile.TemporaryDirectory()
    rest = others(args, folder.name)
    for name, (run_args, words) in {**cases, **rest}.items():
        with record.attempt(name):
            words = ["--mode", "cuda-cuda", "--precision", "tf32", *words]
            trained = Trained(run_args, *sizes(args), *words)
            epochs = 3 if args.quick or "cpu-cuda" in name else 5
            entries = trained.epochs(epochs)[1:]
            seconds = [entry["seconds"] for entry in entries]
            figures[name] = row = {
                "median_ms": 1e3 * statistics.median(seconds) / trained.steps,
                "min_ms": 1e3 * min(seconds) / trained.steps,
                "epoch_s": statistics.median(seconds),
                "stall": statistics.median(entry.get("stall", 0) for entry in entries),
                "loss": entries[-1]["loss"],
                "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
                "how": trained.message or "eager",
            }
            if expected := predicted(name, args).get("a step"):
                row["predicted_ms"] = expected / 1e3
            if name in rest:
                launched = kernels_of(partial(trained.epochs, 1)).values()
                row["launches"] = sum(count for count, _ in launched) / trained.steps
            record.keep(contenders=figures, steps_in_epoch=trained.steps)
            beside = f"{row['predicted_ms']:.3f} predicted, " if expected else ""
            print(f"{name}: {row['median_ms']:.3f} ms, {beside}{row['epoch_s']:.3f} s", flush=True)
        trained = None
        free()
    with record.attempt("plain torch operations, fp32"):
        figures["plain torch operations, fp32"] = plain(args, graph)
        record.keep(contenders=figures)
    print_table("a step", figures)


def plain(args, graph):
    """Time steps of a plain version in fp32: sampling, layers and dropout of torch operations, no prefetching."""
    sampler = NeighborSampler(
        graph.indptr, graph.indices, args.fanout, backend="torch", check=False
    )
    widths = graph.shape.width, args.hidden, graph.shape.classes
    net = SAGE(*widths, num_layers=len(args.fanout)).cuda()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.003)
    labels, seeds = graph.labels.cuda(), graph.seeds.cuda()
    order = seeds[torch.randperm(len(seeds), generator=torch.Generator().manual_seed(0))]
    batches = itertools.cycle(enumerate(order.split(args.batch_size)))
    torch.set_float32_matmul_precision("highest")

    def window(i):
        for step, nodes in itertools.islice(batches, WINDOW):
            blocks = sampler.sample(nodes, step)
            h = graph.features.index_select(0, blocks[0].src_nodes)
            h = tools.forward(net.layers, blocks, h, 0.5)
            tools.descend(F.cross_entropy(h, labels.index_select(0, nodes)), optimizer)

    with mock.patch("model.fused", None):
        seconds = [on_gpu(window, i)[0] / WINDOW for i in range(4)][1:]
    return {"median_ms": 1e3 * statistics.median(seconds), "min_ms": 1e3 * min(seconds)}


def inference(args, record):
    """Time exact inference on all nodes: layer by layer, and in batches as for a network of the user's."""
    graph = made(args, "products")
    figures = {}
    for model in ("sage", "gcn", "gat", "sage-pool"):
        with record.attempt(model):
            trained = Trained(graph, *sizes(args), "--mode", "cuda-cuda", "--model", model)
            figures[model] = repeated(lambda i, run=trained.run: run.exact())
            record.keep(inference=figures)
        trained = None
        free()
    with record.attempt("in batches"):
        trained = Trained(made(args, "small").to("cpu"), *sizes(args), "--mode", "cuda-cuda")
        run = trained.run
        ways = {
            "by layers": lambda i: run.exact(),
            "in batches": lambda i: run.exact_in_batches(run.model),
        }
        for name, way in ways.items():
            figures[f"sage, small graph, {name}"] = repeated(way)
            record.keep(inference=figures)
    print_table("exact inference", figures)


def papers(args, record):
    """Time epochs on a graph of the size of ogbn-papers100M, all in GPU memory (36 GiB)."""
    graph, figures = made(args, "papers100M"), {}
    free()
    for precision in ("bf16", "tf32"):
        with record.attempt(precision):
            words = "--precision", precision, "--mode", "cuda-cuda"
            trained = Trained(graph, *sizes(args), *words)
            seconds = [entry["seconds"] for entry in trained.epochs(3)][1:]
            middle = statistics.median(seconds)
            figures[precision] = {"median_ms": 1e3 * middle / trained.steps, "epoch_s": middle}
            record.keep(contenders=figures, edges=graph.indices.numel())
        trained = None
        free()
    print_table("papers100M's size", figures)


def sampling(args, record):
    """Time a batch of every sampler, and its rows read from host memory."""
    graph = made(args, "products")
    seeds, in_memory = graph.seeds.split(args.batch_size), graph.to("cpu")
    host, device = in_memory[:2], graph[:2]
    blocks = NeighborSampler(*host, args.fanout, check=False).sample(seeds[0], 0)
    ids, table = blocks[0].src_nodes.cuda(), in_memory.features
    pinned = torch.empty(len(ids), *table.shape[1:], dtype=table.dtype, pin_memory=True)

    def ours(arrays, relabel_outer=True, backend="native"):
        draw = NeighborSampler(*arrays, args.fanout, backend=backend, check=False)
        if draw.backend != backend:
            raise RuntimeError(f"there is no {backend} backend here")
        return lambda i: draw.sample(seeds[i % len(seeds)], i, relabel_outer=relabel_outer)

    def rows_through_ring():
        ring = FeatureRing(table, graph.labels, slots=1, device="cuda", gather=gather_rows)
        return lambda i: ring.fetch(0, blocks).ready.synchronize()

    def rows_in_place():
        shared = gpu_view(*share([table]), "cuda")
        return lambda i: gather_rows(shared, ids)

    contenders = {
        "native": partial(ours, device),
        "native, outermost hop in global ids": partial(ours, device, relabel_outer=False),
        "native, graph in pinned memory": lambda: ours(
            [gpu_view(a, "cuda") for a in share([*host])]
        ),
        "torch operations": partial(ours, device, backend="torch"),
        "native, on CPU": partial(ours, host),
        "rows through the ring": rows_through_ring,
        "rows read in place": rows_in_place,
        "copy of as many pinned rows": lambda: lambda i: pinned.cuda(),
    }
    options = {"warmup": 1, "timed": on_gpu, "attempt": record.attempt}
    rows = {}
    for name, contender in contenders.items():
        rows |= tools.compare("a batch", {name: contender}, 4 * args.rounds, **options)
        record.keep(contenders=rows, bytes_of_rows=pinned.nbytes)


# ---- correctness


def fields_that_differ(block, other):
    """Count the fields of two Blocks, on any devices, that differ in a bit."""
    count = 0
    for a, b in zip(block, other):
        if a is None or b is None:
            count += a is not b
        else:
            count += not torch.equal(a.cpu().long(), b.cpu().long())
    return count


def law(args, record):
    """Compare the samples of CPU and CUDA, bit for bit, in every kind of sampling."""
    graph, generator, rows = made(args, "products"), torch.Generator().manual_seed(1), {}
    host = graph.to("cpu")
    V, M = host.shape.nodes, host.indices.numel()
    destinations = torch.repeat_interleave(host.indptr.diff())
    weights = torch.rand(M, generator=generator)
    weights[torch.rand(M, generator=generator) < 0.1] = 0
    draws = lambda end: torch.randint(0, end, (M,), generator=generator)  # noqa: E731
    times, types = draws(1000), draws(5)
    by_time = (destinations * 1001 + times).cuda().argsort().cpu()
    by_type = (destinations * 8 + types).cuda().argsort().cpu()
    timed = {"edge_times": times[by_time]}
    typed = {"edge_type": types[by_type].to(torch.uint8), "edge_ids": True}
    del destinations
    uniform = args.fanout
    excluded = torch.randint(M, (5 * args.batch_size,), generator=generator).unique()
    dependent = {"method": "labor", "layer_dependency": True, "batch_dependency": 4}
    cases = {  # name: (order of the edges, fanouts, options of the sampler, of `sample`)
        "uniform": (None, uniform, {}, {}),
        "fanout 40,20": (None, [40, 20], {}, {}),
        "fanout 80,5": (None, [80, 5], {}, {}),
        "all, then 5": (None, [-1, 5], {}, {}),
        "with replacement": (None, uniform, {"replace": True}, {}),
        "labor": (None, uniform, {"method": "labor"}, {}),
        "labor, dependent": (None, uniform, dependent, {}),
        "weights": (None, uniform, {"weights": weights}, {}),
        "edge ids": (None, uniform, {"edge_ids": True}, {}),
        "excluded edges": (None, uniform, {"edge_ids": True}, {"exclude": excluded}),
        "times": (by_time, uniform, timed, {"times": 1200}),
        "latest": (by_time, [15, 10], {**timed, "method": "latest"}, {"times": 1200}),
        "window": (by_time, [15, 10], {**timed, "window": 200}, {"times": 1200}),
        "types": (by_type, [[5, 3, 0, 2, 1], [4] * 5], {**typed, "by_type": True}, {}),
        "outermost hop in global ids": (None, uniform, {}, {"relabel_outer": False}),
    }
    on_device = lambda v: v.cuda() if isinstance(v, torch.Tensor) else v  # noqa: E731
    for name, (order, fanouts, options, call) in cases.items():
        with record.attempt(name):
            indices = host.indices if order is None else host.indices[order]
            moved = {key: on_device(value) for key, value in options.items()}
            common = {"check": False, "seed": 3}
            cpu = NeighborSampler(host.indptr, indices, fanouts, **common, **options)
            gpu = NeighborSampler(graph.indptr, indices.cuda(), fanouts, **common, **moved)
            different, count = 0, args.batch_size // (8 if -1 in fanouts else 1)
            batches = 3 if max(fanouts[0] if order is by_type else fanouts) > 64 else 8
            for step in range(batches):
                seeds = torch.randperm(V, generator=generator)[:count]
                given = dict(call)
                if "times" in call:
                    given["times"] = torch.randint(0, call["times"], (count,), generator=generator)
                on_other = dict(given)
                if "exclude" in call:
                    on_other["exclude"] = call["exclude"].cuda()
                ours = cpu.sample(seeds, step, **given)
                theirs = gpu.sample(seeds, step, **on_other)
                different += sum(map(fields_that_differ, ours, theirs))
            rows[name] = {"batches": batches, "fields that differ": different}
            record.keep(law=rows)
            if different:
                raise RuntimeError(f"{different} fields differ")
    print_table("CPU and CUDA", rows)
    sums(args, record, graph)


def commands_of(folder):
    """Write small graphs with times, weights, features of edges and several labels to a folder -> {name: flags}."""
    rng = np.random.default_rng(0)
    V, M = 3000, 40000
    labels = rng.integers(0, 5, V)
    features = rng.standard_normal((V, 20)) + np.eye(20)[labels]
    graph = {
        "edge_index": rng.integers(0, V, (2, M)),
        "features": features.astype(np.float32),
        "labels": labels,
    }
    several = (rng.random((V, 4)) < 0.3).astype(np.int8)
    names = "train_idx", "val_idx", "test_idx"
    split = dict(zip(names, np.split(np.arange(V), [1000, 1500])))
    more = {
        "time": {"edge_time": rng.integers(0, 1000, M), "node_time": rng.integers(200, 1000, V)},
        "weight": {"edge_weight": rng.random(M).astype(np.float32)},
        "features": {"edge_features": rng.standard_normal((M, 6)).astype(np.float32)},
        "several": {"labels": several, **split},
    }
    for name, columns in more.items():
        np.savez(f"{folder}/{name}.npz", **{**graph, **columns})
    own = lambda name: f"--dataset {folder}/{name}.npz --fanout 8,5 --hidden 32 --batch-size 64"  # noqa: E731
    graph = "synthetic:nodes=20000,degree=15,features=30,classes=8,train=4000,valid=500"
    plain = f"--dataset {graph} --hidden 48 --batch-size 256 --fanout"
    pairs = plain.replace("nodes=20000,degree=15", "nodes=5000,degree=3")
    mag = "--dataset synthetic-mag:scale=0.01 --hidden 32"
    return {
        "rgcn": f"{mag} --model rgcn --fanout 8,5",
        "rgat": f"{mag} --model rgat --fanout 8,5",
        "rgcn by type": f"{mag} --model rgcn --bases 3 --fanout cites=6:writes=4,5",
        "links": f"{pairs} 10,10 --task link --model gcn",
        "links, bce": f"{pairs} 10,5 --task link --negatives 4 --link-loss bce --scorer distmult",
        "labor": f"{plain} 8,5,3 --sampler labor",
        "labor, dependent": f"{plain} 8,5,3 --sampler labor --layer-dependency --batch-dependency 2",
        "all neighbours": f"{plain} -1,5 --batch-size 64 --model gcn",
        "times": own("time"),
        "latest": f"{own('time')} --sampler latest --window 300",
        "weights": own("weight"),
        "gine": f"{own('features')} --model gine",
        "gat with edges": f"{own('features')} --model gat --heads 4",
        "several labels": own("several"),
        "batch norm": f"{plain} 8,5,3 --norm batch --residual",
        "layer norm": f"{plain} 8,5,3 --norm layer --residual --input-dropout 0.1",
        "accumulate": f"{plain} 8,5,3 --accumulate 2",
        "recompute": f"{plain} 8,5,3 --checkpoint-activations",
        "gat with 8 heads": f"{plain} 8,5,3 --model gat --heads 8",
        "gin": f"{plain} 8,5,3 --model gin",
        "sage-pool": f"{plain} 8,5,3 --batch-size 1000 --model sage-pool",
        "no dropout": f"{plain} 8,5,3 --dropout 0",
        "pinned with a cache": f"{plain} 8,5,3 --mode pinned-cuda --cache 1MiB",
        "host with a cache": f"{plain} 8,5,3 --mode cpu-cuda --cache 1MiB",
        "pinned gcn": f"{plain} 8,5,3 --mode pinned-cuda --model gcn",
        "threads": f"{plain} 8,5,3 --sample-threads 3 --prefetch 5",
        "bf16": f"{plain} 8,5,3 --precision bf16",
        "bf16 features": f"{plain} 8,5,3 --precision bf16 --feature-dtype bfloat16",
        "fp64": f"{plain} 8,5,3 --precision fp64",
    }


def on_both(words, root):
    """Run a command line of train.py on a GPU and on the CPU -> the losses of both, by epoch."""
    torch.set_num_threads(2)
    words = [*words.split(), "--epochs", "2", "--root", root]
    if "--precision" not in words:
        words += ["--precision", "fp32"]
    on_cpu = list(words)
    for flag in {"--mode", "--cache"} & {*words}:
        at = on_cpu.index(flag)
        del on_cpu[at : at + 2]
    losses = []
    for where in ([*words, "--gpus", "1"], [*on_cpu, "--gpus", "0"]):
        entries, _ = tools.training_log(where)
        losses.append([entry["loss"] for entry in entries if "epoch" in entry])
    return losses


def commands(args, record):
    """Compare the losses of train.py's command lines on GPU and CPU, several at a time."""
    rows, context = {}, multiprocessing.get_context(START)
    with tempfile.TemporaryDirectory() as folder:
        lines = commands_of(folder)
        if args.quick:
            lines = dict(itertools.islice(lines.items(), 3, 24, 5))
        for dataset in {line.split()[1] for line in lines.values()}:
            prepare.prepare(dataset, folder, progress=False)  # or runs would wait for one another
        workers = max(1, min(6, args.threads // 2))
        with concurrent.futures.ProcessPoolExecutor(workers, context) as pool:
            running = {name: pool.submit(on_both, line, folder) for name, line in lines.items()}
            for name, future in running.items():
                with record.attempt(name):
                    gpu, cpu = future.result()
                    apart = max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(gpu, cpu))
                    rows[name] = {"GPU": gpu[-1], "CPU": cpu[-1], "apart": apart}
                    record.keep(commands=rows)
                    # `not <`: a NaN fails too
                    if not apart < CLOSE["bf16" if "bf16" in name else "fp32"]:
                        raise RuntimeError(f"losses {gpu}, on the CPU {cpu}")
    print_table("command lines", rows)


def losses(args, record):
    """Compare two epochs' losses of every model, precision and mode with the CPU's."""
    graph = "synthetic:nodes=20000,degree=15,features=32,classes=8,train=2000,valid=500"
    if args.quick:
        graph = "synthetic:nodes=2000,degree=8,features=16,classes=4,train=256,valid=64"
    flags = ["--epochs", 2, "--fanout", "5,4,3", "--hidden", 64, "--root", args.root]
    flags += ["--batch-size", 64 if args.quick else 256, "--dataset", graph]
    convs = plain_layers()[:2] if args.quick else plain_layers()
    by_run, rows = {}, {}
    for precision, conv, mode in itertools.product(CLOSE, convs, ("cpu-cpu", *GPU_MODES)):
        name, cpu = f"{conv} {precision} {mode}", f"{conv} {precision} cpu-cpu"
        with record.attempt(name):
            words = ["--model", conv, "--precision", precision, "--mode", mode]
            words += ["--gpus", int(mode != "cpu-cpu")]
            entries, _ = tools.training_log([*flags, *words])
            by_run[name] = ours = [entry["loss"] for entry in entries if "epoch" in entry]
            apart = max(abs(a - b) / abs(b) for a, b in zip(ours, by_run[cpu]))
            rows[name] = {"first": ours[0], "last": ours[1], "apart": apart}
            record.keep(losses=rows)
            if not apart < CLOSE[precision]:
                raise RuntimeError(f"losses {ours}, on the CPU {by_run[cpu]}")
    print_table("losses beside the CPU's", rows)


def ranks(args, record):
    """Compare two ranks on one GPU with one rank of the same total batch, in each mode, and with features of which each rank
    holds a part."""
    nodes = 2000 if args.quick else 20000
    graph = f"synthetic:nodes={nodes},degree=15,features=32,classes=8,train=1024,valid=64"
    words = f"--dataset {graph} --root {args.root} --epochs 2 --fanout 5,4 --hidden 32"
    rows = {}
    prepare.prepare(graph, args.root, progress=False)
    with tempfile.TemporaryDirectory() as folder:
        for mode in (*GPU_MODES, f"{GPU_MODES[0]} --split-features"):
            with record.attempt(mode):
                log = Path(folder, f"{mode}.jsonl")
                where, *split = mode.split()
                common = [*words.split(), "--mode", where, "--precision", "fp32"]
                command = [sys.executable, *TWO_RANKS, *common, *split]
                command += ["--batch-size", "64", "--log-file", str(log)]
                done = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
                print(done.stdout[-2000:], done.stderr[-2000:], flush=True)
                entries = map(json.loads, log.read_text().splitlines())
                two = [entry["loss"] for entry in entries if "epoch" in entry]
                entries, _ = tools.training_log([*common, "--batch-size", "128", "--gpus", "1"])
                one = [entry["loss"] for entry in entries if "epoch" in entry]
                apart = max(abs(a - b) / b for a, b in zip(two, one))
                lines = done.stdout.splitlines()
                how = next((line for line in lines if "CUDA graphs" in line), "eager")
                rows[mode] = {"two": two[-1], "one": one[-1], "apart": apart, "how": how[8:60]}
                record.keep(ranks=rows)
                if not apart < CLOSE["fp32"]:
                    raise RuntimeError(f"losses {two}, of one rank {one}")
    print_table("two ranks on one GPU", rows)


def tests(args, record):
    """Run the tests that need a GPU (others do not see it), and record pytest's counts."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "test_all.py"]
    # pytest cuts the names of failures to the terminal's width
    options = {"cwd": HERE, "env": os.environ | {"COLUMNS": "300"}, "text": True}
    printed = Path(args.out, "gpu-tests.txt")  # stays if they are cut
    with open(printed, "w") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, **options)
    lines = printed.read_text().strip().splitlines() or [""]
    record.keep(counts=lines[-1].strip("= "))
    print(lines[-1])
    failed = [line[:300] for line in lines if re.match("FAILED |ERROR ", line)]
    for line in failed or [f"exit code {done.returncode}: {lines[-1]}"] * bool(done.returncode):
        record.fail(line)


def sanitizer(args, record):
    """Train under compute-sanitizer, where it is installed."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not os.path.exists(tool):
        record.keep(left_out="compute-sanitizer is not installed")
        return
    graph = "synthetic:nodes=2000,degree=8,features=16,classes=4,train=256,valid=64"
    words = f"train.py --dataset {graph} --root {args.root} --epochs 2 --fanout 4,3 --hidden 16"
    command = [tool, "--tool", "memcheck", sys.executable, *words.split(), "--gpus", "1"]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if "CUDA graphs" in line]
    summary = re.findall(r"ERROR SUMMARY: (\d+) error", done.stdout + done.stderr)
    record.keep(errors=summary, lines=lines, exit_code=done.returncode)
    print(*lines, *summary, sep="\n")
    if done.returncode or summary != ["0"]:
        record.fail(f"exit code {done.returncode}, errors {summary}")


def trace(args, record):
    """Write a trace and a timeline of the second epoch, of twelve steps, for each mode, into gpu-pictures.zip."""
    drawn = importlib.util.find_spec("matplotlib")  # train.py refuses --timeline without it
    graph = f"synthetic:nodes=20000,degree=15,features=32,classes=8,train={12 * args.batch_size}"
    with tempfile.TemporaryDirectory() as folder:
        for mode in GPU_MODES:
            with record.attempt(mode):
                words = ["--dataset", graph, "--root", args.root, *sizes(args), "--mode", mode]
                words += ["--gpus", 1, "--epochs", 2, "--profile", f"{folder}/trace-{mode}.json"]
                words += ["--timeline", f"{folder}/timeline-{mode}.png"] if drawn else []
                tools.training_log(words)
            shutil.make_archive(str(Path(args.out, "gpu-pictures")), "zip", folder)
        record.keep(files=sorted(file.name for file in Path(folder).iterdir()))
