"""GraphSAGE, GCN, GATv2, GIN, R-GCN and R-GAT over sampled blocks, GATv2 and GINE with edge features.

Copy this file into your own code: it needs only torch. A block is anything with the fields of
`sampler.Block`: S destinations, N sources, E edges.

    model = SAGE(in_dim, hidden, num_classes, num_layers=3)
    model = GNN(in_dim, hidden, num_classes, conv="gat", heads=4, num_layers=3)
    logits = model(blocks, x)                       # x: features of blocks[0].src_nodes -> a row for each seed
    model = GNN(in_dim, hidden, num_classes, conv="gine", edge_dim=8, num_layers=3)     # or "gat"
    logits = model(blocks, x, edges=[e[block.edge_ids] for block in blocks])            # e [M, 8], of all edges

With the folder native/ beside it, gathers, means, ReLU with dropout and attention are fused in C and
CUDA, and runs repeat to the last bit. Torch operations, which R-GCN and R-GAT use to sum over types, add with
atomics on a GPU, so the last bits of gradients and attention may differ between runs.
"""

from functools import wraps
from itertools import islice, pairwise

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

try:
    from native import layers as fused
except ImportError:
    fused = None

# ---- steps that native/ fuses


def native_first(function):
    """Decorate torch operations: native/layers.py's function of that name replaces them unless it returns None."""

    @wraps(function)
    def first(*args, **options):
        done = fused and getattr(fused, function.__name__)(*args, **options)
        return function(*args, **options) if done is None else done

    return first


@native_first
def self_and_mean(indptr, indices, h, self_rows=None, out=None):
    """Concatenate each destination's own row and the mean of its neighbours' rows: the input of a SAGE layer's product.

    Args:
        indptr: [S+1], indices: [E] rows of h, of one integer dtype.
        h: float32 or bfloat16 [N, F].
        self_rows: [S] rows of h that are the destinations'; None: the first S. With global ids in
            indices and self_rows, h can be the feature table itself: the outermost hop then needs no
            gather, but h gets no gradient.
        out: [S, 2F] to write into (float32 or bfloat16), if no gradient is needed.

    Returns:
        [S, 2F]; without edges the mean is zero.
    """
    h_dst = h[: indptr.numel() - 1] if self_rows is None else h.index_select(0, self_rows)
    mean, width = mean_neighbours(indptr, indices, h), h.shape[1]
    if out is None:
        return torch.cat([h_dst, mean], 1)
    out[:, :width], out[:, width:] = h_dst, mean
    return out


@native_first
def own_plus_mean(indptr, indices, h, alpha, beta, *, self_rows=None, gamma=None):
    """Compute alpha * own row + beta * mean of the neighbours' rows for each destination.

    Args:
        indptr, indices, h [N, F], self_rows: as for `self_and_mean`.
        alpha, beta: [S]. gamma: [N] factors of the neighbours' rows; gets no gradient.

    Returns:
        [S, F].
    """
    h_dst = h[: len(alpha)] if self_rows is None else h.index_select(0, self_rows)
    mean = mean_neighbours(indptr, indices, h if gamma is None else h * gamma.unsqueeze(1))
    return (alpha.unsqueeze(1) * h_dst + beta.unsqueeze(1) * mean).to(h.dtype)


@native_first
def mean_neighbours(indptr, indices, h):
    """Average rows of h [N, D] over each destination's edges -> [S, D]; zero without edges."""
    bag = F.embedding_bag(indices, summable(h), indptr, mode="mean", include_last_offset=True)
    return bag.to(h.dtype)


@native_first
def max_neighbours(indptr, indices, h):
    """Column-wise maximum of rows of h [N, D] over each destination's edges -> [S, D]; zero without edges."""
    bag = F.embedding_bag(indices, summable(h), indptr, mode="max", include_last_offset=True)
    return bag.to(h.dtype)


def summable(h):
    """Return rows of 16-bit floats in float32: torch adds these up, also the gradients of a row, with a rounding per
    term, so that a sum of a few hundred equal terms stops growing."""
    return h.float() if h.dtype in (torch.bfloat16, torch.float16) else h


@native_first
def gather_rows(features, ids, out=None):
    """Gather rows ids [n] of features [V, F] -> [n, F], into `out` if given: index_select with prefetch."""
    return torch.index_select(features, 0, ids, out=out)


def relu_dropout(h, p, training=True, nodes=None, seed=None):
    """Compute dropout(relu(h)), in place if native/layers.py does it.

    The mask is a function of seed, node and column, so a part of a batch has the mask of the whole
    batch, on any device. It takes one random byte per element: p is rounded to 1/256.

    Args:
        h: [S, D]. p: probability below 1. training: False for no dropout.
        nodes: int [S] distinct ids of the rows; None: their positions.
        seed: int; None: drawn from torch's CPU generator.
    """
    drop = drop_byte(p) if training else 0
    seed = drawn_seed() if drop and seed is None else seed or 0
    done = fused and fused.relu_dropout(h, nodes, seed, drop)
    if done is not None:
        return done
    nodes = torch.arange(len(h), device=h.device) if nodes is None else nodes
    return dropout(F.relu(h), nodes, seed, drop) if drop else F.relu(h)


@native_first
def dropout(x, nodes, seed, drop):
    """Apply dropout to x [N, F] with the mask of `relu_dropout`; nodes: [N] ids. drop: of `drop_byte`."""
    kept = _random_bytes(nodes, x.shape[1], seed) >= drop
    return x * (kept.to(x.dtype) * (256 / (256 - drop)))


def drop_byte(p):
    """Return the threshold b for which a random byte is below b with probability p, rounded to 1/256."""
    if not 0 <= p < 1:
        raise ValueError(f"dropout is {p}: a probability below 1 is needed")
    return min(round(256 * p), 255)


def drawn_seed():
    """Draw a seed from torch's CPU generator -> int."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


def layer_seed(key, layer):
    """Derive the seed of a layer's dropout from a batch's key -> 64 bits of splitmix64, as a signed int.

    The sampling rule uses mix(key ^ hop), and ~layer is never a hop. In a CUDA graph the key is
    (base, step), step an int64 tensor [1] on the GPU, and stands for mix(base ^ step); the seed is
    then (base, step, ~layer), from which the kernels compute the same bits.
    """
    if isinstance(key, tuple):
        return *key, ~layer
    z = _mix(key ^ ~layer) & (1 << 64) - 1
    return z - (z >> 63 << 64)


def _random_bytes(nodes, D, seed, first=0):
    """Draw the dropout bytes of the C code with torch operations -> uint8 [S, D], from column 8 * first [S, 1] on."""
    if isinstance(seed, tuple):
        base, step, layer = seed
        seed = _mix(_mix(step ^ base) ^ layer)
    groups = torch.arange(-(-D // 8), device=nodes.device)
    row = _mix(nodes.long() ^ seed).unsqueeze(1)
    # little-endian: the first column is the low byte
    drawn = _mix(row + (first + groups - 1) * _GOLDEN).reshape(-1)
    return drawn.view(torch.uint8).view(len(nodes), 8 * len(groups))[:, :D]


_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


def _mix(z):
    """splitmix64 (Steele, Lea, Flood, OOPSLA 2014) of an int, modulo 2^64, or of an int64 tensor, where products wrap."""
    z = z + _GOLDEN
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        z = (z ^ (z >> shift & (1 << (64 - shift)) - 1)) * (factor - (factor >> 63 << 64))
    return z


# ---- layers

CONVS = {}  # name -> class: the subclasses of `Conv` that have one


def layers_where(**stated):
    """Return the names of the layers that state these values about themselves: layers_where(padded=True)."""
    return [n for n, c in CONVS.items() if all(getattr(c, k) == v for k, v in stated.items())]


def plain_layers():
    """Return the names of the layers that need neither types nor features of edges."""
    return [n for n, c in CONVS.items() if not c.uses_types and c.edge_features != "must"]


class Conv(nn.Module):
    """Base of all layers: each node makes a message of its row, each destination combines its neighbours' messages.

    Training computes the messages of a block's sources, inference those of all nodes, once; both then
    call `combine`. (SAGEConv, GCNConv and RGCNConv also have a faster form for training: their own `forward`,
    `GNN._fused`, `RGCNConv.after_inputs`. Change it together with `combine`; a subclass is trained without it.)
    A layer is made as Layer(in_dim, out_dim), has `out_dim` and

        message(h, degree=None): [n, F] -> [n, width], also of no rows; the rows themselves unless overridden
        combine(indptr, indices, message, rows, h_dst, degree=None, nodes=None, seed=None): -> [S, D]; `rows` [S]
            are the positions of the destinations' own messages (None: the first S), h_dst [S, F] their
            rows; inference passes neither nodes nor seed. Layers with an edge_dim also get edges [E, edge_dim],
            the edge features; layers that use types get types [E].

    degree is float [n, 2] or [S, 2]: out- and in-degree of these nodes in the whole graph; None: in
    the block. nodes [S] are ids of the destinations and seed is an int, as for `relu_dropout`, for a
    layer with dropout inside.

    A subclass that is given a `name`, as in `class GINConv(Conv, name="gin")`, is a layer of `GNN` and of --model.
    What it states about itself, here with the defaults:
    """

    edge_features = "no"  # it has no use for them ("no"), it "can" use them (edge_dim is their width or 0), it "must" have them
    uses_types = False  # it needs types of edges
    uses_degree = False  # it needs degrees in the whole graph
    norm = "none"  # norm after hidden layers that it trains well with
    residual = (
        "no"  # residual connections by default: "no", "yes", "if classes disagree" (of neighbours)
    )
    padded = False  # reads neighbours only through functions that skip edges with index -1: CUDA graphs can hold it
    takes = ()  # options of GNN that it is made with: "heads", "dropout", "norm", "bases"

    edge_dim = 0

    def __init_subclass__(cls, name=None, **options):
        super().__init_subclass__(**options)
        if name is not None:
            CONVS[name] = cls

    def forward(self, block, h, degree=None, seed=None, edges=None):
        """h [N, F] of the block's sources, edges [E, edge_dim] -> [S, D] of its destinations."""
        check_rows(block, h)
        S = block.indptr.numel() - 1
        if degree is None and self.uses_degree:
            degree = block_degrees(block)
        of_dst = None if degree is None else degree[:S]
        extra = {} if seed is None else {"nodes": block.src_nodes[:S], "seed": seed}
        if self.edge_dim:
            check_edges(edges, len(block.indices), self.edge_dim)
            extra["edges"] = edges
        if self.uses_types:
            extra["types"] = block.edge_type
        message = self.message(h, degree)
        return self.combine(block.indptr, block.indices, message, None, h[:S], of_dst, **extra)

    def message(self, h, degree=None):
        return h


def check_rows(block, h):
    """Raise ValueError unless h has one row per source of the block and the indices are positions in h: C code would read
    past its end, or take rows of other nodes."""
    count, indices, S = block.src_nodes.numel(), block.indices, block.indptr.numel() - 1
    alone = count == S and indices.device.type == "cpu" and len(indices)
    if alone and int(indices.max()) >= count:
        raise ValueError("a block has global ids as indices: sample with relabel_outer=True")
    if not len(h) == count >= S:
        needed = "one for each of block.src_nodes, destinations first, and blocks outermost first"
        raise ValueError(f"x has {len(h)} rows: {max(count, S)} are needed, {needed}")


def check_edges(edges, count, width):
    """Raise ValueError unless edges is [count, width]: C code would read past its end."""
    shape = None if edges is None else [*edges.shape]
    if shape != [count, width]:
        raise ValueError(f"edges is {shape}: features of each edge, [{count}, {width}], are needed")


def unchanged(*modules, kinds=frozenset()):
    """Whether modules are plain linear maps, or of other `kinds`: no adapter in the place of one, no hooks, and no method
    set on a module itself."""
    kinds |= {Linear}
    attributes = [value for m in modules for value in vars(m).values()]
    plain = not any(map(callable, attributes)) and not hooked(*modules)
    return plain and all(type(m) in kinds for m in modules)


def hooked(*modules):
    """Whether a module has hooks, or a `forward` set on it that is not its class's."""
    changed = ("forward" in vars(m) and overrides(m, type(m), ["forward"]) for m in modules)
    return any(changed) or any(vars(m).get(name) for m in modules for name in HOOKS)


def overrides(module, base, names=("message", "combine")):
    """Whether a module, or its class, overrides any of these methods of `base`."""
    return any(getattr(module, name) != getattr(base, name).__get__(module) for name in names)


def block_degrees(block):
    """Out- and in-degree in a block -> float32 [N, 2]; out-degree - 1 for sources without the self-loop GCN adds."""
    S, N = block.indptr.numel() - 1, block.src_nodes.numel()
    ones = torch.ones_like(block.indices, dtype=torch.int64)
    out = ones.new_zeros(N).index_add_(0, block.indices, ones)  # bincount would wait for a GPU
    out[S:] = (out[S:] - 1).clamp(min=0)
    return torch.stack([out, F.pad(block.indptr.diff().long(), (0, N - S))], 1).float()


class Linear(nn.Linear):
    """nn.Linear computed by native/layers.py."""

    def forward(self, x):
        return (fused or F).linear(x, self.weight, self.bias)


class SAGEConv(Conv, name="sage"):
    """GraphSAGE layer, mean aggregator (Hamilton, Ying, Leskovec, arXiv 1706.02216): W_self h_v + W_neigh mean(h_u)."""

    padded = True

    def __init__(self, in_dim, out_dim):
        super().__init__()
        self.out_dim = out_dim
        self.self_linear = Linear(in_dim, out_dim)
        self.neigh_linear = Linear(in_dim, out_dim, bias=False)
        # mean and W_neigh commute: send the narrower
        self.project_first = in_dim > out_dim

    def forward(self, block, h, degree=None, seed=None, edges=None):
        if overrides(self, SAGEConv):
            return super().forward(block, h, degree, seed, edges)
        check_rows(block, h)
        return self.apply_linear(self_and_mean(block.indptr, block.indices, h))

    def apply_linear(self, pair):
        """Multiply pair [S, 2F] of own row and mean by both weights, in one product -> [S, D]."""
        if not unchanged(self.self_linear, self.neigh_linear):
            h_dst, mean = pair.chunk(2, 1)
            return self.self_linear(h_dst) + self.neigh_linear(mean)
        return (fused or F).linear(pair, *self.product())

    def product(self):
        """Return the matrix [D, 2F] and bias [D] for pairs of own row and mean."""
        weights = self.self_linear.weight, self.neigh_linear.weight
        return torch.cat(weights, 1), self.self_linear.bias

    def factors(self, block, degree=None):
        """Return None: pairs are not scaled."""

    def message(self, h, degree=None):
        return self.neigh_linear(h) if self.project_first else h

    def combine(self, indptr, indices, message, rows, h_dst, degree=None, nodes=None, seed=None):
        if not self.project_first:
            return self.apply_linear(self_and_mean(indptr, indices, message, rows))
        return self.self_linear(h_dst) + mean_neighbours(indptr, indices, message)


class SAGEPoolConv(Conv, name="sage-pool"):
    """GraphSAGE layer, max-pooling aggregator (arXiv 1706.02216): W_self h_v + W_neigh max(relu(W_pool h_u + b))."""

    norm = "layer"
    padded = True

    def __init__(self, in_dim, out_dim):
        super().__init__()
        self.out_dim = out_dim
        self.pool_linear = Linear(in_dim, in_dim)
        self.self_linear = Linear(in_dim, out_dim)
        self.neigh_linear = Linear(in_dim, out_dim, bias=False)

    def message(self, h, degree=None):
        return self.pool_linear(h)

    def combine(self, indptr, indices, message, rows, h_dst, degree=None, nodes=None, seed=None):
        """See `Conv`. ReLU and maximum commute: there are fewer destinations than sources."""
        pooled = relu_dropout(max_neighbours(indptr, indices, message), 0)
        return self.self_linear(h_dst) + self.neigh_linear(pooled)


class GCNConv(Conv, name="gcn"):
    """Graph convolution (Kipf, Welling, arXiv 1609.02907): W sum(h_u / sqrt((d_u + 1) (d_v + 1))) + b, v among the u.

    The sum is the in-degree times the mean over the block's edges: in a uniformly sampled block an
    unbiased estimate. With degree=None the layer is DGL's GraphConv(norm="both") on the block with self-loops.
    """

    uses_degree = True
    # it mixes a node's row with its neighbours'
    residual = "if classes disagree"
    padded = True

    def __init__(self, in_dim, out_dim):
        super().__init__()
        self.out_dim = out_dim
        self.linear = Linear(in_dim, out_dim, bias=False)
        self.bias = nn.Parameter(torch.zeros(out_dim))
        nn.init.xavier_uniform_(self.linear.weight)
        self.project_first = in_dim > out_dim

    def forward(self, block, h, degree=None, seed=None, edges=None):
        if overrides(self, GCNConv) or not unchanged(self.linear):
            return super().forward(block, h, degree, seed, edges)
        check_rows(block, h)
        alpha, beta, gamma = self.factors(block, degree)
        # also where the output is narrower: sampled blocks have fewer destinations than sources
        total = own_plus_mean(block.indptr, block.indices, h, alpha, beta, gamma=gamma)
        return (fused or F).linear(total, *self.product())

    def product(self):
        """Return the matrix [D, F] and bias [D] for sums over neighbours."""
        return self.linear.weight, self.bias

    def factors(self, block, degree=None):
        """Return alpha [S], beta [S] and gamma [N] of `own_plus_mean` for a block; degree [N, 2]."""
        degree = block_degrees(block) if degree is None else degree
        gamma, of_dst = (degree[:, 0] + 1).rsqrt(), degree[: len(block.indptr) - 1, 1]
        scale = (of_dst + 1).rsqrt()
        return scale * gamma[: len(scale)], scale * of_dst, gamma

    def message(self, h, degree):
        return (self.linear(h) if self.project_first else h) / (degree[:, :1] + 1).sqrt()

    def combine(self, indptr, indices, message, rows, h_dst, degree, nodes=None, seed=None):
        scale = (degree[:, 1] + 1).rsqrt()
        beta = scale * degree[:, 1]
        total = own_plus_mean(indptr, indices, message, scale, beta, self_rows=rows)
        if unchanged(self.linear) and not self.project_first:
            return (fused or F).linear(total, *self.product())
        total = total if self.project_first else self.linear(total)
        return total if self.bias is None else total + self.bias


class MLP(nn.Sequential):
    """That of GIN: linear, norm, ReLU, linear."""


class GINConv(Conv, name="gin"):
    """Graph isomorphism layer (Xu et al., arXiv 1810.00826): MLP((1 + eps) h_v + sum(h_u)), eps learned.

    The sum, estimated as in `GCNConv`, grows with the degree. A norm after the MLP's first linear
    layer compensates for this, as in the authors' networks; without it, training on graphs of large
    degree may not work at all.
    """

    uses_degree = True
    norm = "layer"
    # without, it learns nothing on some graphs
    residual = "yes"
    padded = True
    takes = ("norm",)

    def __init__(self, in_dim, out_dim, norm="none"):
        super().__init__()
        self.out_dim = out_dim
        # layer norm reduces two values to their signs, through which no gradient passes
        degenerate = norm == "layer" and out_dim < 3
        norms = [] if norm == "none" or degenerate else [NORMS[norm](out_dim)]
        layers = [Linear(in_dim, out_dim), *norms, nn.ReLU(), Linear(out_dim, out_dim)]
        self.mlp = MLP(*layers)
        self.eps = nn.Parameter(torch.zeros(1))

    def combine(self, indptr, indices, message, rows, h_dst, degree, nodes=None, seed=None):
        alpha = (1 + self.eps).expand(len(degree))
        beta = degree[:, 1]
        return self.mlp(own_plus_mean(indptr, indices, message, alpha, beta, self_rows=rows))


class GINEConv(GINConv, name="gine"):
    """GIN with edge features (Hu et al., arXiv 1905.12265): MLP((1 + eps) h_v + sum(relu(h_u + W e_uv + b)))."""

    edge_features = "must"
    residual = "no"
    padded = False

    def __init__(self, in_dim, out_dim, norm="none", edge_dim=0):
        super().__init__(in_dim, out_dim, norm)
        self.edge_dim, self.edge_linear = edge_dim, Linear(edge_dim, in_dim)

    def combine(
        self, indptr, indices, message, rows, h_dst, degree, nodes=None, seed=None, edges=None
    ):
        linear, count, total = self.edge_linear, indptr.diff(), None
        edges = edges.to(linear.weight.dtype)
        if fused and unchanged(linear) and linear.bias is not None:
            wider = F.pad(edges, (0, 1), value=1)  # the bias is the weight of a constant feature 1
            by = torch.cat([linear.weight, linear.bias.unsqueeze(1)], 1).t()
            total = fused.edge_sums(indptr, indices, message, wider, by)
        if total is None:
            dst = torch.repeat_interleave(count, output_size=indices.numel())
            sent = F.relu(summable(message).index_select(0, indices) + linear(edges))
            total = sent.new_zeros(h_dst.shape).index_add(0, dst, sent)
        estimate = total * (degree[:, 1:] / count.clamp(min=1).unsqueeze(1))
        return self.mlp((1 + self.eps) * h_dst + estimate.to(h_dst.dtype))


class GATv2Conv(Conv, name="gat"):
    """Graph attention layer, GATv2 (Brody, Alon, Yahav, arXiv 2105.14491; GAT: 1710.10903), with self-loops.

    Head k: sum(a_uv W_src h_u), where a_uv is the softmax over v's edges of
    attn . leaky_relu(W_src h_u + W_dst h_v). With edge features, W_edge e_uv is added inside; a
    self-loop has the mean of the features of v's edges.

    Args:
        in_dim, out_dim: F, D. heads: K.
        mean: average the heads, each D wide; otherwise they are concatenated, each D / K wide.
        dropout: probability for each attention weight.
        edge_dim: width of the edge features; 0: none.
    """

    edge_features = "can"
    norm = "layer"
    # it mixes a node's row with its neighbours'
    residual = "if classes disagree"
    padded = True
    takes = ("heads", "dropout")

    def __init__(self, in_dim, out_dim, heads=1, *, mean=False, dropout=0.0, edge_dim=0):
        super().__init__()
        if not mean and out_dim % heads:
            shared = f"width {out_dim} cannot be shared by {heads} heads"
            raise ValueError(f"{shared}: give a multiple of {heads}")
        self.out_dim, self.heads, self.mean, self.dropout = out_dim, heads, mean, dropout
        width = out_dim if mean else out_dim // heads
        self.edge_dim = edge_dim
        self.src_linear = Linear(in_dim, heads * width)
        self.dst_linear = Linear(in_dim, heads * width)
        self.attn = nn.Parameter(torch.empty(heads, width))
        self.edge_linear = Linear(edge_dim, heads * width, bias=False) if edge_dim else None
        for weight in (self.src_linear.weight, self.dst_linear.weight, self.attn):
            nn.init.xavier_uniform_(weight)

    def message(self, h, degree=None):
        return self.src_linear(h)

    def combine(
        self, indptr, indices, message, rows, h_dst, degree=None, nodes=None, seed=None, edges=None
    ):
        drop = drop_byte(self.dropout) if self.training else 0
        seed = drawn_seed() if drop and seed is None else seed or 0
        S, (K, D) = len(h_dst), self.attn.shape
        target = self.dst_linear(h_dst)
        by = None
        drawn = nodes, seed, drop
        if self.edge_dim:
            edges, by = edges.to(self.attn.dtype), self.edge_linear.weight.t()
            ids = torch.arange(len(edges), device=edges.device, dtype=indptr.dtype)
            edges = torch.cat([edges, mean_neighbours(indptr, ids, edges)])
        out = None
        if fused and (by is None or unchanged(self.edge_linear)):
            given = {"self_rows": rows, "drawn": drawn, "edges": edges, "by": by}
            out = fused.attend(indptr, indices, message, target, self.attn, **given)
        if out is None:
            out = self._attend(indptr, indices, message, target, rows, drawn, edges)
        return out.view(S, K, D).mean(1) if self.mean else out

    def _attend(self, indptr, indices, source, target, rows, drawn, edges):
        """Attention in torch operations: source [N, K D], target [S, K D] -> [S, K D]."""
        S, (K, D), count = target.shape[0], self.attn.shape, indptr.diff().long()
        self_loops = torch.arange(S, device=indices.device)
        of_edges = self_loops.repeat_interleave(count, output_size=indices.numel())
        dst = torch.cat([of_edges, self_loops])
        position = torch.arange(1, len(dst) + 1, device=dst.device) - indptr.index_select(0, dst)
        position[indices.numel() :] = 0
        indices = torch.cat([indices, self_loops.to(indices.dtype) if rows is None else rows])
        E, source = indices.numel(), summable(source)
        message = source.index_select(0, indices)
        z = message + target.index_select(0, dst)
        if edges is not None:
            z = z + self.edge_linear(edges)
        scores = (F.leaky_relu(z.view(E, K, D).to(self.attn.dtype), 0.2) * self.attn).sum(2)
        weights, (nodes, seed, drop) = edge_softmax(scores, dst, S), drawn
        # keyed by ~destination, place in the list and head; the mask of its row, by the destination
        if drop:
            ids = dst if nodes is None else nodes.index_select(0, dst)
            kept = _random_bytes(~ids, K, seed, (-(-K // 8) * position).unsqueeze(1)) >= drop
            weights = weights * (kept * (256 / (256 - drop))).to(weights.dtype)
        sent = message.view(E, K, D) * weights.to(message.dtype).unsqueeze(2)
        return sent.new_zeros(target.shape).index_add(0, dst, sent.view(E, K * D)).to(target.dtype)


LOOPED = 16  # up to this many types: one matrix product per type


class RGCNConv(Conv, name="rgcn"):
    """Relational graph convolution (Schlichtkrull et al., arXiv 1703.06103): W_0 h_v + b + sum_r W_r mean_r(h_u), the
    mean over v's edges of type r.

    Args:
        in_dim, out_dim: F, D. num_types: R.
        bases: B: W_r = sum_b a_rb V_b, with B matrices V_b for all types; 0: one matrix per type.
    """

    uses_types = True
    padded = True
    takes = ("num_types", "bases")

    averages = True

    def __init__(self, in_dim, out_dim, num_types, bases=0):
        super().__init__()
        self.out_dim, self.num_types = out_dim, num_types
        self.self_linear = Linear(in_dim, out_dim)
        self.weight = nn.Parameter(torch.empty(bases or num_types, in_dim, out_dim))
        self.coefficients = nn.Parameter(torch.empty(num_types, bases)) if bases else None
        nn.init.uniform_(self.weight, -(in_dim**-0.5), in_dim**-0.5)
        if bases:
            nn.init.xavier_uniform_(self.coefficients)

    def combine(
        self, indptr, indices, message, rows, h_dst, degree=None, nodes=None, seed=None, types=None
    ):
        S, R, out = len(h_dst), self.num_types, self.self_linear(h_dst)
        on_gpu = fused and fused.is_gpu(message.device)
        if on_gpu and self.averages and R <= LOOPED and types is not None:
            means = self.means_by_type(indptr, indices, types, message)
            return out + means.flatten(1) @ self.matrices().flatten(0, 1)
        group, counts, indices = self._grouped(indptr, indices, types)
        dst, kinds = group // R, group % R
        few = 2 * len(group) < S * R
        if self.averages and self.coefficients is None and R <= LOOPED and few:
            out, maps = out.clone(), [(weight.t(), None) for weight in self.weight]
            return _add_means(out, dst, kinds, counts, indices, [message], [maps])
        means = self.gathered(counts, indices, message, group, h_dst)  # [G, F]
        if self.coefficients is None:  # zeros if a destination has no edge of a type
            sums = means.new_zeros(S * R, means.shape[1]).index_copy_(0, group, means)
        else:
            by_basis = self.coefficients[kinds].to(means.dtype).unsqueeze(2) * means.unsqueeze(1)
            sums = means.new_zeros(S, *by_basis.shape[1:]).index_add_(0, dst, by_basis)
        weight = self.weight.flatten(0, 1)
        return out + sums.view(S, len(weight)) @ weight

    def matrices(self):
        """Return W_r of all types [R, F, D]."""
        if self.coefficients is None:
            return self.weight
        shape = self.num_types, *self.weight.shape[1:]
        return (self.coefficients @ self.weight.flatten(1)).view(shape)

    def means_by_type(self, indptr, indices, types, message):
        """Average the messages of each destination's edges of each type -> [S, R, F]; zero without edges.

        The host does not wait for a GPU. Padding, edges after the last one with index -1, is skipped.
        """
        last = (indptr.numel() - 1) * self.num_types
        edges = torch.arange(len(indices), device=indices.device, dtype=indptr.dtype)
        dst = torch.searchsorted(indptr[1:], edges, right=True)  # S for padding
        group, order = (dst * self.num_types + types).clamp(max=last).sort(stable=True)
        offsets = torch.searchsorted(group, torch.arange(last + 1, device=group.device))
        means = mean_neighbours(offsets.to(indices.dtype), indices[order], message)
        return means.view(-1, self.num_types, message.shape[1])

    def after_inputs(self, block, inputs, x):
        """Compute the layer of inputs(block.src_nodes, x), with a `NodeInputs`, in fewer operations -> [S, D].

        The mean of a linear map is the map of the mean: features and embedding rows are averaged as they are, and the
        means multiplied by W_r P, where P is the map of the node type. Own rows are means over one edge of a type R.
        None: the sources of one edge type have several node types.
        """
        check_rows(block, block.src_nodes)
        tables, kinds, rows = inputs.tables(block.src_nodes, x)
        S, R, K = block.indptr.numel() - 1, self.num_types, len(tables)
        of_source, sources = kinds[block.indices], rows[block.indices].to(block.indices.dtype)
        group, counts, sources = self._grouped(block.indptr, sources, block.edge_type, of_source, K)
        of_type = group // K
        self_rows = torch.arange(S, device=group.device)
        if bool((of_type[1:] == of_type[:-1]).any()):
            return None
        dst = torch.cat([of_type // R, self_rows])
        sources = torch.cat([sources, rows[:S].to(sources)])
        kinds = torch.cat([group % K * (R + 1) + of_type % R, kinds[:S] * (R + 1) + R])
        maps = []
        weights = [*(weight.t() for weight in self.matrices()), self.self_linear.weight]
        for of in inputs.linears:
            maps.append([(weight @ of.weight, weight @ of.bias) for weight in weights])
        maps.append([(weight, None) for weight in weights])
        counts = torch.cat([counts, torch.ones_like(self_rows)])
        out = self.self_linear.bias.repeat(S, 1)
        return _add_means(out, dst, kinds, counts, sources, tables, maps)

    def gathered(self, counts, indices, message, group, h_dst):
        """Average the rows of message at each group's `counts` [G] indices -> [G, F]."""
        return mean_neighbours(_offsets(counts, indices), indices, message)

    def _grouped(self, indptr, indices, types, kinds=0, K=1):
        """Group each destination's edges by type and one of K kinds [E] -> ((destination * R + type) * K + kind of each
        group [G], int64, ascending; its number of edges [G]; indices, group by group)."""
        if types is None:
            instead = "give it to the sampler, or types to inference"
            raise ValueError(f"blocks have no edge_type: {instead}")
        R, types = self.num_types, types.long()
        if bool(((types < 0) | (types >= R)).any()):
            has = f"a block has types {int(types.min())} to {int(types.max())}"
            raise IndexError(f"{has}, the layer knows 0 to {R - 1}, as num_types is {R}")
        dst = torch.repeat_interleave(indptr.diff().long(), output_size=indices.numel())
        group = (dst * R + types) * K + kinds
        if bool((group[1:] < group[:-1]).any()):  # not sampled by type: sort each list by type
            group, place = group.sort(stable=True)
            indices = indices[place]
        return *group.unique_consecutive(return_counts=True), indices


class RGATConv(RGCNConv, name="rgat"):
    """Relational graph attention (Busbridge et al., arXiv 1904.05811), additive, within each type, one head: R-GCN with
    the mean over v's edges of type r weighted by softmax(leaky_relu(q_r . h_v + k_r . h_u)).

    The paper's q and k multiply W_r h: here W_r is part of q_r and k_r.
    """

    padded = False

    averages = False

    def __init__(self, in_dim, out_dim, num_types, bases=0):
        super().__init__(in_dim, out_dim, num_types, bases)
        self.query, self.key = (nn.Parameter(torch.empty(num_types, in_dim)) for _ in range(2))
        nn.init.xavier_uniform_(self.query)
        nn.init.xavier_uniform_(self.key)

    def message(self, h, degree=None):
        """Return the row and beside it k_r . h for each type r."""
        return torch.cat([h, F.linear(h, self.key)], 1)

    def gathered(self, counts, indices, message, group, h_dst):
        """Average the rows of message at each group's `counts` [G] indices, by attention -> [G, F]."""
        rows, keys = summable(message).split([h_dst.shape[1], self.num_types], 1)
        groups = torch.repeat_interleave(counts, output_size=len(indices))
        scores = summable(F.linear(h_dst, self.query)).flatten()[group][groups]
        scores = scores + keys[indices.long(), (group % self.num_types)[groups]]
        scores = F.leaky_relu(scores.to(self.key.dtype), 0.2).unsqueeze(1)
        weights = edge_softmax(scores, groups, len(counts)).squeeze(1).to(rows.dtype)
        options = {"mode": "sum", "per_sample_weights": weights, "include_last_offset": True}
        bag = F.embedding_bag(indices, rows, _offsets(counts, indices), **options)
        return bag.to(message.dtype)


def _offsets(counts, indices):
    """Return where each group of counts [G] indices begins, and the end -> [G+1], of their dtype."""
    return F.pad(counts.cumsum(0), (1, 0)).to(indices.dtype)


def _add_means(out, dst, kinds, counts, indices, tables, maps):
    """Add the means of groups of rows, each mapped linearly, to rows of out [S, D], in place.

    Args:
        dst: [G] row of out of each group. kinds: [G] which of the maps, counted over all tables. counts: [G]
            numbers of indices. indices: rows of the table, group by group.
        tables: K tensors. maps: for each, R pairs of weight and bias.
    """
    order = kinds.argsort(stable=True)
    starts, dst, counts = (counts.cumsum(0) - counts)[order], dst[order], counts[order]
    moved = (starts - counts.cumsum(0) + counts).repeat_interleave(counts, output_size=len(indices))
    indices = indices[moved + torch.arange(len(indices), device=indices.device)]
    groups = torch.bincount(kinds, minlength=len(tables) * len(maps[0])).view(len(tables), -1)
    parts = (t.split(groups.sum(1).tolist()) for t in (dst, counts))
    for table, pairs, sizes, dst, counts in zip(tables, maps, groups.tolist(), *parts):
        part, indices = indices.tensor_split([int(counts.sum())])
        means = mean_neighbours(_offsets(counts, part), part, table)
        for rows, at, (weight, bias) in zip(means.split(sizes), dst.split(sizes), pairs):
            out = out.index_add_(0, at, (fused or F).linear(rows, weight, bias).to(out.dtype))
    return out


class NodeInputs(nn.Module):
    """First layer's input for nodes of several types, whose ids are consecutive by type: a linear map of each type's
    features, or a learned embedding of each node of a type without features (types with features come first).

    The embedding's gradient is sparse, with the batch's rows only: use torch.optim.SparseAdam.

    Args:
        node_types: (number of nodes, feature width or 0) of each type, such as GraphStore.node_types.values().
        out_dim: D.

    Attributes:
        padded: x may be [N, F], see `aligned`.
    """

    padded = False

    def __init__(self, node_types, out_dim):
        super().__init__()
        counts, widths = zip(*node_types)
        if sorted(map(bool, widths), reverse=True) != [*map(bool, widths)]:
            raise ValueError(f"node_types {node_types}: types with features have to come first")
        self.out_dim = out_dim
        self.register_buffer("ends", torch.tensor(counts).cumsum(0), persistent=False)
        self.linears = nn.ModuleList(Linear(width, out_dim) for width in widths if width)
        learned = sum(count for count, width in node_types if not width)
        self.first, self.embedding = sum(counts) - learned, None
        if learned:
            self.embedding = nn.Embedding(learned, out_dim, sparse=True)
            nn.init.normal_(self.embedding.weight, std=out_dim**-0.5)

    def forward(self, nodes, x):
        """nodes: [N] ids; x: [n, F] features of those whose type has features, in the order of nodes -> [N, D]."""
        if self.padded and len(x) == len(nodes):
            return self.aligned(nodes, x)
        tables, kinds, rows = self.tables(nodes, x)
        dtype = x.dtype if self.embedding is None else self.embedding.weight.dtype
        tables[: len(self.linears)] = (f(t).to(dtype) for f, t in zip(self.linears, tables))
        starts = kinds.new_tensor([0, *map(len, tables)]).cumsum(0)
        return torch.cat(tables).index_select(0, starts[kinds] + rows)

    def aligned(self, nodes, x):
        """`forward` for x [N, F], a row for every node, zeros for types without features. The host does not wait for a
        GPU; negative nodes are padding, whose rows and gradients have no meaning."""
        kinds, parts = torch.bucketize(nodes, self.ends, right=True), []
        for kind, linear in enumerate(self.linears):
            parts.append(linear(x[:, : linear.in_features]) * (kinds == kind).unsqueeze(1))
        if self.embedding is not None:
            parts.append(_Rows.apply(self.embedding.weight, nodes.long() - self.first))
        return sum(parts)

    def tables(self, nodes, x):
        """Sort nodes [N] -> ([features [n, F] of each type that has them, embedding rows [n, D] of the others], the
        number [N] of each node's table, its row [N] there)."""
        last = len(self.linears)
        kinds = torch.bucketize(nodes, self.ends, right=True).clamp(max=last)
        places, tables = [(kinds == k).nonzero().squeeze(1) for k in range(last + 1)], [x] * last
        if last and len(x) != (count := len(nodes) - len(places[last])):
            raise ValueError(f"x has {len(x)} rows: {count} of the nodes have features")
        if last > 1:  # rows of x by type
            of = kinds[kinds < last]
            tables = [x[of == k, : f.in_features] for k, f in enumerate(self.linears)]
        if self.embedding is not None:  # by id, as in a coalesced gradient
            ids, order = (nodes[places[last]].long() - self.first).sort()
            places[last] = places[last][order]
            tables.append(self.embedding(ids))
        rows = torch.empty_like(kinds)
        for at in places:
            rows[at] = torch.arange(len(at), device=at.device)
        return tables, kinds, rows


class _Rows(torch.autograd.Function):
    """Rows ids [N] of a weight, zeros for negative ids. Its gradient is left in weight.rows, (ids, [N, D]), for
    run/adam.py: a CUDA graph can hold that, but no sparse tensor."""

    @staticmethod
    def forward(ctx, weight, ids):
        ctx.weight, ctx.ids = weight, ids
        return weight.index_select(0, ids.clamp(min=0)) * (ids >= 0).unsqueeze(1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        ctx.weight.rows = ctx.ids, grad.contiguous()
        return None, None


def edge_softmax(scores, dst, num_dst):
    """Softmax of scores [E, K] over each destination's edges -> [E, K]; dst int64 [E]: destination of each edge."""
    index = dst.unsqueeze(1).expand_as(scores)
    top = scores.new_full((num_dst, scores.shape[1]), -torch.inf)
    top = top.scatter_reduce(0, index, scores.detach(), "amax")
    weights = (scores - top.index_select(0, dst)).exp()
    return weights / torch.zeros_like(top).index_add(0, dst, weights).index_select(0, dst)


class BatchNorm(nn.BatchNorm1d):
    """Batch norm that uses the running statistics for fewer than two rows, which a rank's last batch may have."""

    def forward(self, x):
        if x.shape[0] < 2:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)
        return super().forward(x)


class LayerNorm(nn.LayerNorm):
    """Layer norm in the dtype of its weights, as autocast has it on a GPU: on the CPU torch adds up the gradients of
    weight and bias in that of the rows, and in bfloat16 loses most of a sum over thousands."""

    def forward(self, x):
        out = super().forward(x if self.weight is None else x.to(self.weight.dtype))
        return out if x.is_cuda else out.to(x.dtype)


NORMS = {"none": nn.Identity, "layer": LayerNorm, "batch": BatchNorm}
HOOKS = "_forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks".split()


# ---- models


class GNN(nn.Module):
    """Stack of num_layers convolutions with norm, ReLU and dropout between them.

    Args:
        in_dim: F. hidden: width of the inner layers. out_dim: C.
        conv: "sage", "sage-pool", "gcn", "gat", "gin", "gine", "rgcn" or "rgat".
        num_layers: as many as a batch has blocks.
        dropout: probability, applied after each inner layer, and to the attention weights of "gat".
            input_dropout: the same for the features.
        heads: of "gat": concatenated in the inner layers, `hidden` wide together; averaged in the last.
        norm: "none", "layer" or "batch", after each inner layer, and inside the layers of "gin" and "gine".
        residual: add each layer's input to its output, through a matrix where the widths differ.
        recompute: keep only each layer's input for the backward pass and recompute the rest (Chen et
            al., arXiv 1604.06174): less memory, more time; not in a CUDA graph.
        edge_dim: width of the edge features, which "gat" can use and "gine" needs; 0: none.
        num_types: number of edge types. bases: see `RGCNConv`. Both for "rgcn" and "rgat" only.
        node_types: of a graph with node types; `NodeInputs` of these then makes the input of the first layer.

    Attributes:
        degrees: float [V, 2], `graph_degrees` on the model's device, which "gcn", "gin" and "gine" need
            for training on sampled blocks; or a function of a block that returns those of its sources.
            None: each block is treated as the whole graph. Not part of the state_dict.
    """

    degrees = None

    def __init__(
        self,
        in_dim,
        hidden,
        out_dim,
        *,
        conv="sage",
        num_layers=3,
        dropout=0.5,
        heads=1,
        norm="none",
        residual=False,
        input_dropout=0.0,
        recompute=False,
        edge_dim=0,
        num_types=0,
        bases=0,
        node_types=(),
    ):
        super().__init__()
        for name, value, choices in (("conv", conv, CONVS), ("norm", norm, NORMS)):
            if value not in choices:
                raise ValueError(f"{name} {value!r} is unknown: choose one of {', '.join(choices)}")
        if num_layers < 1 or heads < 1:
            sizes = f"num_layers is {num_layers}, heads is {heads}"
            raise ValueError(f"{sizes}: at least one of each is needed")
        if norm == "batch" and recompute:
            raise ValueError("norm 'batch' would count a recomputed batch twice: take 'layer'")
        make = CONVS[conv]
        if bool(num_types) != make.uses_types or bases and not num_types:
            with_types = " and ".join(layers_where(uses_types=True))
            needs = f"{with_types} need types of edges, others have no use for them"
            raise ValueError(f"conv {conv!r} with num_types {num_types}, bases {bases}: {needs}")
        if edge_dim and make.edge_features == "no" or not edge_dim and make.edge_features == "must":
            must = " and ".join(layers_where(edge_features="must"))
            can = " and ".join([*layers_where(edge_features="can"), must])
            needs = f"{can} take features of edges, and {must} needs them"
            raise ValueError(f"conv {conv!r} with edge_dim {edge_dim}: {needs}")
        self.inputs = NodeInputs(node_types, hidden) if node_types else None
        in_dim = hidden if node_types else in_dim
        pairs = list(pairwise([in_dim] + [hidden] * (num_layers - 1) + [out_dim]))
        given = {"heads": heads, "dropout": dropout, "norm": norm}
        given |= {"num_types": num_types, "bases": bases}
        options = {name: given[name] for name in make.takes}
        if edge_dim:
            options["edge_dim"] = edge_dim
        last = {"mean": True} if "heads" in make.takes else {}
        self.layers = nn.ModuleList(make(*pair, **options) for pair in pairs[:-1])
        self.layers.append(make(*pairs[-1], **options, **last))
        self.norms = nn.ModuleList(NORMS[norm](hidden) for _ in range(num_layers - 1))
        straight = [nn.Identity() if a == b else Linear(a, b, bias=False) for a, b in pairs]
        self.residuals = nn.ModuleList(straight) if residual else None
        self.dropout, self.input_dropout = dropout, input_dropout
        self.recompute, self.edge_dim = recompute, edge_dim

    def forward(self, blocks, x, *, aggregated=False, key=None, edges=None):
        """Compute logits [S, C] of the last block's destinations.

        Args:
            blocks: one per layer, outermost hop first.
            x: [N, F] features of blocks[0].src_nodes, of any dtype; with node_types only of those that
                have features. Or, with `aggregated` (for "sage"), [S, 2F]: the result of
                `self_and_mean` for blocks[0], computed where the features are.
            key: int that keys dropout, together with layer, node and column; in a CUDA graph the tuple
                of `layer_seed`; None: drawn from torch's CPU generator.
            edges: features [E, edge_dim] of each block's edges; not used if edge_dim is 0.
        """
        if len(blocks) != len(self.layers):
            count = f"there are {len(blocks)} blocks for {len(self.layers)} layers"
            raise ValueError(f"{count}: one a layer is needed")
        low = x.dtype == torch.bfloat16 == torch.get_autocast_dtype(x.device.type)
        if not (low and torch.is_autocast_enabled(x.device.type)):
            x = x.to(next(self.parameters()).dtype)
        for outer, inner in pairwise(blocks[aggregated:]):
            check_rows(inner, outer.indptr[1:])
        key = drawn_seed() if key is None and self.training else key
        after = self._after_inputs(blocks[0], x, key)
        x = self.embed(blocks[0].src_nodes, x) if after is None else after
        if after is None and len(blocks) > aggregated:
            check_rows(blocks[aggregated], x)
        if self.input_dropout and self.training:
            seed = layer_seed(key, len(self.layers))
            x = dropout(x, blocks[0].src_nodes, seed, drop_byte(self.input_dropout))
        if (done := self._fused(blocks, x, aggregated, key)) is not None:
            return done
        steps = enumerate(zip(blocks, edges or [None] * len(blocks), strict=True))
        for i, (block, rows) in islice(steps, after is not None, None):
            work = i, block, x, aggregated, layer_seed(key, i) if self.training else 0, rows
            if self.recompute and self.training:
                x = checkpoint(self.step, *work, use_reentrant=False)
            else:
                x = self.step(*work)
            aggregated = False
        return x

    def embed(self, nodes, x):
        """Return the first layer's input for nodes [N] with features x: x, or the output of `NodeInputs`."""
        return x if self.inputs is None else self.inputs(nodes, x)

    def step(self, i, block, x, aggregated=False, seed=None, edges=None):
        """Apply layer i and all that precedes the next one; seed: of the dropout after it."""
        layer, nodes = self.layers[i], block.src_nodes
        if aggregated:
            # contiguous: a product rounds as it does for rows that were gathered
            h_dst = x[:, : x.shape[1] // 2].contiguous() if self.residuals else None
            return self.finish(i, layer.apply_linear(x), h_dst, nodes, seed)
        h = layer(block, x, self._degree(layer, block, x.device), seed, edges)
        return self.finish(i, h, x[: block.indptr.numel() - 1], nodes, seed)

    def _degree(self, layer, block, device):
        """Return the degrees [N, 2] of a block's sources for a layer that uses them, if known; else None."""
        if not layer.uses_degree or self.degrees is None:
            return None
        of = self.degrees
        degree = of(block) if callable(of) else of.index_select(0, block.src_nodes)
        return degree.to(device, next(self.parameters()).dtype)

    def _fused(self, blocks, x, aggregated, key):
        """Run all layers as one autograd function, if native/layers.py has it and no part is customised; else None."""
        if not fused or self.recompute or self.residuals or not is_gnn(self, ("step", "finish")):
            return None
        parts = [*self.norms, *self.layers, *(f for layer in self.layers for f in layer.children())]
        if not unchanged(*parts, kinds={SAGEConv, GCNConv, nn.Identity}):
            return None
        drop = drop_byte(self.dropout) if self.training else 0
        drops = [(layer_seed(key, i) if drop else 0, drop) for i in range(len(self.norms))]
        of = list(zip(self.layers, blocks, strict=True))
        scales = [layer.factors(b, self._degree(layer, b, x.device)) for layer, b in of]
        weights = [w for layer in self.layers for w in layer.product()]
        given = {"aggregated": aggregated, "scales": scales, "drops": drops}
        return fused.stack(blocks, x, weights, **given)

    def _after_inputs(self, block, x, key):
        """Apply the first layer together with `NodeInputs`, if it is an R-GCN and no part is customised; else None."""
        layer, dropped = self.layers[0], self.input_dropout and self.training
        usual = self.inputs is not None and is_gnn(self, ("embed", "step", "finish"))
        if not usual or dropped or self.recompute or self.residuals or self.inputs.padded:
            return None
        parts = layer, self.inputs, *layer.children(), *self.inputs.linears
        if not unchanged(*parts, kinds={RGCNConv, NodeInputs}) or layer.num_types > LOOPED:
            return None
        h = layer.after_inputs(block, self.inputs, x)
        seed = layer_seed(key, 0) if self.training else 0
        return None if h is None else self.finish(0, h, None, block.src_nodes, seed)

    def finish(self, i, h, h_dst, nodes=None, seed=None):
        """Apply residual, norm, ReLU and dropout after layer i -> [S, D].

        Args:
            h: [S, D] the layer's output. h_dst: [S, F] the destinations' rows of its input.
            nodes: [S or more] ids of the destinations, which with the seed determine dropout.
        """
        if self.residuals is not None:
            h = h + self.residuals[i](h_dst)
        if i == len(self.norms):
            return h
        nodes = None if nodes is None else nodes[: len(h)]
        h = self.norms[i](h)
        kinds = {*CONVS.values(), *NORMS.values(), MLP, nn.ReLU}
        if not unchanged(*self.layers[i].modules(), self.norms[i], kinds=kinds):
            h = h.clone()  # a hook, method or network may have kept it, and ReLU is in place
        return relu_dropout(h, self.dropout, self.training, nodes, seed)


class SAGE(GNN):
    """GraphSAGE with the mean aggregator, the default GNN."""


def is_gnn(model, steps=("forward", "embed", "step")):
    """Return whether a network is a `GNN` that does not override these methods."""
    return isinstance(model, GNN) and not overrides(model, GNN, steps)


def graph_degrees(indptr, indices, step=1 << 24):
    """Compute out- and in-degree of all nodes -> float32 [V, 2], in host memory; IndexError if indices has a bad id."""
    out = torch.zeros(indptr.numel() - 1, dtype=torch.int64, device=indices.device)
    for part in indices.split(step):
        check_nodes(part, out.numel())
        out += torch.bincount(part, minlength=out.numel())
    return torch.stack([out.cpu(), indptr.diff().cpu()], 1).float()


def check_nodes(ids, V):
    """Raise IndexError unless all ids [E], read from an unchecked graph, are in 0 .. V-1."""
    low, high = (int(node) for node in ids.aminmax()) if ids.numel() else (0, -1)
    if low < 0 or high >= V:
        bad, nodes = low if low < 0 else high, f"its nodes are 0 to {V - 1}"
        raise IndexError(f"the graph is damaged: indices holds {bad}, and {nodes}")
