"""The update of weights, eager or captured: rate, gradient clipping, and Adam that updates only the batch's rows of an
embedding table.

optimizer = Adam(model.parameters(), lr=3e-3, fused=True, clip_norm=1.0)
optimizer.set_rate(rate_at(plan, epoch, step))
optimizer.step()
"""

import math

import torch

from native import layers

PIECE = 2048  # numbers of a parameter that one block of threads updates in captured steps, at least
PIECES = 108  # of all parameters, about: torch takes 36 tensors a launch


def rate_at(plan, epoch, step):
    """Return the learning rate of an optimizer step, counted from 0 over all epochs: --lr-schedule goes by epochs, --warmup
    by steps."""
    done = epoch / plan.epochs
    shapes = {"constant": 1, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return plan.lr * shapes[plan.lr_schedule] * min(1, (step + 1) / (plan.warmup or 1))


class Adam(torch.optim.Adam):
    """torch.optim.Adam that also takes sparse gradients, such as those of `NodeInputs`: only rows with a gradient and
    their moments are updated, without weight decay, maximize and amsgrad. Like torch.optim.SparseAdam, but with
    Adam's state.

    clip_norm: largest norm of all gradients together, as for torch.nn.utils.clip_grad_norm_; None: any.
    """

    def __init__(self, parameters, *, clip_norm=None, **options):
        super().__init__(parameters, **options)
        self.clip_norm = clip_norm

    def set_rate(self, rate):
        """Set the learning rate of the steps from here on; captured ones read it from GPU memory."""
        for group in self.param_groups:
            if not group["capturable"]:
                group["lr"] = rate
            elif rate != group["rate"]:
                group["lr"].fill_(rate)
                group["rate"] = rate

    def prepare_capture(self, device):
        """Hold the learning rate in memory of a device, for steps that are captured there."""
        for group in self.param_groups:
            rate = group["rate"] = group["lr"]
            group["lr"] = torch.full((), rate, device=device)
            group["capturable"] = True

    @torch.no_grad()
    def step(self):
        """Take a step, eager or captured: clip, then update sparse gradients row by row, dense ones by torch; in captured
        steps in pieces. What every update has to do belongs here: both steppers of train.py call it."""
        by_row = []
        for group in self.param_groups:
            for p in group["params"]:
                rows = vars(p).pop("rows", None)  # left by `NodeInputs.aligned`: ids, gradient
                if p.grad is not None and p.grad.is_sparse:
                    rows = _distinct(p.grad)
                    p.grad = None  # super().step() skips it
                if rows is not None:
                    by_row.append((p, group, *rows))
        if self.clip_norm:
            self._clip([rows for _, _, *rows in by_row])
        for sparse in by_row:
            self._step_rows(*sparse)
        if all(group["capturable"] and group["fused"] for group in self.param_groups):
            for group in self.param_groups:
                self._step_pieces(group)
        else:
            super().step()

    def _clip(self, by_row):
        """Scale the gradients if their norm is above `clip_norm`. by_row: [(ids, values)], of negative ids without meaning."""
        params = (p for group in self.param_groups for p in group["params"])
        grads = [p.grad for p in params if p.grad is not None]
        used = [values.where((ids >= 0).unsqueeze(1), 0) for ids, values in by_row]
        norm = torch.stack(torch._foreach_norm([*grads, *used])).norm()
        scale = (self.clip_norm / (norm + 1e-6)).clamp(max=1)
        torch._foreach_mul_([*grads, *(values for _, values in by_row)], scale)

    def _step_pieces(self, group):
        """Call torch's fused kernel for pieces of the parameters, with the same bits. It gives a block of threads 65,536
        numbers of a tensor, so that few of a GPU's multiprocessors would have work: 36 us instead of 11 on an H200."""
        lists = params, grads, *_, counts = [[] for _ in range(6)]
        self._init_group(group, *lists)
        torch._foreach_add_(counts, 1)
        for i, p in enumerate(params):
            if grads[i].stride() != p.stride():  # torch's kernel takes no two layouts
                grads[i] = torch.empty_like(p).copy_(grads[i])
        total = sum(p.numel() for p in params)
        size = PIECE * max(1, round(total / (PIECE * PIECES)))
        if total and params[0].is_cuda and not torch.cuda.is_current_stream_capturing():
            size = total
        cut = lambda t: t.view(-1).split(size) if t.is_contiguous() else [t]  # noqa: E731
        pieces = [[part for t in table for part in cut(t)] for table in (params, *lists[1:4])]
        counts = [n for n, p in zip(counts, params) for _ in cut(p)]
        names = "lr", "weight_decay", "eps", "amsgrad", "maximize"
        options = {name: group[name] for name in names}
        options["beta1"], options["beta2"] = group["betas"]
        torch._fused_adam_(*pieces, [], counts, **options)

    def _step_rows(self, p, group, rows, values):
        """rows: [n] distinct, negative ones are skipped by native/layers.py. values: [n, D] their gradient."""
        state = self.state[p]
        first, second = group["betas"]
        if not state:
            state["step"] = torch.zeros((), device=p.device)
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)
        count = state["step"].add_(1)
        mean = state["exp_avg"]
        square = state["exp_avg_sq"]
        rate = group["lr"] / (1 - first ** count.double())
        root = (1 - second ** count.double()).sqrt()
        numbers = {"first": first, "second": second, "eps": group["eps"]}
        rates = torch.stack([rate, root]).float()
        if layers.adam_rows(rows, values, mean, square, p, **numbers, rates=rates):
            return
        m = mean[rows].lerp_(values, 1 - first)
        v = square[rows].lerp_(values.square(), 1 - second)
        mean[rows] = m
        square[rows] = v
        p.index_add_(0, rows, m / (v.sqrt() / root + group["eps"]) * -rate)


def _distinct(grad):
    """Return the rows [n] and values [n, D] of a sparse gradient, of equal rows their sum."""
    ids = grad._indices()[0]
    # ascending ids are distinct: no need to sort and sum the rows
    grad._coalesced_(grad.is_coalesced() or bool((ids[1:] > ids[:-1]).all()))
    grad = grad.coalesce()
    return grad.indices()[0], grad.values()
