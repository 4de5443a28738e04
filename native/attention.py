"""Fused attention of GATv2, and GINE's sums: what model.py calls for layers with features of edges.

See layers.py, which has the same functions: they return None for tensors that they cannot handle.
"""

import torch

from .kernels import (
    Dropout,
    InEdges,
    Lists,
    aligned,
    destinations,
    learned,
    of_block,
    once_differentiable,
)


def attend(
    indptr,
    indices,
    source,
    target,
    attn,
    *,
    self_rows=None,
    drawn=(None, 0, 0),
    factors=(None, None),
):
    """Compute the attention-weighted sum of a GATv2 layer, before heads are averaged.

    Args:
        source: [N, K D] and target: [S, K D], float32 or bfloat16. attn: float32 [K, D].
        self_rows: [S] rows of source that are the destinations'; None: the first S.
        drawn: (nodes, seed, drop) for the dropout of attention weights; see model.py.
        factors: float32 [E + S, d], features of the edges, then of the self-loops, and the matrix [d, K D] that
            multiplies them; or None twice.

    Returns:
        [S, K D], of source's type.
    """
    edges, by = factors
    near = InEdges(indptr, indices, self_rows)
    dropout = Dropout.of(*drawn)
    code = of_block(near, source, target, nodes=dropout.nodes)
    S = len(target)
    numbers = indices.numel() + S
    fits = code and numbers * len(attn) < 1 << 32
    fits = fits and source.shape[1] == target.shape[1] == attn.numel()
    fits = fits and near.S == S and (dropout.nodes is None or dropout.nodes.numel() == S)
    if not fits or source.dtype != target.dtype or attn.dtype != torch.float32:
        return None
    if self_rows is not None and learned(source, target, attn, by):
        return None
    if edges is None:
        edges = attn.new_empty(0, 0)
        by = attn.new_empty(0, attn.numel())
    if not _fits(edges, by, numbers if len(by) else 0, target, attn):
        return None
    given = near, edges.contiguous(), dropout, code
    return _Attend.apply(source, target, attn.contiguous(), by.contiguous(), given)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, source, target, attn, by, given):
        near, edges, dropout, code = given
        S = len(target)
        K, D = attn.shape
        E = near.indices.numel()
        whole = aligned(D, source, target, attn, by)
        dst = destinations(code, near)
        weights = attn.new_empty(E + S, K)
        dropped = torch.empty_like(weights) if dropout.drop else None
        out = torch.empty_like(target)
        slopes = None  # of leaky ReLU, a bit each, for the backward pass
        if any(ctx.needs_input_grad):
            words = code.columns * -(-D // (32 * code.columns))
            slopes = dst.new_empty(E + S, K, words)
        code.run(
            "attention_scores",
            (E + S) * K,
            near,
            dst=dst,
            S=S,
            E=E,
            K=K,
            D=D,
            whole=whole,
            source=source,
            target=target,
            attn=attn,
            edges=edges,
            wide=len(by),
            by=by,
            scores=weights,
            slopes=slopes,
        )
        code.run(
            "attention_softmax",
            S * K,
            dropout,
            **near.edges,
            S=S,
            K=K,
            weights=weights,
            dropped=dropped,
        )
        code.run(
            "attention_sum",
            S * K,
            near,
            S=S,
            K=K,
            width=D,
            whole=whole,
            weights=weights if dropped is None else dropped,
            source=source,
            out=out,
        )
        ctx.code = code
        ctx.scale = dropout.scale
        rows = source, target, attn, by, edges, dst, weights, dropped, slopes
        ctx.save_for_backward(*rows, *near)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # [S, K D]
        saved = ctx.saved_tensors  # once: with recomputed activations torch refuses a second time
        source, target, attn, by, edges, dst, weights, dropped, slopes, *near = saved
        near = InEdges(*near)
        code = ctx.code
        S = len(target)
        N = len(source)
        E = len(dst)
        K, D = attn.shape
        whole = aligned(D, source, target, attn, by, grad)
        to_scores = _to_scores(ctx, saved, grad, whole)
        to_source = torch.empty_like(source)
        to_target = torch.empty_like(target)
        to_by = None
        of_target = code.runs(target)
        of_source = code.runs(source)
        # first the part of target, then that of source
        to_attn = attn.new_empty(of_target["runs"] + of_source["runs"], K * D)
        through = {"K": K, "width": D, "whole": whole, "slopes": slopes, "to_scores": to_scores}
        code.run(
            "attention_target_grad",
            of_target["runs"] * K,
            **near.edges,
            **through,
            **of_target,
            S=S,
            target=target,
            attn=attn,
            to_target=to_target,
            to_attn=to_attn,
        )
        Lists.of(code, near, N, dst).run(
            "attention_source_grad",
            near,
            heads=K,
            columns=2 * K * D,
            indptr=near.indptr,
            **through,
            **of_source,
            S=S,
            N=N,
            source=source,
            attn=attn,
            weights=weights if dropped is None else dropped,
            grad=grad,
            out=to_source,
            to_attn=to_attn[of_target["runs"] :],
        )
        to_attn = to_attn.sum(0)
        if len(by):
            given = {"numbers": E + S, "source": None, "rows": None, "edges": edges}
            to_by = code.edge_matrix_grad(near, dst, by, **through, **given)
            to_attn = to_attn + (to_by * by).sum(0)
            to_by = to_by * attn.flatten()
        return to_source, to_target, to_attn.view(K, D), to_by, None


def _to_scores(ctx, saved, grad, whole):
    """Return the gradient of attention's scores [E + S, K]."""
    source, target, attn, _, _, dst, weights, dropped, _, *near = saved
    near = InEdges(*near)
    code = ctx.code
    S = len(target)
    E = len(dst)
    K, D = attn.shape
    out = attn.new_empty(E + S, K)
    size = {**near.edges, "S": S, "K": K}
    code.run(
        "attention_weight_grad",
        (E + S) * K,
        **size,
        dst=dst,
        E=E,
        D=D,
        whole=whole,
        source=source,
        grad=grad,
        to_weights=out,
    )
    kept = {"weights": weights, "dropped": dropped, "scale": ctx.scale}
    code.run("attention_softmax_grad", S * K, **size, **kept, grad=out)
    return out


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
    near = InEdges(indptr, indices)
    code = of_block(near, h, h[: near.S], own=False)
    if code is None or not _fits(edges, by, indices.numel(), h):
        return None
    return _EdgeSums.apply(h, by.contiguous(), edges.contiguous(), near, code)


class _EdgeSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, by, edges, near, code):
        width = h.shape[1]
        out = h.new_empty(near.S, width)
        code.run(
            "edge_sums",
            near.S,
            **near.edges,
            h=h,
            edges=edges,
            wide=len(by),
            by=by,
            S=near.S,
            width=width,
            whole=aligned(width, h, by),
            out=out,
        )
        ctx.save_for_backward(h, by, edges, *near)
        ctx.code = code
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # [S, F]
        h, by, edges, *near = ctx.saved_tensors
        near = InEdges(*near)
        code = ctx.code
        N, width = h.shape
        out = torch.empty_like(h)
        dst = destinations(code, near)
        size = {"width": width, "whole": aligned(width, h, by, grad), "edges": edges}
        other = {"numbers": len(edges), "slopes": None, "to_scores": None}
        to_by = code.edge_matrix_grad(near, dst, by, K=1, source=h, rows=grad, **size, **other)
        lists = Lists.of(code, near, N, dst)
        code.run(
            "edge_sums_grad",
            N,
            **lists.of_source,
            **size,
            edge=lists.edge,
            h=h,
            wide=len(by),
            by=by,
            grad=grad,
            N=N,
            out=out,
        )
        return out, to_by, None, None, None
