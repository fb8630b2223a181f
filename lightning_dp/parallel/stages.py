"""The four stages of `torch.nn.DataParallel`, with its arguments, on the engine of forward mode.

They are for subclasses of `DataParallel` that replace some of them, or call them themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lightning_dp.parallel.forward import ForwardParallel, SpreadCall
from lightning_dp.parallel.functional import parallel_apply, replicate
from lightning_dp.parallel.gather import own_sizes
from lightning_dp.parallel.scatter import Shards, cut_for, infer_for, to_device
from lightning_dp.parallel.split import Sizes, even

STAGES = ("scatter", "replicate", "parallel_apply", "gather")


def replaces_stages(wrapper: nn.Module, base: type[nn.Module]) -> bool:
    """Whether a wrapper has stages of its own, by its class or by itself."""
    own, cls = vars(wrapper), type(wrapper)
    return any(name in own or getattr(cls, name) is not getattr(base, name) for name in STAGES)


class Stages:
    """What `DataParallel` does in each stage unless a subclass says otherwise.

    Arguments of calls come in two sequences, positional and named ones, with an entry per device.
    Of devices without samples those at the end have no entry, the others have None.
    """

    def __init__(self, engine: ForwardParallel, dim: int) -> None:
        self._engine = engine
        self._dim = dim

    def scatter(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], devices: list[torch.device]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Cuts the arguments of a call; by the engine's split, where they are for all devices."""
        engine, arguments = self._engine, _arguments(args, kwargs)
        if devices == engine.devices:
            plan = engine.plan(arguments, training=engine.module.training)
            parts = engine.scatter(arguments, plan=plan).parts
        else:
            parts = self._even_parts(arguments, devices)
        while parts and parts[-1] is None:
            parts.pop()
        inputs = (p if p is None else tuple(map(p.get, range(len(args)))) for p in parts)
        named = (p if p is None else {key: p[key] for key in kwargs} for p in parts)
        return tuple(inputs), tuple(named)

    def replicate(self, module: nn.Module, devices: list[torch.device]) -> list[nn.Module]:
        """The engine's replicas, up to date; new ones of other modules, or on other devices."""
        engine, n = self._engine, len(devices)
        if module is not engine.module or devices != engine.devices[:n]:
            return replicate(module, devices, detach=not torch.is_grad_enabled())
        shards = self._padded((1,) * n, [None] * n)  # so many work; with what, is not known yet
        call = engine.spread_call()
        replicas = engine.replicate(call, shards)[:n]
        call.begin(shards)  # the calls may be made by anybody
        return replicas

    def parallel_apply(
        self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Sequence[Any]
    ) -> list[Any]:
        """Calls each replica with its arguments; None where there are none."""
        engine = self._engine
        shards = list(_shards(inputs, kwargs))
        if list(replicas) != engine.replicas.modules[: len(replicas)]:
            args = [shard and shard[0] for shard in shards]
            return parallel_apply(replicas, args, [shard and shard[1] for shard in shards])
        sizes = self.sizes(inputs, kwargs) or tuple(int(shard is not None) for shard in shards)
        whole = self._padded(sizes, shards)
        outputs = iter(engine.apply(_WholeCall(engine), replicas, whole))
        return [next(outputs) if size else None for size in sizes]

    def sizes(self, inputs: Sequence[Any], kwargs: Sequence[Any]) -> Sizes:
        """The samples of each shard, by what is in it; () unless all have a known number."""
        parts = [shard and _arguments(*shard) for shard in _shards(inputs, kwargs)]
        return own_sizes(parts, self._dim)

    def _even_parts(self, arguments: Any, devices: list[torch.device]) -> list[Any]:
        module = self._engine.module
        inferred = infer_for(module, arguments, self._dim, columns=True)
        if not inferred.size:
            return [to_device(arguments, devices[0])]
        sizes = even(inferred.size, len(devices))
        parts = cut_for(module, arguments, inferred, sizes, self._dim)
        return [part and to_device(part, d) for part, d in zip(parts, devices, strict=True)]

    def _padded(self, sizes: Sizes, parts: list[Any]) -> Shards:
        idle = len(self._engine.devices) - len(sizes)
        return Shards((*sizes, *[0] * idle), [*parts, *[None] * idle])


class _WholeCall(SpreadCall):
    """Calls the replicas themselves, hooks and all, each with its own arguments."""

    gathers = False

    def __init__(self, engine: ForwardParallel) -> None:
        super().__init__(engine, "", 0, training=engine.is_training)

    def begin(self, shards: Shards) -> None:
        """The replicas are in the root's graph since they were made."""

    def on_replica(self, module: nn.Module, shard: Any) -> Any:
        """The replica's call."""
        args, kwargs = shard
        return module(*args, **kwargs)


def _arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int | str, Any]:
    """All arguments of a call, as one batch."""
    arguments: dict[int | str, Any] = dict(enumerate(args))
    arguments.update(kwargs.items())
    return arguments


def _shards(
    inputs: Sequence[Any], kwargs: Sequence[Any] | None
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]] | None]:
    """Each device's arguments: a single one may come without a tuple, names may all be left out."""
    for own, named in zip(inputs, kwargs or [None] * len(inputs), strict=True):
        if own is None:
            yield None
        else:
            yield tuple(own) if isinstance(own, tuple | list) else (own,), dict(named or {})
