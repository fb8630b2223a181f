"""Outputs: what traced calls return beside a loss, if that is not what the batch would have."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from lightning_dp.parallel.additive.findings import BEFORE, NOT_THE_BATCHS
from lightning_dp.parallel.additive.relations import related_at
from lightning_dp.parallel.additive.summaries import OF_ALL, summary_at
from lightning_dp.parallel.additive.terms import FORWARD
from lightning_dp.parallel.additive.traces import Result, Trace, Traces
from lightning_dp.parallel.batch import Shards, override_at, tree


def look_at_outputs(
    name: str,
    traces: Traces | None,
    shards: Shards,
    *,
    with_rows: bool,
) -> None:
    """Warns where what a step returns beside a loss is not joined to what the batch would have.

    Args:
        name: of the step.
        traces: of the replicas' calls; None of a step that was not traced.
        shards: what these have got.
        with_rows: whether what has rows of samples is looked at, too.
    """
    if traces is None:
        return
    own = traces.of(shards.active)
    if with_rows:
        has_told_of_related(name, own, shards.active_sizes, BEFORE)
    of_losses = {("loss",), ("num_items",)} | (set() if with_rows else {()})
    _look_at_numbers(name, own, shards, traces.told, of_losses)


def has_told_of_related(
    name: str, traces: Sequence[Trace], sizes: Sequence[int], advice: str
) -> bool:
    """Warns of outputs that are not of each sample by itself, as `related`; whether it has."""
    numbers = [[result.number for result in trace.results] for trace in traces]
    found = related_at(numbers, traces, sizes, with_gradient=True)
    if found is not None:
        warnings.warn(
            f"{name}: expected outputs that samples have by themselves, got {found}. "
            f"{NOT_THE_BATCHS} {advice}",
            stacklevel=2,
        )
    return found is not None


def _look_at_numbers(
    name: str,
    traces: Sequence[Trace],
    shards: Shards,
    told: set[tuple[str, tree.Path]],
    of_losses: set[tree.Path],
) -> None:
    """Warns of those that are no means or sums over samples, unless `gather_overrides` has them.

    Losses are looked at as losses.
    """
    overrides = shards.dims.overrides
    found: dict[str, list[str]] = {}
    for results in zip(*(trace.results for trace in traces), strict=False):
        path = results[0].path
        is_known = path[:1] in of_losses or (name, path) in told
        if is_known or override_at(path, overrides) or {own.path for own in results} != {path}:
            continue
        if what := _is_but(results, traces, shards.active_sizes):
            told.add((name, path))
            found.setdefault(what, []).append(tree.name(path, "output"))
    if found:
        got = "; ".join(f"{what} as {', '.join(own)}" for what, own in found.items())
        warnings.warn(
            f"{name}: expected numbers in its output that are means over samples, or whole numbers "
            f"that are sums, got {got}. So they are joined, and that is not what the batch has. "
            f"Say how in gather_overrides, such as {{'largest': 'list'}}, or use {FORWARD}",
            stacklevel=2,
        )


def _is_but(results: Sequence[Result], traces: Sequence[Trace], sizes: Sequence[int]) -> str:
    """What a number is, if it is not what it is joined as; empty where nothing tells."""
    degree, values = results[0].degree, [own.value for own in results]
    summary = summary_at([own.number for own in results], traces, sizes)
    if degree is None or summary is None:
        return "the number of samples" if values == [*sizes] else ""
    if degree and summary.is_same:  # which sums are by chance
        return f"{summary.name} over samples" if summary.name in OF_ALL else ""
    return summary.is_but(degree)
