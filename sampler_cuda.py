"""The CUDA backend of sampler.py: the law as kernels, compiled at first use, and batches that wait for the GPU once.

Copy this file beside sampler.py, which hands it the law; it imports nothing from there. The passes of a hop are those
of sampler.py's first lines, each a kernel with one thread for a row or an edge. Relabelling in the order of the edges,
which one thread does on the CPU, is here done by all at once:

    claim    every edge to a node without a number writes its position to the node's place in a table [V]; the first
             edge wins (atomicMin), whatever the order of threads
    mark     the winners, whose prefix sum is the numbers of the new nodes
    place    winners write their node into src_nodes and its number into the table
    lookup   every edge reads its number
"""

import threading

import torch

# Sizes that only the device knows come as pointers, so the host launches for the upper bound and threads beyond the
# size leave. Nothing beyond atomicMin is used.
KERNELS = r"""
#define KERNEL extern "C" __global__ void
#define THREAD(n) i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; if (i >= (n)) return
#define HOP {indptr, indices, weights, rule, k, (u64)(unsigned)high << 32 | (unsigned)low}
#define GRAPH const i64 *indptr, const ID *indices, const double *weights, int rule, int k, int high, int low

KERNEL count_rows(GRAPH, const ID *v, const i64 *S, int bound, i64 *start, i64 *degree, i64 *count) {
  THREAD(bound);
  if (i >= *S) { count[i] = 0; return; }
  hop_t hop = HOP;
  start[i] = indptr[v[i]];
  degree[i] = indptr[v[i] + 1] - start[i];
  count[i] = count_row(&hop, start[i], degree[i]);
}
KERNEL pick_rows(GRAPH, const ID *v, const i64 *S, const i64 *start, const i64 *degree, const i64 *offsets, i64 *edges,
                 double *best) {
  THREAD(*S);
  hop_t hop = HOP;
  i64 at = offsets[i];
  pick_row(&hop, (u64)v[i], start[i], degree[i], offsets[i + 1] - at, edges + at, best + at);
}
// table [V]: a node's number; V where it has none; below 0 the claim of an edge, the first of which wins.
KERNEL claim(const ID *indices, const i64 *edges, const i64 *E, int bound, ID *local, ID *table, const i64 *V,
             int relabel) {
  THREAD(*E);
  ID node = local[i] = indices[edges[i]];
  if (relabel && (table[node] < 0 || table[node] == *V)) atomicMin(&table[node], (ID)(i - bound));
}
KERNEL mark(const ID *local, const i64 *E, int bound, const ID *table, int *win) {
  THREAD(bound);
  win[i] = i < *E && table[local[i]] == (ID)(i - bound);
}
KERNEL place(const ID *local, const i64 *E, const int *win, const i64 *rank, const i64 *N, ID *table, ID *src) {
  THREAD(*E);
  if (!win[i]) return;
  ID number = (ID)(*N + rank[i] - 1);
  src[number] = local[i];
  table[local[i]] = number;
}
KERNEL lookup(ID *local, const i64 *E, const ID *table) {
  THREAD(*E);
  local[i] = table[local[i]];
}
KERNEL forget(const ID *src, const i64 *N, ID *table, const i64 *V) {
  THREAD(*N);
  table[src[i]] = (ID)*V;
}
"""


def available():
    """Whether this torch can compile kernels: 2.10 and later."""
    return hasattr(torch.cuda, "_compile_kernel")


class Kernels:
    """The kernels for node ids of a dtype: kernels(name, bound, *arguments) runs `bound` threads.

    law: C that defines hop_t, count_row and pick_row.
    """

    def __init__(self, dtype, law):
        ids = "int" if dtype == torch.int32 else "long long"
        self.source = f"typedef {ids} ID;\ntypedef double WEIGHT;\n#define FN static __device__ inline\n{law}{KERNELS}"
        self.compiled = {}

    def __call__(self, name, bound, *arguments):
        if name not in self.compiled:
            self.compiled[name] = torch.cuda._compile_kernel(self.source, name)
        if bound:
            self.compiled[name](grid=(-(-bound // 256), 1, 1), block=(256, 1, 1), args=list(arguments))


class Backend:
    """A batch, hop after hop, in buffers of the largest size possible; the host waits once, for the sizes.

    Only fanout -1 and LABOR, whose edges have no such bound, make it wait once a hop.

    Args:
        task: a `_Task` of sampler.py.
        kernels: `Kernels`.
    """

    def __init__(self, task, kernels):
        self.task, self.kernels, self.num_nodes = task, kernels, task.indptr.numel() - 1
        self.weights = task.indptr if task.weights is None else task.weights.double()  # some pointer; none is read
        self.lock = threading.Lock()  # one batch at a time owns the table
        self.table = None  # [V] a node's number in the batch, V where it has none; made at first use

    def sample(self, seeds, hops):
        """Sample all hops of a batch, as sampler.py asks of a backend."""
        with self.lock:
            table, self.table = self.table, None  # comes back clean; after an exception the next batch makes another
            if table is None:
                table = self.task.indices.new_full((self.num_nodes,), self.num_nodes)
            V = torch.full((1,), self.num_nodes, device=seeds.device)
            N = torch.full_like(V, seeds.numel())
            numbers = torch.arange(seeds.numel(), dtype=seeds.dtype, device=seeds.device)
            table.scatter_(0, seeds.long(), numbers)
            sizes = [(table.index_select(0, seeds) != numbers).sum().view(1), N]
            src, made = seeds, []
            for hop in hops:
                made.append(self._hop(table, src, N, V, hop))
                *_, src, E, N = made[-1]
                sizes += [E, N]
            self.kernels("forget", src.numel(), src, N, table, V)
            repeated, S, *sizes = torch.cat(sizes).tolist()  # the one wait
            if repeated:
                return None
            self.table = table
        blocks = []
        for (offsets, local, edges, src, _, _), E, N in zip(made, sizes[::2], sizes[1::2]):
            edge_ids = edges[:E] if self.task.edge_ids else None
            blocks.append((offsets[: S + 1].to(seeds.dtype), local[:E], src[:N], edge_ids))
            S = N
        return blocks

    def _hop(self, table, src, N, V, hop):
        """One hop of destinations src [bound], of which the first N count; N, V and what is returned stay there."""
        bound, integers = src.numel(), {"dtype": torch.int64, "device": src.device}
        high, low, rule = hop.key >> 32, hop.key & 0xFFFFFFFF, self.task.rule_number
        graph = (self.task.indptr, self.task.indices, self.weights, rule, hop.k, high, low)  # GRAPH of the kernels
        start, degree, count = torch.empty(3, bound, **integers)
        self.kernels("count_rows", bound, *graph, src, N, bound, start, degree, count)
        offsets = torch.cat([count.new_zeros(1), count.cumsum(0)])
        E = offsets[-1:]
        most = int(E) if hop.k < 0 or self.task.rule == "labor" else bound * hop.k
        if most + bound >= 2**31:
            raise ValueError(f"a hop of up to {most} edges is too large for the GPU kernels; use smaller batches")
        edges = torch.empty(most, **integers)
        best = torch.empty(most if self.task.rule == "weighted" else 0, dtype=torch.float64, device=src.device)
        self.kernels("pick_rows", bound, *graph, src, N, start, degree, offsets, edges, best)
        local = src.new_empty(most)
        self.kernels("claim", most, self.task.indices, edges, E, most, local, table, V, int(hop.relabel))
        if hop.relabel and most:
            win = torch.empty(most, dtype=torch.int32, device=src.device)
            self.kernels("mark", most, local, E, most, table, win)
            rank = win.cumsum(0)
            src = torch.cat([src, src.new_empty(min(most, self.num_nodes))])
            self.kernels("place", most, local, E, win, rank, N, table, src)
            self.kernels("lookup", most, local, E, table)
            N = N + rank[-1:]
        return offsets, local, edges, src, E, N
