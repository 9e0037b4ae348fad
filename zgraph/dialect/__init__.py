"""Operators of zgraph's graphs, with eager kernels; importing this package registers all of them."""

from zgraph.dialect import (
    compressed,
    copies,
    dependence,
    grouped_gathers,
    low_rank,
    markers,
    orthogonalize,
    sum_ranks,
    window_ops,
)

__all__ = [
    "compressed",
    "copies",
    "dependence",
    "grouped_gathers",
    "low_rank",
    "markers",
    "orthogonalize",
    "sum_ranks",
    "window_ops",
]
