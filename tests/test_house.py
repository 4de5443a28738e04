"""Limits on the size and structure of the code; files meant to work alone do. python tests/test_house.py prints the figures,
with words of a figure's name also the places: python tests/test_house.py tuple circle. `python tests/test_house.py smear`
prints how much of each extra is outside its own files."""

import ast
import collections
import functools
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import token
import tokenize
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[1]
# Size is counted in tokens without docstrings and comments: lines may be as many as reading needs. A number is raised only
# in a commit that says what the tokens bought.
LIMITS = {
    "tokens of product Python": 165_705,
    "tokens of C and CUDA": 30_151,
    "tokens of bench": 39_725,
    "tokens of tests": 183_376,
    "lines of README": 198,
    "longest file": 950,
    "functions above 80 lines": 0,
    "functions of over 5 positional parameters": 0,
    "tuples of over 3 values returned": 0,
    "tuple assignments of several expressions": 0,
    "names of layers, rules, columns outside their declarations": 3,
    "attributes set from outside": 2,
    "entries in the root": 23,
    "floors of imports": 10,
    "modules in a circle": 0,
    "arrows": 278,
    "arrows from the core to extras": 0,
    "private names read from outside": 0,
    "fmt: skip": 0,
}
SLACK = 1.05  # tokens may exceed their limits by this factor
CODE = (token.NAME, token.NUMBER, token.OP, token.STRING)
C_CODE = (
    r'/[*].*?[*]/|//[^\n]*|("(?:[^"\\]|\\.)*"|\w+|[^\w\s])'  # comments, or a group with a token
)
ALONE_WITH_NATIVE = ("sampler", "features", "model", "ddp")


def _sources():
    """Return {path from the root: text} of the files that git tracks, or of all files outside a checkout."""
    done = subprocess.run(["git", "-C", HERE, "ls-files"], capture_output=True, text=True)
    names = done.stdout.splitlines() or [str(p.relative_to(HERE)) for p in HERE.rglob("*.*")]
    kept = [n for n in names if n.endswith((".py", ".c", ".cu", ".h", ".md")) or "/" not in n]
    return {n: (HERE / n).read_text(errors="replace") for n in kept if (HERE / n).is_file()}


_parsed = functools.cache(ast.parse)  # text -> syntax tree


@functools.cache
def _walked(tree):
    """Return the nodes of a syntax tree, of which all searches ask."""
    return [*ast.walk(tree)]


def _side(name):
    folder, kind = name.split("/")[0], name.rpartition(".")[2]
    if folder in ("bench", "tests"):
        return folder
    if name == "test_all.py":
        return "tests"
    return {"py": "product", "c": "native", "cu": "native", "h": "native"}.get(kind, "text")


def _tokens_of_lines(name, text):
    """Count the tokens of each line of a file of Python (an f-string is one), C or CUDA, without docstrings and comments."""
    lines = collections.Counter()
    if not name.endswith(".py"):
        for part in re.finditer(C_CODE, text, re.DOTALL):
            lines[text.count("\n", 0, part.start()) + 1] += bool(part[1])
        return lines
    docstrings = set()
    for node in _walked(_parsed(text)):
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            docstrings.add((node.body[0].lineno, node.body[0].col_offset))
    inside = 0
    for part in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = token.tok_name[part.type]
        # Python 3.12 and later take f-strings and t-strings apart
        inside += kind.endswith("STRING_START")
        counts = not inside and part.type in CODE and part.start not in docstrings
        lines[part.start[0]] += counts or inside == 1 and kind.endswith("STRING_END")
        inside -= kind.endswith("STRING_END")
    return lines


def _tokens(name, text):
    return _tokens_of_lines(name, text).total()


EXTRAS = {  # its own files; words of lines, or of names of functions and classes, that are about it wherever they are
    "rule: weights": (
        "extras/weights.py native/rules/weights.h",
        "edge_weight|WEIGHT|heaviest|weights_used|law->weights|spec.weights|weights=weights|weights is|used.weight|[bB]est\\b(?=.*(double|float64|first|out|scratch))",
    ),
    "rule: LABOR": (
        "extras/labor.py native/rules/labor.h",
        "labor|LABOR|by_source|one_draw|(batch|layer)_dependency|key_step|keep_shared|shared_draws|dependent",
    ),
    "cut: times": (
        "extras/times.py extras/time_units.py native/rules/times.h",
        "edge_time|node_time|src_times|timed\\b(?!\\()|latest|LATEST|seen_at|seeds_at|cut_\\w*by_|only_nodes_timed|[^.]strict\\b|[.>]window|window=|temporal|times_used|unused_times|degrees_at|[a-z_]\\w*=times|times is",
    ),
    "cut: exclude": (
        "extras/exclude.py native/rules/exclude.h",
        "exclud|gaps?\\b|edge_at|_edge_set",
    ),
    "split: types": (
        "extras/types.py native/rules/types.h extras/relational.py extras/typed.py",
        "edge_type|node_type|type_numbers|by_type|fanout_of|NO_TYPE|NUM_TYPES|ifn?def TYPE|TYPE \\*|next_type|num_types|type_names|types_(called|used)|uses_types|_row\\b(?=.*_list)",
    ),
    "pairing": (
        "extras/disjoint.py native/rules/pairs.h",
        "disjoint|src_seed|seeds_before|(self|spec|law|b|batch)(\\.|->)pairs|PAIR|put_pair|slot_of|grouped|(src|dst|edge|num|know)_groups?\\b|AT\\(",
    ),
    "links": (
        "extras/links.py extras/ranking.py extras/edge_split.py extras/common_neighbours.py extras/paths.py native/links.cu",
        "LinkTask|[nN]egatives|scorer|edge_split|are_links|OF_LINKS|load_links",
    ),
    "small graphs": (
        "extras/graphs.py extras/regressor.py extras/graph_store.py extras/molecules.py native/line_graph.c",
        "GraphTask|GraphDataset|graph_ids|max_nodes|max_edges|uses_vectors|ReadSlot|alignn|ALIGNN|line_graph|molecules|graph_tables|load_batch|Limits",
    ),
    "edge features": (
        "extras/edge_features.py",
        "edge_feature|EDGE_FEATURES|edge_dim|edge_linear|edge_mean|edge_sum|edge_matrix|takes_edges|sees_edges|features_used|check_edges|[gG]ine\\b|GINE",
    ),
    "8-bit codes": (
        "extras/int8.py",
        "int8|CodedFeatures|codes_of|coded|feature_scale|CODES|gather_codes|encode|decode",
    ),
    "split features": (
        "extras/peers.py extras/split.py extras/parts.py",
        "split_features|(Split|Uneven|Part)Features|part_bounds|over_gpus|over_machines|machines_by_part|Exchange|described_part|fits_split|_write_part",
    ),
    "look-ahead cache": (
        "extras/lookahead.py disk/reader.py native/pages.c native/rows.c",
        "[lL]ookahead|look(s|ing)_ahead|RowReader|sampling_threads|sampled_indices|KeptPages",
    ),
    "CUDA graphs": (
        "extras/step_graphs.py native/aggregate.cu",
        "cuda_graph|CUDAGraph|StepGraphs|capturable|captured|is_static|static_room|hops_held",
    ),
    "names": (
        "extras/names.py",
        "(node|class|feature)_names|NAMES|(read|write|check)_names|ReorderedFeatures",
    ),
    "memory plan": (
        "run/plan.py",
        "choose_mode|placements|memory_lines|check_memory|memory_options|dry_run|weight_bytes|largest_batch|advice",
    ),
    "tables": (
        "extras/tables.py extras/node_tables.py extras/graph_tables.py",
        "pyarrow|[.]csv|[.]parquet|table_library|rows_of_nodes",
    ),
    "DGL and PyG": ("extras/dgl.py", "dgl|DGL|to_pyg|torch_geometric|PyG"),
    "pictures, traces": (
        "extras/pictures.py",
        "timeline|tensorboard|profile\\b|[.]curve|matplotlib|SummaryWriter",
    ),
    "own model file": (
        "run/own_model.py",
        "is_own|own_model|conv_of|takes_edges|output_of_own|own_network",
    ),
}


def _smear():
    """Yield (extra, tokens of its own files, tokens of other product files that are about it, the files with most of these)."""
    sources = {n: text for n, text in _sources().items() if _side(n) in ("product", "native")}
    for extra, (files, words) in EXTRAS.items():
        own, smeared = 0, collections.Counter()
        for name, text in sources.items():
            tokens = _tokens_of_lines(name, text)
            if name in files.split():
                own += tokens.total()
                continue
            about = {i for i, line in enumerate(text.split("\n"), 1) if re.search(words, line)}
            for node in _walked(_parsed(text)) if name.endswith(".py") else ():
                if re.search(words, getattr(node, "name", None) or ""):
                    about |= {*range(node.lineno, node.end_lineno + 1)}
            smeared[name] += sum(tokens[i] for i in about)
        yield extra, own, smeared.total(), smeared.most_common(4)


def _imported(tree, folder):
    """Return the names of the modules that a file of a folder may import, also by importlib and runpy, among other names.
    What a file does as a program, below `if __name__ ==`, is no import of the module."""
    found = set()
    for node in _walk_module(tree):
        if isinstance(node, ast.Call) and _last_name(node.func) in ("import_module", "run_module"):
            found |= {_text(argument) for argument in node.args}
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = f"{folder}.{node.module or ''}".strip(".") if node.level else node.module
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def _walk_module(tree):
    """Yield the nodes of a module's syntax tree, without those under `if __name__ == "__main__"`."""
    for statement in tree.body:
        test = ast.unparse(statement.test) if isinstance(statement, ast.If) else ""
        if test != "__name__ == '__main__'":
            yield from ast.walk(statement)


def _last_name(node):
    """Return the name of a function that is called: `b` of a.b()."""
    return getattr(node, "attr", getattr(node, "id", None))


def _text(node):
    """Return the text of a string in a syntax tree, or None."""
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return node.value if is_text else None


def _computes(node):
    """Whether an expression does more than name a value."""
    named = (
        ast.Name | ast.Constant | ast.Attribute | ast.Load | ast.Starred | ast.UnaryOp | ast.USub
    )
    return not all(isinstance(part, named) for part in ast.walk(node))


def _folded(tree):
    """Yield assignments of several values, two or more of them computed, to as many names: `a, b = f(x), g(y)`."""
    for node in _walked(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            values = node.value.elts if isinstance(node.value, ast.Tuple) else []
            if sum(map(_computes, values)) > 1:
                yield node


def _positional(function):
    """Return the names of a function's positional parameters, self aside; autograd can pass no others to a `forward`."""
    given = [a.arg for a in function.args.posonlyargs + function.args.args]
    if given[:1] == ["ctx"]:
        return []
    return given[1:] if given[:1] in (["self"], ["cls"]) else given


def _crowded(tree):
    """Yield functions of more than 5 positional parameters."""
    for node in _walked(tree):
        if isinstance(node, ast.FunctionDef) and len(_positional(node)) > 5:
            yield node


def _long_returns(tree):
    """Yield returns of more than 3 values; gradients of autograd have to be as many as its forward has arguments."""
    for function in _walked(tree):
        if isinstance(function, ast.FunctionDef) and function.name not in ("backward", "gradients"):
            for node in ast.walk(function):
                if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
                    if len(node.value.elts) > 3:
                        yield node


def _declarations(tree):
    """Yield the syntax of what declares a layer, a rule or a column: `class GINConv(Conv, name="gin")`, Rule("labor", ...),
    Column("edge_time", ...)."""
    for node in _walked(tree):
        if isinstance(node, ast.ClassDef):
            yield from (word.value for word in node.keywords if word.arg in ("name", "after"))
        if isinstance(node, ast.Call) and _last_name(node.func) in ("Rule", "Column"):
            yield node


def _named(tree, names):
    """Yield strings of a syntax tree that are one of `names`, outside declarations."""
    declaring = {part for node in _declarations(tree) for part in ast.walk(node)}
    return (n for n in _walked(tree) if n not in declaring and _text(n) in names)


OTHERS = ("args", "flags", "plan", "store", "graph", "model", "network", "net")


def _set_from_outside(tree):
    """Yield assignments to an attribute of flags, a plan, a store or a model that is not `self`."""
    for node in _walked(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in (
            targets if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) else ()
        ):
            for part in ast.walk(target):
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                    if _last_name(part.value) in OTHERS:
                        yield node


def _private(tree):
    """Return (`_private` names that a syntax tree defines, those that it reads but does not define)."""
    nodes = _walked(tree)
    own = {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    own |= {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    own |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    read = {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    read |= {alias.name for n in nodes if isinstance(n, ast.ImportFrom) for alias in n.names}
    return tuple({n for n in names if re.match("_[a-zA-Z]", n)} for names in (own, read - own))


def _reached(arrows, module):
    """Return the modules that a module imports, directly or not."""
    reached, more = set(), {module}
    while more := set().union(*(arrows[m] for m in more)) - reached:
        reached |= more
    return reached


def _modules(python):
    """Return ({module: file} of a dict by file, the names of those that are product)."""
    modules = {n[:-3].replace("/", "."): n for n in python if not n.endswith("__init__.py")}
    return modules, {m for m, n in modules.items() if _side(n) == "product"}


def _arrows(python):
    """Return {product module: product modules that it imports} of syntax trees by file."""
    modules, product = _modules(python)
    return {m: _imported(python[modules[m]], m.split(".")[0]) & product - {m} for m in product}


def _trees(sources):
    return {n: _parsed(text) for n, text in sources.items() if n.endswith(".py")}


def _house():
    """Return (figures as in LIMITS, {figure: where})."""
    sources = _sources()
    python = _trees(sources)
    modules, product = _modules(python)
    arrows = _arrows(python)
    tokens = dict.fromkeys(("product", "native", "bench", "tests"), 0)
    for name, text in sources.items():
        if _side(name) in tokens:
            tokens[_side(name)] += _tokens(name, text)
    long = [
        f"{name}:{node.name}"
        for name, tree in python.items()
        if _side(name) in ("product", "bench")
        for node in _walked(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno >= 80
        and node.name != "make_parser"
    ]
    product_trees = {n: tree for n, tree in python.items() if _side(n) == "product"}

    def found(search, *options):
        places = ((name, n) for name, tree in product_trees.items() for n in search(tree, *options))
        return [f"{name}:{n.lineno} {ast.unparse(n).splitlines()[0]}" for name, n in places]

    declarations = [node for tree in product_trees.values() for node in _declarations(tree)]
    names = {_text(n.args[0] if isinstance(n, ast.Call) else n) for n in declarations} - {None}
    private = {m: _private(python[modules[m]]) for m in product}
    ours = set().union(*(own for own, _ in private.values()))
    private = [f"{m}: {name}" for m in product for name in private[m][1] & ours]

    circle = [m for m in product if m in _reached(arrows, m)]

    @functools.cache
    def floor(module):
        return 1 + max(map(floor, arrows[module] - {*circle}), default=0)

    to_extras = [
        f"{module} -> {other}"
        for module, others in arrows.items()
        for other in others
        if other.startswith("extras.") and not module.startswith("extras.")
    ]
    findings = {
        "arrows from the core to extras": to_extras,
        "functions above 80 lines": long,
        "functions of over 5 positional parameters": found(_crowded),
        "tuples of over 3 values returned": found(_long_returns),
        "tuple assignments of several expressions": found(_folded),
        "names of layers, rules, columns outside their declarations": [
            place for place in found(_named, names) if not place.startswith("extras/__init__.py")
        ],
        "attributes set from outside": found(_set_from_outside),
        "modules in a circle": circle,
        "private names read from outside": private,
    }
    figures = {
        "tokens of product Python": tokens["product"],
        "tokens of C and CUDA": tokens["native"],
        "tokens of bench": tokens["bench"],
        "tokens of tests": tokens["tests"],
        "lines of README": sources["README.md"].count("\n"),
        "longest file": max(
            t.count("\n") for n, t in sources.items() if _side(n) in ("product", "bench", "native")
        ),
        "entries in the root": len({n.split("/")[0] for n in sources if n[0] != "."}),
        "floors of imports": max(map(floor, product)),
        "arrows": sum(map(len, arrows.values())),
        "fmt: skip": sum(text.count("# fmt" + ": skip") for text in sources.values()),
    }
    figures |= {what: len(places) for what, places in findings.items()}
    return figures, findings


def test_every_file_of_tests_is_collected():
    text = (HERE / "test_all.py").read_text()
    parts = re.search('PARTS = """(.*?)"""', text, re.DOTALL)[1].split()
    assert {*parts} == {p.stem for p in HERE.glob("tests/test_*.py")} | {"conftest"}


def test_the_house_does_not_grow():
    figures, findings = _house()
    grown = []
    for what, limit in LIMITS.items():
        if figures[what] > limit * (SLACK if what.startswith("tokens") else 1):
            where = findings.get(
                what, "raise the limit, and say in the commit message what that buys"
            )
            grown.append(f"{what}: {figures[what]} of {limit}: {where}")
    assert not grown, grown


def test_tokens_are_counted_without_docstrings_and_comments():
    text = 'def f(x):\n    """Doc."""\n    # why\n    return f"{x:{x}} {x}" + "a" "b"\n'
    assert _tokens("f.py", text) == len('def f ( x ) : return f"" + "a" "b"'.split())
    text = '/* a\n b */ int f(char *s) { return !strcmp(s, "a \\" // b"); } // c\n'
    assert _tokens("f.c", text) == 18


def test_arrows_point_downwards():
    for module, below in _arrows(_trees(_sources())).items():
        folder = module.split(".")[0]
        assert "train" not in below, module
        if module in ALONE_WITH_NATIVE or folder == "native":
            assert all(n.startswith("native.") for n in below), (module, below)
        if folder in ("disk", "sources"):
            assert not any(name.startswith(("tasks.", "run.")) for name in below), (module, below)
        if folder == "tasks":
            assert not any(name.startswith("run.") for name in below), (module, below)


def test_other_libraries_are_imported_where_they_are_used():
    """Where lmdb, dgl or pyarrow are missing, `bench gpu` and the tests start nevertheless."""
    known = {*sys.stdlib_module_names, "torch", "numpy", "tqdm", "pytest"}
    known |= {name.removesuffix(".py").split("/")[0] for name in _sources()}
    for name, text in _sources().items():
        for node in _parsed(text).body if name.endswith(".py") else ():
            if isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0):
                names = [getattr(node, "module", None), *(alias.name for alias in node.names)]
                assert (names[0] or names[1]).split(".")[0] in known, (name, node.lineno)


SAMPLES = """
import torch, warnings
from sampler import NeighborSampler
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("default")
    for _ in range(2):
        s = NeighborSampler(torch.tensor([0, 2, 3, 3]), torch.tensor([1, 2, 0]), [2, 2])
assert s.sample(torch.tensor([0]), 0)[-1].src_nodes.tolist() == [0, 1, 2]
caught = [str(warning.message) for warning in caught]
def drawn(**options):
    graph = torch.tensor([0, 2, 3, 3]), torch.tensor([1, 2, 0])
    try:
        return NeighborSampler(*graph, [2], backend="torch", **options).sample(torch.tensor([0]), 0)[0].src_nodes.tolist()
    except ImportError as error:
        return str(error)
"""


ALONE = {  # what is copied, as the first lines of a file say: what is done with it
    "sampler": f"""{SAMPLES}
assert s.backend == 'torch' and len(caught) == 1 and 'copy the folder native/' in caught[0], caught
assert drawn(replace=True) and 'copy the folder extras/ beside sampler.py' in drawn(method='labor')
""",
    "sampler extras": f"""{SAMPLES}
import os
os.remove('extras/exclude.py'), os.remove('extras/weights.py')
assert drawn(method='labor') == drawn(disjoint=True) == drawn(edge_type=torch.zeros(3).byte()) == [0, 1, 2]
assert drawn(weights=torch.ones(3)) == 'this takes extras/weights.py: copy it beside the others'
""",
    "sampler native": f"{SAMPLES}assert s.backend == 'native' and not caught, caught",
    "sampler model native extras": """
from pathlib import Path
for name in ("sampler.py", "model.py"):  # in a package
    file = Path("mine", name)
    file.parent.mkdir(exist_ok=True)
    file.write_text(Path(name).read_text().replace("from native", "from .native").replace("from extras", "from .extras"))
for file in Path("extras").iterdir():
    file.is_file() and file.write_text(file.read_text().replace("from sampler", "from ..sampler"))
Path("native").rename("mine/native")
Path("extras").rename("mine/extras")
import torch
from mine import model, sampler
assert model.fused and sampler.sampler_cpu
sampler.NeighborSampler(torch.tensor([0, 1]), torch.tensor([0]), [1], disjoint=True)
""",
    "features": """
import torch
from collections import namedtuple
from features import FeatureRing, prefetch
Block = namedtuple("Block", "src_nodes num_dst")
ring = FeatureRing(torch.eye(4), torch.arange(4), slots=3)
blocks = [[Block(torch.tensor([i, 3 - i]), 1)] for i in range(4)]
assert [b.y.item() for b in prefetch(lambda item, slot: ring.fetch(slot, item), blocks, depth=2)] == [0, 1, 2, 3]
""",
    "model": """
import torch
from collections import namedtuple
from model import SAGE
block = namedtuple("Block", "indptr indices src_nodes")(*map(torch.tensor, ([0, 1], [1], [7, 3])))
assert SAGE(3, 4, 2, num_layers=1)([block], torch.ones(2, 3)).shape == (1, 2)
""",
    "inference model": """
import torch
from inference import inference
from model import SAGE
indptr, indices = torch.tensor([0, 1, 2]), torch.tensor([1, 0])
assert inference(SAGE(3, 4, 2, num_layers=2), indptr, indices, torch.ones(2, 3)).shape == (2, 2)
""",
    "model extras": """
import torch
from collections import namedtuple
from model import GNN
from extras.relational import NodeInputs, RGCNConv
values = map(torch.tensor, ([0, 1], [1], [2, 0], [1]))
block = namedtuple("Block", "indptr indices src_nodes edge_type")(*values)
net = GNN(3, 4, 2, conv=RGCNConv, num_types=2, num_layers=1, inputs=NodeInputs([(2, 3), (1, 0)], 4))
assert net([block], torch.ones(1, 3)).shape == (1, 2)
""",
    "loader sampler features disk extras": """
import torch
from loader import Graph, NodeLoader
ids = torch.arange(3)
graph = Graph(torch.tensor([0, 1, 2, 2]), torch.tensor([1, 2]), torch.eye(3), ids)
assert sum(len(batch.y) for batch in NodeLoader(graph, ids, [1], batch_size=2)) == 3
""",
    "store disk native extras": """
import numpy as np, torch
from store import GraphStore, build_store, verify
split = {"train": [0], "valid": [1], "test": [2]}
build_store("s", edge_index=[[0, 1], [1, 2]], features=np.eye(3, dtype="float32"), labels=[0, 1, 1], split=split)
assert GraphStore.open("s").features.gather(torch.tensor([2])).tolist() == [[0, 0, 1]] and verify("s") == []
import subprocess, sys
info = subprocess.run([sys.executable, "store.py", "info", "s"], capture_output=True, text=True)
assert info.returncode == 2 and info.stdout == "", info
assert info.stderr.startswith("store.py: the command line needs sources and features.py, too: copy them to "), info
assert info.stderr.count("\\n") == 1, info
""",
    "ddp": """
import ddp
def worker(ranks, expected):
    assert ranks.sum(ranks.rank + 1) == [expected]
if __name__ == "__main__":
    ddp.launch(worker, 2, 3)
    ddp.launch(worker, 1, 1)
""",
}


def _ran_alone(folder, code, *words):
    """Run code in a folder, away from this tree -> its output."""
    (folder / "use.py").write_text(code)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "use.py", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("copied", ALONE)
def test_each_leaf_works_alone_in_an_empty_folder(copied, tmp_path):
    for name in copied.split():
        if (HERE / name).is_dir():
            shutil.copytree(HERE / name, tmp_path / name)
        else:
            shutil.copy(HERE / f"{name}.py", tmp_path)
    _ran_alone(tmp_path, ALONE[copied])


DELETED = {  # an extra: its files, all for ""; commands that are then refused, each in a sentence that names one of these
    "weights": ("weights", "train(edge_weight=ones)"),
    "times": ("times time_units", "train(edge_time=ones, node_time=ones)"),
    "types": ("types", "train('--model rgcn', edge_type=ones)", "train('--fanout a=1,1')"),
    "layers by type": ("relational", "train('--model rgcn', edge_type=ones)"),
    "features of edges": (
        "edge_features",
        "train(edge_features=ones[:, None])",
        "train('--edge-features')",
        "GNN(4, 4, 2, conv='gine', edge_dim=2)",
    ),
    "labor": ("labor", "train('--sampler labor')"),
    "exclude": ("exclude", "train('--task link')"),
    "disjoint": ("disjoint", "NeighborSampler(*graph, [2], disjoint=True)"),
    "links": ("links ranking edge_split common_neighbours paths", "train('--task link')"),
    "small graphs": ("graphs graph_store molecules regressor", "train('--task graph', **small)"),
    "tables": ("graph_tables node_tables tables", "tables()"),
    "CUDA graphs": ("step_graphs", "train('--cuda-graph off')"),
    "what one flag asks for": (
        "pictures export sage_pool cache lookahead pinned warm_start class_report",
        "train('--model sage-pool')",
        "train('--curve c.png')",
        "train('--export out')",
        "train('--init a.pt')",
        "train('--report r.csv')",
        "train('--cache 1KiB')",
        "features.share([])",
    ),
    "numbers as labels": ("regression", "train('--task graph', **small)", "train('--loss mae')"),
    "8-bit codes": ("int8", "train('--feature-dtype int8')"),
    "types of nodes": ("typed", "train('--dataset synthetic-mag:scale=0.0005')"),
    "parts of stores": ("parts", "tables('split')"),
    "split features": ("split peers", "features.SplitFeatures", "train('--split-features')"),
    "look-ahead": ("lookahead", "train('--lookahead 2 --cache 1KiB')"),
    "names": (
        "names",
        "store.build_store('n', edge_index=ends, features=np.eye(60), node_names=ends[0])",
    ),
    "DGL": ("dgl", "sampler.import_dgl()"),
    "all": ("", "train('--task link')"),
}
WITHOUT = """
import contextlib, io, json, sys
import numpy as np, torch
import ddp, features, inference, loader, model, sampler, store, train as command
from model import GNN
from sampler import NeighborSampler
from sources import cli
ones = np.ones(60, int)
ends = np.stack([np.arange(60), np.arange(1, 61) % 60])
small = {"node_offsets": np.arange(0, 61, 3), "edge_offsets": np.arange(0, 21), "x": np.eye(60, 4, dtype="f4")}
small |= {"edge_attr": ones[:20, None] * 0.5, "edge_index_local": ends[:, :1].repeat(20, 1), "targets": ones[:20] * 0.5}
graph = torch.tensor([0, 2, 3, 3]), torch.tensor([1, 2, 0])
tiny = "--gpus 0 --epochs 2 --batch-size 16 --hidden 4".split()
assert NeighborSampler(*graph, [2]).sample(torch.tensor([0]), 0)[0].src_nodes.tolist() == [0, 1, 2]
data = "--dataset synthetic:nodes=60,degree=3,features=4,classes=2 --fanout 2,2 --predict out.npy --predict-what logits"
assert command.main([*tiny, *data.split()]) == 0
def train(words="", **columns):
    one = {"edge_index": ends, "features": np.eye(60, 4, dtype="f4"), "labels": np.arange(60) % 2}
    np.savez("g.npz", **columns if "x" in columns else one | columns)
    assert command.main([*tiny, "--dataset", "g.npz", *words.split()]) == 0
def tables(*more):
    np.savetxt("e.csv", ends.T, "%d", ",")
    np.savetxt("x.csv", np.eye(60, 4), "%g", ",")
    assert cli.main(f"build e.csv s{len(said)} --features x.csv".split()) == 0
    assert not more or cli.main([*more, f"s{len(said)}", "2"]) == 0
said = []
for what in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as text:
        try:
            exec(what)
            text.truncate(0)
        except (ImportError, AssertionError, SystemExit) as error:
            text.write(str(error))
    said.append(text.getvalue())
print(json.dumps(said))
"""


def _copied(folder, left_out=()):
    """Copy the product into a folder, without files of extras/ -> the folder."""
    for file in _sources():
        if _side(file) in ("product", "native") and file not in left_out:
            (folder / file).parent.mkdir(exist_ok=True)
            shutil.copy(HERE / file, folder / file)
    return folder


@functools.cache
def _logits_with_all():
    """Return what WITHOUT predicts where nothing is left out."""
    with tempfile.TemporaryDirectory() as folder:
        _ran_alone(_copied(Path(folder)), WITHOUT, "[]")
        return Path(folder, "out.npy").read_bytes()


@pytest.mark.parametrize("name", DELETED)
def test_each_extra_can_be_deleted(name, tmp_path):
    """Without it nodes are classified with the same bits, it is refused, and the next ones of the table work, but for those that
    take it."""
    files, *refused = DELETED[name]
    every = [Path(file).stem for file in _sources() if file.startswith("extras/")]
    left_out = files.split() or {*every} - {"__init__"}
    left_out = [f"extras/{stem}.py" for stem in left_out]
    names = [*DELETED]
    others = [*names, *names][names.index(name) + 1 :][:2]
    asked = [*refused, *(DELETED[other][1] for other in others)]
    out = _ran_alone(_copied(tmp_path, left_out), WITHOUT, json.dumps(asked))
    said = json.loads(out.splitlines()[-1])
    for text in said[: len(refused)]:
        assert any(f"takes {file}: copy it beside the others" in text for file in left_out), said
    for other, text in zip(others, said[len(refused) :]):
        assert not text or any(word in text for word in ["pip install", *left_out]), (other, text)
    assert (tmp_path / "out.npy").read_bytes() == _logits_with_all()


if __name__ == "__main__":
    if sys.argv[1:] == ["smear"]:
        for extra, own, smeared, most in _smear():
            where = ", ".join(f"{name} {n}" for name, n in most if n)
            print(f"{extra:18} own files {own:6,}   outside {smeared:6,}: {where}")
        sys.exit()
    figures, findings = _house()
    for name, figure in figures.items():
        print(f"{name:60} {figure:7,}   of {LIMITS[name]:,}")
        if any(word in name for word in sys.argv[1:]):
            print(*findings.get(name, ()), sep="\n")
