"""What sampler.py works without, a file each, imported when it is used. A file has a `RULE`, a `law(law, check, **options)`
that adds to a `Law` of sampler.py what options of NeighborSampler ask for, or both."""

import importlib
from pathlib import Path

# sampling rules beside the uniform one, of `method` and --sampler: the file of each
RULES = {"labor": "labor", "weighted": "weights", "latest": "times"}
# further options of NeighborSampler: the file of each, and what it is unless given
OPTIONS = {
    "layer_dependency": ("labor", False),
    "batch_dependency": ("labor", 1),
    "weights": ("weights", None),
    "edge_type": ("types", None),
    "by_type": ("types", True),
    "type_numbers": ("types", None),
    "edge_times": ("times", None),
    "strict": ("times", False),
    "window": ("times", None),
    "disjoint": ("disjoint", False),
}


def extra(file):
    """Import a file of this folder; ImportError if it is not there."""
    if not Path(__file__).with_name(f"{file}.py").exists():
        raise ImportError(f"this takes extras/{file}.py: copy it beside the others")
    return importlib.import_module(f"{__name__}.{file}")


def rules():
    """Return {name: Rule} of the sampling rules whose files are there."""
    from sampler import UNIFORM

    there = {UNIFORM.name: UNIFORM}
    for name, file in RULES.items():
        if Path(__file__).with_name(f"{file}.py").exists():
            there[name] = extra(file).RULE
    return there


def with_options(law, method, options, check):
    """Return a `Law` with a rule, None for that which it has, and further options of NeighborSampler. check: validate columns."""
    if unknown := options.keys() - OPTIONS.keys():
        raise TypeError(f"{', '.join(unknown)}: no such option; there are {', '.join(OPTIONS)}")
    if method:
        if method not in RULES:
            known = ", ".join([law.rule.name, *RULES])
            raise ValueError(f"method {method!r} is unknown; use one of {known}")
        law = law.ruled(extra(RULES[method]).RULE, f"method {method!r}")
    given = {name: value for name, value in options.items() if value is not OPTIONS[name][1]}
    law = law._replace(options=(*given,))
    by_type = any(isinstance(k, list) for k in law.fanouts)
    for file in dict.fromkeys(file for file, _ in OPTIONS.values()):
        of_file = {name: value for name, value in given.items() if OPTIONS[name][0] == file}
        if of_file or by_type and file == "types":
            law = extra(file).law(law, check, **of_file)
    if law.rule.needs and law.rule.needs not in given:
        raise ValueError(f"{law.rule.name} needs {law.rule.needs}")
    return law
