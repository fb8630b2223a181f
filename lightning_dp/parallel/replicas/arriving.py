"""Arriving: a replica's call begins while its parameters are still on their way.

They come in the order in which a forward needs them. Whoever takes one out of its module, by
`self.weight`, by `parameters()` or in any other way, has the device wait for it; nobody waits for
what comes later. What the caller's code holds from before it need not take: a parameter that
anybody else holds has arrived when the call begins. Whether anybody does, counts of references say:
those of the parameter itself, and those of its memory, of which others may hold a view.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import ItemsView, Iterable, Iterator, Sequence, ValuesView
from itertools import chain
from operator import is_not
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_dp.parallel.links import Arrival, current_stream
from lightning_dp.parallel.torch_private import (
    before_compiling,
    buffer_table,
    child_table,
    parameter_table,
    tables_as_attributes,
    uses,
    uses_of_memory,
)

Table: TypeAlias = "dict[str, nn.Parameter | None]"

_IN_A_LIST = next(map(sys.getrefcount, [object()]))
"""What Python counts of an object that only a list holds, while it is asked for that count."""

_OURS = 1
"""What else holds a parameter of a replica, but for a list and the tables of modules: the twins."""


LEAST_BYTES = 2**16
"""That have to be on their way for each parameter. Of fewer a link of 26 GB/s takes 2.5 us, and to
let Python wait for a parameter, and put back its module's table, takes 2."""


def is_worth_it(size: int, parameters: int) -> bool:
    """Whether a call may better begin than wait for so many bytes, of a module of so many.

    Example:
        >>> is_worth_it(100 * 2**20, parameters=160), is_worth_it(2**20, parameters=600)
        (True, False)
    """
    return size >= LEAST_BYTES * parameters


class Arriving:
    """The parameters of one replica on an accelerator, some of which may be on their way."""

    def __init__(
        self,
        device: torch.device,
        parameters: Sequence[nn.Parameter],
        modules: Iterable[nn.Module],
    ) -> None:
        self._device, self._parameters = device, parameters
        self._modules = [module for module in modules if parameter_table(module)]
        held = chain.from_iterable(parameter_table(m).values() for m in self._modules)
        in_tables = Counter(map(id, held))
        self._known = [_IN_A_LIST + _OURS + in_tables[id(p)] for p in parameters]
        self.learn_memory()
        self._plain: list[tuple[nn.Module, Table]] = []  # the tables of modules, meanwhile
        self._places: dict[int, int] = {}  # of parameters that are on their way, by their ids
        self._events: list[torch.Event] = []
        self._waited: set[tuple[int, int]] = set()  # which streams, by their ids, for which places

    def learn_memory(self) -> None:
        """The parameters have new memory, which is nobody else's."""
        memory = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in self._parameters}
        self._memory = list(memory.values())
        self._uses_of_memory = list(map(uses_of_memory, self._memory))

    def begin(self, arrivals: Sequence[Arrival]) -> None:
        """From here on, who takes a parameter waits for its arrival.

        For those that others hold the current stream waits now.
        """
        self._waited, self._events = set(), [arrival.event for arrival in arrivals]
        order = [arrival.positions for arrival in arrivals]
        self._places = {id(self._parameters[i]): j for j, own in enumerate(order) for i in own}
        _under_way.add(self)
        held = self._held() if before_compiling(_end_all) else list(self._parameters)
        for tensor in held:
            self.wait_for(tensor)
        if len(held) < len(self._parameters):
            self._plain = [(module, parameter_table(module)) for module in self._modules]
            for module, table in self._plain:
                _set_table(module, _Table(table, self))

    def end(self) -> None:
        """The current streams have waited for all of them."""
        while self._plain:
            module, table = self._plain[-1]
            now = parameter_table(module)
            if len(now) != len(table) or any(map(is_not, dict.values(now), table.values())):
                changed = dict(dict.items(now))  # the call has bound others
                table.clear()
                table.update(changed)
            _set_table(module, table)
            self._plain.pop()
        self._places = {}
        _under_way.discard(self)

    def wait_for(self, tensor: Tensor | None) -> None:
        """The current stream goes on when a parameter is there."""
        place = self._places.get(id(tensor))
        if place is not None:
            stream = current_stream(self._device)
            key = stream.stream_id, place
            if key not in self._waited:
                stream.wait_event(self._events[place])
                self._waited.add(key)

    def wait_for_all(self) -> None:
        """The current stream goes on when all are there."""
        for tensor in self._parameters:
            self.wait_for(tensor)

    def _held(self) -> list[nn.Parameter]:
        """Those that others hold, or might."""
        if list(map(uses_of_memory, self._memory)) != self._uses_of_memory:
            return list(self._parameters)
        counts = list(map(sys.getrefcount, self._parameters))
        # Where C++ holds a tensor as well, a graph say, it holds its Python object.
        also = [count > 1 for count in map(uses, self._parameters)]
        each = zip(self._parameters, counts, self._known, also, strict=True)
        return [p for p, count, known, more in each if count != known + more]


class _Table(dict[str, Any]):
    """The parameters of a module: who takes one waits for it, and who looks at all, for all."""

    def __init__(self, table: Table, arriving: Arriving) -> None:
        super().__init__(table)
        self._arriving = arriving

    def __getitem__(self, name: str) -> Any:
        tensor = dict.__getitem__(self, name)
        self._arriving.wait_for(tensor)
        return tensor

    def __iter__(self) -> Iterator[str]:
        # Without it, `dict(table)` would read past `__getitem__`.
        return dict.__iter__(self)

    def get(self, name: str, default: Any = None) -> Any:
        tensor = dict.get(self, name, default)
        self._arriving.wait_for(tensor)
        return tensor

    def pop(self, name: str, *default: Any) -> Any:
        tensor = dict.pop(self, name, *default)
        self._arriving.wait_for(tensor)
        return tensor

    def values(self) -> Any:
        return ValuesView(self)

    def items(self) -> Any:
        return ItemsView(self)

    def copy(self) -> dict[str, Any]:
        return dict(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _set_table(module: nn.Module, table: Table) -> None:
    tables = tables_as_attributes(table, buffer_table(module), child_table(module))
    module.__dict__.update(tables)


def _end_all(*_: Any) -> None:
    """The compiler is not to see a table that waits, nor does its code look into one."""
    for arriving in [*_under_way]:
        arriving.wait_for_all()
        arriving.end()


_under_way: weakref.WeakSet[Arriving] = weakref.WeakSet()
