"""Changes: whether a module is what it was at the last look.

Every step looks, and nearly always it is: so all is compared at once, without a Python call for
each part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_not, itemgetter
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_dp.parallel.torch_private import FIXED_NAMES, child_table, hook_tables, version

_REQUIRES_GRAD = attrgetter("requires_grad")


class ParameterState(NamedTuple):
    """What shows whether parameters are what they were."""

    pointers: list[int]
    versions: list[int]
    requires_grad: list[bool]

    @classmethod
    def of(cls, parameters: Sequence[nn.Parameter], *, versions: bool) -> ParameterState:
        """As these are now; versions are for replicas that own copies."""
        pointers, counts = map(Tensor.data_ptr, parameters), map(version, parameters)
        trained = list(map(_REQUIRES_GRAD, parameters))
        return cls(list(pointers), list(counts) if versions else [], trained)


class ModuleTables:
    """The tables of modules in which parameters, buffers, submodules and hooks stand."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        parameter_tables: Sequence[dict[str, Any]],
        buffer_tables: Sequence[dict[str, Any]],
    ) -> None:
        # Hooks by their numbers: every one has its own, for good.
        fixed: list[dict[str, Any]] = [*parameter_tables, *map(child_table, modules)]
        hooks: list[dict[int, Any]] = list(chain.from_iterable(map(hook_tables, modules)))
        tables: list[dict[Any, Any]] = [*fixed, *buffer_tables, *hooks]
        self._empty = [table for table in tables if not table]
        self._filled = [table for table in tables if table]
        self._lengths = list(map(len, self._filled))
        self._live: list[Iterable[Any]] = [
            *(table.values() for table in fixed if table),
            *(table.keys() for table in hooks if table),
        ]
        self._entries = list(chain.from_iterable(self._live))

    def have_changed(self) -> bool:
        """Whether a parameter, submodule, buffer name or hook came, went or was replaced."""
        return (
            any(self._empty)
            or list(map(len, self._filled)) != self._lengths
            or any(map(is_not, chain.from_iterable(self._live), self._entries))
        )


class AttributeVersions:
    """The attributes of modules that are neither parameters, buffers nor submodules.

    `versions` has a number for each module, which grows when one is bound anew, comes or goes. Not
    looked at are those that every replica of a module keeps for itself.
    """

    def __init__(self, modules: list[dict[str, Any]], own_names: Sequence[frozenset[str]]) -> None:
        self._now = modules
        self._fixed = [FIXED_NAMES | own for own in own_names]
        self.versions = [0] * len(modules)
        self._names: list[set[str]] = [set() for _ in modules]
        self._seen: list[tuple[Any, ...]] = [()] * len(modules)
        self._getters: list[Callable[[Any], tuple[Any, ...]]] = [tuple] * len(modules)
        self._learn_names()

    def look(self) -> list[int]:
        """Compares with the last look; the versions."""
        try:
            values = [get(now) for get, now in zip(self._getters, self._now, strict=True)]
        except KeyError:  # one went
            values = []
        # All at once first: nearly always nothing has changed.
        if not values or list(map(len, self._now)) != self._sizes:
            self._learn_names()
        elif any(map(is_not, chain.from_iterable(values), self._flat)):
            self._compare(values)
        return self.versions

    def _compare(self, values: list[tuple[Any, ...]]) -> None:
        for j, pair in enumerate(zip(values, self._seen, strict=True)):
            self.versions[j] += len(pair[0]) != len(pair[1]) or any(map(is_not, *pair))
        self._seen = values
        self._flat = list(chain.from_iterable(values))

    def _learn_names(self) -> None:
        self._sizes = list(map(len, self._now))
        # itemgetter returns a tuple, as of three names at least: `training` and tables of hooks.
        for j, now in enumerate(self._now):
            names = now.keys() - self._fixed[j]
            if names != self._names[j]:
                self._names[j] = names
                self._getters[j] = itemgetter(*names)
                self._seen[j] = ()
        self._compare([get(now) for get, now in zip(self._getters, self._now, strict=True)])


class Contents:
    """The items of containers, as they were."""

    def __init__(self, live: list[Collection[Any]]) -> None:
        self._live = live
        self._lengths = list(map(len, live))
        self._filled = list(filter(len, live))  # the others have no items to look at
        self._items = list(chain.from_iterable(self._filled))

    def differ(self) -> bool:
        """Whether they are others now."""
        items = chain.from_iterable(self._filled)
        return list(map(len, self._live)) != self._lengths or any(map(is_not, items, self._items))
