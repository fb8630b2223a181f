"""Logged means: numbers that steps log and that are no means over samples, as traces show.

Logged is the mean of the replicas' numbers, weighted by their samples. That is the batch's number
only if each sample counts equally in it. Nothing else would say so.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from numbers import Number
from typing import TYPE_CHECKING, Any, TypeAlias

from lightning_dp.metrics.logs import LogCall
from lightning_dp.parallel.additive import summary_of
from lightning_dp.parallel.batch import Shards

if TYPE_CHECKING:
    from lightning_dp.metrics.journal import Journal

Logged: TypeAlias = tuple[LogCall, Any]
"""A call of `self.log`, and its value as it was given."""

_DEGREES = {"mean": 0, "sum": 1}
"""Of what is joined by these, in the samples of a shard."""


class LogLook:
    """A look at what a traced step logs; it warns of what is no mean, or no sum where they add up.

    Nothing is told where replicas do not make the same calls.

    Args:
        step: its name.
        journals: of all replicas.
        shards: what these have, and the traces of what they do with it.
        told: steps and keys that were told already; more of them come in.
    """

    def __init__(
        self, step: str, journals: Sequence[Journal], shards: Shards, told: set[tuple[str, str]]
    ) -> None:
        self._step, self._journals, self._shards, self._told = step, journals, shards, told

    def begin(self) -> None:
        """From now on the journals keep what is logged as it was given."""
        for journal in self._journals:
            journal.logged = []

    def end(self, *, tells: bool) -> None:
        """They keep nothing any more; what they kept is looked at."""
        logged = [self._journals[k].logged or [] for k in self._shards.active]
        for journal in self._journals:
            journal.logged = None
        if tells and len({tuple([call.key for call, _ in own]) for own in logged}) == 1:
            self._tell(logged)
        self._shards.traces.clear()  # a graph that reaches the module would keep it alive

    def _tell(self, logged: Sequence[Sequence[Logged]]) -> None:
        found: dict[str, list[str]] = {}
        for calls in zip(*logged, strict=True):
            name = calls[0][0].name
            is_new = (self._step, name) not in self._told
            if is_new and (what := _is_but(calls, self._shards)):
                found.setdefault(what, []).append(name)
        if not found:
            return
        self._told.update((self._step, name) for names in found.values() for name in names)
        told = [
            f"{what} as {', '.join(map(repr, dict.fromkeys(own)))}" for what, own in found.items()
        ]
        warnings.warn(
            f"{self._step}: expected numbers for self.log that are means over samples, got "
            f"{'; '.join(told)}. What the shards have of it is joined by reduce_fx, and that is "
            "not what the batch has. Log a metric object, or say by batch_size= over how many a "
            "mean is, or use DataParallelStrategy(mode='forward').",
            stacklevel=2,
        )


def _is_but(calls: Sequence[Logged], shards: Shards) -> str:
    """What a number is, if it is not what it is joined as; empty where nothing tells."""
    how, sizes = calls[0][0].options.get("reduce_fx", "mean"), shards.active_sizes
    degree = _DEGREES.get(getattr(how, "__name__", str(how)))
    own = shards.traces[0].of(shards.active)
    are_known = all([call.from_metric is not None for call, _ in calls])
    if degree is None or are_known or len(own) < len(calls) or _are_of_items(calls, sizes):
        return ""
    values = [value for _, value in calls]
    summary = summary_of(own, values, sizes)
    if summary is not None:
        return summary.is_but(degree)
    if not all([isinstance(value, Number) for value in values]):
        return ""
    if degree == 0:
        return "the number of samples" if values == sizes else ""
    return "what is the same in each shard" if len({*values, 0}) == 2 else ""


def _are_of_items(calls: Sequence[Logged], sizes: Sequence[int]) -> bool:
    """Whether a `batch_size` says that it is a mean over something else than samples."""
    told = [call.options.get("batch_size") for call, _ in calls]
    counts = [int(count) for count in told if count is not None]
    return len(set(counts)) > 1 and counts != [*sizes]
