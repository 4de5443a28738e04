"""Tests: train.py and ddp.py: the real script where processes, signals and ranks are tested, else in forks."""

import ast
import ctypes
import functools
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

import ddp
import train
from disk import files, terminal
from inference import inference
from model import SAGE
from run import allocator, flags, kinds, placement
from sources import cli
from store import GraphStore
from tests.common import (
    COMMON,
    HERE,
    TINY,
    _code,
    _end,
    _fork,
    _log,
    _rows,
    _run_here,
    _same_for_any_number_of_processes,
    _same_weights,
    _split,
    _start,
    _start_fork,
    _stops,
    _store,
    _train,
    _wait_for,
)
from tests.stores import _events, _reseal

# file, flags, what is said: by exact inference, when degrees are counted, in sampling, by one rank
DAMAGED = """
indices | --model sage              | holds 1000, and its nodes are 0 to 199
indices | --model gcn               | holds 1000, and its nodes are 0 to 199
indices | --model sage --cache 1000 | the graph is damaged:
indices | --model sage --fanout=-1,-1 | a node id in indices is out of range
indices | --model sage --procs 2    | holds 1000, and its nodes are 0 to 199
indptr  | --model sage              | in indptr
indptr  | --task link               | python store.py verify names the file
indices | --task link               | python store.py verify names the file
train   | --model sage              | 'train' holds node 1000
labels  | --model sage              | is 1000: labels lie in [0, 4)
"""


def test_train_a_damaged_store_ends_in_a_sentence(tmp_path, capsys):
    for number, (file, words, message) in enumerate(_rows(DAMAGED)):
        path = _store(tmp_path / str(number))
        # the end of indptr is looked at when the store is opened
        places = {"labels": int(GraphStore.open(path).split["valid"][0]), "indptr": -2}
        _reseal(path, file, places.get(file, -1), 1000)
        words = (
            f"--dataset {path} --fanout 1,1 --epochs 1 --hidden 8 --batch-size 50 --gpus 0 {words}"
        )
        if "procs" in words:
            output = _train(words, code=2)
        else:
            assert _code(words) == 2
            output = capsys.readouterr().err
        assert output.count("train.py: ") == 1 and message in output, output
        assert "Traceback" not in output


@pytest.mark.parametrize("net", ["sage", "gat"])
def test_the_number_of_processes_changes_nothing(tmp_path, net):
    """140 seeds in batches of 138: the last has 2, and of three ranks or passes one has none. With dropout."""
    data = TINY.replace("train=600", "train=140")
    words = f"--dataset {data} --root {tmp_path} --fanout 5,5 --hidden 32 --lr 0.01"
    runs = [(1, 138, 1), (2, 69, 1)] if net == "gat" else [(1, 138, 1), (3, 46, 1), (1, 46, 3)]
    words += f" --dropout 0.5 --model {net} --clip-norm 0.1 --warmup 3"
    _same_for_any_number_of_processes(tmp_path, words, runs, epochs=2)


def test_memory_does_not_grow_over_epochs(tmp_path):
    """47 batches of different sizes. Heap fragmentation is 0.1 %; unbounded oneDNN caches would be 7 %."""
    graph = "synthetic:nodes=10000,degree=20,features=100,classes=16,train=6000"
    words = f"--dataset {graph} --batch-size 128 --fanout 5,5,5 --hidden 256 --epochs 4 --gpus 0"
    process = _start(words, f"--root {tmp_path} --log {tmp_path}/log")
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    peak = [entry["peak_bytes"] for entry in _log(tmp_path / "log")[:4]]
    print(f"peak of epoch 4 over that of epoch 2: {peak[3] / peak[1]:.3f}")
    assert peak[3] < 1.03 * peak[1], peak


def _trims():
    resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * 4096  # noqa: E731
    allocator.keep_freed_memory()
    level = allocator.trim_memory(0)
    parts = [torch.ones(1 << 18) for _ in range(200)]
    del parts[::2]
    grown = resident()
    assert grown > level + 150e6
    assert allocator.trim_memory(grown) == grown and resident() > grown - 50e6
    assert allocator.trim_memory(level) == level and resident() < grown - 80e6


@pytest.mark.parametrize("there", [True, False])
def test_cuda_segments_grow_only_where_that_is_safe(there, monkeypatch):
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for name in (*names, "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        monkeypatch.setenv(name, "1")  # so that all of them are as before in the end
        monkeypatch.delenv(name)
    load, library = ctypes.CDLL, {"libnvidia-ml.so.1": None if there else "no.such.library"}
    monkeypatch.setattr(ctypes, "CDLL", lambda name: load(library[name]))
    allocator.before_torch()
    expected = "expandable_segments:True" if there else None
    assert [os.environ.get(name) for name in names] == [expected] * 2


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_memory_that_is_free_is_given_back_once_the_process_has_grown(tmp_path):
    _end(_fork(tmp_path / "out", _trims))


INTERRUPTED = {  # flags, interruptions, epochs
    "cached": ("--model gcn --lr-schedule cosine", 4, 16),
    "at times": ("--model gat", 3, 24),
    "link": ("--task link --model gcn --scorer distmult --early-stop 99 --negatives 2", 3, 5),
}


@pytest.mark.parametrize("kind", INTERRUPTED)
def test_interruptions_change_no_bit(kind, tiny, tmp_path):
    """SIGTERM and SIGKILL at random moments; each resume has other threads, prefetching, cache and window."""
    seed = int.from_bytes(os.urandom(4), "little")
    rng = np.random.default_rng(seed)
    print(f"seed {seed}")
    flags, times, epochs = INTERRUPTED[kind]
    if kind == "at times":
        split = {"train": range(150), "valid": range(150, 200)}
        tiny = _store(tmp_path / "events", split=split, **_events(200, 3000))
    common = f"--dataset {tiny} --gpus 0 --fanout 5,5 --hidden 32 {flags} --epochs {epochs}"
    common += f" --batch-size {1000 if kind == 'link' else 25}"

    def start(*words):
        return _start_fork(tmp_path / "out", common, *words, cwd=tmp_path)

    began = time.monotonic()
    _end(start("--checkpoint straight.pt"))
    seconds = time.monotonic() - began
    resumed = "--checkpoint resumed.pt --checkpoint-every 5 --resume auto"
    hit, moments = 0, []
    for number in ([signal.SIGTERM, signal.SIGKILL] * times)[:times]:
        words = f"--prefetch {rng.integers(4)} --sample-threads {rng.integers(1, 3)}"
        if kind == "cached":
            words += f" --cache {1000 * rng.integers(1, 150)} --lookahead {rng.integers(40)}"
        process = start(resumed, words)
        begun = lambda: (tmp_path / "out").read_text().count("\nrun  ") >= len(moments) + 2  # noqa: E731
        _wait_for(begun, process, pause=0.005)
        moments.append(round(rng.uniform(0, seconds / times), 3))
        time.sleep(moments[-1])
        with suppress(ProcessLookupError):  # it was quicker
            os.kill(process.pid, number)
        _end(process, 0, -number, 128 + number)
        hit += process.exitcode != 0
    points = re.findall(r"resume  from (epoch \d+, step \d+)", _end(start(resumed)))
    print(f"{hit} of {times} runs were interrupted, resumed from {points}")
    assert hit >= times // 2 and len(set(points)) >= times // 3, moments
    left = {path.name for path in tmp_path.iterdir() if path.suffix != ".part"} - {"events"}
    assert left == {"out", "resumed.pt", "straight.pt"}
    assert _same_weights(tmp_path / "straight.pt", tmp_path / "resumed.pt"), moments


@pytest.mark.parametrize("name", kinds.plain_layers())
def test_every_model_learns_and_predicts(name, tiny, tmp_path, monkeypatch):
    words = f"--dataset {tiny} --model {name} --fanout 5,5 --hidden 16 --norm layer --residual"
    words += " --epochs 4 --lr 0.01 --batch_size 100 --dropout 0.25"
    log, _ = _run_here(tmp_path, words)
    assert [entry["epoch"] for entry in log[:-1]] == [1, 2, 3, 4]
    assert log[3]["loss"] < log[0]["loss"] and log[-1]["exact"]["test"] > 0.5
    stages = "seconds seeds_per_s sample fetch stall forward backward optimizer peak_bytes"
    assert all(log[0][stage] > 0 for stage in stages.split())
    resume = f"--resume {tmp_path}/here.pt"
    (tmp_path / ".classes.npy.0123456789abcdef.part").touch()  # what a run that was killed has left
    # what the checkpoint fixes is not typed again
    assert _code(f"{resume} --predict {tmp_path}/classes.npy") == 0
    classes, graph = np.load(tmp_path / "classes.npy"), GraphStore.open(tiny)
    assert classes.dtype == np.int64 and classes.shape == (3000,)
    right = (torch.from_numpy(classes) == graph.labels)[graph.split["test"]].double().mean().item()
    assert right == pytest.approx(log[-1]["exact"]["test"])
    # also where the features do not fit into memory, which leaves out the accuracy otherwise
    if name == "sage":
        with monkeypatch.context() as little:
            little.setattr(files, "free_host_bytes", lambda: 1000)
            little.setattr(placement, "choose_mode", lambda *_, **__: ("cpu-cpu", "", ""))
            assert _code(f"{resume} --predict {tmp_path}/large.npy --mode cpu-cpu") == 0
        assert (np.load(tmp_path / "large.npy") == classes).all()
        (tmp_path / "large.npy").unlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["classes.npy", "here.pt", "log"]


def test_train_two_processes_evaluate_together_with_batch_norm(tiny, tmp_path):
    """Each computes its part of the nodes; from one checkpoint two predict what one predicts."""
    words = f"--dataset {tiny} --model gcn --norm batch --fanout 4,4 --hidden 16 --epochs 5"
    words += f" --lr 0.01 --batch-size 60 --gpus 0 --procs 2 --checkpoint {tmp_path}/two.pt"
    output = _train(words, f"--predict {tmp_path}/trained.npy --verbose")
    assert re.search(r"\nadvice  2 processes spend [0-9.]+ of [0-9.]+ s", output)
    resume = f"--gpus 0 --resume {tmp_path}/two.pt"
    _train(resume, f"--procs 2 --predict {tmp_path}/two.npy")
    _train(resume, f"--predict {tmp_path}/one.npy")
    trained, one, two = (np.load(tmp_path / f"{name}.npy") for name in ("trained", "one", "two"))
    assert (one == two).mean() > 0.999 and (trained == two).all()


def _without_streams(*words):
    sys.stdout = sys.stderr = None  # as Python has them where they are closed
    assert cli.main(["info", str(words[-1])]) == 0
    return train.main(_split(words))


def test_train_without_validation_nodes_or_a_reader(tmp_path, capsys):
    path = _store(tmp_path / "g", split={"train": range(150), "test": range(150, 200)})
    common = f"--dataset {path} --fanout 3,3 --hidden 8 --epochs 1 --gpus 0"
    output = _train(common, "--early-stop 2 --procs 2", code=2)
    assert output.count("has no validation nodes") == 1 and "SIGTERM" not in output
    assert _code(common) == 0 and "valid n/a" in capsys.readouterr().out
    os.mkfifo(pipe := tmp_path / "pipe")
    for procs in (1, 2):
        process = _start_fork(pipe, common, f"--procs {procs}")
        os.close(os.open(pipe, os.O_RDONLY))  # `head` has read enough
        process.join(60)
        assert process.exitcode == 141
    words = f"{common} --procs 2 --dataset", path
    assert _end(_fork(tmp_path / "said", _without_streams, *words)) == ""
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, HERE / "train.py"]
    words = _split([common, "--procs 2 --log", tmp_path / "log"])
    assert subprocess.run([*closed, *words]).returncode == 0 and _log(tmp_path / "log")


def test_train_early_stop_keeps_the_best_weights(tiny, tmp_path, capsys):
    common = f"--dataset {tiny} --fanout 3,3 --hidden 16 --batch-size 100 --lr 0.05 --early-stop 3"
    log, last = _run_here(tmp_path, common, "--epochs 60")
    valid = [entry["valid_sampled"] for entry in log[:-1]]
    assert 4 <= len(valid) < 60 and np.argmax(valid) == len(valid) - 4
    best = torch.load(tmp_path / "here.pt", weights_only=True)["best"]
    assert best["epoch"] == len(valid) - 3 and best["score"] == max(valid)
    graph, net = GraphStore.open(tiny), SAGE(16, 16, 4, num_layers=2)
    net.load_state_dict(best["model"])
    logits = inference(net, graph.indptr, graph.indices, graph.features.tensor)
    right = (logits.argmax(1) == graph.labels)[graph.split["test"]].double().mean().item()
    assert log[-1]["exact"]["test"] == pytest.approx(right, abs=1e-3)
    # stopped in between and resumed, it stops where the straight run stops
    _run_here(tmp_path, common, "--epochs 3")
    resumed, weights = _run_here(tmp_path, f"--resume {tmp_path}/here.pt", common, "--epochs 60")
    assert resumed[-2]["epoch"] == len(valid)
    since = f"no better score since epoch {len(valid) - 3}"
    said = f"early   stopped after epoch {len(valid)}: {since}\n"
    assert capsys.readouterr().out.count(said) == 2
    assert all(torch.equal(last[name], weights[name]) for name in last)
    # once the last weights were kept, the best are those of the epochs after that
    _run_here(tmp_path, f"--dataset {tiny} --fanout 3,3 --lr 0.05 --epochs 9")
    for epochs, words in ((10, "--weights last"), (11, "--weights best --lr 10")):
        _run_here(tmp_path, f"--resume {tmp_path}/here.pt --epochs {epochs}", words)
    assert "best    weights of epoch 11 of 11: valid accuracy " in capsys.readouterr().out


@pytest.mark.parametrize("task", ["node", "link"])
def test_train_runs_give_mean_and_standard_deviation(task, tmp_path, capsys, monkeypatch):
    """After each run its memory on a GPU is free, even if a cycle holds it."""
    log, train_one, order = tmp_path / "log", train.train, []

    def train_in_a_cycle(*args):
        cycle = lambda: cycle  # noqa: E731
        weakref.finalize(cycle, order.append, "gone")
        return train_one(*args)

    monkeypatch.setattr(train, "train", train_in_a_cycle)
    workspaces = functools.partial(order.append, "of cuBLAS")
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", workspaces, raising=False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("emptied"))
    path = _store(tmp_path / "g")
    words = f"--dataset {path} --task {task} --fanout 3 --epochs 1 --runs 3 --seed 5 --log {log}"
    assert _code(words) == 0 and order == ["gone", "of cuBLAS", "emptied"] * 3
    *entries, last = _log(log)
    if task == "node":
        name, test = "test", [entry["exact"]["test"] for entry in entries if "exact" in entry]
        assert [entry["seed"] for entry in entries if "exact" in entry] == [5, 6, 7]
    else:
        name = "test roc_auc"
        test = [entry["scores"]["test"]["roc_auc"] for entry in entries if "scores" in entry]
    mean, std = np.mean(test), np.std(test, ddof=1)
    assert len(test) == 3 and std > 0
    assert (last["mean"][name], last["std"][name]) == pytest.approx((mean, std))
    assert f"{name} {100 * mean:.2f} +- {100 * std:.2f}%" in capsys.readouterr().out


ORDER = " ".join(
    """
task dataset root backend feature_dtype split symmetrize drop_duplicates fanout sampler layer_dependency
batch_dependency temporal window batch_size accumulate max_nodes max_edges model model_args hidden num_layers heads
bases norm residual edge_features dropout pooling input_dropout edge_split edge_type scorer negatives negatives_by
unchecked_negatives link_loss eval_negatives top pairs lr lr_schedule warmup clip_norm weight_decay loss class_weights
epochs metric early_stop weights seed runs precision checkpoint_activations gpus procs mode cache split_features
lookahead prefetch sample_threads cuda_graph allocator dry_run free_gpu free_host checkpoint checkpoint_every resume
init predict predict_what report export verbose log tensorboard curve timeline profile
""".split()
)


def test_train_help_fits_two_screens_and_says_units_and_defaults(monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    parser = flags.make_parser()
    lines = parser.format_help().splitlines()
    assert len(lines) <= 133 and max(map(len, lines)) <= 110
    groups = [line[:-1] for line in lines if re.fullmatch(r"\w[\w ]*:", line)]
    expected = "options data sampling model links optimisation processes and placement files"
    assert " ".join(groups) == expected
    assert " ".join(flags.FLAGS) == ORDER and flags.FLAGS.keys() - flags.CORE == {*flags.OF_EXTRAS}
    for name, flag in flags.FLAGS.items():
        hidden = flag.default is None or flag.default is False
        said = next(a.help for a in parser._actions if a.dest == name)
        assert said and (hidden or "default" in said), name


def test_choices_are_taken_in_any_case_and_empty_names_are_refused(capsys):
    words = (
        "--model SAGE-Pool --metric ROC-AUC --norm Layer --mode CPU_CPU --sampler LABOR --gpus 0"
    )
    args = train.parse_args(words.split())
    taken = args.model, args.metric, args.norm, args.mode, args.sampler
    assert taken == ("sage-pool", "roc_auc", "layer", "cpu-cpu", "labor")
    assert train.parse_args("--task Graph --model ALIGNN --gpus 0".split()).model == "alignn"
    for name, of in {"export": "DIR", "resume": "FILE", "dataset": "NAME"}.items():
        _stops(capsys, f"argument --{name}: '' is empty: give {of}", f"--{name}= --gpus 0")


def test_checkpoints_from_before_a_flag_stand_for_its_default(tiny, tmp_path):
    _run_here(tmp_path, f"--dataset {tiny}", *COMMON, "--epochs 1 --weight-decay 0.5")
    state = torch.load(tmp_path / "here.pt", weights_only=True)
    assert {*state["flags"]} == {*flags.SAVED}
    for name in "heads bases window edge_type drop_duplicates feature_dtype lr_schedule".split():
        del state["flags"][name]
    torch.save(state, tmp_path / "old.pt")
    args = train.parse_args(["--resume", str(tmp_path / "old.pt")])
    found = args.heads, args.bases, args.window, args.lr_schedule
    assert found == (4, 0, None, "constant")
    assert args.weight_decay == 0.5


def test_sizes_are_bytes_in_the_units_that_people_write():
    sizes = {"4G": 4 << 30, "4GiB": 4 << 30, "512k": 512 << 10, "1.5 kb": 1500, "2TB": 2 * 10**12}
    assert {text: kinds.size(text) for text in sizes} == sizes


def test_more_gpus_than_there_are_and_procs_under_torchrun_are_refused(monkeypatch, capsys):
    build = f"{torch.__version__} is a build for CPU; "
    for gpus, version, said in (
        (0, None, f"needs a CUDA GPU, and torch sees none: {build}see docs/gpu.md"),
        (2, "13.0", "needs as many CUDA GPUs: give at most 2"),
    ):
        monkeypatch.setattr(torch.version, "cuda", version)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        _stops(capsys, f"--gpus 3 {said}", "--gpus 3")
    monkeypatch.setenv("RANK", "0"), monkeypatch.setenv("WORLD_SIZE", "2")
    assert _code("--gpus 0 --procs 2") == 2
    said = "--procs 2 has no effect under torchrun: use its --nproc-per-node"
    assert said in capsys.readouterr().err

    monkeypatch.setenv("RANK", "2")  # of a second machine, counted from 1
    with pytest.raises(SystemExit, match="RANK is 2: with WORLD_SIZE 2 ranks are 0 to 1"):
        train.main("--gpus 0".split())

    def stop(ranks, args):
        raise StopIteration(args.gpus)

    monkeypatch.setattr(train, "common_state", stop)
    for started, count in ((2, 2), (4, 4), (8, 4)):  # processes of torchrun, GPUs to plan for
        ranks = ddp.Ranks(world=started, local_world=started, gpus=4)
        with pytest.raises(StopIteration, match=f"^{count}$"):
            train.train(ranks, flags.Flags(gpus=4), None)


@pytest.mark.parametrize("script", ["train.py", "store.py", "bench/__main__.py"])
def test_without_torch_or_with_an_old_python_one_line_names_the_cure(script, monkeypatch):
    """Up to the check, the files are read by Python 3.8, too."""
    here = {**os.environ, "PYTHONPATH": str(HERE)}
    command = [sys.executable, "-S", HERE / script]  # -S: without installed packages
    done = subprocess.run(command, env=here, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("torch, numpy, tqdm cannot be imported by this Python: ")
    assert done.stderr.endswith(" -m pip install -r requirements.txt\n")
    for name in (script, "sources/cli.py", "disk/terminal.py", "run/allocator.py"):
        ast.parse((HERE / name).read_text(), feature_version=(3, 8))
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    with pytest.raises(SystemExit, match="is too old: Python 3.10 to 3.13 are needed"):
        terminal.begin()


def test_a_model_file_that_imports_dgl_where_only_import_dgl_works_says_so(tiny, tmp_path):
    file, package = tmp_path / "net.py", tmp_path / "dgl"
    file.write_text("import dgl\n")
    package.mkdir()
    (package / "__init__.py").write_text("import torchdata.nothing_of_this_name\n")
    output = _train(f"--dataset {tiny} --model {file}:Net", code=2, cwd=tmp_path)
    assert "Traceback" not in output, output
    assert "write `from sampler import import_dgl; dgl = import_dgl()`" in output
