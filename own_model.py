"""A model of one's own, out of a Python file: train.py --model mymodel.py:Net --model-args hidden=64,num_layers=2

Net is a class or a function: Net(in_dim, num_classes, hidden=64, num_layers=2) -> a torch.nn.Module, which is called as
net(blocks, x) with a block for each hop of --fanout, the outermost first, and x [N, F], the features of
blocks[0].src_nodes; it returns logits [S, C], a row for each seed. Inside it may hold the layers of model.py, DGL's
(`block.to_dgl()`) or PyG's (`block.to_pyg()`). The file is run as code, which is why only the command line can name it,
never a checkpoint. This file needs disk.py.
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


def build(model, words, in_dim, num_classes):
    """Run the file of --model and build the network that it defines.

    Args:
        model: "FILE.py:NAME". words: those of --model-args.
        in_dim, num_classes: F and C of the graph.

    Returns:
        (nn.Module, SHA-256 of the file's text).

    Raises:
        StoreError: for a file or a name that is not there, arguments that do not fit, or what is no nn.Module.
            What goes wrong inside the file is raised as it is.
    """
    file, _, name = model.rpartition(":")
    try:
        text = Path(file).read_bytes()
    except OSError as error:
        raise StoreError(f"--model {model}: {file} cannot be read: {error.strerror}") from error
    spec = importlib.util.spec_from_file_location("own_model_file", file)
    module = sys.modules["own_model_file"] = importlib.util.module_from_spec(spec)
    if (folder := str(Path(file).absolute().parent)) not in sys.path:
        sys.path.append(folder)  # for what lies beside it
    exec(compile(text, file, "exec"), vars(module))
    if not callable(make := getattr(module, name, None)):
        there = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == "own_model_file"]
        raise StoreError(f"--model {model}: {file} defines no {name}; it has {', '.join(there) or 'none'}")
    values = arguments(words)
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
    return net, hashlib.sha256(text).hexdigest()
