"""GraphSAGE, GCN, GATv2 and GIN over sampled blocks.

Copy this file into your own code: it needs only torch. A block is anything with the fields of
`sampler.Block`: S destinations, N sources, E edges.

    model = SAGE(in_dim, hidden, num_classes, num_layers=3)
    model = GNN(in_dim, hidden, num_classes, conv="gat", heads=4, num_layers=3)
    logits = model(blocks, x)                       # x: features of blocks[0].src_nodes -> a row for each seed

With the folder native/ beside it, gathers, means, ReLU with dropout and attention are fused in C and
CUDA, and runs repeat to the last bit. Torch operations add with atomics on a GPU, so the last bits of gradients and
attention may differ between runs.

`Conv` is what a layer is, docs/models.md has one as an example. extras/ has more layers: copy it too for these and for
features of edges.
"""

from functools import partial, wraps
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

try:
    from native import attention
    from native import layers as fused
except ImportError:
    fused = None
try:
    from extras import LAYERS, elsewhere, extra

    __getattr__ = elsewhere(__name__)
except ImportError:
    LAYERS = {}

    def extra(*ask):
        """Refuse what takes extras/."""
        raise ImportError("copy the folder extras/ beside model.py (in a package: from .extras)")


# ---- steps that native/ fuses


def native_first(function):
    """Decorate torch operations: native/layers.py's function of that name replaces them unless it returns None."""

    @wraps(function)
    def first(*args, **options):
        done = fused and getattr(fused, function.__name__)(*args, **options)
        return function(*args, **options) if done is None else done

    return first


@native_first
def self_and_mean(indptr, indices, h, self_rows=None, out=None, *, scale=None):
    """Concatenate each destination's own row and the mean of its neighbours' rows: the input of a SAGE layer's product.

    Args:
        indptr: [S+1], indices: [E] rows of h, of one integer dtype.
        h: float32 or bfloat16 [N, F]; int8 with a scale.
        self_rows: [S] rows of h that are the destinations'; None: the first S. With global ids in indices and self_rows, h
            can be the feature table itself: the outermost hop then needs no gather, but h gets no gradient.
        out: [S, 2F] to write into (float32 or bfloat16), if no gradient is needed.
        scale: float32 [2, F] of codes h, which stand for h * scale[0] + scale[1]; it needs self_rows and out.

    Returns:
        [S, 2F]; without edges the mean is zero.
    """
    if scale is not None:  # own rows, then a row for each edge
        rows = torch.cat([self_rows, indices])
        h = gather_rows(h, rows, out.new_empty(len(rows), h.shape[1]), scale=scale)
        indices = torch.arange(len(self_rows), len(rows), dtype=indices.dtype, device=h.device)
        self_rows = None
    h_dst = h[: indptr.numel() - 1] if self_rows is None else h.index_select(0, self_rows)
    mean = mean_neighbours(indptr, indices, h)
    pair = torch.cat([h_dst, mean], 1)
    return pair if out is None else out.copy_(pair)


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


def edge_dst(indptr, indices):
    """Return the destination of each edge -> int64 [E]."""
    return torch.repeat_interleave(indptr.diff().long(), output_size=indices.numel())


def summable(h):
    """Return rows of 16-bit floats in float32: torch adds these up, also the gradients of a row, with a rounding per
    term, so that a sum of a few hundred equal terms stops growing."""
    return h.float() if h.dtype in (torch.bfloat16, torch.float16) else h


@native_first
def gather_rows(features, ids, out=None, *, scale=None):
    """Gather rows ids [n] of features [V, F] -> [n, F], into `out` if given, with prefetch; scale: see `self_and_mean`."""
    if scale is not None:
        return out.copy_((features.index_select(0, ids) * scale[0]).add_(scale[1]))
    return torch.index_select(features, 0, ids, out=out)


def relu_dropout(h, p, training=True, nodes=None, seed=None, *, norm=None, residual=None):
    """Compute dropout(relu(norm(h + residual))), of h alone in place if native/layers.py does it.

    The mask is a function of seed, node and column, so a part of a batch has the mask of the whole batch, on any device. It
    takes one random byte per element: p is rounded to 1/256.

    Args:
        h: [S, D]. p: probability below 1. training: False for no dropout.
        nodes: int [S] distinct ids of the rows; None: their positions.
        seed: int; None: drawn from torch's CPU generator.
        norm: module, after which h may change in place. residual: [S, D].
    """
    drop = drop_byte(p) if training else 0
    seed = drawn_seed() if drop and seed is None else seed or 0
    if fused and type(norm) is LayerNorm and unchanged(norm, kinds={LayerNorm}):
        done = fused.norm_relu_dropout(h, norm, nodes, seed, drop, residual=residual)
        if done is not None:
            return done
    h = h if residual is None else h + residual
    h = h if norm is None else norm(h)
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
    """Draw a seed from torch's CPU generator -> int. A CUDA graph would repeat it."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("dropout needs a seed, or to be torch.nn.Dropout")
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


class Neighborhood(NamedTuple):
    """What a layer combines: S destinations' own rows and the messages of their neighbours, over E edges.

    Its methods skip edges with index -1, which end a block in a CUDA graph, and the features of these.
    """

    indptr: Tensor  # [S+1]: destination s has the edges indptr[s] to indptr[s + 1] - 1
    indices: Tensor  # [E]: the message that comes over each edge, a row of `messages`
    messages: Tensor  # [n, width]: messages
    x_dst: Tensor  # [S, F]: the destinations' rows
    self_rows: Tensor | None = None  # [S]: rows of `messages`; None: the first S
    degree: Tensor | None = None  # [S, 2]: their out- and in-degree, if the layer uses_degree
    nodes: Tensor | None = None  # [S]: their ids, which key dropout; None: their positions
    seed: int | None = None  # of dropout; None: drawn from torch's CPU generator
    edges: Tensor | None = None  # [E, edge_dim]: features of edges, if the layer has an edge_dim
    types: Tensor | None = None  # [E]: types of edges, if the layer uses_types

    block = property(lambda self: self[:3], doc="indptr, indices and messages.")

    def mean(self):
        """Average the neighbours' messages -> [S, width]; zero without edges."""
        return mean_neighbours(*self.block)

    def max(self):
        """Take the maximum of the neighbours' messages by column -> [S, width]; zero without edges."""
        return max_neighbours(*self.block)

    def self_and_mean(self):
        """Put each destination's own message beside the mean of its neighbours' -> [S, 2 width]."""
        return self_and_mean(*self.block, self.self_rows)

    def own_plus_mean(self, alpha, beta):
        """Add alpha [S] times the own message and beta [S] times the mean of the neighbours' -> [S, width]."""
        return own_plus_mean(*self.block, alpha, beta, self_rows=self.self_rows)

    def edge_mean(self, dtype):
        """Average the features of each destination's edges -> [S, edge_dim] of a dtype; zero without edges."""
        return edge_mean(self.indptr, self.edges.to(dtype))

    def edge_sum(self, edge_map):
        """Sum relu(message + edge_map(features of the edge)) over the neighbours -> [S, width]. edge_map: a `Linear`."""
        return extra(".edge_features").edge_sum(self, edge_map)

    def attend(self, attn, target, *, edge_map=None, drop=0):
        """Sum the messages, the own one among them, weighted by softmax(attn . leaky_relu(message + target)) of each head.

        Args:
            attn: [K, D]: K heads of width D. target: [S, K D]; messages are [n, K D].
            edge_map: `Linear` map of the features of edges, which is added inside; a self-loop has the mean of those of
                the destination's edges.
            drop: of `drop_byte`: dropout of the weights.

        Returns:
            [S, K D].
        """
        seed = drawn_seed() if drop and self.seed is None else self.seed or 0
        drawn = self.nodes, seed, drop
        factors = None, None
        term = None
        if edge_map is not None:
            factors, term = extra(".edge_features").attention_term(self, edge_map, attn.dtype)
        out = None
        if fused and factors:
            options = {"self_rows": self.self_rows, "drawn": drawn, "factors": factors}
            out = attention.attend(*self.block, target, attn, **options)
        return self._attend(attn, target, term, drawn) if out is None else out

    def _attend(self, attn, target, term, drawn):
        """`attend` in torch operations. term: function that returns what edges add, [E + S, K D], or None."""
        S = len(target)
        K, D = attn.shape
        num_edges = self.indices.numel()
        self_loops = torch.arange(S, device=self.indices.device)
        dst = torch.cat([edge_dst(self.indptr, self.indices), self_loops])
        rows = self_loops.to(self.indices.dtype) if self.self_rows is None else self.self_rows
        rows = torch.cat([self.indices, rows])
        message = summable(self.messages).index_select(0, rows)
        z = message + target.index_select(0, dst)
        if term is not None:
            z = z + term()
        scores = (F.leaky_relu(z.view(-1, K, D).to(attn.dtype), 0.2) * attn).sum(2)
        weights = edge_softmax(scores, dst, S)
        nodes, seed, drop = drawn
        # keyed by ~destination, place in the list and head; the mask of its row, by the destination
        if drop:
            place = torch.arange(1, len(dst) + 1, device=dst.device)
            place = place - self.indptr.index_select(0, dst)
            place[num_edges:] = 0
            ids = dst if nodes is None else nodes.index_select(0, dst)
            kept = _random_bytes(~ids, K, seed, (-(-K // 8) * place).unsqueeze(1)) >= drop
            weights = weights * (kept * (256 / (256 - drop))).to(weights.dtype)
        weighted = message.view(-1, K, D) * weights.to(message.dtype).unsqueeze(2)
        total = weighted.new_zeros(target.shape).index_add(0, dst, weighted.view(-1, K * D))
        return total.to(target.dtype)


def edge_mean(indptr, edges):
    """Average features [E, d] of each destination's edges, [S, d]; zero without edges."""
    ids = torch.arange(len(edges), device=edges.device, dtype=indptr.dtype)
    return mean_neighbours(indptr, ids, edges)


class Conv(nn.Module):
    """Base of all layers: each node makes a message of its row, each destination combines its neighbours' messages.

    A layer is made as Layer(in_dim, out_dim, **options), has `out_dim`, and overrides

        message(h, degree=None): [n, F] -> [n, width], also of no rows; the rows themselves unless overridden
        combine(near): a `Neighborhood` -> [S, out_dim]

    Training computes the messages of a block's sources, inference those of all nodes, once; both then call `combine`,
    inference without near.nodes and near.seed. degree is float [n, 2]: out- and in-degree of these nodes in the whole
    graph; None: in the block.

    A subclass that is given a `name`, as in `class GINConv(Conv, name="gin")`, is a layer of `GNN` and of --model, and its
    combine returns a tensor of its own, since ReLU is applied in place. One without is a layer of GNN(conv=Layer) and of
    --model FILE.py:Layer. What it states about itself, here with the defaults:
    """

    # it has no use for features of edges ("no"), uses them if "asked" or wherever it "can" (edge_dim is their width or 0),
    # or "must" have them
    edge_features = "no"
    uses_types = False  # it needs types of edges
    uses_degree = False  # it needs degrees in the whole graph
    whole_graph = False  # degrees at a time will not do: seeds cannot have times
    norm = "none"  # norm after hidden layers that it trains well with
    # residual connections by default: "no", "yes", "if classes disagree" (of neighbours)
    residual = "no"
    heads = 4  # attention heads by default, if it takes them
    padded = False  # reads neighbours only by methods of `Neighborhood`: CUDA graphs can hold it
    takes = ()  # options of GNN that it is made with: "heads", "dropout", "norm", "num_types", "bases"
    last_options = {}  # options that the last layer of a GNN is made with

    edge_dim = 0
    one_product = False  # see `MeanConv`

    def __init_subclass__(cls, name=None, after=None, **options):
        super().__init_subclass__(**options)
        cls.name = name or cls.__name__
        if cls.edge_features != "no":
            cls.takes = {*cls.takes, "edge_dim"}
        if name is not None:
            CONVS[name] = cls
            for other in [*CONVS][[*CONVS].index(after) + 1 : -1] if after else ():
                CONVS[other] = CONVS.pop(other)

    @classmethod
    def sees_edges(cls, asked=None):
        """Whether it uses features of edges, where there are any. asked: by the user to (True) or not to (False)."""
        return cls.edge_features in ("can", "must") if asked is None else asked

    def forward(self, block, h, degree=None, seed=None, edges=None):
        """h [N, F] of the block's sources, edges [E, edge_dim] -> [S, D] of its destinations."""
        check_rows(block, h)
        S = block.indptr.numel() - 1
        if degree is None and self.uses_degree:
            degree = block_degrees(block)
        near = Neighborhood(
            block.indptr,
            block.indices,
            messages=self.message(h, degree),
            x_dst=h[:S],
            degree=None if degree is None else degree[:S],
            nodes=None if seed is None else block.src_nodes[:S],
            seed=seed,
            edges=self.seen(edges, len(block.indices)),
            types=block.edge_type if self.uses_types else None,
        )
        return self.combine(near)

    def seen(self, edges, count):
        """Return features of edges if the layer has an edge_dim, else None; ValueError unless they are [count, edge_dim]: C code
        would read past their end."""
        if not self.edge_dim:
            return None
        shape = None if edges is None else [*edges.shape]
        needed = [count, self.edge_dim]
        if shape != needed:
            raise ValueError(f"edges is {shape}: features of each edge, {needed}, are needed")
        return edges

    def message(self, h, degree=None):
        return h


def check_rows(block, h):
    """Raise ValueError unless h has one row per source of the block and the indices are positions in h: C code would read
    past its end, or take rows of other nodes."""
    count = block.src_nodes.numel()
    indices = block.indices
    S = block.indptr.numel() - 1
    on_cpu = indices.device.type == "cpu" and not (fused and fused.is_gpu(indices.device))
    if on_cpu and count == S and len(indices) and int(indices.max()) >= count:
        raise ValueError("a block has global ids as indices: sample with relabel_outer=True")
    if on_cpu and (indices[int(block.indptr[-1]) :] >= 0).any():
        raise ValueError(
            f"indptr of a block ends at {int(block.indptr[-1])}, and it has {len(indices)} indices: "
            "those of no destination have to be -1"
        )
    if not len(h) == count >= S:
        raise ValueError(
            f"x has {len(h)} rows: {max(count, S)} are needed, one for each of block.src_nodes, "
            "destinations first, and blocks outermost first"
        )


def unchanged(*modules, kinds=frozenset()):
    """Whether modules are plain linear maps, or of other `kinds`: no adapter in the place of one, no hooks, also of all
    modules, and no method set on a module itself."""
    kinds |= {Linear}
    plain = all(type(m) in kinds and not any(map(callable, vars(m).values())) for m in modules)
    return plain and not hooked(*modules) and not nn.modules.module._has_any_global_hook()


def hooked(*modules):
    """Whether a module has hooks, or a `forward` set on it that is not its class's."""
    changed = ("forward" in vars(m) and overrides(m, type(m), ["forward"]) for m in modules)
    return any(changed) or any(vars(m).get(name) for m in modules for name in HOOKS)


def overrides(module, base, names):
    """Whether a module, or its class, overrides any of these methods of `base`."""
    return any(getattr(module, name) != getattr(base, name).__get__(module) for name in names)


def block_degrees(block):
    """Out- and in-degree in a block -> float32 [N, 2]; out-degree - 1 for sources without the self-loop GCN adds."""
    S = block.indptr.numel() - 1
    N = block.src_nodes.numel()
    ones = torch.ones_like(block.indices, dtype=torch.int64)
    out = ones.new_zeros(N).index_add_(0, block.indices, ones)  # bincount would wait for a GPU
    out[S:] = (out[S:] - 1).clamp(min=0)
    return torch.stack([out, F.pad(block.indptr.diff().long(), (0, N - S))], 1).float()


def linear(x, weight, bias=None):
    """F.linear, computed by native/layers.py."""
    return (fused or F).linear(x, weight, bias)


class Linear(nn.Linear):
    """nn.Linear computed by native/layers.py."""

    def forward(self, x):
        return linear(x, self.weight, self.bias)


class MeanConv(Conv):
    """Base of layers that are one matrix product: of own rows beside neighbours' means, or of their sum with factors.

    In training, rows are averaged before the product even if it makes them narrower: sampled blocks have fewer
    destinations than sources. native/layers.py runs a network of such layers as one function. A subclass that overrides
    message or combine, not product, is trained by these, like any `Conv`; so is a layer of customised linear maps.
    """

    edge_features = "asked"
    one_product = True

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        if {"message", "combine"} & vars(cls).keys():
            cls.one_product = "product" in vars(cls)

    def product(self):
        """Return the matrix and the bias of the product."""

    def factors(self, block, degree=None):
        """Return alpha, beta and gamma of `own_plus_mean` for a block; None: the product is of pairs, not sums."""

    def plain(self):
        """Whether the linear maps are plain ones, which may be replaced by their product."""
        return unchanged(*self.children())

    def forward(self, block, h, degree=None, seed=None, edges=None):
        changed = {"message", "combine"} & vars(self).keys()  # set on the layer itself
        if changed or not self.one_product or not self.plain():
            return super().forward(block, h, degree, seed, edges)
        check_rows(block, h)
        scales = self.factors(block, degree)
        if scales is None:
            rows = self_and_mean(block.indptr, block.indices, h)
        else:
            alpha, beta, gamma = scales
            rows = own_plus_mean(block.indptr, block.indices, h, alpha, beta, gamma=gamma)
        edges = self.seen(edges, len(block.indices))
        return self.plus_edges(linear(rows, *self.product()), block.indptr, edges)

    def plus_edges(self, out, indptr, edges):
        """Add W_edge mean(e_uv) to rows out [S, D], unless edges is None. Its input is narrow: beside the others', in one
        product, it would have them copied."""
        if edges is None:
            return out
        return out + self.edge_linear(edge_mean(indptr, edges.to(out.dtype)))


class SAGEConv(MeanConv, name="sage"):
    """GraphSAGE layer, mean aggregator (Hamilton, Ying, Leskovec, arXiv 1706.02216): W_self h_v + W_neigh mean(h_u), with
    features of edges + W_edge mean(e_uv)."""

    padded = True

    def __init__(self, in_dim, out_dim, edge_dim=0):
        super().__init__()
        self.out_dim = out_dim
        self.edge_dim = edge_dim
        self.self_linear = Linear(in_dim, out_dim)
        self.neigh_linear = Linear(in_dim, out_dim, bias=False)
        self.edge_linear = Linear(edge_dim, out_dim, bias=False) if edge_dim else None
        # mean and W_neigh commute: send the narrower
        self.project_first = in_dim > out_dim

    def product(self):
        """Return the matrix [D, 2F] and bias [D] for pairs of own row and mean."""
        weight = torch.cat([self.self_linear.weight, self.neigh_linear.weight], 1)
        return weight, self.self_linear.bias

    def combine_pair(self, pair):
        """Apply the layer to own rows and means [S, 2F], in one product unless a linear map is customised -> [S, D]."""
        if self.plain():
            return linear(pair, *self.product())
        own, mean = pair.chunk(2, 1)
        return self.self_linear(own) + self.neigh_linear(mean)

    def message(self, h, degree=None):
        return self.neigh_linear(h) if self.project_first else h

    def combine(self, near):
        if self.project_first:
            out = self.self_linear(near.x_dst) + near.mean()
        else:
            out = self.combine_pair(near.self_and_mean())
        return self.plus_edges(out, near.indptr, near.edges)


class GCNConv(MeanConv, name="gcn"):
    """Graph convolution (Kipf, Welling, arXiv 1609.02907): W sum(h_u / sqrt((d_u + 1) (d_v + 1))) + b, v among the u.

    The sum is the in-degree times the mean over the block's edges: in a uniformly sampled block an
    unbiased estimate. With degree=None the layer is DGL's GraphConv(norm="both") on the block with self-loops. With
    features of edges, W_edge mean(e_uv) over v's edges is added.
    """

    uses_degree = True
    whole_graph = True
    # it mixes a node's row with its neighbours'
    residual = "if classes disagree"
    padded = True

    def __init__(self, in_dim, out_dim, edge_dim=0):
        super().__init__()
        self.out_dim = out_dim
        self.edge_dim = edge_dim
        self.linear = Linear(in_dim, out_dim, bias=False)
        self.bias = nn.Parameter(torch.zeros(out_dim))
        nn.init.xavier_uniform_(self.linear.weight)
        self.edge_linear = Linear(edge_dim, out_dim, bias=False) if edge_dim else None
        self.project_first = in_dim > out_dim

    def product(self):
        """Return the matrix [D, F] and bias [D] for sums over neighbours."""
        return self.linear.weight, self.bias

    def factors(self, block, degree=None):
        """Return alpha [S], beta [S] and gamma [N] of `own_plus_mean` for a block; degree [N, 2]."""
        degree = block_degrees(block) if degree is None else degree
        gamma = (degree[:, 0] + 1).rsqrt()
        dst_degree = degree[: len(block.indptr) - 1, 1]
        scale = (dst_degree + 1).rsqrt()
        return scale * gamma[: len(scale)], scale * dst_degree, gamma

    def message(self, h, degree):
        return (self.linear(h) if self.project_first else h) / (degree[:, :1] + 1).sqrt()

    def combine(self, near):
        in_degree = near.degree[:, 1]
        scale = (in_degree + 1).rsqrt()
        total = near.own_plus_mean(scale, scale * in_degree)
        if not self.project_first and self.plain():
            out = linear(total, *self.product())
        else:
            out = total if self.project_first else self.linear(total)
            out = out if self.bias is None else out + self.bias
        return self.plus_edges(out, near.indptr, near.edges)


class MLP(nn.Sequential):
    """That of GIN: linear, norm, ReLU, linear."""

    def forward(self, x):
        kinds = [Linear, LayerNorm, nn.ReLU, Linear]
        if [*map(type, self)] != kinds or not unchanged(*self, kinds={*kinds}):
            return super().forward(x)
        first, norm, _, last = self
        return last(relu_dropout(first(x), 0, norm=norm))


class GINConv(Conv, name="gin"):
    """Graph isomorphism layer (Xu et al., arXiv 1810.00826): MLP((1 + eps) h_v + sum(h_u)), eps learned.

    The sum, estimated as in `GCNConv`, grows with the degree. A norm after the MLP's first linear layer compensates for
    this, as in the authors' networks; without it, training on graphs of large degree may not work at all.
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
        self.mlp = MLP(Linear(in_dim, out_dim), *norms, nn.ReLU(), Linear(out_dim, out_dim))
        self.eps = nn.Parameter(torch.zeros(1))

    def combine(self, near):
        alpha = (1 + self.eps).expand(len(near.degree))
        return self.mlp(near.own_plus_mean(alpha, near.degree[:, 1]))


class GATv2Conv(Conv, name="gat"):
    """Graph attention layer, GATv2 (Brody, Alon, Yahav, arXiv 2105.14491; GAT: 1710.10903), with self-loops.

    Head k: sum(a_uv W_src h_u), where a_uv is the softmax over v's edges of attn . leaky_relu(W_src h_u + W_dst h_v). With
    edge features, W_edge e_uv is added inside; a self-loop has the mean of the features of v's edges.

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
    last_options = {"mean": True}

    def __init__(self, in_dim, out_dim, heads=1, *, mean=False, dropout=0.0, edge_dim=0):
        super().__init__()
        self.out_dim = out_dim
        self.mean = mean
        self.dropout = dropout
        self.edge_dim = edge_dim
        width = head_width(out_dim, heads, mean)
        self.src_linear = Linear(in_dim, heads * width)
        self.dst_linear = Linear(in_dim, heads * width)
        self.attn = nn.Parameter(torch.empty(heads, width))
        self.edge_linear = Linear(edge_dim, heads * width, bias=False) if edge_dim else None
        for weight in (self.src_linear.weight, self.dst_linear.weight, self.attn):
            nn.init.xavier_uniform_(weight)

    def message(self, h, degree=None):
        return self.src_linear(h)

    def combine(self, near):
        drop = drop_byte(self.dropout) if self.training else 0
        target = self.dst_linear(near.x_dst)
        out = near.attend(self.attn, target, edge_map=self.edge_linear, drop=drop)
        return out.view(-1, *self.attn.shape).mean(1) if self.mean else out


def head_width(out_dim, heads, mean):
    """Return how wide a head is: as the output if the `mean` of heads is taken, or its part if they are concatenated."""
    if not mean and out_dim % heads:
        raise ValueError(f"width {out_dim} cannot be shared by {heads} heads: it is no multiple")
    return out_dim if mean else out_dim // heads


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
        conv: the name of a layer in `CONVS`, or a subclass of `Conv`.
        num_layers: as many as a batch has blocks.
        dropout: probability, applied after each inner layer, and to the attention weights of "gat".
            input_dropout: the same for the features.
        heads: of "gat" and "rgat": concatenated in the inner layers, `hidden` wide together; averaged in the last.
        norm: "none", "layer" or "batch", after each inner layer, and inside the layers of "gin" and "gine".
        residual: add each layer's input to its output, through a matrix where the widths differ.
        recompute: keep layers' inputs and recompute the rest in backward (arXiv 1604.06174): less memory, more time.
        inputs: module that makes the input of the first layer, `NodeInputs` of extras/relational.py; None: it is x.
        target_scale: module that turns the last layer's output into targets, `Scale` of extras/regression.py; None: it is that.
        options: what else layers are made with: edge_dim, the width of the features of edges; num_types, the number of edge
            types, and bases, see `RGCNConv` of extras/relational.py.

    Attributes:
        degrees: float [V, 2], `graph_degrees` on the model's device, which layers that use degrees need
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
        conv=SAGEConv,
        num_layers=3,
        dropout=0.5,
        heads=1,
        norm="none",
        residual=False,
        input_dropout=0.0,
        recompute=False,
        inputs=None,
        target_scale=None,
        **options,
    ):
        super().__init__()
        if conv in LAYERS:
            extra(LAYERS[conv], conv)
        make = CONVS.get(conv, conv)
        for name, value, choices in (("conv", make, CONVS), ("norm", norm, NORMS)):
            if isinstance(value, str) and value not in choices:
                raise ValueError(f"{name} {value!r} is unknown: choose one of {', '.join(choices)}")
        if num_layers < 1 or heads < 1:
            raise ValueError(f"num_layers is {num_layers}, heads is {heads}: give 1 or more")
        if norm == "batch" and recompute:
            raise ValueError("norm 'batch' would count a recomputed batch twice: take 'layer'")
        for probability in (dropout, input_dropout):
            drop_byte(probability)  # refuses 1 and more
        options = {name: value for name, value in options.items() if value}
        for name in options.keys() - make.takes:
            able = ", ".join(n for n, layer in CONVS.items() if name in layer.takes) or "none"
            raise ValueError(
                f"conv {make.name!r} does not take {name} {options[name]}, layers that do are {able}"
            )
        given = dict(heads=heads, dropout=dropout, norm=norm) | options
        options = {name: given[name] for name in make.takes if name in given}
        self.inputs = inputs
        self.register_module("target_scale", target_scale)
        first = in_dim if inputs is None else inputs.out_dim
        pairs = list(pairwise([first] + [hidden] * (num_layers - 1) + [out_dim]))
        self.layers = nn.ModuleList(make(*pair, **options) for pair in pairs[:-1])
        self.layers.append(make(*pairs[-1], **options, **make.last_options))
        self.norms = nn.ModuleList(NORMS[norm](hidden) for _ in range(num_layers - 1))
        straight = [nn.Identity() if a == b else Linear(a, b, bias=False) for a, b in pairs]
        self.residuals = nn.ModuleList(straight) if residual else None
        self.dropout = dropout
        self.input_dropout = input_dropout
        self.recompute = recompute
        self.edge_dim = options.get("edge_dim", 0)

    def forward(self, blocks, x, *, aggregated=False, key=None, edges=None):
        """Compute logits [S, C] of the last block's destinations.

        Args:
            blocks: one per layer, outermost hop first.
            x: [N, F] features of blocks[0].src_nodes, of any dtype; with `NodeInputs` only of those that
                have features. Or, with `aggregated` (for GraphSAGE), [S, 2F]: the result of
                `self_and_mean` for blocks[0], computed where the features are.
            key: int that keys dropout, together with layer, node and column; in a CUDA graph the tuple
                of `layer_seed`; None: drawn from torch's CPU generator.
            edges: features [E, edge_dim] of each block's edges, for layers with an edge_dim.
        """
        if len(blocks) != len(self.layers):
            raise ValueError(
                f"there are {len(blocks)} blocks for {len(self.layers)} layers: one a layer is needed"
            )
        low = x.dtype == torch.bfloat16 == torch.get_autocast_dtype(x.device.type)
        if not (low and torch.is_autocast_enabled(x.device.type)):
            x = x.to(next(self.parameters()).dtype)
        for outer, inner in pairwise(blocks[aggregated:]):
            check_rows(inner, outer.indptr[1:])
        if key is None and self.training:
            key = drawn_seed()
        first = self._step_of_pair if aggregated else self.step
        if self.inputs is not None and self.inputs.joins(self):
            first = partial(self.inputs.step, self)
        else:
            x = self.embed(blocks[0].src_nodes, x)
            if len(blocks) > aggregated:
                check_rows(blocks[aggregated], x)
        if self.input_dropout and self.training:
            seed = layer_seed(key, len(self.layers))
            x = dropout(x, blocks[0].src_nodes, seed, drop_byte(self.input_dropout))
        if self._is_one_function() and (out := self._stack(blocks, x, aggregated, key)) is not None:
            return self._scaled(out)
        edges = edges or [None] * len(blocks)
        for i, (block, rows) in enumerate(zip(blocks, edges, strict=True)):
            step = self.step if i else first
            if self.recompute and self.training:
                state = not isinstance(key, tuple)  # a CUDA graph has none of torch's generators
                step = partial(checkpoint, step, use_reentrant=False, preserve_rng_state=state)
            seed = layer_seed(key, i) if self.training else 0
            x = step(i, block, x, seed=seed, edges=rows)
        return x

    def embed(self, nodes, x):
        """Return the first layer's input for nodes [N] with features x: x, or what `inputs` makes of it."""
        return x if self.inputs is None else self.inputs(nodes, x)

    def step(self, i, block, x, *, seed=None, edges=None):
        """Apply layer i and all that precedes the next one; seed: of the dropout after it."""
        layer = self.layers[i]
        h = layer(block, x, self._degree(layer, block, x.device), seed, edges)
        return self.finish(i, h, x[: block.indptr.numel() - 1], block.src_nodes, seed)

    def _step_of_pair(self, i, block, pair, *, seed=None, edges=None):
        """`step` of own rows and means [S, 2F] of the block."""
        h_dst = None
        if self.residuals:  # contiguous: a product rounds as it does for rows that were gathered
            h_dst = pair[:, : pair.shape[1] // 2].contiguous()
        return self.finish(i, self.layers[i].combine_pair(pair), h_dst, block.src_nodes, seed)

    def _degree(self, layer, block, device):
        """Return the degrees [N, 2] of a block's sources for a layer that uses them, if known; else None."""
        of = self.degrees
        if not layer.uses_degree or of is None:
            return None
        degree = of(block) if callable(of) else gather_rows(of, block.src_nodes)
        return degree.to(device, next(self.parameters()).dtype)

    def _is_one_function(self):
        """Whether all layers may run as one autograd function: products without norms or residuals, no part customised."""
        if not fused or self.recompute or self.residuals or not is_gnn(self, ("step", "finish")):
            return False
        for layer in self.layers:
            own_forward = type(layer).forward is not MeanConv.forward
            if own_forward or not layer.one_product or layer.edge_dim:
                return False
        parts = [*self.norms, *self.layers, *(f for layer in self.layers for f in layer.children())]
        return unchanged(*parts, kinds={nn.Identity, *map(type, self.layers)})

    def _stack(self, blocks, x, aggregated, key):
        """Run all layers as one autograd function of native/layers.py; None if it has none for these tensors."""
        drop = drop_byte(self.dropout) if self.training else 0
        drops = [(layer_seed(key, i) if drop else 0, drop) for i in range(len(self.norms))]
        pairs = zip(self.layers, blocks)
        scales = [layer.factors(b, self._degree(layer, b, x.device)) for layer, b in pairs]
        weights = [w for layer in self.layers for w in layer.product()]
        return fused.stack(blocks, x, weights, aggregated=aggregated, scales=scales, drops=drops)

    def _scaled(self, out):
        return out if self.target_scale is None else self.target_scale(out)

    def finish(self, i, h, h_dst, nodes=None, seed=None):
        """Apply residual, norm, ReLU and dropout after layer i -> [S, D].

        Args:
            h: [S, D] the layer's output. h_dst: [S, F] the destinations' rows of its input.
            nodes: [S or more] ids of the destinations, which with the seed determine dropout.
        """
        residual = None if self.residuals is None else self.residuals[i](h_dst)
        if i == len(self.norms):
            return self._scaled(h if residual is None else h + residual)
        nodes = None if nodes is None else nodes[: len(h)]
        norm = self.norms[i]
        kinds = {*CONVS.values(), *NORMS.values(), MLP, nn.ReLU}
        if not unchanged(*self.layers[i].modules(), norm, kinds=kinds):
            # a hook, method or network may keep it, and ReLU is in place
            h = norm(h if residual is None else h + residual).clone()
            norm = residual = None
        return relu_dropout(
            h, self.dropout, self.training, nodes, seed, norm=norm, residual=residual
        )


class SAGE(GNN):
    """GraphSAGE with the mean aggregator, the default GNN."""


def is_gnn(model, steps=("forward", "embed", "step")):
    """Return whether a network is a `GNN` that does not override these methods."""
    return isinstance(model, GNN) and not overrides(model, GNN, steps)


def graph_degrees(indptr, indices):
    """Compute out- and in-degree of all nodes -> float32 [V, 2], in host memory; IndexError if indices has a bad id."""
    out = torch.zeros(indptr.numel() - 1, dtype=torch.int64, device=indices.device)
    for part in indices.split(1 << 24):  # which bincount converts to int64
        check_nodes(part, out.numel())
        out += torch.bincount(part, minlength=out.numel())
    return torch.stack([out.cpu(), indptr.diff().cpu()], 1).float()


def check_nodes(ids, V):
    """Raise IndexError unless all ids [E], read from an unchecked graph, are in 0 .. V-1."""
    for node in ids.aminmax() if ids.numel() else ():
        if not 0 <= node < V:
            raise IndexError(
                f"the graph is damaged: indices holds {node}, and its nodes are 0 to {V - 1}"
            )
