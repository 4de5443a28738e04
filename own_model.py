"""A model of one's own, out of a Python file: train.py --model mymodel.py:Net --model-args hidden=64,num_layers=2

Net is a class or a function: Net(in_dim, num_classes, hidden=64, num_layers=2) -> a torch.nn.Module, which is called as
net(blocks, x) with a block for each hop of --fanout, the outermost first, and x [N, F], the features of
blocks[0].src_nodes; it returns logits [S, C], a row for each seed. Inside it may hold the layers of model.py, DGL's
(`block.to_dgl()`) or PyG's (`block.to_pyg()`).

Features of edges come as net(blocks, x, edges=...), for each block those of its edges [E, D], if the forward of the
class has an argument `edges`; D comes as `edge_dim`, 0 without features, if Net has that argument. Of what a function
returns nothing is known before it is called: it gets both if it has an argument edge_dim.

The file is run as code, which is why only the command line can name it, never a checkpoint. This file needs disk.py.
"""

import argparse
import ast
import hashlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path

from torch import nn

from disk import StoreError


def is_own(model):
    """Whether a value of --model names a file."""
    return isinstance(model, str) and ":" in model


def name_of(built_in):
    """The argparse type of --model: one of these names, or FILE.py:NAME."""

    def parse(text):
        file, _, name = text.rpartition(":")
        if text not in built_in and not (file.endswith(".py") and name.isidentifier()):
            raise argparse.ArgumentTypeError(f"{text!r}: choose one of {', '.join(built_in)}, or FILE.py:NAME")
        return text

    return parse


def words_of(text):
    """The argparse type of --model-args: 'hidden=64,norm=layer' -> ['hidden=64', 'norm=layer']."""
    words = re.split(r",(?![^\[(]*[\])])", text)  # not inside of [1,2]
    for word in words:
        if not word.partition("=")[0].strip().isidentifier() or "=" not in word:
            raise argparse.ArgumentTypeError(f"{word!r}: write NAME=VALUE, as in hidden=64,num_layers=2")
    return [word.strip() for word in words]


def arguments(words):
    """['hidden=64', 'norm=layer'] -> {'hidden': 64, 'norm': 'layer'}: numbers, True, False and None, else words."""
    values = {}
    for word in words:
        name, _, text = word.partition("=")
        try:
            values[name.strip()] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            values[name.strip()] = text
    return values


_loaded = {}  # --model -> what `load` has returned


def load(model):
    """Run the file of --model, unless it is the text that was run last -> (what NAME is, SHA-256 of the text).

    Raises:
        StoreError: for a file or a name that is not there. What goes wrong inside the file is raised as it is.
    """
    file, _, name = model.rpartition(":")
    try:
        text = Path(file).read_bytes()
    except OSError as error:
        raise StoreError(f"--model {model}: {file} cannot be read: {error.strerror}") from error
    digest = hashlib.sha256(text).hexdigest()
    if _loaded.get(model, (None, None))[1] == digest:
        return _loaded[model]
    spec = importlib.util.spec_from_file_location("own_model_file", file)
    module = sys.modules["own_model_file"] = importlib.util.module_from_spec(spec)
    if (folder := str(Path(file).absolute().parent)) not in sys.path:
        sys.path.append(folder)  # for what lies beside it
    exec(compile(text, file, "exec"), vars(module))
    if not callable(make := getattr(module, name, None)):
        there = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == "own_model_file"]
        raise StoreError(f"--model {model}: {file} defines no {name}; it has {', '.join(there) or 'none'}")
    _loaded[model] = make, digest
    return _loaded[model]


def takes_edges(model):
    """Whether the network of --model takes features of edges -> (it can, it cannot do without them)."""
    make, _ = load(model)
    asked = inspect.signature(make.forward if hasattr(make, "forward") else make).parameters
    argument = asked.get("edges" if hasattr(make, "forward") else "edge_dim")
    return argument is not None, argument is not None and argument.default is argument.empty


def build(model, words, in_dim, num_classes, edge_dim=0):
    """Build the network that the file of --model defines.

    Args:
        model: "FILE.py:NAME". words: those of --model-args.
        in_dim, num_classes: F and C of the graph. edge_dim: D of the features of edges that it will be given.

    Returns:
        (nn.Module, SHA-256 of the file's text).

    Raises:
        StoreError: as `load`, and for arguments that do not fit, or what is no nn.Module.
    """
    make, digest = load(model)
    name, values = model.rpartition(":")[2], arguments(words)
    if "edge_dim" in inspect.signature(make).parameters:
        values.setdefault("edge_dim", edge_dim)
    try:
        inspect.signature(make).bind(in_dim, num_classes, **values)
    except TypeError as error:
        given = ", ".join(["in_dim", "num_classes", *(f"{key}={value!r}" for key, value in values.items())])
        raise StoreError(f"--model {model} is called as {name}({given}): {error}; change it or --model-args") from error
    net = make(in_dim, num_classes, **values)
    if not isinstance(net, nn.Module):
        raise StoreError(f"--model {model}: {name} returned a {type(net).__name__}, a torch.nn.Module is needed")
    if not any(parameter.requires_grad for parameter in net.parameters()):
        raise StoreError(f"--model {model}: {name} has no parameters that could be trained")
    if edge_dim and "edges" not in inspect.signature(net.forward).parameters:
        raise StoreError(f"--model {model}: {name} has an argument edge_dim, and the forward of what it returned has "
                         "no argument `edges` for the features of edges")  # fmt: skip
    return net, digest
