"""How fast the GPU samples, trains and is fed: the parts sampling, products, arxiv and transfer of python bench.py gpu.

A part is a function of the command line's arguments and a `Record` of bench_gpu.py, to which it gives its figures.
"""

import contextlib
import functools
import io
import statistics
import time
from itertools import islice

import torch
from torch.nn import functional as F

import datasets
import fused
import step_graph
import train
from bench_tools import opened, print_table
from ddp import Ranks, StopSignal
from features import MODES, FeatureRing, gpu_view, place, share
from model import SAGE, gather_rows
from sampler import NeighborSampler

GPU_MODES = MODES[:3]
GRAPHS = {
    "products": "synthetic:nodes=2449029,degree=50,features=100,classes=47,train=196615,valid=39323",
    "arxiv": "synthetic:nodes=169343,degree=13.7,features=128,classes=40,train=90941,valid=29799",
    "small": "synthetic:nodes=20000,degree=15,features=32,classes=8,train=2000,valid=500",  # of losses
}
QUICK = "synthetic:nodes=2000,degree=8,features=16,classes=4,train=256,valid=64"  # in the place of each


# ---------------------------------------------------------------------------------------------------------------------
# timing


def gpu_seconds(run, *args):
    """Seconds from an idle GPU to an idle GPU, by CUDA events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    run(*args)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def take_turns(contenders, rounds, record):
    """Time {name: function of the round} in turn, after a round that does not count -> {name: [seconds]}.

    One that raises is written down and takes part no longer.
    """
    times = {name: [] for name in contenders}
    for i in range(rounds + 1):
        for name in list(times):
            seconds = None
            with record.attempt(name):
                seconds = gpu_seconds(contenders[name], i)
            if seconds is None:
                del times[name]
            elif i:
                times[name].append(seconds)
    return times


def median_ms(times):
    """{name: [seconds]} -> {name: median in milliseconds}."""
    return {name: 1e3 * statistics.median(seconds) for name, seconds in times.items()}


def gb_per_s(nbytes, ms):
    """Bytes in milliseconds -> GB/s."""
    return nbytes / 1e6 / max(ms, 1e-6)


def graph_name(args, size):
    """The data set of a size."""
    return QUICK if args.quick else GRAPHS[size]


def flags_of(args, size, mode, precision="fp32", *more):
    """Words of train.py's command line."""
    words = {
        "--dataset": graph_name(args, size), "--root": args.root, "--batch-size": args.batch_size,
        "--fanout": ",".join(map(str, args.fanout)), "--hidden": args.hidden, "--precision": precision,
        "--mode": mode, "--gpus": int(mode != "cpu-cpu"),
    }  # fmt: skip
    return [str(word) for pair in words.items() for word in pair] + list(more)


def quiet():
    """Keep what train.py prints off the terminal."""
    return contextlib.redirect_stdout(io.StringIO())


# ---------------------------------------------------------------------------------------------------------------------
# sampling


def sampling(args, record):
    """One batch of every sampler, and what it moves over what a device copy moves in the same time."""
    store = opened(graph_name(args, "products"), args.root)
    seeds = store.split["train"].split(args.batch_size)
    host, device = [store.indptr, store.indices], [store.indptr.cuda(), store.indices.cuda()]
    seen = {}

    def ours(name, graph, relabel_outer=True, backend="native"):
        draw = NeighborSampler(*graph, args.fanout, backend=backend, check=False)
        if draw.backend != backend:
            raise RuntimeError(f"there is no {backend} backend here")
        return lambda i: seen.update({name: draw.sample(seeds[i % len(seeds)], i, relabel_outer=relabel_outer)})

    makers = {
        "native": lambda name: ours(name, device),
        "native, outermost hop in global ids": lambda name: ours(name, device, relabel_outer=False),
        "native, graph in pinned memory": lambda name: ours(name, [gpu_view(a, "cuda") for a in share(host)]),
        "torch operations": lambda name: ours(name, device, backend="torch"),
        "native, on CPU": lambda name: ours(name, host),
        "PyG NeighborLoader": lambda name: pyg_batches(args, store),
    }
    contenders = {}
    for name, make in makers.items():
        with record.attempt(name, optional="PyG" in name):
            contenders[name] = make(name)
    source = torch.ones(1 << (20 if args.quick else 30), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    contenders["device copy"] = lambda i: target.copy_(source)
    ms = median_ms(take_turns(contenders, 4 * args.rounds, record))
    bandwidth = gb_per_s(2 * source.numel(), ms.pop("device copy"))
    moved = {name: bytes_of_batch(blocks) for name, blocks in seen.items()}
    in_gpu_memory = ms.keys() & moved.keys() - {"native, graph in pinned memory", "native, on CPU"}
    share_of_copy = {name: gb_per_s(moved[name], ms[name]) / bandwidth for name in ms if name in in_gpu_memory}
    record.keep(graph=graph_name(args, "products"), median_ms=ms, bytes=moved, copy_gb_per_s=bandwidth,
                share_of_copy=share_of_copy)  # fmt: skip
    rows = []
    for name, t in ms.items():
        mb = f"{moved[name] / 1e6:.1f}" if name in moved else ""
        part = f"{100 * share_of_copy[name]:.1f} %" if name in share_of_copy else ""
        rows.append([name, f"{t:.3f}", f"{t / ms.get('native', t):.2f}", mb, part])
    said = f"of a device copy's {bandwidth:.0f} GB/s"
    print_table(rows, ["sampling a batch", "median ms", "time / native", "MB moved", said])
    if {"native", "torch operations"} <= ms.keys():
        ratio = ms["torch operations"] / ms["native"]
        summary = f"native {ms['native']:.3f} ms, {ratio:.2f} times as fast as torch operations, "
        summary += f"{100 * share_of_copy['native']:.0f} % of copy bandwidth"
        record.keep(ratio_to_torch=ratio, summary=summary)


def bytes_of_batch(blocks):
    """What sampling moves at least: sectors of 32 bytes at random places, and the blocks themselves.

    A sector of indptr for each destination; one of indices for each edge, and one of the table of numbers where the
    hop is relabelled.
    """
    sectors = sum(block.num_dst + block.num_edges * (1 + (block.num_src > block.num_dst)) for block in blocks)
    return 32 * sectors + sum(tensor.nbytes for block in blocks for tensor in block if tensor is not None)


def pyg_loader(args, store, workers, **arrays):
    """PyG's NeighborLoader on the store's graph, as its examples set it up."""
    import pyg_lib  # noqa: F401  it samples, and counts the nodes of each hop, which trim_to_layer asks for
    from torch_geometric.data import Data
    from torch_geometric.loader import NeighborLoader

    destinations = torch.arange(store.num_nodes).repeat_interleave(store.indptr.diff())
    data = Data(edge_index=torch.stack([store.indices.long(), destinations]), num_nodes=store.num_nodes, **arrays)
    return NeighborLoader(
        data, args.fanout, store.split["train"], batch_size=args.batch_size, shuffle=True, is_sorted=True,
        num_workers=workers, persistent_workers=workers > 0,
    )  # fmt: skip


def pyg_batches(args, store):
    """A contender that takes the loader's next batch, sampled in this process."""
    loader = pyg_loader(args, store, 0)
    endless = (batch for _ in iter(int, 1) for batch in loader)
    return lambda i: next(endless)


# ---------------------------------------------------------------------------------------------------------------------
# training: a contender is a function (epoch, steps) that takes the first steps of an epoch


class Ours:
    """train.py's own loop."""

    def __init__(self, args, size, mode, precision, *more):
        self.ranks, self.flags = Ranks(gpus=1), train.parse_args(flags_of(args, size, mode, precision, *more))
        path = datasets.prepare(graph_name(args, size), args.root)
        self.store, self.sampler, self.ring = train.open_data(self.ranks, self.flags, path)
        self.model = train.build_model(self.ranks, self.flags, self.store, self.ring)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=self.flags.lr, fused=True)
        forward = functools.partial(train.predict, self.ranks, self.flags, self.ring, self.model)
        run = self.ranks, self.flags, self.store, self.sampler, self.ring, self.model
        self.graphs, said = step_graph.build(*run, self.optimizer, forward)
        if self.flags.cuda_graph == "on" and not (self.graphs and self.graphs.captured):
            raise RuntimeError(f"asked for CUDA graphs: {said}")

    def __call__(self, epoch, steps):
        torch.set_float32_matmul_precision("high" if self.flags.precision == "tf32" else "highest")
        self.flags.steps = steps
        with StopSignal(self.ranks) as stop:
            _, _, self.figures, _ = train.train_epoch(
                self.ranks, self.flags, self.store, self.sampler, self.ring, self.model, self.optimizer, stop,
                lambda epoch, step: None, self.graphs, epoch, 0,
            )  # fmt: skip


class Plain:
    """The same step without what this project is about, in fp32.

    Sampling by torch operations, nothing prepared ahead, rows gathered into fresh tensors and copied, layers of torch
    operations.
    """

    def __init__(self, args, size, mode):
        self.args, self.store = args, opened(graph_name(args, size), args.root)
        arrays = [self.store.indptr, self.store.indices, self.store.labels, self.store.features]
        indptr, indices, self.labels, self.features = place(
            *(share(arrays) if mode == "pinned-cuda" else arrays), mode, "cuda"
        )
        self.sampler = NeighborSampler(indptr, indices, args.fanout, backend="torch", check=False)
        widths = self.store.feature_dim, args.hidden, self.store.num_classes
        self.model = SAGE(*widths, num_layers=len(args.fanout)).cuda()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.003)

    def __call__(self, epoch, steps):
        torch.set_float32_matmul_precision("highest")
        nodes = self.store.split["train"]
        order = nodes[torch.randperm(nodes.numel(), generator=torch.Generator().manual_seed(epoch))]
        fused.use_native(False)
        try:
            for i, seeds in enumerate(order.split(self.args.batch_size)[:steps]):
                blocks = self.sampler.sample(seeds, epoch * 1000 + i)
                x = self.features.index_select(0, blocks[0].src_nodes).cuda()
                y = self.labels.index_select(0, seeds.to(self.labels.device)).cuda()
                logits = self.forward([block.to("cuda") for block in blocks], x)
                self.optimizer.zero_grad()
                F.cross_entropy(logits, y).backward()
                self.optimizer.step()
        finally:
            fused.use_native(True)

    def forward(self, blocks, h):
        """Logits [S, C]; dropout is torch's own."""
        for layer, block in zip(self.model.layers, blocks):
            h = layer(block, h)
            h = h if block is blocks[-1] else F.dropout(F.relu(h), 0.5)
        return h


class PyG:
    """NeighborLoader and SAGEConv, each layer on what the later ones need (trim_to_layer). In fp32."""

    def __init__(self, args, size):
        from torch_geometric.nn import SAGEConv

        store = opened(graph_name(args, size), args.root)
        workers = min(8, args.threads // 2)
        self.loader = pyg_loader(args, store, workers, x=store.features.tensor, y=store.labels)
        widths = [store.feature_dim] + [args.hidden] * (len(args.fanout) - 1) + [store.num_classes]
        self.layers = torch.nn.ModuleList(SAGEConv(a, b) for a, b in zip(widths, widths[1:])).cuda()
        self.optimizer = torch.optim.Adam(self.layers.parameters(), lr=0.003)

    def __call__(self, epoch, steps):
        torch.set_float32_matmul_precision("highest")
        for batch in islice(self.loader, steps):
            logits = self.forward(batch.to("cuda"))
            self.optimizer.zero_grad()
            F.cross_entropy(logits, batch.y[: batch.batch_size]).backward()
            self.optimizer.step()

    def forward(self, batch):
        """Logits [S, C]."""
        from torch_geometric.utils import trim_to_layer

        h, edges = batch.x, batch.edge_index
        for i, layer in enumerate(self.layers):
            h, edges, _ = trim_to_layer(i, batch.num_sampled_nodes, batch.num_sampled_edges, h, edges)
            h = layer(h, edges)
            h = h if layer is self.layers[-1] else F.dropout(F.relu(h), 0.5)
        return h[: batch.batch_size]


def training(args, record, size):
    """Windows of a few steps of every contender, then whole epochs of those for which there is time."""
    runs, resident, peak, stages = {}, {}, {}, {}
    for name, make in training_contenders(args, size).items():
        with record.attempt(name, optional="PyG" in name), quiet():
            before = torch.cuda.memory_allocated()
            runs[name] = make()
            resident[name] = torch.cuda.memory_allocated() - before

    def measured(name, steps, i):
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with quiet():
            runs[name](i, steps)
        peak[name] = max(peak.get(name, 0), torch.cuda.max_memory_allocated() - base + resident[name])
        resident[name] += torch.cuda.memory_allocated() - base
        stages[name] = getattr(runs[name], "figures", {})

    def in_turn(steps, names, rounds):
        return take_turns({name: functools.partial(measured, name, steps) for name in names}, rounds, record)

    whole = -(-opened(graph_name(args, size), args.root).split["train"].numel() // args.batch_size)
    window = min(args.window, whole)
    step_ms = {name: t / window for name, t in median_ms(in_turn(window, runs, args.rounds)).items()}
    record.keep(graph=graph_name(args, size), step_ms=step_ms, steps_in_window=window, steps_in_epoch=whole,
                stages=stages, peak_bytes=peak)  # fmt: skip
    epochs = {name: [] for name in step_ms}
    for i in range(3):
        for name, ms in step_ms.items():
            expected = ms * whole / 1e3
            in_time = time.time() + 1.5 * expected < record.deadline - 10
            if in_time and (i + 1) * expected < 12 and len(epochs[name]) == i:  # slow ones once or twice, or not at all
                with record.attempt(f"{name}, whole epoch"):
                    epochs[name].append(gpu_seconds(measured, name, whole, 100 + i))
                    record.keep(epochs_s=epochs, stages=stages, peak_bytes=peak)
    show_training(record, step_ms, epochs, peak, stages)


def training_contenders(args, size):
    """{name: function that makes it}; eager and graph: --cuda-graph off and on, where the GPU can read the features."""
    makers = {}
    for mode in GPU_MODES:
        for precision in ("fp32", "tf32", "bf16"):
            for how, word in (("eager", "off"), ("graph", "on"))[: 1 if mode == "cpu-cuda" else 2]:
                more = "--cuda-graph", word
                makers[f"{mode} {precision} {how}"] = functools.partial(Ours, args, size, mode, precision, *more)
        makers[f"{mode} fp32 plain"] = functools.partial(Plain, args, size, mode)
    return makers | {"cpu-cuda fp32 PyG": functools.partial(PyG, args, size)}


def show_training(record, step_ms, epochs, peak, stages):
    """Print the table and keep the ratios: the plain version's time of the same mode over each contender's."""
    ratio, stall, rows = {}, {}, []
    for name, ms in step_ms.items():
        plain = step_ms.get(f"{name.split()[0]} fp32 plain")
        epoch = statistics.median(epochs[name]) if epochs[name] else None
        if plain:
            ratio[name] = plain / ms
        if stages[name]:
            stall[name] = stages[name].get("stall", 0) / stages[name]["seconds"]
        rows.append([name, f"{ms:.2f}", f"{ratio[name]:.2f}" if plain else "", f"{epoch:.3f}" if epoch else "",
                     f"{100 * stall[name]:.0f} %" if name in stall else "", f"{peak[name] / 2**30:.2f}"])  # fmt: skip
    print_table(rows, ["training", "step ms", "plain fp32 / this", "epoch s", "stall", "peak GiB"])
    record.keep(ratio_to_plain=ratio, stall_share=stall)
    like = {name: ratio[name] for name in ratio if " fp32 " in name and not name.endswith(("plain", "PyG"))}
    if like:
        fastest, best = min(step_ms, key=step_ms.get), max(like, key=like.get)
        summary = f"fastest step {step_ms[fastest]:.2f} ms ({fastest}); "
        record.keep(summary=summary + f"fp32 {like[best]:.2f} times as fast as plain ({best})")


# ---------------------------------------------------------------------------------------------------------------------
# transfer, trace, sanitizer


def transfer(args, record):
    """The rows of a batch by way of the ring, and read in place, beside a copy of as much page-locked memory."""
    store = opened(graph_name(args, "products"), args.root)
    draw = NeighborSampler(store.indptr, store.indices, args.fanout, check=False)
    blocks = draw.sample(store.split["train"][: args.batch_size], 0)
    ring = FeatureRing(
        store.features.tensor, store.labels, slots=1, device="cuda", gather=gather_rows, log=lambda line: None
    )
    nbytes = blocks[0].num_src * store.feature_dim * store.features.dtype.itemsize
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    device, copies = torch.empty(nbytes, dtype=torch.uint8, device="cuda"), []
    runs = {"page-locked copy": lambda i: device.copy_(pinned, non_blocking=True)}

    def fetch(i):
        batch = ring.fetch(0, blocks)
        batch.ready.synchronize()
        copies.append(batch.began.elapsed_time(batch.ready))

    runs["ring: gather and copy"] = fetch
    with record.attempt("rows read in place"):
        table, ids = gpu_view(share([store.features.tensor])[0], "cuda"), blocks[0].src_nodes.cuda()
        runs["rows read in place"] = lambda i: table.index_select(0, ids)
    ms = median_ms(take_turns(runs, 2 * args.rounds, record))
    if copies[1:]:
        ms["ring: copy alone"] = statistics.median(copies[1:])
    rate = {name: gb_per_s(nbytes, t) for name, t in ms.items()}
    share_of_link = {name: speed / rate["page-locked copy"] for name, speed in rate.items()}
    print_table([[name, f"{ms[name]:.2f}", f"{rate[name]:.1f}", f"{100 * share_of_link[name]:.0f} %"] for name in ms],
                [f"{nbytes / 1e6:.0f} MB of rows", "median ms", "GB/s", "of the link"])  # fmt: skip
    shares = [f"{name} {100 * part:.0f} %" for name, part in share_of_link.items() if name != "page-locked copy"]
    record.keep(graph=graph_name(args, "products"), bytes=nbytes, median_ms=ms, gb_per_s=rate,
                share_of_link=share_of_link, summary=f"of the link's speed: {', '.join(shares)}")  # fmt: skip
