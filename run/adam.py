"""Adam that updates only the batch's rows of an embedding table.

optimizer = Adam(model.parameters(), lr=3e-3, fused=True)
"""

import torch

from native import layers


class Adam(torch.optim.Adam):
    """torch.optim.Adam that also takes sparse gradients, such as those of `NodeInputs`: only rows with a gradient and
    their moments are updated, without weight decay. Like torch.optim.SparseAdam, but with Adam's state."""

    @torch.no_grad()
    def step(self):
        """Take a step: sparse gradients row by row, dense ones by torch."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.is_sparse:
                    self._step_rows(p, group)
                    p.grad = None  # super().step() skips it
        super().step()

    def _step_rows(self, p, group):
        ids, state, (first, second) = p.grad._indices()[0], self.state[p], group["betas"]
        # ascending ids are distinct: no need to sort and sum the rows
        p.grad._coalesced_(p.grad.is_coalesced() or bool((ids[1:] > ids[:-1]).all()))
        grad = p.grad.coalesce()
        rows, values = grad.indices()[0], grad.values()
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] = state["step"].cpu() + 1
        count, mean, square = state["step"].item(), state["exp_avg"], state["exp_avg_sq"]
        rate, root = group["lr"] / (1 - first**count), (1 - second**count) ** 0.5
        scalars = first, second, rate, root, group["eps"]
        if layers.adam_rows(rows, values, mean, square, p, *scalars):
            return
        m, v = mean[rows].lerp_(values, 1 - first), square[rows].lerp_(values.square(), 1 - second)
        mean[rows], square[rows] = m, v
        p.index_add_(0, rows, m / (v.sqrt() / root + group["eps"]), alpha=-rate)
