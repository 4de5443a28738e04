"""Fused attention of GATv2, and GINE's sums: what model.py calls for layers with features of edges.

See layers.py, which has the same functions: they return None for tensors that they cannot handle.
"""

import torch

from .kernels import (
    Dropout,
    Fused,
    InEdges,
    Lists,
    aligned,
    block_kernels,
    destinations,
    from_values,
    learned,
    save,
    sizes,
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
    code = block_kernels(near, source, target, nodes=dropout.nodes)
    S = len(target)
    numbers = indices.numel() + S
    if edges is None:
        edges = attn.new_empty(0, 0)
        by = attn.new_empty(0, attn.numel())
    fits = (
        code
        and numbers * len(attn) < 1 << 32
        and source.shape[1] == target.shape[1] == attn.numel()
        and near.S == S
        and (dropout.nodes is None or dropout.nodes.numel() == S)
        and source.dtype == target.dtype
        and attn.dtype == torch.float32
        and (self_rows is None or not learned(source, target, attn, by))
        and _fits(edges, by, numbers if len(by) else 0, target, attn)
    )
    if not fits:
        return None
    return _Attend.apply(
        source, target, attn.contiguous(), by.contiguous(), edges.contiguous(), near, dropout, code
    )


class _Attend(Fused):
    @staticmethod
    def forward(ctx, source, target, attn, by, edges, near, dropout, code):
        S = len(target)
        K, D = attn.shape
        E = near.indices.numel()
        dst = destinations(code, near)
        weights = attn.new_empty(E + S, K)
        slopes = None  # of leaky ReLU, a bit each, for the backward pass
        if any(ctx.needs_input_grad):
            words = code.columns * -(-D // (32 * code.columns))
            slopes = dst.new_empty(E + S, K, words)
        tensors = {
            "source": source,
            "target": target,
            "attn": attn,
            "by": by,
            "edges": edges,
            "dst": dst,
            "weights": weights,
            "dropped": torch.empty_like(weights) if dropout.drop else weights,
            "slopes": slopes,
        }
        numbers = {
            "S": S,
            "E": E,
            "K": K,
            "D": D,
            "width": D,
            "wide": len(by),
            "whole": aligned(D, source, target, attn, by),
        }
        out = torch.empty_like(target)
        values = near._asdict() | tensors | numbers
        code.run("attention_scores", (E + S) * K, values)
        code.run("attention_softmax", S * K, values, dropout)
        code.run("attention_sum", S * K, values, out=out)
        save(ctx, code, near, tensors, **numbers, drop=dropout.drop, scale=dropout.scale)
        return out

    @staticmethod
    def gradients(code, values, grad):  # [S, K D]
        source, target, attn, by = (values[name] for name in ("source", "target", "attn", "by"))
        near = from_values(InEdges, values)
        places, K = values["weights"].shape
        values |= {"grad": grad, "to_scores": torch.empty_like(values["weights"])}
        values["whole"] &= aligned(attn.shape[1], grad)
        code.run("attention_weight_grad", places * K, values)
        code.run("attention_softmax_grad", len(target) * K, values)
        to_source = torch.empty_like(source)
        to_target = torch.empty_like(target)
        to_by = None
        target_runs = code.runs(target)
        source_runs = code.runs(source)
        # first the part of target, then that of source
        to_attn = attn.new_empty(target_runs["runs"] + source_runs["runs"], attn.numel())
        code.run(
            "attention_target_grad",
            target_runs["runs"] * K,
            values,
            target_runs,
            to_target=to_target,
            to_attn=to_attn,
        )
        Lists.of(code, near, len(source), values["dst"]).run(
            "attention_source_grad",
            near,
            heads=K,
            columns=2 * attn.numel(),
            **values | source_runs,
            N=len(source),
            to_attn=to_attn[target_runs["runs"] :],
            out=to_source,
        )
        to_attn = to_attn.sum(0)
        if len(by):
            to_by = code.edge_matrix_grad(values, numbers=places, source=None, rows=None)
            to_attn = to_attn + (to_by * by).sum(0)
            to_by = to_by * attn.flatten()
        return to_source, to_target, to_attn.view_as(attn), to_by, None, None, None, None


def _fits(edges, by, count, *rows):
    """Return whether kernels take these edge features and the matrix behind them; if not, torch says what is wrong."""
    return (
        edges.shape == (count, len(by))
        and by.shape[1] == rows[0].shape[1]
        and all(t.device == edges.device == by.device for t in rows)
        and edges.dtype == by.dtype == torch.float32
        and not learned(edges)
    )


def edge_sums(indptr, indices, h, edges, by):
    """Sum relu(h + edges by) over each destination's edges, for GINE.

    Args:
        h: [N, F]. edges: float32 [E, d]. by: float32 [d, F].

    Returns:
        [S, F].
    """
    near = InEdges(indptr, indices)
    code = block_kernels(near, h, own=False)
    if code is None or not _fits(edges, by, indices.numel(), h):
        return None
    return _EdgeSums.apply(h, by.contiguous(), edges.contiguous(), near, code)


class _EdgeSums(Fused):
    @staticmethod
    def forward(ctx, h, by, edges, near, code):
        out = h.new_empty(near.S, h.shape[1])
        rows = {"h": h, "by": by, "edges": edges}
        code.run("edge_sums", near.S, near, rows, sizes(h, by), wide=len(by), S=near.S, out=out)
        save(ctx, code, near, rows, wide=len(by))
        return out

    @staticmethod
    def gradients(code, values, grad):  # [S, F]
        near = from_values(InEdges, values)
        h = values["h"]
        N = len(h)
        E = near.indices.numel()
        out = torch.empty_like(h)
        dst = destinations(code, near)
        values |= {**sizes(h, values["by"], grad), "grad": grad, "K": 1, "E": E, "dst": dst}
        to_by = code.edge_matrix_grad(
            values, source=h, rows=grad, numbers=E, slopes=None, to_scores=None
        )
        code.run("edge_sums_grad", N, values, Lists.of(code, near, N, dst).arrays, N=N, out=out)
        return out, to_by, None, None, None
