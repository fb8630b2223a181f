"""The call that is checked, and how it runs: alone or split, without a trace.

[Note: alone and split]
Both are the same call of an engine of the check's own, from the same state: *alone*, the root gets
all samples of the small batch and the other replicas none; *split*, each replica gets its shard.
Nothing else differs, so whatever comes out differently is the split's doing. Each run begins with
dropout off and the same seeds on every replica, and puts everything back.
"""

from __future__ import annotations

import copy
import io
import logging
import pickle
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextlib import redirect_stderr as stderr_to
from contextlib import redirect_stdout as stdout_to
from contextvars import ContextVar
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from lightning_dp.first_step.report import LOSS, Key, Values
from lightning_dp.first_step.snapshot import Snapshot, copy_to_cpu
from lightning_dp.parallel.apply import is_synced
from lightning_dp.parallel.engine import Engine, ReplicaCall
from lightning_dp.parallel.scatter import tree
from lightning_dp.parallel.split import Planner, Sizes
from lightning_dp.parallel.torch_private import TorchDispatchMode

is_checking: ContextVar[bool] = ContextVar("is_checking", default=False)
"""Whether this code runs for a check: calls of a wrapper inside are not checked themselves."""


@contextmanager
def muted() -> Iterator[None]:
    """Drops output, warnings and log lines meanwhile: the real call shows them again."""
    token = is_checking.set(True)
    level, nowhere = logging.root.manager.disable, io.StringIO()
    logging.disable()
    try:
        with warnings.catch_warnings(), stdout_to(nowhere), stderr_to(nowhere):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        is_checking.reset(token)


class Call:
    """The call that is checked, of a module with a small batch, and the program around it.

    Args:
        engine: an engine of the check's own, whose replicas run one after another.
        sizes: how many of the batch's samples each device gets.
        batch: the small batch.
        make: makes the call, as the engine takes it.
        parse: takes an output apart: the loss whose gradients are compared, if there is one, and
            the leaves of the rest.
        reports_loss: whether the loss is the user's own, and not made by the check.
        compares_attributes: whether attributes that the forward binds on modules are compared.
        context: surrounds the forward.
        recording: records what a call reports elsewhere than in its output.
        others: optimizers and schedulers outside of the module, which are put back as well.

    Attributes:
        norms: layers that keep statistics of the batch, by name.
        python_draws: the state of Python's and NumPy's generators after the latest run's call.
    """

    def __init__(
        self,
        engine: Engine,
        sizes: Sizes,
        batch: Any,
        *,
        make: Callable[[], ReplicaCall],
        parse: Callable[[Any], tuple[Tensor | None, Iterable[tuple[tree.Path, Any]]]],
        reports_loss: bool = True,
        compares_attributes: bool = False,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        recording: Callable[[], AbstractContextManager[Values]] = lambda: nullcontext({}),
        others: Mapping[str, Any] | None = None,
    ) -> None:
        self.module, self.engine, self.sizes, self._batch = engine.module, engine, sizes, batch
        self._make, self._parse, self._context, self._recording = make, parse, context, recording
        self.reports_loss, self._compares_attributes = reports_loss, compares_attributes
        self.active = [k for k, size in enumerate(sizes) if size]
        layers: Iterable[tuple[str, Any]] = self.module.named_modules()
        trained = [(name, layer) for name, layer in layers if layer.training]
        norms = [item for item in trained if getattr(item[1], "track_running_stats", False)]
        self.norms = {name: layer for name, layer in norms if not is_synced(layer)}
        self.draws, self.python_draws = ConstantDraws(), b""
        devices = [*engine.devices, engine.output_device]
        self._snapshot = Snapshot(self.module, devices, others or {})

    def end(self) -> None:
        """Puts everything back as it was, and closes the engine."""
        try:
            self._snapshot.end()
        finally:
            self.engine.close()

    def run(
        self,
        *,
        split: bool = False,
        shard: int | None = None,
        seed: int = 0,
        perturbed: tuple[float, int] | None = None,
        norms_off: bool = False,
        constant_draws: bool = False,
    ) -> Values:
        """Makes the call and its backward, and puts everything back.

        Args:
            split: over the devices; else on the root alone.
            shard: which shard the root gets alone; None for the whole small batch.
            seed: of the random generators.
            perturbed: rounding errors by which parameters are moved: their size, and a seed.
            norms_off: batch norm uses its running statistics.
            constant_draws: see `ConstantDraws`.
        """
        engine, snapshot, draws, sizes = self.engine, self._snapshot, self.draws, self.sizes

        def begin_draws() -> None:
            snapshot.reseed(seed)
            draws.count = 0

        idle = [0] * (len(sizes) - 1)
        engine.planner = Planner(len(sizes), lambda n: sizes if split else (n, *idle))
        engine.meter.is_watched = False  # the user's split learns from real steps alone
        engine.before_replica = begin_draws
        try:
            begin_draws()
            if perturbed:
                snapshot.perturb(*perturbed)
            for layer in cast(Iterable[Any], self.module.modules()):
                if "Dropout" in type(layer).__name__:
                    layer.training = False
                elif isinstance(getattr(layer, "dropout", None), float):  # of attention, say
                    layer.dropout = 0.0
            for layer in self.norms.values() if norms_off else ():
                layer.training = False
            with draws if constant_draws else nullcontext(), self._recording() as values:
                batch, call = tree.map_leaves(copied, self._batch), self._make()
                if shard is not None:
                    batch = engine.cut(batch, sizes)[shard]
                engine.resync()
                with self._context():
                    output = engine.step(call, batch)
                self.python_draws = pickle.dumps((random.getstate(), np.random.get_state()))
                loss, rest = self._parse(output)
                # `ModuleState` warns of what a forward in a Trainer binds, not of its backward's.
                named = [] if self._compares_attributes else snapshot.bound()
                if loss is not None and loss.requires_grad:
                    loss.backward()
            return {**values, **self._values(loss, rest, snapshot.changes(named))}
        finally:
            snapshot.restore()

    def _values(
        self, loss: Tensor | None, rest: Iterable[tuple[tree.Path, Any]], changes: Mapping[Any, Any]
    ) -> Values:
        """Loss, outputs, gradients, and what the call has changed on the module."""
        values: Values = {}
        if loss is not None and self.reports_loss:
            values[LOSS] = float(loss.detach())
        for path, leaf in rest:
            values[Key("output", tree.name(path, ""))] = copy_to_cpu(leaf)
        norms = tuple(f"{name}." if name else "" for name in self.norms)
        for key, value in changes.items():
            if not (key[0] == "buffer" and key[1].startswith(norms)):
                values[Key(*key)] = value
        for name, parameter in self.module.named_parameters() if loss is not None else ():
            gradient = parameter.grad
            if parameter.requires_grad and not parameter.is_inference():  # no one trains those
                dense = None if gradient is None else copy_to_cpu(gradient).to_dense()
                values[Key("gradient", name)] = dense
        return values


def copied(leaf: Any) -> Any:
    """A copy of a batch's leaf that shares no memory with it; it may still require gradients."""
    if isinstance(leaf, Tensor):
        return tree.like(leaf, leaf.detach().clone()).requires_grad_(leaf.requires_grad)
    return copy.deepcopy(leaf)


class ConstantDraws(TorchDispatchMode):
    """Has the k-th random operation of a replica give one number, which depends on k alone.

    [Note: chance]
    A step that adds noise to each sample draws n numbers for n samples: a shard cannot draw those
    of the whole batch. With constant draws both compute the same, and what still differs is not
    chance. Truth values are 1, since 0 would hide all that samples contribute. `randperm` returns
    n-1 ... 0: a step that mixes samples mixes other pairs in a shard than in the whole batch.
    What stays random all the same (Python's and NumPy's numbers, a fused kernel's dropout) is
    compared with how much the call on the root alone differs from seed to seed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.names: dict[str, None] = {}  # of the random operations that ran
        self.count = 0  # of those in this replica
        self.dtypes: set[torch.dtype] = set()  # in which floating point numbers were computed
        self.uncontrolled = False  # one of them stayed random

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs one operation."""
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            name = str(func.overloadpacket).removeprefix("aten.")
            self.names[name] = None
            self.count += 1
            if name == "randperm":
                result.copy_(result.sort(descending=True).values)
            elif name == "native_dropout" and args[1] < 1:  # of accelerators
                result[0].copy_(args[0] / (1 - args[1]))
            elif isinstance(result, Tensor) and not name.startswith("rrelu"):
                spread = (self.count * 0.618) % 0.8 + 0.1
                number = 1 if name.startswith("bernoulli") else spread
                result.fill_(number if result.is_floating_point() else int(number))
            else:
                self.uncontrolled = True
        if isinstance(result, Tensor) and result.is_floating_point():
            self.dtypes.add(result.dtype)
        return result
