"""A model from the user's file: train.py --model mymodel.py:Net --model-args hidden=64,num_layers=2

If Net is a subclass of `Conv` of model.py, it is a layer: the network is a `GNN` of it, as for the built-in models, and
takes their flags. Else Net is a class or function: Net(in_dim, num_classes, hidden=64, num_layers=2) -> torch.nn.Module, called as
net(blocks, x) with one block for each hop of --fanout, outermost first, and x [N, F], the features of
blocks[0].src_nodes -> logits [S, C]. Inside, use layers of model.py, DGL's (`block.to_dgl()`) or PyG's
(`block.to_pyg()`).

Edge features arrive as net(blocks, x, edges=...), [E, D] for each block, if the class's forward takes `edges`; D arrives
as `edge_dim` (0 without features) if Net takes it. A function gets both if it takes edge_dim.

With --task graph a network is called as net(graph), a `GraphBatch` of extras/graph_store.py -> [G, T], and takes the features of
edges from it, all as they are stored.

The file runs as code, which is why only the command line can name it, never a checkpoint.
"""

import argparse
import ast
import functools
import hashlib
import importlib.util
import inspect
import re
import sys
import traceback
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from disk.files import StoreError, reading
from model import CONVS, Conv


def is_own(model):
    """Return whether a value of --model names a file."""
    return isinstance(model, str) and ":" in model


def conv_of(model):
    """Return the layer that a value of --model names or is, a subclass of `Conv`, or None for a network of a file; `Conv` itself
    stands for the models of a task that has its own. A file is run, so do not call this for a checkpoint's."""
    if isinstance(model, type):
        return model
    if not is_own(model):
        return CONVS.get(model, Conv)
    made, _ = load(model)
    return made if isinstance(made, type) and issubclass(made, Conv) else None


def words_of(text):
    """Parse --model-args, as an argparse type: 'hidden=64,norm=layer' -> ['hidden=64', 'norm=layer']."""
    words = [word.strip() for word in re.split(r",(?![^\[(]*[\])])", text)]  # not inside [1,2]
    names = [word.partition("=")[0].strip() for word in words]
    for word, name in zip(words, names):
        if "=" not in word or not name.isidentifier():
            raise argparse.ArgumentTypeError(f"{word!r}: write NAME=VALUE, as in hidden=64")
        if names.count(name) > 1:
            raise argparse.ArgumentTypeError(f"{name} is given more than once")
    return words


@functools.lru_cache(maxsize=1)
def run_file(file, text):
    """Execute the source `text` of a file as a module -> the module."""
    spec = importlib.util.spec_from_file_location("own_model_file", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["own_model_file"] = module
    folder = str(Path(file).absolute().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # for modules beside it
    try:
        exec(compile(text, file, "exec"), vars(module))
    except Exception as error:
        if "/dgl/__init__.py" not in traceback.format_exc():
            raise
        raise StoreError(
            f"{file}: `import dgl` fails under this torch: "
            "write `from sampler import import_dgl; dgl = import_dgl()`"
        ) from error
    return module


def load(model):
    """Run the file of --model -> (the object called NAME, SHA-256 of the file). Raises StoreError
    for a missing file or name; exceptions from inside the file propagate."""
    file, _, name = model.rpartition(":")
    with reading(f"--model {model}: {file}"):
        text = Path(file).read_bytes()
    defined = vars(run_file(file, text))
    if not callable(defined.get(name)) or isinstance(defined[name], nn.Module):
        public = [k for k, v in defined.items() if getattr(v, "__module__", "") == "own_model_file"]
        raise StoreError(
            f"--model {model}: {file} defines no class or function {name}"
            f"; it has {', '.join(public) or 'none'}"
        )
    return defined[name], hashlib.sha256(text).hexdigest()


def takes_edges(model):
    """Return whether the network of --model accepts edge features, and whether it requires them."""
    make, _ = load(model)
    name = "edges" if hasattr(make, "forward") else "edge_dim"
    argument = inspect.signature(getattr(make, "forward", make)).parameters.get(name)
    return argument is not None, argument is not None and argument.default is argument.empty


def build(model, words, in_dim, num_classes, edge_dim=0, *, blocks=True):
    """Build the network of --model with the `words` of --model-args for feature width in_dim and edge feature width
    edge_dim -> nn.Module. blocks: it is called with blocks, else with a `GraphBatch`. Raises StoreError as `load` does, for
    arguments that do not fit, and if the result is not a usable nn.Module."""
    make, _ = load(model)
    name = model.rpartition(":")[2]
    values = {}
    for word in words:  # ['hidden=64', 'norm=layer'] -> {'hidden': 64, 'norm': 'layer'}
        key, _, text = word.partition("=")
        values[key.strip()] = text
        with suppress(ValueError, SyntaxError):
            values[key.strip()] = ast.literal_eval(text)
    if "edge_dim" in inspect.signature(make).parameters:
        values.setdefault("edge_dim", edge_dim)
    try:
        inspect.signature(make).bind(in_dim, num_classes, **values)
    except TypeError as error:
        options = "".join(f", {k}={v!r}" for k, v in values.items())
        raise StoreError(
            f"--model {model} is called as {name}(in_dim, num_classes{options}): {error}"
        ) from error
    net = make(in_dim, num_classes, **values)
    start = f"--model {model}: {name}"
    if not isinstance(net, nn.Module):
        raise StoreError(f"{start} returned a {type(net).__name__}, a torch.nn.Module is needed")
    for key, value in net.state_dict().items():
        if type(value) is not torch.Tensor or value.layout != torch.strided:
            raise StoreError(
                f"{start} has {key} in its state_dict, and a checkpoint holds dense tensors: leave it out "
                "(persistent=False), or give a lazy module the sizes of its input"
            )
    if not any(parameter.requires_grad for parameter in net.parameters()):
        raise StoreError(f"{start} has no parameters that could be trained")
    taken = inspect.signature(net.forward).parameters.values()
    edges = any(p.name == "edges" or p.kind == p.VAR_KEYWORD for p in taken)
    if blocks and edge_dim and not edges:
        raise StoreError(f"{start} takes edge_dim, but the forward of its result takes no `edges`")
    return net
