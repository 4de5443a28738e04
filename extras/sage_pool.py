"""GraphSAGE's max-pooling aggregator, a layer of --model sage-pool. Copy this file, extras/__init__.py and model.py."""

from model import Conv, Linear, relu_dropout


class SAGEPoolConv(Conv, name="sage-pool", after="sage"):
    """GraphSAGE layer, max-pooling aggregator (arXiv 1706.02216): W_self h_v + W_neigh max(relu(W_pool h_u + b))."""

    norm = "layer"
    padded = True

    def __init__(self, in_dim, out_dim):
        super().__init__()
        self.out_dim = out_dim
        self.pool_linear = Linear(in_dim, in_dim)
        self.self_linear = Linear(in_dim, out_dim)
        self.neigh_linear = Linear(in_dim, out_dim, bias=False)

    def message(self, h, degree=None):
        return self.pool_linear(h)

    def combine(self, near):
        """See `Conv`. ReLU and maximum commute: there are fewer destinations than sources."""
        pooled = relu_dropout(near.max(), 0)
        return self.self_linear(near.x_dst) + self.neigh_linear(pooled)
