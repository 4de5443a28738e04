"""The steps of a layer that are worth fusing, on a GPU: fused.py takes them where tensors lie there.

The kernels (fused_kernels.py) are compiled at first use by NVRTC (native_cuda.py); where that cannot be had, every
function here returns None after one warning, and torch operations do the same with several times as many launches.

The same input gives the same bits in every run. No function waits for the GPU, and all work in the capture of a CUDA
graph. For static shapes a block may be padded: -1 in `indices` behind the last edge, or behind those of each
destination (edge j of destination i at place i k + j, `indptr` k times 0, 1, 2, ...), and ids of -1 for rows beyond the
batch, which are zeros then. Dropout that differs from replay to replay takes its seed from the number of the step on
the GPU: model.py's `layer_seed`.

Letters: S destinations, N sources, E edges of a block; F, D feature widths; K heads; C classes.
"""

import functools
from contextlib import nullcontext

import torch

from fused_kernels import IDS, TYPES, WORDS, source
from native_cuda import DIALECT, load_cuda


@functools.cache
def _load(ids, device):
    return load_cuda("layers", DIALECT + source(ids), device)


def _kernels(integers, *rows):
    """The kernels for these tensors, or None where torch operations have to do; an integer tensor may be None.

    The last of `rows` has as many elements as there are threads, or more: they are counted in 32 bits.
    """
    integers = [t for t in integers if t is not None]
    ids = integers[0].dtype if integers else torch.int32
    fits = ids in IDS and all(t.dtype == ids and t.is_contiguous() and t.numel() < 1 << 31 for t in integers)
    fits = fits and all(t.dtype in TYPES and t.is_contiguous() for t in rows) and rows[-1].numel() < 1 << 32
    return _load(ids, rows[0].device) if fits else None


def _whole(width, *rows):
    """1 where rows of this width start at multiples of 16 bytes."""
    for t in rows:
        if t.data_ptr() & 15:
            return 0
    return int(width % 4 == 0)


def _parts(width):
    """Threads of a row."""
    return (width + 3) // 4


def _pointer(tensor):
    return 0 if tensor is None else tensor.data_ptr()


def self_and_mean(indptr, indices, h, self_rows=None, out=None):
    """See model.py; None where the kernels cannot do it."""
    target = h.new_empty(indptr.numel() - 1, 2 * h.shape[1]) if out is None else out
    kernels = _kernels([indptr, indices, self_rows], h, target)
    if kernels is None:
        return None
    if self_rows is None and out is None and h.requires_grad and torch.is_grad_enabled():
        return _SelfAndMean.apply(indptr, indices, h, kernels)
    _self_and_mean(indptr, indices, h, self_rows, target, kernels)
    return target


def _self_and_mean(indptr, indices, h, self_rows, out, kernels):
    S, width = out.shape[0], h.shape[1]
    kernels.run(
        _PAIR_NAMES[h.dtype, out.dtype],
        S * _parts(width),
        indptr.data_ptr(),
        indices.data_ptr(),
        h.data_ptr(),
        _pointer(self_rows),
        S,
        width,
        _whole(width, h, out),
        out.data_ptr(),
    )


_PAIR_NAMES = {(a, b): f"self_and_mean_{TYPES[a]}_{TYPES[b]}" for a in TYPES for b in TYPES}


class Lists:
    """The edges of a block by source, each source's in their order.

    Attributes:
        start, size: pointers to int32 [N]; destination, edge: to int32 [E]; share: to float32 [E], 1 / edges of the
            destination.
    """

    def __init__(self, indptr, indices, num_src, kernels, edges=False, shares=False):
        E, N, S = indices.numel(), num_src, indptr.numel() - 1
        sizes = torch.zeros(N + 1, dtype=torch.int32, device=indices.device)
        memory = sizes.new_empty(N + 5 * E)
        self.memory, self.size, self.start = (sizes, memory), sizes.data_ptr(), memory.data_ptr()
        offsets, nodes = indptr.data_ptr(), indices.data_ptr()
        slot = self.start + 4 * N
        unordered, self.destination = slot + 4 * E, slot + 8 * E
        self.edge, self.share = slot + 12 * E if edges else 0, slot + 16 * E if shares else 0
        kernels.run("list_sizes", E, nodes, E, self.size, slot)
        kernels.run("list_starts", (N + 31) // 32, N, self.size, self.start)
        kernels.run("list_edges", E, nodes, E, self.start, slot, unordered)
        kernels.run(
            "list_in_order",
            E,
            offsets,
            nodes,
            S,
            E,
            self.start,
            self.size,
            unordered,
            self.destination,
            self.edge,
            self.share,
        )


def _self_and_mean_grad(indptr, indices, grad, num_src, kernels, kept=None, scale=1.0):
    """grad [S, 2F] -> [N, F]; of what went into ReLU and dropout that left `kept` [N, F], where that is given."""
    S, width = grad.shape[0], grad.shape[1] // 2
    lists, out = Lists(indptr, indices, num_src, kernels, shares=True), grad.new_empty(num_src, width)
    kernels.run(
        "self_and_mean_grad_" + TYPES[grad.dtype],
        num_src * _parts(width),
        lists.start,
        lists.size,
        lists.destination,
        lists.share,
        grad.data_ptr(),
        S,
        num_src,
        width,
        _whole(width, grad),
        _pointer(kept),
        scale,
        out.data_ptr(),
    )
    return out


class _SelfAndMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, indptr, indices, h, kernels):
        ctx.save_for_backward(indptr, indices)
        ctx.num_src, ctx.kernels = h.shape[0], kernels
        out = h.new_empty(indptr.numel() - 1, 2 * h.shape[1])
        _self_and_mean(indptr, indices, h, None, out, kernels)
        return out

    @staticmethod
    def backward(ctx, grad):
        indptr, indices = ctx.saved_tensors
        return None, None, _self_and_mean_grad(indptr, indices, grad.contiguous(), ctx.num_src, ctx.kernels), None


def max_neighbours(indptr, indices, h):
    """See model.py; None where the kernels cannot do it."""
    kernels = _kernels([indptr, indices], h)
    return None if kernels is None else _MaxNeighbours.apply(indptr, indices, h, kernels)


class _MaxNeighbours(torch.autograd.Function):
    @staticmethod
    def forward(ctx, indptr, indices, h, kernels):
        S, (num_src, width) = indptr.numel() - 1, h.shape
        out, winner = h.new_empty(S, width), indices.new_empty(S, width, dtype=torch.int32)
        kernels.run(
            "max_" + TYPES[h.dtype],
            S * _parts(width),
            indptr.data_ptr(),
            indices.data_ptr(),
            h.data_ptr(),
            S,
            width,
            _whole(width, h),
            out.data_ptr(),
            winner.data_ptr(),
        )
        ctx.save_for_backward(indptr, indices, winner)
        ctx.num_src, ctx.kernels = num_src, kernels
        return out

    @staticmethod
    def backward(ctx, grad):
        (indptr, indices, winner), grad, kernels, N = ctx.saved_tensors, grad.contiguous(), ctx.kernels, ctx.num_src
        width = grad.shape[1]
        lists, out = Lists(indptr, indices, N, kernels), grad.new_empty(N, width)
        kernels.run(
            "max_grad_" + TYPES[grad.dtype],
            N * _parts(width),
            lists.start,
            lists.size,
            lists.destination,
            grad.data_ptr(),
            winner.data_ptr(),
            N,
            width,
            _whole(width, grad),
            out.data_ptr(),
        )
        return None, None, out, None


def gather_rows(features, ids, out=None):
    """See model.py; None where the kernels cannot do it.

    An id below 0 gives a row of zeros; at one of V or more the GPU stops.
    """
    n, row = ids.numel(), features.shape[1] * features.element_size()
    if out is None:
        out = features.new_empty(n, features.shape[1])
    fits = (
        features.is_contiguous() and out.is_contiguous() and ids.is_contiguous() and ids.dtype in IDS and row % 2 == 0
    )
    kernels = _load(torch.int32, features.device) if fits else None  # this program serves int64 as well
    if kernels is None:
        return None
    table, target = features.data_ptr(), out.data_ptr()
    size = next(size for size in WORDS if not (row | table | target) % size)
    if n * row // size >= 1 << 32:
        return None
    name = f"gather_rows_{WORDS[size]}_{8 * ids.itemsize}"
    kernels.run(name, n * row // size, table, ids.data_ptr(), n, row // size, len(features), target)
    return out


def relu_dropout(h, nodes, seed, drop):
    """dropout(relu(h)) in place, as model.py draws it; None where the kernels cannot do it."""
    kernels = _kernels([nodes], h)
    return None if kernels is None else _ReluDropout.apply(h, nodes, seed, drop, kernels)


def dropout(x, nodes, seed, drop):
    """Dropout of x without ReLU, for an x that needs no gradient; None where the kernels cannot do it."""
    kernels = None if x.requires_grad else _kernels([nodes], x)
    if kernels is None:
        return None
    out = torch.empty_like(x)
    _relu_dropout(x, nodes, seed, drop, kernels, 0, out)
    return out


def _seed(seed):
    """Arguments seed, step, layer of a kernel from model.py's `layer_seed`."""
    return (seed[0], seed[1].data_ptr(), seed[2]) if isinstance(seed, tuple) else (seed, 0, 0)


def _relu_dropout(h, nodes, seed, drop, kernels, relu=1, out=None):
    S, width = h.shape
    out = h if out is None else out
    kernels.run(
        "relu_dropout_" + TYPES[h.dtype],
        S * _parts(width),
        h.data_ptr(),
        _pointer(nodes),
        S,
        width,
        _whole(width, h, out),
        *_seed(seed),
        relu,
        drop,
        256 / (256 - drop),
        out.data_ptr(),
    )


class _ReluDropout(torch.autograd.Function):
    """What was kept is what is not zero in the result, so the backward pass needs no mask."""

    @staticmethod
    def forward(ctx, h, nodes, seed, drop, kernels):
        ctx.kernels, ctx.scale = kernels, 256 / (256 - drop)
        _relu_dropout(h, nodes, seed, drop, kernels)
        ctx.mark_dirty(h)
        ctx.save_for_backward(h)
        return h

    @staticmethod
    def backward(ctx, grad):
        (h,), grad = ctx.saved_tensors, grad.contiguous()
        (S, width), out = h.shape, torch.empty_like(grad)
        ctx.kernels.run(
            "relu_dropout_grad_" + TYPES[h.dtype],
            S * _parts(width),
            h.data_ptr(),
            grad.data_ptr(),
            S,
            width,
            _whole(width, h, grad),
            ctx.scale,
            out.data_ptr(),
        )
        return out, None, None, None, None


def cross_entropy(logits, labels):
    """See model.py; None where the kernels cannot do it."""
    fits = logits.dtype == torch.float32 and labels.dtype == torch.int64 and labels.is_contiguous()
    kernels = _kernels([], logits) if fits else None
    return None if kernels is None else _CrossEntropy.apply(logits, labels, kernels)


class _CrossEntropy(torch.autograd.Function):
    """The gradient is computed beside the loss: the softmax is there."""

    @staticmethod
    def forward(ctx, logits, labels, kernels):
        (S, C), grad, loss = logits.shape, torch.empty_like(logits), logits.new_empty(len(logits))
        kernels.run(
            "cross_entropy", 32 * S, logits.data_ptr(), labels.data_ptr(), S, C, loss.data_ptr(), grad.data_ptr()
        )
        ctx.save_for_backward(grad)
        return loss.sum()

    @staticmethod
    def backward(ctx, weight):
        (grad,) = ctx.saved_tensors
        return grad * weight, None, None


# ---------------------------------------------------------------------------------------------------------------------
# attention


def attend(indptr, indices, source, target, attn, self_rows, nodes, seed, drop):
    """The weighted sum of a GATv2 layer, before heads are averaged; None where the kernels cannot do it.

    Args:
        source: [N, K D] and target: [S, K D], float32 or bfloat16. attn: float32 [K, D].
        self_rows: [S] rows of source that are the destinations'; the first S when None. No gradient flows with them.
        nodes, seed, drop: of the dropout of weights; see model.py.

    Returns:
        [S, K D], of source's type.
    """
    kernels = _kernels([indptr, indices, self_rows, nodes], target, source)
    few = (indices.numel() + len(target)) * len(attn) < 1 << 32
    if kernels is None or source.dtype != target.dtype or attn.dtype != torch.float32 or not few:
        return None
    return _Attend.apply(indptr, indices, source, target, attn, self_rows, nodes, seed, drop, kernels)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, indptr, indices, source, target, attn, self_rows, nodes, seed, drop, kernels):
        S, (K, D) = indptr.numel() - 1, attn.shape
        places, scale, whole = indices.numel() + S, 256 / (256 - drop), _whole(D, source, target, attn)
        weights = attn.new_empty(places, K)
        dropped = torch.empty_like(weights) if drop else None
        out = torch.empty_like(target)
        block = indptr.data_ptr(), indices.data_ptr()
        kernels.run(
            "attention_scores_" + TYPES[source.dtype],
            places * K,
            *block,
            _pointer(self_rows),
            S,
            places,
            K,
            D,
            whole,
            source.data_ptr(),
            target.data_ptr(),
            attn.data_ptr(),
            weights.data_ptr(),
        )
        kernels.run(
            "attention_softmax",
            S * K,
            *block,
            _pointer(nodes),
            S,
            K,
            *_seed(seed),
            drop,
            scale,
            weights.data_ptr(),
            _pointer(dropped),
        )
        used = weights if dropped is None else dropped
        kernels.run(
            "attention_sum_" + TYPES[source.dtype],
            S * K * _parts(D),
            *block,
            _pointer(self_rows),
            S,
            K,
            D,
            whole,
            used.data_ptr(),
            source.data_ptr(),
            out.data_ptr(),
        )
        ctx.scale, ctx.kernels = scale, kernels
        ctx.save_for_backward(indptr, indices, source, target, attn, weights, dropped)
        return out

    @staticmethod
    def backward(ctx, grad):  # [S, K D]
        indptr, indices, source, target, attn, weights, dropped = ctx.saved_tensors
        grad, kernels, kind, (K, D) = grad.contiguous(), ctx.kernels, TYPES[source.dtype], attn.shape
        (S, N), places, whole = (len(target), len(source)), len(weights), _whole(D, source, target, attn, grad)
        to_scores, to_attn = torch.empty_like(weights), attn.new_empty(S, K * D)
        to_source, to_target = torch.empty_like(source), torch.empty_like(target)
        block = indptr.data_ptr(), indices.data_ptr()
        kernels.run(
            "attention_weight_grad_" + kind,
            places * K,
            *block,
            S,
            places,
            K,
            D,
            whole,
            source.data_ptr(),
            grad.data_ptr(),
            to_scores.data_ptr(),
        )
        kernels.run(
            "attention_softmax_grad",
            S * K,
            *block,
            S,
            K,
            weights.data_ptr(),
            _pointer(dropped),
            ctx.scale,
            to_scores.data_ptr(),
        )
        kernels.run(
            "attention_target_grad_" + kind,
            S * K * _parts(D),
            *block,
            S,
            K,
            D,
            whole,
            source.data_ptr(),
            target.data_ptr(),
            attn.data_ptr(),
            to_scores.data_ptr(),
            to_target.data_ptr(),
            to_attn.data_ptr(),
        )
        lists, used = Lists(indptr, indices, N, kernels, edges=True), weights if dropped is None else dropped
        kernels.run(
            "attention_source_grad_" + kind,
            N * K * _parts(D),
            block[0],
            lists.start,
            lists.size,
            lists.destination,
            lists.edge,
            S,
            N,
            K,
            D,
            whole,
            source.data_ptr(),
            target.data_ptr(),
            attn.data_ptr(),
            used.data_ptr(),
            to_scores.data_ptr(),
            grad.data_ptr(),
            to_source.data_ptr(),
        )
        return None, None, to_source, to_target, to_attn.sum(0).view(K, D), None, None, None, None, None


# ---------------------------------------------------------------------------------------------------------------------
# the whole of GraphSAGE


def sage(blocks, x, aggregated, weights, drops):
    """The forward pass of a plain GraphSAGE as one step of autograd; None where the kernels cannot do it.

    Args:
        blocks: one for each layer. x: [N, F], or with `aggregated` the pair [S, 2F] of the outermost block.
        weights: of each layer W_self [D, F], bias [D] and W_neigh [D, F], float32, one after the other.
        drops: (seed, drop) of `relu_dropout` after each layer but the last.

    Returns:
        [S, C]; bfloat16 under torch.autocast, else float32.
    """
    mixed = torch.is_autocast_enabled("cuda")
    dtype = torch.get_autocast_dtype("cuda") if mixed else torch.float32
    kernels = _kernels([t for block in blocks for t in block[:3]], x)
    fits = dtype in TYPES and weights[0].dtype == torch.float32 and (mixed or x.dtype == torch.float32)
    if kernels is None or not fits:
        return None
    with torch.autocast("cuda", enabled=False) if mixed else nullcontext():
        return _Sage.apply(x, blocks, aggregated, drops, kernels, dtype, *weights)


class _Sage(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, blocks, aggregated, drops, kernels, dtype, *weights):
        h, saved = x, []
        for i, block in enumerate(blocks):
            if aggregated and not i:
                pair = h.to(dtype)
            else:
                pair = h.new_empty(block.indptr.numel() - 1, 2 * h.shape[1], dtype=dtype)
                _self_and_mean(block.indptr, block.indices, h, None, pair, kernels)
            own, bias, neigh = weights[3 * i : 3 * i + 3]
            weight = torch.cat([own, neigh], 1)
            if weight.dtype != dtype:
                weight, bias = weight.to(dtype), bias.to(dtype)
            saved += [h if i else None, pair, weight]
            h = torch.addmm(bias, pair, weight.t())
            if i < len(drops):
                _relu_dropout(h, block.src_nodes, *drops[i], kernels)
        ctx.blocks, ctx.drops, ctx.kernels, ctx.num_input = blocks, drops, kernels, len(x)
        ctx.save_for_backward(*saved)
        return h

    @staticmethod
    def backward(ctx, grad):  # [S, C]
        saved, kernels, grad, grads = ctx.saved_tensors, ctx.kernels, grad.contiguous(), []
        for i in range(len(ctx.blocks) - 1, -1, -1):
            h, pair, weight = saved[3 * i : 3 * i + 3]
            own, mean = pair.chunk(2, 1)
            turned = grad.t()
            grads = [torch.mm(turned, own), grad.sum(0), torch.mm(turned, mean), *grads]
            if i or ctx.needs_input_grad[0]:
                scale = 256 / (256 - ctx.drops[i - 1][1]) if i else 1.0
                num_src, (indptr, indices, *_) = len(h) if i else ctx.num_input, ctx.blocks[i]
                grad = _self_and_mean_grad(indptr, indices, torch.mm(grad, weight), num_src, kernels, h, scale)
        return grad if ctx.needs_input_grad[0] else None, None, None, None, None, None, *grads
