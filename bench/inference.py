"""python -m bench inference: exact inference on every node beside DGL's layer-wise loop, with the same weights."""

import torch
from torch.nn import functional as F

import model
from bench.tools import dgl_graph, in_memory, interleave, opened, prepared, print_times, turned
from run.allocator import keep_freed_memory
from sampler import import_dgl

# weights by name: DGL's, ours
GAT = {"fc_src": "src_linear", "fc_dst": "dst_linear"}
SAGE = {"fc_self": "self_linear", "fc_neigh": "neigh_linear", "fc_pool": "pool_linear"}


def dgl_twin(layer):
    """DGL's layer of the same name, with the weights of ours."""
    import_dgl()
    from dgl import nn

    lonely = {"allow_zero_in_degree": True}
    if isinstance(layer, model.GINConv):
        plain = {model.Linear: torch.nn.Linear, model.ReLU: torch.nn.ReLU}
        mlp = torch.nn.Sequential(
            *(
                plain.get(type(m), type(m))(*getattr(m, "weight", torch.empty(())).shape[::-1])
                for m in layer.mlp
            )
        )
        mlp.load_state_dict(layer.mlp.state_dict())
        return nn.GINConv(mlp, "sum", layer.eps.item(), learn_eps=True)
    if isinstance(layer, model.GCNConv):
        twin = nn.GraphConv(layer.linear.in_features, layer.out_dim, **lonely)
        twin.weight.data = layer.linear.weight.data.t().clone()
        twin.bias.data = layer.bias.data.clone()
        return twin
    if isinstance(layer, model.GATv2Conv):
        twin = nn.GATv2Conv(
            layer.src_linear.in_features, layer.attn.shape[1], layer.heads, **lonely
        )
        twin.attn.data, names = layer.attn.data[None].clone(), GAT
    else:
        kind = "pool" if isinstance(layer, model.SAGEPoolConv) else "mean"
        twin, names = nn.SAGEConv(layer.self_linear.in_features, layer.out_dim, kind), SAGE
    for theirs, ours in names.items():
        if hasattr(layer, ours):
            getattr(twin, theirs).load_state_dict(getattr(layer, ours).state_dict())
    return twin


def call_dgl(layer, graph, h, last):
    """DGL's layer, with heads side by side, averaged in the last layer."""
    h = layer(graph, h)
    return h if h.dim() == 2 else h.mean(1) if last else h.flatten(1)


def dgl_inference(net, indptr, indices, x):
    """Layer-wise inference as DGL's own example (node_classification.py) writes it, with the weights of `net` ->
    function of the number of nodes taken at a time -> logits [V, C]."""
    load, layers = import_dgl().dataloading, [dgl_twin(layer) for layer in net.layers]
    graph = dgl_graph(indptr, indices.long())
    if isinstance(net.layers[0], model.GATv2Conv):
        graph = import_dgl().add_self_loop(graph)

    @torch.no_grad()
    def infer(batch_size):
        h = x
        for layer, ours in zip(layers, net.layers):
            full, everyone = load.MultiLayerFullNeighborSampler(1), torch.arange(graph.num_nodes())
            y = torch.empty(graph.num_nodes(), ours.out_dim)
            batches = load.DataLoader(graph, everyone, full, batch_size=batch_size)
            for sources, targets, blocks in batches:
                out = call_dgl(layer, blocks[0], h[sources], layer is layers[-1])
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
    steps = {
        "ours": lambda i: model.inference(net, *graph, x),
        "ours, tables in files": lambda i: model.inference(net, *graph, x, memory=0),
    }
    theirs = {} if args.model == "gcn" else {"DGL": lambda: dgl_inference(net, *graph, x)}
    for infer in prepared(theirs).values():
        for n in (4096, 65536):
            steps[f"DGL, {n} nodes at a time"] = lambda i, infer=infer, n=n: infer(n)
    logits = {}
    times = interleave(steps, args.rounds, warmup=1, note=logits.__setitem__)
    apart = {name: (out - logits["ours"]).abs().max().item() for name, out in logits.items()}
    return turned(print_times("inference", times, "s", logits_apart=apart))
