"""Ranges: the stages of a step under their names, for profilers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from torch.profiler import record_function

from lightning_dp.parallel.torch_private import is_profiling

P = ParamSpec("P")
R = TypeVar("R")


class Ranges:
    """Says when a stage begins and ends: `lightning_dp.scatter`, `lightning_dp.apply` and so on.

    `torch.profiler` is told whenever it is on. When it is off a range costs a microsecond, where
    `record_function` alone would cost five.

    Attributes:
        profile: told too, if given: something that enters a range by its name.
    """

    def __init__(self) -> None:
        self.profile: Callable[[str], AbstractContextManager[None]] | None = None
        self._open: set[str] = set()

    def of(self, stage: str) -> AbstractContextManager[None]:
        """The range of a stage. Inside of itself, as a stage may call its own parts, it is none."""
        told = is_profiling()
        if stage in self._open or not (told or self.profile):
            return contextlib.nullcontext()
        return self._entered(stage, told)

    @contextlib.contextmanager
    def _entered(self, stage: str, told: bool) -> Iterator[None]:
        name = f"lightning_dp.{stage}"
        self._open.add(stage)
        try:
            with ExitStack() as stack:
                if told:
                    stack.enter_context(record_function(name))
                if self.profile is not None:
                    stack.enter_context(self.profile(name))
                yield
        finally:
            self._open.discard(stage)


class HasRanges(Protocol):
    """Whatever has stages."""

    ranges: Ranges


E = TypeVar("E", bound=HasRanges)


def stage(
    name: str,
) -> Callable[[Callable[Concatenate[E, P], R]], Callable[Concatenate[E, P], R]]:
    """Makes a method a stage: calls of it are ranges."""

    def decorate(method: Callable[Concatenate[E, P], R]) -> Callable[Concatenate[E, P], R]:
        @wraps(method)
        def inside(self: E, /, *args: P.args, **kwargs: P.kwargs) -> R:
            with self.ranges.of(name):
                return method(self, *args, **kwargs)

        return inside

    return decorate
