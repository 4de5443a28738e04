"""Tests of python -m bench and of what README.md shows."""

import bisect
import importlib.util
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import model
import train
from bench import __main__ as bench
from bench import accuracy as bench_accuracy
from bench import attack, defaults, gpu_graph, gpu_sums, picture, predict
from bench import gpu as bench_gpu
from bench.tools import exit_code, write_json
from extras import paths
from extras.common_neighbours import CommonNeighbours
from extras.edge_split import Edges
from extras.graph_store import block_diagonal
from native import layers
from run import flags
from sampler import NeighborSampler
from sources import cli
from store import GraphStore
from tests.common import (
    DATA,
    HERE,
    OWN_MODELS,
    TINY,
    _as_lists,
    _dgl,
    _end,
    _fork,
    _readme_blocks,
    _rows,
    _train,
)
from tests.stores import _edges, _events, _save_npz


def test_what_is_damaged_or_forged_is_fine_or_refused_in_a_sentence(tmp_path):
    words = "attack --rounds 3 --minutes 30".split()
    printed = _end(_fork(tmp_path / "out", bench.main, words))
    table = dict(re.findall(r"^\| (\w+) +\| (\d+) ", printed, re.MULTILINE))
    assert [table[kind] for kind in attack.ATTACKS] == ["3"] * 13


# outcome, exit code, what was printed, notes
def _bench(words, out, code=0):
    """Run python -m bench on a small graph -> the content of --json."""
    small = f"--root {out.parent} --hidden 8 --threads 2 --json {out}"
    assert bench.main(f"{words} {small}".split()) == code
    return json.loads(out.read_text())


def _has(package):
    return importlib.util.find_spec(package) is not None


def test_bench_inference_equals_dgls_loop(tmp_path):
    _dgl()
    for conv in ("sage", "gat", "gin"):
        words = f"inference --dataset {TINY} --fanout 1,1 --rounds 1 --model {conv}"
        figures = _bench(words, tmp_path / f"{conv}.json")
        assert len(figures["contenders"]) == 4 and max(figures["logits_apart"].values()) < 1e-3


def test_bench_roofline_counts_what_kernels_are_launched_with(tmp_path):
    """All bytes of a product, and rows that add up to the total."""
    words = f"roofline --dataset {TINY} --fanout 4,3 --batch-size 32"
    for name, rows in _bench(words, tmp_path / "r.json")["kernels"].items():
        *parts, whole = rows.values()
        size = 4 if name == "tf32" else 2
        products = [kernel for kernel in rows if kernel.startswith("product")]
        for kernel in products:
            m, k, n = (int(x.replace(",", "")) for x in kernel[8:].split(" x "))
            most = size * (m * k + k * n + m * n + n)  # with a bias
            row = rows[kernel]
            assert round(1e6 * row["MB"] / row["launches"]) in (most, most - size * n)
        assert products and whole["MB"] == pytest.approx(sum(row["MB"] for row in parts))


def test_bench_roofline_counts_no_kernel_that_only_a_cpu_gains_from(tmp_path, monkeypatch):
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):  # as train.py sets them
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(layers, "WORTH_COMPILING", 0)
    words = f"roofline --dataset {TINY} --fanout 4,3 --batch-size 32 --model gin"
    for rows in _bench(words, tmp_path / "r.json")["kernels"].values():
        assert "norm_relu" in rows and "column_sums" not in rows  # of fewer rows than LONG


BAD_WORDS = """
accuracy --runs 1 | --runs 1: a standard
accuracy --batch-size 0 | argument --batch-size: '0' is not a whole number above 0
accuracy --models gcm | --models gcm: choose from mlp,sage
layers --models mlp | --models mlp: choose from sage
scaling --batch-size 64 --procs 1,3 | --batch-size 64 must be a multiple of each of --procs
accuracy --dataset nosuch | python -m bench: --dataset nosuch: give one of cora, citeseer
labor --data nosuch | python -m bench: --dataset all: give one of cora, citeseer
types --data nosuch | No such file or directory: 'nosuch/aifb.nt.gz'
step --batch 3 | error: --batch is no flag: did you mean --batch-size or --batches?
gpu | python -m bench: gpu needs a CUDA GPU
attack --only nosuch | python -m bench: --only nosuch: one of mmap, lmdb
store --parts build,x | python -m bench: --parts x: choose from build,train,procs,pages
gpu --minutes -1 | argument --minutes: '-1' is not a number of at least 0
"""


def test_bench_refuses_in_a_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words, complaint in _rows(BAD_WORDS):
        assert exit_code(bench.main, words.split()) == 2, words
        said = capsys.readouterr()
        assert complaint in said.err.splitlines()[-1], said.err
        assert words != "gpu" or not said.out  # as "measured on the CPU"


def test_bench_accuracy_trains_on_the_largest_component(tmp_path, monkeypatch):
    """Components of three and two nodes and an isolated node: the largest keeps its labels."""
    edges = [[0, 4, 2, 3, 1], [4, 2, 0, 1, 3]]
    np.savez(tmp_path / "amazon_computers.npz", edge_index=edges, labels=range(6))
    three = bench_accuracy.real(types.SimpleNamespace(data=tmp_path), "amazon_computers")
    assert three["labels"].tolist() == [0, -1, 2, -1, 4, -1]
    if not DATA.is_dir():
        pytest.skip(f"{DATA} is not there")
    settings = [("", "--lr 0.03 --weight-decay 5e-4"), (":row_normalize=0", "--lr 1e-6")]
    real = ("--hidden 16 --epochs 10", *bench_accuracy.REAL["cora"][1:3], settings)
    monkeypatch.setitem(bench_accuracy.REAL, "cora", real)
    words = f"accuracy --dataset cora --data {DATA} --runs 2 --models gcn"
    for _ in range(2):  # rows that are there are not run again
        figures = _bench(words, tmp_path / "out.json")["accuracy"]
        monkeypatch.setattr(bench_accuracy.tools, "training_log", None)
    figure = figures["cora, gcn, all neighbours"]
    assert figure["test"] > 70 and "--lr 0.03" in figure["flags"] and len(figure["trials"]) == 2


def test_bench_defaults_trains_once_for_each_test_fold(tmp_path, monkeypatch):
    """Rings of three and of four nodes, which logistic regression tells apart by their numbers of nodes, and tags do."""
    sizes = 3 + np.arange(30) % 2
    ends = [[[i, (i + 1) % n], [(i + 1) % n, i]] for n in sizes for i in range(n)]
    offsets = np.append(0, sizes.cumsum())
    rings = {"node_offsets": offsets, "edge_offsets": 2 * offsets, "labels": sizes}
    rings["edge_index_local"] = np.concatenate(ends).T.astype(np.uint16)
    rings["node_tag"] = np.repeat(sizes, sizes).astype(np.uint8)
    np.savez(tmp_path / "rings.npz", **rings, fold=np.arange(30) // 2 % 3)
    monkeypatch.setattr(defaults, "FOLDS", 3)
    flags = "--task graph --epochs 20 --hidden 8 --dropout 0 --lr 0.03 --metric accuracy"
    monkeypatch.setattr(defaults, "ROWS", {"rings": ("rings", flags, "accuracy", "")})
    for _ in range(2):  # rows that are there are not run again
        words = f"defaults --data {tmp_path} --code {HERE}"
        (row,) = _bench(words, tmp_path / "out.json")["defaults"].values()
        monkeypatch.setattr(defaults, "train", None)
    scores = row["scores"]
    assert row["n"] == len(scores["test"]) == 3 and row["test"] > 90
    assert scores.get("logistic regression", []) in ([], [100] * 3)  # takes scikit-learn


def test_bench_picture_draws_what_is_committed(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(HERE / "results", tmp_path / "results")
    png = Path(picture.PICTURE)
    png.unlink()
    assert bench.main(["picture"]) == 0 and png.read_bytes().startswith(b"\x89PNG")


def test_the_picture_and_the_tables_beside_it_show_the_same_figures():
    """The bars of throughput.png are those of results/sampler-cpu.json and step-cpu.json, and so are the tables."""
    charts = {}
    for name in ("sampler", "step"):
        charts |= picture.times_in(json.loads((HERE / f"results/{name}-cpu.json").read_text()))
    readme = (HERE / "README.md").read_text()
    results = (HERE / "results/README.md").read_text()
    for chart, ours, row, theirs, digits in (
        ("sampling a batch", "ringblock", "native", "DGL fused, int64", 1),
        ("a training step, dropout 0.5", "ringblock, fp32", "all tricks", "DGL, malloc kept", 0),
    ):
        ours, theirs_ms = charts[chart][ours], charts[chart][theirs]
        assert f"\n| {row} | {ours:.{digits}f} |" in results
        assert f"| {ours:.{digits}f} ms | {theirs_ms:.{digits}f} ms, DGL" in readme
        assert re.search(rf" DGL( 2.1.0)? \| {theirs_ms / ours:.1f} \|", readme)


def test_figures_of_the_gpu_in_readme_are_those_of_the_results():
    parts = json.loads((HERE / "results/gpu-h200.json").read_text())["parts"]
    readme = (HERE / "README.md").read_text()
    results = (HERE / "results/README.md").read_text()
    theirs = {name: row["median_ms"] for name, row in parts["cugraph"]["contenders"].items()}
    ours = re.search(
        r"step of sage takes ([\d.]+) ms in tf32, ([\d.]+) in fp32, sampling ([\d.]+)",
        parts["cugraph"]["graph"],
    )
    names = (
        "training, tf32, trim_to_layer",
        "training, fp32, trim_to_layer",
        "sampling, an epoch in a call (its default)",
    )
    for name, text in zip(names, ours.groups()):
        assert f"| {text} ms | {theirs[name]} ms, cuGraph-PyG" in readme
    for row in parts["papers"]["contenders"].values():
        assert f"| {row['median_ms']:.2f} * | {row['epoch_s']} * |" in results


def _part(args, record):
    """Stands in for a part of bench gpu, and behaves as its name says."""
    if record.part == "dies":
        os._exit(7)
    if record.part == "hangs":
        time.sleep(600)
    record.keep(seeds=args.batch_size)
    if record.part == "raises":
        with record.attempt("one contender"):
            raise ValueError("the first line\nand the second")
        raise RuntimeError("the other half")


def test_bench_gpu_goes_on_after_parts_that_fail(tmp_path, monkeypatch):
    """An exception, a crash and a timeout are written into the part's entry, and the other parts run."""
    monkeypatch.setattr(bench_gpu.gpu_parts, "START", "fork")  # to have the parts below
    parts = {name: bench_gpu.Part(_part, 60) for name in ("raises", "dies", "keeps")}
    monkeypatch.setattr(bench_gpu, "PARTS", parts | {"hangs": bench_gpu.Part(_part, 1)})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.chdir(tmp_path)
    words, file = "gpu --threads 2 --batch-size 7", Path("results/gpu.json")
    assert exit_code(bench.main, words.split()) == 1 and [*Path().rglob("*.*")] == [file]
    found = json.loads(file.read_text())["parts"]
    raised = ["one contender: ValueError: the first line", "raises: RuntimeError: the other half"]
    assert {name: entry["failed"] for name, entry in found.items()} == {
        "raises": raised,
        "dies": ["its process ended with exit code 7"],
        "keeps": [],
        "hangs": ["stopped after 1 s"],
    }
    assert found["keeps"]["seeds"] == found["raises"]["seeds"] == 7
    assert exit_code(bench.main, f"{words} --parts keeps --minutes 0".split()) == 1
    again = json.loads(file.read_text())["parts"]
    assert again["keeps"]["failed"] == ["no time left of --minutes 0"]
    assert again["dies"] == found["dies"]  # was not run again


def test_bench_gpu_draws_seeds_without_a_permutation_of_all_nodes(monkeypatch):
    """Distinct ones over the whole range; a graph of 111 million nodes would be permuted for 10 seconds."""
    monkeypatch.setattr(torch, "randperm", None)
    for name in gpu_graph.SHAPES:
        graph = gpu_graph.make_graph(gpu_graph.tiny(gpu_graph.SHAPES[name]), "cpu")
        seeds = graph.seeds
        assert len(seeds) == graph.shape.seeds and (seeds.diff() > 0).all()
        assert seeds[0] < 100 and 2900 < seeds[-1] < graph.shape.nodes


def test_bench_gpu_compares_kernels_with_c_and_torch(tmp_path, monkeypatch):
    """Of all launches of links.cu, norm.cu and aggregate.cu; one wrong number among thousands is said, and the others run."""
    graph = gpu_graph.make_graph(gpu_graph.tiny(gpu_graph.SHAPES["products"]), "cpu")
    sizes = {"batch_size": 64, "fanout": [5, 4, 5], "hidden": 32}
    args = types.SimpleNamespace(out=tmp_path, quick=True, **sizes)
    record = bench_gpu.Record(args, "law")
    write_json(record.file, {"parts": {}})
    record.keep(failed=[])
    right, calls = gpu_sums.KERNELS["paths"], itertools.count()

    def wrong(of):
        (sums,) = right(of)
        sums[7] += 0 if next(calls) else sums.mean()  # the first call is the GPU's
        return [sums]

    monkeypatch.setitem(gpu_sums.KERNELS, "paths", wrong)
    gpu_sums.sums(args, record, graph)
    apart = record.figures["sums"]
    assert apart.pop("paths")["C"] > gpu_sums.CLOSE and apart.keys() < {*gpu_sums.KERNELS}
    assert all(row.keys() == {"C", "torch"} and max(row.values()) < 1e-7 for row in apart.values())
    (said,) = record.figures["failed"]
    assert re.match("paths: RuntimeError: .* apart", said)
    text = "".join(
        Path(model.__file__).with_name("native").joinpath(name).read_text()
        for name in ("links.cu", "norm.cu")
    )
    kernels = re.findall(r"^KERNEL (\w+)\(", text, re.MULTILINE)
    assert {name.removesuffix("_grad") for name in kernels} <= {*gpu_sums.KERNELS}


def test_bench_predict_is_as_near_to_kernels_that_were_held_out():
    """To launches measured on an H200: a typical error of an eighth, a fifth for kernels that were not fitted."""
    rows = json.loads(predict.TIMES.read_text())["rows"]
    rates = predict.fitted(rows)
    errors = [abs(predict.error(row, rates)) for row in rows]
    assert np.median(errors) < 0.125
    apart = predict.held_out(rows)
    assert max(apart.values()) < 25 and apart.keys() == {"bytes", "warps", "longest", "L1"}


class _Counted(list):
    reads = 0

    def __getitem__(self, place):
        self.reads += 1
        return super().__getitem__(place)


def test_bench_predict_counts_what_kernels_of_pairs_read():
    """As their loops, of a thread for each node of a list: in the other's by halves, or from the place of the one before in doubled hops. To a third."""
    degree = torch.randint(60, 100, (300,), generator=torch.Generator().manual_seed(0))
    lists = [sorted(np.random.default_rng(d).choice(300, d, False)) for d in degree.tolist()]
    edges = Edges(F.pad(degree.cumsum(0), (1, 0)), torch.from_numpy(np.concatenate(lists)))
    recorded = predict.link_launches(edges, 20)
    threads = {launch.kernel: launch.threads for launch, _ in recorded}
    of_pairs = 40 * paths.LANES
    assert threads == {"between": 40, "negatives": 20, "common": of_pairs, "paths": of_pairs}
    ends = torch.tensor([[0, 1], [2, 3]])
    work = predict.link_work(CommonNeighbours(edges), ends, ends)
    reads = {"common": [], "paths": []}
    for u, v in ends.tolist():
        few, many = sorted((lists[u], _Counted(lists[v])), key=len)
        many = _Counted(many)
        for node in few:
            bisect.bisect_left(many, node)
        reads["common"].append(2 + many.reads / len(few))
        for a in lists[u]:
            few, many = sorted((lists[a], lists[v]), key=len)
            many, place = _Counted(many), 0
            for node in few:
                hop = 1
                while place + hop < len(many) and many[place + hop] < node:
                    hop *= 2
                place = bisect.bisect_left(many, node, place, min(place + hop, len(many)))
            reads["paths"].append(2 * len(few) + many.reads)
    for kernel, counted in reads.items():
        assert work[kernel].longest == pytest.approx(max(counted), rel=0.35), kernel


def test_bench_link_takes_steps_beside_dgl(tmp_path):
    """Contenders take the same kind of step, in this process and in their own: losses near ln 2, that of a coin."""
    words = f"link --dataset {TINY} --rounds 2 --fanout 3,3 --batch-size 50"
    found = _bench(words, tmp_path / "l.json")["contenders"]
    dgls = ["DGL as shipped", "DGL, malloc kept"] if _has("dgl") else []
    assert list(found) == ["ours", "ours, nothing excluded", *dgls]
    assert all(0.3 < figures["loss"] < 1.5 for figures in found.values())


def test_readme_commands_run_word_for_word(tmp_path):
    """All commands that need no GPU, download or second graph, in README's order, with small settings appended."""
    for path in HERE.glob("*.py"):
        shutil.copy(path, tmp_path)
    for folder in "native disk sources tasks run bench results".split():
        shutil.copytree(HERE / folder, tmp_path / folder)
    for name, text in OWN_MODELS.items():
        (tmp_path / name).write_text(text)
    _save_npz(tmp_path / "events.npz", **_events(200, 3000))
    _save_npz(tmp_path / "relations.npz", edge_type=np.arange(3000) % 3)
    np.save(tmp_path / "pairs.npy", [[0, 1], [2, 3]])
    if DATA.is_dir():
        shutil.copy(DATA / "esol.npz", tmp_path)
    away = ["ogbn-", "cora", "--gpus 4", "my_graph", "my_store", "other.npz", "PATH"]
    needs = {"mydgl.py": "dgl", "mypyg.py": "torch_geometric"}
    needs |= {"--timeline": "matplotlib", "picture": "matplotlib"}
    absent = [word for word, package in needs.items() if not _has(package)]
    absent += [] if DATA.is_dir() else ["esol.npz"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment, ran = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path}, 0
    known = {*flags.make_parser()._option_string_actions}
    settings = {  # words of a command: what is appended
        "esol.npz": "--epochs 2",
        "synthetic-mag": "--dataset synthetic-mag:scale=0.0005 --epochs 2 --hidden 8",
        "events.npz": "--epochs 2 --fanout 3,3",
        "relations.npz": "--epochs 2 --fanout 3,3",
        "--resume": "",
        "--help": "",
        "--runs": f"--dataset {TINY} --epochs 2 --fanout 3,3 --runs 2",
        "train.py": f"--dataset {TINY} --epochs 2 --fanout 3,3",
    }
    for command in "\n".join(_readme_blocks("bash")).split("\n"):
        command = command.split("  #")[0].strip()
        if not command.startswith("python ") or any(word in command for word in away):
            continue
        words = {word for word in command.split() if word.startswith("--")}
        assert "train.py" not in command or words <= known, command
        ran += 1
        # python -m bench takes hours; the tests above run it small
        bench_too = "bench" in command and "picture" not in command
        if bench_too or any(word in command for word in absent):
            continue
        if "train.py" in command:
            more = next(more for word, more in settings.items() if word in command)
            _train(*shlex.split(command)[2:], more, cwd=tmp_path)
            continue
        pipes = dict(capture_output=True, text=True)
        done = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, **pipes)
        assert done.returncode == 0, (command, done.stderr)
    assert ran > 4


def _run_page(page, tmp_path, monkeypatch) -> dict:
    """Run all blocks of a page of docs/ in order, in one folder -> its names. What the shell calls `python` with runs here."""
    monkeypatch.chdir(tmp_path)
    called = "#!/bin/bash\nprintf '%q ' \"$@\" >> called; echo >> called\n"
    (tmp_path / "python").write_text(called)
    (tmp_path / "python").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    names = {}
    text = (HERE / "docs" / page).read_text()
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if language == "python":
            exec(compile(block, page, "exec"), names)
            continue
        Path("called").write_text("")
        subprocess.run(["bash", "-ec", block], env=environment, check=True)
        for command in Path("called").read_text().splitlines():
            script, *words = shlex.split(command)
            main = {"store.py": cli.main, "train.py": train.main}[script]
            few = ["--epochs", "2"] if "--runs" in words else []
            assert main([*words, *few]) == 0, command
    return names


def test_the_movies_of_five_tables_are_recommended_by_name(tmp_path, monkeypatch):
    names = _run_page("movies.md", tmp_path, monkeypatch)
    assert len(names["best"]) == len({*names["best"]}) == 10 * len(names["likes"])
    assert names["right"] > 0.9 and not {*names["best"]} & {pair[:2] for pair in names["ratings"]}


def test_the_example_of_an_own_graph_runs_from_top_to_bottom(tmp_path, monkeypatch):
    pytest.importorskip("pandas"), pytest.importorskip("matplotlib")
    names = _run_page("own_graph.md", tmp_path, monkeypatch)
    table = names["table"]
    right = table.predicted[300:] == names["papers"].subject[300:]  # without labels
    later = names["predicted"]["class"] == names["later"].subject
    assert right.mean() > 0.9 and later.mean() > 0.9
    predicted = names["pd"].read_csv("predicted.csv")
    assert (predicted.node == table.id).all() and (predicted["class"] == table.predicted).all()
    assert len(names["rows"]) == 8 and len(names["means"]) == 4
    assert Path("papers.png").read_bytes().startswith(b"\x89PNG")


# lines of docs/leaving_dgl.md: a part of the left cell, what DGL computes; a part of the right one, what it is compared by. A
# graph is g in DGL; `stored` builds a store of it with options.
LINES_OF_DGL = """
dgl.to_bidirected(g) | edges(dgl.to_bidirected(g)) | symmetrize=True, drop_duplicates=True | edges(stored({}))
dgl.add_reverse_edges(g, exclude_self=False) | edges(dgl.add_reverse_edges(g, exclude_self=False)) | symmetrize=True | edges(stored({}))
`AddReverse` | edges(dgl.AddReverse()(g)) | symmetrize=True | edges(stored({}))
dgl.to_simple(g) | edges(dgl.to_simple(g)) | drop_duplicates=True | edges(stored({}))
dgl.remove_self_loop(g) | edges(dgl.remove_self_loop(g)) | drop_self_loops=True | edges(stored({}))
g.in_degrees() | g.in_degrees() | graph.indptr.diff() | {}
g.edata["w"] | g.edata["w"][graph.edge_order].float() | graph.edge_weight | {}
srcdata[dgl.NID] | theirs.srcdata[dgl.NID] | block.src_nodes | {}
block.num_src_nodes() | theirs.num_src_nodes() | block.num_src | {}
block.edata[dgl.EID] | edges_of_block(theirs) | graph.given_edges(block.edge_ids) | g.find_edges({})[0]
adj_tensors("csc") | theirs.adj_tensors("csc")[1] | block.indices | {}
block.edges() | torch.stack(theirs.edges()) | block.to_pyg()[0] | {}
block.update_all | averaged(theirs, h) | mean_neighbours(block.indptr, block.indices, h) | {}
edge_softmax(block, scores) | dgl.nn.functional.edge_softmax(theirs, scores) | edge_softmax(scores, block.to_pyg()[0][1], block.num_dst) | {}
a DGL layer that stays | theirs_conv(theirs, h) | conv(block.to_dgl(), h) | {}
`SAGEConv(in_dim, out_dim, "mean") | theirs_conv(theirs, (h, h[:S])) | SAGEConv(in_dim, out_dim) | ours_conv(block, h)
"reverse_id" | without | sampler.sample(..., exclude=graph.stored_edges(eids)) | again(eids)
"""


def test_lines_for_those_who_leave_dgl_do_what_dgl_does(tmp_path, monkeypatch):
    dgl = _dgl()
    monkeypatch.chdir(tmp_path)
    text = (HERE / "docs/leaving_dgl.md").read_text()
    rng = np.random.default_rng(0)
    arrays = {"edge_index": rng.integers(0, 60, (2, 500)), "x": rng.random((60, 8), np.float32)}
    names = {**arrays, "y": np.arange(60) % 3, "w": rng.random(500) * (rng.random(500) < 0.8)}
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        exec(compile(block, "leaving_dgl.md", "exec"), names)
    graph, sampler, block, g = (names[name] for name in ("graph", "sampler", "block", "g"))
    lost = {*names["eids"].tolist()} & {
        e for b in names["without"] for e in graph.given_edges(b.edge_ids).tolist()
    }
    assert not lost and (graph.edge_weight[block.edge_ids] > 0).all()
    theirs = block.to_dgl()
    h = torch.from_numpy(rng.random((block.num_src, 8), np.float32))
    conv = dgl.nn.SAGEConv(8, 5, "mean")
    ours = names["GNN"](8, 5, 5, conv="sage", num_layers=1).layers[0]
    ours.load_state_dict(names["from_dgl"](conv))
    count = itertools.count()

    def edges(of):
        if hasattr(of, "indptr"):
            return torch.tensor(_edges(of)).T
        src, dst = (ends.tolist() for ends in of.edges())
        return torch.tensor(sorted(zip(src, dst))).T

    def averaged(graph, h):
        graph.srcdata["h"] = h
        graph.update_all(dgl.function.copy_u("h", "m"), dgl.function.mean("m", "h"))
        return graph.dstdata["h"]

    def stored(**options):
        return GraphStore.open(names["build"](g, tmp_path / f"store-{next(count)}", **options))

    names |= {
        "S": block.num_dst,
        "scores": torch.randn(block.num_edges, 2),
        "edges_of_block": lambda b: b.srcdata[dgl.NID][b.edges()[0].long()],
        "again": lambda e: sampler.sample(torch.arange(9), 0, exclude=graph.stored_edges(e)),
        **{"theirs": theirs, "h": h, "conv": conv, "theirs_conv": conv, "ours_conv": ours},
        **{"edges": edges, "averaged": averaged, "stored": stored},
    }
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| ")]
    for left, dgls, right, compared in _rows(LINES_OF_DGL):
        assert any(left in cells[0] and right in cells[1] for cells in rows), (left, right)
        wanted = eval(dgls, names)
        found = eval(compared.format(right), names)
        if isinstance(wanted, list):
            assert _as_lists(wanted) == _as_lists(found)
        else:
            wanted, found = map(torch.as_tensor, (wanted, found))
            torch.testing.assert_close(found, wanted, check_dtype=False, msg=left)
    looped = dgl.add_self_loop(g)
    mlp = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.ReLU(), torch.nn.Linear(6, 6))
    feats = g.ndata["feat"]
    (block,) = NeighborSampler(graph.indptr, graph.indices, [-1]).sample(torch.arange(60), 0)
    src = block.src_nodes.long()
    degree = model.graph_degrees(graph.indptr, graph.indices)[src]
    for kind, layer, on in (
        ("sage", dgl.nn.SAGEConv(8, 6, "mean"), g),
        ("sage-pool", dgl.nn.SAGEConv(8, 6, "pool"), g),
        ("gcn", dgl.nn.GraphConv(8, 6), looped),
        ("gat", dgl.nn.GATv2Conv(8, 2, 3), looped),
        ("gin", dgl.nn.GINConv(mlp, "sum", 0.3, learn_eps=True), g),
    ):
        heads = {"heads": 3} if kind == "gat" else {}
        inner = names["GNN"](8, 6, 6, conv=kind, num_layers=2, **heads).eval().layers[0]
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter)
        inner.load_state_dict(names["from_dgl"](layer))
        out = inner(block, graph.features[src], degree if inner.uses_degree else None)
        torch.testing.assert_close(out, layer(on, feats).flatten(1))


def test_readme_python_blocks_run(tmp_path, monkeypatch):
    """README's Python blocks in order, on a small graph under the names they use; those of DGL and PyG if installed."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 400)
    dst = rng.integers(0, 400, 4000)  # edges join nodes of a class
    src = np.array([rng.choice(np.flatnonzero(y == y[node])) for node in dst])
    features = (rng.normal(size=(400, 8)) + 0.7 * np.eye(8)[y]).astype(np.float32)
    names = {"edge_index": np.stack([src, dst]), "x": features, "y": y}
    # the fields of PyG's Data that are read
    data = {name: torch.from_numpy(values) for name, values in names.items()}
    names |= {
        "list_of_pyg_data": [types.SimpleNamespace(**data | {"y": i}) for i in (0, 1)],
        "dgl_graph_or_pyg_data": types.SimpleNamespace(**data),
        "train_nodes": range(200),
        **{"a": range(200), "b": range(200, 300), "c": range(300, 400)},
        "edge_times": torch.zeros(4000).long(),
        **{"seeds": torch.arange(9), "times": torch.arange(9), "edge_ids": torch.arange(50)},
        "edge_type": rng.integers(0, 3, 4000),
    }
    short = {"edge_weight": "w", "edge_time": "t", "edge_features": "e"}
    names |= {short.get(name, name): values for name, values in _events(400, 4000).items()}
    blocks = _readme_blocks("python")
    assert len(blocks) >= 4
    needs = {"import_dgl": "dgl", "torch_geometric": "torch_geometric", "lightning": "lightning"}
    for block in blocks:
        if any(word in block and not _has(package) for word, package in needs.items()):
            continue
        if "cora_model" in block:  # tests/test_checkpoint.py runs it on an exported model
            continue
        given = names
        if "block_diagonal" in block:  # 400 graphs of two nodes and an edge
            many = {
                "num_nodes": [2] * 400,
                "num_edges": [1] * 400,
                "edge_index": [[0] * 400, [1] * 400],
                "x": np.zeros((800, 3), np.float32),
                "e": np.zeros((400, 2), np.uint8),
                "y": np.zeros(400, np.float32),
            }
            given = {**names, **many, "another_batch": block_diagonal(**many)}
        exec(compile(block, "README.md", "exec"), given)
        if "train_nodes" in block:  # the loop from tensors to a trained model
            assert (given["classes"].numpy()[200:] == y[200:]).mean() > 0.95
