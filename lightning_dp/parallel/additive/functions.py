"""Functions: what torch's functions make of samples, by their names."""

from __future__ import annotations

STATISTICS = {
    *("amax", "amin", "aminmax", "bincount", "corrcoef", "count_nonzero", "cov"),
    *("dot", "einsum", "histc", "kthvalue", "linalg_matrix_norm", "linalg_norm"),
    *("linalg_vector_norm", "logsumexp", "matmul", "__matmul__", "max", "mean", "median", "min"),
    *("mm", "mode", "mv", "nanmean", "nanmedian", "nanquantile", "nansum", "norm", "prod"),
    *("quantile", "std", "std_mean", "sum", "tensordot", "unique", "var", "var_mean"),
}
"""What may take the dimension of samples away, and depends on all of them."""

AT_PLACES_OF = {
    *("index_add", "index_put", "index_reduce", "scatter_add", "scatter_reduce"),
    *("index_add_", "index_put_", "index_reduce_", "scatter_add_", "scatter_reduce_"),
}
"""What puts samples together by their classes, in so many places as there are of these."""

ONE_OF_MANY = {"__getitem__", "select"}
"""What may take the dimension of samples away, and is one of them."""

PLACES = {"arange", "linspace", "logspace"}
"""What makes numbers of places, along a dimension of whatever length."""

FROM_HOST = {"as_tensor", "asarray", "new_tensor", "scalar_tensor", "tensor"}
"""What makes tensors of Python's numbers, which may have been computed from the shard."""

READS = {"__float__", "__index__", "__int__", "item", "numpy", "tolist"}
"""What gives the host values."""

KEPT = STATISTICS | AT_PLACES_OF | ONE_OF_MANY | FROM_HOST
"""What gives values that are kept, to be compared between shards."""
