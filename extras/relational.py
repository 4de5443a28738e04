"""R-GCN and R-GAT, layers by relation for graphs with edge types, and the learned inputs of graphs with node types.

Copy this file and model.py into your own code: they need only torch. Importing it makes the layers known to `GNN`.

    from extras import relational
    model = GNN(in_dim, hidden, num_classes, conv="rgcn", num_types=R)
    logits = model(blocks, x)                       # blocks have edge_type [E]
    inputs = relational.NodeInputs(node_types, hidden)
    model = GNN(in_dim, hidden, num_classes, conv="rgcn", num_types=R, inputs=inputs)
    logits = model(blocks, x)                       # x: features of the nodes whose type has features

With the folder native/, sums over types on a GPU add no rows by atomics, except those for bases of more than LOOPED types.
"""

import torch
from torch import nn
from torch.nn import functional as F

import model
from model import (
    Conv,
    Linear,
    check_rows,
    edge_dst,
    edge_softmax,
    head_width,
    is_gnn,
    linear,
    mean_neighbours,
    summable,
    unchanged,
)

LOOPED = 16  # up to this many types: one matrix product per type


class RGCNConv(Conv, name="rgcn"):
    """Relational graph convolution (Schlichtkrull et al., arXiv 1703.06103): W_0 h_v + b + sum_r W_r mean_r(h_u), the
    mean over v's edges of type r. With features of edges h_u stands for h_u beside e_uv: W_r has rows for both.

    Args:
        in_dim, out_dim: F, D. num_types: R.
        bases: B: W_r = sum_b a_rb V_b, with B matrices V_b for all types; 0: one matrix per type.
        edge_dim: width of the features of edges; 0: none.
        columns: of the matrices; None: D.
    """

    edge_features = "asked"
    uses_types = True
    padded = True
    takes = ("num_types", "bases")

    averages = True  # its `gathered` is the mean

    def __init__(self, in_dim, out_dim, num_types, bases=0, edge_dim=0, *, columns=None):
        super().__init__()
        self.out_dim = out_dim
        self.num_types = num_types
        self.edge_dim = edge_dim
        self.self_linear = Linear(in_dim, out_dim)
        width = in_dim + edge_dim
        self.weight = nn.Parameter(torch.empty(bases or num_types, width, columns or out_dim))
        self.coefficients = nn.Parameter(torch.empty(num_types, bases)) if bases else None
        nn.init.uniform_(self.weight, -(width**-0.5), width**-0.5)
        if bases:
            nn.init.xavier_uniform_(self.coefficients)

    def combine(self, near):
        if self.edge_dim:
            near = self.by_edge(near)
        out = self.self_linear(near.x_dst)
        S = len(near.x_dst)
        R = self.num_types
        if model.fused and model.fused.is_gpu(near.messages.device) and near.types is not None:
            return out + self.without_waiting(near)
        group, counts, indices = self._grouped(near.indptr, near.indices, near.types)
        few = 2 * len(group) < S * R
        if self.averages and self.coefficients is None and R <= LOOPED and few:
            maps = [(weight.t(), None) for weight in self.weight]
            return _add_means(
                out.clone(),
                [near.messages],
                [maps],
                dst=group // R,
                kinds=group % R,
                counts=counts,
                indices=indices,
            )
        means = self.gathered(near, group, counts, indices)  # [G, F]
        if self.coefficients is None:  # zeros if a destination has no edge of a type
            sums = means.new_zeros(S * R, means.shape[1]).index_copy_(0, group, means)
        else:
            sums = self.sums_by_basis(means, group, S)
        return out + self.mapped(sums, self.weight)

    def mapped(self, means, matrices):
        """Map means [S, R, F], in any shape, by matrices [R, F, D] and add up over the types -> [S, D]."""
        weight = matrices.flatten(0, 1)
        return means.reshape(-1, len(weight)) @ weight

    def by_edge(self, near):
        """Return `near` with a message for each edge: what came over it beside its features, [E, F + edge_dim]."""
        # a copy: CUDA graphs keep lists of edges by destination with a block's own tensor
        ids, rows = rows_of_edges(near._replace(indices=near.indices.clone()))
        edges = near.edges.to(rows.dtype).where(ids.unsqueeze(1) >= 0, 0)  # padding may be nan
        rows = torch.cat([rows, edges], 1)
        return near._replace(indices=ids, messages=rows)

    def sums_by_basis(self, means, group, S):
        """Add up means [G, F] of groups [G] with the coefficients of their types -> [S, B, F]."""
        R = self.num_types
        by_basis = self.coefficients[group % R].to(means.dtype).unsqueeze(2) * means.unsqueeze(1)
        return means.new_zeros(S, *by_basis.shape[1:]).index_add_(0, group // R, by_basis)

    def matrices(self):
        """Return W_r of all types [R, F, D]."""
        if self.coefficients is None:
            return self.weight
        return (self.coefficients @ self.weight.flatten(1)).unflatten(1, self.weight.shape[1:])

    def without_waiting(self, near):
        """Compute sum_r W_r mean_r(h_u) -> [S, D], while the host does not wait for a GPU, in shapes that follow from those
        of `near`. Padding, edges after the last one with index -1, is skipped."""
        indptr = near.indptr
        indices = near.indices
        S = indptr.numel() - 1
        R = self.num_types
        none = S * R  # group of the padding
        edges = torch.arange(len(indices), device=indices.device, dtype=indptr.dtype)
        dst = torch.searchsorted(indptr[1:], edges, right=True)  # S for padding
        group, order = (dst * R + near.types).clamp(max=none).sort(stable=True)
        by_basis = self.coefficients is not None and R > LOOPED
        # as many groups as edges: that of a list's last edge has the list, the others are empty
        groups = group if by_basis else torch.arange(none, device=group.device)
        offsets = torch.searchsorted(group, F.pad(groups, (0, 1), value=none + 1))
        indices = indices[order]
        means = self.means_of_groups(near, group, offsets.to(indices.dtype), indices)
        matrices = self.matrices()
        if by_basis:
            matrices = self.weight
            means = self.sums_by_basis(means, groups, S + 1)[:S]
        return self.mapped(means, matrices)

    def means_of_groups(self, near, group, offsets, indices):
        """Average the messages `indices` [E] of each group, which begins at offsets [G+1] -> [G, F]. group: [E], of each edge:
        destination * R + type, S * R for padding."""
        return mean_neighbours(offsets, indices, near.messages)

    def after_inputs(self, block, inputs, x):
        """Compute the layer of inputs(block.src_nodes, x), with a `NodeInputs`, in fewer operations -> [S, D].

        The mean of a linear map is the map of the mean: features and embedding rows are averaged as they are, and the
        means multiplied by W_r P, where P is the map of the node type. Own rows are means over one edge of a type R.
        None: the sources of one edge type have several node types.
        """
        check_rows(block, block.src_nodes)
        tables, kinds, rows = inputs.tables(block.src_nodes, x)
        S = block.indptr.numel() - 1
        R = self.num_types
        K = len(tables)
        sources = rows[block.indices].to(block.indices.dtype)
        group, counts, sources = self._grouped(
            block.indptr, sources, block.edge_type, kinds[block.indices], K
        )
        type_of_group = group // K
        if bool((type_of_group[1:] == type_of_group[:-1]).any()):
            return None
        self_rows = torch.arange(S, device=group.device)
        weights = [*(weight.t() for weight in self.matrices()), self.self_linear.weight]
        maps = []
        for of in inputs.linears:
            maps.append([(weight @ of.weight, weight @ of.bias) for weight in weights])
        maps.append([(weight, None) for weight in weights])
        return _add_means(
            self.self_linear.bias.repeat(S, 1),
            tables,
            maps,
            dst=torch.cat([type_of_group // R, self_rows]),
            kinds=torch.cat([group % K * (R + 1) + type_of_group % R, kinds[:S] * (R + 1) + R]),
            counts=torch.cat([counts, torch.ones_like(self_rows)]),
            indices=torch.cat([sources, rows[:S].to(sources)]),
        )

    def gathered(self, near, group, counts, indices):
        """Average the messages of each group, whose `counts` [G] rows are `indices` -> [G, F]."""
        return mean_neighbours(_offsets(counts, indices), indices, near.messages)

    def _grouped(self, indptr, indices, types, kinds=0, K=1):
        """Group each destination's edges by type and one of K kinds [E] -> ((destination * R + type) * K + kind of each
        group [G], int64, ascending; its number of edges [G]; indices, group by group)."""
        if types is None:
            raise ValueError(
                "blocks have no edge_type: give it to the sampler, or types to inference"
            )
        R = self.num_types
        types = types.long()
        if bool(((types < 0) | (types >= R)).any()):
            raise IndexError(
                f"a block has types {int(types.min())} to {int(types.max())}, "
                f"the layer knows 0 to {R - 1}, as num_types is {R}"
            )
        group = (edge_dst(indptr, indices) * R + types) * K + kinds
        if bool((group[1:] < group[:-1]).any()):  # not sampled by type: sort each list by type
            group, place = group.sort(stable=True)
            indices = indices[place]
        group, counts = group.unique_consecutive(return_counts=True)
        return group, counts, indices


class RGATConv(RGCNConv, name="rgat"):
    """Relational graph attention (Busbridge et al., arXiv 1904.05811), additive, within each type: R-GCN with the mean over
    v's edges of type r weighted by softmax(leaky_relu(q_r . h_v + k_r . h_u)), in each of K heads by its own q_r and k_r.

    The paper's q and k multiply W_r h: here W_r is part of q_r and k_r. With features of edges h_u stands for h_u beside
    e_uv here too.

    Args:
        heads: K. mean: W_r of a head is D wide, and heads are averaged; otherwise D / K, and they are concatenated.
    """

    takes = ("num_types", "bases", "heads")
    last_options = {"mean": True}
    heads = 1
    averages = False

    def __init__(self, in_dim, out_dim, num_types, bases=0, edge_dim=0, *, heads=1, mean=False):
        columns = heads * head_width(out_dim, heads, mean)
        super().__init__(in_dim, out_dim, num_types, bases, edge_dim, columns=columns)
        self.heads = heads
        self.mean = mean
        self.query = nn.Parameter(torch.empty(num_types * heads, in_dim))
        self.key = nn.Parameter(torch.empty(num_types * heads, in_dim + edge_dim))
        nn.init.xavier_uniform_(self.query)
        nn.init.xavier_uniform_(self.key)

    def message(self, h, degree=None):
        """Return the row and beside it k_r . h for each type r and head; with features of edges the row alone, see `by_edge`."""
        return h if self.edge_dim else self.with_keys(h)

    def with_keys(self, rows):
        return torch.cat([rows, F.linear(rows, self.key)], 1)

    def by_edge(self, near):
        near = super().by_edge(near)
        return near._replace(messages=self.with_keys(near.messages))

    def rows_keys_queries(self, messages, x_dst):
        """Split messages [n, F + R K] of `with_keys` and compute queries of rows x_dst [S, F] -> rows [n, F], keys [n, R, K],
        queries [S R, K]."""
        messages = summable(messages)
        rows, keys = messages.split([messages.shape[1] - len(self.key), len(self.key)], 1)
        queries = summable(F.linear(x_dst, self.query)).view(-1, self.heads)
        return rows, keys.unflatten(1, (self.num_types, self.heads)), queries

    def means_of_groups(self, near, group, offsets, indices):
        """See `RGCNConv`; by attention: sum(w h) / sum(w) for w = exp(score), of each head -> [G, K F]."""
        ids, messages = rows_of_edges(near._replace(indices=indices))
        rows, keys, queries = self.rows_keys_queries(messages, near.x_dst)
        queries = F.pad(queries, (0, 0, 0, 1))
        kinds = (group % self.num_types).view(-1, 1, 1).expand(-1, 1, self.heads)
        scores = F.leaky_relu(queries[group] + keys.gather(1, kinds).squeeze(1), 0.2)
        top = torch.full_like(queries, -torch.inf)
        group_of_edge = group.unsqueeze(1).expand_as(scores)
        top = top.scatter_reduce(0, group_of_edge, scores.detach(), "amax")
        weights = (scores - top[group]).exp().unsqueeze(2)
        # kernels read four columns at once
        rows = torch.cat([rows.unsqueeze(1) * weights, weights.expand(-1, -1, 4)], 2)
        total = mean_neighbours(offsets, ids, rows.flatten(1)).unflatten(1, rows.shape[1:])
        # the largest weight of a group is 1
        means = total[..., :-4] / total[..., -1:].clamp(min=1e-20)
        return means.flatten(1).to(near.messages.dtype)

    def gathered(self, near, group, counts, indices):
        """Average the messages of each group, whose `counts` [G] rows are `indices`, by attention of each head -> [G, K F]."""
        rows, keys, queries = self.rows_keys_queries(near.messages, near.x_dst)
        groups = torch.repeat_interleave(counts, output_size=len(indices))
        scores = queries[group][groups] + keys[indices.long(), (group % self.num_types)[groups]]
        scores = F.leaky_relu(scores.to(self.key.dtype), 0.2)
        weights = edge_softmax(scores, groups, len(counts)).to(rows.dtype)
        bags = [
            F.embedding_bag(
                indices,
                rows,
                _offsets(counts, indices),
                mode="sum",
                per_sample_weights=weight.contiguous(),
                include_last_offset=True,
            )
            for weight in weights.unbind(1)
        ]
        return torch.cat(bags, 1).to(near.messages.dtype)

    def mapped(self, means, matrices):
        """See `RGCNConv`; means [S, R, K, F] of heads, which have their columns of the matrices."""
        if self.heads == 1:
            return super().mapped(means, matrices)
        R, width, _ = matrices.shape
        means = means.view(-1, R, self.heads, width)
        matrices = matrices.unflatten(2, (self.heads, -1))
        outs = []
        for pair in zip(means.unbind(2), matrices.unbind(2)):
            outs.append(super().mapped(*pair))
        return torch.stack(outs).mean(0) if self.mean else torch.cat(outs, 1)


def rows_of_edges(near):
    """Return the positions [E] of edges, -1 for padding, and the message that comes over each of them [E, width]."""
    indices = near.indices
    ids = torch.arange(len(indices) + 1, device=indices.device, dtype=indices.dtype)
    rows = mean_neighbours(ids, indices, near.messages)
    return ids[:-1].where(indices >= 0, -1), rows


def _offsets(counts, indices):
    """Return where each group of counts [G] indices begins, and the end -> [G+1], of their dtype."""
    return F.pad(counts.cumsum(0), (1, 0)).to(indices.dtype)


def _add_means(out, tables, maps, *, dst, kinds, counts, indices):
    """Average groups of rows, map the means linearly and add them to rows of out [S, D], in place.

    Args:
        tables: K tensors. maps: for each table, R pairs of weight and bias.
        dst, kinds, counts: [G] of each group its destination, the number of its map, counted over all tables, and of its
            rows. indices: of these rows in their table, group by group.
    """
    order = kinds.argsort(stable=True)
    starts = (counts.cumsum(0) - counts)[order]
    dst = dst[order]
    counts = counts[order]
    moved = (starts - counts.cumsum(0) + counts).repeat_interleave(counts, output_size=len(indices))
    indices = indices[moved + torch.arange(len(indices), device=indices.device)]
    groups_of_map = torch.bincount(kinds, minlength=len(tables) * len(maps[0]))
    groups_of_map = groups_of_map.view(len(tables), -1)  # groups of each map
    groups_of_table = groups_of_map.sum(1).tolist()
    parts = zip(
        tables,
        maps,
        groups_of_map.tolist(),
        dst.split(groups_of_table),
        counts.split(groups_of_table),
    )
    for table, pairs, sizes, dst, counts in parts:
        part, indices = indices.tensor_split([int(counts.sum())])
        means = mean_neighbours(_offsets(counts, part), part, table)
        for rows, at, (weight, bias) in zip(means.split(sizes), dst.split(sizes), pairs):
            out = out.index_add_(0, at, linear(rows, weight, bias).to(out.dtype))
    return out


class NodeInputs(nn.Module):
    """First layer's input for nodes of several types, whose ids are consecutive by type: a linear map of each type's
    features, or a learned embedding of each node of a type without features (types with features come first).

    The embedding's gradient is sparse, with the batch's rows only: use torch.optim.SparseAdam.

    Args:
        node_types: (number of nodes, feature width or 0) of each type, such as GraphStore.node_types.values().
        out_dim: D.

    Attributes:
        padded: x may be [N, F], see `aligned`.
    """

    padded = False

    def __init__(self, node_types, out_dim):
        super().__init__()
        counts, widths = zip(*node_types)
        if sorted(map(bool, widths), reverse=True) != [*map(bool, widths)]:
            raise ValueError(f"node_types {node_types}: types with features have to come first")
        self.out_dim = out_dim
        self.register_buffer("ends", torch.tensor(counts).cumsum(0), persistent=False)
        self.linears = nn.ModuleList(Linear(width, out_dim) for width in widths if width)
        learned = sum(count for count, width in node_types if not width)
        self.first = sum(counts) - learned
        self.embedding = None
        if learned:
            self.embedding = nn.Embedding(learned, out_dim, sparse=True)
            nn.init.normal_(self.embedding.weight, std=out_dim**-0.5)

    def forward(self, nodes, x):
        """nodes: [N] ids; x: [n, F] features of those whose type has features, in the order of nodes -> [N, D]."""
        if self.padded and len(x) == len(nodes):
            return self.aligned(nodes, x)
        tables, kinds, rows = self.tables(nodes, x)
        dtype = x.dtype if self.embedding is None else self.embedding.weight.dtype
        tables[: len(self.linears)] = (f(t).to(dtype) for f, t in zip(self.linears, tables))
        starts = kinds.new_tensor([0, *map(len, tables)]).cumsum(0)
        return torch.cat(tables).index_select(0, starts[kinds] + rows)

    def joins(self, net):
        """Whether a `GNN` may compute its input and first layer by `step`: nothing is between them, no part customised."""
        layer = net.layers[0]
        between = net.recompute or net.residuals or net.input_dropout and net.training
        if self.padded or between or not is_gnn(net, ("embed", "step", "finish")):
            return False
        parts = self, *self.linears, layer, *layer.children()
        plain = unchanged(*parts, kinds={RGCNConv, NodeInputs}) and not layer.edge_dim
        return plain and layer.num_types <= LOOPED

    def step(self, net, i, block, x, *, seed=None, edges=None):
        """`GNN.embed` and `GNN.step` of the first layer in one, if it can be `RGCNConv.after_inputs`."""
        h = net.layers[i].after_inputs(block, self, x)
        if h is not None:
            return net.finish(i, h, None, block.src_nodes, seed)
        x = net.embed(block.src_nodes, x)
        check_rows(block, x)
        return net.step(i, block, x, seed=seed, edges=edges)

    def pad(self, padded=True):
        """Let x be [N, F], see `aligned`, as in a CUDA graph, or no longer."""
        self.padded = padded

    def aligned(self, nodes, x):
        """`forward` for x [N, F], a row for every node, zeros for types without features. The host does not wait for a
        GPU; negative nodes are padding, whose rows and gradients have no meaning."""
        kinds = torch.bucketize(nodes, self.ends, right=True)
        parts = []
        for kind, of in enumerate(self.linears):
            parts.append(of(x[:, : of.in_features]) * (kinds == kind).unsqueeze(1))
        if self.embedding is not None:
            parts.append(_Rows.apply(self.embedding.weight, nodes.long() - self.first))
        return sum(parts)

    def tables(self, nodes, x):
        """Sort nodes [N] -> ([features [n, F] of each type that has them, embedding rows [n, D] of the others], the
        number [N] of each node's table, its row [N] there)."""
        last = len(self.linears)
        kinds = torch.bucketize(nodes, self.ends, right=True).clamp(max=last)
        places = [(kinds == k).nonzero().squeeze(1) for k in range(last + 1)]
        tables = [x] * last
        count = len(nodes) - len(places[last])
        if last and len(x) != count:
            raise ValueError(f"x has {len(x)} rows: {count} of the nodes have features")
        if last > 1:  # rows of x by type
            of = kinds[kinds < last]
            tables = [x[of == k, : f.in_features] for k, f in enumerate(self.linears)]
        if self.embedding is not None:  # by id, as in a coalesced gradient
            ids, order = (nodes[places[last]].long() - self.first).sort()
            places[last] = places[last][order]
            tables.append(self.embedding(ids))
        rows = torch.empty_like(kinds)
        for at in places:
            rows[at] = torch.arange(len(at), device=at.device)
        return tables, kinds, rows


class _Rows(torch.autograd.Function):
    """Rows ids [N] of a weight, zeros for negative ids. Its gradient is left in weight.rows, (ids, [N, D]), for
    run/adam.py: a CUDA graph can hold that, but no sparse tensor."""

    @staticmethod
    def forward(ctx, weight, ids):
        ctx.weight = weight
        ctx.ids = ids
        return weight.index_select(0, ids.clamp(min=0)) * (ids >= 0).unsqueeze(1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        ctx.weight.rows = ctx.ids, grad.contiguous()
        return None, None


def flags(kinds):
    """Declare the flags of layers by type."""
    return {
        "heads": dict(
            bases=kinds.fixed(
                kinds.COUNT_OR_0,
                0,
                f"{', '.join(kinds.layers_taking('bases'))}: mix the matrix of each type from N bases (default: 0, off)",
                needs=[kinds.layer_with("bases")],
            )
        )
    }
