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

import ctypes
import functools
import os
from contextlib import nullcontext

import torch
from torch.nn import functional as F

from . import build

IDS = {torch.int32: "int", torch.int64: "i64"}
TYPES = {torch.float32: "float", torch.bfloat16: "bf16"}
# multiplications per thread for which compiling a product pays; the compile time is the same for any number of threads
WORTH_COMPILING = 50_000_000
LOSS_LANES = 16  # threads a row of logits: all read the whole row
# `weight_grad`, measured on an H200: 60 to 80 slices of 152,064 rows, 200 x 256 in TF32, take 99 us; one product 118. Rows of
# static shapes are multiples of 256.
SLICES, SLICED = 64, 1024  # slices, and rows of each at least


def followed():
    """Return whether torch follows operations, and cannot follow kernels: in its tracer, in torch.func."""
    return torch.jit.is_tracing() or torch._C._are_functorch_transforms_active()


def functions(integers, source, target):
    """Return the compiled `Code` for these tensors' dtypes, or None if torch operations have to be used.

    Args:
        integers: tensors of ids, of one dtype; None entries are ignored. source, target: input and output rows.
    """
    if followed():
        return None
    integers = [t for t in integers if t is not None]
    ids = integers[0].dtype if integers else torch.int32
    if ids not in IDS or source.dtype not in TYPES or target.dtype not in TYPES:
        return None
    for t in (*integers, source, target):
        if t.device != source.device or not t.is_contiguous() or t.numel() and not t.data_ptr():
            return None  # the last: meta tensors have no memory
    # kernels count threads in 32 bits, elements of a block and columns in 31
    fit = all(t.dtype == ids and t.numel() < 1 << 31 for t in integers)
    fit = fit and source.dim() == target.dim() == 2 and source.shape[1] < 1 << 31
    if not fit or target.numel() >= 1 << 32:
        return None
    return load(ids, source.dtype, target.dtype, source.device)


def of_block(indptr, indices, source, target, self_rows=None, own=True, nodes=None):
    """Return `functions` for a block; None if it does not fit the source rows. own: destinations have a row there."""
    code = functions([indptr, indices, self_rows, nodes], source, target)
    S = indptr.numel() - 1
    rows = len(source[:S]) if self_rows is None else self_rows.numel()
    fits = code and (rows == S or not own) and code.takes(indptr, indices, len(source), self_rows)
    return code if fits else None


def learned(*tensors):
    """Return whether a tensor needs a gradient or has a forward-mode tangent, for functions that support neither."""
    on, tangent = torch.is_grad_enabled(), torch.autograd.forward_ad.unpack_dual
    of = (t for t in tensors if t is not None)
    return any(on and t.requires_grad or tangent(t).tangent is not None for t in of)


def once_differentiable(backward):
    """Decorate a backward pass to refuse create_graph=True: with torch's decorator of this name, torch.autograd.grad leaves
    the terms of second derivatives that pass through it out, in silence."""

    @functools.wraps(backward)
    def once(ctx, grad):
        if torch.is_grad_enabled():
            instead = "with model.fused = None, torch operations, gat and gine have them"
            raise RuntimeError(f"create_graph=True: kernels have no second derivatives; {instead}")
        return backward(ctx, grad)

    return once


@functools.cache
def load(ids, source, target, device):
    """Compile `Code` for ids, rows and results of these dtypes; None, after one warning, if that fails."""
    types = {"ID": IDS[ids], "IN": TYPES[source], "OUT": TYPES[target]}
    text = build.read_source("layers.cu", **types)
    if is_gpu(device):
        compiled = build.load_cuda("layers", text, device)
    else:
        compiled = build.load_host("layers", text, FLAGS)
    return compiled and Code(compiled)


def is_gpu(device):
    """Return whether tensors on this device use the CUDA kernels."""
    return device.type == "cuda"


def has_kernels(indices):
    """Return whether there are CUDA kernels for blocks of this integer dtype on this GPU."""
    row = torch.float32
    return bool(indices.is_cuda and load(indices.dtype, row, row, indices.device))


# the kernels

# NaN has to stay NaN, also with a compiler whose default is fast math
FLAGS = ["-O3", "-march=native", "-fno-fast-math", "-fno-trapping-math", "-fno-math-errno"]
FLAGS += ["-fPIC", "-shared"]

UNCHANGED = 0, None, 0, 1.0, 0, None, 0  # no activation
UNSCALED = None, None, None
RUN = 16  # at most this many rows of a gradient are summed by one GPU thread for the bias
ENOUGH = 1 << 21  # elements of the gradient per such row: leaves half a million threads


def activation(nodes, seed, drop, relu=1):
    """Return the kernel arguments for ReLU, unless relu is 0, and dropout, keyed by nodes [N], with probability
    drop / 256; seed: int, or the tuple of model.py's `layer_seed` in a CUDA graph."""
    return relu, nodes, drop, 256 / (256 - drop), *_on_device(seed)


class Code:
    """The kernels of layers.cu; compiled: build.Kernels of a GPU, or the library of `load_host`."""

    def __init__(self, compiled):
        self.compiled, self.on_cpu = compiled, isinstance(compiled, ctypes.CDLL)
        self.run = compiled.run  # (kernel, threads, *values)
        self.columns = compiled.columns_of_a_thread() if self.on_cpu else 4

    def takes(self, indptr, indices, N, self_rows=None):
        """Return whether offsets and indices of a block fit N sources; a GPU is not waited for."""
        sizes = indptr.numel() - 1, indices.numel(), N
        return not self.on_cpu or self.compiled.fits_block(indptr, indices, self_rows, *sizes)

    def threads(self, width):
        """Return the number of threads per row."""
        return -(-width // self.columns)

    def runs(self, out):
        """Return (number of runs, rows of each) into which to cut out [n, F], for sums over each run's rows."""
        run = min(max(out.numel() // ENOUGH, 1), RUN)
        return -(-len(out) // run), run

    def kept(self, h):
        """Return what the backward pass needs of h [N, F] after an activation: on a GPU, where rows are activated when
        they are read, memory for one bit per value; on the CPU h itself, activated in place."""
        size = len(h), self.threads(h.shape[1])
        return h if self.on_cpu else h.new_empty(size, dtype=torch.uint8)

    def self_and_mean(self, block, h, self_rows, out, scales=UNSCALED, active=UNCHANGED, kept=None):
        """Compute out [S, 2F] from h [N, F], or out [S, F] with scales: alpha and beta [S], gamma [N] or None. active:
        `activation` of h, on a GPU; kept: see `Code.kept`."""
        (S, width), aligned = (out.shape[0], h.shape[1]), _aligned(h.shape[1], h, out)
        args = *block, h, self_rows, *scales, S, width, aligned, *active, kept
        self.run("self_and_mean", S * self.threads(width), *args, out)

    def self_and_mean_grad(
        self, block, grad, num_src, kept=None, scale=1.0, scales=UNSCALED, own=True, sums=False
    ):
        """Backward of `self_and_mean`: grad [S, 2F], or [S, F] with scales -> gradient [N, F] of h or, with kept, of h
        before its activation. With sums also a tensor with the same column sums: partial sums, float32 [fewer, F],
        or the gradient again."""
        alpha, beta, gamma = scales
        S, width = grad.shape[0], grad.shape[1] if alpha is not None else grad.shape[1] // 2
        lists = Lists.of(self, block, num_src, shares=True, beta=beta)
        out, size = grad.new_empty(num_src, width), (num_src, width, _aligned(width, grad))
        size, (runs, run) = (S if own else 0, *size), self.runs(out) if sums else (num_src, 1)
        parts = grad.new_empty(runs, width, dtype=torch.float32) if run > 1 else None
        args = *lists.of_source, lists.share, grad, alpha, gamma, *size, kept, scale
        self.run("self_and_mean_grad", runs * self.threads(width), *args, runs, run, parts, out)
        return (out, out if parts is None else parts) if sums else out

    def relu_dropout(self, h, active, out=None, kept=None):
        """Apply an `activation` to h [S, D], in place or into `out`; kept: see `Code.kept`."""
        (S, width), out = h.shape, h if out is None else out
        args = h, S, width, _aligned(width, h, out), *active, kept
        self.run("relu_dropout", S * self.threads(width), *args, out)

    def edge_matrix_grad(self, block, numbers, K, width, *args):
        """Compute the gradient [d, K width] of the matrix that multiplies edge features [numbers, d]; see the kernel.

        block: indptr, indices and the destination of each edge.
        """
        by, runs = args[-2], 1024
        to_by, size = by.new_empty(runs, *by.shape), (len(block[2]), numbers, K, width)
        threads = runs * K * self.threads(width)
        self.run("edge_matrix_grad", threads, *block, *size, *args, runs, to_by)
        return to_by.sum(0)


def _aligned(width, *rows):
    """Return 1 if all rows start on a 16-byte boundary, so that kernels may read 16 bytes at once; ignored on CPU."""
    return int(width % 4 == 0 and all(t.data_ptr() % 16 == 0 for t in rows))


def _on_device(seed):
    """Return a kernel's arguments seed, step, layer."""
    return seed if isinstance(seed, tuple) else (seed, None, 0)


def destinations(code, indptr, indices, out=None):
    """Compute the destination of each edge -> int32 [E]; a static block's are at hand once it has `Lists`."""
    if out is None and (lists := getattr(indices, "lists", None)):
        return lists.dst
    if out is None:
        out = torch.empty(indices.numel(), dtype=torch.int32, device=indices.device)
    code.run("destinations", indptr.numel() - 1, indptr, indptr.numel() - 1, out)
    return out


class Lists:
    """The edges of a block by source, each source's in their order.

    A block at a fixed address (`static`) keeps its lists in an attribute of its indices. They follow from the block alone, but
    for shares with beta, so whoever samples into the block also fills its lists (`fill_lists`), not each step on it.

    Attributes:
        of_source: int32 start [N + 1], size [N], and destination [E] of each edge.
        edge, share: int32 [E] and float32 [E] (beta [S] or 1, over the destination's edges), or None.
        dst: int32 [E] the destination of each edge of the block.
    """

    @classmethod
    def of(cls, code, block, num_src, dst=None, *, edges=False, shares=False, beta=None):
        """Return the lists of a block, its own if it is static. dst: its `destinations`, if they are at hand."""
        indices = block[1]
        if not hasattr(indices, "lists"):
            return cls(code, block, num_src, dst, edges=edges, shares=shares, beta=beta)
        if indices.lists is None:
            indices.lists = cls(code, block, num_src, edges=True, shares=True)
        if beta is not None:
            indices.lists.put_in_order(block, beta)
        return indices.lists

    def __init__(self, code, block, num_src, dst=None, *, edges=False, shares=False, beta=None):
        self.code, E = code, block[1].numel()
        self.sizes = torch.empty(num_src + 1, dtype=torch.int32, device=block[1].device)
        self.slot, self.unordered, destination, edge, share = self.sizes.new_empty(5, E)
        self.edge, self.share = edge if edges else None, share if shares else None
        self.of_source = torch.empty_like(self.sizes), self.sizes[1:], destination
        self.dst = dst
        self.fill(block, dst, beta)

    def fill(self, block, dst=None, beta=None):
        """List the edges that the block has by now."""
        (indptr, indices), (start, size, _) = block, self.of_source
        E = indices.numel()
        self.dst = destinations(self.code, *block, self.dst) if dst is None else dst
        self.sizes.zero_()
        if self.code.on_cpu:
            args = indptr, indices, self.dst, E, len(size), start, size
            self.code.compiled.list_by_source(*args, *self._ordered(beta))
            return
        self.code.run("list_sizes", E, indices, E, size, self.slot)
        torch.cumsum(self.sizes, 0, dtype=torch.int32, out=start)
        self.code.run("list_edges", E, indices, E, start, self.slot, self.unordered)
        self.put_in_order(block, beta)

    def put_in_order(self, block, beta):
        """Order each source's edges, and compute their shares."""
        (start, size, _), E = self.of_source, block[1].numel()
        args = *block, self.dst, E, start, size, self.unordered
        self.code.run("list_in_order", E, *args, *self._ordered(beta))

    def _ordered(self, beta):
        return beta, self.of_source[2], self.edge, self.share


def static(block):
    """Let a block of sampler.py at a fixed address, which is sampled into again and again, keep its `Lists`."""
    block.indices.lists = None


def fill_lists(block):
    """Fill the lists of a static block, if a step has asked for them, for the batch that it has by now."""
    if lists := getattr(block.indices, "lists", None):
        lists.fill((block.indptr, block.indices))


# ---- what model.py calls; its functions of the same names explain the arguments


def self_and_mean(indptr, indices, h, self_rows=None, out=None):
    """See model.py; None if torch operations have to be used."""
    target = h.new_empty(indptr.numel() - 1, 2 * h.shape[1]) if out is None else out
    code = of_block(indptr, indices, h, target, self_rows)
    if code is None or target.shape != (indptr.numel() - 1, 2 * h.shape[1]):
        return None
    if learned(h):
        if self_rows is not None or out is not None:
            return None
        return _SelfAndMean.apply(indptr, indices, h, None, None, None, code)
    code.self_and_mean((indptr, indices), h, self_rows, target)
    return target


def own_plus_mean(indptr, indices, h, alpha, beta, self_rows=None, gamma=None):
    """See model.py; None if torch operations have to be used."""
    code = of_block(indptr, indices, h, h[: indptr.numel() - 1], self_rows)
    scales = [t if t is None else t.contiguous() for t in (alpha, beta, gamma)]
    wanted = torch.float32, h.device
    floats = all(t is None or (t.dtype, t.device) == wanted for t in scales)
    floats = floats and alpha.shape == beta.shape == (indptr.numel() - 1,)
    if code is None or not floats or learned(beta, gamma):
        return None
    if gamma is not None and gamma.numel() < len(h) or self_rows is not None and learned(h, alpha):
        return None
    if self_rows is None:
        return _SelfAndMean.apply(indptr, indices, h, *scales, code)
    out = h.new_empty(len(alpha), h.shape[1])
    code.self_and_mean((indptr, indices), h, self_rows, out, scales)
    return out


def mean_neighbours(indptr, indices, h):
    """See model.py; None if torch operations have to be used."""
    S = indptr.numel() - 1
    code = of_block(indptr, indices, h, h[:S], own=False)
    if code is None:
        return None
    no_rows = indptr.new_full((S,), -1)
    zeros, ones = h.new_zeros(S, dtype=torch.float32), h.new_ones(S, dtype=torch.float32)
    return _SelfAndMean.apply(indptr, indices, h, zeros, ones, None, code, no_rows)


class _SelfAndMean(torch.autograd.Function):
    """no_rows: [S] of -1 if destinations have no row of their own, else None."""

    @staticmethod
    def forward(ctx, indptr, indices, h, alpha, beta, gamma, code, no_rows=None):
        S, (num_src, width) = indptr.numel() - 1, h.shape
        out = h.new_empty(S, 2 * width if alpha is None else width)
        code.self_and_mean((indptr, indices), h, no_rows, out, (alpha, beta, gamma))
        ctx.own = no_rows is None
        h_dst = h[:S] if ctx.needs_input_grad[3] else None
        ctx.save_for_backward(indptr, indices, alpha, beta, gamma, h_dst)
        ctx.num_src, ctx.code = num_src, code
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # [S, 2F] or [S, F] -> [N, F]
        *block, alpha, beta, gamma, h_dst = ctx.saved_tensors
        grad, to_alpha, out = grad.contiguous(), None, None
        if ctx.needs_input_grad[2]:
            options = {"scales": (alpha, beta, gamma), "own": ctx.own}
            out = ctx.code.self_and_mean_grad(block, grad, ctx.num_src, **options)
        if h_dst is not None:
            to_alpha = (grad * h_dst).float().sum(1)
        return None, None, out, to_alpha, None, None, None, None


def gather_rows(features, ids, out=None):
    """See model.py. On a GPU a negative id gives a row of zeros; one of V or more aborts the kernel."""
    V, width = features.shape
    if learned(features) or followed():
        return None
    out = features.new_empty(ids.numel(), width) if out is None else out
    like = out.dtype, out.device, out.shape
    fits = like == (features.dtype, features.device, (ids.numel(), width))
    if not (fits and out.is_contiguous() and features.is_contiguous()):
        return None
    if is_gpu(features.device):
        return _gather_words(features, ids, out)
    code = functions([ids], features, out)
    if code is None:
        return None
    n, bad = ids.numel(), ids.new_zeros(1)
    ahead = 4 + 3072 // (width * out.itemsize + 1)  # some fifty cache lines
    code.run("fetch_rows", n, features, ids, n, V, width, ahead, out, bad)
    if bad:
        low, high = ids.aminmax()
        raise IndexError(f"ids {low} .. {high} are not all rows of features with {V} rows")
    return out


def _gather_words(features, ids, out):
    """Gather rows of any dtype, as words of 16, 4, 2 or 1 bytes."""
    row, starts = features.shape[1] * features.itemsize, features.data_ptr() | out.data_ptr()
    size = next(size for size in (16, 4, 2, 1) if not (row | starts) % size)
    fits = ids.dtype in IDS and ids.is_contiguous() and ids.device == features.device
    if not fits or ids.numel() * row // size >= 1 << 32:
        return None
    # one program serves all types
    code = load(torch.int32, torch.float32, torch.float32, features.device)
    if code is None:
        return None
    words, n = row // size, ids.numel()
    sizes = n, words, size, ids.itemsize, len(features)
    code.run("gather_rows", n * words, features, ids, *sizes, out)
    return out


def relu_dropout(h, nodes, seed, drop):
    """Compute dropout(relu(h)) in place, with model.py's mask."""
    code = functions([nodes], h, h) if nodes is None or nodes.shape == h.shape[:1] else None
    return None if code is None else _ReluDropout.apply(h, nodes, seed, drop, code)


class _ReluDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, nodes, seed, drop, code):
        kept = code.kept(h) if ctx.needs_input_grad[0] else None
        ctx.code, ctx.scale = code, 256 / (256 - drop)
        code.relu_dropout(h, activation(nodes, seed, drop), kept=kept)
        ctx.mark_dirty(h)
        ctx.save_for_backward(kept)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (kept,), grad, (S, width) = ctx.saved_tensors, grad.contiguous(), grad.shape
        out = torch.empty_like(grad)
        args = kept, grad, S, width, _aligned(width, grad), ctx.scale, out
        ctx.code.run("relu_dropout_grad", S * ctx.code.threads(width), *args)
        return out, None, None, None, None


def dropout(x, nodes, seed, drop):
    """Apply dropout to an x on a GPU that needs no gradient; None on the CPU, where torch is as fast."""
    fits = nodes.shape == x.shape[:1] and is_gpu(x.device) and not x.requires_grad
    code = functions([nodes], x, x) if fits else None
    if code is None:
        return None
    out = torch.empty_like(x)
    code.relu_dropout(x, activation(nodes, seed, drop, relu=0), out)
    return out


def max_neighbours(indptr, indices, h):
    """See model.py; None if torch operations have to be used."""
    code = of_block(indptr, indices, h, h[: indptr.numel() - 1], own=False)
    return None if code is None else _MaxNeighbours.apply(indptr, indices, h, code)


class _MaxNeighbours(torch.autograd.Function):
    @staticmethod
    def forward(ctx, indptr, indices, h, code):
        S, (num_src, width) = indptr.numel() - 1, h.shape
        out, winner = h.new_empty(S, width), indices.new_empty(S, width, dtype=torch.int32)
        size = S, width, _aligned(width, h)
        code.run("max_neighbours", S * code.threads(width), indptr, indices, h, *size, out, winner)
        ctx.save_for_backward(indptr, indices, winner)
        ctx.num_src, ctx.code = num_src, code
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (*block, winner), grad, code = ctx.saved_tensors, grad.contiguous(), ctx.code
        N, width = ctx.num_src, grad.shape[1]
        lists, out = Lists.of(code, block, N), grad.new_empty(N, width)
        size, threads = (N, width, _aligned(width, grad)), N * code.threads(width)
        code.run("max_neighbours_grad", threads, *lists.of_source, grad, winner, *size, out)
        return None, None, out, None


def adam_rows(rows, grad, mean, square, weight, *numbers):
    """Do an Adam step for distinct rows [n] of a weight -> whether there is code for it; see run/adam.py, layers.cu."""
    tables, kind = (mean, square, weight), (weight.shape, torch.float32, grad.device)
    fit = all(t.is_contiguous() and (t.shape, t.dtype, t.device) == kind for t in tables)
    fit = fit and rows.is_contiguous() and (*rows.shape, *weight.shape[1:]) == grad.shape
    fit = fit and (rows.dtype, rows.device) == (torch.int64, grad.device)
    code = functions([], grad, grad) if fit and grad.dtype == torch.float32 else None
    if code is None or code.on_cpu and len(rows) and int(rows.max()) >= len(weight):
        return False
    (n, width), aligned = grad.shape, _aligned(grad.shape[1], grad, *tables)
    code.run("adam_rows", n * code.threads(width), rows, grad, n, width, aligned, *numbers, *tables)
    return True


def cross_entropy(logits, y):
    """Sum the cross-entropy of a batch on a GPU, where one kernel computes it with its gradient; None if torch has to.

    Args:
        logits: [S, C]. y: int64 [S], below 0 for rows that do not count.
    """
    fits = (
        is_gpu(logits.device)
        and logits.dim() == 2
        and logits.shape[1]
        and y.shape == logits.shape[:1]
    )
    if not fits or y.dtype != torch.int64 or y.device != logits.device or not y.is_contiguous():
        return None
    code = functions([], logits, logits)
    return None if code is None else _CrossEntropy.apply(logits, y, code)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, y, code):
        S, C = logits.shape
        losses, to_logits = logits.new_empty(S, dtype=torch.float32), torch.empty_like(logits)
        lanes = min(C, LOSS_LANES)
        code.run("cross_entropy", S * lanes, logits, y, S, C, lanes, losses, to_logits)
        ctx.save_for_backward(to_logits)
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (to_logits,) = ctx.saved_tensors
        return to_logits * grad.to(to_logits.dtype), None, None


def attend(indptr, indices, source, target, attn, self_rows, drawn, edges=None, by=None):
    """Compute the attention-weighted sum of a GATv2 layer, before heads are averaged.

    Args:
        source: [N, K D] and target: [S, K D], float32 or bfloat16. attn: float32 [K, D].
        self_rows: [S] rows of source that are the destinations'; None: the first S.
        drawn: (nodes, seed, drop) for the dropout of attention weights; see model.py.
        edges: float32 [E + S, d], features of the edges, then of the self-loops.
        by: float32 [d, K D], the matrix that multiplies them.

    Returns:
        [S, K D], of source's type.
    """
    code = of_block(indptr, indices, source, target, self_rows, nodes=drawn[0])
    fits = (indices.numel() + len(target)) * len(attn) < 1 << 32
    fits = fits and source.shape[1] == target.shape[1] == attn.numel()
    rows = [t.numel() for t in (indptr[1:], drawn[0]) if t is not None]
    fits = fits and {*rows} == {len(target)}
    if code is None or source.dtype != target.dtype or attn.dtype != torch.float32 or not fits:
        return None
    if self_rows is not None and learned(source, target, attn, by):
        return None
    if edges is None:
        edges, by = attn.new_empty(0, 0), attn.new_empty(0, attn.numel())
    if not _fits(edges, by, indices.numel() + len(target) if len(by) else 0, target, attn):
        return None
    args = source, target, *(t.contiguous() for t in (attn, edges, by))
    return _Attend.apply(indptr, indices, *args, self_rows, drawn, code)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, indptr, indices, source, target, attn, edges, by, self_rows, drawn, code):
        block, rows = (indptr, indices), (source, target, attn)
        S, (K, D) = len(target), attn.shape
        nodes, seed, drop = drawn
        E = indices.numel()
        scale = 256 / (256 - drop)
        aligned = _aligned(D, *rows, by)
        weights, out = attn.new_empty(E + S, K), torch.empty_like(target)
        dropped, dst = torch.empty_like(weights) if drop else None, destinations(code, *block)
        args = *block, self_rows, dst, S, E, K, D, aligned, *rows, edges, len(by), by
        slopes = None  # of leaky ReLU, a bit each, for the backward pass
        if any(ctx.needs_input_grad):
            words = code.columns * -(-D // (32 * code.columns))
            slopes = dst.new_empty(E + S, K, words)
        code.run("attention_scores", (E + S) * K, *args, weights, slopes)
        size, random = (S, K), (*_on_device(seed), drop, scale)
        code.run("attention_softmax", S * K, *block, nodes, *size, *random, weights, dropped)
        size, used = (S, K, D, aligned), weights if dropped is None else dropped
        threads = S * K * code.threads(D)
        code.run("attention_sum", threads, *block, self_rows, *size, used, source, out)
        ctx.scale, ctx.code = scale, code
        ctx.save_for_backward(indptr, indices, dst, *rows, edges, by, weights, dropped, slopes)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # [S, K D]
        *block, dst, source, target, attn, edges, by, weights, dropped, slopes = ctx.saved_tensors
        rows = source, target, attn
        grad, code = grad.contiguous(), ctx.code
        (S, N), E, (K, D) = (len(target), len(source)), len(dst), attn.shape
        aligned, threads = _aligned(D, *rows, by, grad), K * code.threads(D)
        to_scores = torch.empty_like(weights)
        to_by = None
        to_source, to_target = torch.empty_like(source), torch.empty_like(target)
        of_target, of_source = code.runs(target), code.runs(source)
        to_attn = attn.new_empty(of_target[0] + of_source[0], K * D)
        args = *block, dst, S, E, K, D, aligned, source, grad
        code.run("attention_weight_grad", (E + S) * K, *args, to_scores)
        kept = weights, dropped, ctx.scale
        code.run("attention_softmax_grad", S * K, *block, S, K, *kept, to_scores)
        args = *block, S, K, D, aligned, slopes, target, attn, to_scores, *of_target, to_target
        code.run("attention_target_grad", of_target[0] * threads, *args, to_attn)
        lists = Lists.of(code, block, N, dst, edges=True)
        args = block[0], *lists.of_source, lists.edge, S, N, K, D, aligned, slopes, source, attn
        args = *args, weights if dropped is None else dropped, to_scores, grad, *of_source
        threads *= of_source[0]
        code.run("attention_source_grad", threads, *args, to_source, to_attn[of_target[0] :])
        to_attn = to_attn.sum(0)
        if len(by):
            args = E + S, K, D, aligned, None, None, slopes, edges, len(by), by, to_scores
            to_by = code.edge_matrix_grad((*block, dst), *args)
            to_attn, to_by = to_attn + (to_by * by).sum(0), to_by * attn.flatten()
        return None, None, to_source, to_target, to_attn.view(K, D), None, to_by, None, None, None


def _fits(edges, by, count, *rows):
    """Return whether kernels take these edge features and the matrix behind them; if not, torch says what is wrong."""
    fits = edges.shape == (count, len(by)) and by.shape[1] == rows[0].shape[1]
    fits = fits and all(t.device == edges.device == by.device for t in rows)
    return fits and edges.dtype == by.dtype == torch.float32 and not learned(edges)


def edge_sums(indptr, indices, h, edges, by):
    """Sum relu(h + edges by) over each destination's edges, for GINE.

    Args:
        h: [N, F]. edges: float32 [E, d]. by: float32 [d, F].

    Returns:
        [S, F].
    """
    code = of_block(indptr, indices, h, h[: indptr.numel() - 1], own=False)
    if code is None or not _fits(edges, by, indices.numel(), h):
        return None
    return _EdgeSums.apply(indptr, indices, h, edges.contiguous(), by.contiguous(), code)


class _EdgeSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx, indptr, indices, h, edges, by, code):
        S, width = indptr.numel() - 1, h.shape[1]
        out, size = h.new_empty(S, width), (S, width, _aligned(width, h, by))
        args = indptr, indices, h, edges, len(by), by, *size
        code.run("edge_sums", S * code.threads(width), *args, out)
        ctx.save_for_backward(indptr, indices, h, edges, by)
        ctx.code = code
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # [S, F]
        indptr, indices, h, edges, by = ctx.saved_tensors
        grad, code, (N, width) = grad.contiguous(), ctx.code, h.shape
        aligned, extra = _aligned(width, h, by, grad), (edges, len(by), by)
        block = indptr, indices, destinations(code, indptr, indices)
        args = len(edges), 1, width, aligned, h, grad, None, *extra, None
        to_by = code.edge_matrix_grad(block, *args)
        lists, out = Lists.of(code, block[:2], N, block[2], edges=True), torch.empty_like(h)
        args = *lists.of_source, lists.edge, h, *extra, grad, N, width, aligned
        code.run("edge_sums_grad", N * code.threads(width), *args, out)
        return None, None, out, None, to_by, None


def stack(blocks, x, aggregated, weights, scales, drops):
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
    floats = all(w is not None and w.dtype == torch.float32 for w in weights)
    if not floats or not (mixed or x.dtype == torch.float32):
        return None
    if aggregated and learned(x):  # the pair has a gradient, not the rows of a block
        return None
    if any(of and of[2].numel() < len(b.src_nodes) for of, b in zip(scales, blocks)):
        return None
    rows = x.new_empty(0, 0, dtype=dtype)
    integers = [t for b in blocks for t in (b.indptr, b.indices, b.src_nodes)]
    # the input may have another dtype than the layers' results
    codes = functions(integers, x, rows), functions(integers, rows, rows)
    fit = (codes[0].takes(b.indptr, b.indices, len(b.src_nodes)) for b in blocks[aggregated:])
    if None in codes or not all(fit):
        return None
    scales = [of or UNSCALED for of in scales]
    with torch.autocast(device, enabled=False) if mixed else nullcontext():
        return _Stack.apply(x, blocks, aggregated, scales, drops, codes, dtype, *weights)


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, blocks, aggregated, scales, drops, codes, dtype, *weights):
        of_input, code = codes
        h, saved = x, []
        learns = any(ctx.needs_input_grad)
        for i, block in enumerate(blocks):
            kept = code.kept(h) if i and learns else None
            weight, bias = (
                w if w.dtype == dtype else w.to(dtype) for w in weights[2 * i : 2 * i + 2]
            )
            if aggregated and not i:
                total = h.to(dtype)
            else:
                # as wide as h asks for: `product` refuses a weight of another width
                width = h.shape[1] * (2 if scales[i][0] is None else 1)
                total = h.new_empty(len(block.indptr) - 1, width, dtype=dtype)
                active = activation(block.src_nodes, *drops[i - 1]) if i else UNCHANGED
                bits, lists = {"active": active, "kept": kept}, (block.indptr, block.indices)
                if i and code.on_cpu:  # rows are read several times: a separate pass is faster
                    code.relu_dropout(h, **bits)
                    bits = {}
                of = code if i else of_input
                of.self_and_mean(lists, h, None, total, scales[i], **bits)
            saved += [kept, total, weight, block.indptr, block.indices]
            h = product(total, weight, bias)
        ctx.scales, ctx.drops, ctx.code = scales, drops, code
        ctx.num_input = len(x)
        ctx.save_for_backward(*saved)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # [S, C]
        saved, grads = ctx.saved_tensors, []
        rows = grad = grad.contiguous()
        # as long as the longest sum: layers have no more rows than the outermost one
        ones = grad.new_ones(len(saved[1]), dtype=torch.float32) if is_gpu(grad.device) else None
        for i in reversed(range(len(ctx.scales))):
            kept, total, weight, *block = saved[5 * i : 5 * i + 5]
            grads = [weight_grad(grad, total), column_sums(rows, ones), *grads]
            if i or ctx.needs_input_grad[0]:
                num_src = len(kept) if i else ctx.num_input
                args = block, product(grad, weight.t()), num_src
            if i:
                active = {"kept": kept, "scale": 256 / (256 - ctx.drops[i - 1][1]), "sums": True}
                grad, rows = ctx.code.self_and_mean_grad(*args, scales=ctx.scales[i], **active)
        learned = ctx.needs_input_grad[0]
        to_x = ctx.code.self_and_mean_grad(*args, scales=ctx.scales[0]) if learned else None
        return to_x, *[None] * 6, *grads


# ---- matrix products


def linear(x, weight, bias=None):
    """Return x [S, F] @ weight [D, F].T + bias [D], computed by `product` if it is large, with autograd."""
    if _for_onednn(x, weight) and not torch.is_autocast_enabled("cpu") and not followed():
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
    long = is_gpu(x.device) and x.dtype == torch.float32 and n >= SLICES * SLICED and not n % SLICES
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


def _for_onednn(x, weight):
    bounded = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"} <= os.environ.keys()
    large = x.numel() * weight.shape[0] >= WORTH_COMPILING * torch.get_num_threads()
    usable = bounded and x.device.type == "cpu" and x.dtype == torch.float32
    return large and usable and torch.backends.mkldnn.is_available()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # [S, D]
        (x, weight), grad = ctx.saved_tensors, grad.contiguous()
        to_x = product(grad, weight.t()) if ctx.needs_input_grad[0] else None
        to_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        return to_x, (x.t() @ grad).t(), to_bias
