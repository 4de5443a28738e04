"""Kinds of values of flags, as options of argparse: how each is parsed, and what stands for it in --help."""

import argparse
import math
import re
from contextlib import suppress
from functools import partial

from extras.edge_split import split_type
from model import CONVS
from run.own_model import words_of


def model_or(others):
    """Make an argparse type: a layer's name, FILE.py:NAME, or one of the other names, those of models of graphs."""

    def parse(text):
        text = spelling([*CONVS, *others], text)
        file, _, name = text.rpartition(":")
        if text in CONVS or text in others or file.endswith(".py") and name.isidentifier():
            return text
        names = ", ".join(CONVS)
        raise argparse.ArgumentTypeError(
            f"{text!r}: choose one of {names}, or FILE.py:NAME; for graphs {' or '.join(others)}"
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
    """Return the one of the choices that a text is but for upper case, - and _, else the text: 'ROC-AUC' -> 'roc_auc'."""
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
SEED = parsed_by(positive(int, zero=True, below=2**63), "N")
TIME = parsed_by(positive(int, below=2**63), "N")
RATE = parsed_by(positive(float), "RATE")
NUMBER = parsed_by(positive(float, zero=True), "X")
PROBABILITY = parsed_by(positive(float, zero=True, below=1), "P")
MODEL_ARGS = parsed_by(words_of, "A=1,B=x")
EDGE_SPLIT = parsed_by(split_type, "A/B/C")
FANOUT = parsed_by(fanout, "15,10,5")
SIZE = parsed_by(size, "4GiB")
