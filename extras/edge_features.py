"""Features of edges, fetched like those of nodes, as an input of layers and networks that take them."""

from disk.files import StoreError
from model import layers_where, plain_layers
from run.own_model import takes_edges


def use(flags, task, store):
    """Edge features are inputs of layers and networks that take them."""
    conv = flags.conv
    if conv is None:
        takes, must = takes_edges(flags.model)
        why = "it does not ask for them"
        instead = "give that argument a default"
    else:
        takes = conv.sees_edges(flags.edge_features)
        # of a checkpoint, `check_widths` compares the widths
        asked = flags.edge_features and flags.resume in (None, "auto")
        must = asked or conv.edge_features == "must"
        able = layers_where(edge_features="can") + layers_where(edge_features="must")
        others = ", ".join(layers_where(edge_features="asked"))
        why = {"can": "--no-edge-features", "asked": "--edge-features makes it take them"}.get(
            conv.edge_features, f"{' and '.join(able)} take them, {others} with --edge-features"
        )
        instead = f"{', '.join(plain_layers())} do without"
        if conv.edge_features != "must":
            instead = "leave out --edge-features"
    # whether a layer sees them is open unless a flag says so
    settled = dict(edge_features=False) if flags.conv and flags.edge_features is None else {}
    if store.edge_features is None:
        if must:
            raise StoreError(
                f"--model {flags.model} takes features of edges, and {store.path} has none; {instead}"
            )
        return {"flags": settled}
    if not takes:
        unused = f"features of edges are not used by --model {flags.model}: {why}"
        return {"flags": settled, "lines": [unused]}
    seen = f"the model sees the features of edges, {store.edge_dim} x {store.meta['edge_dtype']}"
    return {
        "flags": dict.fromkeys(settled, True),
        "seen": {"edge_ids": True},
        "edges": store.edge_features,
        "lines": [seen],
    }
