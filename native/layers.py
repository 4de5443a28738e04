"""Fused operations for the layers in model.py: kernels of layers.cu on a GPU, the same as OpenMP loops on the CPU.

    pair = self_and_mean(indptr, indices, h)      # own row and mean of the neighbours' rows, one pass over h
    h = relu_dropout(h, nodes, seed, drop)        # in place

model.py tries these functions first. They return None for tensors they cannot handle (no compiler, another dtype); model.py
then uses torch operations, the reference. On the CPU the loops run on torch's OpenMP threads, because other threads
would compete with these for cores. The same input gives the same bits in every run.

On a GPU no function synchronizes, and all of them can be captured in a CUDA graph. A block may be padded to a static
shape: with -1 in `indices` after its last edge, or after each destination's edges (k slots each, row offsets 0, k, 2k,
...). Rows with id -1 are zeros. To differ between replays, dropout takes its seed from the step number on the GPU:
model.py's `layer_seed`.
"""

import os
from contextlib import nullcontext

import torch
from torch.nn import functional as F

from .kernels import (
    IDS,
    UNSCALED,
    Dropout,
    Fused,
    InEdges,
    Lists,
    Scales,
    aligned,
    block_kernels,
    followed,
    from_values,
    functions,
    is_gpu,
    learned,
    load,
    save,
    sizes,
)

# multiplications per thread for which compiling a product pays; the compile time is the same for any number of threads
WORTH_COMPILING = 50_000_000
LOSS_LANES = 16  # threads a row of logits: all read the whole row
# `weight_grad`, measured on an H200: 60 to 80 slices of 152,064 rows, 200 x 256 in TF32, take 99 us; one product 118. Rows of
# static shapes are multiples of 256.
SLICES = 64
SLICED = 1024  # rows of each slice, at least
LONG = SLICES * SLICED  # rows whose sums torch computes at a quarter of the bandwidth
WARP = 32  # threads of a row in norm.cu
WIDEST = 1024  # columns that these hold in registers
RUNS = 3072  # warps of the backward pass: as many as an H200 runs at a time


# ---- what model.py calls; its functions of the same names explain the arguments


def self_and_mean(indptr, indices, h, self_rows=None, out=None, *, scale=None):
    """See model.py; None if torch operations have to be used."""
    near = InEdges(indptr, indices, self_rows)
    target = h.new_empty(near.S, 2 * h.shape[1]) if out is None else out
    code = block_kernels(near, h, target, steps=scale)
    if code is None or target.shape != (near.S, 2 * h.shape[1]):
        return None
    if learned(h):
        if self_rows is not None or out is not None:
            return None
        return _SelfAndMean.apply(h, None, near, UNSCALED, code)
    code.self_and_mean(near, h, target, steps=scale)
    return target


def own_plus_mean(indptr, indices, h, alpha, beta, *, self_rows=None, gamma=None):
    """See model.py; None if torch operations have to be used."""
    near = InEdges(indptr, indices, self_rows)
    code = block_kernels(near, h)
    scales = Scales(*(t if t is None else t.contiguous() for t in (alpha, beta, gamma)))
    fits = (
        all(t is None or (t.dtype, t.device) == (torch.float32, h.device) for t in scales)
        and alpha.shape == beta.shape == (near.S,)
        and (gamma is None or gamma.numel() >= len(h))
        and not learned(beta, gamma)
        and (self_rows is None or not learned(h, alpha))
    )
    return _SelfAndMean.apply(h, scales.alpha, near, scales, code) if code and fits else None


def mean_neighbours(indptr, indices, h):
    """See model.py; None if torch operations have to be used."""
    near = InEdges(indptr, indices)
    code = block_kernels(near, h, own=False)
    if code is None:
        return None
    near = near._replace(self_rows=indptr.new_full((near.S,), -1))
    scales = Scales(
        alpha=h.new_zeros(near.S, dtype=torch.float32), beta=h.new_ones(near.S, dtype=torch.float32)
    )
    return _SelfAndMean.apply(h, None, near, scales, code)


class _SelfAndMean(Fused):
    """The gradient is that of own rows which are the first S, or of destinations without a row of their own."""

    @staticmethod
    def forward(ctx, h, alpha, near, scales, code):
        width = h.shape[1]
        out = h.new_empty(near.S, 2 * width if scales.alpha is None else width)
        code.self_and_mean(near, h, out, scales=scales)
        own = h[: near.S] if ctx.needs_input_grad[1] else None
        learned_h = ctx.needs_input_grad[0]
        save(ctx, code, near, scales, {"h_dst": own}, num_src=len(h), learned_h=learned_h)
        return out

    @staticmethod
    def gradients(code, values, grad):  # [S, 2F] or [S, F] -> [N, F], [S]
        near = from_values(InEdges, values)
        to_alpha = to_h = None
        if values["learned_h"]:
            to_h, _ = code.self_and_mean_grad(
                near,
                grad,
                values["num_src"],
                scales=from_values(Scales, values),
                own=near.self_rows is None,
            )
        if values["h_dst"] is not None:
            to_alpha = (grad * values["h_dst"]).float().sum(1)
        return to_h, to_alpha, None, None, None


def gather_rows(features, ids, out=None, *, scale=None):
    """See model.py. On a GPU a negative id gives a row of zeros; one of V or more aborts the kernel."""
    V, width = features.shape
    if learned(features) or followed():
        return None
    if scale is not None:
        return _gather_codes(features, ids, out, scale)
    n = ids.numel()
    out = features.new_empty(n, width) if out is None else out
    like = out.dtype, out.device, ids.device, out.shape
    fits = (
        like == (features.dtype, features.device, features.device, (n, width))
        and ids.dtype in IDS
        and not features.is_meta
        and all(t.is_contiguous() for t in (features, ids, out))
    )
    if not fits:
        return None
    row = width * features.itemsize
    starts = features.data_ptr() | out.data_ptr()
    size = next(size for size in (16, 4, 2, 1) if not (row | starts) % size)
    words = row // size
    # one program serves all types
    code = load(torch.int32, torch.float32, torch.float32, features.device)
    if code is None or n * words >= 1 << 32:
        return None
    bad = ids.new_zeros(1, dtype=torch.int32) if code.on_cpu else None
    code.run(
        "gather_rows",
        n if code.on_cpu else n * words,
        table=features,
        ids=ids,
        n=n,
        words=words,
        word_bytes=size,
        id_bytes=ids.itemsize,
        V=V,
        ahead=4 + 3072 // (row + 1),  # some fifty cache lines
        bad=bad,
        out=out,
    )
    if code.on_cpu:
        _check_rows(ids, features, bad)
    return out


def _check_rows(ids, features, bad):
    """Raise IndexError if ids are bad."""
    if bad:
        low, high = ids.aminmax()
        raise IndexError(
            f"ids {low} .. {high} are not all rows of features with {len(features)} rows"
        )


def _gather_codes(codes, ids, out, scale):
    """Gather rows of codes and decode them into `out`, in one pass."""
    code = functions([ids], codes, out, steps=scale)
    if code is None or out.shape != (ids.numel(), codes.shape[1]):
        return None
    if code.on_cpu:
        _check_rows(ids, codes, ((ids < 0) | (ids >= len(codes))).any())
    code.run(
        "gather_codes",
        len(out),
        sizes(out, codes, scale),
        table=codes,
        ids=ids,
        n=len(out),
        steps=scale,
        V=len(codes),
        out=out,
    )
    return out


def relu_dropout(h, nodes, seed, drop):
    """Compute dropout(relu(h)) in place, with model.py's mask."""
    code = functions([nodes], h, h) if nodes is None or nodes.shape == h.shape[:1] else None
    return code and _ReluDropout.apply(h, Dropout.of(nodes, seed, drop), code)


class _ReluDropout(Fused):
    @staticmethod
    def forward(ctx, h, active, code):
        kept = code.kept(h, "relu_dropout") if ctx.needs_input_grad[0] else None
        code.relu_dropout(h, active, kept=kept)
        ctx.mark_dirty(h)
        save(ctx, code, {"kept": kept}, scale=active.scale)
        return h

    @staticmethod
    def gradients(code, values, grad):
        out = torch.empty_like(grad)
        code.run("relu_dropout_grad", len(grad), values, sizes(grad), grad=grad, out=out)
        return out, None, None


def norm_relu_dropout(h, norm, nodes, seed, drop, *, residual):
    """Compute dropout(relu(norm(h + residual))) on a GPU for a layer norm, in the dtype of h, with model.py's mask; None if
    torch operations have to be used. residual, nodes: may be None."""
    S, width = h.shape
    weights = norm.weight, norm.bias
    kind = (width,), torch.float32, h.device
    fits = (
        is_gpu(h.device)
        and 0 < width <= WIDEST
        and S < 1 << 27  # threads are counted in 32 bits
        and all(w is not None and (w.shape, w.dtype, w.device) == kind for w in weights)
        and all(t is None or t.shape == h.shape[: t.dim()] for t in (residual, nodes))
        and (residual is None or residual.dtype == h.dtype)
    )
    if not fits:
        return None
    code = functions([nodes], h, h if residual is None else residual, width)
    return code and _NormRelu.apply(
        h, residual, *weights, norm.eps, Dropout.of(nodes, seed, drop), code
    )


class _NormRelu(Fused):
    @staticmethod
    def forward(ctx, h, residual, gamma, beta, eps, active, code):
        S = len(h)
        normed = {
            "x": h,
            "residual": residual,
            "gamma": gamma,
            "moments": gamma.new_empty(S, 2),
            "kept": code.kept(h, "norm_relu"),
        }
        size = sizes(h, h if residual is None else residual, gamma, beta)
        out = torch.empty_like(h)
        code.run("norm_relu", S * WARP, normed, active, size, beta=beta, eps=eps, out=out)
        save(ctx, code, normed, whole=size["whole"], scale=active.scale)
        return out

    @staticmethod
    def gradients(code, normed, grad):
        S, width = grad.shape
        run = -(-S // RUNS) or 1
        runs = -(-S // run)
        sums = normed["gamma"].new_empty(runs, 2 * width)
        out = torch.empty_like(grad)
        code.run(
            "norm_relu_grad",
            runs * WARP,
            normed,
            S=S,
            whole=normed["whole"] & aligned(width, grad),
            out=out,
            grad=grad,
            runs=runs,
            run=run,
            sums=sums,
        )
        to_norm = column_sums(sums, sums.new_ones(runs)).chunk(2)
        return out, None if normed["residual"] is None else out, *to_norm, None, None, None


def dropout(x, nodes, seed, drop):
    """Apply dropout to an x on a GPU that needs no gradient; None on the CPU, where torch is as fast."""
    fits = nodes.shape == x.shape[:1] and is_gpu(x.device) and not x.requires_grad
    code = functions([nodes], x, x) if fits else None
    if code is None:
        return None
    out = torch.empty_like(x)
    code.relu_dropout(x, Dropout.of(nodes, seed, drop), out, relu=0)
    return out


def max_neighbours(indptr, indices, h):
    """See model.py; None if torch operations have to be used."""
    near = InEdges(indptr, indices)
    code = block_kernels(near, h, own=False)
    return code and _MaxNeighbours.apply(h, near, code)


class _MaxNeighbours(Fused):
    @staticmethod
    def forward(ctx, h, near, code):
        out = h.new_empty(near.S, h.shape[1])
        winner = torch.empty_like(out, dtype=torch.int32)
        code.run("max_neighbours", near.S, near, sizes(h), h=h, S=near.S, out=out, winner=winner)
        save(ctx, code, near, {"winner": winner}, N=len(h))
        return out

    @staticmethod
    def gradients(code, values, grad):
        near = from_values(InEdges, values)
        N = values["N"]
        out = grad.new_empty(N, grad.shape[1])
        values |= {**sizes(grad), "grad": grad, "out": out}
        Lists.of(code, near, N).run("max_neighbours_grad", near, **values)
        return out, None, None


def adam_rows(rows, grad, mean, square, weight, **numbers):
    """Do an Adam step for distinct rows [n] of a weight -> whether there is code for it. numbers: first, second, eps and
    rates of the kernel; see run/adam.py."""
    tables = {"mean": mean, "square": square, "weight": weight}
    kind = weight.shape, torch.float32, grad.device
    fits = (
        all(t.is_contiguous() and (t.shape, t.dtype, t.device) == kind for t in tables.values())
        and rows.is_contiguous()
        and (*rows.shape, *weight.shape[1:]) == grad.shape
        and (rows.dtype, rows.device) == (torch.int64, grad.device)
        and grad.dtype == torch.float32
    )
    code = functions([], grad, grad) if fits else None
    if code is None or code.on_cpu and len(rows) and int(rows.max()) >= len(weight):
        return False
    code.run(
        "adam_rows",
        len(rows),
        sizes(grad, *tables.values()),
        numbers,
        tables,
        rows=rows,
        grad=grad,
        n=len(rows),
    )
    return True


def cross_entropy(logits, y):
    """Sum the cross-entropy of a batch on a GPU, where one kernel computes it with its gradient; None if torch has to.

    Args:
        logits: [S, C]. y: int64 [S], below 0 for rows that do not count.
    """
    fits = (
        is_gpu(logits.device)
        and logits.numel()
        and y.is_contiguous()
        and (y.dtype, y.device, y.shape) == (torch.int64, logits.device, logits.shape[:1])
    )
    code = functions([], logits, logits) if fits else None
    return code and _CrossEntropy.apply(logits, y, code)


class _CrossEntropy(Fused):
    @staticmethod
    def forward(ctx, logits, y, code):
        S, C = logits.shape
        losses = logits.new_empty(S, dtype=torch.float32)
        to_logits = torch.empty_like(logits)
        lanes = min(C, LOSS_LANES)
        code.run(
            "cross_entropy",
            S * lanes,
            logits=logits,
            y=y,
            S=S,
            C=C,
            lanes=lanes,
            loss=losses,
            grad=to_logits,
        )
        save(ctx, code, {"to_logits": to_logits})
        return losses.sum()

    @staticmethod
    def gradients(code, values, grad):
        to_logits = values["to_logits"]
        return to_logits * grad.to(to_logits.dtype), None, None


def stack(blocks, x, weights, *, aggregated, scales, drops):
    """Run the layers of a plain GraphSAGE or GCN as one autograd function.

    Args:
        blocks: one per layer. x: [N, F], or with `aggregated` the pair [S, 2F] of the outermost block.
        weights: of each layer the matrix [D, 2F] or [D, F] and the bias [D], float32, one after the other.
        scales: of each layer None, for `self_and_mean`, or alpha, beta and gamma of `own_plus_mean`.
        drops: (seed, drop) of `relu_dropout` after each layer but the last.

    Returns:
        [S, C]; bfloat16 under torch.autocast, else float32.
    """
    device = x.device.type
    mixed = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if mixed else torch.float32
    scales = [Scales(*of) if of else UNSCALED for of in scales]
    rows = x.new_empty(0, 0, dtype=dtype)
    integers = [t for b in blocks for t in (b.indptr, b.indices, b.src_nodes)]
    # the input may have another dtype than the layers' results
    input_code = functions(integers, x, rows)
    code = functions(integers, rows, rows)
    nears = [InEdges(block.indptr, block.indices) for block in blocks]
    fits = (
        input_code
        and code
        and all(w is not None and w.dtype == torch.float32 for w in weights)
        and (mixed or x.dtype == torch.float32)
        and not (aggregated and learned(x))  # the pair has a gradient, not the rows of a block
        and all(
            of.gamma is None or of.gamma.numel() >= len(block.src_nodes)
            for of, block in zip(scales, blocks)
        )
        and all(
            input_code.takes(near, len(block.src_nodes))
            for near, block in [*zip(nears, blocks)][aggregated:]
        )
    )
    if not fits:
        return None
    active = [Dropout.of(b.src_nodes, *drop) for b, drop in zip(blocks[1:], drops, strict=True)]
    layers = list(zip(nears, scales, [None, *active]))
    with torch.autocast(device, enabled=False) if mixed else nullcontext():
        return _Stack.apply(x, layers, aggregated, input_code, code, dtype, *weights)


class _Stack(Fused):
    """layers: (InEdges, Scales, Dropout of the layer's input, after ReLU; None: no ReLU) of each."""

    @staticmethod
    def forward(ctx, x, layers, aggregated, input_code, code, dtype, *weights):
        h = x
        saved = []
        learns = any(ctx.needs_input_grad)
        for i, (near, scales, active) in enumerate(layers):
            kept = code.kept(h, "self_and_mean") if i and learns else None
            weight, bias = (
                w if w.dtype == dtype else w.to(dtype) for w in weights[2 * i : 2 * i + 2]
            )
            if aggregated and not i:
                total = h.to(dtype)
            else:
                # as wide as h asks for: `product` refuses a weight of another width
                width = h.shape[1] * (2 if scales.alpha is None else 1)
                total = h.new_empty(near.S, width, dtype=dtype)
                options = {"active": active, "kept": kept}
                if i and code.on_cpu:  # rows are read several times: a separate pass is faster
                    code.relu_dropout(h, **options)
                    options = {}
                (code if i else input_code).self_and_mean(near, h, total, scales=scales, **options)
            saved += [kept, total, weight, *near]
            h = product(total, weight, bias)
        numbers = {"layers": layers, "num_input": len(x), "to_x": ctx.needs_input_grad[0]}
        save(ctx, code, dict(enumerate(saved)), **numbers)
        return h

    @staticmethod
    def gradients(code, values, grad):  # [S, C]
        *saved, layers, num_input, to_x = values.values()
        nothing = [None] * 5
        grads = []
        rows = grad
        # as long as the longest sum: layers have no more rows than the outermost one
        ones = grad.new_ones(len(saved[1]), dtype=torch.float32) if is_gpu(grad.device) else None
        for i, (_, scales, active) in reversed([*enumerate(layers)]):
            each = len(saved) // len(layers)
            kept, total, weight, *near = saved[each * i : each * i + each]
            grads = [weight_grad(grad, total), column_sums(rows, ones), *grads]
            if not i and not to_x:
                return None, *nothing, *grads
            num_src = len(kept) if i else num_input
            options = {"kept": kept, "scale": active.scale} if i else {}
            grad, rows = code.self_and_mean_grad(
                InEdges(*near), product(grad, weight.t()), num_src, scales=scales, **options
            )
        return grad, *nothing, *grads


# ---- matrix products


def linear(x, weight, bias=None):
    """Return x [S, F] @ weight [D, F].T + bias [D] with autograd: by `product` if it is large and, on a GPU, with sums over
    many rows by `weight_grad` and `bias_grad`."""
    if (
        x.dim() == 2
        and (len(x) >= LONG if is_gpu(x.device) else _for_onednn(x, weight))
        and not torch.is_autocast_enabled(x.device.type)
        and not followed()
    ):
        return _Linear.apply(x, weight, bias)
    return F.linear(x, weight, bias)


def product(x, weight, bias=None):
    """Return x [S, F] @ weight [D, F].T + bias [D], without autograd; large float32 products on CPU use oneDNN.

    Torch would use MKL, which takes up to twice as long on AMD processors. But torch caches what oneDNN compiles for
    each number of rows, and batches differ: a gigabyte in the end. So oneDNN is used only if the variables
    ONEDNN_PRIMITIVE_CACHE_CAPACITY and LRU_CACHE_CAPACITY bound the caches (train.py sets them), and if the product is
    worth compiling: a small one would take ten times as long as by MKL.
    """
    if not _for_onednn(x, weight):
        return F.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight.contiguous(), bias, "none", [], "")


def weight_grad(grad, x):
    """Return grad [n, D].T @ x [n, F]; of many rows in TF32 on a GPU, the sum of the products of SLICES slices."""
    n = len(x)
    long = is_gpu(x.device) and x.dtype == torch.float32 and n >= LONG and not n % SLICES
    if not long or torch.get_float32_matmul_precision() == "highest":
        return torch.mm(grad.t(), x)
    grad, x = (t.view(SLICES, n // SLICES, -1) for t in (grad, x))
    return torch.bmm(grad.transpose(1, 2), x).sum(0)


def column_sums(rows, ones):
    """Return the sums of the columns of rows [n, D]. ones: float32 [n or more], by which float32 rows are multiplied, or
    None: on a GPU this takes a third of the time of sum(0)."""
    if ones is None or rows.dtype != ones.dtype:
        return rows.sum(0)
    return torch.mv(rows.t(), ones[: len(rows)])


def bias_grad(grad):
    """Return the sums of the columns of rows grad [n, D]; of many on a GPU first over runs of them."""
    ours = is_gpu(grad.device) and not learned(grad)
    code = functions([], grad, grad) if ours else None
    if code is None:
        return grad.sum(0)
    runs = code.runs(grad)
    sums = grad.new_empty(runs["runs"], grad.shape[1], dtype=torch.float32)
    code.run("column_sums", runs["runs"], runs, sizes(grad), rows=grad, n=len(grad), sums=sums)
    return column_sums(sums, sums.new_ones(len(sums))).to(grad.dtype)


def _for_onednn(x, weight):
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and x.numel() * weight.shape[0] >= WORTH_COMPILING * torch.get_num_threads()
        and {"ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"} <= os.environ.keys()
        and torch.backends.mkldnn.is_available()
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):  # [S, D]; differentiable
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        to_x = linear(grad, weight.t()) if ctx.needs_input_grad[0] else None
        to_bias = bias_grad(grad) if ctx.needs_input_grad[2] else None
        to_weight = weight_grad(grad, x) if is_gpu(x.device) else (x.t() @ grad).t()
        return to_x, to_weight, to_bias
