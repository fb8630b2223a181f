"""Traces: which functions of torch's a call has used on its shard, and on what came of that."""

from __future__ import annotations

import pickle
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_dp.parallel.additive.along import MOVES, dims_along
from lightning_dp.parallel.additive.functions import FROM_HOST, KEPT, PLACES, READS
from lightning_dp.parallel.additive.layers import Lengths, mixed_lengths
from lightning_dp.parallel.additive.reductions import Reduction, reduction_of
from lightning_dp.parallel.batch import tree
from lightning_dp.parallel.workers import current_participant

_MOST_KEPT = 2**14
"""Elements of a statistic that is kept, to be compared between shards."""

NO_NUMBER = -1

_T = TypeVar("_T")


class Given(NamedTuple):
    """A tensor that a call returned, or wrote to; a value if it has no gradient and is small."""

    number: int
    shape: tuple[int, ...] = ()
    is_floating: bool = False
    has_gradient: bool = False
    value: Tensor | None = None


class Call(NamedTuple):
    """A call of a function: the numbers of the tensors that it took, and what it gave.

    Elements of the first one depend on each other `along` some dimensions, see `dims_along`; a
    layer has `mixed` what lies along some lengths. Python numbers were taken, too. A loss has its
    `reduction`.
    """

    name: str
    takes: tuple[int, ...]
    gives: tuple[Given, ...]
    along: tuple[int, ...] = ()
    mixed: Lengths = ()
    numbers: tuple[float, ...] = ()
    reduction: Reduction | None = None

    @property
    def floats(self) -> tuple[float, ...]:
        """Python's numbers that may be fractions."""
        return tuple([number for number in self.numbers if isinstance(number, float)])


class Result(NamedTuple):
    """What a call returned at a place of its output, as a number of the trace.

    Its `degree` says how shards' are joined: 0 of a mean over samples, 1 of a sum, else None. A
    float of Python's has its `value`.
    """

    path: tree.Path
    number: int
    degree: int | None
    value: float | None = None


class Trace(TorchFunctionMode):
    """While it lasts, notes what the calling thread computes from a shard.

    That has numbers: first the tensors of the shard, in order. What is computed from nothing that
    has a number is not noted, unless the host's values are made a tensor of fractions, or places
    are numbered along a dimension that is as long as one of the shard; nor is what parameters are
    made of. Calls go on as they are; what torch does inside of them is not noted,
    and a compiled function is passed over.

    Example:
        >>> shard = torch.ones(3, 2)
        >>> with Trace(shard) as trace:
        ...     loss = (shard - shard.mean(0)).square().mean()
        >>> [call.name for call in trace.calls], trace.number_of(loss)
        (['mean', 'sub', 'square', 'mean'], 4)

    Attributes:
        calls: what was noted.
        shard: the tensors of the shard.
        results: what the call returned, if that was noted.
        decisions: numbers of what the host has asked whether it is true, and whether it was.
    """

    results: Sequence[Result] = ()

    def __init__(self, shard: Any) -> None:
        super().__init__()
        self._replica = _replica_here()
        self.calls: list[Call] = []
        self.decisions: list[tuple[int, bool]] = []
        self._known: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._orders: dict[int, weakref.ref[Tensor]] = {}  # random ones
        self._count = 0
        self._items: dict[int, tuple[Any, int]] = {}  # Python's numbers, by ids, and their tensors'
        self._has_read = self._has_read_others = False
        self._generators = _generators()
        tensors = tensors_of(shard)
        self.shard = [self._given(tensor, keeps=False) for tensor in tensors]
        self._lengths = {tensor.shape[0] for tensor in tensors if is_row(tensor)}

    def note(self, output: Any) -> None:
        """Notes what the call returns, while it is where it was computed."""
        self.results = [
            Result(path, self.number_of(leaf), _degree(leaf), leaf if type(leaf) is float else None)
            for path, leaf in tree.places(output)
        ]

    def number_of(self, value: Any) -> int:
        """The number of a tensor, or of that which became such by `item`, or `NO_NUMBER`."""
        if isinstance(value, Tensor):
            found = self._known.get(id(value))
            return found[1] if found is not None and found[0]() is value else NO_NUMBER
        return self._items.get(id(value), (value, NO_NUMBER))[1]

    def numbers_are_the_shards(self) -> bool:
        """Whether numbers of Python's that differ between shards were computed from these.

        They were if the host has read values that came of the shard and no others, and has drawn
        none since the trace began.
        """
        is_sure = self._has_read and not self._has_read_others
        return is_sure and _generators() == self._generators

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Notes a call; of what all replicas do together, which one of them hosts, none."""
        kwargs = kwargs or {}
        # What follows would become a part of what is compiled.
        if torch.compiler.is_compiling() or _replica_here() != self._replica:
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        takes = tuple([self.number_of(tensor) for tensor in _tensors((args, kwargs))])
        name = getattr(func, "__name__", "")
        written = args[0] if name == "__setitem__" else result
        if name == "randperm" or (name in MOVES and self._is_order(args[0])):
            self._orders[id(result)] = weakref.ref(result)
        if name == "__bool__":
            self.decisions.append((takes[0], result))
        if name in READS:
            self._note_read(takes)
            if isinstance(result, float | int):
                self._items[id(result)] = result, takes[0]
        is_from_host = name in FROM_HOST and result.is_floating_point()
        are_places = name in PLACES and result.shape[0] in self._lengths
        if is_from_host or are_places or max(takes, default=NO_NUMBER) > NO_NUMBER:
            own = [tensor for tensor in _tensors(written) if not isinstance(tensor, nn.Parameter)]
            given = [self._given(tensor, keeps=name in KEPT) for tensor in own]
            if given:
                along = dims_along(name, args, kwargs, result, self._is_order)
                mixed = mixed_lengths(name, args, kwargs)
                numbers = () if is_from_host else tuple(_numbers((args, kwargs)))
                reduction = reduction_of(name, args, kwargs)
                call = Call(name, takes, tuple(given), along, mixed, numbers, reduction)
                self.calls.append(call)
        return result

    def _note_read(self, takes: Sequence[int]) -> None:
        if NO_NUMBER in takes:
            self._has_read_others = True  # which may have been drawn
        else:
            self._has_read = True

    def _is_order(self, argument: Any) -> bool:
        """Whether it is a random order."""
        known = self._orders.get(id(argument))
        return known is not None and known() is argument

    def _given(self, tensor: Tensor, *, keeps: bool) -> Given:
        number = self.number_of(tensor)
        if number == NO_NUMBER:
            number, self._count = self._count, self._count + 1
            self._known[id(tensor)] = weakref.ref(tensor), number
        if tensor.is_nested:
            return Given(number)
        keeps = keeps or tensor.numel() == 1
        keeps = keeps and not tensor.requires_grad and tensor.numel() <= _MOST_KEPT
        keeps = keeps and tensor.layout is torch.strided and not tensor.is_meta
        is_floating = tensor.is_floating_point() or tensor.is_complex()
        kinds = tuple(tensor.shape), is_floating, tensor.requires_grad
        # A copy: what takes it may be followed by what writes to it.
        return Given(number, *kinds, tensor.detach().clone() if keeps else None)


class Traces:
    """Those of the replicas of one step.

    Args:
        modules: the replicas.
        told: what was told of earlier outputs, by the step and the path; more comes in.
    """

    def __init__(
        self, modules: Sequence[nn.Module], told: set[tuple[str, tree.Path]] | None = None
    ) -> None:
        self._modules, self.told = modules, set() if told is None else told
        self._of: dict[int, Trace] = {}  # by the modules' ids

    def of_call(self, module: nn.Module, shard: Any, call: Callable[[], Any]) -> Any:
        """What a replica's call with its shard returns; it is traced."""
        self._of[id(module)] = trace = Trace(shard)
        with trace:
            output = call()
        trace.note(output)
        return output

    def of(self, replicas: Iterable[int]) -> list[Trace]:
        """Those of some replicas; without those that have none."""
        found = [self._of.get(id(self._modules[k])) for k in replicas]
        return [trace for trace in found if trace is not None]


def is_row(tensor: Tensor) -> bool:
    """Whether it has a first dimension, of one length."""
    return not tensor.is_nested and tensor.dim() > 0


def _replica_here() -> int | None:
    participant = current_participant()
    return None if participant is None else participant.task.replica


def _degree(leaf: Any) -> int | None:
    if isinstance(leaf, float):
        return 0
    if not isinstance(leaf, Tensor) or leaf.is_nested or leaf.dim() or leaf.dtype is torch.bool:
        return None
    return 0 if leaf.is_floating_point() or leaf.is_complex() else 1


def tensors_of(batch: Any) -> list[Tensor]:
    """Its tensors, also those in what is cut as a whole, as what is packed."""
    return [*_tensors(tree.leaves(batch))]


def _generators() -> tuple[Any, bytes]:
    """Where the generators stand that the host draws from."""
    numpy = sys.modules.get("numpy")
    numpys = None if numpy is None else numpy.random.get_state(legacy=False)
    return random.getstate(), pickle.dumps(numpys)  # its arrays cannot be compared at once


def _tensors(values: Any) -> Iterator[Tensor]:
    return _all_of(Tensor, values)


def _numbers(values: Any) -> Iterator[float]:
    return (number for number in _all_of((int, float), values) if not isinstance(number, bool))


def _all_of(kind: type[_T] | tuple[type[_T], ...], values: Any) -> Iterator[_T]:
    if isinstance(values, kind):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _all_of(kind, value)
    elif isinstance(values, dict):
        yield from _all_of(kind, tuple(values.values()))
