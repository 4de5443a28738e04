"""Adam that updates only the batch's rows of an embedding table.

optimizer = Adam(model.parameters(), lr=3e-3, fused=True)
"""

import torch

from native import layers


class Adam(torch.optim.Adam):
    """torch.optim.Adam that also takes sparse gradients, such as those of `NodeInputs`: only rows with a gradient and
    their moments are updated, without weight decay, maximize and amsgrad. Like torch.optim.SparseAdam, but with
    Adam's state."""

    @torch.no_grad()
    def step(self):
        """Take a step: sparse gradients row by row, dense ones by torch."""
        for group in self.param_groups:
            for p in group["params"]:
                rows = vars(p).pop("rows", None)  # left by `NodeInputs.aligned`: ids, gradient
                if p.grad is not None and p.grad.is_sparse:
                    rows = _distinct(p.grad)
                    p.grad = None  # super().step() skips it
                if rows is not None:
                    self._step_rows(p, group, *rows)
        super().step()

    def _step_rows(self, p, group, rows, values):
        """rows: [n] distinct, negative ones are skipped by native/layers.py. values: [n, D] their gradient."""
        state, (first, second) = self.state[p], group["betas"]
        if not state:
            state["step"] = torch.zeros((), device=p.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        count, mean, square = state["step"].add_(1), state["exp_avg"], state["exp_avg_sq"]
        rate = group["lr"] / (1 - first ** count.double())
        root = (1 - second ** count.double()).sqrt()
        rates = torch.stack([rate, root]).float()
        if layers.adam_rows(rows, values, mean, square, p, first, second, group["eps"], rates):
            return
        m, v = mean[rows].lerp_(values, 1 - first), square[rows].lerp_(values.square(), 1 - second)
        mean[rows], square[rows] = m, v
        p.index_add_(0, rows, m / (v.sqrt() / root + group["eps"]) * -rate)


def _distinct(grad):
    """Return the rows [n] and values [n, D] of a sparse gradient, of equal rows their sum."""
    ids = grad._indices()[0]
    # ascending ids are distinct: no need to sort and sum the rows
    grad._coalesced_(grad.is_coalesced() or bool((ids[1:] > ids[:-1]).all()))
    grad = grad.coalesce()
    return grad.indices()[0], grad.values()
