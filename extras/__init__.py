"""What the core works without, a file or a few each, listed here and imported when used: delete any.

For sampler.py a file has a `RULE`, a `law(law, check, **options)` that adds to a `Law` what options of NeighborSampler ask
for, or both. For a run it has a `use(flags, task, store)`, which returns entries of `Used` of run/placement.py; a `TASK`; layers;
and `flags(kinds)`: {flag of the core: {name: flag declared as in run/kinds.py}}, which --help lists behind that one."""

import importlib

import torch

# sampling rules beside the uniform one, of `method` and --sampler: the module of each
RULES = dict(labor=".labor", weighted=".weights", latest=".times")
# further options of NeighborSampler: those of each module, and what they are unless given
OPTIONS = {
    ".labor": dict(layer_dependency=False, batch_dependency=1),
    ".weights": dict(weights=None),
    ".types": dict(edge_type=None, by_type=True, type_numbers=None, num_types=0),
    ".times": dict(edge_times=None, strict=False, window=None),
    ".disjoint": dict(disjoint=False),
}
# columns of a store: the module whose `use` says what a run takes of each
COLUMNS = dict(
    edge_features=".edge_features",
    edge_type=".types",
    edge_time=".times",
    node_time=".times",
    edge_weight=".weights",
)
# tasks of --task, layers and models of small graphs of --model
TASKS = dict(link=".links", graph=".graphs")
LAYERS = {
    "sage-pool": ".sage_pool",
    "gine": ".edge_features",
    "rgcn": ".relational",
    "rgat": ".relational",
}
MODELS = {"edge-gated": ".graphs", "alignn": ".graphs"}
STEPS = dict(cuda_graph=".step_graphs")  # what may replace a training step
STARTS = dict(init=".warm_start")  # weights to start from
PLACES = {"pinned-cuda": ".pinned"}  # modes of --mode
CACHES = dict(cache=".cache")  # what may be put in front of features
# flags of each file; of files whose flags follow the same one in --help, the later is listed first
FLAGS = {
    ".times": "temporal window",
    ".labor": "layer_dependency batch_dependency",
    ".links": "edge_split edge_type scorer negatives negatives_by unchecked_negatives link_loss eval_negatives top pairs",
    ".graphs": "max_nodes max_edges pooling",
    ".relational": "bases",
    ".edge_features": "edge_features",
    ".step_graphs": "cuda_graph",
    ".lookahead": "lookahead",
    ".split": "split_features",
    ".cache": "cache",
    ".export": "export",
    ".pictures": "curve timeline profile",
    ".warm_start": "init",
    ".regression": "loss",
    ".class_report": "report",
}


# names that modules of the core have, too
NAMES = dict(
    CachedFeatures=".cache",
    CodedFeatures=".int8",
    DGLAdapter=".dgl",
    Exchange=".split",
    GINEConv=".edge_features",
    Limits=".graphs",
    SAGEPoolConv=".sage_pool",
    SplitFeatures=".split",
    UnevenFeatures=".split",
    expected_visits=".cache",
    gpu_view=".pinned",
    import_dgl=".dgl",
    seeds_at=".times",
    share=".pinned",
    split=".parts",
)


class MissingExtra(ImportError):
    """A file of this folder that is needed is not there."""


def extra(name, what="this"):
    """Import a module of this folder, ".labor"; MissingExtra if its file, or another one of this folder that it imports, is not
    there. what: takes it, for the message."""
    try:
        return importlib.import_module(name, __name__)
    except ModuleNotFoundError as error:
        folder, _, file = error.name.rpartition(".")
        if folder != __name__:
            raise
        problem = f"{what} takes extras/{file}.py: copy it beside the others"
        raise MissingExtra(problem) from error


def elsewhere(module):
    """Return the `__getattr__` of a module of the core that has the names of NAMES."""

    def find(name):
        if name not in NAMES:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(extra(NAMES[name], name), name)

    return find


def lacking(table, name):
    """Return a sentence on the missing file of a name in a table, or None."""
    try:
        if name in table:
            extra(table[name], name)
    except MissingExtra as error:
        return str(error)


def present(table):
    """Return {name: module} of a table, without those that miss a file."""
    return {name: extra(file) for name, file in table.items() if not lacking(table, name)}


def uses(flags, task, store):
    """Return what `use` of each module returns whose file is there; MissingExtra for a column, or fanouts by type, of a module
    that is not."""
    if any(isinstance(k, str) for k in flags.fanout):
        extra(".types", "--fanout by type of edges")
    for column, name in COLUMNS.items():
        if getattr(store, column, None) is not None:
            extra(name, f"{column} of {store.path}")
    modules = dict.fromkeys(present(COLUMNS | RULES).values())
    return [module.use(flags, task, store) for module in modules]


def with_options(law, method, options, check):
    """Return a `Law` with a rule, None for that which it has, and further options of NeighborSampler. check: validate columns."""
    if method:
        if method not in RULES:
            known = ", ".join([law.rule.name, *RULES])
            raise ValueError(f"method {method!r} is unknown; use one of {known}")
        law = ruled(law, extra(RULES[method]).RULE, f"method {method!r}")
    by_type = any(isinstance(k, list) for k in law.fanouts)
    for file, unless in OPTIONS.items():
        asked = {
            n: v for n, default in unless.items() if (v := options.pop(n, default)) is not default
        }
        law = law._replace(options=(*law.options, *asked))
        if asked or by_type and file == ".types":
            law = extra(file).law(law, check, **asked)
    if options:
        raise TypeError(f"NeighborSampler has no option {' or '.join(options)}")
    if law.rule.needs and law.rule.needs not in law.options:
        raise ValueError(f"{law.rule.name} needs {law.rule.needs}")
    if check:
        _check_order(law)
    return law


def ruled(law, rule, option):
    """Return a law with a rule, or as it is if it has this one; ValueError if another option has chosen another."""
    from sampler import UNIFORM

    if law.rule not in (UNIFORM, rule):
        raise ValueError(f"{law.rule.name!r} and {option} exclude each other; choose one")
    return law._replace(rule=rule)


def column(law, dtypes, **named):
    """Return a column of the edges, contiguous; TypeError unless it has one of the dtypes and is of the law's graph."""
    from sampler import check_array

    M = law.indices.numel()
    ((name, values),) = named.items()
    check_array(name, values, f"{dtypes} [M={M}]", law.indptr, M)
    return values.contiguous()


def pick_kept(keep, law, lists):
    """Look at every edge of every list -> as `Rule.pick`. keep: (law, lists, edges [E], row and place in it of each [E]) -> mask
    of the edges kept [E]."""
    from sampler import expand, prefix_sum

    edges = expand(lists.start, lists.degree)
    row = torch.repeat_interleave(lists.degree, output_size=edges.numel())
    place = edges - lists.start[row]
    edges = lists.skip(edges, row) if lists.skip else edges
    kept = keep(law, lists, edges, row, place)
    return prefix_sum(kept)[prefix_sum(lists.degree)], edges[kept]


def number_before(edge_times, start, degree, times, strict):
    """Count each list's edges no later than its time (earlier if strict), by vectorized binary search -> int64 [S]."""
    count = torch.zeros_like(degree)
    before = start - 1
    for bit in reversed(range(int(degree.max()).bit_length() if degree.numel() else 0)):
        more = count + (1 << bit)  # count them all if the last of them is early enough
        last = edge_times.index_select(0, (before + more).clamp_(max=edge_times.numel() - 1))
        early = ((last < times) if strict else (last <= times)) & (more <= degree)
        count = torch.where(early, more, count)
    return count


def _check_order(law):
    """Raise ValueError unless each list ascends by the columns of `law.sorted_by`."""
    indptr, M = law.indptr, law.indices.numel()
    same = torch.ones(max(M - 1, 0), dtype=torch.bool, device=indptr.device)
    same[indptr[(indptr > 0) & (indptr < M)] - 1] = False  # across the border of two lists
    for name, values in law.sorted_by.items():
        if (drops := (same & (values[1:] < values[:-1])).nonzero()).numel():
            v = int(torch.searchsorted(indptr, drops[0] + 1, right=True)) - 1
            how = ", then ".join(n[5:].rstrip("s") for n in law.sorted_by)
            raise ValueError(f"{name} decreases in the list of node {v}; sort each list by {how}")
        same &= values[1:] == values[:-1]
