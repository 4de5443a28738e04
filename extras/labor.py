"""LABOR-0 (arXiv 2210.13339): k neighbours on average, by draws of the sources, so that seeds with common neighbours share
them, which makes the outer hops smaller.

    NeighborSampler(..., method="labor", layer_dependency=True, batch_dependency=4)
"""

from functools import partial
from operator import index

from sampler import Rule, of

from . import pick_kept


def _keep_shared(law, lists, edges, row, place):
    """One draw for each source decides for all destinations. edges: [E], row: [E] list of an edge -> mask [E]."""
    draw = lists.bits(row, law.indices[edges].long(), 0)
    return draw * lists.degree[row] <= of(lists.k, row) << 32


RULE = Rule(
    "labor",
    help="seeds share neighbours (arXiv 2210.13339)",
    pick=partial(pick_kept, _keep_shared),
    header="labor",
    bounded=False,
    by_source=True,
)


def use(flags, task, store):
    """Draw by the sources with --sampler labor."""
    options = {
        "method": RULE.name,
        "layer_dependency": flags.layer_dependency,
        "batch_dependency": flags.batch_dependency,
    }
    return {"drawn": options} if flags.sampler == RULE.name else {}


def with_labor(flags):
    """Refuse a flag of LABOR for other rules."""
    if flags.sampler != RULE.name:
        return f"is for --sampler {RULE.name}, --sampler is {flags.sampler}"


def flags(kinds):
    """Declare the flags of LABOR."""
    return {
        "sampler": dict(
            layer_dependency=kinds.fixed(
                kinds.SWITCH,
                False,
                "labor: same random draws in all hops, for fewer input rows per batch",
                needs=[with_labor],
            ),
            batch_dependency=kinds.fixed(
                kinds.COUNT,
                1,
                "labor: same random draws for N steps in a row, so that rows are reused",
                needs=[with_labor],
            ),
        )
    }


def law(law, check, layer_dependency=False, batch_dependency=1):
    """Reuse a node's random draw in all hops (layer_dependency): fewer distinct sources in a batch; or for this many
    consecutive steps (batch_dependency), as GraphBolt does: fewer new sources."""
    steps = index(batch_dependency)
    if steps < 1:
        raise ValueError(f"batch_dependency is {batch_dependency}: give 1 step or more")
    if not law.rule.by_source:
        option = "layer_dependency" if layer_dependency else "batch_dependency"
        raise ValueError(f"{option} is for method {RULE.name!r}, not {law.rule.name!r}")
    return law._replace(rule=law.rule._replace(one_draw=bool(layer_dependency), steps=steps))
