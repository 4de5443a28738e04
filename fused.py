"""The steps of a layer that are worth fusing: model.py takes them where it finds this file beside it. Here they are in
C for the CPU; tensors on a GPU are handed on to fused_cuda.py.

    pair = self_and_mean(indptr, indices, h)      # own row and mean of the neighbours' rows, one pass over h
    h = relu_dropout(h, nodes, seed, drop)        # in place

Why: a fresh tensor costs more in page faults than in work, and each torch operation makes one; and rows at random
places are worth fetching ahead of their turn. `library` says whether C code serves these tensors; model.py holds the
same steps as torch operations, which are the reference.

Letters: S destinations, N sources, E edges of a block; F, D feature widths. This file needs native.py and a C compiler,
and for GPUs fused_cuda.py, fused_kernels.py and native_cuda.py. The C code runs on torch's own OpenMP threads: threads
of another kind would fight with them for cores.
"""

import ctypes
import functools
import os

import torch
from torch.nn import functional as F

import native

try:
    import fused_cuda
except ImportError:  # on a GPU torch operations do
    fused_cuda = None

_TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.int32: "int32_t", torch.int64: "int64_t"}
_on = True


def use_native(on):
    """Switch the C code and the kernels on or off for this process, say to measure what they are worth."""
    global _on
    _on = on


def library(integers, source, target):
    """The C code for these tensors' types, or None where torch operations have to do; an integer tensor may be None."""
    integers = [t for t in integers if t is not None]
    kinds = {t.dtype for t in integers} or {torch.int32}
    tensors = [*integers, source, target]
    if not _on or not all(t.device.type == "cpu" and t.dtype in _TYPES and t.is_contiguous() for t in tensors):
        return None
    if not (source.is_floating_point() and target.is_floating_point()):  # integers are ids, not values
        return None
    return _load(_TYPES[kinds.pop()], _TYPES[source.dtype], _TYPES[target.dtype]) if len(kinds) == 1 else None


@functools.lru_cache(maxsize=None)
def _load(ids, source, target):
    pointer, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    flags = ["-O3", "-march=native", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared"]
    flags += [f"-DID={ids}", f"-DIN={source}", f"-DOUT={target}"]
    return native.load_c("layers", _C, flags, {
        "self_and_mean": [None] + [pointer] * 4 + [number] * 2 + [pointer],
        "scatter_self_and_mean": [None] + [pointer] * 3 + [number] * 3 + [pointer],
        "relu_dropout": [None] + [pointer] * 2 + [number] * 2 + [ctypes.c_uint64, ctypes.c_int, real],
        "relu_dropout_backward": [None, pointer, pointer, number, real, pointer],
        "gather_rows": [number] + [pointer] * 2 + [number] * 3 + [pointer],
    })


def has_kernels(indices):
    """Whether CUDA kernels serve blocks of this integer type on this GPU."""
    return bool(_on and fused_cuda and indices.is_cuda and fused_cuda._load(indices.dtype, indices.device))


def self_and_mean(indptr, indices, h, self_rows=None, out=None):
    """See model.py; None where neither C code nor CUDA can do it."""
    if h.is_cuda:
        return fused_cuda.self_and_mean(indptr, indices, h, self_rows, out) if _on and fused_cuda else None
    target = h.new_empty(indptr.numel() - 1, 2 * h.shape[1]) if out is None else out
    code = library([indptr, indices, self_rows], h, target)
    if code is None:
        return None
    if self_rows is None and out is None and h.requires_grad and torch.is_grad_enabled():
        return _SelfAndMean.apply(indptr, indices, h, code)
    return _self_and_mean(indptr, indices, h, self_rows, target, code)


def _self_and_mean(indptr, indices, h, self_rows, out, code):
    own = None if self_rows is None else self_rows.data_ptr()
    S, width = indptr.numel() - 1, h.shape[1]
    code.self_and_mean(indptr.data_ptr(), indices.data_ptr(), h.data_ptr(), own, S, width, out.data_ptr())
    return out


class _SelfAndMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, indptr, indices, h, code):
        ctx.save_for_backward(indptr, indices)
        ctx.num_src, ctx.code = h.shape[0], code
        return _self_and_mean(indptr, indices, h, None, h.new_empty(indptr.numel() - 1, 2 * h.shape[1]), code)

    @staticmethod
    def backward(ctx, grad):  # [S, 2F] -> [N, F]
        (indptr, indices), grad = ctx.saved_tensors, grad.contiguous()
        S, width, N = grad.shape[0], grad.shape[1] // 2, ctx.num_src
        total = torch.empty(N, width)
        ctx.code.scatter_self_and_mean(
            indptr.data_ptr(), indices.data_ptr(), grad.data_ptr(), S, N, width, total.data_ptr()
        )
        return None, None, total.to(grad.dtype), None


def gather_rows(features, ids, out=None):
    """See model.py; None where neither C code nor CUDA can do it."""
    if features.is_cuda and ids.is_cuda:
        return fused_cuda.gather_rows(features, ids, out) if _on and fused_cuda else None
    code = library([ids], features, features)
    if code is None or not (out is None or out.is_contiguous()):
        return None
    V, width = features.shape
    out = features.new_empty(ids.numel(), width) if out is None else out
    if code.gather_rows(features.data_ptr(), ids.data_ptr(), ids.numel(), V, width, out.data_ptr()):
        raise IndexError(f"ids {int(ids.min())} .. {int(ids.max())} are not all rows of features with {V} rows")
    return out


def relu_dropout(h, nodes, seed, drop):
    """dropout(relu(h)) in place, as model.py draws it; None where neither C code nor CUDA can do it."""
    if h.is_cuda:
        return fused_cuda.relu_dropout(h, nodes, seed, drop) if _on and fused_cuda else None
    code = library([nodes], h, h)
    return None if code is None else _ReluDropout.apply(h, nodes, seed, drop, code)


class _ReluDropout(torch.autograd.Function):
    """What was kept is what is not zero in the result, so the backward pass needs no mask."""

    @staticmethod
    def forward(ctx, h, nodes, seed, drop, code):
        ctx.code, ctx.scale = code, 256 / (256 - drop)
        ids = None if nodes is None else nodes.data_ptr()
        code.relu_dropout(h.data_ptr(), ids, *h.shape, seed, drop, ctx.scale)
        ctx.mark_dirty(h)
        ctx.save_for_backward(h)
        return h

    @staticmethod
    def backward(ctx, grad):
        (h,), grad = ctx.saved_tensors, grad.contiguous()
        out = torch.empty_like(grad)
        ctx.code.relu_dropout_backward(h.data_ptr(), grad.data_ptr(), h.numel(), ctx.scale, out.data_ptr())
        return out, None, None, None, None


def dropout(x, nodes, seed, drop):
    """Dropout of input features, as model.py draws it; None where CUDA cannot do it."""
    return fused_cuda.dropout(x, nodes, seed, drop) if _on and fused_cuda and x.is_cuda else None


def max_neighbours(indptr, indices, h):
    """See model.py; None where CUDA cannot do it."""
    return fused_cuda.max_neighbours(indptr, indices, h) if _on and fused_cuda and h.is_cuda else None


def attend(indptr, indices, source, *arguments):
    """The weighted sum of a GATv2 layer, see fused_cuda.py; None where CUDA cannot do it."""
    return fused_cuda.attend(indptr, indices, source, *arguments) if _on and fused_cuda and source.is_cuda else None


def cross_entropy(logits, labels):
    """See model.py; None where CUDA cannot do it."""
    return fused_cuda.cross_entropy(logits, labels) if _on and fused_cuda and logits.is_cuda else None


def sage(blocks, x, *arguments):
    """A plain GraphSAGE as one step of autograd, see fused_cuda.py; None where CUDA cannot do it."""
    return fused_cuda.sage(blocks, x, *arguments) if _on and fused_cuda and x.is_cuda else None


# ---------------------------------------------------------------------------------------------------------------------
# matrix products

_WORTH_COMPILING = 50_000_000  # multiplications for each thread; compiling takes as long with any number of threads


def linear(x, weight, bias=None):
    """F.linear; large ones in float32 on CPU by oneDNN, where torch asks MKL, which is up to twice as slow on AMD's
    processors.

    torch keeps what oneDNN compiled for each number of rows, and batches differ: a gigabyte in the end. So this is done
    only where the variables ONEDNN_PRIMITIVE_CACHE_CAPACITY and LRU_CACHE_CAPACITY bound it (train.py sets them), and
    where the product is worth compiling anew: a small one would take ten times as long as by MKL.

    Args:
        x: [S, F]. weight: [D, F]. bias: [D].
    """
    if x.numel() * weight.shape[0] < _WORTH_COMPILING * torch.get_num_threads():
        return F.linear(x, weight, bias)
    usable = x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    bounded = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"} <= os.environ.keys()
    if usable and bounded and _on and torch.backends.mkldnn.is_available():
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


# ---------------------------------------------------------------------------------------------------------------------
# C

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

// out [S, 2F]: own row beside the mean of the neighbours' rows of h [N, F].
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
  const i64 row = F * sizeof(IN), ahead = 4 + 3072 / (row + 1);  // some fifty cache lines are on their way
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
