"""Adam that updates, of learned rows of nodes, a batch's rows alone.

optimizer = Adam(model.parameters(), lr=3e-3, fused=True)
"""

import torch


class Adam(torch.optim.Adam):
    """torch's Adam, in which parameters may have sparse gradients, such as those of `NodeInputs`: only rows with a gradient
    change, and so do their moments; weight decay leaves them alone. As torch.optim.SparseAdam, with Adam's state."""

    @torch.no_grad()
    def step(self):
        """Update all parameters."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.is_sparse:
                    self._step_rows(p, group)
                    p.grad = None  # the rest is torch's
        super().step()

    def _step_rows(self, p, group):
        grad, state, (first, second) = p.grad.coalesce(), self.state[p], group["betas"]
        rows, values = grad.indices()[0], grad.values()
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] = state["step"].cpu() + 1
        mean = state["exp_avg"][rows].lerp_(values, 1 - first)
        square = state["exp_avg_sq"][rows].lerp_(values.square(), 1 - second)
        state["exp_avg"][rows], state["exp_avg_sq"][rows] = mean, square
        bias = (1 - beta ** state["step"].item() for beta in (first, second))
        rate, root = group["lr"] / next(bias), next(bias) ** 0.5
        p.index_add_(0, rows, mean / (square.sqrt() / root + group["eps"]), alpha=-rate)
