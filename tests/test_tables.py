"""Tests: extras/tables.py, extras/node_tables.py and extras/graph_tables.py."""

import bz2
import collections
import contextlib
import csv
import gzip
import io
import json
import lzma
import os
import pickle
import re
import shutil
import sys
import tracemalloc

import numpy as np
import pytest
import torch

import store
from bench.harm import other_bytes
from disk.files import StoreError
from extras import graph_tables, tables
from sources import cli
from sources import prepare as datasets
from store import GraphStore, verify
from tests.stores import _cases, _edges, _refuses


def _table_file(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def _saved(save, value):
    """Return the bytes that save(file, value) writes."""
    out = io.BytesIO()
    save(out, value)
    return out.getvalue()


EDGES = "0,1\n1,2\n2,3\n3,0\n4,2\n5,4\n"
X = "".join(f"{i}.5,{-i}\n" for i in range(6))
Y = "0\n1\n" * 3
GOOD = {"e": EDGES, "x": X, "y": Y, "t": "2\n5\n"}
EDGES_X_Y = (
    [[0, 1, 2, 3, 4, 5], [1, 2, 3, 0, 2, 4]],
    [[i + 0.5, -i] for i in range(6)],
    [0, 1, 0, 1, 0, 1],
)
REVERSED = "".join(",".join(line.split(",")[::-1]) + "\n" for line in EDGES.split())
NUMBERED = "".join(f"{i},{line}\n" for i, line in enumerate(X.split()))
SAME = "the same graph"
# a table, what is in it or what is written instead of some of it, and what that gives: the same graph, these labels, or
# what refuses it
WRITTEN = r"""
e 2,3 -> 2\n3 => e.csv, line 3: Expected 2 columns, got 1: 2
e 2,3 -> 2, => e.csv, line 3: column 2 is empty, nan or infinite
x , -> ; => the same graph
y \n -> \r\n => the same graph
y \n -> \r => the same graph
x \n -> \n\n => the same graph
x \n -> ,\n => x.csv, line 1: column 3 is empty, nan or infinite: a number is needed
e , -> | => e.csv has one column: two are needed
e 2,3 -> 2,6 => e.csv, line 3: there is no node 6: .*x.csv has 6, from 0
e \n -> ,1\n => no use for column 3
x 2.5 -> 1e39 => features.2, 0. is inf: every value must be finite
y 1\n0\n1\n0 -> NA\n0\n1\n0 => y.csv: labels holds NA: rename it if it is a class, write
y 1\n0\n1\n0 -> nan\n0\n-1\n0 => [0, -1, 0, -1, 0, 1]
y 0\n1\n0\n -> 0\n1.5\n0\n => y.csv, line 2: column 1 is .1.5.: labels are whole
e 2,3\n3,0 -> 2,"3\n3",0 => e.csv, line 3: Expected 2 columns
e 2,3 -> 2,\xe93 => e.csv cannot be read: .* byte 0xe9
e \ufeff{EDGES} => the same graph
y ""\n1\n0\n1\n0\n1\n => [-1, 1, 0, 1, 0, 1]
x id,a,b\n{NUMBERED} => the same graph
x a,node_id,b\n3.5,3,-3\n1.5,1,-1\n0.5,0,0\n5.5,5,-5\n4.5,4,-4\n2.5,2,-2\n => y.csv has no column of ids
x {NUMBERED} => x.csv: column 1 counts the rows: call it id or drop it
x ,a,b\n{NUMBERED} => the same graph
x ,0,1\n{NUMBERED} => its first row is ,0,1: write names
x 0,1\n{X} => its first row is 0,1: write
e 0,1,2\n0,1,1\n1,2,1\n2,3,1\n3,0,1\n4,2,1\n5,4,1\n => its first row is 0,1,2: write names
e src\tdst\n0\t1\n1\t2\n2\t3\n3\t0\n4\t2\n5\t4\n => the same graph
e   0    1\n  1    2\n  2    3\n  3    0\n  4    2\n  5    4\n => the same graph
e target;source\n1;0\n2;1\n3;2\n0;3\n2;4\n4;5\n => the same graph
e # an edge a line\n{EDGES} => the same graph
x a;b\n0,5;1\n0,5;1\n0,5;1\n0,5;1\n0,5;1\n0,5;1\n => x.csv, line 2: 'a' is no number: .*'0,5': a decimal comma; write 1.5
x a,b\n1,7\n1,2024-01-07 10:00\n1,2024-01-07 10:00\n1,2024-01-07 10:00\n1,2024-01-07 10:00\n1,2024-01-07 10:00\n => 'b' is no number: .*; write dates as numbers
x 0,5\t1,5\n0,5\t1,5\n0,5\t1,5\n0,5\t1,5\n0,5\t1,5\n0,5\t1,5\n => x.csv, line 1: column 1 is no number: .*'0,5': a decimal comma
y id;label\n0;0,5\n1;1,5\n2;0,5\n3;1,5\n4;0,5\n5;1,5\n => [0, 1, 0, 1, 0, 1]
e # dst,src\n{REVERSED} => the same graph
e % asym unweighted\n0 1\n1 2\n2 3\n3 0\n4 2\n5 4\n => the same graph
e % sym unweighted\n% 6 6 6\n0\t1 \n1\t2 \n2\t3 \n3\t0 \n4\t2 \n5\t4 \n => the same graph
e % sym positive\n0 1\t 3\n1 2\t 3\n2 3\t 3\n3 0\t 3\n4 2\t 3\n5 4\t 3\n => no use for column 3: drop it
e %%MatrixMarket matrix coordinate\n6 6 1\n1 2\n => is a Matrix Market file and no table
e *Vertices 6\n*Arcs\n1 2\n => is a Pajek file and no table
x \ufeff<?xml version="1.0"?><graphml> => is an XML file, such as GraphML, and no table
e "source","target"\n"0","1"\n"1","2"\n"2","3"\n"3","0"\n"4","2"\n"5","4"\n => the same graph
e 0.0,1.0\n1.0,2.0\n2.0,3.0\n3.0,0.0\n4.0,2.0\n5.0,4.0\n => the same graph
e source,paper\n0,1\n => call one source
e dst,src,dst2\n0,1,2\n => call one source|no use for
e from,u,to\n0,1,2\n => call one source|no use for
e dst,Source ID\n1,0\n2,1\n3,2\n0,3\n2,4\n4,5\n => the same graph
e src,dst,weight\n0,1,1\n1,2,1\n2,3,1\n3,0,1\n4,2,1\n5,4,1\n => no use for 'weight': drop it
x a,label\n{X} => x.csv: features must not tell the label: drop 'label'
x a,a\n{X} => x.csv has two columns called 'a'
y no\nyes\nno\nyes\nno\nyes\n => the same graph
y no\nNA\nno\nNA\nno\nNA\n => y.csv: labels holds NA: rename it if it is a class, write
y id,label\n5,1\n3,1\n1,1\n0,0\n2,0\n => [0, 1, 0, 1, -1, 1]
y topic\nno\nyes\nno\nyes\nno\nyes\n => y.csv, line 7: more rows than in .*x.csv; a header is
y topic\n{Y} => the same graph
y 1\n0\n1\n0\n1\n => y.csv has 5 rows, .*x.csv has 6$
y {Y}{Y} => y.csv, line 7: more rows than in .*x.csv
y 0,1,1\n,,\n0,0,0\n-1,-1,-1\n1,1,1\n0,1,0\n => [[0, 1, 1], [-1, -1, -1], [0, 0, 0], [-1, -1, -1], [1, 1, 1], [0, 1, 0]]
y art,id,law\n1,5,1\n0,2,1\n => [[-1, -1], [-1, -1], [0, 1], [-1, -1], [-1, -1], [1, 1]]
y 0,1,1\n0,,0\n0,1,1\n0,,0\n0,1,1\n0,,0\n => [[0, 1, 1], [0, -1, 0], [0, 1, 1], [0, -1, 0], [0, 1, 1], [0, -1, 0]]
y 0,1,1\n0,2,0\n0,1,1\n0,2,0\n0,1,1\n0,2,0\n => y.csv, line 2: column 2 is 2: of several labels each is 0, 1 or
y 0\n1\n-2\n0\n1\n-2\n => y.csv, line 3: column 1 is -2: labels are 0 or more, or -1 for none
y id,label\n5,1\n3,-2\n1,1\n => y.csv, line 3: 'label' is -2: labels are 0 or more
y unknown\n1\n2\nunknown\n1\n2\n => [2, 0, 1, 2, 0, 1]
y label,train_mask\n0,1\n1,0\n0,1\n1,0\n0,1\n1,0\n => 'train_mask' looks like a split, not like a la
y fold,label\n0,1\n1,0\n0,1\n1,0\n0,1\n1,0\n => 'fold' looks like a split, .*--ignore fold.*--train FILE
y is_test,y,z\n0,1,0\n0,1,0\n0,1,0\n0,1,0\n0,1,0\n0,1,0\n => 'is_test' looks like a split
x a,train_mask\n{X} => x.csv: 'train_mask' looks like a split, not like a feature: drop it
x a,y\n{X} => features must not tell the label: drop 'y' .--ignore y., or rename it if it is
x a,fraud_label\n{X} => features must not tell the label: drop 'fraud_label'
x a,category\n{X} => features must not tell the label: drop 'category'
y  => y.csv is empty
e src,dst\n => e.csv has a header and no rows
e # 0,1\n\n => e.csv is empty
t id\n2\n5\n => the same graph
t train\n2\n5 => the same graph
t "2"\r\n"5"\r\n => the same graph
t 0\n1\n1\n0\n => line 3: this looks like a mask of 0 and 1: ids
t 0\n2\n2\n0\n => line 3: node 2 occurs a second time
y label\n0.5\n1.5\n2.5\n0.5\n1.5\n2.5\n => y.csv, line 2: 'label' is '0.5': labels are whole
t 0,1\n2,3\n => column 2, which are no train_idx
"""
PACKED = [
    ("e", gzip.compress(b"%%MatrixMarket matrix"), "is a Matrix Market file and no table: docs"),
    ("x", pickle.dumps({"x": 1}), "is a pickle and no table: docs/data.md has a line"),
    ("x", _saved(np.savez, np.ones(2)), "is an .npz file of NumPy and no table"),
    ("x", _saved(np.save, np.ones(2)), "is an array of NumPy .* and no table"),
    ("x", _saved(lambda out, x: torch.save(x, out), torch.ones(2)), "is a file of torch.save and"),
    ("e", gzip.compress(EDGES.encode()), SAME),
    ("x", bz2.compress(X[:7].encode()) + bz2.compress(X[7:].encode()), SAME),
    ("y", lzma.compress(Y.encode()), SAME),
    ("e", gzip.compress(EDGES.encode() * 1000)[:-6], "e.csv cannot be read: Compressed file ended"),
    ("e", b"PK\3\4" + bytes(30), "e.csv is no text in UTF-8: unpack archives"),
]


def _table_of(content, outcome):
    """Read a row of WRITTEN -> (name of the table, its bytes, outcome)."""
    part, content = content[0], content[2:].encode().decode("unicode_escape")
    old, changed, new = content.partition(" -> ")
    if changed:
        return part, GOOD[part].encode().replace(old.encode(), new.encode("latin1")), outcome
    given = {"EDGES": EDGES, "X": X, "Y": Y, "REVERSED": REVERSED, "NUMBERED": NUMBERED}
    return part, content.format(**given).encode(), outcome


def _built(folder, **content):
    files = {n: _table_file(folder / f"{n}.csv", text) for n, text in (GOOD | content).items()}
    args = dict(features=files["x"], labels=files["y"], split={"train": files["t"]})
    return GraphStore.open(datasets.build(files["e"], folder / "s", **args))


@pytest.mark.parametrize("row", [*_cases(WRITTEN), *PACKED])
def test_tables_of_strangers(tmp_path, capsys, row):
    part, content, outcome = _table_of(*row) if isinstance(row, list) else row
    if outcome != SAME and outcome[0] != "[":
        _refuses(outcome, _built, tmp_path, **{part: content})
        assert {path.stem for path in tmp_path.iterdir()} == {*GOOD}
        return
    graph = _built(tmp_path, **{part: content})
    edges, features, labels = EDGES_X_Y
    assert _edges(graph) == sorted(zip(*edges)) and graph.features.tensor.tolist() == features
    assert graph.labels.tolist() == (labels if outcome == SAME else json.loads(outcome))
    assert graph.split["train"].tolist() == [2, 5]
    printed = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert set(printed) == {"x.csv", "y.csv", "e.csv", "t.csv"}


@pytest.mark.parametrize(
    "names, ids",
    [
        (["é", "bob", "#c", "d, e", "david", "6"], "node"),
        (["007", "7", "08", "8", "10", "0"], "node"),
        ([31336, 7, 0, 10**6, 5, 10], "paper_id"),
    ],
)
def test_tables_nodes_with_names(tmp_path, capsys, names, ids):
    """Text, and integers other than 0 to V-1, are mapped to the rows of the features; the names are kept."""
    quoted = [f'"{name}"' for name in names]
    rows = zip(quoted if ids == "node" else names, X.split())
    contents = {
        "e": "from,to\n" + re.sub(r"\d", lambda at: quoted[int(at[0])], EDGES),
        "x": f"{ids},a,b\n" + "".join(f"{name},{line}\n" for name, line in rows),
        "y": "".join(f"{name};{label}\n" for name, label in sorted(zip(quoted, Y.split()))),
        "t": f"{quoted[0]}\n{quoted[2]}\n",
    }
    graph = _built(tmp_path, **contents)
    path = graph.path
    assert "column 1 taken as ids, column 2 as labels, 6 rows" in capsys.readouterr().out
    assert _edges(graph) == sorted(zip(*EDGES_X_Y[0]))
    assert graph.features.tensor.tolist() == EDGES_X_Y[1] and graph.labels.tolist() == EDGES_X_Y[2]
    assert graph.split["train"].tolist() == [0, 2] and verify(path) == []
    assert (path / "nodes.txt").read_text("utf-8") == "".join(f"{name}\n" for name in names)
    assert list(map(str, names)) == graph.node_names() and "nodes.txt" in store.info(path)
    for part, content, complaint in (
        ("e", "from,to\nzoe,7\n", "line 2"),
        ("y", Y, "no column of ids"),
        ("x", X, "line .: column 1 is no whole number|there is no node"),
        ("t", "david\nbob\n", "its header david names nodes|whole number|no node"),
        ("e", "david,bob\né,#c\n", "its header david,bob names|whole number|no node"),
    ):
        shutil.rmtree(path, ignore_errors=True)
        _refuses(complaint, _built, tmp_path, **{**contents, part: content})


# cells, and the numbers that they are in csv if they are no text
SPELLED = """
1e3 12e4
1e3 4
007 7
+4 5
4.0 4
4.0 4.00
-0 0
0x7 7
4. 5
4.0 5.0 415 =>
5.000e+00 6.000e+00 7.000e+00 5.00e+00 =>
1.000e+00 2.000e+00 3.000e+00 1000 =>
4e0 5
4a 5a
0xE000000000 962072674304
090000 90000
12345678901234567890 12345678901234567891
9223372036854775807 9223372036854775808
9007199254740993.000e+00 9007199254740992.000e+00
9007199254740992.0 9007199254740993.0 => 9007199254740992 9007199254740993
5 -7 => 5 -7
5.0 7.0 => 5 7
5.000e+00 1.200e+01 => 5 12
9007199254740991.0 9007199254740990.0 => 9007199254740991 9007199254740990
"""


def _written(file, columns):
    """Write {name: list of str} as csv, or as strings in parquet."""
    if file.suffix == ".csv":
        rows = [",".join(columns), *map(",".join, zip(*columns.values()))]
        return _table_file(file, "\n".join([*rows, ""]))
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), file)
    return file


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("row", SPELLED.strip().splitlines())
def test_tables_identify_by_text_unless_all_cells_are_printed_numbers(
    tmp_path, capsys, monkeypatch, row, suffix
):
    """Ids, types and labels alike, also if the cell that decides is not in the first batch."""
    cells, _, numbers = (part.split() for part in row.partition(" =>"))
    numbers = [*map(int, numbers)] if suffix == "csv" else []
    monkeypatch.setattr(tables, "SAMPLE", 3)
    monkeypatch.setattr(tables, "BLOCK", 64)
    if "=>" not in row:
        cells = [*map(str, range(20, 40)), *cells]
    rows = [*range(len(cells))]
    x = _written(tmp_path / f"x.{suffix}", {"id": cells, "f": [*map(str, rows)]})
    x, nodes = graph_tables.features(x, tmp_path)
    assert nodes.names == (numbers or cells) and x[:, 0].tolist() == rows
    why = f"'id' is text, not numbers, because of '{cells[-2]}'"
    said = capsys.readouterr().out
    assert ("is text, not numbers" in said) == (not numbers and suffix == "csv")
    assert numbers or suffix == "parquet" or why in said or f"of '{cells[-1]}'" in said
    columns = {"source": cells, "target": cells[::-1], "relation": cells}
    file, keep = _written(tmp_path / f"e.{suffix}", columns), {"edge_type": ["relation"]}
    edge_index, more = graph_tables.edges(file, tmp_path, nodes, keep)
    assert edge_index.tolist() == [rows, rows[::-1]]
    types = more["edge_type"].tolist()
    assert [more["edge_types"][t] for t in types] == cells if not numbers else types == numbers
    y = _written(tmp_path / f"y.{suffix}", {"label": cells})
    if numbers and min(numbers) < -1:
        return
    y = graph_tables.node_column(y, graph_tables.Nodes(len(cells), "x.csv"), "labels")
    assert y.tolist() == ([*map(float, numbers)] if numbers else cells)


REFERRED = """
1e3 4 <- 1e3 4
1e3 4 <- 1000 4: refused
1e3 4 <- 1e3 4.0: refused
1000 4 <- 1e3 4: refused
1000 4 <- 1000 04: refused
1000 4 <- 1000.0 4: refused
1000 4 <- 1000.0 4.0
1000.0 4.0 <- 4 1000
0 1 <- 1.0 0.0
"""


@pytest.mark.parametrize("row", REFERRED.strip().splitlines())
def test_tables_refer_by_the_text_of_an_id(tmp_path, row):
    """Or, where ids are numbers, by the number."""
    words, _, refused = row.partition(":")
    ids, refers = map(str.split, words.split(" <- "))
    x = _written(tmp_path / "x.csv", {"id": ids, "f": ["0", "1"]})
    e = _written(tmp_path / "e.csv", {"source": refers, "target": refers})
    train = _written(tmp_path / "t.csv", {"id": refers})
    _, nodes = graph_tables.features(x, tmp_path)
    read = (
        lambda: graph_tables.edges(e, tmp_path, nodes)[0][0],
        lambda: graph_tables.node_column(train, nodes, "train_idx"),
    )
    for numbers in read:
        if not refused:
            assert [float(ids[i]) for i in numbers()] == [*map(float, refers)]
        else:
            _refuses("line .: (there is no node|'.*' is no whole number, written as 7)", numbers)


# a table of features; its names of nodes and what is printed, or what refuses it
IDS = r"""
a,user_id,city_id\n1,5,1\n2,6,1\n => [5, 6] 'city_id' repeats and is a feature
a,user_id,city_id\n1,5,1\n2,6,2\n => refused: 'user_id' and 'city_id' look like ids
a,user_id,city_id\n1,5,1\n2,5,1\n => refused: 'user_id' and 'city_id' look like .* both repeat
a,user_id\n1,5\n2,5\n => refused: 'user_id' holds ids, but '5' occurs more than once
a,name,title\n1,x,y\n2,z,w\n => refused: 'name' and 'title' look like ids of the nodes
a,city,name\n1,x,y\n2,x,w\n => ["y", "w"] 'city' one-hot, 1 value, 'name' names the nodes, such as y
,user_id,a\n0,7,1\n1,8,2\n => refused: drop it .--ignore 'Unnamed: 0'
a,rank\n.5,2\n.7,1\n => null 'rank' counts the rows: call it id
p,.5,1\nq,1,1\nr,0,0\n => ["p", "q", "r"] x.csv: 3 columns by separator ',', no header, column 1 names the nodes, such as p, 3 rows, 2 features
acid,paid,valid\n.5,1,0\n.7,1,0\n => null
a,userid\n.5,31\n.7,12\n => [31, 12] 'userid' names the nodes, such as 31
a,Key\n.5,1\n.7,0\n => null 'Key' numbers the nodes, the rows are put in their order
id,f\n0.5,1\n1.5,1\n2.5,1\n => ["0.5", "1.5", "2.5"] 'id' names the nodes
a,1\nb,2\nb,3\n => refused: holds ids, but 'b' occurs more than once
a,1\n,2\n => refused: line 2: column 1 is empty: an id is needed
a,b\nx ,1\nx,2\n => ["x ", "x"] 'a' names the nodes, such as x ,
"""


@pytest.mark.parametrize("text, outcome", _cases(IDS))
def test_tables_one_column_of_ids(tmp_path, capsys, text, outcome):
    x = _table_file(tmp_path / "x.csv", text.encode().decode("unicode_escape"))
    if outcome.startswith("refused"):
        _refuses(outcome.removeprefix("refused: "), graph_tables.features, x, tmp_path)
        return
    names, end = json.JSONDecoder().raw_decode(outcome)
    assert graph_tables.features(x, tmp_path)[1].names == names
    assert outcome[end:].strip() in capsys.readouterr().out


def test_tables_names_differ_by_spaces(tmp_path):
    x = _table_file(tmp_path / "x.csv", "id,f\nC0   ,1\nC1\u00a0,2\n")
    e = _table_file(tmp_path / "e.csv", "source,target\nC0   ,C1\u00a0\nC1,C0   \n")
    nodes = graph_tables.features(x, tmp_path)[1]
    assert nodes.names == ["C0   ", "C1\u00a0"]
    said = "line 3: there is no node 'C1': "
    _refuses(said, graph_tables.edges, e, tmp_path, nodes)


# a table of features of edges, which have 5, 6, 7: how it is joined, or what refuses it; the edges if not 0-1, 1-2, 2-0
JOINED = r"""
amount\n5\n6\n7\n => row by row
amount\n5\n6\n7\n => e.csv: 2 columns by separator ',', no header (0,1 is a row: if pandas wrote it, put names in its place), column 1 taken as source, column 2 as destination, 3 rows
# a\n# b\n\nsource;target;amount\n2;0;7\n0;1;5\n1;2;6\n => a.csv: 3 columns by separator ';', header source;target;amount, 3 rows
source,target,amount\n2,0,7\n0,1,5\n1,2,6\n => by 'source' and 'target'
2,0,7\n0,1,5\n1,2,6\n => by column 1 and column 2
amount,node2,node1\n7,0,2\n5,1,0\n6,2,1\n => by 'node1' and 'node2'
edge_id,amount\n2,7\n0,5\n1,6\n => by 'edge_id'
,amount\n2,7\n0,5\n1,6\n => by 'Unnamed: 0'
edge_id,amount\n3,7\n1,5\n2,6\n => refused: e.csv has 1 row of the edge 0, .*a.csv has 0 rows: one of each
source,target,amount\n0,2,7\n0,1,5\n1,2,6\n => refused: 1 row of the edge 2 -> 0, .* 0 rows
source,target,amount\n2,0,7\n0,1,5\n1,2,6\n1,1,6\n => refused: 0 rows of the edge 1 -> 1, .* 1 row
source,target,amount\n2,0,7\n0,1,5\n0,1,6\n => refused: 1 row of the edge 0 -> 1, .* 2 rows
,source,target,amount\n9,2,0,7\n8,0,1,5\n7,1,2,6\n => 'Unnamed: 0' not used
,edge_id,amount\n0,2,7\n1,0,5\n2,1,6\n => refused: look like ids of the edges: .*Unnamed: 0
source,target\n2,0\n0,1\n1,2\n => refused: a.csv has 0 columns for edge_features
source,amount\n2,7\n0,5\n1,6\n => refused: call one source, one destination
source,target,amount\n0,1,5\n1,0,6\n0,1,7\n => it has edge_features => 0,1\n1,0\n0,1\n
source,target,amount\n0,1,5\n0,1,7\n1,0,6\n => refused: 2 rows of the edge 0 -> 1, .* 2 rows: .* unless both have one order => 0,1\n1,0\n0,1\n
"""


@pytest.mark.parametrize("row", _cases(JOINED))
def test_tables_join_features_of_edges(tmp_path, capsys, row):
    cells = (cell.encode().decode("unicode_escape") for cell in [*row, r"0,1\n1,2\n2,0\n"])
    text, said, edges, *_ = cells
    files = {"e": edges, "x": "f\n1\n2\n3\n", "a": text}
    files = {name: _table_file(tmp_path / f"{name}.csv", text) for name, text in files.items()}
    args = dict(features=files["x"], edge_features=str(files["a"]))
    if said.startswith("refused"):
        said = said.removeprefix("refused: ")
        _refuses(said, datasets.build, files["e"], tmp_path / "s", **args)
        return
    graph = GraphStore.open(datasets.build(files["e"], tmp_path / "s", **args))
    found = zip(graph.indices.tolist(), graph.edge_features.flatten().tolist())
    assert sorted(found) == sorted(zip(map(int, edges[::4]), [5, 6, 7]))
    assert said in capsys.readouterr().out


def _shuffled(random, file, columns, how):
    """Write {name: array} as csv or parquet, rows in any order. how: "any" order of columns, "kept", or "index": the first is
    that of pandas, which puts it first in csv and last in parquet."""
    import pyarrow
    from pyarrow import parquet

    names = list(columns)
    rows = random.permutation(len(columns[names[0]]))
    parquet_file = random.integers(2)
    metadata = {}
    if how == "any":
        names = [names[j] for j in random.permutation(len(names))]
    elif how == "index" and parquet_file:
        metadata = {"pandas": json.dumps({"index_columns": names[:1]})}
        names = [*names[1:], names[0]]
    columns = {name: [str(columns[name][row]) for row in rows] for name in names}
    if not parquet_file:
        return str(_written(file.with_suffix(".csv"), columns))
    typed = {name: pyarrow.array(cells) for name, cells in columns.items()}
    for name, cells in typed.items():
        with contextlib.suppress(pyarrow.ArrowInvalid):
            typed[name] = cells.cast("int64" if cells[0].as_py().isdecimal() else "float64")
    parquet.write_table(
        pyarrow.table(typed).replace_schema_metadata(metadata), file.with_suffix(".parquet")
    )
    return str(file.with_suffix(".parquet"))


@pytest.mark.parametrize("seed", range(int(os.environ.get("RINGBLOCK_FUZZ", 24)) // 2))
def test_tables_in_any_order_are_one_graph(tmp_path, seed):
    """Rows and columns of all tables in any order, as csv and parquet: ids, ends and rows of edges are found."""
    random = np.random.default_rng(seed)
    count = int(random.integers(8, 30))
    kind = "count numbers text spaces".split()[seed % 4]
    names = {
        "count": [*map(str, range(count))],
        "numbers": [*map(str, random.permutation(1000)[:count] + count)],
        "text": [f"n{i}" for i in range(count)],
        "spaces": [f" n{i}\u00a0" if i % 2 else f"n{i}   " for i in range(count)],
    }[kind]
    cells = np.array(names, dtype=object) if kind in ("text", "spaces") else np.array(names, int)
    ids = random.choice("id,user_id,userId,uid,key,userid,protein,User Id".split(","))
    x = random.standard_normal((count, 3)).astype(np.float32)
    y = random.choice(["red", "blue"], count)
    nodes = {ids: cells, **{f"f{j}": x[:, j] for j in range(3)}}
    pairs = random.permutation(count * count)[: 3 * count]
    source, target = cells[pairs // count], cells[pairs % count]
    amount = random.standard_normal(len(pairs)).astype(np.float32)
    called = [("source", "target"), (f"{ids}_a", f"{ids}_b"), (f"to_{ids}", f"from_{ids}")[::-1]]
    called += [(f"{ids}1", f"{ids}2")]
    called += [("citing", "cited")] * (kind in ("text", "spaces"))
    ends = called[random.integers(len(called))]
    kept = "citing" in ends  # whose order says which is the source
    ends = dict(zip(ends, (source, target)))
    edge_id = {"edge_id": random.permutation(5000)[: len(pairs)]} if random.integers(2) else {}
    by = edge_id or ends

    def write(name, columns, how="any"):
        return _shuffled(random, tmp_path / name, columns, how)

    files = {
        "features": write("x", nodes, ["any", "index"][random.integers(2)]),
        "labels": write("y", {ids: cells, "label": y}),
        "edge_features": write("a", {**by, "amount": amount}, "kept" if kept else "any"),
    }
    edges = write("e", {**edge_id, **ends}, "kept" if kept else "any")
    graph = GraphStore.open(datasets.build(edges, tmp_path / "s", **files))
    found = graph.node_names() or [*map(str, range(count))]
    order = [graph.feature_names.index(f"f{j}") for j in range(3)]
    classes = [graph.class_names[c] for c in graph.labels.tolist()]
    rows = zip(graph.features.tensor[:, order].tolist(), classes)
    assert dict(zip(found, rows)) == dict(zip(names, zip(x.tolist(), y.tolist())))
    destination = torch.repeat_interleave(graph.indptr.diff()).tolist()
    ends = [(found[u], found[v]) for u, v in zip(graph.indices.tolist(), destination)]
    given = [(names[pair // count], names[pair % count]) for pair in pairs]
    amounts = dict(zip(ends, graph.edge_features[:, 0].tolist()))
    assert amounts == dict(zip(given, amount.tolist()))
    # beside things, whose names are partly the same
    kind = "protein" if ids == "protein" else "user"
    things = np.array([names[0], *(f"t {j}" for j in range(20))], dtype=object)
    tags = random.permutation([*["a", "c | b", "", "b"] * 5, "a"])
    days = np.datetime64("2000-01-01") + random.integers(9000, size=21)
    has = random.choice(21, count)
    when = np.datetime64("2020-01-01T10:00:00") + random.permutation(count)
    sources = {
        kind: files["features"],
        "thing": write("t", {"thing": things, "tags": tags, "since": days}),
        f"{kind},has,thing": write("h", {ids: cells, "ThingID": things[has], "when": when}),
    }
    typed = GraphStore.open(datasets.build(sources, tmp_path / "typed"))
    found = typed.node_names()
    destination = torch.repeat_interleave(typed.indptr.diff()).tolist()
    seen = zip(typed.indices.tolist(), destination, typed.edge_time.numpy().view("M8[us]"))
    expected = zip(names, things[has], when.astype("M8[us]"))
    assert {(found[u], found[v], time) for u, v, time in seen} == {*expected}
    rows = typed.node_ids([*map(str, things)], type="thing")
    assert typed.node_ids(names[:1], type=kind) != rows[0]
    _refuses(f"node '{names[0]}', which is of several types", typed.node_ids, names[:1])
    columns = [name.split(", ")[-1] for name in typed.feature_names]
    order = [columns.index(f"{name} of thing") for name in ("since", "tags=a", "tags=b", "tags=c")]
    features = typed.features.gather(rows)[:, order]
    decades = (days - np.datetime64("2000-01-01")) / np.timedelta64(1, "D") / 3652.425
    hot = np.array([[letter in cell for letter in "abc"] for cell in tags])
    np.testing.assert_allclose(features, np.column_stack([decades, hot]), rtol=1e-6)


# a table of a movie site, what is written instead of it, and what refuses it; words after those of a build
MOVIES = {
    "user": "name,age\nann,3\nbob,4\n",
    "movie": "movie,genres\nAlien,Horror|Drama\nBrazil,Drama\nCube,Horror\n",
    "rates": "user,movie,when\nann,Alien,2024-01-01\nbob,Cube,2024-01-02\n",
}
TYPED = r"""
rates user,movie\nann,Dune\n => rates.csv, line 2: there is no movie 'Dune': movie.csv has 3
rates user,film\nann,Cube\n => rates.csv has the columns user, film: call one user, one movie
rates user,movie,when,seen\nann,Cube,2024-01-01,2024-01-01\n => no use for 'when', 'seen'
rates user,movie\n => rates.csv has a header and no rows
user name,age\nann,3\nann,4\n => user.csv: 'name' holds ids, but 'ann' occurs more than once
user name,age\nann,3\nbob,old\n => user.csv, line 3: 'age' is no number: invalid value 'old'
user ann,3\nbob,4\n => user.csv cannot be read: its first row is ann,3: put names of columns above it
user  => user.csv is empty: it has no rows
user name,born\nann,2020-01-01\nbob,\ncy,2020-01-01\n => user.csv, line 3: 'born' is NaT: a missing time
movie movie,genres\nAlien,a\nCube,b\n => 'genres' is text with 2 values in 2 rows, up to 100.*--ignore genres.* type of their own
movie movie,label\nAlien,1\nCube,2\n => features must not tell the label: drop 'label'
words user,seen,film=rates.csv => user,seen,film: TYPE,RELATION,TYPE=FILE is needed, of types with a table: user, movie
words film=none.csv => none.csv cannot be read: No such file
words movie=rates.csv => several tables are TYPE=FILE of nodes and TYPE,RELATION,TYPE=FILE of edges, one a type
words rates.csv => several tables are TYPE=FILE
words --weights ever => none of rates.csv has the column ever
words --labels y.csv => labels: y.csv is not TYPE=FILE, of the types user, movie
words --features user.csv => features: user.csv is not TYPE=FILE
words --ignore plot => none of the tables has a column 'plot'
words --types when => edge_type is not for a graph that is given by type
"""


@pytest.mark.parametrize("row", _cases(TYPED))
def test_tables_of_several_types_refuse(tmp_path, monkeypatch, capsys, row):
    part, _, content = row[0].partition(" ")
    monkeypatch.chdir(tmp_path)
    content = content.encode().decode("unicode_escape")
    for name, text in (MOVIES | {part: content}).items():
        _table_file(tmp_path / f"{name}.csv", text)
    given = {*tmp_path.iterdir()}
    words = "user=user.csv movie=movie.csv user,rates,movie=rates.csv".split()
    more = content.split() * (part == "words")
    words += ["s", *more] if content[:2] == "--" else [*more, "s"]
    assert cli.main(["build", *words, "--symmetrize"]) == 2
    error = capsys.readouterr().err
    assert re.search(row[1], error) and error.count("\n") == 1
    assert {*tmp_path.iterdir()} == given


# cells of a column of times: the minutes of 2024-01-31 that they are, or what is said
DATES = r"""
2024-01-31, 2024-01-31 00:01 => 0 1
2024-01-31T00:02:00.000000, "2024-01-31 00:01:00.000000000" => 2 1
2024-01-31T00:02Z, 2024-01-31 02:01:00+02:00 => 2 1
2024-01-31,  => e.csv, line 3: 'when' is NaT: a missing time
2024-01-31, 31.01.2024 => e.csv, line 3: 'when' is no time, .*: '31.01.2024'
2024-01-31, 1706659200 => line 2: 'when' is no whole number .*; write .* for times a date in every row
2024-01-31T00:02Z, 2024-01-31 02:01 => line 3: 'when' is no time, .* with a zone .* in
2024-01-31 00:00:00.0000001, 2024-01-31 => line 2: 'when' is no time, written as
1e9, 3 => [1000000000, 3]
1700000000123456789, 1700000000123456788 => [1700000000123456789, 1700000000123456788]
7, nan => line 3: 'when' is nan: a missing time
"""


@pytest.mark.parametrize("cells, outcome", _cases(DATES))
def test_tables_times_are_numbers_or_dates(cells, outcome, tmp_path):
    rows = "".join(f"{i},{1 - i},{cell}\n" for i, cell in enumerate(cells.split(", ")))
    file, nodes = _table_file(tmp_path / "e.csv", f"a,b,when\n{rows}"), graph_tables.Nodes(2, "x")
    args = file, tmp_path / "made", nodes, {"edge_time": ["when"]}
    if "when" in outcome:
        _refuses(outcome, graph_tables.edges, *args)
        return
    times = graph_tables.edges(*args)[1]["edge_time"]
    assert not any((tmp_path / "made").iterdir())  # a killed build leaves nothing
    if outcome[0] == "[":
        assert times.dtype == np.int64 and times.tolist() == json.loads(outcome)
        return
    assert times.dtype == "M8[us]"
    minutes = (times - np.datetime64("2024-01-31")) / np.timedelta64(1, "m")
    assert minutes.tolist() == [*map(float, outcome.split())]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_tables_leave_out_columns_to_ignore(kind, tmp_path, capsys):
    """Those of any of the tables, and what pandas makes of an index; a message that refuses a column names the flag."""
    pandas = pytest.importorskip("pandas")
    when = pandas.Timestamp("2020-01-01")

    def file(name, **columns):
        table, path = pandas.DataFrame(columns), str(tmp_path / f"{name}.{kind}")
        table.to_csv(path) if kind == "csv" else table.reset_index().to_parquet(path)
        return path

    e = file("e", source=["a", "b"], target=["b", "c"], note=["x,y", "z"], since=[7, 8])
    x = file("x", id=[*"abc"], f=[0.5, 1.5, 2.5], city=["Rome", "Oslo", "Bonn"], when=when, g=1)
    y = file("y", id=[*"cba"], label=["red", "blue", "red"])
    index = {"csv": "Unnamed: 0", "parquet": "index"}[kind]
    words, ignored = ["build", e, str(tmp_path / "s"), "--features", x, "--labels", y], []
    while cli.main([*words, *(["--ignore", ",".join(ignored)] if ignored else [])]):
        flag = re.search(r"--ignore ('.*?'|[^)]*)[)]", error := capsys.readouterr().err)
        assert flag and len(ignored) < 9, error
        ignored += flag[1].strip("'").split(",")
    assert sorted(ignored) == sorted([index, "city", "note", "since", "when"])
    graph = GraphStore.open(tmp_path / "s")
    assert graph.feature_names == ["f", "g"] and graph.node_names() == [*"abc"]
    assert graph.labels.tolist() == [1, 0, 1]
    features = graph.features.gather(torch.arange(3))
    assert features.tolist() == [[0.5, 1], [1.5, 1], [2.5, 1]]
    assert "'city', 'when' ignored" in capsys.readouterr().out
    # a column that a flag names by its number in the file
    options = dict(features=x, labels=y, times="5", ignore=[index, "when", "city", "note"])
    datasets.build(e, tmp_path / "t", **options)
    assert GraphStore.open(tmp_path / "t").edge_time.tolist() == [7, 8]
    options["ignore"].append("nope")
    _refuses("none of the tables has a column 'nope'", datasets.build, e, tmp_path / "u", **options)
    alone = file("f", f=[1]), tmp_path, {"f": 0, index: 0}
    _refuses("no other columns", graph_tables.features, *alone)


@pytest.mark.parametrize("own_file", [False, True])
@pytest.mark.parametrize(
    "of, names", [("cites writes cites", ["cites", "writes"]), ("2 0 2", None)]
)
def test_tables_types_of_edges_are_numbers_or_names(of, names, own_file, tmp_path):
    x, triples = _table_file(tmp_path / "x.csv", "id,f\na,1\nb,2\n"), ["a,b", "b,a", "b,b"]
    rows = [pair.replace(",", f",{kind},") for pair, kind in zip(triples, of.split())]
    text, types = "\n".join(["head,relation,tail", *rows, ""]), "relation"
    if own_file:
        types = _table_file(tmp_path / "t.csv", "\n".join(["edge_type", *of.split(), ""]))
        text = "\n".join(["source,target", *triples, ""])
    file = _table_file(tmp_path / "e.csv", text)
    graph = GraphStore.open(datasets.build(file, tmp_path / "s", features=x, types=str(types)))
    drawn = zip(graph.indices.tolist(), graph.edge_type.tolist())
    first = (0, 1, 0) if names else (2, 0, 2)  # of a->b, b->a, b->b
    assert graph.edge_types == names and graph.num_edge_types == (2 if names else 3)
    assert [*drawn] == [(1, first[1]), (0, first[0]), (1, first[2])]
    if names and not own_file:
        _table_file(tmp_path / "e.csv", text.replace("writes", ""))
        refused = "line 3: 'relation' is empty"
        _refuses(refused, datasets.build, file, tmp_path / "n", features=x, types="relation")


def test_tables_change_far_inside(tmp_path, monkeypatch):
    """Pieces of a table are checked against each other, and line numbers count across them."""
    monkeypatch.setattr(tables, "BLOCK", 1 << 16)
    good, count = b"1.5,2\n", 200_000

    def features(text):
        return graph_tables.features(_table_file(tmp_path / "x.csv", text), tmp_path)[0]

    for bad, complaint in (
        (b"1,2,3,4\n" * 10, "Expected 2 columns, got 4: 1,2,3,4"),
        (b"1,x\n", "is no number: invalid value 'x'"),
    ):
        _refuses(f"line {count + 1}: .*{complaint}", features, good * count + bad)
        _refuses(f"line {count + 3}: ", features, b"# by me\na,b\n" + good * count + bad)
    x = features(good * count + b'"3", 4 \n\n' + good * count)
    assert len(x) == 2 * count + 1 and x[count].tolist() == [3, 4]
    assert (np.delete(x, count, 0) == [1.5, 2]).all()
    for cells in (["", "7"], ["", "cat"]):  # labels that begin late
        rows = "".join(f"{i},{cells[i > 1500]}\n" for i in range(1600))
        file = _table_file(tmp_path / "y.csv", f"id,label\n{rows}".encode())
        y = graph_tables.node_column(file, graph_tables.Nodes(1600, "x.csv"), "labels")
        begun = [cells[i > 1500] for i in range(1600)]
        if "7" in cells:
            begun = [7.0 if cell else None for cell in begun]
            y = np.where(np.isnan(y), None, y)
        assert y.tolist() == begun


def _read(text, kind, width=2):
    """Read a table given as bytes, with all columns of one kind -> [r, width]."""
    table = tables.Table(io.BytesIO(text), "t.csv")
    assert table.width == width
    read = table.read(dict.fromkeys(range(width), kind))
    return np.concatenate([np.stack(list(columns.values()), 1) for _, columns in read])


def test_tables_numbers_are_those_of_python():
    """Bitwise equal to int() and float(); what Python rejects is refused with its line number."""
    random = np.random.default_rng(0)
    scales = 10.0 ** random.integers(-300, 300, 300)
    floats = [repr(float(v)) for v in random.standard_normal(300) * scales]
    floats += [f"{float(v):.25g}" for v in floats] + "5. .5 007 4.9e-324 1E5".split()
    whole = [str(v) for v in random.integers(0, 1 << 62, 300)]
    whole += "0 9223372036854775807 0012 -9223372036854775808 -0".split()
    mixed = (int, ["2.0", "3e2"], float)
    for kind, cells, python in ((float, floats, float), (int, whole, int), mixed):
        for form in ("{},{}\n", '"{}", {}\n', "{};{}\n", "{}\t{}\n", "{} {}\n", "  {}   {}\n"):
            text = "".join(form.format(*pair) for pair in zip(cells, reversed(cells)))
            found = _read(text.encode(), kind)[:, 0]
            expected = np.array([python(cell) for cell in cells], found.dtype)
            assert found.tobytes() == expected.tobytes(), (kind, form)
    for cell in ["", "1 2", *"1_0 \uff11 1e --1 1-2 - . e5 nan inf 1e999 1,5".split()]:
        for kind in (float, int):
            _refuses("line 2: column 2 is ", _read, f'1,2\n1,"{cell}"\n1,2\n'.encode(), kind)
    wide = "9223372036854775808 -9223372036854775809 9007199254740992.0 1.5 1e-3"
    for cell in [*wide.split(), "9" * 5000]:
        said = "line 2: column 2 .* (whole number|infinite)"
        _refuses(said, _read, f"1,2\n1,{cell}\n".encode(), int)


def _read_slowly(content, separator, width):
    """Read independently, with Python's csv module line by line -> rows, or None if their widths differ."""
    rows = []
    try:
        text = content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        return None
    if "\0" in text:  # Python 3.10's csv module refuses it
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
    value = int(cell) if whole else float(cell)
    if not (0 <= value < 30 and str(value) == cell if whole else np.isfinite(value)):
        raise ValueError(cell)
    return int(value) if whole else float(np.float32(value))  # beyond float32 a store refuses inf


def _damaged(content, random):
    """Change bytes in one or two places after the first row of a table of numbers."""
    first, rest = content.split(b"\n", 1)
    for _ in range(random.integers(1, 3)):
        changed, _ = other_bytes(rest, random)
        rest = changed if changed.count(b"\n") > 9 else rest  # still a table of this width
    return first + b"\n" + rest


def test_tables_fuzz(tmp_path):
    """500 damaged tables, or RINGBLOCK_FUZZ of them: read as csv and plain Python read them, or refused."""
    random = np.random.default_rng(0)
    nodes, counts = graph_tables.Nodes(30, "x.csv"), collections.Counter()
    for trial in range(int(os.environ.get("RINGBLOCK_FUZZ", 500))):
        whole, width = (True, 2) if trial % 2 else (False, int(random.integers(1, 6)))
        rows = random.integers(0, 30, (25, 2)) if whole else random.standard_normal((25, width))
        separator = ",;\t "[random.integers(4)] if width > 1 else ","
        form, end = ("{:.4g}", '"{:.4g}"')[random.integers(2)], ("\n", "\r\n")[random.integers(2)]
        content = "".join(separator.join(map(form.format, row)) + end for row in rows).encode()
        pack = (gzip.compress, bz2.compress, lzma.compress)[random.integers(3)]
        if trial % 5 == 4:
            written = other_bytes(pack(content), random)[0]
        else:
            written = content = _damaged(content, random)
        file = _table_file(tmp_path / "t.csv", written)
        try:
            expected = _read_slowly(content, separator, width) or None
            expected = expected and [[_slow_number(c, whole) for c in row] for row in expected]
        except (ValueError, OverflowError):
            expected = None
        try:
            if whole:
                found = graph_tables.edges(file, tmp_path, nodes)[0].T.tolist()
            else:
                found = graph_tables.features(file, tmp_path)[0].tolist()
        except StoreError as error:
            assert "\n" not in str(error) and str(file) in str(error)
            counts["refused"] += 1
            counts["needlessly"] += expected is not None and trial % 5 != 4
            continue
        assert found == expected, (trial, content, written)
        counts["read"] += 1
    assert counts["read"] > 90 and counts["refused"] > 200, counts
    assert counts["needlessly"] < 15 * trial / 400, counts


def test_tables_take_little_memory(tmp_path, monkeypatch):
    """Endless lines and archives that unpack to a thousand times their size are refused before they are in memory."""
    nodes, file = graph_tables.Nodes(10, "x.csv"), tmp_path / "e.csv"
    monkeypatch.setattr(tables, "BLOCK", 1 << 20)
    endless, labels = b"1," * (1 << 20), gzip.compress(b"1\n" * (1 << 19), 1)
    comments = (b"#" * 999 + b"\n") * (1 << 12)
    tracemalloc.start()
    try:
        for content, complaint in (
            (endless, "its first line is longer than 1 MiB"),
            (b"1,2\n" + endless, "line 2|block size"),
            (comments, "is empty"),
        ):
            _table_file(file, gzip.compress(content, 1))
            _refuses(complaint, graph_tables.edges, file, tmp_path, nodes)
        said = "zero: its first line is longer than 1 MiB"
        _refuses(said, graph_tables.features, "/dev/zero", tmp_path)
        said = "more rows than in x.csv"
        _refuses(said, graph_tables.node_column, _table_file(file, labels), nodes, "labels")
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    finally:
        tracemalloc.stop()


# columns of a parquet file of edges => what refuses them
REFUSED_PARQUET = """
{"src": [[1]], "dst": [[2]]} => e.parquet: 'src' holds list<.*>: give numbers or text
{"src": [{"a": 1}], "dst": [2]} => e.parquet: 'src' holds struct<.*>: give numbers or text
{"src": [null, 1], "dst": [1, 2]} => line 1: 'src' is empty
{"src": [1.5], "dst": [2]} => line 1: 'src' is 1.5, which is no whole
{"src": [1], "dst": ["x"]} => e.parquet, line 1: 'dst' is no whole number, .*: 'x'
"""


def test_tables_parquet(tmp_path, monkeypatch):
    import pyarrow as pa
    from pyarrow import parquet

    def write(name, **columns):
        parquet.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
        return tmp_path / f"{name}.parquet"

    file, nodes = tmp_path / "e.parquet", graph_tables.Nodes(6, "x.csv")
    edges = file, tmp_path, nodes
    _table_file(file, b"PAR1" + bytes(20))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow", None)
        patch.setitem(sys.modules, "pyarrow.parquet", None)
        _refuses("e.parquet cannot be read: .*pyarrow", graph_tables.edges, *edges)
    _refuses("e.parquet cannot be read: (Invalid|Parquet)", graph_tables.edges, *edges)
    write("e", dst=pa.array(EDGES_X_Y[0][1], pa.uint8()), src=EDGES_X_Y[0][0])
    assert graph_tables.edges(*edges)[0].tolist() == EDGES_X_Y[0]
    for columns, complaint in _cases(REFUSED_PARQUET):
        write("e", **json.loads(columns))
        _refuses(complaint, graph_tables.edges, *edges)
    write("e", src=[1], dst=np.array([0], "datetime64[s]"))
    said = "'dst' holds timestamp.*: give dates as numbers, such as days, by .*(--ignore dst)"
    _refuses(said, graph_tables.edges, *edges)
    y = write("y", label=pa.array([2, None, 0, 1, None, 1]))
    assert str(graph_tables.node_column(y, nodes, "labels")) == "[ 2. nan  0.  1. nan  1.]"
    x = np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32)
    names, columns = ["#a", 'b"', "c,", " d", "é", ""], {f"f{j}": x[:, j] for j in range(3)}
    table = write("x", id=names, **columns)
    _refuses("line 6: 'id' is empty", graph_tables.features, table, tmp_path)
    names[5] = "f"
    found, nodes = graph_tables.features(write("x", id=names, **columns), tmp_path)
    assert np.array_equal(found, x) and nodes.names == names
    found, _ = graph_tables.features(write("b", on=x[:, 0] > 0, f=x[:, 1]), tmp_path)
    assert np.array_equal(found[:, 0], x[:, 0] > 0)


def test_tables_parquet_lists_are_features(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    def features(lists, kind, **columns):
        columns["emb"] = pa.array(lists, kind)
        parquet.write_table(pa.table(columns), tmp_path / "x.parquet", row_group_size=40)
        return graph_tables.features(tmp_path / "x.parquet", tmp_path)

    x = np.random.default_rng(0).standard_normal((100, 3)).astype(np.float32)
    names, age = [f"n{i}" for i in range(100)], np.arange(100) / 2
    kinds = pa.list_(pa.float32()), pa.large_list(pa.float64()), pa.list_(pa.float32(), 3)
    for kind in kinds:
        assert np.array_equal(features(x.tolist(), kind)[0], x)
        found, nodes = features(x.tolist(), kind, age=age, id=names)
        assert np.array_equal(found, np.column_stack([age, x]).astype(np.float32))
        assert nodes.names == names
        assert nodes.feature_names == ["age", "emb[0]", "emb[1]", "emb[2]"]
    for row, bad, problem in (
        (0, None, "is empty: a list of numbers is needed"),
        (77, [1, 2], "is a list of 2 numbers, where the first row has 3"),
        (77, [1, None, 2], "has an element that is empty, nan or infinite"),
        (77, [1, np.inf, 2], "has an element that is empty, nan or infinite"),
    ):
        lists = x.tolist()
        lists[row] = bad
        _refuses(f"x.parquet, line {row + 1}: 'emb' {problem}", features, lists, kinds[0])
    ends = {"source": [0, 1], "target": [1, 0], "emb": [[1, 2], [3, 4]], "w": [0.5, 1]}
    parquet.write_table(pa.table(ends), tmp_path / "e.parquet")
    edges = tmp_path / "e.parquet", tmp_path, graph_tables.Nodes(2, "x.csv")
    more = graph_tables.edges(*edges, {"edge_features": ["w", "emb"]})[1]
    assert more["edge_features"].tolist() == [[0.5, 1, 2], [1, 3, 4]]
    columns = {"edge_weight": ["emb"], "edge_features": ["w"]}
    _refuses("'emb' holds list<.*>: give numbers or text", graph_tables.edges, *edges, columns)
