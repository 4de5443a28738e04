"""Warm start: train from the weights of a checkpoint, with other flags or on other data.

python train.py --dataset mine.npz --init run.pt --lr 0.0003
"""

import re

from disk.files import StoreError, listed

SHAPE = "model", "hidden", "num_layers", "pooling"  # flags that shape the weights


def start(run):
    """Load the weights of --init into the network of a run -> a line about them, "" without the flag. The layer of outputs
    of another number starts fresh, as does a scorer of links; StoreError for other weights that do not fit."""
    # the flags import this file, and these modules the flags
    from run.checkpoint import files_here, names_of, read_checkpoint, tell_trained
    from run.flags import spelled

    plan = run.plan
    if not plan.init:
        return ""
    state = read_checkpoint(plan.init)
    graph = state["graph"]
    for name in ("feature_names", "edge_types"):
        here = names_of(run.store)[name]
        if here and graph[name] and here != graph[name]:
            problem = f"--init {plan.init}: {name} are {listed(graph[name])}"
            raise StoreError(f"{problem}; {run.store.path} has {listed(here)}")
    weights = state["best"]["model"] or state["model"]
    new = run.model.state_dict()
    last = rf"(layers|residuals)\.{plan.num_layers - 1}\.|head|mean|std|target_scale|scorer\."
    fresh = []
    for name in {**new, **weights}:
        was, here = ([*of[name].shape] if name in of else "missing" for of in (weights, new))
        if was == here:
            continue
        # of a network of a file: what differs in the number of its rows alone
        rows_differ = plan.conv is None and was and here and was[1:] == here[1:]
        if not (rows_differ or re.match(last, name)):
            made = " ".join(f"{spelled(n)} {state['flags'][n]}" for n in SHAPE if state["flags"][n])
            raise StoreError(
                f"--init {plan.init}: {name} is {was} there, {here} in this run; "
                f"it was made with {made}"
            )
        fresh.append(name)
    run.model.load_state_dict(new | {n: t for n, t in weights.items() if n not in fresh})
    run.task.set_buffers(run.model)
    line = f"init    weights of {plan.init}, after epoch {state['best']['epoch'] or state['epoch']}"
    if fresh:
        line += f"; the output starts fresh: {listed(fresh)}"
    if state["flags"]["task"] == plan.task:
        line += f"\n{tell_trained(run.task, plan, state, files_here(run.store))}"
    return line.rstrip()


def flags(kinds):
    """Declare the flag of a warm start."""

    def anew(flags):
        if flags.resume not in (None, "auto"):
            return f"begins a training, --resume {flags.resume} goes on with one: give one of them"

    what = "start from the weights of a checkpoint; other flags and data may be others"
    return {"resume": dict(init=kinds.free(kinds.text("FILE"), None, what, needs=[anew]))}
