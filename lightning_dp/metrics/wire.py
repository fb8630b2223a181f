"""The wire: what replicas of one process have said, as bytes for the others.

Modules go as their numbers among all modules of the LightningModule, which are the same in every
process, tensors as their bytes. What cannot go, a function as an option of `self.log` say, is taken
from the receiver's own call of the same name.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_dp.metrics.arguments import MetricCall, MetricValue
from lightning_dp.metrics.logs import LogCall
from lightning_dp.metrics.one_call import StepAttributes
from lightning_dp.parallel.batch import tree
from lightning_dp.parallel.errors import described
from lightning_dp.parallel.links import to_device_coalesced

Call: TypeAlias = LogCall | MetricCall

_PLAIN = (bool, int, float, str, type(None), Tensor)
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_OF_NUMPY = (torch.float16, torch.float32, torch.float64)
_CPU = torch.device("cpu")


class Unsent:
    """Stands for an option that could not go: the receiver has the same."""


class UnsentCalls:
    """Stands for all calls where one could not go, with the reason."""

    def __init__(self, text: str) -> None:
        self.text = text


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

    def pack(self, header: Any, journals: Sequence[Sequence[Call]]) -> bytes | UnsentCalls:
        """A header and the calls of all replicas."""
        journals = _on_host(journals)
        rows = [[self._row(call) for call in calls] for calls in journals]
        try:
            return self._pickled((header, rows))
        except Exception:  # a user's object may refuse by any error; which one, is told to all
            return UnsentCalls(self._what_fails(journals))

    def unpack(self, packed: bytes, own: Sequence[Sequence[Call]]) -> tuple[Any, list[list[Call]]]:
        """The header and the calls that another process has packed.

        Options that could not go are those of `own`, the calls of this process's replicas.
        """
        header, rows = _Unpickler(packed, self.modules).load()
        return header, [[self._call(row, own) for row in calls] for calls in rows]

    def _row(self, call: Call) -> tuple[Any, ...]:
        if isinstance(call, LogCall):
            options = {n: _sendable(v) for n, v in call.options.items()}
            return call.name, call.value, options, call.from_metric and tuple(call.from_metric)
        bound = [(self._numbers[id(there.root)], values) for there, values in call.bound]
        metric = self._numbers[id(call.metric)]
        return metric, call.method, call.args, call.kwargs, bound

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

    def _pickled(self, value: Any) -> bytes:
        file = io.BytesIO()
        _Pickler(file, self._numbers).dump(value)
        return file.getvalue()

    def _what_fails(self, journals: Sequence[Sequence[Call]]) -> str:
        for call in [call for calls in journals for call in calls]:
            try:
                self._pickled(self._row(call))
            except Exception as error:  # a user's object may refuse by any error
                if isinstance(call, LogCall):
                    what = f"self.log({call.name!r}, ...)"
                else:
                    what = f"{call.method} of a metric ({type(call.metric).__qualname__})"
                return f"{what}: {described(error)}"
        raise RuntimeError("Expected one call that cannot be pickled, got none.")


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, numbers: Mapping[int, int]) -> None:
        super().__init__(file, protocol=5)
        self._numbers = numbers

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            is_plain = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided
            return _parts(value) if is_plain and not value.is_quantized else NotImplemented
        if isinstance(value, nn.Module) and id(value) in self._numbers:
            return _module, (self._numbers[id(value)],)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, packed: bytes, modules: Sequence[nn.Module]) -> None:
        super().__init__(io.BytesIO(packed))
        self._modules = modules

    def find_class(self, module: str, name: str) -> Any:
        if name == _module.__name__ and module == __name__:
            return self._modules.__getitem__
        return super().find_class(module, name)


def _module(number: int) -> nn.Module:
    """Stands on the wire for a module of the receiver's own."""
    raise RuntimeError(f"Expected module {number} to be looked up by who receives it.")


def _parts(tensor: Tensor) -> Any:
    """A function and what it makes a tensor of again: to pickle the tensor itself is slow."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.dim() == 0 and not tensor.is_complex():
        return _number, (tensor.item(), dtype)
    values = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if values.dtype.is_floating_point and values.dtype not in _OF_NUMPY:
        values = values.view(torch.int16 if values.dtype.itemsize == 2 else torch.uint8)
    return _rows, (values.numpy(), dtype)


def _number(value: float, dtype: str) -> Tensor:
    return torch.tensor(value, dtype=_DTYPES[f"torch.{dtype}"], device=_CPU)


def _rows(values: Any, dtype: str) -> Tensor:
    return torch.from_numpy(values).view(_DTYPES[f"torch.{dtype}"])


def _on_host(journals: Sequence[Sequence[Call]]) -> list[list[Call]]:
    """Tensors on other devices come in one copy from each."""
    found: list[Tensor] = []

    def look(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.device.type != "cpu":
            found.append(leaf.detach())
        return leaf

    for call in [call for calls in journals for call in calls]:
        value = call.value if isinstance(call, LogCall) else None
        if not isinstance(value, Tensor) or value.device.type != "cpu":
            tree.map_leaves(look, _values(call))
    if not found:
        return [list(calls) for calls in journals]
    # By place: two leaves may be one tensor.
    there = iter(to_device_coalesced(found, _CPU))

    def take(leaf: Any) -> Any:
        is_away = isinstance(leaf, Tensor) and leaf.device.type != "cpu"
        return next(there) if is_away else leaf

    return [
        [_with_values(call, tree.map_leaves(take, _values(call))) for call in calls]
        for calls in journals
    ]


def _values(call: Call) -> Any:
    return call.value if isinstance(call, LogCall) else (call.args, call.kwargs)


def _with_values(call: Call, values: Any) -> Call:
    if isinstance(call, LogCall):
        return call._replace(value=values)
    args, kwargs = values
    return call._replace(args=args, kwargs=kwargs)


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
