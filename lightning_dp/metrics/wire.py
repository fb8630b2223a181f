"""The wire: what replicas of one process have logged and measured, to be sent to the others.

Modules go as their numbers among all modules of the LightningModule, which are the same in every
process. An option that cannot be pickled, a function of `self.log` say, is taken from the
receiver's own call of the same name.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_dp.metrics.arguments import MetricCall, MetricValue
from lightning_dp.metrics.logs import LogCall
from lightning_dp.metrics.one_call import StepAttributes
from lightning_dp.parallel.scatter import tree

Call: TypeAlias = LogCall | MetricCall

_PLAIN = (bool, int, float, str, type(None), Tensor)


class Unsent:
    """Stands for an option that could not go: the receiver has the same."""


class _Numbered:
    """Stands for a module of the receiver's own: no dataclass, which would be a tree of its own."""

    def __init__(self, number: int) -> None:
        self.number = number


class Wire:
    """Packs calls, and unpacks those of other processes.

    Args:
        modules: all modules of the LightningModule.
        attributes: what steps bind on metrics and modules in them, by their ids.
        device: where logged tensors are to arrive.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        attributes: Mapping[int, StepAttributes],
        device: torch.device,
    ) -> None:
        self.modules, self._attributes, self._device = modules, attributes, device
        self._numbers = {id(module): n for n, module in enumerate(modules)}

    def pack(self, journals: Sequence[Sequence[Call]]) -> list[list[Any]]:
        """The calls of all replicas as plain values and tensors."""
        return [[tree.map_leaves(self._sent, self._row(call)) for call in c] for c in journals]

    def unpack(
        self, rows: Sequence[Sequence[Any]], own: Sequence[Sequence[Call]]
    ) -> list[list[Call]]:
        """The calls that another process has packed.

        Options that could not be sent are those of `own`, the calls of this process's replicas.
        """
        return [[self._call(tree.map_leaves(self._received, r), own) for r in c] for c in rows]

    def _sent(self, leaf: Any) -> Any:
        return _Numbered(self._numbers[id(leaf)]) if id(leaf) in self._numbers else leaf

    def _received(self, leaf: Any) -> Any:
        return self.modules[leaf.number] if isinstance(leaf, _Numbered) else leaf

    def _row(self, call: Call) -> tuple[Any, ...]:
        if isinstance(call, LogCall):
            options = {n: _sendable(v) for n, v in call.options.items()}
            return call.name, call.value, options, call.from_metric and tuple(call.from_metric)
        bound = [(self._numbers[id(there.root)], dict(values)) for there, values in call.bound]
        return self._numbers[id(call.metric)], call.method, call.args, call.kwargs, bound

    def _call(self, row: tuple[Any, ...], own: Sequence[Sequence[Call]]) -> Call:
        if len(row) == 4:
            name, value, options, source = row
            if any([isinstance(option, Unsent) for option in options.values()]):
                options = _with_own(name, options, own)
            if isinstance(value, Tensor):
                value = value.to(self._device)
            return LogCall(("log", name), name, value, options, source and MetricValue(*source))
        number, method, args, kwargs, values = row
        metric: Any = self.modules[number]
        bound = [(self._attributes[id(self.modules[n])], attributes) for n, attributes in values]
        return MetricCall(("metric", id(metric), method), metric, method, args, kwargs, bound)


def _sendable(option: Any) -> Any:
    if isinstance(option, _PLAIN):
        return option
    try:
        pickle.dumps(option)
    except Exception:  # a user's object may refuse by any error; the receiver has its own
        return Unsent()
    return option


def _with_own(
    name: str, options: Mapping[str, Any], own: Sequence[Sequence[Call]]
) -> dict[str, Any]:
    """With the receiver's own options in the place of those that could not go."""
    told = [
        call.options
        for calls in own
        for call in calls
        if isinstance(call, LogCall) and call.name == name
    ]
    result = dict(options)
    for option in [n for n, value in options.items() if isinstance(value, Unsent)]:
        having = [own_options for own_options in told if option in own_options]
        if not having:
            raise ValueError(
                f"self.log({name!r}): expected {option} in every process, got it from some; it "
                "cannot be sent to the others. Log the key in every process."
            )
        result[option] = having[0][option]
    return result
