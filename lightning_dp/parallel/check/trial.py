"""One call on a small batch, run alone on the root and split over the devices, without a trace."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp.parallel.apply import is_synced
from lightning_dp.parallel.check.compare import Key, Outcome, distance, rounding
from lightning_dp.parallel.check.draws import OneNumberPerDraw
from lightning_dp.parallel.check.snapshot import Snapshot, on_host
from lightning_dp.parallel.engine import Engine
from lightning_dp.parallel.scatter import tree
from lightning_dp.parallel.split import Sizes
from lightning_dp.parallel.torch_private import BATCH_NORMS, backwards_go_to

_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)


class Program:
    """The program around a module: what a call may change or report beside its output.

    Attributes:
        containers: containers, optimizers and schedulers that a call may change.
    """

    containers: Sequence[Any] = ()

    def recording(self) -> AbstractContextManager[dict[Key, Any]]:
        """Records what the call reports elsewhere than in its output; filled when it ends."""
        return contextlib.nullcontext({})

    def compares(self, module: nn.Module) -> bool:
        """Whether `recording` holds the state of this module, so that no other has to compare."""
        return False


class Call(ABC):
    """What is checked: one call of a module with a small batch.

    Attributes:
        module: the user's module, on the root device.
        engine: an engine of the check's own, whose replicas run one after another.
        sizes: how many of the batch's samples each device gets.
        loss_scale: by which a loss is multiplied before its backward, so that small gradients of
            float16 do not become 0.
        program: the program around the module.
        reports_loss: whether the loss is the user's own, and not made by the check.
        counts_items: whether the call says over how many items its loss is a mean.
    """

    module: nn.Module
    engine: Engine
    sizes: Sizes
    loss_scale: float = 1.0
    reports_loss: bool = True
    counts_items: bool = False
    program = Program()

    @abstractmethod
    def alone(self, shard: int | None) -> Any:
        """Calls the module on the root with the whole small batch, or with one shard of it."""

    @abstractmethod
    def split(self) -> Any:
        """Calls it split over the devices; it was called alone before."""

    @abstractmethod
    def parse(self, output: Any) -> tuple[Tensor | None, Any]:
        """The loss whose gradients are compared, if there is one, and everything else."""

    def during_backward(self) -> AbstractContextManager[None]:
        """What surrounds a split call and its backward."""
        return contextlib.nullcontext()

    def transferred(self, shard: int | None) -> Any:
        """The small batch or a shard of it on the root, after the user's batch-transfer hooks.

        None if there are no such hooks.
        """
        return None


@dataclass(frozen=True)
class Conditions:
    """The conditions of one run of the call. Dropout layers are always switched off.

    Attributes:
        norms_off: batch norm uses its running statistics.
        one_number_per_draw: each random operation draws one number for all elements.
        seed: of the random generators.
        python_seed: of those of Python and NumPy, if different.
        shard: which shard a call alone gets; None for the whole small batch.
        perturbed: if not 0, parameters are moved by rounding errors that follow from this.
    """

    norms_off: bool = False
    one_number_per_draw: bool = False
    seed: int = 0
    python_seed: int | None = None
    shard: int | None = None
    perturbed: int = 0


class Trial:
    """Runs a call alone and split, each time from the same state.

    Attributes:
        active: the shards that have samples.
        eps: the relative rounding error of the call.
        norms: layers that keep statistics of the batch, which are a shard's on a replica, by name.
        parameters: the names of all parameters.
        draws: the random operations of the latest run.
        python_state: where random generators of Python and NumPy were after the latest call alone.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self.active = [k for k, size in enumerate(call.sizes) if size]
        known = {p.dtype for p in call.module.parameters() if p.is_floating_point()}
        self.eps = rounding(known or {torch.get_default_dtype()}, call.engine.devices[0].type)
        layers = list(call.module.named_modules())
        self.norms = {name: layer for name, layer in layers if _normalizes(layer)}
        self._dropouts = [layer for _, layer in layers if _drops(layer)]
        self.parameters = frozenset(name for name, _ in call.module.named_parameters())
        self.draws, self.python_state = OneNumberPerDraw(), b""
        devices = [*call.engine.devices, call.engine.output_device]
        containers, compares = call.program.containers, call.program.compares
        self._snapshot = Snapshot(call.module, devices, containers, compares)

    def alone(self, conditions: Conditions = Conditions()) -> Outcome:
        """The call on the root."""

        def call() -> Any:
            if conditions.perturbed:
                self._snapshot.perturb(self.eps, conditions.perturbed)
            return self.call.alone(conditions.shard)

        return self._run(call, conditions, contextlib.nullcontext())

    def split(self, conditions: Conditions = Conditions()) -> Outcome:
        """The call split over the devices."""
        engine, sizes = self.call.engine, self.call.sizes

        def call() -> Any:
            # Each replica starts with the generators as the root alone does.
            engine.before_replica = lambda: self._snapshot.reseed(conditions.seed)
            engine.resync()
            output = self.call.split()
            if engine.last_sizes != sizes:
                raise RuntimeError(f"expected the samples split as {sizes}: {engine.last_sizes}.")
            return output

        return self._run(call, conditions, self.call.during_backward())

    def mixes_in_transfer(self) -> bool:
        """Whether batch-transfer hooks give a sample other values if the rest is missing."""
        whole = self._transferred(None)
        if whole is None:
            return False
        parts = self.call.engine.cut(whole, self.call.sizes)
        return any(distance(parts[k], self._transferred(k), self.eps) for k in self.active)

    def _transferred(self, shard: int | None) -> Any:
        try:
            self._snapshot.reseed(0)
            return on_host(self.call.transferred(shard))
        finally:
            self._snapshot.restore()

    def computes_in(self, dtypes: Iterable[torch.dtype]) -> bool:
        """Takes note of dtypes; returns whether one has fewer digits than those known."""
        before = self.eps
        self.eps = max(before, rounding(dtypes, self.call.engine.devices[0].type))
        return self.eps > before

    def end(self) -> None:
        """Leaves everything as it was before the trial."""
        try:
            self._snapshot.end()
        finally:
            self.call.engine.before_replica = None  # it refers to this trial: a cycle

    def _run(
        self, make: Callable[[], Any], conditions: Conditions, around: AbstractContextManager[None]
    ) -> Outcome:
        call, snapshot = self.call, self._snapshot
        self.draws = OneNumberPerDraw()
        off = [*self._dropouts, *(self.norms.values() if conditions.norms_off else ())]
        try:
            snapshot.reseed(conditions.seed, conditions.python_seed)
            for layer in off:
                _turn_off(layer)
            with ExitStack() as stack:
                if conditions.one_number_per_draw:
                    stack.enter_context(self.draws)
                stack.enter_context(around)
                values = stack.enter_context(call.program.recording())
                loss, rest = call.parse(make())
                if loss is not None and loss.requires_grad:
                    # Not the step's: a handler would wait for those of other processes.
                    with backwards_go_to(None):
                        (loss * call.loss_scale).backward(retain_graph=snapshot.has_graph)
            self.python_state = snapshot.python_state()
            return Outcome({**values, **self._values(loss, rest)})
        finally:
            snapshot.restore()

    def _values(self, loss: Tensor | None, rest: Any) -> dict[Key, Any]:
        """Loss, outputs, gradients, and what the call has changed on the module."""
        module = self.call.module
        values: dict[Key, Any] = {}
        if loss is not None and self.call.reports_loss:
            values[Key("loss")] = float(loss.detach())
        if rest is not None:
            for path, leaf in tree.places(rest):
                values[Key("output", tree.name(path, ""))] = on_host(leaf)
        norms = tuple(f"{name}." if name else "" for name in self.norms)
        for (kind, name), value in self._snapshot.changes().items():
            if not (kind == "buffer" and name.startswith(norms)):
                values[Key(kind, name)] = value
        for name, tensor in chain(module.named_parameters(), module.named_buffers()):
            if loss is not None and tensor.is_leaf and tensor.requires_grad:
                gradient = on_host(tensor.grad)
                if isinstance(gradient, Tensor):
                    dense = gradient.to_dense()
                    gradient = torch.view_as_real(dense) if dense.is_complex() else dense
                values[Key("gradient", name)] = gradient
        return values


def _normalizes(layer: nn.Module) -> bool:
    if isinstance(layer, _INSTANCE_NORMS):
        return layer.training and layer.track_running_stats
    return isinstance(layer, BATCH_NORMS) and layer.training and not is_synced(layer)


def _drops(layer: nn.Module) -> bool:
    if isinstance(layer, _DROPOUTS):
        return layer.training and layer.p > 0
    return isinstance(layer, nn.RNNBase | nn.MultiheadAttention) and layer.dropout > 0


def _turn_off(layer: nn.Module) -> None:
    if isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
        layer.dropout = 0.0
    else:
        layer.training = False


_checking: ContextVar[bool] = ContextVar("checking", default=False)


def is_checking() -> bool:
    """Whether this code runs for a check: what it calls is not checked itself."""
    return _checking.get()


@contextmanager
def muted() -> Iterator[None]:
    """Drops what this thread and workers print, warn and log: the real call shows it again.

    Warnings of this package's own logger pass: that a replica does not end, say.
    """
    thread = threading.current_thread()
    patched: Any = logging.Logger
    streams, handle = (sys.stdout, sys.stderr), patched.handle

    def is_held_back() -> bool:
        current = threading.current_thread()
        return current is thread or current.name.startswith("dp-")

    def handle_others(logger: logging.Logger, record: logging.LogRecord) -> None:
        is_own = record.name == "lightning_dp" and record.levelno >= logging.WARNING
        if is_own or not is_held_back():
            handle(logger, record)

    token = _checking.set(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sys.stdout, sys.stderr = [_OtherThreads(stream, is_held_back) for stream in streams]
            patched.handle = handle_others
            yield
    finally:
        patched.handle = handle
        sys.stdout, sys.stderr = streams
        _checking.reset(token)


class _OtherThreads:
    """A stream that drops what some threads write."""

    def __init__(self, stream: Any, is_held_back: Callable[[], bool]) -> None:
        self._stream, self._is_held_back = stream, is_held_back

    def write(self, text: str) -> int:
        """Writes what other threads write."""
        return len(text) if self._is_held_back() else int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        """All else is the stream's."""
        return getattr(self._stream, name)
