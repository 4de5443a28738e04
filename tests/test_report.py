"""Tests: run/report.py: epoch lines, logs, timelines."""

import importlib.util
import json
import os
import resource
import signal
import sys
import types

import numpy as np
import pytest
import torch

import ddp
import train
from disk.files import StoreError
from extras import pictures
from run import report
from sources.prepare import build
from store import GraphStore, build_store
from tests.common import (
    COMMON,
    _code,
    _end,
    _fork,
    _graph,
    _in_child,
    _rows,
    _run_here,
    _says,
    _split,
    _start,
    _stops,
    _store,
)


def test_each_run_in_a_log_says_what_it_was(tiny, tmp_path):
    log = tmp_path / "log"
    for seed in (3, 4):
        assert _code(f"--dataset {tiny}", *COMMON, f"--epochs 2 --seed {seed} --log {log}") == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line.get("epoch") for line in lines] == [None, 1, 2, None] * 2
    assert len({line["run"] for line in lines[:4]}) == 1 < len({line["run"] for line in lines})
    head, flags = lines[4], {"seed": 4, "fanout": [3, 3], "lr": 0.003}
    assert head["flags"].items() >= flags.items()
    assert head["versions"]["torch"] == torch.__version__ and head["hardware"]["processes"] == 1


def _with_small_files(*words):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))  # stands for a full disk
    return train.main(_split(words))


def test_a_log_and_a_trace_that_cannot_be_written_are_said_once(tiny, tmp_path):
    """A run that cannot write its trace does not succeed; the next seed of --runs is trained all the same."""
    words = f"--dataset {tiny} --epochs 3 --profile {tmp_path}/t.json --checkpoint {tmp_path}/c.pt"
    words = *COMMON, words, "--log /dev/full"
    output = _end(_fork(tmp_path / "out", _with_small_files, *words), 2)
    assert output.count("/dev/full") == 1 and "No space left on device; training goes on" in output
    assert output.count("--profile") == 1 and output.count("training goes on") == 2
    assert "\nresult  accuracy: test " in output and "Traceback" not in output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.pt", "out"]
    assert torch.load(tmp_path / "c.pt", weights_only=True)["epoch"] == 3
    output = _end(_fork(tmp_path / "out", _with_small_files, *words, "--runs 2"), 2)
    assert output.count("\nexact ") == 2 and "\nresult  " in output  # the second seed, and both


def test_a_trace_names_the_stages_on_every_thread_and_a_timeline_is_drawn(tiny, tmp_path):
    words = f"--dataset {tiny} --fanout 5,5 --hidden 16 --epochs 3 --lr 0.01 --batch-size 100"
    drawn = importlib.util.find_spec("matplotlib") is not None
    files = f"--profile {tmp_path}/trace.json" + f" --timeline {tmp_path}/timeline.png" * drawn
    log, _ = _run_here(tmp_path, words, "--precision bf16", files)
    assert log[2]["loss"] < log[0]["loss"] and log[-1]["exact"]["test"] > 0.5
    events = json.loads((tmp_path / "trace.rank0.json").read_text())["traceEvents"]
    threads = {e["name"]: e["tid"] for e in events if e.get("cat") == "user_annotation"}
    assert {"forward", "backward", "optimizer"} <= set(threads)
    if "all_threads" in torch._C._profiler._ExperimentalConfig.__init__.__doc__:  # not in torch 2.6
        assert threads["sample"] == threads["fetch"] != threads["forward"] == threads["optimizer"]
    assert not drawn or (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_the_line_of_an_epoch_fits_the_screen():
    """And has the metric that is asked for, in as many digits as it needs."""
    args = types.SimpleNamespace(epochs=100, metric="hits@10")
    seconds = dict.fromkeys(report.STAGES, 12345.67)
    figures = {"epoch": 99, "loss": 1234.56789, "seconds": 12345.678, "exchange": 12345.67}
    figures |= {"seeds_per_s": 1.2e7, "peak_bytes": 1e12, **seconds}
    regression = {"valid": {"rmse": 1234.5, "mae": 1234.5, "rmse_of_the_mean": 1234.5}}
    links = {"valid": {"mrr": 0.5, "hits@1": 0.25, "hits@10": 3e-5}}
    for more in ({"valid_sampled": 0.99999}, {"valid_sampled": None}, regression, links):
        for first in (0, 123_456):
            line = report.epoch_line(args, {**figures, **more, "first_step": first})
            assert len(line) <= 120 and "\n" not in line, line
    assert "valid MRR 0.5000  Hits@10 3e-05  12" in line, line
    line = report.stages_line(dict.fromkeys(seconds, 0.5) | {"exchange": 0.25})
    first, _, beside = line.partition("; meanwhile ")
    assert "stall 0.50  forward 0.50" in first and "sample" not in first
    assert beside == "sample 0.50  fetch 0.50  transfer 0.50  exchange 0.25"


def test_peak_memory_and_sizes_are_those_of_this_process_in_three_digits(monkeypatch):
    """ru_maxrss of a process that was started by a larger one is that of the larger one."""
    monkeypatch.setattr(resource, "getrusage", lambda who: types.SimpleNamespace(ru_maxrss=1 << 60))
    assert 1 << 24 < report.peak_memory(ddp.Ranks()) < 1 << 50
    sizes = {0: "0 B", 999: "999 B", 999_499: "999 KB", 999_500: "1 MB", 1_234_567: "1.23 MB"}
    assert {count: report.readable_size(count) for count in sizes} == sizes


# --epochs, those before, the best, whether the run trains, whether the best is among the last
BEST_EPOCHS = """
40 |  0 | 36 | 1 | 0
40 |  0 | 37 | 1 | 1
40 | 10 | 40 | 1 | 1
40 | 40 | 40 | 0 | 0
10 |  0 |  9 | 1 | 0
 1 |  0 |  1 | 1 | 1
 3 | 40 | 35 | 1 | 0
"""


def test_a_best_epoch_among_the_last_asks_for_more_epochs():
    for row in _rows(BEST_EPOCHS):
        epochs, start, epoch, trains, late = map(int, row)
        args = types.SimpleNamespace(epochs=epochs, trains=trains)
        line = report.best_line(args, start, epoch, "87.13% (sampled)")
        of = max(epochs, start)
        said = f"best    weights of epoch {epoch} of {of}: valid 87.13% (sampled)"
        assert line == said + "; it is among the last, more --epochs may help" * late


# processes, those of a machine, its GPUs, seconds of 10 for the exchange, what is said
ADVICE = """
2 | 2 | 0 | 0.1 | 2 processes spend 0.10 of 10.00 s on the exchange of gradients: one alone would take about 9.90 s
4 | 1 | 0 | 1   |
4 | 1 | 0 | 7.6 | 4 processes spend 7.60 of 10.00 s on the exchange of gradients: one alone would take about 9.60 s
4 | 4 | 4 | 7.4 |
4 | 4 | 4 | 7.6 | 4 processes spend 7.60 of 10.00 s on the exchange of gradients: one alone would take about 9.60 s
1 | 1 | 0 | 0   |
"""


def test_advice_on_when_one_process_is_as_fast():
    for world, local, gpus, exchange, said in _rows(ADVICE):
        ranks = ddp.Ranks(0, int(world), 0, int(local), int(gpus))
        line = report.advice(ranks, {"seconds": 10, "exchange": float(exchange)})
        assert line.removeprefix("advice  ") == said


def test_each_thread_has_a_row_of_its_own_in_a_timeline(tmp_path, monkeypatch):
    axes, said = pytest.importorskip("matplotlib.axes").Axes, []
    monkeypatch.setattr(axes, "set_title", lambda axis, text, loc: said.append(text))
    starts = ((stage, i + 0.1 * j) for i in range(10) for j, stage in enumerate(report.STAGES))
    laps = [(stage, start, start + 0.05, "t") for stage, start in starts]

    def draw(laps, name):
        flags = types.SimpleNamespace(timeline=tmp_path / f"{name}.png")
        pictures.timeline(types.SimpleNamespace(flags=flags), laps)

    draw(laps + [(*lap[:3], "u") for lap in laps], "two")
    draw(laps, "one")
    draw([], "none")
    draw([("optimizer", 0.1, 0.2, "t")], "short")
    counts = [text.partition(" of an epoch")[0] for text in said[1:]]
    assert counts == ["First 8 training steps", "First 1 training step"]
    one, two = ((tmp_path / f"{name}.png").read_bytes() for name in ("one", "two"))
    height = lambda png: int.from_bytes(png[20:24], "big")  # noqa: E731
    assert one.startswith(b"\x89PNG") and height(two) > 1.5 * height(one)
    assert not (tmp_path / "none.png").exists()
    # a bar of 1 ms in 1 s is not covered by its white edges
    laps = [("step", 0, 0.999, "GPU"), ("optimizer", 0.3, 0.301, "t")]
    draw([*laps, ("step", 1, 1.001, "GPU")], "thin")
    colors = pytest.importorskip("matplotlib.image").imread(tmp_path / "thin.png")[..., :3]
    brown = torch.tensor([140, 86, 75]) / 255
    assert ((torch.tensor(colors) - brown).abs().amax(2) < 0.1).sum() > 20


def _drawn(monkeypatch):
    """Return a list that gets (title, [(name, numbers, values) of each row]) of every curve; the first is drawn."""
    drawn, figure = [], pytest.importorskip("matplotlib.figure").Figure
    save = figure.savefig

    def saved(fig, file, **options):
        lines = ((axis.get_ylabel(), axis.lines[0].get_xydata().T.tolist()) for axis in fig.axes)
        drawn.append((fig.axes[0].get_title(loc="left"), [(name, *xy) for name, xy in lines]))
        if len(drawn) == 1:
            save(fig, file, **options)

    monkeypatch.setattr(figure, "savefig", saved)
    return drawn


def test_the_curve_of_a_run_is_that_of_its_log(tiny, tmp_path, monkeypatch, capsys):
    """Loss, score and learning rate of the epochs of this run, and the epoch kept; a resumed run draws its own."""
    drawn, curve = _drawn(monkeypatch), tmp_path / "c.png"
    words = f"--dataset {tiny} --epochs 4 --lr 0.02 --lr-schedule cosine --curve {curve}"
    log, _ = _run_here(tmp_path, words, *COMMON)
    epochs = [line for line in log if "epoch" in line]
    best = max(epochs, key=lambda line: line["valid_sampled"])["epoch"]
    title, rows = drawn[-1]
    assert title.endswith(f", seed 0\nweights kept: epoch {best} (dashed)")
    for (name, numbers, values), key in zip(rows, ("loss", "valid_sampled", "lr"), strict=True):
        assert numbers == [1, 2, 3, 4] and values == [line[key] for line in epochs], name
    assert [name for name, *_ in rows][1] == "validation accuracy"
    assert curve.read_bytes().startswith(b"\x89PNG")
    assert _code(words, *COMMON, "--runs 2") == 0
    assert [path.name for path in sorted(tmp_path.glob("c-*"))] == ["c-seed0.png", "c-seed1.png"]
    again = f"--resume {tmp_path}/here.pt --gpus 0 --curve {curve}"
    _says(capsys, "curve   no epoch was completed", again)
    assert _code(again, "--epochs 6 --lr 1e-9 --lr-schedule constant") == 0
    title, rows = drawn[-1]
    assert rows[0][1] == [5, 6] and ("before this run" in title) == (best < 5)
    # the score of --metric, the first error of targets, none without validation
    figures, links = {"epoch": 1, "loss": None, "lr": 0.1}, {"mrr": 0.5, "ap": 0.25}
    errors = {"rmse": 2.0, "mae": 1.0}
    for valid, metric, score in (
        (links, "ap", [("validation ap", [1], [0.25])]),
        (errors, None, [("validation rmse", [1], [2])]),
        (None, None, []),
    ):
        flags = types.SimpleNamespace(curve=curve, dataset="d", model="m", seed=0)
        run = types.SimpleNamespace(flags=flags, epochs=[{**figures, "valid": valid}])
        pictures.curve(run, types.SimpleNamespace(metric=metric), {"epoch": 1, "model": True})
        assert drawn[-1][1][1:-1] == score


def test_a_run_that_predicts_says_what_it_wrote_and_no_figure_without_labels(tmp_path, capsys):
    graph = _graph(width=6)
    path = build_store(tmp_path / "g", **graph)
    unlabelled = {"features": graph["features"], "edge_index": graph["edge_index"]}
    plain = build_store(tmp_path / "plain", **unlabelled, labels=None, split={}, num_classes=4)
    for task, array in (("node", "int64 [200]"), ("link", "float32 [200, 16]")):
        _run_here(tmp_path, f"--task {task} --dataset {path}", *COMMON, "--epochs 1")
        resume = [f"--resume {tmp_path}/here.pt --predict {tmp_path}/p.npy --gpus 0"]
        for dataset in (path, plain):
            capsys.readouterr()
            edges = ["--edge-split none"] if task == "link" and dataset is plain else []
            assert _code(*resume, f"--dataset {dataset}", *edges) == 0
            output = capsys.readouterr().out
            written, _, result = output.rpartition(f"\nwrote {tmp_path}/p.npy: {array}\n")
            assert written and "n/a" not in output and "learning rate" not in output
            assert ("\nresult  " in result) == (dataset is path), output


def test_a_run_says_whether_its_model_is_kept_and_how_to_use_it(tiny, tmp_path, capsys):
    words = [f"--dataset {tiny} --gpus 0 --hidden 8", f"--checkpoint {tmp_path}/c.pt"]
    lost = "keep    no --checkpoint FILE is given: the trained model is lost at the end\n"
    wrote = f"\nwrote {tmp_path}/c.pt; --resume {tmp_path}/c.pt --predict FILE.npy uses it\n"
    more = f"--resume {tmp_path}/c.pt --gpus 0 --epochs"
    for line, is_lost, written in (
        (f"{words[0]} --epochs 1", True, False),
        (" ".join([*words, "--epochs 1"]), False, True),
        (f"{more} 2", True, False),  # a resumed run trains on
        (f"{more} 2 {words[1]}", False, True),
        (f"{more} 2 {words[1]}", False, False),  # there is nothing left to train
        (f"{more} 2", False, False),
    ):
        assert _code(line) == 0
        said = capsys.readouterr().out
        assert (lost in said, wrote in said) == (is_lost, written), said
        assert said.rpartition("\n\n")[2].splitlines()[-1].startswith("result  ")


def test_what_only_an_expert_wants_is_printed_with_verbose(tmp_path, capsys):
    """At most ten lines beside those of epochs; with --runs once, and the result of each seed on a line."""
    words = f"--dataset {_store(tmp_path / 'g')} --gpus 0 --fanout 3,3 --hidden 8 --epochs 2"
    expert = "allocator: ", "memory  mode cpu-cpu: host 1 x (", "seconds: stall "
    for more, count in (("--runs 2", 0), ("--verbose", 1)):
        assert _code(words, more) == 0
        said = capsys.readouterr().out
        assert [text in said for text in expert] == [bool(count)] * 3, said
        if not count:
            lines = [line.split()[0] for line in said.splitlines() if line and line[:5] != "epoch"]
            assert len(lines) <= 16 and len({*lines} - {"seed", "exact", "best"}) <= 10, said
            assert lines.count("exact") == 2 and lines.count("result") == 1


def _predicted(tmp_path, *words, kind="csv"):
    """Predict with train.py in this process -> the table that it writes."""
    pandas = pytest.importorskip("pandas")
    file = tmp_path / f"p.{kind}"
    assert _code(*words, f"--gpus 0 --predict {file}") == 0
    return pandas.read_csv(file) if kind == "csv" else pandas.read_parquet(file)


def test_predictions_come_back_in_the_names_of_tables(tmp_path, capsys, monkeypatch):
    """Names of nodes and classes, also those of the checkpoint on a graph without labels; several chunks."""
    monkeypatch.setattr("tasks.task.CHUNK", 100)
    names = [f'the "{i}", x' for i in range(90)]
    given = {**_graph(num_nodes=90, width=2, classes=3), "node_names": names}
    classes = {"source": {"classes": ["blå", "node", "red"]}}
    graph = GraphStore.open(build_store(tmp_path / "g", **given, **classes))
    build_store(tmp_path / "bare", **given | {"labels": None, "split": {}})
    _run_here(tmp_path, f"--dataset {graph.path} --epochs 2", *COMMON)
    for dataset in ("g", "bare"):
        again = f"--resume {tmp_path}/here.pt --dataset {tmp_path}/{dataset}"
        assert _code(again, f"--gpus 0 --predict {tmp_path}/p.npy") == 0
        rows = _predicted(tmp_path, again, "--predict-what scores", kind="parquet")
        assert list(rows) == ["node", "blå", "class node", "red"]
        scores = rows.iloc[:, 1:].to_numpy()
        capsys.readouterr()
        for kind in ("csv", "parquet"):
            table = _predicted(tmp_path, again, kind=kind)
            assert list(table) == ["node", "class", "score"] and list(table.node) == names
            classes = np.array(graph.class_names)[np.load(tmp_path / "p.npy")]
            assert (table["class"] == classes).all()
            assert np.allclose(table.score, scores.max(1), atol=1e-6)
        assert f"wrote {tmp_path}/p.csv: 90 rows of node, class, score\n" in capsys.readouterr().out
        h = _predicted(tmp_path, again, "--predict-what embeddings")
        assert list(h) == ["node", *(f"e{j}" for j in range(16))]
        assert list(h.node) == names
    pairs = np.array(names)[[[3, 1], [0, 2]]]
    np.save(tmp_path / "pairs.npy", np.char.encode(pairs, "utf-8"))
    link = f"--task link --dataset {graph.path} --epochs 1"
    table = _predicted(tmp_path, link, *COMMON, f"--pairs {tmp_path}/pairs.npy")
    assert list(table) == ["source", "destination", "score"]
    assert table.iloc[:, :2].to_numpy().tolist() == pairs.tolist()
    assert list(_predicted(tmp_path, link, *COMMON)) == list(h)


def test_names_come_back_where_the_locale_has_no_utf8(tmp_path):
    """The terminal gets escapes; files are UTF-8 in any locale."""
    names = [f"Ürün {i}" for i in range(90)]
    ring = "".join(f"{name},{names[i - 7]}\n" for i, name in enumerate(names))
    rows = "".join(f"{name},{i % 9 / 7:.3f},1\n" for i, name in enumerate(names))
    labels = "".join(f"{name},sınıf {i % 3}\n" for i, name in enumerate(names))
    for file, text in (
        ("e.csv", f"src,dst\n{ring}"),
        ("x.csv", f"id,şeker,b\n{rows}"),
        ("y.csv", f"id,label\n{labels}"),
    ):
        (tmp_path / file).write_text(text, encoding="utf-8")
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
    files = "--procs 2 --predict çıktı/ürün.csv --checkpoint çıktı/ç.pt --log çıktı/ö"
    (tmp_path / "çıktı").mkdir()
    for script, words in (
        ("store.py", "build e.csv adı --features x.csv --labels y.csv"),
        ("train.py", f"--dataset adı {' '.join(COMMON)} --epochs 1 {files}"),
    ):
        process = _start(words, script=script, env=env, cwd=tmp_path)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0 and "Traceback" not in output, output
        assert output.isascii() and "\\" in output
    written = (tmp_path / "çıktı/ürün.csv").read_text("utf-8").splitlines()
    assert [line.split(",")[0] for line in written[1:]] == [f'"{name}"' for name in names]
    assert {line.split(",")[1] for line in written[1:]} <= {f'"sınıf {i}"' for i in range(3)}


def test_a_table_of_predictions_on_a_full_disk_or_without_pyarrow(tmp_path, monkeypatch, capsys):
    pytest.importorskip("pyarrow")
    rows = {"node": np.arange(100_000), "score": np.random.default_rng(0).random(100_000)}

    def limited(kind):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
        try:
            report.write_table(str(tmp_path / f"p.{kind}"), iter([rows, rows]))
        except StoreError as error:
            assert "could not be written: File too large" in str(error)
            os._exit(7)

    for kind in ("csv", "parquet"):
        status = _in_child(lambda: limited(kind))
        assert os.waitstatus_to_exitcode(status) == 7 and not any(tmp_path.iterdir())
        assert report.write_table(str(tmp_path / f"p.{kind}"), iter([rows, rows]))[0] == 200_000
        (tmp_path / f"p.{kind}").unlink()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    _stops(
        capsys,
        f"--predict {tmp_path}/p.csv needs: pip install pyarrow",
        f"--predict {tmp_path}/p.csv",
    )


def test_predictions_are_numbers_where_the_data_have_no_names(tmp_path):
    """Integers that name nodes stay integers; nodes of types are counted within their type; labels name columns."""
    graph = {**_graph(num_nodes=90, width=6, classes=4), "node_names": [*range(7, 97)]}
    build_store(tmp_path / "g", **graph)
    table = _predicted(tmp_path, f"--dataset {tmp_path}/g --epochs 1", *COMMON, kind="parquet")
    assert table.node.tolist() == graph["node_names"] and table["class"].isin(range(4)).all()
    mag = "synthetic-mag:scale=0.0002"
    words = f"--dataset {mag} --epochs 1 --root {tmp_path} --predict-what logits"
    table = _predicted(tmp_path, words, *COMMON)
    assert list(table)[:3] == ["type", "node", "0"]
    for _, part in table.groupby("type"):
        assert part.node.tolist() == list(range(len(part)))
    # several labels: a column for each
    labels = np.random.default_rng(0).integers(0, 2, (90, 3))
    tables = {"e": graph["edge_index"].T, "x": graph["features"], "y": labels, "t": np.arange(50)}
    for name, rows in tables.items():
        head = "type,wet,cold" * (name == "y")
        np.savetxt(tmp_path / name, rows, "%.9g", ",", header=head, comments="")
    files = {
        "features": tmp_path / "x",
        "labels": tmp_path / "y",
        "split": {"train": tmp_path / "t"},
    }
    build(tmp_path / "e", tmp_path / "several", **files)
    table = _predicted(tmp_path, f"--dataset {tmp_path}/several --epochs 1", *COMMON)
    assert list(table) == ["node", "class type", "wet", "cold"]
    assert table.iloc[:, 1:].isin([0, 1]).to_numpy().all()


def test_tensorboard_gets_the_figures_and_flags_of_a_run(tiny, tmp_path, monkeypatch):
    shown, writer = {}, types.SimpleNamespace(flush=lambda: None, close=lambda: None)
    writer.add_scalar = lambda name, value, epoch: shown.__setitem__(name, (value, epoch))
    writer.add_hparams = lambda flags, known, **where: shown.update(flags=flags, known=known)
    module = types.SimpleNamespace(SummaryWriter=lambda folder: writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setitem(sys.modules, "tensorboard", types.SimpleNamespace(__spec__=module))
    words = f"--task link --dataset {tiny} --fanout 3,3 --epochs 2 --tensorboard {tmp_path}/board"
    log, _ = _run_here(tmp_path, words)
    assert shown["loss"] == (log[1]["loss"], 2) and shown["flags"]["batch_size"] == 1024
    assert shown["valid/mrr"] == (log[1]["valid"]["mrr"], 2)
    assert shown["known"]["exact/test_mrr"] == log[-1]["scores"]["test"]["mrr"]


def test_bf16_without_hardware_is_said(tiny, tmp_path, monkeypatch, capsys):
    for vectors, slow in (("AVX2", True), ("AVX512", False)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: vectors)
        _run_here(tmp_path, f"--dataset {tiny} --gpus 0 --precision bf16 --epochs 1 --fanout 2,2")
        assert ("bf16 is slower than fp32 on this processor" in capsys.readouterr().out) == slow


def test_a_processor_without_a_model_name_is_no_fault(tiny, tmp_path, monkeypatch):
    args = train.parse_args(["--dataset", tiny, "--log", str(tmp_path / "log")])
    monkeypatch.setattr(report.Path, "read_text", lambda file: "BogoMIPS\t: 50.00\n")  # as on ARM
    report.Report(ddp.Ranks(), args)
    monkeypatch.undo()
    assert json.loads((tmp_path / "log").read_text())["hardware"]["cores"] > 0
