"""Numbers as labels: standardised inside, with errors in their own units; of nodes here, of small graphs in graphs.py.

python train.py --dataset houses.npz        # with an array `targets`, [V] or [V, T], NaN for a missing one
"""

import torch
from torch import nn

from disk.files import StoreError
from model import is_gnn
from tasks.metrics import errors, mean_of_present, scores_line
from tasks.node import NodeTask

LOSSES = {"mse": torch.square, "mae": torch.abs}  # of --loss, of an error in standard deviations


def moments(y):
    """Compute the mean and standard deviation of training targets y [n, T], NaN where missing -> two float64 [T]."""
    y = y.double()
    present = ~y.isnan()
    mean = y.nanmean(0)
    # with the mean in the place of what is missing, which adds nothing to the sum of squares
    deviation = y.where(present, mean).std(0, correction=0)
    return mean, (deviation * (len(y) / present.sum(0)).sqrt()).clamp(min=1e-12)


def loss_of(kind, output, y, std):
    """Sum the losses of outputs [n, T] for targets y over n, averaged over T without missing ones. Targets are rounded as
    outputs are: that of a constant target is no error."""
    y = y.to(output.dtype)
    present = ~y.isnan()
    error = (output - y.where(present, output.detach())) / std
    return mean_of_present(LOSSES[kind](error), present).sum()


def check_each(path, example, noun, present):
    """Raise StoreError for a target or label, a column of the mask `present` [n, T], that no training example has."""
    if (none := ~present.any(0)).any():
        which = f"{noun} {int(none.int().argmax())} of {len(none)}" if len(none) > 1 else noun
        raise StoreError(f"{path}: no training {example} has a {which}")


class Scale(nn.Module):
    """Turns standardised outputs [n, T] into targets, by buffers mean and std, float [T]."""

    def __init__(self, T):
        super().__init__()
        self.register_buffer("mean", torch.zeros(T))
        self.register_buffer("std", torch.ones(T))

    def fit(self, mean, std):
        """Set the buffers, [T] each."""
        self.mean.copy_(mean)
        self.std.copy_(std)

    def forward(self, output):
        return output * self.std + self.mean


class NodeNumbers(NodeTask):
    """Regression on nodes: of targets, one or several each."""

    answers = "targets"

    def read_labels(self, args, path, say):
        store = self.store
        if store.labelled and not store.targets:
            raise StoreError(f"--metric {args.metric} is of targets, and {path} has classes")
        of_classes = {"class_weights": "none", "predict_what": "embeddings", "report": None}
        for name, value in of_classes.items():
            if name in args.typed and getattr(args, name) != value:
                flag = f"--{name.replace('_', '-')} {getattr(args, name)}"
                raise StoreError(f"{flag} is of classes, and {path} has targets: leave it out")
        self.metric = args.metric or "rmse"
        self.loss_kind = args.loss
        y = store.labels[store.split["train"]]
        if args.trains:
            check_each(path, "node", "target", ~y.isnan())
        if missing := int(y.isnan().sum()):
            say(f"targets {missing:,} of {y.numel():,} of the training nodes are missing")

    def set_buffers(self, network):
        y = self.store.labels[self.store.split["train"]]
        if self.store.labelled and len(y):
            network.target_scale.fit(*moments(y))

    def output(self, run, network, batch, key):
        output = super().output(run, network, batch, key)
        if is_gnn(run.model) or not isinstance(network, nn.Module):
            return output
        return run.model.target_scale(output)  # of a network of a file

    def loss(self, network, output, y):
        """Sum over the seeds of `loss_of`."""
        return loss_of(self.loss_kind, output, y, network.target_scale.std)

    def scored(self, run, outputs, y):
        """Compute the metrics of outputs [n, T] -> {name: value}; None without targets."""
        if y.isnan().all():
            return None
        return errors(outputs, y, run.model.target_scale.mean.cpu().double())

    def validate(self, run):
        figures, scores = super().validate(run)
        del figures["valid_sampled"]
        return {"valid": scores, **figures}, scores and -scores[self.metric]

    def say_exact(self, report, exact, how):
        return report.scores(exact)

    def predicted(self, what, outputs):
        return outputs

    def score_text(self, score):
        return f"{scores_line({self.metric: -score})} (sampled)"


def flags(kinds):
    """Declare the flag of the loss."""
    what = "of targets: squared or absolute error"
    return {"weight_decay": dict(loss=kinds.fixed(kinds.one_of(*LOSSES), "mse", what))}
