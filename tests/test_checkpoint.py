"""Tests: what a checkpoint keeps, what it may be used for and may not do; writing of files."""

import errno
import functools
import importlib.util
import io
import math
import os
import pickle
import re
import resource
import shutil
import signal
import stat
import sys
import threading
import types
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from disk import files as disk
from inference import inference
from run import checkpoint, flags
from sampler import Block
from store import GraphStore, build_store
from tests.common import (
    COMMON,
    _code,
    _end,
    _graph,
    _log,
    _parameters,
    _run_here,
    _same_weights,
    _says,
    _start_fork,
    _stops,
    _train,
    _wait_for,
)
from tests.stores import _molecules, _refuses, _small_disk

SMALL = " ".join(map(str, COMMON))
OWN = """
import torch

class Net(torch.nn.Module):
    def __init__(self, in_dim, num_classes):
        super().__init__()
        self.out = torch.nn.Linear(in_dim, num_classes)

    def forward(self, blocks, x):
        return self.out(x[: blocks[-1].num_dst])
"""


def test_resume_keeps_the_flags_of_the_run_unless_they_are_given_again(tiny, tmp_path, capsys):
    kept = {"lr": 0.02, "lr_schedule": "cosine", "weight_decay": 1e-4, "early_stop": 30}
    kept |= {"precision": "fp64", "epochs": 6, "sampler": "labor", "batch_dependency": 3}
    words = " ".join(f"--{name} {value}" for name, value in kept.items()) + " --layer-dependency"
    words = f"--dataset {tiny} {SMALL} {words}"
    _run_here(tmp_path, words, "--epochs 4 --lr-schedule constant --lr 0.01")
    shutil.copy(tmp_path / "here.pt", tmp_path / "four.pt")
    saved = train.parse_args(["--resume", str(tmp_path / "four.pt")])
    expected = {**kept, "epochs": 4, "lr_schedule": "constant", "lr": 0.01}
    assert expected == {name: getattr(saved, name) for name in kept}
    assert (saved.batch_size, saved.fanout, saved.hidden, saved.seed) == (100, [3, 3], 16, 0)
    assert saved.layer_dependency
    _stops(
        capsys,
        "was made with --batch-dependency 3, this run has 2",
        f"--resume {tmp_path}/four.pt --batch-dependency 2",
    )
    assert _code(f"--resume {tmp_path}/four.pt --lr 0.01 --gpus 0") == 0
    assert "changed" not in (out := capsys.readouterr().out)
    assert "epoch 4: nothing is trained, as --epochs is 4: no effect of --lr\n" in out
    _says(
        capsys,
        "changed  batch-size 100 -> 50, accumulate 1 -> 2\n",
        f"--resume {tmp_path}/four.pt --batch-size 50 --accumulate 2 --gpus 0",
    )
    _, straight = _run_here(tmp_path, words, "--lr-schedule constant --lr 0.01")
    _, resumed = _run_here(tmp_path, f"--resume {tmp_path}/four.pt --epochs 6")
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    capsys.readouterr()
    # given again they count, from the next epoch on; the cosine falls over all epochs, those that are done as well
    more = "--epochs 8 --lr 0.05 --lr-schedule cosine"
    log, _ = _run_here(tmp_path, f"--resume {tmp_path}/four.pt", more)
    changes = "lr 0.01 -> 0.05, lr-schedule constant -> cosine, epochs 4 -> 8"
    assert f"\nchanged  {changes}\n" in capsys.readouterr().out
    rates = [0.05 * (1 + math.cos(math.pi * i / 8)) / 2 for i in range(4, 8)]
    assert [entry["lr"] for entry in log[:-1]] == pytest.approx(rates)
    # six steps an epoch; a checkpoint in the warm-up goes on in it
    words = "--epochs 3 --lr 0.05 --lr-schedule linear --warmup 15 --clip-norm 0.01"
    warm, straight = _run_here(tmp_path, f"--dataset {tiny} {SMALL} {words}")
    assert [entry["lr"] for entry in warm[:3]] == pytest.approx([0.02, 0.04 * 2 / 3, 0.05 / 3])
    assert (
        "0.05, weight decay 0.00012, 15 steps of warm-up, gradients clipped to the norm 0.01"
        in capsys.readouterr().out
    )
    _run_here(tmp_path, f"--dataset {tiny} {SMALL} {words} --epochs 1")
    _, resumed = _run_here(tmp_path, f"--resume {tmp_path}/here.pt {words}")
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_a_run_in_tf32_goes_on_in_fp32_on_cpu(tiny, tmp_path, capsys):
    _run_here(tmp_path, f"--dataset {tiny} {SMALL} --epochs 1")
    state = torch.load(tmp_path / "here.pt", weights_only=True)
    state["flags"]["precision"] = "tf32"  # as on a GPU
    torch.save(state, file := tmp_path / "run.pt")
    assert _code(f"--resume {file} --epochs 2 --gpus 0 --checkpoint {file}") == 0
    out = capsys.readouterr().out
    assert "fp32, as tf32 needs a GPU" in out and "epoch   2/2" in out
    # for a GPU that takes it up again
    assert checkpoint.read_checkpoint(file)["flags"]["precision"] == "tf32"
    _stops(capsys, "needs a CUDA GPU", f"--resume {file} --epochs 3 --gpus 0 --precision tf32")


def test_the_hint_after_ctrl_c_goes_on(tiny, tmp_path):
    """Also if the run began from another checkpoint."""
    words = f"--dataset {tiny} {SMALL} --lr 0.01 --lr-schedule cosine --epochs 12"
    stopped = "--resume first.pt --checkpoint c.pt --predict c.npy --log log --prefetch 0"
    _train(words, "--epochs 2 --checkpoint first.pt", cwd=tmp_path)
    straight = "--resume first.pt --checkpoint straight.pt --predict straight.npy"
    _train(words, straight, cwd=tmp_path)
    process = _start_fork(tmp_path / "out", words, stopped, cwd=tmp_path)
    _wait_for(lambda: "epoch   4" in (tmp_path / "out").read_text(), process)
    os.kill(process.pid, signal.SIGINT)
    printed = _end(process, 128 + signal.SIGINT)
    assert "go on with --resume c.pt --checkpoint c.pt" in printed
    assert not (tmp_path / "c.npy").exists()
    _train(words, stopped, "--resume auto", cwd=tmp_path)
    epochs = [entry["epoch"] for entry in _log(tmp_path / "log") if "epoch" in entry]
    assert epochs == list(range(3, 13))
    assert _same_weights(tmp_path / "straight.pt", tmp_path / "c.pt")
    assert np.array_equal(np.load(tmp_path / "straight.npy"), np.load(tmp_path / "c.npy"))


def test_resume_auto_with_predict_trains_what_is_left(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = f"--dataset {tiny} {SMALL} --lr 0.01 --checkpoint c.pt --resume auto --log log"
    assert _code(words, "--epochs 2") == 0
    words += " --epochs 8 --predict p.npy"
    assert _code(words) == 0
    log, graph = _log(tmp_path / "log"), GraphStore.open(tiny)
    assert [entry["epoch"] for entry in log if "epoch" in entry] == list(range(1, 9))
    right = torch.from_numpy(np.load(tmp_path / "p.npy")) == graph.labels
    assert right[graph.split["test"]].double().mean() > 0.7
    # killed before the last epoch was validated: it has no step left
    state = torch.load(tmp_path / "c.pt", weights_only=True)
    torch.save({**state, "epoch": 7, "step": 6}, tmp_path / "c.pt")
    assert _code(words) == 0
    said = "resume  from epoch 8, step 7\nepoch   8/8 from step 7  loss n/a  valid "
    assert said in capsys.readouterr().out
    assert [entry["loss"] for entry in _log(tmp_path / "log") if "epoch" in entry][8:] == [None]
    # without more epochs, and from a file without --checkpoint, nothing is trained
    copied = "--resume c.pt --checkpoint d.pt"
    for more in (words, copied, predict := "--resume d.pt --predict q.npy"):
        _says(capsys, "nothing is trained", more)
    written = (tmp_path / "d.pt").stat().st_mtime_ns
    assert _code(copied) == 0  # replaces no file that may be further ahead
    assert (tmp_path / "d.pt").stat().st_mtime_ns == written
    _stops(capsys, "--profile t.json shows training", predict, "--profile t.json")
    assert (tmp_path / "p.npy").read_bytes() == (tmp_path / "q.npy").read_bytes()


def test_a_checkpoint_is_tied_to_its_graph_and_predicts_for_others(tmp_path, capsys):
    graph = {**_graph(num_nodes=300, width=6, classes=4), "source": {"classes": [*"abcd"]}}
    path = build_store(tmp_path / "g", **graph)
    _run_here(tmp_path, f"--dataset {path}", *COMMON, "--epochs 1")
    resume = [f"--resume {tmp_path}/here.pt"]
    smaller = _graph(num_nodes=180, width=6, classes=3, seed=1)  # one class does not occur
    wider, labels = _graph(num_nodes=300, width=7, classes=4), np.roll(graph["labels"], 1)
    for name, arrays, said, code in (
        ("labels", {**graph, "labels": labels}, "labels.npy in .* is not the same", 0),
        ("features", {**graph, "features": graph["features"] + 1}, "features.npy in .* is not", 0),
        ("width", wider, "was trained on a graph with feature_dim 6, .* has 7", 2),
        ("classes", {**graph, "num_classes": 5}, "with num_classes 4, .* has 5", 2),
        ("names", {**graph, "source": {"classes": [*"bcde"]}}, "whose classes are a; b; c; d;", 2),
        ("smaller", smaller, "with num_classes 4, .* has 3", 0),
    ):
        build_store(tmp_path / name, **arrays)
        assert _code(*resume, "--dataset", tmp_path / name, "--epochs 2") == 2
        assert re.search(said, capsys.readouterr().err), name
        predict = f"--predict {tmp_path}/{name}.npy"
        assert _code(*resume, "--dataset", tmp_path / name, predict) == code, name
        # without its name a class is its number, which may stand for another name
        assert ("classes go by number: " in capsys.readouterr().out) == (name == "smaller"), name
    assert np.load(tmp_path / "smaller.npy").shape == (180,)
    path = build_store(tmp_path / "l", backend="lmdb", **graph)
    _run_here(tmp_path, f"--dataset {path}", *COMMON, "--epochs 1")
    # as trainers may see it happen: rows that LMDB has changed are not compared
    GraphStore.open(path).features.put_rows(torch.tensor([3]), torch.zeros(1, 6))
    assert _code(*resume, "--epochs 2") == 0
    build_store(tmp_path / "h", backend="lmdb", **{**graph, "features": graph["features"] + 1})
    _stops(capsys, "features.lmdb", *resume, f"--epochs 2 --dataset {tmp_path}/h")
    # of other small graphs with the same split, and of another file of --edge-split
    words = f"--root {tmp_path} --epochs 1 --hidden 8 --checkpoint {tmp_path}/here.pt"
    for name in "mn":
        _atoms(tmp_path / f"{name}.npz", np.arange(40.0) + (name == "n"))
    assert _code(words, f"--task graph --dataset {tmp_path}/m.npz") == 0
    _stops(
        capsys, "graphs.lmdb", *resume, "--root", tmp_path, f"--dataset {tmp_path}/n.npz --epochs 2"
    )
    assert _code(f"--dataset {path} --checkpoint {tmp_path}/n.pt --epochs 1", *COMMON) == 0
    for other, data, said in (
        (*resume, path, "is of --task graph, .* holds one graph"),
        (f"--resume {tmp_path}/n.pt", tmp_path / "m.npz", "is of --task node, .* holds many"),
    ):
        for more in (f"--predict {tmp_path}/p.npy", "--epochs 2"):
            assert _code(other, "--root", tmp_path, "--gpus 0 --dataset", data, more) == 2
            assert re.search(said, err := capsys.readouterr().err), err
    for test in (0, 1):
        np.savez(tmp_path / "s.npz", test=[[0, 1 + test]])
        if not test:
            assert _code(words, f"--task link --edge-split {tmp_path}/s.npz --dataset", path) == 0
    _stops(capsys, f"{tmp_path}/s.npz in ", *resume, "--epochs 2")
    assert _code(*resume, "--predict", tmp_path / "p.npy") == 0


def test_each_seed_of_several_runs_has_a_checkpoint(tmp_path, capsys):
    """It is that of a run with this seed and the split whose turn it was, which it names; all are claimed at the start."""
    graph = _graph(num_nodes=200, width=6, classes=3)
    splits = [
        {name: list(range(k, 200, 9)) for name, k in zip(disk.SPLITS, order)}
        for order in ((0, 1, 2), (3, 4, 5))
    ]
    path = build_store(tmp_path / "g", **{**graph, "split": splits})
    words = f"--dataset {path} --epochs 2 --log {tmp_path}/log", *COMMON
    several = *words, f"--runs 2 --seed 3 --checkpoint {tmp_path}/r.v1.pt"
    several += (f"--predict {tmp_path}/p.npy",)
    with checkpoint.claimed(tmp_path / "r.v1-seed4.pt"):
        assert _code(*several) == 2
    assert "another run writes it" in capsys.readouterr().err
    assert _code(*several) == 0
    files = ["p-seed3.npy", "p-seed4.npy", "r.v1-seed3.pt", "r.v1-seed4.pt"]
    assert sorted(p.name for p in tmp_path.glob("*.*")) == files
    exact = [line["exact"] for line in _log(tmp_path / "log") if "exact" in line]
    for turn in (0, 1):
        file = tmp_path / f"r.v1-seed{3 + turn}.pt"
        one = f"--seed {3 + turn} --split {turn} --checkpoint {tmp_path}/one.pt"
        assert _code(*words, one) == 0
        torch.testing.assert_close(
            _parameters(file), _parameters(tmp_path / "one.pt"), rtol=0, atol=0
        )
        again = f"--resume {file} --predict {tmp_path}/p.npy --gpus 0 --log {tmp_path}/again"
        assert _code(again) == 0
        assert _log(tmp_path / "again")[-1]["exact"] == exact[turn]
    capsys.readouterr()
    assert _code(*several, "--epochs 1") == 0
    file = tmp_path / "r.v1-seed3.pt"
    assert f"replace {file} of an earlier run; --resume {file} would" in capsys.readouterr().out


@pytest.mark.parametrize("model, backend", [("sage", "mmap"), ("gat", "lmdb"), ("net", "mmap")])
def test_predictions_go_by_the_names_of_the_feature_columns(model, backend, tmp_path, capsys):
    """Columns in another order give the same logits, bit for bit, as exact and as sampled; other names are refused."""
    (tmp_path / "net.py").write_text(OWN)
    model = f"{tmp_path}/net.py:Net" if model == "net" else model
    graph, names = _graph(width=3), ["age", "income", "rooms"]
    x, order, paths = graph.pop("features"), [2, 0, 1], {}
    for name, rows, columns in (
        ("x", x, names),
        ("other", x[:, order], [names[j] for j in order]),
        ("renamed", x, ["age", "salary", "rooms"]),
        ("unnamed", x, None),
    ):
        given = {**graph, "features": rows, "feature_names": columns, "backend": backend}
        paths[name] = build_store(tmp_path / name, **given)
    stores = {name: GraphStore.open(path) for name, path in paths.items()}
    assert stores["x"].feature_names == names and stores["unnamed"].feature_names is None
    words = f"--fanout 3,3 --batch-size 100 --gpus 0 --model {model} --epochs 2"
    assert _code(words, f"--dataset {paths['x']} --checkpoint {tmp_path}/c.pt") == 0
    predict = f"--resume {tmp_path}/c.pt --model {model} --gpus 0 --predict-what logits"
    printed, logits = {}, {}
    for name, path in paths.items():
        capsys.readouterr()
        file = tmp_path / f"{name}.npy"
        code = _code(predict, f"--dataset {path} --predict {file}")
        printed[name] = "".join(capsys.readouterr())
        assert code == 2 * (name == "renamed"), printed[name]
        logits[name] = np.load(file) if code == 0 else None
    assert (logits["x"] == logits["other"]).all() and (logits["x"] == logits["unnamed"]).all()
    said = f"has the features of {tmp_path}/c.pt in another order: they go by name"
    assert said in printed["other"] and said not in printed["x"]
    lost = f"whose features are age; income; rooms; {paths['renamed']} has salary"
    assert lost in printed["renamed"]
    assert f"features go by number: {paths['unnamed']} has no names" in printed["unnamed"]
    reordered, plain = stores["other"], stores["x"].features.gather(torch.arange(200))
    for wrong in (names[:2], [*names, "z"], ["age", "age", "rooms"]):
        _refuses("columns age, .* are asked for, it has rooms, age", reordered.take_columns, wrong)
    reordered.take_columns(names)
    copy, out = pickle.loads(pickle.dumps(reordered)), torch.empty(200, 3)
    assert torch.equal(copy.features.gather(torch.arange(200), out=out), plain)
    assert torch.equal(out, plain) and copy.feature_names == names


def test_a_rank_without_a_file_takes_state_and_flags_from_the_others(tiny, tmp_path):
    _run_here(tmp_path, f"--dataset {tiny}", *COMMON, "--epochs 1 --precision fp64 --lr 0.02")
    data = (tmp_path / "here.pt").read_bytes()
    others = types.SimpleNamespace(world=2, rank=1, broadcast=lambda mine, source: data)
    others.gather = lambda mine: [mine if isinstance(mine, dict) else 1 << 28, mine]
    words = f"--dataset {tiny} --checkpoint {tmp_path}/none.pt --resume auto --lr 0.04"
    args = train.parse_args(words.split())
    state, path, args = checkpoint.common_state(others, args)
    assert state["epoch"] == 1 and path == str(tmp_path / "none.pt")
    kept = args.precision, args.lr, args.hidden, args.batch_size, args.dataset
    assert kept == ("fp64", 0.04, 16, 100, tiny)


def test_a_damaged_checkpoint_is_refused_by_name_and_names_no_file_to_write(tiny, tmp_path, capsys):
    _run_here(tmp_path, f"--dataset {tiny}", *COMMON, "--epochs 1")
    good, bad = (tmp_path / "here.pt").read_bytes(), tmp_path / "bad.pt"
    with zipfile.ZipFile(tmp_path / "here.pt") as archive:
        inside = max(archive.infolist(), key=lambda info: info.file_size)
    flipped = bytearray(good)
    flipped[inside.header_offset + 300] ^= 1  # in a tensor: torch.load would take it
    for damaged in (flipped, good[: len(good) // 2], b""):
        bad.write_bytes(damaged)
        _refuses("bad.pt is not a checkpoint", checkpoint.read_checkpoint, bad)
    expected = checkpoint.read_checkpoint(bad, good)["model"]
    entries = [entry.start() for entry in re.finditer(b"PK\x01\x02", good)]
    assert len(entries) > 5
    for start in entries:  # of the central directory
        folder = bytearray(good)
        folder[start + 38] |= 0x10  # torch.load takes a small tensor there for one of zeros
        model = checkpoint.read_checkpoint(bad, bytes(folder))["model"]
        assert all(torch.equal(value, expected[name]) for name, value in model.items())
    state, victim = torch.load(tmp_path / "here.pt", weights_only=True), tmp_path / "victim"
    victim.write_text("mine")
    files = dict.fromkeys("checkpoint log predict root tensorboard".split(), str(victim))
    torch.save({**state, "flags": {**state["flags"], **files}}, bad)
    assert _code(f"--resume {bad} --dataset {tiny} --epochs 2") == 0
    assert victim.read_text() == "mine"
    moments, best = state["optimizer"], state["best"]
    for said, change in (
        ("bad.pt is not a checkpoint of train.py: Error.s. in loading", {"model": {}}),
        ("bad.pt is not a checkpoint of train.py: a count in it is", {"epoch": -1}),
        ("bad.pt cannot be read: Error.s. in loading", {"best": {**best, "model": {"a": moments}}}),
        ("bad.pt cannot be read: parameter 0 has no moments of Adam", {"optimizer": {0: {}}}),
        ("bad.pt cannot be read: list index", {"optimizer": {**moments, 99: moments[0]}}),
    ):
        torch.save(state | change, bad)
        capsys.readouterr()
        assert _code(f"--resume {bad} --dataset {tiny} --epochs 2") == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and re.search(said, lines[0]), lines
    bad.write_bytes(b"nothing")  # looked at before the default graph is built
    assert _code(f"--resume {bad} --root {tmp_path}/root") == 2 and not (tmp_path / "root").exists()


def test_what_is_checked_of_a_checkpoint_is_what_is_loaded():
    """In a file with two directories zipfile reads one, torch the other."""
    files = io.BytesIO(), io.BytesIO()
    for value, file in enumerate(files):
        torch.save({"a": torch.full((9,), value)}, file)
    both = b"".join(file.getvalue() for file in files)
    assert torch.load(io.BytesIO(both), weights_only=True)["a"].eq(0).all()
    assert torch.load(checkpoint.checked_archive(both), weights_only=True)["a"].eq(1).all()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"x" * 999)
    _refuses("larger than", checkpoint.checked_archive, packed.getvalue(), error=ValueError)


def test_two_runs_at_once_do_not_write_one_checkpoint(tiny, tmp_path, capsys):
    words = [f"--dataset {tiny} --epochs 1", *COMMON]
    checkpoint.claimed(os.fsdecode(b"\xff")).close()  # a name that is not UTF-8
    with checkpoint.claimed(tmp_path / "run.pt"):
        for name in ("run.pt", f"../{tmp_path.name}/run.pt"):
            flag = f"--checkpoint {tmp_path}/{name}"
            _stops(capsys, f"{flag}: another run writes it", *words, flag)
    for _ in range(2):  # a claim ends with its run
        assert _code(*words, f"--checkpoint {tmp_path}/run.pt") == 0
    assert {path.name for path in tmp_path.iterdir()} == {"run.pt"}


def test_a_run_starts_from_the_weights_of_a_checkpoint(tiny, tmp_path, capsys):
    """With its own flags, but for the outputs of another number of classes; what it was trained on is kept."""
    first = _run_here(tmp_path, f"--dataset {tiny} {SMALL} --epochs 2 --weights last")[1]
    shutil.move(tmp_path / "here.pt", start := tmp_path / "start.pt")
    words = f"{SMALL} --init {start} --epochs 1 --lr 1e-9 --dropout 0.2 --dataset"
    weights = _run_here(tmp_path, words, tiny)[1]
    torch.testing.assert_close(weights, first, rtol=1e-4, atol=1e-6)
    assert f"init    weights of {start}, after epoch 2\n" in capsys.readouterr().out
    graph = _graph(num_nodes=300, width=16, classes=8)
    parts = np.arange(300).reshape(3, 100)
    graph["features"] = GraphStore.open(tiny).features.tensor[:300]
    other = build_store(tmp_path / "g", **graph | {"split": dict(zip(disk.SPLITS, parts))})
    weights = _run_here(tmp_path, words, other)[1]
    assert "; the output starts fresh: layers.1.self_linear.weight, " in capsys.readouterr().out
    for name in first:
        same = torch.allclose(weights[name][: len(first[name])], first[name], rtol=1e-4)
        assert same == name.startswith("layers.0"), name
    # a training node of the first run of two is a test node of the second
    swapped = dict(zip(disk.SPLITS, parts[::-1]))
    again = build_store(tmp_path / "again", **graph | {"split": swapped})
    words = words.replace("start.pt", "here.pt")
    _says(capsys, "trained on 100 of 100 test nodes", words, again, f"--checkpoint {start}")
    assert len(checkpoint.read_checkpoint(start)["trained"]) == 200
    named = [f"f{i}" for i in range(16)]
    for part in ("there", "here"):
        named.reverse()
        build_store(tmp_path / part, **graph, feature_names=named)
    _run_here(tmp_path, SMALL, "--epochs 1 --dataset", tmp_path / "there")
    for more, said in (
        (f"{tiny} --hidden 8", "self_linear.weight is [16, 16] there, [8, 16] in this run"),
        (
            f"{tiny} --num-layers 3 --fanout 2,2,2",
            "it was made with --model sage --hidden 16 --num-layers 2",
        ),
        (tmp_path / "here", "feature_names are f15, f14, "),
        (f"{tiny} --resume {start}", "goes on with one: give one of them"),
    ):
        _stops(capsys, said, words, more)


def test_logits_that_start_from_a_network_of_targets_are_not_scaled(tmp_path, capsys):
    arrays = _molecules(tmp_path / "m.npz")
    y = 1.0 * (arrays.pop("targets") > 4)
    np.savez(tmp_path / "labels.npz", **arrays, labels=y)
    words = f"--task graph --gpus 0 --root {tmp_path} --hidden 8 --epochs 1 --dataset {tmp_path}"
    assert _code(f"{words}/m.npz --checkpoint {tmp_path}/start.pt") == 0
    words += f"/labels.npz --init {tmp_path}/start.pt"
    weights = _run_here(tmp_path, words)[1]
    assert weights["mean"] == 0 and weights["std"] == 1
    _stops(capsys, r"size is \[\] there, missing in .* --pooling sum", words, "--pooling mean")


def test_a_network_of_ones_own_writes_embeddings(load_file, tiny, tmp_path, capsys):
    """Those of its method."""
    (tmp_path / "net.py").write_text(
        f"{OWN}\n    def embeddings(self, blocks, x):\n        return 2 * x[: blocks[-1].num_dst]\n"
    )
    words = f"--dataset {tiny} --epochs 1 --fanout 2 --gpus 0 --predict {tmp_path}/h.npy --predict-what embeddings --model"
    assert _code(words, f"{tmp_path}/net.py:Net") == 0
    features = GraphStore.open(tiny).features.tensor.numpy()
    assert np.array_equal(np.load(tmp_path / "h.npy"), 2 * features)
    (tmp_path / "none.py").write_text(OWN)
    _stops(capsys, "needs a method embeddings(blocks, x)", words, f"{tmp_path}/none.py:Net")


def test_predictions_are_classes_logits_or_embeddings(tiny, tmp_path):
    words = [f"--dataset {tiny} --model gat --residual --norm layer", *COMMON, "--epochs 2"]
    _run_here(tmp_path, *words, f"--predict {tmp_path}/trained.npy --predict-what logits")
    arrays = {}
    for what in ("classes", "logits", "embeddings"):
        file = tmp_path / f"{what}.npy"
        assert _code(f"--resume {tmp_path}/here.pt --predict {file} --predict-what {what}") == 0
        arrays[what] = np.load(file)
    kinds = [(np.int64, (3000,)), (np.float32, (3000, 4)), (np.float32, (3000, 16))]
    assert [(array.dtype, array.shape) for array in arrays.values()] == kinds
    assert (arrays["logits"].argmax(1) == arrays["classes"]).all()
    assert (arrays["embeddings"] >= 0).all()
    np.testing.assert_array_equal(arrays["logits"], np.load(tmp_path / "trained.npy"))
    graph, net = GraphStore.open(tiny), checkpoint.load_model(tmp_path / "here.pt")
    assert not net.training
    block = Block(graph.indptr, graph.indices, torch.arange(3000), None)
    with torch.no_grad():  # the last layer over the embeddings gives the logits
        last = net.step(1, block, torch.from_numpy(arrays["embeddings"]))
    np.testing.assert_allclose(last.numpy(), arrays["logits"], rtol=1e-4, atol=1e-5)


def test_a_file_is_written_whole_and_nothing_is_left_beside_it(tmp_path, monkeypatch):
    file = tmp_path / "run.pt"
    disk.write_whole(file, lambda out: out.write(b"one"))
    file.chmod(0o600)
    for name in (f".run.pt.{'0' * 16}.part", ".run.pt.notes", f".run.pt2.{'0' * 16}.part"):
        (tmp_path / name).touch()  # the first is what a writer that was killed has left

    def fails(out):
        out.write(b"half")
        raise RuntimeError("no more")

    def fills(out):  # torch.save complains of what came after a write that failed
        try:
            raise OSError(errno.ENOSPC, "no space left")
        except OSError:
            fails(out)

    _refuses("run.pt could not be written: no more", disk.write_whole, file, fails)
    _refuses("run.pt could not be written: no space left", disk.write_whole, file, fills)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        save = functools.partial(np.save, arr=np.zeros(9999))
        _refuses(
            "could not be written: no space may be left: 9999 req", disk.write_whole, file, save
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(disk.StoreError, match="e.csv takes temporary files: No space left on"):
        with disk.reading("e.csv"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert file.read_bytes() == b"one"
    disk.write_whole(file, lambda out: out.write(b"two"))
    assert file.read_bytes() == b"two" and file.stat().st_mode & 0o777 == 0o600
    left = [".run.pt.notes", f".run.pt2.{'0' * 16}.part", "run.pt"]
    assert sorted(p.name for p in tmp_path.iterdir()) == left

    def meanwhile(out):  # another writer of the same file leaves this one's part alone
        disk.write_whole(file, lambda inner: inner.write(b"inner"))
        out.write(b"outer")

    disk.write_whole(file, meanwhile)
    assert file.read_bytes() == b"outer" and len(list(tmp_path.iterdir())) == 3

    def chmod(path, mode):
        raise PermissionError(errno.EPERM, "this file system has no modes")

    monkeypatch.setattr(os, "chmod", chmod)
    disk.write_whole(file, lambda out: out.write(b"three"))
    assert file.read_bytes() == b"three"


def test_a_path_that_is_too_long_is_one_sentence(tiny, tmp_path, capsys):
    for flag in ("checkpoint", "resume", "predict", "log"):
        for name in ("y" * 4095, f"{tmp_path}/{'x/' * 2000}", f"{tmp_path}/{'y' * 256}"):
            assert _code(f"--dataset {tiny} --{flag} {name}", *COMMON, "--epochs 1") == 2
            said = capsys.readouterr().err.splitlines()[-1]
            assert re.search("No such file|File name too long|bytes: at most [0-9,]+", said), said
    disk.write_whole(tmp_path / ("é" * 127), lambda out: out.write(b"long"))
    assert [entry.read_bytes() for entry in tmp_path.iterdir()] == [b"long"]


def test_devices_pipes_and_links_stay_what_they_are(tiny, tmp_path):
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    disk.write_whole(pipe, lambda out: np.save(out, np.arange(3)))
    reader.join(20)
    assert np.load(io.BytesIO(got[0])).tolist() == [0, 1, 2] and pipe.is_fifo()
    (tmp_path / "link").symlink_to("target")
    disk.write_whole(tmp_path / "link", lambda out: out.write(b"through"))
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_bytes() == b"through"
    null = tmp_path / "null"
    with suppress(PermissionError):
        os.mknod(null, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        disk.write_whole(null, lambda out: out.write(b"away"))
        assert _code(f"--dataset {tiny}", *COMMON, f"--epochs 1 --checkpoint {null}") == 0
        assert null.is_char_device() and not list(tmp_path.glob(".*"))


def test_heads_of_early_rgat_are_not_read_into_a_layer_of_a_file():
    graph = {"edge_dim": 0, "num_edge_types": 4}
    for model, heads in (("rgat", 1), ("mine.py:Mine", 4)):
        saved = flags.Flags(model=model, heads=4)
        weights = {"layers.0.query": torch.ones(4, 3)}
        assert checkpoint.settled_flags(saved, graph, weights)["heads"] == heads


@pytest.fixture
def load_file(monkeypatch):
    """`load_file` of safetensors.torch; where the library is not installed, its two functions are torch's."""
    if importlib.util.find_spec("safetensors"):
        return importlib.import_module("safetensors.torch").load_file

    def save(weights, metadata):
        torch.save(weights, content := io.BytesIO())
        return content.getvalue()

    def load(path):
        return torch.load(io.BytesIO(Path(path).read_bytes()))

    spec = types.SimpleNamespace()
    library = types.SimpleNamespace(save=save, load_file=load, __spec__=spec)
    for name in ("safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, name, library)
    return library.load_file


def test_an_export_is_that_of_a_resumed_run_and_nothing_to_resume(
    load_file, tiny, tmp_path, capsys
):
    folder = tmp_path / "made" / "here"
    kept = tmp_path / "run.pt"
    command = f"--dataset {tiny} {SMALL} --norm batch --model gcn --epochs 1"
    assert _code(command, f"--export {folder} --checkpoint {kept}") == 0
    assert "wrote " in (said := capsys.readouterr().out) and "is lost" not in said
    again = tmp_path / "again"
    resumed = f"--resume {kept} --dataset {tiny} --gpus 0 --export {again}"
    assert _code(resumed) == 0
    assert "epoch   " not in capsys.readouterr().out
    _says(capsys, f"replaced {again}: ", resumed)
    _stops(
        capsys,
        f"{again} is an exported network: give the file of --check",
        f"--resume {again} --predict {tmp_path}/p.npy",
    )
    for name in ("model.safetensors", "config.json"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()


EXPORTED = {  # flags, custom network of a file
    "plain": ("--norm batch", None),
    "edge features": ("--model rgcn --edge-features --bases 2", None),
    "types": ("--dataset synthetic-mag:scale=0.0005 --model rgat --fanout 2,2 --hidden 8", None),
    "links": ("--task link --scorer mlp", None),
    "graphs": ("--task graph --dataset m.npz --model edge-gated", None),
    "layer": ("--model own.py:MeanConv", "MeanConv"),
    "network": ("--model own.py:Net", "Net"),
}
OWN_LAYER = """
from model import Conv, Linear

class MeanConv(Conv):
    def __init__(self, in_dim, out_dim):
        super().__init__()
        self.out_dim = out_dim
        self.linear = Linear(2 * in_dim, out_dim)

    def combine(self, near):
        return self.linear(near.self_and_mean())
"""


def _atoms(file, targets, **split):
    """Write 40 graphs of one node each."""
    features = np.random.default_rng(0).random((40, 3))
    nodes = {"node_offsets": np.arange(41), "atom_feat": features, "targets": targets}
    bonds = {"bond_offsets": np.zeros(41, int), "bond_feat": np.ones((0, 1))}
    np.savez(file, **nodes, **bonds, bond_index_local=np.zeros((2, 0), int), **split)


@pytest.mark.parametrize("kind", EXPORTED)
def test_the_documented_lines_load_an_exported_model(kind, load_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN + OWN_LAYER)
    edges = {"edge_features": np.random.default_rng(0).random((3000, 2), "f")}
    edges |= {"edge_type": np.arange(3000) % 3}
    build_store("g", **_graph(), **edges)
    _atoms("m.npz", np.arange(40.0))
    words, custom = EXPORTED[kind]
    command = "--epochs 1 --gpus 0 --root root --export cora_model --checkpoint run.pt"
    if "--dataset" not in words:
        words += " --dataset g --fanout 3,3"
    if custom != "Net" and "--hidden" not in words:
        words += " --hidden 16"
    assert _code(command, words) == 0
    text = Path(checkpoint.__file__).parents[1].joinpath("docs/models.md").read_text()
    loads = re.findall(r"```python\n(import json\n.*?)```", text, re.DOTALL)
    assert len(loads) == 2
    if custom:
        made = {}
        exec(Path("own.py").read_text(), made)
        own = made[custom] if custom == "MeanConv" else made[custom](5, 4)
        with pytest.raises(disk.StoreError, match="these are weights of own.py"):
            exec(loads[0], {})
        loads[0] = loads[0].replace("(config)", "(config, own)")
    loads = [lines for lines in loads if kind == "plain" or "described_network" in lines]
    expected = torch.load("run.pt", weights_only=True)
    expected = expected["best"]["model"] or expected["model"]
    for lines in loads:
        names = {"own": own} if custom else {}
        exec(lines, names)
        weights = names["net"].state_dict()
        assert not names["net"].training and {*weights} == {*expected}
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
        if kind == "plain":
            graph = GraphStore.open("g")
            logits = inference(names["net"], graph.indptr, graph.indices, graph.features)
            again = "--resume run.pt --predict p.npy --predict-what logits --gpus 0"
            assert _code(again) == 0 and np.array_equal(logits.numpy(), np.load("p.npy"))


def test_an_export_that_cannot_be_written_is_refused_at_the_start(
    load_file, tiny, tmp_path, capsys, monkeypatch
):
    (tmp_path / "file").touch()
    inside = f"cannot be made: {tmp_path}/file is no folder"
    for path, why in (
        (f"{tmp_path}/file", inside),
        (f"{tmp_path}/file/in", inside),
        (tiny, "is a store"),
    ):
        assert _code(f"--dataset {tiny} --gpus 0 --export {path}") == 2
        out, err = capsys.readouterr()
        assert f"--export {path} {why}" in err and not out
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    _stops(
        capsys, "--export x needs: pip install safetensors", f"--dataset {tiny} --gpus 0 --export x"
    )


def test_a_full_disk_for_an_export_leaves_the_scores_of_a_run(load_file, tiny, tmp_path, capsys):
    with _small_disk(tmp_path, 4096) as small:
        assert _code(f"--dataset {tiny} {SMALL} --epochs 1 --export {small}/x") == 2
        out, err = capsys.readouterr()
        assert "\nresult  accuracy: test " in out and "could not be written: No space left" in err


def test_scores_of_examples_that_were_trained_on_are_told_apart(tmp_path, capsys):
    """By names where nodes have them, else by row numbers in the same features; else a line says that it is unknown."""
    graph = _graph(num_nodes=300, width=6, classes=4)
    parts = np.arange(300).reshape(3, 100)
    a, b, c = parts
    other = [np.r_[a[:30], c[:70]], b, np.r_[a[30:], c[70:]]]  # test: 70 trained on
    names = [f"Ürün {node}" for node in range(300)]
    moved = {name: graph[name][::-1] for name in ("features", "labels")}
    moved |= {"edge_index": 299 - graph["edge_index"], "node_names": names[::-1]}

    def built(name, split, **arrays):
        split = dict(zip(disk.SPLITS, split))
        return build_store(tmp_path / name, **{**graph, **arrays, "split": split})

    plain, named = built("plain", parts), built("named", parts, node_names=names)
    for path in (plain, named):
        _run_here(tmp_path, f"--dataset {path}", *COMMON, "--epochs 1")
        (tmp_path / "here.pt").rename(f"{path}.pt")
    shifted = built("shifted", other, features=graph["features"] + 1)
    again = built("named, split again", other, node_names=names)
    said = "the checkpoint was trained on 70 of 100 test nodes; without them test "
    unknown = "nodes that were trained on, which cannot be told: "
    for by, path, expected in (
        (plain, plain, None),
        (plain, built("plain, split again", other), said),
        (plain, shifted, f"{unknown}features.npy is not the same"),
        (plain, again, f"{unknown}only one of"),
        (named, again, said),
        (named, built("moved", [299 - ids for ids in other], **moved), said),
    ):
        capsys.readouterr()
        flags = f"--resume {by}.pt --predict {tmp_path}/p.npy --log {tmp_path}/log --dataset"
        assert _code(flags, path) == 0
        out = capsys.readouterr().out
        assert expected in out if expected else "trained on" not in out, out
        if expected == said:
            store = GraphStore.open(path)
            test = store.split["test"]
            nodes = test[(299 - test if path.name == "moved" else test) >= 200]
            right = torch.from_numpy(np.load(tmp_path / "p.npy"))[nodes] == store.labels[nodes]
            line = _log(tmp_path / "log")[-1]
            score = right.double().mean().item()
            assert line["without_them"] == {"test": pytest.approx(score)}
            assert line["trained_on"] == {"test": 70} and f"{said}{100 * score:.2f}%" in out
    state = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert state["trained"].tolist() == list(range(100))
    torch.save({**state, "trained": torch.zeros(3)}, tmp_path / "forged.pt")
    _refuses("no list of int64", checkpoint.read_checkpoint, tmp_path / "forged.pt")
    del state["trained"]  # as early checkpoints
    torch.save(state, tmp_path / "early.pt")
    assert _code(f"--resume {tmp_path}/early.pt --predict {tmp_path}/p.npy --dataset {plain}") == 0


def test_graphs_and_pairs_that_were_trained_on_are_told(load_file, tiny, tmp_path, capsys):
    """Graphs by their numbers in the same file; of pairs only that others may be held out."""
    ids = np.arange(40)
    for name, first, last, shift in (("a", 20, 30, 0), ("b", 10, 15, 0), ("c", 20, 30, 1)):
        split = {"train_idx": ids[:first], "val_idx": ids[first:last], "test_idx": ids[last:]}
        _atoms(tmp_path / f"{name}.npz", ids + 0.5 + shift, **split)
    edges = build_store(tmp_path / "g", **_graph(width=16))
    common = f"--gpus 0 --root {tmp_path} --epochs 1 --hidden 8 --checkpoint"
    assert _code(f"{common} {tmp_path}/m.pt --task graph --dataset {tmp_path}/a.npz") == 0
    assert _code(f"{common} {tmp_path}/l.pt --task link --dataset {tiny} --fanout 2") == 0
    unknown = "that were trained on, which cannot be told: "
    for words, said in (
        (f"m.pt --dataset {tmp_path}/a.npz", None),
        (f"m.pt --dataset {tmp_path}/b.npz", "on 5 of 5 valid graphs; without them valid n/a"),
        (f"m.pt --dataset {tmp_path}/b.npz", "on 5 of 25 test graphs; without them test RMSE "),
        (f"m.pt --dataset {tmp_path}/c.npz", f"graphs {unknown}graphs.lmdb is not the same"),
        (f"l.pt --dataset {tiny}", None),
        (f"l.pt --dataset {tiny} --edge-split 50/25/25", f"edges {unknown}other pairs are held"),
        (f"l.pt --dataset {tiny} --edge-split none", None),
        (f"l.pt --dataset {edges}", f"edges {unknown}indices.npy, indptr.npy is not the same"),
    ):
        capsys.readouterr()
        again = f"--gpus 0 --root {tmp_path} --export {tmp_path}/out --resume {tmp_path}/{words}"
        assert _code(again) == 0
        out = capsys.readouterr().out
        assert said in out if said else "trained on" not in out, out
