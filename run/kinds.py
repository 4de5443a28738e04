"""How flags are declared, those of run/flags.py and those of extras: kinds of values, as options of argparse; words for what a
resumed run does; conditions."""

import argparse
import importlib.util
import math
import re
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from extras import LAYERS, MODELS, RULES, TASKS, lacking, present
from model import CONVS
from sampler import UNIFORM

present(LAYERS)  # `CONVS` knows the layers of modules that are imported
SAMPLERS = {UNIFORM.name: UNIFORM} | {name: of.RULE for name, of in present(RULES).items()}


def model_or(others):
    """Make an argparse type: a layer's name, FILE.py:NAME, or one of the other names, those of models of graphs."""

    def parse(text):
        text = spelling([*CONVS, *others], text)
        file, _, name = text.rpartition(":")
        if text in CONVS or text in others or file.endswith(".py") and name.isidentifier():
            return text
        graphs = f"; for graphs {' or '.join(others)}" if others else ""
        raise argparse.ArgumentTypeError(
            f"{text!r}: choose one of {', '.join(CONVS)}, or FILE.py:NAME{graphs}"
        )

    return parse


def fanout(text):
    """Parse '15,10,5' -> [15, 10, 5]; a hop with numbers by edge type, 'writes=10:cites=5', stays text."""
    number = "(-1|0*[1-9][0-9]{0,8})"
    wrong = rf"any=|[^,]*=(?!{number}:)[-.\d]+:"  # a name may hold : and =, as a URI does
    hop = f"({number}|(?!{wrong})[^,]+={number})"
    hops = re.sub(r"\s*,\s*", ",", text.strip())
    if re.fullmatch(f"{hop}(,{hop})*|any={number}(,{number})*", hops):
        return [part if "=" in part else int(part) for part in hops.split(",")]
    raise argparse.ArgumentTypeError(
        f"{text!r}: write numbers above 0 and below 10^9, or -1 for all, with commas between the hops: 15,10,5; "
        "by types writes=10:cites=5 or any=15,10"
    )


def size(text):
    """Parse '4GiB', '4G' (the same), '512MiB' or a number of bytes -> bytes, an int."""
    parts = re.fullmatch(r"([0-9.]+)\s*([kmgt]?)(i?b)?", text.strip().lower())
    with suppress(TypeError, ValueError):
        base = 1000 if parts[3] == "b" else 1024
        return int(float(parts[1]) * base ** " kmgt".index(parts[2] or " "))
    raise argparse.ArgumentTypeError(f"{text!r} is no size; write it as 4GiB, 512MiB or bytes")


def positive(kind, zero=False, below=None):
    """Make an argparse type: a finite number above 0 (zero: at least 0), and below 2^31 if whole, or `below`."""
    below = below or (2**31 if kind is int else math.inf)

    def parse(text):
        with suppress(ValueError):
            if 0 < (value := kind(text)) < below or zero and value == 0:
                return value
        limit = f" and below {below}" if below < math.inf else ", such as 0.5"
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a {'whole ' * (kind is int)}number {'of at least 0' if zero else 'above 0'}{limit}"
        )

    return parse


def spelling(choices, text):
    """Return the one of the choices that a text is but for upper case, - and _, else the text: 'ROC-AUC' -> 'roc_auc'. Refuse
    names of tables of extras/__init__.py whose files are missing."""
    for table in (TASKS, RULES, LAYERS, MODELS):
        if why := lacking(table, text):
            raise argparse.ArgumentTypeError(why)
    plain = lambda word: word.lower().replace("-", "_")  # noqa: E731
    return next((choice for choice in choices if plain(choice) == plain(text)), text)


def one_of(*choices):
    """Make the options of a flag with these values."""
    return {"choices": choices, "type": partial(spelling, choices)}


def text(stands_for):
    """Make the options of a flag that takes any text but none, called `stands_for` in --help."""

    def parse(text):
        if not text:
            raise argparse.ArgumentTypeError(
                f"'' is empty: give {stands_for}, or leave the flag out"
            )
        return text

    return parsed_by(parse, stands_for)


def parsed_by(function, stands_for):
    """Make the options of a flag whose text a function parses, called `stands_for` in --help."""
    return {"type": function, "metavar": stands_for}


SWITCH = {"action": "store_true"}
ON_OFF = {"action": argparse.BooleanOptionalAction}  # --flag and --no-flag
COUNT = parsed_by(positive(int), "N")
COUNT_OR_0 = parsed_by(positive(int, zero=True), "N")
PROBABILITY = parsed_by(positive(float, zero=True, below=1), "P")
SIZE = parsed_by(size, "4GiB")


def spelled(name, value=True, equals=" "):
    """Spell a flag: batch_size -> --batch-size; with a value, as it is typed: --batch-size 8, --no-residual."""
    flag = f"--{'no_' * (value is False)}{name}".replace("_", "-")
    return flag if isinstance(value, bool) else f"{flag}{equals}{text_of(value)}"


def text_of(value):
    """Return a flag's value as it is typed: [15, 10] -> 15,10."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


# ---- declarations


class Flag(NamedTuple):
    """The declaration of a flag.

    Attributes:
        resume: what a resumed run does with it: the name of the function that declares it, `fixed` and others below.
        kind: options of argparse, see above.
        default: None: it follows from other flags, the data or the machine, unless there is none.
        help: unless it says what the default is, --help adds it.
        group: heading in --help that begins here. also: other spellings.
        needs: functions, see below; of a value that was typed each has to return None.
        default_is_off: its default asks for nothing, so that it needs nothing.
        endings: of the file that it names, for flags that write one.
    """

    resume: str
    kind: dict
    default: Any
    help: str
    group: str | None = None
    also: tuple = ()
    needs: tuple = ()
    endings: tuple = ()
    default_is_off: bool = True


# A flag is declared by the word for what a resumed run does with it
fixed = partial(Flag, "fixed")  # takes the checkpoint's value, refuses another one
per_graph = partial(Flag, "per_graph")  # the same, but --predict of another graph may have its own
kept = partial(Flag, "kept")  # takes the checkpoint's value unless it is typed again
built = partial(Flag, "built")  # the same, while the store is not built
alike = partial(Flag, "alike")  # takes this command's value, the same on all ranks
free = partial(Flag, "free")  # takes this command's value


# ---- what flags, also those of extras, need to have an effect: see run/flags.py


def built_in_model(flags):
    """Refuse a network of a file: only a layer goes into the network that has this flag."""
    if flags.conv is None:
        return f"is for the built-in models; give {flags.model} what it needs by --model-args"


def layers_where(**stated):
    """Return the names of the layers that state these values about themselves: layers_where(padded=True)."""
    return [n for n, c in CONVS.items() if all(getattr(c, k) == v for k, v in stated.items())]


def plain_layers():
    """Return the names of the layers that need neither types nor features of edges."""
    return [n for n, c in CONVS.items() if not c.uses_types and c.edge_features != "must"]


def layers_taking(option):
    """Return the names of the layers that are made with an option."""
    return [name for name, conv in CONVS.items() if option in conv.takes]


def layer_with(option):
    """Make a function that refuses layers which do not take an option."""

    def needs(flags):
        if option not in flags.layer.takes:
            return f"is for --model {' or '.join(layers_taking(option))}, --model is {flags.model}"

    return needs


def prediction(flags):
    """Refuse a flag of predictions if none are written."""
    if not flags.predict:
        return "needs --predict FILE to write to"


def one_run(flags):
    """Refuse a file that each of --runs would write anew."""
    if flags.runs > 1:
        return f"is for one run, --runs is {flags.runs}"


def training(flags):
    """Refuse a picture or trace of a training that does not take place."""
    if not flags.trains:
        return "shows training; this command only predicts"


def gpu_for(name, *values):
    """Make a function that refuses these values of a flag on the CPU."""

    def needs(flags):
        if getattr(flags, name) in values and not flags.gpus:
            return "needs a CUDA GPU and --gpus 1 or more; leave it out on CPU"

    return needs


def library(name):
    """Make a function that refuses a flag whose library is not installed."""

    def needs(flags):
        if not importlib.util.find_spec(name):
            return f"needs: pip install {name}"

    return needs
