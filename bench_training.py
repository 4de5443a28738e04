"""python bench.py step | overlap | features | scaling | inference: a training step and exact inference beside DGL's,
batches prepared ahead beside one after the other, the ring beside a plain copy, several processes beside one.
"""

import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import model
from allocator import keep_freed_memory
from bench_tools import (
    OwnProcess,
    dgl_graph,
    forget_pages,
    in_memory,
    interleave,
    made,
    medians,
    memory_of_process,
    opened,
)
from bench_tools import print_table, print_times
from ddp import Ranks
from features import FeatureRing
from fused import use_native
from loader import NodeLoader
from model import gather_rows, self_and_mean
from report import Clock, draw_timeline
from sampler import Block, NeighborSampler, import_dgl
from store import GraphStore

# ---------------------------------------------------------------------------------------------------------------------
# step; a contender is a function of the number of a batch that takes a training step and returns the loss

TRICKS = {
    "all tricks": {},
    "without the native sampler": {"native_sampler": False},
    "without the first hop from the table": {"first_hop": False},
    "without kept buffers": {"kept_buffers": False},
    "without native layers and dropout": {"native_layers": False},
    "none of them": {"native_sampler": False, "first_hop": False, "kept_buffers": False, "native_layers": False},
}
RATIOS = {  # pairs that compare like with like: (DGL's, ours)
    "fp32, dropout 0.5, DGL as shipped": ("DGL as shipped", "all tricks"),
    "fp32, dropout 0.5, DGL with malloc kept": ("DGL, malloc kept", "all tricks"),
    "fp32, no dropout, DGL as shipped": ("DGL as shipped, no dropout", "no dropout"),
    "fp32, no dropout, DGL with malloc kept": ("DGL, malloc kept, no dropout", "no dropout"),
    "bf16, dropout 0.5, DGL as shipped (fp32)": ("DGL as shipped", "bf16"),
}


def step_data(args):
    """The store and the seed nodes of each batch."""
    store = opened(args.dataset, args.root)
    nodes = torch.randperm(store.num_nodes, generator=torch.Generator().manual_seed(0))
    return store, nodes[: 2 * args.batch_size * (args.rounds + 2)].split(args.batch_size)


class Ours:
    """A training step of this project, as train.py takes it on CPU; each trick can be left out.

    `batches` lists the seed nodes of each batch, `features` replaces the store's own, `slots` batches may live at once.
    """

    def __init__(self, store, batches, args, *, native_sampler=True, first_hop=True, kept_buffers=True,
                 native_layers=True, bf16=False, dropout=0.5, features=None, slots=1):  # fmt: skip
        self.batches, self.kept_buffers, self.native_layers, self.bf16 = batches, kept_buffers, native_layers, bf16
        features = store.features.tensor if features is None else features
        self.sampler = NeighborSampler(store.indptr, store.indices, args.fanout, check=False, threads=args.threads,
                                       backend="native" if native_sampler else "torch")  # fmt: skip
        self.make_ring = functools.partial(
            FeatureRing, features, store.labels, slots=slots, log=lambda line: None,
            aggregate=self_and_mean if first_hop else None, dtype=torch.bfloat16 if bf16 else None,
        )  # fmt: skip
        self.ring = self.make_ring()
        torch.manual_seed(0)
        widths = store.feature_dim, args.hidden, store.num_classes
        self.model = model.SAGE(*widths, num_layers=len(args.fanout), dropout=dropout)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.003, fused=True)

    def load(self, i, slot=0):
        """Sample batch i and fetch its features into a slot of the ring -> Batch."""
        if not self.kept_buffers:
            self.ring = self.make_ring()
        blocks = self.sampler.sample(self.batches[i], i, relabel_outer=not self.ring.first_hop)
        return self.ring.fetch(slot, blocks)

    def train(self, batch):
        """Forward, backward and a step of Adam -> loss."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            logits = self.model(batch.blocks, batch.x, aggregated=self.ring.first_hop)
        loss = F.cross_entropy(logits.float(), batch.y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def __call__(self, i):
        use_native(self.native_layers)
        torch.manual_seed(i)
        return self.train(self.load(i))


class Dgl:
    """The same step with DGL's DataLoader and SAGEConv, as DGL's own examples write it."""

    graph = None  # one for all contenders of a process: it takes 2 GB

    def __init__(self, store, batches, args, *, dropout=0.5):
        load = import_dgl().dataloading
        from dgl.nn import SAGEConv

        if Dgl.graph is None:
            Dgl.graph = dgl_graph(store.indptr, store.indices.long())
            Dgl.graph.ndata["feat"], Dgl.graph.ndata["label"] = store.features.tensor.clone(), store.labels.clone()
        theirs = load.NeighborSampler(args.fanout[::-1], prefetch_node_feats=["feat"], prefetch_labels=["label"])
        self.loader = iter(load.DataLoader(Dgl.graph, torch.cat(batches), theirs, batch_size=args.batch_size))
        widths = [store.feature_dim] + [args.hidden] * (len(args.fanout) - 1) + [store.num_classes]
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(SAGEConv(a, b, "mean") for a, b in zip(widths, widths[1:]))
        self.optimizer = torch.optim.Adam(self.layers.parameters(), lr=0.003)
        self.dropout = torch.nn.Dropout(dropout)

    def __call__(self, i):
        _, _, blocks = next(self.loader)
        h = blocks[0].srcdata["feat"]
        for layer, block in zip(self.layers, blocks):
            h = layer(block, h)
            h = h if layer is self.layers[-1] else self.dropout(F.relu(h))
        loss = F.cross_entropy(h, blocks[-1].dstdata["label"])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def as_shipped(kind, args, **options):
    """A contender in a process of its own, in which glibc gives freed memory back as it does in any program."""
    return OwnProcess(args.threads, _contender, kind, args, options)


def _contender(kind, args, options):
    return kind(*step_data(args), args, **options)


def bench_step(args):
    """Time a training step of every contender; returns the figures.

    This process keeps freed memory, as train.py does; contenders "as shipped" run in processes of their own.
    """
    keep_freed_memory()
    store, batches = step_data(args)
    ours = functools.partial(Ours, store, batches, args)
    dgl = functools.partial(Dgl, store, batches, args)
    runs = {name: ours(**options) for name, options in TRICKS.items()}
    runs["without kept malloc memory"] = as_shipped(Ours, args)
    runs["none of them, nor kept memory"] = as_shipped(Ours, args, **TRICKS["none of them"])
    runs["bf16"] = ours(bf16=True)
    runs["no dropout"] = ours(dropout=0.0)
    runs |= made({
        "DGL as shipped": lambda: as_shipped(Dgl, args),
        "DGL, malloc kept": dgl,
        "DGL as shipped, no dropout": lambda: as_shipped(Dgl, args, dropout=0.0),
        "DGL, malloc kept, no dropout": lambda: dgl(dropout=0.0),
    })  # fmt: skip
    times = interleave(runs, args.rounds, twice=True)
    median, least = print_times("one step", times, "ms", 0)
    ratios = {name: median[theirs] / median[own] for name, (theirs, own) in RATIOS.items() if theirs in median}
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f} times as fast as DGL")
    return {"median_ms": median, "min_ms": least, "ratios": ratios, "losses": step_losses(ours)}


def step_losses(ours):
    """The loss curve of ten steps with all tricks and with none of them, dropout 0: the same within rounding."""
    curves = {}
    for name in ("all tricks", "none of them"):
        run = ours(**TRICKS[name], dropout=0.0)
        curves[name] = [run(i) for i in range(min(10, len(run.batches)))]
    apart = max(abs(a / b - 1) for a, b in zip(*curves.values()))
    first, *_, last = curves["all tricks"]
    print(f"loss over {len(curves['all tricks'])} steps, all tricks against none: {first:.6f} .. {last:.6f}, "
          f"at most {apart:.1e} apart (relative)")  # fmt: skip
    return {**curves, "largest_relative_difference": apart}


# ---------------------------------------------------------------------------------------------------------------------
# features


def _fetch(ring, slot, ids):
    """Fetch rows `ids` as those of a batch with one seed."""
    return ring.fetch(slot, [Block(torch.zeros(2), ids[:1], ids)])


def bench_features(args):
    """Gather rows through the ring beside a plain copy, in the same run; returns the figures."""
    copied = torch.empty(1 << 28, dtype=torch.uint8)
    source = torch.ones_like(copied)
    figures, rows = {}, []
    for row_bytes in (64, 400, 2048):
        num_rows, n = (1 << 30) // row_bytes, (1 << 28) // row_bytes
        table, labels = torch.ones(num_rows, row_bytes // 4), torch.zeros(num_rows, dtype=torch.int64)
        ring = FeatureRing(table, labels, slots=3, log=lambda line: None, gather=gather_rows)
        picks = [torch.randint(num_rows, (n,)) for _ in range(3)]
        run = {
            "ring": lambda i: _fetch(ring, i % 3, picks[i % 3]),  # noqa: B023  run within this iteration
            "fresh tensor": lambda i: table[picks[i % 3]],  # noqa: B023
            "copy": lambda i: copied.copy_(source),
        }
        times = interleave(run, args.rounds, warmup=3)
        rate = {name: (1 << 28) / seconds / 1e9 for name, seconds in medians(times).items()}
        share = statistics.median(copy / ring for copy, ring in zip(times["copy"], times["ring"]))  # of one round
        figures[row_bytes] = {**rate, "share_of_copy": share}
        rows.append([str(row_bytes), *(f"{rate[name]:.1f}" for name in run), f"{100 * share:.0f}%"])
    print_table(rows, ["bytes a row", "ring GB/s", "fresh tensor GB/s", "plain copy GB/s", "ring / copy"])
    return {"gb_per_s": figures, "memory": memory_of_processes(args)}


class Reader:
    """Reads every feature row of a store once through a ring, and keeps what it has read."""

    def __init__(self, dataset, root):
        self.store = opened(dataset, root)
        self.ring = FeatureRing(self.store.features.tensor, self.store.labels, slots=3, log=lambda line: None)
        for i, ids in enumerate(torch.arange(self.store.num_nodes).split(1 << 18)):
            _fetch(self.ring, i % 3, ids)

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
    print(f"{procs} processes on {feature_bytes / 1e9:.2f} GB of features: summed PSS {pss / 1e9:.2f} GB, of it "
          f"{own / 1e9:.2f} GB of their own; {ratio:.2f} times features plus own")  # fmt: skip
    return {"processes": procs, "feature_bytes": feature_bytes, "pss": pss, "own": own, "ratio": ratio}


# ---------------------------------------------------------------------------------------------------------------------
# scaling


def bench_scaling(args):
    """Epochs of train.py with each number of processes and the same total batch; returns the figures."""
    store = opened(args.dataset, args.root)
    nodes = store.split["train"]
    seeds = nodes[torch.randperm(nodes.numel(), generator=torch.Generator().manual_seed(0))[: args.batch_size]]
    draw = NeighborSampler(store.indptr, store.indices, args.fanout, check=False)
    rows = {}  # of a step, over all processes: what the parts of a batch have in common is computed more than once
    epochs = {}
    for procs in args.procs:
        parts = [seeds[Ranks(rank, procs).part(seeds.numel())] for rank in range(procs)]
        rows[procs] = sum(block.num_dst for part in parts for block in draw.sample(part, 0))
    for procs in args.procs * args.rounds:
        epochs.setdefault(procs, []).extend(epochs_of(args, procs))
    figures, first, cells = {}, args.procs[0], []
    for procs, found in epochs.items():
        median = lambda stage: statistics.median(epoch.get(stage, 0) for epoch in found)  # noqa: B023
        seconds, exchange, stall = median("seconds"), median("exchange"), median("stall")
        least, repeated = min(epoch["seconds"] for epoch in found), rows[procs] / rows[first]
        speedup = (figures[first]["median_s"] if figures else seconds) / seconds
        efficiency = speedup * first / procs if args.gpus else speedup  # on CPU they share the same cores
        costs = {
            "rows that several processes compute": seconds * (1 - 1 / repeated),
            "exchange of gradients and waiting for each other": exchange,
            "waiting for data": stall,
            "the optimizer, which every process runs": median("optimizer"),
        }
        cells.append([f"{procs}", f"{1e3 * seconds:.0f}", f"{1e3 * least:.0f}", f"{speedup:.2f}",
                      f"{100 * efficiency:.0f} %", f"{1e3 * exchange:.0f}", f"{1e3 * stall:.0f}", f"{repeated:.2f}",
                      max(costs, key=costs.get)])  # fmt: skip
        figures[procs] = {"n": len(found), "median_s": seconds, "min_s": least, "speedup": speedup,
                          "efficiency": efficiency, "rows": rows[procs], "costs_s": costs}  # fmt: skip
    print_table(cells, ["processes", "epoch ms", "min ms", "speed-up", "efficiency", "exchange ms", "stall ms", "rows",
                        "costs most"])  # fmt: skip
    return {"scaling": figures}


def epochs_of(args, procs):
    """Run four epochs of train.py with so many processes -> the log entries of the last three."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--dataset", args.dataset, "--root", args.root, "--fanout", ",".join(map(str, args.fanout)),
                 "--hidden", args.hidden, "--batch-size", args.batch_size // procs, "--epochs", 4,
                 "--log", f"{folder}/log", "--gpus", procs if args.gpus else 0,
                 "--procs", 1 if args.gpus else procs]  # fmt: skip
        command = [sys.executable, Path(__file__).with_name("train.py"), *map(str, words)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return [entry for entry in map(json.loads, open(f"{folder}/log")) if "epoch" in entry][1:4]


# ---------------------------------------------------------------------------------------------------------------------
# overlap


def bench_overlap(args):
    """Train on features that lie on the disk, with batches prepared ahead and without, and draw the median epoch of
    each.

    Their pages are dropped from the page cache before each epoch, which is 12 batches; blocks and labels stay in
    memory.
    """
    store = opened(args.dataset, args.root)
    path, nodes = store.path, torch.randperm(store.num_nodes, generator=torch.Generator().manual_seed(0))
    nodes = nodes[: 12 * args.batch_size].clone()
    del store
    laps = {0: [], 2: []}

    def epoch(depth):
        forget_pages(path)  # those that are mapped would stay: the store is opened anew
        store = GraphStore.open(path)
        run, clock = Ours(store, [], args, slots=depth + 1), Clock(False)
        loader = NodeLoader(store, nodes, args.fanout, batch_size=args.batch_size, depth=depth, sampler=run.sampler,
                            ring=run.ring, timed=clock.timed)  # fmt: skip
        waiting = time.perf_counter()
        for batch in loader:
            clock.add("stall", waiting, time.perf_counter())
            with clock.timed("forward"):
                logits = run.model(batch.blocks, batch.x, aggregated=run.ring.first_hop)
                loss = F.cross_entropy(logits, batch.y)
            with clock.timed("backward"):
                loss.backward()
            with clock.timed("optimizer"):
                run.optimizer.step()
                run.optimizer.zero_grad()
            waiting = time.perf_counter()
        laps[depth].append(clock.laps)

    names = {0: "one after the other", 2: "2 batches prepared ahead"}
    times = interleave({names[depth]: lambda i, depth=depth: epoch(depth) for depth in laps}, args.rounds, warmup=1)
    median, least = print_times("12 steps", times, "s", 2)
    ratio = median[names[0]] / median[names[2]]
    print(f"overlap makes them {ratio:.2f} times as fast")
    middle = {}
    for depth, name in names.items():
        order = sorted(range(args.rounds), key=times[name].__getitem__)
        middle[name] = laps[depth][1:][order[args.rounds // 2]]  # without the one that warmed up
    draw_timeline(middle, args.png or "results/timeline.png", steps=12)
    return {"median_s": median, "min_s": least, "ratio": ratio}


# ---------------------------------------------------------------------------------------------------------------------
# inference


def dgl_twin(layer):
    """DGL's layer of the same name, with the weights of ours."""
    import_dgl()
    from dgl import nn

    if isinstance(layer, model.GINConv):
        mlp = torch.nn.Sequential(*(type(m)(*m.weight.shape[::-1]) if hasattr(m, "weight") else m for m in layer.mlp))
        mlp.load_state_dict(layer.mlp.state_dict())
        return nn.GINConv(mlp, "sum", layer.eps.item(), learn_eps=True)
    if isinstance(layer, model.GCNConv):
        twin = nn.GraphConv(layer.linear.in_features, layer.out_dim, norm="both")
        twin.weight.data, twin.bias.data = layer.linear.weight.data.t().clone(), layer.bias.data.clone()
        return twin
    if isinstance(layer, model.GATv2Conv):
        twin = nn.GATv2Conv(layer.src_linear.in_features, layer.attn.shape[1], layer.heads)
        twin.attn.data, names = layer.attn.data[None].clone(), {"fc_src": "src_linear", "fc_dst": "dst_linear"}
    else:
        kind = "pool" if isinstance(layer, model.SAGEPoolConv) else "mean"
        twin = nn.SAGEConv(layer.self_linear.in_features, layer.out_dim, kind)
        names = {"fc_self": "self_linear", "fc_neigh": "neigh_linear", "fc_pool": "pool_linear"}
    for theirs, ours in names.items():
        if hasattr(layer, ours):
            getattr(twin, theirs).load_state_dict(getattr(layer, ours).state_dict())
    return twin


def dgl_inference(net, indptr, indices, x):
    """Layer-wise inference as DGL's own example (node_classification.py) writes it, with the weights of `net`.

    Returns:
        A function of the number of nodes taken at a time -> logits [V, C].
    """
    load, layers = import_dgl().dataloading, [dgl_twin(layer) for layer in net.layers]
    loops = isinstance(net.layers[0], model.GATv2Conv)
    graph = dgl_graph(*(model.with_self_loops(indptr, indices)[:2] if loops else (indptr, indices.long())))

    @torch.no_grad()
    def infer(batch_size):
        h = x
        for layer, width in zip(layers, (layer.out_dim for layer in net.layers)):
            full, everyone = load.MultiLayerFullNeighborSampler(1), torch.arange(graph.num_nodes())
            y = torch.empty(graph.num_nodes(), width)
            for sources, targets, blocks in load.DataLoader(graph, everyone, full, batch_size=batch_size):
                out = layer(blocks[0], h[sources])
                if out.dim() == 3:  # heads: side by side, averaged in the last layer
                    out = out.mean(1) if layer is layers[-1] else out.flatten(1)
                y[targets[0] : targets[-1] + 1] = out if layer is layers[-1] else F.relu(out)
            h = y
        return h

    return infer


def bench_inference(args):
    """Time exact inference on every node with the same weights; returns the figures and how far the logits are apart.

    GCN is timed in ours alone: DGL's loop divides by the out-degrees of a chunk's block and is not exact there.
    """
    keep_freed_memory()
    store = opened(args.dataset, args.root)
    graph, x = (in_memory(store.indptr), in_memory(store.indices)), in_memory(store.features.tensor)
    torch.manual_seed(0)
    widths = x.shape[1], args.hidden, store.num_classes
    net = model.GNN(*widths, conv=args.model, num_layers=len(args.fanout), heads=4).eval()
    runs = {
        "ours": lambda i: model.inference(net, *graph, x),
        "ours, tables in files": lambda i: model.inference(net, *graph, x, memory=0),
    }
    theirs = {} if args.model == "gcn" else made({"DGL": lambda: dgl_inference(net, *graph, x)})
    if theirs:
        runs |= {f"DGL, {n} nodes at a time": lambda i, n=n: theirs["DGL"](n) for n in (4096, 65536)}
    logits = {}
    times = interleave(runs, args.rounds, warmup=1, note=logits.__setitem__)
    apart = {name: (out - logits["ours"]).abs().max().item() for name, out in logits.items()}
    column = {name: f"{difference:.1e}" for name, difference in apart.items()}
    median, least = print_times("inference", times, "s", 2, **{"logits apart": column})
    return {"median_s": median, "min_s": least, "logits_apart": apart}
