"""Features of edges, fetched like those of nodes, as an input of layers and networks that take them: what they add to the
attention of model.py, GINE, and their flag. For layers copy this file, extras/__init__.py and model.py."""

import torch
from torch.nn import functional as F

import model
from model import GINConv, Linear, edge_dst, summable, unchanged


class GINEConv(GINConv, name="gine", after="gin"):
    """GIN with edge features (Hu et al., arXiv 1905.12265): MLP((1 + eps) h_v + sum(relu(h_u + W e_uv + b)))."""

    edge_features = "must"
    residual = "no"

    def __init__(self, in_dim, out_dim, norm="none", *, edge_dim):
        super().__init__(in_dim, out_dim, norm)
        self.edge_dim = edge_dim
        self.edge_linear = Linear(edge_dim, in_dim)

    def combine(self, near):
        count = near.indptr.diff().clamp(min=1).unsqueeze(1)
        estimate = near.edge_sum(self.edge_linear) * (near.degree[:, 1:] / count)
        return self.mlp((1 + self.eps) * near.x_dst + estimate.to(near.x_dst.dtype))


def edge_sum(near, edge_map):
    """See `Neighborhood.edge_sum` of model.py."""
    edges = near.edges.to(edge_map.weight.dtype)
    total = None
    if factors := as_product(edges, edge_map):
        total = model.attention.edge_sums(*near.block, *factors)
    if total is None:
        dst = edge_dst(near.indptr, near.indices)
        rows = F.relu(summable(near.messages).index_select(0, near.indices) + edge_map(edges))
        total = rows.new_zeros(len(near.x_dst), rows.shape[1]).index_add(0, dst, rows)
    return total


def attention_term(near, edge_map, dtype):
    """Return what the features of a `Neighborhood` add to the scores of its edges and self-loops, as in `as_product` and as a function
    -> [E + S, K D]."""
    edges = torch.cat([near.edges.to(dtype), near.edge_mean(dtype)])
    return as_product(edges, edge_map), lambda: edge_map(edges)


def as_product(edges, edge_map):
    """Return features [n, d] and a matrix [d, D] whose product is edge_map(edges), for native/attention.py; None without it,
    or if the linear map is customised."""
    if not model.fused or not unchanged(edge_map):
        return None
    if edge_map.bias is None:
        return edges, edge_map.weight.t()
    # the bias is the weight of a constant feature 1
    by = torch.cat([edge_map.weight, edge_map.bias.unsqueeze(1)], 1).t()
    return F.pad(edges, (0, 1), value=1), by


def use(flags, task, store):
    """Edge features are inputs of layers and networks that take them."""
    # here: layers take only model.py
    from disk.files import StoreError
    from run.kinds import layers_where, plain_layers
    from run.own_model import takes_edges

    conv = flags.conv
    if conv is None:
        takes, must = takes_edges(flags.model)
        why = "it does not ask for them"
        instead = "give that argument a default"
    else:
        takes = conv.sees_edges(flags.edge_features)
        # of a checkpoint, `check_widths` compares the widths
        asked = flags.edge_features and flags.resume in (None, "auto")
        must = asked or conv.edge_features == "must"
        able = layers_where(edge_features="can") + layers_where(edge_features="must")
        others = ", ".join(layers_where(edge_features="asked"))
        why = {"can": "--no-edge-features", "asked": "--edge-features makes it take them"}.get(
            conv.edge_features, f"{' and '.join(able)} take them, {others} with --edge-features"
        )
        instead = f"{', '.join(plain_layers())} do without"
        if conv.edge_features != "must":
            instead = "leave out --edge-features"
    # whether a layer sees them is open unless a flag says so
    settled = dict(edge_features=False) if conv and flags.edge_features is None else {}
    if store.edge_features is None:
        if must:
            raise StoreError(
                f"--model {flags.model} takes features of edges, and {store.path} has none; {instead}"
            )
        return {"flags": settled}
    if not takes:
        return {
            "flags": settled,
            "lines": [f"features of edges are not used by --model {flags.model}: {why}"],
        }
    return {
        "flags": dict.fromkeys(settled, True),
        "seen": {"edge_ids": True},
        "edges": store.edge_features,
        "lines": [
            f"the model sees the features of edges, {store.edge_dim} x {store.meta['edge_dtype']}"
        ],
    }


def flags(kinds):
    """Declare the flag of edge features."""
    able = kinds.layers_where(edge_features="can") + kinds.layers_where(edge_features="must")
    return {
        "residual": dict(
            edge_features=kinds.fixed(
                kinds.ON_OFF,
                None,
                f"layers see the features of edges (default: {', '.join(able)} if there are any)",
                needs=[kinds.built_in_model, layer_with_or_without],
            )
        )
    }


def layer_with_or_without(flags):
    """Refuse --edge-features of a layer that cannot use them, and --no-edge-features of one that needs them."""
    unable = "no" if flags.edge_features else "must"
    if flags.layer.edge_features == unable:
        able = [name for name, conv in model.CONVS.items() if conv.edge_features != unable]
        return f"is for --model {', '.join(able)}, --model is {flags.model}"
