"""GraphSAGE over sampled blocks, exact layer-wise inference over the whole graph, a regressor for many small graphs.

This file stands alone: copy it into your own code. A block is anything with the fields of `sampler.Block`.

    model = SAGE(in_dim, hidden, num_classes, num_layers=3)
    logits = model(blocks, x)                       # x: features of blocks[0].src_nodes -> one row for each seed
    logits = inference(model, indptr, indices, x)   # all V nodes, all their neighbours
    targets = Regressor(...)(graphs)                # one row for each graph of a block-diagonal batch

Letters: V nodes of the graph; S destinations, N sources, E edges of a block; F, D feature widths; C classes. G graphs
of a batch have N nodes and E edges in all; W is the width inside the regressor, T the number of targets.

On CPU three steps are C code, compiled at first use and called through ctypes: a layer's input (own row and mean of
the neighbours in one pass), its gradient, and ReLU with dropout. Without a compiler, on CUDA, or after
`use_native(False)`, torch operations do the same.
"""

import atexit
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def self_and_mean(indptr, indices, h, self_rows=None, out=None):
    """What a SAGE layer multiplies: for every destination its own row beside the mean of its neighbours' rows.

    Args:
        indptr: [S+1], indices: [E] rows of h, of one integer dtype.
        h: float32 or bfloat16 [N, F].
        self_rows: [S] which rows of h are the destinations'; the first S when None. With global ids in indices and
            self_rows, h is the feature table itself: the outermost hop then needs no gather. No gradient flows then.
        out: [S, 2F] to write into (float32 or bfloat16), where no gradient is needed.

    Returns:
        [S, 2F]; the mean is zero for a destination without edges.
    """
    if self_rows is None and out is None and h.requires_grad and torch.is_grad_enabled():
        return _SelfAndMean.apply(indptr, indices, h)
    return _self_and_mean(indptr, indices, h, self_rows, out)


def _self_and_mean(indptr, indices, h, self_rows, out):
    S = indptr.numel() - 1
    out = h.new_empty(S, 2 * h.shape[1]) if out is None else out
    if library := _library(indices, h, out):
        own = None if self_rows is None else self_rows.data_ptr()
        library.self_and_mean(indptr.data_ptr(), indices.data_ptr(), h.data_ptr(), own, S, h.shape[1], out.data_ptr())
        return out
    own, mean = out.chunk(2, 1)
    own.copy_(h[:S] if self_rows is None else h.index_select(0, self_rows))
    mean.copy_(mean_neighbours(indptr, indices, h))
    return out


class _SelfAndMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, indptr, indices, h):
        ctx.save_for_backward(indptr, indices)
        ctx.num_src = h.shape[0]
        return _self_and_mean(indptr, indices, h, None, None)

    @staticmethod
    def backward(ctx, grad):  # [S, 2F] -> [N, F]
        (indptr, indices), S, width = ctx.saved_tensors, grad.shape[0], grad.shape[1] // 2
        grad, dtype = grad.contiguous(), torch.promote_types(grad.dtype, torch.float32)
        total = torch.empty(ctx.num_src, width, dtype=dtype, device=grad.device)
        if library := _library(indices, grad, total):
            library.scatter_self_and_mean(
                indptr.data_ptr(), indices.data_ptr(), grad.data_ptr(), S, ctx.num_src, width, total.data_ptr()
            )
        else:
            degree = indptr.diff()
            dst = torch.repeat_interleave(torch.arange(S, device=grad.device), degree)
            total.zero_()[:S] = grad[:, :width]
            total.index_add_(0, indices.long(), (grad[:, width:].to(dtype) / degree.clamp(min=1).unsqueeze(1))[dst])
        return None, None, total.to(grad.dtype)


def mean_neighbours(indptr, indices, h):
    """Mean of the rows of h [N, D] over every destination's edges -> [S, D]; zero for one without edges.

    One fused gather and segment mean of torch: no [E, D] intermediate.
    """
    return F.embedding_bag(indices, h, indptr, mode="mean", include_last_offset=True)


def gather_rows(features, ids, out=None):
    """Rows ids [n] of features [V, F] -> [n, F], `out` where that is given: index_select that fetches rows ahead of their turn."""
    library = _library(ids, features, features)
    if library is None or not (out is None or out.is_contiguous()):
        return torch.index_select(features, 0, ids, out=out)
    out = features.new_empty(ids.numel(), features.shape[1]) if out is None else out
    V, width = features.shape
    if library.gather_rows(features.data_ptr(), ids.data_ptr(), ids.numel(), V, width, out.data_ptr()):
        raise IndexError(f"ids {int(ids.min())} .. {int(ids.max())} are not all rows of features with {V} rows")
    return out


def linear(x, weight, bias=None):
    """F.linear; in float32 on CPU by oneDNN, where torch asks MKL, which is up to twice as slow on AMD's processors.

    Args:
        x: [S, F]. weight: [D, F]. bias: [D].
    """
    usable = x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    if usable and _native and x.numel() and torch.backends.mkldnn.is_available():
        return _Linear.apply(x, weight, bias)
    return F.linear(x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    @staticmethod
    def backward(ctx, grad):  # [S, D]
        (x, weight), grad = ctx.saved_tensors, grad.contiguous()
        to_x = to_bias = None
        if ctx.needs_input_grad[0]:
            to_x = torch.ops.mkldnn._linear_pointwise(grad, weight.t().contiguous(), None, "none", [], "")
        if ctx.needs_input_grad[2]:
            to_bias = grad.sum(0)
        return to_x, grad.t() @ x, to_bias


def relu_dropout(h, p, training=True, nodes=None):
    """dropout(relu(h)), in place where C code does it.

    What is dropped is a function of torch's CPU generator, the node and the column: so batches that are cut among
    processes, or in time, drop what the whole batch would. One random byte an element: p is rounded to 1/256.

    Args:
        h: [S, D]. p: probability below 1.
        nodes: int [S] distinct ids of the rows; their positions when None.
    """
    drop = min(round(256 * p), 255) if training else 0
    seed = int(torch.empty((), dtype=torch.int64).random_()) if drop else 0
    if library := _library(nodes, h, h):
        return _ReluDropout.apply(h, nodes, seed, drop, library)
    if not drop:
        return F.relu(h)
    kept = _random_bytes(torch.arange(len(h), device=h.device) if nodes is None else nodes, h.shape[1], seed) >= drop
    return F.relu(h) * (kept * (256 / (256 - drop))).to(h.dtype)


def _random_bytes(nodes, D, seed):
    """The bytes of relu_dropout's C code, from torch operations -> uint8 [S, D]."""
    row = _finalise((nodes.long() ^ seed) + _GOLDEN).unsqueeze(1)
    return _finalise(row + torch.arange(-(-D // 8), device=nodes.device) * _GOLDEN).view(torch.uint8)[:, :D]


_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # of splitmix64 (Steele, Lea, Flood, OOPSLA 2014), as int64


def _finalise(z):  # splitmix64 on int64 [...]: products wrap exactly, a logical shift is a shift and a mask
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        z = (z ^ (z >> shift & (1 << (64 - shift)) - 1)) * (factor - (factor >> 63 << 64))
    return z


class _ReluDropout(torch.autograd.Function):
    """The result says itself what was kept: what is not zero. So the backward pass needs no mask."""

    @staticmethod
    def forward(ctx, h, nodes, seed, drop, library):
        ctx.library, ctx.scale = library, 256 / (256 - drop)
        ids = None if nodes is None else nodes.data_ptr()
        library.relu_dropout(h.data_ptr(), ids, *h.shape, seed, drop, ctx.scale)
        ctx.mark_dirty(h)
        ctx.save_for_backward(h)
        return h

    @staticmethod
    def backward(ctx, grad):
        (h,), grad = ctx.saved_tensors, grad.contiguous()
        out = torch.empty_like(grad)
        ctx.library.relu_dropout_backward(h.data_ptr(), grad.data_ptr(), h.numel(), ctx.scale, out.data_ptr())
        return out, None, None, None, None


class SAGEConv(nn.Module):
    """GraphSAGE layer, mean aggregator (Hamilton, Ying, Leskovec, arXiv 1706.02216): W_self h_v + W_neigh mean(h_u)."""

    def __init__(self, in_dim, out_dim):
        super().__init__()
        self.self_linear = nn.Linear(in_dim, out_dim)
        self.neigh_linear = nn.Linear(in_dim, out_dim, bias=False)
        self.project_first = in_dim > out_dim  # the mean commutes with W_neigh: inference aggregates the narrower side

    def forward(self, block, h):
        """h [N, F] of the block's sources -> [S, D] of its destinations."""
        return self.apply_linear(self_and_mean(block.indptr, block.indices, h))

    def apply_linear(self, pair):
        """pair [S, 2F] of own row and mean -> [S, D]: both products as one."""
        weight = torch.cat([self.self_linear.weight, self.neigh_linear.weight], 1)
        return linear(pair, weight, self.self_linear.bias)

    def message(self, h):
        """What neighbours send in inference: [V, F] -> [V, D] when projecting first, else h itself."""
        return self.neigh_linear(h) if self.project_first else h

    def combine(self, indptr, indices, message, h_dst):
        """Aggregate messages [V, .] over the edges and join them with the destinations' own h_dst [S, F]."""
        mean = mean_neighbours(indptr, indices, message)
        return self.self_linear(h_dst) + (mean if self.project_first else self.neigh_linear(mean))


class SAGE(nn.Module):
    """GraphSAGE: num_layers convolutions with ReLU and dropout between them.

    Args:
        in_dim: F. hidden: width of the inner layers. out_dim: C.
        num_layers: one for each block. dropout: probability, applied after each inner layer.
        recompute: keep only each layer's input for the backward pass and compute the rest again (Chen et al., arXiv
            1604.06174): less memory, more time.
    """

    def __init__(self, in_dim, hidden, out_dim, *, num_layers=3, dropout=0.5, recompute=False):
        super().__init__()
        widths = [in_dim] + [hidden] * (num_layers - 1) + [out_dim]
        self.layers = nn.ModuleList(SAGEConv(a, b) for a, b in zip(widths, widths[1:]))
        self.dropout, self.recompute = dropout, recompute

    def forward(self, blocks, x, *, aggregated=False):
        """Logits [S, C] of the last block's destinations.

        Args:
            blocks: one for each layer, outermost hop first.
            x: [N, F] features of blocks[0].src_nodes; or, with `aggregated`, [S, 2F]: what `self_and_mean` gives for
                blocks[0], made where the features are.
        """
        for layer, block in zip(self.layers, blocks, strict=True):
            if self.recompute and self.training:
                x = checkpoint(self.step, layer, block, x, aggregated, use_reentrant=False)
            else:
                x = self.step(layer, block, x, aggregated)
            aggregated = False
        return x

    def step(self, layer, block, x, aggregated=False):
        """One layer and what stands behind it."""
        h = layer.apply_linear(x) if aggregated else layer(block, x)
        return self.activate(layer, h, block.src_nodes[: len(h)])

    def activate(self, layer, h, nodes=None):
        """What stands between two layers, h [S, D] of these nodes; nothing after the last."""
        return h if layer is self.layers[-1] else relu_dropout(h, self.dropout, self.training, nodes)


@torch.no_grad()
def inference(model, indptr, indices, x, *, chunk=65536):
    """Exact predictions of all nodes from all their neighbours, layer by layer.

    Args:
        model: SAGE. indptr: int64 [V+1], indices: [M]: the graph. x: float [V, F], on the model's device or moved there.
        chunk: destinations handled at a time; bounds the memory beside two [V, width] tables.

    Returns:
        Logits [V, C] on the model's device.
    """
    training, parameter, num_nodes = model.training, next(model.parameters()), indptr.numel() - 1
    model.eval()
    device = parameter.device
    h = x.to(device, parameter.dtype)
    bounds = list(range(0, num_nodes, chunk)) + [num_nodes]
    for layer in model.layers:
        message = torch.cat([layer.message(h[a:b]) for a, b in zip(bounds, bounds[1:])]) if layer.project_first else h
        out = h.new_empty(num_nodes, layer.self_linear.out_features, dtype=parameter.dtype)
        for a, b in zip(bounds, bounds[1:]):
            first, last = int(indptr[a]), int(indptr[b])
            edges = indices[first:last].to(device)
            offsets = (indptr[a : b + 1] - first).to(device, edges.dtype)
            out[a:b] = model.activate(layer, layer.combine(offsets, edges, message, h[a:b]))
        h = out
    model.train(training)
    return h


# ---------------------------------------------------------------------------------------------------------------------
# Native code for CPU. It runs on torch's own OpenMP threads: threads of another kind would fight with them for cores.

_C = r"""
#include <stdint.h>
#include <string.h>
#include <omp.h>
typedef long long i64;
typedef unsigned long long u64;
#define COLUMNS 1024  // of a row handled at a time, in registers and first-level cache

typedef struct { uint16_t bits; } bf16;
static inline float up_float(float x) { return x; }
static inline float up_bf16(bf16 x) { uint32_t i = (uint32_t)x.bits << 16; float f; memcpy(&f, &i, 4); return f; }
static inline float down_float(float f) { return f; }
static inline bf16 down_bf16(float f) {  // to nearest, ties to even
  uint32_t i; memcpy(&i, &f, 4);
  return (bf16){(uint16_t)((i + 0x7fff + (i >> 16 & 1)) >> 16)};
}
#define JOIN2(a, b) a##_##b
#define JOIN(a, b) JOIN2(a, b)
#define UP JOIN(up, IN)
#define DOWN JOIN(down, OUT)

void self_and_mean(const ID *indptr, const ID *indices, const IN *h, const ID *self_rows, i64 S, i64 F, OUT *out) {
  #pragma omp parallel for schedule(dynamic, 256)
  for (i64 s = 0; s < S; s++) {
    const IN *own = h + (self_rows ? (i64)self_rows[s] : s) * F;
    i64 first = indptr[s], last = indptr[s + 1], soon = s + 2 < S ? s + 2 : s;
    float scale = last > first ? 1.0f / (float)(last - first) : 0.0f, sum[COLUMNS];
    for (i64 e = indptr[soon] - 1; e < indptr[soon + 1]; e++) {  // on its way to the cache while this one is summed
      const IN *row = h + (e >= indptr[soon] ? (i64)indices[e] : self_rows ? (i64)self_rows[soon] : soon) * F;
      for (i64 c = 0; c < F && c < COLUMNS; c += 64 / sizeof(IN)) __builtin_prefetch(row + c);
    }
    for (i64 at = 0; at < F; at += COLUMNS) {
      i64 n = F - at < COLUMNS ? F - at : COLUMNS;
      memset(sum, 0, sizeof(float) * n);
      for (i64 e = first; e < last; e++) {
        const IN *row = h + (i64)indices[e] * F + at;
        for (i64 c = 0; c < n; c++) sum[c] += UP(row[c]);
      }
      for (i64 c = 0; c < n; c++) out[2 * F * s + at + c] = DOWN(UP(own[at + c]));
      for (i64 c = 0; c < n; c++) out[2 * F * s + F + at + c] = DOWN(sum[c] * scale);
    }
  }
}

i64 gather_rows(const IN *h, const ID *ids, i64 n, i64 V, i64 F, IN *out) {  // -> how many ids are out of range
  const i64 row = F * sizeof(IN), ahead = row < 2048 ? 16 : 4;
  i64 bad = 0;
  #pragma omp parallel for schedule(static) reduction(+ : bad)
  for (i64 a = 0; a < n; a += 256) {
    for (i64 i = a; i < n && i < a + 256; i++) {
      const char *soon = (const char *)(h + (i64)ids[i + ahead < n ? i + ahead : i] * F);
      for (i64 c = 0; c < row; c += 64) __builtin_prefetch(soon + c);
      __builtin_prefetch(soon + row - 1);
      if ((u64)(i64)ids[i] < (u64)V) memcpy(out + i * F, h + (i64)ids[i] * F, row);
      else bad++;
    }
  }
  return bad;
}

// grad [S, 2F] -> total [N, F]. Every thread adds up columns of its own, so that no two write to one place.
void scatter_self_and_mean(const ID *indptr, const ID *indices, const IN *grad, i64 S, i64 N, i64 F, float *total) {
  #pragma omp parallel
  {
    i64 threads = omp_get_num_threads(), t = omp_get_thread_num(), a = F * t / threads, b = F * (t + 1) / threads;
    for (i64 s = 0; s < S; s++) for (i64 c = a; c < b; c++) total[F * s + c] = UP(grad[2 * F * s + c]);
    for (i64 s = S; s < N; s++) memset(total + F * s + a, 0, sizeof(float) * (b - a));
    for (i64 s = 0; s < S; s++) {
      float scale = 1.0f / (float)(indptr[s + 1] - indptr[s]);
      for (i64 e = indptr[s]; e < indptr[s + 1]; e++) {
        float *row = total + F * (i64)indices[e];
        for (i64 c = a; c < b; c++) row[c] += UP(grad[2 * F * s + F + c]) * scale;
      }
    }
  }
}

// Eight columns of a row share one 64-bit draw of splitmix64, a byte each: dropped when below `drop`.
static inline u64 finalise(u64 z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}
void relu_dropout(IN *h, const ID *nodes, i64 S, i64 D, u64 seed, int drop, float scale) {
  const u64 golden = 0x9e3779b97f4a7c15ULL;
  #pragma omp parallel for schedule(static)
  for (i64 s = 0; s < S; s++) {
    IN *row = h + D * s;
    if (!drop) {
      for (i64 c = 0; c < D; c++) row[c] = UP(row[c]) > 0 ? row[c] : JOIN(down, IN)(0.0f);
      continue;
    }
    u64 key = finalise((seed ^ (u64)(nodes ? (i64)nodes[s] : s)) + golden);
    for (i64 c = 0; c < D; c += 8) {
      u64 z = finalise(key + (u64)c / 8 * golden);
      unsigned char bytes[8];
      for (int b = 0; b < 8; b++) bytes[b] = (unsigned char)(z >> 8 * b);
      for (i64 b = 0, m = D - c < 8 ? D - c : 8; b < m; b++) {
        float x = UP(row[c + b]);
        row[c + b] = JOIN(down, IN)(bytes[b] >= drop && x > 0 ? x * scale : 0.0f);
      }
    }
  }
}
void relu_dropout_backward(const IN *h, const IN *grad, i64 n, float scale, OUT *out) {
  #pragma omp parallel for schedule(static)
  for (i64 i = 0; i < n; i++) out[i] = DOWN(UP(h[i]) > 0 ? UP(grad[i]) * scale : 0.0f);
}
"""

_TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.int32: "int32_t", torch.int64: "int64_t"}
_native = True


def use_native(on):
    """Switch the C code on or off for this process, say to measure what it is worth."""
    global _native
    _native = on


def _library(ids, source, target):
    """The C code for these tensors' types, or None where torch operations have to do."""
    tensors = [t for t in (ids, source, target) if t is not None]
    if not _native or not all(t.device.type == "cpu" and t.dtype in _TYPES and t.is_contiguous() for t in tensors):
        return None
    return _load(_TYPES[torch.int32 if ids is None else ids.dtype], _TYPES[source.dtype], _TYPES[target.dtype])


@functools.lru_cache(maxsize=None)
def _load(ids, source, target):
    flags = ["-O3", "-march=native", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared"]
    flags += [f"-DID={ids}", f"-DIN={source}", f"-DOUT={target}"]
    try:
        library = ctypes.CDLL(str(_compile(_C, os.environ.get("CC", "cc"), flags)))
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        warnings.warn(
            "the native layers could not be compiled, so slower torch operations are used; install a C compiler "
            f"(apt install gcc) or name one in the variable CC. Reason: {reason[0] if reason else error!r}",
            stacklevel=4,
        )
        return None
    pointer, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    library.self_and_mean.argtypes = [pointer] * 4 + [number] * 2 + [pointer]
    library.scatter_self_and_mean.argtypes = [pointer] * 3 + [number] * 3 + [pointer]
    library.relu_dropout.argtypes = [pointer] * 2 + [number] * 2 + [ctypes.c_uint64, ctypes.c_int, real]
    library.relu_dropout_backward.argtypes = [pointer, pointer, number, real, pointer]
    library.gather_rows.argtypes, library.gather_rows.restype = [pointer] * 2 + [number] * 3 + [pointer], number
    for name in ("self_and_mean", "scatter_self_and_mean", "relu_dropout", "relu_dropout_backward"):
        getattr(library, name).restype = None
    return library


def _compile(source, compiler, flags):
    """Compile C for this processor, once for each source, compiler and flags -> its path in a per-user cache."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    cpu = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else platform.processor()
    cpu = next((line for line in cpu.splitlines() if line.startswith(("flags", "Features"))), cpu)
    name = hashlib.sha256("\0".join([source, version, cpu, *flags, sys.platform]).encode()).hexdigest()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ringblock"
    target = folder / f"model-{name[:24]}.so"
    if target.exists():
        return target
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(folder)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="ringblock-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        target = folder / target.name
    with tempfile.TemporaryDirectory(dir=folder) as scratch:  # compiled aside, then renamed: complete or not there
        code, library = Path(scratch, "model.c"), Path(scratch, "model.so")
        code.write_text(source)
        subprocess.run([compiler, *flags, code, "-o", library, "-lm"], capture_output=True, text=True, check=True)
        os.replace(library, target)
    return target


# ---------------------------------------------------------------------------------------------------------------------
# Many small graphs: a number (or several) for each graph of a block-diagonal batch, as `store.GraphBatch` is one.


class EdgeGatedConv(nn.Module):
    """Edge-gated graph convolution with residuals (Bresson, Laurent, arXiv 1711.07553), as ALIGNN uses it.

    An edge's gate is made of its own features and those of its ends; a node adds up its neighbours' messages, each
    channel weighed by the gates. LayerNorm stands for BatchNorm: a graph's output does not depend on its batch.
    """

    def __init__(self, width, last=False):
        super().__init__()
        self.nodes, self.edges = nn.Linear(width, 4 * width), nn.Linear(width, width)
        self.node_norm, self.edge_norm = nn.LayerNorm(width), None if last else nn.LayerNorm(width)

    def forward(self, src, dst, h, e):
        """h [N, W], e [E, W] of the edges src [E] -> dst [E] -> both after the layer; the last one needs no e."""
        own, message, gate_src, gate_dst = self.nodes(h).chunk(4, 1)
        gate = self.edges(e) + gate_src.index_select(0, src) + gate_dst.index_select(0, dst)
        weight = gate.sigmoid()
        both = torch.cat([weight * message.index_select(0, src), weight], 1)  # [E, 2W]
        total, weights = both.new_zeros(h.shape[0], both.shape[1]).index_add_(0, dst, both).chunk(2, 1)
        h = h + F.silu(self.node_norm(own + total / (weights + 1e-6)))
        return h, e if self.edge_norm is None else e + F.silu(self.edge_norm(gate))


class Categories(nn.Module):
    """uint8 [n, columns] -> [n, width]: the sum of an embedding for each column."""

    def __init__(self, columns, width):
        super().__init__()
        self.table = nn.Embedding(256 * columns, width)
        self.register_buffer("first", 256 * torch.arange(columns), persistent=False)

    def forward(self, x):
        return self.table(x + self.first).sum(1)


class Regressor(nn.Module):
    """Edge-gated convolutions, the mean over the nodes of each graph, and a small head.

    Args:
        node_dim, edge_dim: F, D. node_dtype, edge_dtype: uint8 for categories, otherwise numbers.
        hidden: width W. out_dim: T. num_layers: convolutions. dropout: probability, before the head.
        mean, std: float [T] of the targets, so that the network itself works on standardised ones.
    """

    def __init__(self, node_dim, edge_dim, hidden, out_dim, *, node_dtype, edge_dtype, num_layers=4, dropout=0.0,
                 mean=0.0, std=1.0):  # fmt: skip
        super().__init__()
        self.nodes, self.edges = (
            Categories(dim, hidden) if dtype == torch.uint8 else
            nn.Sequential(nn.Linear(dim, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
            for dim, dtype in ((node_dim, node_dtype), (edge_dim, edge_dtype))
        )  # fmt: skip
        self.layers = nn.ModuleList(EdgeGatedConv(hidden, last=i == num_layers - 1) for i in range(num_layers))
        self.head = nn.Sequential(nn.Linear(hidden, hidden), nn.SiLU(), nn.Dropout(dropout), nn.Linear(hidden, out_dim))
        self.register_buffer("mean", torch.as_tensor(mean).expand(out_dim).clone().float())
        self.register_buffer("std", torch.as_tensor(std).expand(out_dim).clone().float())

    def forward(self, graph):
        """Targets [G, T] of the graphs of a batch with .indptr, .indices, .graph_ids, .x, .e and .y [G, T]."""
        dst = torch.repeat_interleave(graph.indptr.diff(), output_size=graph.indices.numel())
        h, e = (enter(rows if rows.dtype == torch.uint8 else rows.float())
                for enter, rows in ((self.nodes, graph.x), (self.edges, graph.e)))
        for layer in self.layers:
            h, e = layer(graph.indices, dst, h, e)
        pooled = h.new_zeros(len(graph.y), h.shape[1]).index_add_(0, graph.graph_ids, h)
        sizes = graph.graph_ids.bincount(minlength=len(graph.y)).clamp(min=1)
        return self.head(pooled / sizes.unsqueeze(1)) * self.std + self.mean
