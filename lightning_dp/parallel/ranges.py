"""Ranges: the stages of a step under their names, for profilers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any, TypeVar, cast

from torch.profiler import record_function

from lightning_dp.parallel.contexts import Contexts, Paired
from lightning_dp.parallel.torch_private import is_profiling

F = TypeVar("F", bound=Callable[..., Any])


class Ranges:
    """Says when a stage begins and ends: `lightning_dp.scatter`, `lightning_dp.apply` and so on.

    `torch.profiler` is told whenever it is on, and so is `profile`, if given: something that enters
    a range by its name. When nobody is, a range costs a microsecond, where `record_function` alone
    would cost five.
    """

    def __init__(self) -> None:
        self.profile: Callable[[str], AbstractContextManager[None]] | None = None
        self._open: set[str] = set()

    @property
    def is_heard(self) -> bool:
        """Whether anybody is told."""
        return self.profile is not None or is_profiling()

    def of(self, stage: str) -> AbstractContextManager[None]:
        """The range of a stage. Inside of itself, as a stage may call its own parts, it is none."""
        is_told = self.is_heard and stage not in self._open
        return Contexts(self._parts(stage)) if is_told else nullcontext()

    def _parts(self, stage: str) -> Iterator[AbstractContextManager[Any]]:
        yield Paired(partial(self._open.add, stage), partial(self._open.discard, stage))
        name = f"lightning_dp.{stage}"
        if is_profiling():
            yield record_function(name)
        if self.profile is not None:
            yield self.profile(name)


def stage(name: str) -> Callable[[F], F]:
    """Makes a method a stage: calls of it are ranges, those of the object's attribute `ranges`."""

    def decorate(method: F) -> F:
        @wraps(method)
        def inside(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            if self.ranges.profile is None and not is_profiling():
                return method(self, *args, **kwargs)
            with self.ranges.of(name):
                return method(self, *args, **kwargs)

        return cast(F, inside)

    return decorate
