"""python -m bench inference | layers: exact inference on every node beside DGL's layer-wise loop, with the same weights;
forward, backward and Adam of every model on the same sampled blocks, beside DGL's and PyG's layers, and the matrix
products alone."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import model
from bench import tools
from bench.tools import in_memory, opened
from inference import inference
from run.kinds import plain_layers
from sampler import NeighborSampler, import_dgl

# names of linear maps: DGL's to ours
LINEAR = {f"fc_{name}": f"{name}_linear" for name in ("src", "dst", "self", "neigh", "pool")}


def dgl_twin(layer):
    """Build DGL's counterpart of a layer, with the same weights."""
    import_dgl()
    from dgl import nn as layers

    isolated = {"allow_zero_in_degree": True}
    if isinstance(layer, model.GINConv):
        plain = {model.Linear: nn.Linear}
        mlp = nn.Sequential()
        for part in layer.mlp:
            shape = getattr(part, "weight", torch.empty(())).shape
            mlp.append(plain.get(type(part), type(part))(*shape[::-1]))
        mlp.load_state_dict(layer.mlp.state_dict())
        return layers.GINConv(mlp, "sum", layer.eps.item(), learn_eps=True)
    if isinstance(layer, model.GCNConv):
        twin = layers.GraphConv(layer.linear.in_features, layer.out_dim, **isolated)
        twin.weight.data = layer.linear.weight.data.t().clone()
        twin.bias.data = layer.bias.data.clone()
        return twin
    if isinstance(layer, model.GATv2Conv):
        sizes = layer.src_linear.in_features, layer.attn.shape[1], layer.heads
        twin = layers.GATv2Conv(*sizes, **isolated)
        twin.attn.data = layer.attn.data[None].clone()
    else:
        kind = {model.SAGEConv: "mean", model.SAGEPoolConv: "pool"}[type(layer)]
        twin = layers.SAGEConv(layer.self_linear.in_features, layer.out_dim, kind)
    for theirs, ours in LINEAR.items():
        if hasattr(layer, ours):
            getattr(twin, theirs).load_state_dict(getattr(layer, ours).state_dict())
    return twin


def call_dgl(layer, graph, h, last):
    """Call DGL's layer; heads are concatenated, or averaged in the last layer."""
    h = layer(graph, h)
    return h if h.dim() == 2 else h.mean(1) if last else h.flatten(1)


def dgl_inference(net, indptr, indices, x, batch_size):
    """Prepare layer-wise inference as DGL's own example (node_classification.py) writes it,
    batch_size nodes at a time, with the weights of `net` -> function that returns logits [V, C]."""
    load = import_dgl().dataloading
    layers = [dgl_twin(layer) for layer in net.layers]
    graph = tools.dgl_graph(indptr, indices.long())
    full = load.MultiLayerFullNeighborSampler(1)
    if isinstance(net.layers[0], model.GATv2Conv):
        graph = import_dgl().add_self_loop(graph)

    @torch.no_grad()
    def infer():
        h = x
        for layer, ours in zip(layers, net.layers):
            y = torch.empty(graph.num_nodes(), ours.out_dim)
            batches = load.DataLoader(graph, graph.nodes(), full, batch_size=batch_size)
            for sources, targets, blocks in batches:
                out = call_dgl(layer, blocks[0], h[sources], layer is layers[-1])
                y[targets[0] : targets[-1] + 1] = out if layer is layers[-1] else F.relu(out)
            h = y
        return h

    return infer


def bench_inference(args):
    """Time exact inference on every node with the same weights -> figures, and the largest difference of logits.

    GCN is timed in ours alone: DGL's loop divides by the out-degrees of a chunk's block and is not exact there.
    """
    store = opened(args.dataset, args.root)
    graph = in_memory(store.indptr), in_memory(store.indices)
    x = in_memory(store.features.tensor)
    torch.manual_seed(0)
    widths = x.shape[1], args.hidden, store.num_classes
    net = model.GNN(*widths, conv=args.model, num_layers=len(args.fanout), heads=4).eval()
    logits = {}

    def recording(name, make):
        infer = make()
        return lambda i: logits.update({name: infer()})

    exact = partial(inference, net, *graph, x)
    makers = {"ours": lambda: exact, "ours, tables in files": lambda: partial(exact, memory=0)}
    for nodes in (4096, 65536) if args.model != "gcn" else ():
        makers[f"DGL, {nodes} nodes at a time"] = partial(dgl_inference, net, *graph, x, nodes)
    contenders = {name: partial(recording, name, make) for name, make in makers.items()}
    rows = tools.compare("inference", contenders, args.rounds, warmup=1)
    apart = {name: (logits[name] - logits["ours"]).abs().max().item() for name in rows}
    print(f"logits at most {max(apart.values()):.1e} apart")
    return {"contenders": rows, "logits_apart": apart}


def bench_layers(args):
    """Time a step of every model's layers, dropout 0, on inputs gathered beforehand -> {"layers":
    {model: {contender: figures}}}."""
    store = opened(args.dataset, args.root)
    random = torch.Generator().manual_seed(0)
    seeds = torch.randperm(store.num_nodes, generator=random)[: args.batch_size]
    sampler = NeighborSampler(store.indptr, store.indices, args.fanout, threads=args.threads)
    blocks = sampler.sample(seeds, 0)
    x = store.features.gather(blocks[0].src_nodes.long())
    y = store.labels[blocks[-1].src_nodes[: args.batch_size].long()]
    widths = [x.shape[1], *[args.hidden] * (len(blocks) - 1), store.num_classes]
    degrees = model.graph_degrees(store.indptr, store.indices)
    figures = {}
    for conv in args.models.split(",") if args.models else plain_layers():
        shape = conv, widths, args.heads if conv == "gat" else 1, blocks
        makers = {"ours": partial(ours, degrees=degrees), "DGL": dgl, "PyG": pyg}
        contenders = {n: partial(training, partial(m, *shape), x, y) for n, m in makers.items()}
        contenders["products"] = partial(products, partial(makers["ours"], *shape), x, y)
        figures[conv] = tools.compare(conv, contenders, args.rounds, twice=True)
    return {"layers": figures}


def training(make, x, y):
    """Prepare training steps of a network on fixed inputs x and labels y -> function of the round."""
    net, apply = make()
    optimizer = torch.optim.Adam(net.parameters(), fused=True)
    return lambda i: tools.descend(F.cross_entropy(apply(x), y), optimizer)


class Products(TorchDispatchMode):
    """Notes the matrix products of what runs inside -> `calls` [(function, arguments)]."""

    calls = ()

    def __torch_dispatch__(self, func, _, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("mm", "addmm", "_linear_pointwise"):
            self.calls += ((func, args),)
        return func(*args, **(kwargs or {}))


def products(make, x, y):
    """Prepare the matrix products of a network's step alone -> function of the round."""
    step = training(make, x, y)
    with Products() as noted:
        step(0)

    def again(i):
        for func, args in noted.calls:
            func(*args)

    return again


def ours(conv, widths, heads, blocks, degrees=None):
    """Prepare this project's network -> (module, function that applies it)."""
    options = {"num_layers": len(blocks), "dropout": 0.0, "heads": heads}
    net = model.GNN(widths[0], widths[1], widths[-1], conv=conv, **options)
    net.degrees = degrees
    return net, lambda x: net(blocks, x)


def dgl(*shape):
    """Prepare DGL's network with the same weights -> (module, function that applies it)."""
    net = nn.ModuleList(map(dgl_twin, ours(*shape)[0].layers))
    graphs = [block.to_dgl() for block in shape[-1]]
    return net, lambda x: tools.forward(net, graphs, x, call=call_dgl)


def pyg(conv, widths, heads, blocks):
    """Prepare PyG's network, of plain torch operations -> (module, function that applies it)."""
    from torch_geometric import nn as layers

    if conv == "gcn":
        raise NotImplementedError("PyG's GCNConv takes graphs, not blocks")
    mlp = lambda a, b: nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, b))  # noqa: E731
    gat = partial(layers.GATv2Conv, heads=heads, add_self_loops=False)
    make = {
        "sage": lambda a, b, last: layers.SAGEConv((a, a), b),
        "sage-pool": lambda a, b, last: layers.SAGEConv((a, a), b, aggr="max", project=True),
        "gat": lambda a, b, last: gat((a, a), b if last else b // heads, concat=not last),
        "gin": lambda a, b, last: layers.GINConv(mlp(a, b), train_eps=True),
    }[conv]
    net = nn.ModuleList(make(a, b, b == widths[-1]) for a, b in zip(widths, widths[1:]))
    edges = [(block.to_pyg()[0], block.num_dst) for block in blocks]
    call = lambda layer, block, h, last: layer((h, h[: block[1]]), block[0])  # noqa: E731
    return net, lambda x: tools.forward(net, edges, x, call=call)
