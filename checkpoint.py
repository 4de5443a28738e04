"""A run's exact state in a file: written whole or not at all, checked before it is used.

Sampling and dropout are functions of --seed and the step, so no generator has a state to keep: weights, optimizer,
schedule, the best epoch of --early-stop and the number of the step are all there is. This file needs disk.py.
"""

import io
import os
import zipfile
from pathlib import Path

import numpy as np
import torch

from disk import StoreError
from own_model import is_own


def save_checkpoint(path, args, model, optimizer, schedule, best, epoch, step):
    """Write the state of the run atomically: the last good file or the new one is there, never half of one.

    Sampling and dropout are functions of --seed and the step, so no generator has a state to keep.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "step": step,
             "schedule": schedule.state_dict(), "best": best}  # fmt: skip
    try:
        with open(temporary, "wb") as file:
            run = {**identity(args), "batch_size": args.batch_size, "model_digest": getattr(args, "model_digest", None)}
            torch.save({**state, "run": run}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        raise StoreError(f"checkpoint {path} could not be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(args, ranks, model, optimizer, schedule, best):
    """Bring model, optimizer, schedule and best to the state of a checkpoint -> (epoch, steps done in it); (0, 0) where none is given.

    Machines need not share a disk: the rank that has the most advanced file gives it to the others.
    """
    path = checkpoint_to_resume(args)
    data, epoch, step = read_checkpoint(path, args) if path else (None, 0, 0)
    progress = ranks.gather(-1 if data is None else epoch * args.steps + step)
    if max(progress) < 0:
        return 0, 0
    data = ranks.broadcast(data, progress.index(max(progress)))
    state = torch.load(io.BytesIO(data), map_location=ranks.device, weights_only=True)
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        raise StoreError(f"the checkpoint does not fit --model {args.model}: {' '.join(str(error).split())[:300]}") from error
    if ranks.leads and is_own(args.model) and state["run"]["model_digest"] != args.model_digest:
        print(f"model   {args.model} is not the text that the checkpoint was made with")
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    best.update(state["best"])
    if ranks.leads:
        print(f"resume  from epoch {state['epoch'] + 1}, step {state['step']}")
    return state["epoch"], state["step"]


def read_checkpoint(path, args):
    """Read and check a checkpoint -> (its bytes, epoch, steps done in it)."""
    try:
        data = Path(path).read_bytes()
        damaged = zipfile.ZipFile(io.BytesIO(data)).testzip()  # torch.load does not look at the checksums
        if damaged:
            raise ValueError(f"{damaged} in it is damaged")
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        saved, epoch, step = state["run"], state["epoch"], state["step"]
    except Exception as error:  # zipfile and torch.load raise a dozen types on a damaged file
        raise StoreError(f"{path} is not a checkpoint of train.py: {(str(error) or repr(error)).splitlines()[0]}") from error
    for name, value in identity(args).items():
        if name == "model" and is_own(str(saved.get(name))) and is_own(value):
            continue  # the file may lie elsewhere; whether the weights fit is seen when they are loaded
        if (was := saved.get(name)) != value and not (args.predict and name == "total_batch"):
            name = "--batch-size x --accumulate x processes =" if name == "total_batch" else f"--{name.replace('_', '-')}"
            raise StoreError(f"checkpoint {path} was made with {name} {was}, this run has {value}")
    return data, epoch, step


def identity(args):
    """What a checkpoint must agree on with the run that resumes it."""
    names = ("task", "dataset", "seed", "fanout", "model", "model_args", "hidden", "num_layers", "heads", "norm", "residual", "dropout",
             "input_dropout", "accumulate")  # fmt: skip
    return {**{name: getattr(args, name) for name in names}, "total_batch": args.total_batch}


def checkpoint_to_resume(args):
    """The file to go on from, or None: --resume auto, and every restart by torchrun, mean that of --checkpoint."""
    own = args.checkpoint if args.checkpoint and Path(args.checkpoint).is_file() else None
    if args.resume == "auto":
        return own
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return own if own and restarted else args.resume


def flags_of_checkpoint(path):
    """The flags that a checkpoint fixes -> dict; empty where it cannot be read, which `load_checkpoint` then says."""
    try:
        saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)["run"]
    except Exception:  # torch.load raises a dozen types on a damaged file
        return {}
    return {name: value for name, value in saved.items() if name != "total_batch"}


def save_predictions(path, predicted):
    """Write classes int64 [V] as .npy, atomically."""
    remove_unfinished(path)
    temporary = Path(path).with_name(f".{Path(path).name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            np.save(file, predicted.numpy())
        os.replace(temporary, path)
    except OSError as error:
        raise StoreError(f"predictions {path} could not be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def remove_unfinished(path):
    """Remove what runs left beside a file when they were killed while they wrote it."""
    path = Path(path)
    for entry in path.absolute().parent.iterdir():
        pid = entry.name.removeprefix(f".{path.name}.")
        if pid.isdigit() and entry.name != pid and not Path("/proc", pid).exists():
            entry.unlink(missing_ok=True)
