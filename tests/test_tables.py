"""Tests: sources/tables.py and sources/graph_tables.py."""

import bz2
import collections
import csv
import gzip
import io
import json
import lzma
import os
import re
import sys
import tracemalloc
from contextlib import nullcontext

import numpy as np
import pytest

import store
from disk import files as disk
from disk.files import StoreError
from sources import graph_tables, tables
from sources import prepare as datasets
from sources.arrays import Arrays
from store import GraphStore, build_store, verify
from tests.common import _edges, _run


def _table_file(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


EDGES, X, Y = (
    "0,1\n1,2\n2,3\n3,0\n4,2\n5,4\n",
    "".join(f"{i}.5,{-i}\n" for i in range(6)),
    "0\n1\n0\n1\n0\n1\n",
)


EDGES_X_Y = (
    [[0, 1, 2, 3, 4, 5], [1, 2, 3, 0, 2, 4]],
    [[i + 0.5, -i] for i in range(6)],
    [0, 1, 0, 1, 0, 1],
)


# what is written instead of the table -> None: the same graph, a list: these labels, else what refuses it
DAMAGE = {
    "short lines": (
        "e",
        EDGES.replace("2,3", "2\n3"),
        "e.csv, line 3: Expected 2 columns, got 1: 2",
    ),
    "short lines only": ("e", "0,1\n2\n3\n4,5\n", "e.csv, line 2"),
    "a long line": (
        "x",
        X.replace("2.5,-2", "2.5,-2,1"),
        "x.csv, line 3: Expected 2 columns, got 3: 2.5,-2,1",
    ),
    "lines that add up": ("x", X.replace("2.5,-2\n3.5,-3", "2.5\n-2,3.5,-3"), "x.csv, line 3: "),
    "byte-order mark, labels": ("y", "\ufeff" + Y, None),
    "byte-order mark, edges": ("e", "\ufeff" + EDGES, None),
    "empty first label": ("y", '""' + Y[1:], [-1, 1, 0, 1, 0, 1]),
    "empty cell of an edge": (
        "e",
        EDGES.replace("2,3", "2,"),
        "e.csv, line 3: column 2 is empty, nan or infinite",
    ),
    "column id": (
        "x",
        "id,a,b\n" + "".join(f"{i},{line}\n" for i, line in enumerate(X.split())),
        None,
    ),
    "column id in disorder": (
        "x",
        "a,node_id,b\n" + "".join(f"{i}.5,{i},{-i}\n" for i in (3, 1, 0, 5, 4, 2)),
        "y.csv has no column of ids",
    ),
    "ids without a name": ("x", "".join(f"{i},{line}\n" for i, line in enumerate(X.split())), None),
    "the index of pandas": (
        "x",
        ",0,1\n" + "".join(f"{i},{line}\n" for i, line in enumerate(X.split())),
        None,
    ),
    "semicolons": ("x", X.replace(",", ";"), None),
    "tabs and a header": ("e", "src\tdst\n" + EDGES.replace(",", "\t"), None),
    "spaces": ("e", "".join("%3s  %3s\n" % tuple(line.split(",")) for line in EDGES.split()), None),
    "destination first": (
        "e",
        "target;source\n"
        + "".join(";".join(line.split(",")[::-1]) + "\n" for line in EDGES.split()),
        None,
    ),
    "comments": ("e", "# an edge a line\n" + EDGES, None),
    "names in a comment": (
        "e",
        "# dst,src\n" + "".join(",".join(line.split(",")[::-1]) + "\n" for line in EDGES.split()),
        None,
    ),
    "quotes": ("e", '"source","target"\n' + re.sub(r"(\d)", r'"\1"', EDGES), None),
    "carriage returns": ("y", Y.replace("\n", "\r\n"), None),
    "old carriage returns": ("y", Y.replace("\n", "\r"), None),
    "blank lines": ("x", X.replace("\n", "\n\n"), None),
    "separators at the end": ("e", EDGES.replace("\n", ",\n"), "e.csv has more columns than are"),
    "separators at the end of features": (
        "x",
        X.replace("\n", ",\n"),
        "x.csv, line 1: column 3 is empty, nan or infinite: a number is needed",
    ),
    "a comment inside": (
        "e",
        EDGES.replace("2,3", "# so far\n2,3"),
        "e.csv, line 3: Expected 2 columns, got 1: # so far",
    ),
    "floats as ids": ("e", re.sub(r"(\d)", r"\1.0", EDGES), None),
    "no whole number": (
        "e",
        EDGES.replace("2,3", "2,3.5"),
        "e.csv, line 3: column 2 is 3.5, which is no whole number",
    ),
    "beyond int64": (
        "e",
        EDGES.replace("2,3", "2,18446744073709551619"),
        "e.csv, line 3: column 2 is no whole number of 64 bits: .*'18446744073709551619'",
    ),
    "no number": (
        "e",
        EDGES.replace("2,3", "2,x"),
        "e.csv, line 3: column 2 is no whole number of 64 bits: invalid value 'x'",
    ),
    "nan as id": (
        "e",
        EDGES.replace("2,3", "2,nan"),
        "e.csv, line 3: column 2 is empty, nan or infinite",
    ),
    "a minus alone": (
        "x",
        X.replace("2.5,-2", "2.5,-"),
        "x.csv, line 3: column 2 is no number: invalid value '-'",
    ),
    "bars": (
        "e",
        EDGES.replace(",", "|"),
        "e.csv has one column: .*a comma, a semicolon, a tab or a space",
    ),
    "no such node": (
        "e",
        EDGES.replace("2,3", "2,6"),
        "e.csv, line 3: there is no node 6: .*x.csv has the nodes 0 to 5",
    ),
    "a weight": ("e", EDGES.replace("\n", ",1\n"), "more columns than are understood, column 3"),
    "a named weight": (
        "e",
        "source,target,weight\n" + EDGES.replace("\n", ",1\n"),
        "understood, 'weight': leave them out",
    ),
    "a label among features": (
        "x",
        "a,label\n" + X,
        "x.csv has a column 'label', and features must not tell",
    ),
    "two columns of a name": ("x", "a,a\n" + X, "x.csv has two columns called 'a'"),
    "infinity": ("x", X.replace("2.5", "inf"), "x.csv, line 3: column 1 is empty, nan or infinite"),
    "beyond float32": (
        "x",
        X.replace("2.5", "1e39"),
        "features.2, 0. is inf: every value must be finite",
    ),
    "text as labels": ("y", Y.replace("0", "no").replace("1", "yes"), None),
    "missing labels": ("y", Y[:2] + "nan\n" + Y[4:6] + "-1\n" + Y[8:], [0, -1, 0, -1, 0, 1]),
    "labels by id": ("y", "id,label\n5,1\n3,1\n1,1\n0,0\n2,0\n", [0, 1, 0, 1, -1, 1]),
    "labels by id, twice": (
        "y",
        "id,label\n5,1\n3,1\n5,1\n",
        "y.csv, line 4: node 5 is there for the second time",
    ),
    "NA among labels": (
        "y",
        Y.replace("1", "NA", 1),
        "y.csv, line 2: column 1 is no number: invalid value 'NA'",
    ),
    "a header too many": (
        "y",
        "topic\n" + Y.replace("0", "no").replace("1", "yes"),
        "y.csv, line 7: there are more rows than the 6 of .*x.csv; a header is known by",
    ),
    "a header of an unknown name": ("y", "topic\n" + Y, None),
    "too few labels": ("y", Y[2:], "y.csv has 5 rows, .*x.csv has 6 rows"),
    "too many labels": ("y", Y + Y, "y.csv, line 7: there are more rows than the 6 of"),
    "half a label": (
        "y",
        Y.replace("1", "0.5", 1),
        "labels.1. is 0.5: labels are whole .*node regression, are not supported",
    ),
    "several labels": (
        "y",
        "0,1,1\n,,\n0,0,0\n-1,-1,-1\n1,1,1\n0,1,0\n",
        [[0, 1, 1], [-1] * 3, [0, 0, 0], [-1] * 3, [1, 1, 1], [0, 1, 0]],
    ),
    "several labels by id": (
        "y",
        "art,id,law\n1,5,1\n0,2,1\n",
        [[-1, -1], [-1, -1], [0, 1], [-1, -1], [-1, -1], [1, 1]],
    ),
    "several labels, one not": (
        "y",
        "0,1,1\n0,2,0\n" * 3,
        "labels.1, 1. is .*: of several labels a",
    ),
    "several labels, one empty": (
        "y",
        "0,1,1\n0,,0\n" * 3,
        "labels.1, 1. is .*: of several labels a",
    ),
    "no labels": ("y", "-1\n" * 6, "none of the 6 nodes has a label"),
    "an endless quote": (
        "e",
        EDGES.replace("2,3", '2,"3'),
        "e.csv, line 3: column 2 is no whole number of 64 bits",
    ),
    "a quote over two lines": (
        "e",
        EDGES.replace("2,3\n3,0", '2,"3\n3",0'),
        "e.csv, line 3: Expected 2 columns",
    ),
    "a zero byte": (
        "e",
        EDGES.replace("2,3", "2,\0003"),
        "e.csv is no text in UTF-8: unpack archives",
    ),
    "Latin-1": (
        "e",
        EDGES.replace("2,3", "2,\xe9").encode("latin1"),
        "e.csv cannot be read: .* byte 0xe9",
    ),
    "UTF-16": ("e", EDGES.encode("utf-16"), "e.csv is no text in UTF-8"),
    "gzip by content": ("e", gzip.compress(EDGES.encode()), None),
    "bzip2": ("x", bz2.compress(X.encode()), None),
    "xz": ("y", lzma.compress(Y.encode()), None),
    "gzip cut off": (
        "e",
        gzip.compress(EDGES.encode() * 1000)[:-6],
        "e.csv cannot be read: Compressed file ended",
    ),
    "gzip damaged": (
        "e",
        gzip.compress(EDGES.encode())[:-8] + bytes(8),
        "e.csv cannot be read: CRC check failed",
    ),
    "zip": ("e", b"PK\3\4" + bytes(30), "e.csv is no text in UTF-8: unpack archives"),
    "nothing": ("y", "", "y.csv is empty"),
    "a header only": ("e", "src,dst\n", "e.csv has a header and no rows"),
    "comments only": ("e", "# 0,1\n\n", "e.csv is empty"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_tables_of_strangers(tmp_path, capsys, case):
    name, content, outcome = DAMAGE[case]
    e, x, y = (
        _table_file(tmp_path / f"{part}.csv", content if part == name else good)
        for part, good in (("e", EDGES), ("x", X), ("y", Y))
    )
    args = dict(
        features=x, labels=y, split={"train": _table_file(tmp_path / "train.csv", "2\n5\n")}
    )
    if isinstance(outcome, str):
        with pytest.raises(StoreError, match=outcome) as error:
            datasets.build(e, tmp_path / "s", **args)
        assert "\n" not in str(error.value) and len(str(error.value)) < 400
        assert {path.name for path in tmp_path.iterdir()} == {
            "e.csv",
            "x.csv",
            "y.csv",
            "train.csv",
        }
        return
    graph = GraphStore.open(datasets.build(e, tmp_path / "s", **args))
    edges, features, labels = EDGES_X_Y
    assert _edges(graph) == sorted(zip(*edges)) and graph.features.tensor.tolist() == features
    assert graph.labels.tolist() == (labels if outcome is None else outcome) and graph.split[
        "train"
    ].tolist() == [2, 5]
    printed = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert set(printed) == {"x.csv", "y.csv", "e.csv", "train.csv"}


def test_tables_say_what_was_guessed(tmp_path, capsys):
    file = _table_file(tmp_path / "e.csv", "# a\n# b\n\nsrc;dst\n0;1\n1;0\n")
    graph_tables.edges(file, tmp_path / "e", graph_tables.Nodes(2, "x.csv"))
    _, nodes = graph_tables.features(
        _table_file(tmp_path / "x.csv", "p,.5,1\nq,1,1\nr,0,0\n"), tmp_path / "x"
    )
    graph_tables.labels(_table_file(tmp_path / "y.csv", "r;b c\np;a\n"), nodes)
    graph_tables.edges(_table_file(file, EDGES), tmp_path / "e", graph_tables.Nodes(6, "x.csv"))
    assert capsys.readouterr().out == (
        "e.csv: 2 columns by separator ';', header src;dst, 2 rows\n"
        "x.csv: 3 columns by separator ',', no header, column 1 names the nodes, such as p, 3 rows, 2 features\n"
        "y.csv: 2 columns by separator ';', no header, column 1 taken as ids, column 2 as labels, 2 rows\n"
        "e.csv: 2 columns by separator ',', no header (0,1 is a row: if pandas wrote it, put names in its place), "
        "column 1 taken as source, column 2 as destination, 6 rows\n"
    )


def test_tables_nodes_with_names(tmp_path):
    """Text, and integers that are not 0 to V-1, are mapped to the rows of the features; the names are kept."""
    for kind, names in (
        ("text", ["anna", "bob", "#c", "d, e", "é", "6"]),
        ("numbers", [31336, 7, 0, 1061127, 5, 10]),
    ):
        quoted = [f'"{name}"' for name in names]
        e = "from,to\n" + "".join(
            f"{quoted[int(u)]},{quoted[int(v)]}\n"
            for u, v in (line.split(",") for line in EDGES.split())
        )
        x = (
            "node,a,b\n" + "".join(f"{name},{line}\n" for name, line in zip(quoted, X.split()))
            if kind == "text"
            else "paper_id,a,b\n"
            + "".join(f"{name},{line}\n" for name, line in zip(names, X.split()))
        )
        y = "".join(f"{name};{label}\n" for name, label in sorted(zip(quoted, Y.split())))
        e, x, y, train = (
            _table_file(tmp_path / f"{kind}-{part}.csv", content)
            for part, content in (
                ("e", e),
                ("x", x),
                ("y", y),
                ("train", f"{quoted[0]}\n{quoted[2]}\n"),
            )
        )
        path = datasets.build(e, tmp_path / kind, features=x, labels=y, split={"train": train})
        graph = GraphStore.open(path)
        assert (
            _edges(graph) == sorted(zip(*EDGES_X_Y[0]))
            and graph.features.tensor.tolist() == EDGES_X_Y[1]
        )
        assert (
            graph.labels.tolist() == EDGES_X_Y[2]
            and graph.split["train"].tolist() == [0, 2]
            and verify(path) == []
        )
        assert (path / "nodes.txt").read_text("utf-8") == "".join(f"{name}\n" for name in names)
        assert list(map(str, names)) == graph.node_names() and "nodes.txt" in store.info(path)
        for part, content, complaint in (
            (e, "from,to\nzoe,7\n", "line 2"),
            (y, Y, "no column of ids"),
            (x, X, "line 1: column 1 is no whole number|there is no node"),
        ):
            good = part.read_bytes()
            with pytest.raises(StoreError, match=complaint):
                _table_file(part, content)
                datasets.build(e, tmp_path / "bad", features=x, labels=y, split={"train": train})
            part.write_bytes(good)
    with pytest.raises(
        StoreError, match="holds the ids of the nodes, but b is there more than once"
    ):
        graph_tables.features(_table_file(tmp_path / "x.csv", "a,1\nb,2\nb,3\n"), tmp_path / "x")


def test_tables_names_of_nodes_are_guarded(tmp_path):
    """nodes.txt is under the store's checksums; a store from before that, which has it beside them, opens as it did."""
    x = _table_file(
        tmp_path / "x.csv", "".join(f"n{i},{line}\n" for i, line in enumerate(X.split()))
    )
    e = _table_file(tmp_path / "e.csv", re.sub(r"(\d)", r"n\1", EDGES))
    y = _table_file(tmp_path / "y.csv", "".join(f"n{i},{i % 2}\n" for i in range(6)))
    built = datasets.build(
        e,
        tmp_path / "s",
        features=x,
        labels=y,
        split={"train": _table_file(tmp_path / "t.csv", "n0\n")},
    )
    names = (built / "nodes.txt").read_bytes()
    for content, opens in (
        (names.replace(b"n3", b"n9"), True),
        (names[:-3], False),
        (names + b"n6\n", False),
        (None, False),
    ):
        (built / "nodes.txt").write_bytes(content) if content is not None else (
            built / "nodes.txt"
        ).unlink()
        problems = verify(built)
        assert len(problems) == 1 and problems[0].startswith("nodes.txt: "), problems
        assert _run("store.py", "verify", built).returncode == 1
        with (
            nullcontext()
            if opens
            else pytest.raises(StoreError, match="nodes.txt .*rebuild the store")
        ):
            GraphStore.open(built)
    (built / "nodes.txt").write_bytes(names)
    assert verify(built) == []
    kept = (built / "meta.json").read_bytes()
    meta = json.loads(kept)
    del meta["files"]["nodes.txt"]["sha256"]
    (built / "meta.json").write_bytes(disk.dump_meta(meta))
    with pytest.raises(StoreError, match="rebuild the store"):
        GraphStore.open(built)
    (built / "meta.json").write_bytes(kept)
    meta = json.loads((built / "meta.json").read_bytes())
    del meta["files"]["nodes.txt"]
    (built / "meta.json").write_bytes(disk.dump_meta(meta))
    assert GraphStore.open(built).node_names() is None and verify(built) == []


def test_store_names_of_nodes(tmp_path):
    x = np.eye(3, dtype=np.float32)
    for names, complaint in (
        (["a", "b"], "node_names has 2 names: 3 are needed"),
        (["a", "b\nc", "d"], "name 1, 'b.nc', .* line"),
        (["a", "b", "a"], "node_names holds 'a' more than once"),
    ):
        with pytest.raises(StoreError, match=complaint):
            build_store(tmp_path / "s", edge_index=[[0, 1], [1, 2]], features=x, node_names=names)
    assert not (tmp_path / "s").exists()
    path = build_store(
        tmp_path / "s", edge_index=[[0, 1], [1, 2]], features=x, node_names=["a", "\u2028b", ""]
    )
    assert GraphStore.open(path).node_names() == ["a", "\u2028b", ""] and verify(path) == []


def test_tables_classes_are_kept(tmp_path):
    e, x, y = (
        _table_file(tmp_path / f"{name}.csv", text)
        for name, text in (
            ("e", EDGES),
            ("x", X),
            (
                "y",
                "id,topic\n"
                + "".join(f"{i},{t}\n" for i, t in enumerate("zoo,art,zoo,,law,art".split(","))),
            ),
        )
    )
    graph = GraphStore.open(datasets.build(e, tmp_path / "s", features=x, labels=y))
    assert graph.labels.tolist() == [2, 0, 2, -1, 1, 0] and graph.meta["source"]["classes"] == [
        "art",
        "law",
        "zoo",
    ]


def test_tables_ids_of_a_split(tmp_path):
    nodes = graph_tables.Nodes(9, "x.csv")
    for text in ("3\n1\n8\n", "id\n3\n1\n8\n", "train\n3\n1\n8", '"3"\r\n"1"\r\n"8"\r\n'):
        assert graph_tables.ids(_table_file(tmp_path / "t.csv", text), nodes).tolist() == [3, 1, 8]
    for text, complaint in (
        ("", "is empty"),
        ("id\n", "no rows"),
        ("0\n1\n1\n0\n", "this looks like a mask of 0 and 1: ids"),
        ("0\n2\n2\n0\n", "line 3: node 2 is there for the second time"),
        ("9\n", "there is no node 9"),
        ("0,1\n2,3\n", "has 2 columns"),
    ):
        with pytest.raises(StoreError, match=complaint):
            graph_tables.ids(_table_file(tmp_path / "t.csv", text), nodes)


def test_tables_weights_and_times(tmp_path):
    file = _table_file(
        tmp_path / "e.csv",
        "w,dst,Source ID,Timestamp\n1,0,1,1700000000123456789\n.5,1,2,1700000000123456788\n",
    )
    nodes = graph_tables.Nodes(3, "x.csv")
    keep = {"edge_weight": ["w"], "edge_time": ["4"]}
    edge_index, more = graph_tables.edges(file, tmp_path / "e", nodes, keep)
    assert edge_index.tolist() == [[1, 2], [0, 1]] and list(more) == ["edge_weight", "edge_time"]
    assert more["edge_weight"].tolist() == [1, 0.5]
    assert more["edge_time"].tolist() == [1700000000123456789, 1700000000123456788]
    _, more = graph_tables.edges(file, tmp_path / "e", nodes, {"edge_features": ["Timestamp", "w"]})
    assert more["edge_features"].tolist() == [[np.float32(1.7e18), 1], [np.float32(1.7e18), 0.5]]
    for keep, complaint in (
        (
            {"edge_weight": ["w"]},
            "understood, 'Timestamp': leave them out, or say what they are by --w",
        ),
        (
            {"edge_weight": ["W"]},
            "has no column 'W', and there is no file of that name: it has w, dst",
        ),
        ({"edge_weight": ["5"]}, "has no column '5'"),
        ({"edge_weight": ["dst"]}, "'dst' is taken for two"),
    ):
        with pytest.raises(StoreError, match=complaint):
            graph_tables.edges(file, tmp_path / "e", nodes, keep)
    for header in ("source,paper", "dst,src,dst2", "from,u,to"):
        with pytest.raises(StoreError, match="call one source|more columns"):
            text = f"{header}\n" + ",".join("012"[: len(header.split(","))]) + "\n"
            graph_tables.edges(_table_file(tmp_path / "e.csv", text), tmp_path / "e", nodes)


def test_tables_change_far_inside(tmp_path):
    """Pieces of a table are compared with each other, and lines are counted over all of them."""
    good, count = b"1.5,2\n", 300_000
    for bad, complaint in (
        (b"1,2,3,4\n" * 10, "Expected 2 columns, got 4: 1,2,3,4"),
        (b"1\n2\n", "Expected 2 columns, got 1: 1"),
        (b"1,x\n", "column 2 is no number: invalid value 'x'"),
    ):
        with pytest.raises(StoreError, match=f"line {count + 1}: .*{complaint}"):
            graph_tables.features(
                _table_file(tmp_path / "x.csv", good * count + bad), tmp_path / "x"
            )
    x, _ = graph_tables.features(
        _table_file(tmp_path / "x.csv", good * count + b'"3", 4 \n\n' + good * count),
        tmp_path / "x",
    )
    assert (
        len(x) == 2 * count + 1
        and x[count].tolist() == [3, 4]
        and (np.delete(x, count, 0) == [1.5, 2]).all()
    )


def _read(text, kind, width=2):
    """[r, width] of a table of bytes, all of whose columns are of a kind."""
    table = tables.Table(io.BytesIO(text), "t.csv")
    assert table.width == width
    return np.concatenate(
        [np.stack(list(c.values()), 1) for _, c in table.read(dict.fromkeys(range(width), kind))]
    )


def test_tables_numbers_are_those_of_python():
    """The bits are those of int and float; what Python would not take is refused with its line."""
    random = np.random.default_rng(0)
    scales = 10.0 ** random.integers(-300, 300, 300)
    floats = [repr(float(v)) for v in random.standard_normal(300) * scales]
    floats += [f"{float(v):.25g}" for v in floats] + ["5.", ".5", "007", "4.9e-324", "1E5"]
    whole = [str(v) for v in random.integers(0, 1 << 62, 300)]
    whole += ["0", "9223372036854775807", "0012", "-9223372036854775808", "-0"]
    for kind, cells, python in (
        (float, floats, float),
        (int, whole, int),
        (int, ["2.0", "3e2"], float),
    ):
        for form in ("{},{}\n", '"{}", {}\n', "{};{}\n", "{}\t{}\n", "{} {}\n", "  {}   {}\n"):
            text = "".join(form.format(*pair) for pair in zip(cells, reversed(cells)))
            found = _read(text.encode(), kind)[:, 0]
            expected = np.array([python(cell) for cell in cells], found.dtype)
            assert found.tobytes() == expected.tobytes(), (kind, form)
    cells = [
        "1_0",
        "\uff11",
        "1e",
        "--1",
        "1-2",
        "",
        "-",
        ".",
        "e5",
        "1 2",
        "nan",
        "inf",
        "1e999",
        "1,5",
    ]
    for cell in [*cells, "9" * 5000]:
        for kind in (float, int):
            with pytest.raises(StoreError, match="line 2: column 2 is "):
                if cell != "9" * 5000 or kind is int:
                    _read(f'1,2\n1,"{cell}"\n1,2\n'.encode(), kind)
                raise StoreError("line 2: column 2 is ")
    for cell in (
        "9223372036854775808",
        "-9223372036854775809",
        "9007199254740992.0",
        "1.5",
        "1e-3",
    ):
        with pytest.raises(StoreError, match="line 2: column 2 .* whole number"):
            _read(f"1,2\n1,{cell}\n".encode(), int)


def _read_slowly(content, separator, width):
    """An independent reading: Python's csv module line by line -> rows, or None where they are not equally wide."""
    rows = []
    try:
        text = content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        return None
    for number, line in enumerate(text.split("\n")):
        if line.strip(" ") == "" or not rows and line.lstrip(" ").startswith("#"):
            continue
        if separator == " ":
            line = line if '"' in line else re.sub(" +", " ", line.strip(" "))
        form = dict(delimiter=separator, skipinitialspace=separator != " ")
        try:
            next(csv.reader([line], **form, strict=True))
        except csv.Error as error:
            # a quote that does not end; of the last line nobody can say whether more was to come
            if "unexpected end" in str(error) and text.rstrip("\n ").count("\n") > number:
                return None
        row = next(csv.reader([line], **form))
        row = [re.sub('^"(.*)"$', r"\1", cell.strip()) for cell in row]
        if len(row) != width or "\0" in line:
            return None
        rows.append(row)
    return rows


def _slow_number(cell, whole):
    if not re.fullmatch("[-+0-9.eE]+", cell):
        raise ValueError(cell)
    value = int(cell) if re.fullmatch("[-+]?[0-9]+", cell) and whole else float(cell)
    if not (abs(value) < 1 << 63 and value == int(value) if whole else abs(value) < 3.4e38):
        raise ValueError(cell)
    return int(value) if whole else float(np.float32(value))


def _slow_meaning(kind, rows):
    """What the rows of a mutated table mean, in plain Python; None where they mean nothing."""

    def number(cell):
        return cell == "nan" or re.fullmatch("[-+0-9.][-+0-9.eE]*", cell) is not None

    if not rows:
        return None
    names = [re.sub("[^a-z0-9]", "", name.lower()) for name in rows[0]]  # spelt anyhow
    named = names == ["label"]
    if kind != "text":
        named = (
            rows[0] != [""]
            and not any(map(number, rows[0]))
            and rows[0][0][:1] not in "+-.0123456789"
        )
    names = names if named else None
    rows = rows[1:] if names else rows
    try:
        if kind == "edges":
            swapped = names is not None and names[0] in ("dst", "dest") and names[1] == "src"
            order = [1, 0] if swapped else [0, 1]
            pairs = [[_slow_number(row[j], True) for j in order] for row in rows]
            return pairs if pairs and all(0 <= v < 30 for pair in pairs for v in pair) else None
        if kind == "features":
            return [[_slow_number(cell, False) for cell in row] for row in rows] or None
        if len(rows) != 25:
            return None
        if kind == "labels":
            found = [-1 if cell in ("", "nan") else _slow_number(cell, True) for (cell,) in rows]
            return found if min(found) >= -1 else None
        classes = sorted({cell for (cell,) in rows} - {"", "nan"})
        return [-1 if cell in ("", "nan") else classes.index(cell) for (cell,) in rows]
    except (ValueError, OverflowError):
        return None


def test_tables_fuzz(tmp_path, capsys):
    """500 tables, each damaged in one or two places: read as the csv module and plain Python read them, or refused.

    RINGBLOCK_FUZZ=60000 makes it as many.
    """
    random = np.random.default_rng(0)
    nodes, counts = graph_tables.Nodes(30, "x.csv"), collections.Counter()
    for trial in range(int(os.environ.get("RINGBLOCK_FUZZ", 500))):
        kind = ("edges", "features", "labels", "text")[trial % 4]
        separator = ",;\t "[random.integers(4)] if kind in ("edges", "features") else ","
        header, quotes = (bool(random.integers(4) == 0) for _ in range(2))
        width = dict(edges=2, features=int(random.integers(1, 6))).get(kind, 1)
        separator = "," if width == 1 else separator
        if kind == "edges":
            rows = random.integers(0, 30, (25, 2)).tolist()
        elif kind == "features":
            rows = [["%.4g" % v for v in row] for row in random.standard_normal((25, width))]
        else:
            rows = [
                [("cat", "dog", "c d")[v] if kind == "text" else v]
                for v in random.integers(0, 3, 25)
            ]
        names = dict(
            edges=[["src", "dst"], ["dst", "src"]][random.integers(2)],
            features=list("pqrst"[:width]),
        ).get(kind, ["label"])
        lines = [
            [f'"{cell}"' if quotes else str(cell) for cell in row]
            for row in ([names] if header else []) + rows
        ]
        end = ("\n", "\r\n")[random.integers(2)]
        content = bytearray("".join(separator.join(row) + end for row in lines).encode())
        for _ in range(random.integers(1, 3)):
            at, what = int(random.integers(len(content))), random.integers(8)
            if what < 4:  # put something in, or in the place of something
                alphabet = [
                    "0",
                    "7",
                    "-",
                    ".",
                    "e",
                    " ",
                    "#",
                    '"',
                    "\n",
                    "\r",
                    separator,
                    ",",
                    ";",
                    "\t",
                    "\0",
                    "x",
                    "nan",
                    "\ufeff",
                    "é",
                    "99999999999",
                ]
                content[at : at + int(what < 2)] = alphabet[random.integers(len(alphabet))].encode()
            elif what < 6:  # take something out
                del content[at : at + int(random.integers(1, 4))]
            elif what == 6:  # say something twice
                content[at:at] = content[at : at + int(random.integers(1, 9))]
            else:
                content = content[: max(at, len(content) - 20)]
        file, content = _table_file(tmp_path / "t.csv", bytes(content)), bytes(content)
        rows = _read_slowly(content, separator, width)
        expected = None if rows is None else _slow_meaning(kind, rows)
        try:
            if kind == "edges":
                found = graph_tables.edges(file, tmp_path / "e", nodes)[0].T.tolist()
            elif kind == "features":
                found = graph_tables.features(file, tmp_path / "x")[0].tolist()
            else:
                found = graph_tables.labels(file, graph_tables.Nodes(25, "x.csv"))
                found = Arrays(file, {"labels": found}).labels()
                found = store.check_labels(found, 25)[0].tolist()
        except StoreError as error:
            assert "\n" not in str(error) and re.search(f"{file}|labels", str(error))
            counts["refused"] += 1
            counts["needlessly"] += expected is not None
            continue
        assert found == expected, (trial, kind, content)
        counts["read"] += 1
    assert counts["read"] > 90 and counts["refused"] > 200 and counts["needlessly"] < 15, counts


def test_tables_damaged_archives(tmp_path):
    """Wherever a compressed table is cut off or changed, it is refused or read as it was."""
    random, nodes = np.random.default_rng(0), graph_tables.Nodes(1000, "x.csv")
    pairs = random.integers(0, 1000, (2000, 2))
    text = "".join(f"{u},{v}\n" for u, v in pairs).encode()
    outcomes = collections.Counter()
    for pack in (gzip.compress, bz2.compress, lzma.compress):
        good = pack(text)
        two = _table_file(
            tmp_path / "e.csv",
            pack(text[: text.index(b"\n", 9000) + 1]) + pack(text[text.index(b"\n", 9000) + 1 :]),
        )
        # archives one after the other
        assert np.array_equal(graph_tables.edges(two, tmp_path / "e", nodes)[0].T, pairs)
        for trial in range(60):
            bad = bytearray(good)
            if trial % 3:
                bad[random.integers(len(bad))] ^= 1 << random.integers(8)
            else:
                bad = bad[: random.integers(1, len(bad))]
            try:
                found = graph_tables.edges(
                    _table_file(tmp_path / "e.csv", bytes(bad)), tmp_path / "e", nodes
                )[0].T
            except StoreError as error:
                assert str(tmp_path / "e.csv") in str(error) and "\n" not in str(error)
                outcomes["refused"] += 1
            else:
                assert np.array_equal(found, pairs)
                outcomes["read"] += 1
    assert outcomes["refused"] > 120, outcomes


def test_tables_take_little_memory(tmp_path):
    """Lines without an end, archives that unpack to a thousand times their size: refused before they are in memory."""
    nodes = graph_tables.Nodes(10, "x.csv")
    endless, labels = b"1," * (1 << 23), gzip.compress(b"1\n" * (1 << 22), 1)
    comments = (b"#" * 999 + b"\n") * (1 << 15)
    tracemalloc.start()
    try:
        for content, complaint in (
            (endless, "its first line is longer than 8 MiB"),
            (b"1,2\n" + endless, "line 2|block size"),
            (comments, "is empty"),
        ):
            with pytest.raises(StoreError, match=complaint):
                graph_tables.edges(
                    _table_file(tmp_path / "e.csv", gzip.compress(content, 1)),
                    tmp_path / "e",
                    nodes,
                )
        with pytest.raises(StoreError, match="zero cannot be read: it is no regular file"):
            graph_tables.features("/dev/zero", tmp_path / "x")
        with pytest.raises(StoreError, match="there are more rows than the 10"):
            graph_tables.labels(_table_file(tmp_path / "y.csv", labels), nodes)
        assert tracemalloc.get_traced_memory()[1] < 90 << 20
    finally:
        tracemalloc.stop()


def test_tables_parquet(tmp_path, monkeypatch):
    file = _table_file(tmp_path / "e.parquet", b"PAR1" + bytes(20))
    nodes = graph_tables.Nodes(6, "x.csv")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(StoreError, match=r"e.parquet cannot be read: .*pyarrow"):
            graph_tables.edges(file, tmp_path / "e", nodes)
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    with pytest.raises(
        StoreError, match="e.parquet cannot be read: Invalid|e.parquet cannot be read: Parquet"
    ):
        graph_tables.edges(file, tmp_path / "e", nodes)
    random = np.random.default_rng(0)
    x = random.standard_normal((6, 3)).astype(np.float32)
    written = {
        "e": {"dst": pa.array(EDGES_X_Y[0][1], pa.uint8()), "src": EDGES_X_Y[0][0]},
        "x": {"id": ["#a", 'b"', "c,", " d", "é", ""], **{f"f{j}": x[:, j] for j in range(3)}},
        "y": {"label": pa.array([2, None, 0, 1, None, 1])},
    }
    for name, columns in written.items():
        parquet.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    assert graph_tables.edges(file, tmp_path / "e", nodes)[0].tolist() == EDGES_X_Y[0]
    assert str(graph_tables.labels(tmp_path / "y.parquet", nodes)) == "[ 2. nan  0.  1. nan  1.]"
    with pytest.raises(StoreError, match="a cell is empty"):
        graph_tables.features(tmp_path / "x.parquet", tmp_path / "x")
    written["x"]["id"][5] = "f"
    parquet.write_table(pa.table(written["x"]), tmp_path / "x.parquet")
    found, nodes = graph_tables.features(tmp_path / "x.parquet", tmp_path / "x")
    assert np.array_equal(found, x) and nodes.names == ["#a", 'b"', "c,", "d", "é", "f"]
    for columns, complaint in (
        ({"src": [[1]], "dst": [[2]]}, "e.parquet.* cast"),
        ({"src": [None, 1], "dst": [1, 2]}, "line 1: 'src' is empty"),
        ({"src": [1.5], "dst": [2]}, "line 1: 'src' is 1.5, which is no whole"),
    ):
        parquet.write_table(pa.table(columns), file)
        with pytest.raises(StoreError, match=complaint):
            graph_tables.edges(file, tmp_path / "e", graph_tables.Nodes(6, "x.csv"))
