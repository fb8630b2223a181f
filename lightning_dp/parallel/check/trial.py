"""One call on a small batch, run alone on the root and split over the devices, without a trace."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp.parallel.apply import is_synced
from lightning_dp.parallel.check.draws import OneNumberPerDraw
from lightning_dp.parallel.check.outcome import Key, Outcome, Tolerance, distance
from lightning_dp.parallel.check.snapshot import Snapshot, on_host
from lightning_dp.parallel.engine import Engine
from lightning_dp.parallel.scatter import tree
from lightning_dp.parallel.split import Sizes
from lightning_dp.parallel.torch_private import (
    BATCH_NORMS,
    backwards_go_to,
    saved_tensors_functions,
)

SAMPLES = 3
"""Samples per replica in the part of the batch that is checked."""

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_ALPHA_DROPOUTS = (nn.AlphaDropout, nn.FeatureAlphaDropout)


def trial_sizes(batch_size: int, active: Sequence[bool], least: int = 1) -> Sizes:
    """How many of a batch's first samples each device gets in a check: unequally many.

    About three per replica, at most the batch; at least two each where there are enough, since
    a deviation over samples needs two.

    Args:
        batch_size: how many samples the batch has.
        active: for each device whether it gets samples at all.
        least: how many samples a replica needs.

    Example:
        >>> trial_sizes(100, [True] * 4), trial_sizes(100, [True] * 2), trial_sizes(3, [True] * 4)
        ((5, 3, 2, 2), (4, 2), (2, 1, 0, 0))
        >>> trial_sizes(5, [False, True, True]), trial_sizes(5, [True] * 4, least=2)
        ((0, 3, 2), (3, 2, 0, 0))
    """
    k = sum(active)
    n = min(batch_size, SAMPLES * k)
    if n <= k:  # one each would be equal shares
        k = max(n - 1, min(n, 2))
    least = max(least, 2 if n >= 2 * k else 1)
    k = max(1, min(k, n // least))
    spare = n - least * k
    second = spare // 3 if k > 2 else 0
    own = iter([least + spare - second, least + second, *[least] * (k - 2)][:k])
    return tuple(next(own, 0) if is_active else 0 for is_active in active)


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
        name: what is called, for messages ("training_step").
        engine: an engine of the check's own, whose replicas run one after another.
        sizes: how many of the batch's samples each device gets.
        devices: those of the replicas, and the output device.
        dtypes: what it computes in.
        loss_scale: by which a loss is multiplied before its backward, so that small gradients of
            float16 do not become 0.
        program: the program around the module.
        reports_loss: whether the loss is the user's own, and not made by the check.
        counts_items: whether the call says over how many items its loss is a mean.
    """

    module: nn.Module
    name: str
    engine: Engine
    sizes: Sizes
    devices: Sequence[torch.device]
    dtypes: Iterable[torch.dtype]
    loss_scale: float = 1.0
    reports_loss: bool = True
    counts_items: bool = False
    program = Program()

    @abstractmethod
    def alone(self, shard: int | None) -> Any:
        """Calls the module on the root with the whole small batch, or with one shard of it."""

    @abstractmethod
    def split(self, alone: Any) -> Any:
        """Calls it split over the devices.

        `alone` is what the call returned on the root, unless it reports a loss.
        """

    @abstractmethod
    def parse(self, output: Any) -> tuple[Tensor | None, Any]:
        """The loss whose gradients are compared, if there is one, and everything else."""

    def around(self, *, split: bool) -> AbstractContextManager[None]:
        """What surrounds a call and its backward."""
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
    """

    norms_off: bool = False
    one_number_per_draw: bool = False
    seed: int = 0


class Trial:
    """Runs a call alone and split, each time from the same state.

    Args:
        call: the call.
        most_bytes: see `Snapshot`.
    """

    def __init__(self, call: Call, most_bytes: int | None = None) -> None:
        self.call = call
        self.active = [k for k, size in enumerate(call.sizes) if size]
        self.tolerance = Tolerance.of(call.dtypes, call.devices[0].type)
        self.norms = _Layers(call.module, _normalizes)
        self._dropouts = _Layers(call.module, _drops)
        self._returned: Any = None  # by the latest call alone, where the split call asks for it
        self.python_state = ""  # after the latest call alone
        self.parameters = frozenset(name for name, _ in call.module.named_parameters())
        program = call.program
        self.snapshot = Snapshot(
            call.module, call.devices, program.containers, program.compares, most_bytes
        )

    def alone(
        self,
        conditions: Conditions = Conditions(),
        shard: int | None = None,
        *,
        python_seed: int | None = None,
        perturbed: int = 0,
        draws: OneNumberPerDraw | None = None,
    ) -> Outcome:
        """The call on the root.

        Args:
            conditions: the conditions.
            shard: which shard it gets; None for the whole small batch.
            python_seed: of the generators of Python and NumPy, if different.
            perturbed: if not 0, parameters are moved by rounding errors that follow from this.
            draws: records the random operations.
        """

        def call() -> Any:
            if perturbed:
                self.snapshot.perturb(self.tolerance.eps, perturbed)
            return self.call.alone(shard)

        self.snapshot.reseed(conditions.seed, python_seed=python_seed)
        return self._run(call, conditions, None, split=False, draws=draws)

    def split(self, conditions: Conditions = Conditions(), like: Outcome | None = None) -> Outcome:
        """The call split over the devices; see `Outcome` for `like`."""
        returned = self._returned

        def call() -> Any:
            engine = self.call.engine
            # Each replica starts with the generators as the root alone does.
            engine.before_replica = lambda: self.snapshot.reseed(conditions.seed)
            engine.resync()
            output = self.call.split(returned)
            if engine.last_sizes != self.call.sizes:
                raise RuntimeError(
                    f"expected the samples split as {self.call.sizes}, got {engine.last_sizes}."
                )
            return output

        self.snapshot.reseed(conditions.seed)
        return self._run(call, conditions, like, split=True)

    def mixes_in_transfer(self) -> bool:
        """Whether batch-transfer hooks give a sample other values if the rest is missing."""
        whole = self._transferred(None)
        if whole is None:
            return False
        parts = self.call.engine.cut(whole, self.call.sizes)
        moved = self._transferred
        return any(distance(parts[k], moved(k), self.tolerance) for k in self.active)

    def _transferred(self, shard: int | None) -> Any:
        try:
            self.snapshot.reseed(0)
            return on_host(self.call.transferred(shard))
        finally:
            self.snapshot.restore()

    def lower_tolerance(self, dtypes: Iterable[torch.dtype]) -> bool:
        """Takes the digits of these dtypes if the call computes in one with fewer than known."""
        seen = Tolerance.of({*self.call.dtypes, *dtypes}, self.call.devices[0].type)
        is_lower = seen.eps > self.tolerance.eps
        self.tolerance = seen
        return is_lower

    def end(self) -> None:
        """Leaves everything as it was before the trial."""
        try:
            self.snapshot.end()
        finally:
            self.call.engine.before_replica = None  # it refers to this trial: a cycle

    def _run(
        self,
        make: Callable[[], Any],
        conditions: Conditions,
        like: Outcome | None,
        *,
        split: bool,
        draws: OneNumberPerDraw | None = None,
    ) -> Outcome:
        call = self.call
        try:
            self._dropouts.turn_off()
            if conditions.norms_off:
                self.norms.turn_off()
            drawing: AbstractContextManager[Any] = contextlib.nullcontext()
            if conditions.one_number_per_draw:
                drawing = draws or OneNumberPerDraw()
            around = call.around(split=split)
            with _own_graph(), drawing, around, call.program.recording() as values:
                output = make()
                loss, rest = call.parse(output)
                if loss is not None and loss.requires_grad:
                    # Not the step's: a handler would wait for those of other processes.
                    with backwards_go_to(None):
                        (loss * call.loss_scale).backward(retain_graph=self.snapshot.has_graph)
            if not split:
                self._returned = None if call.reports_loss else rest
                self.python_state = self.snapshot.python_state()
            return self._outcome(loss, rest, values, like)
        finally:
            self.snapshot.restore()

    def _outcome(
        self, loss: Tensor | None, rest: Any, recorded: dict[Key, Any], like: Outcome | None
    ) -> Outcome:
        values = dict(recorded)
        if loss is not None and self.call.reports_loss:
            values[Key("loss", "")] = float(loss.detach())
        for path, leaf in _parts_of(rest):
            values[Key("output", path)] = on_host(leaf)
        norms = self.norms.prefixes
        for (kind, name), value in self.snapshot.changes().items():
            if not (kind == "buffer" and name.startswith(norms)):
                values[Key(kind, name)] = value
        gradients: Iterable[tuple[str, Tensor | None]] = ()
        if loss is not None:
            gradients = _gradients(self.call.module)
        return Outcome(values, gradients, like, self.tolerance)


def _gradients(module: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            yield name, parameter.grad
    for name, buffer in module.named_buffers():
        if buffer.is_leaf and buffer.requires_grad:
            yield name, buffer.grad


def _parts_of(output: Any) -> Iterator[tuple[str, Any]]:
    """An output's children by path, so that a difference names the one that differs."""
    if output is None:
        return
    if not tree.children(output):
        yield "", output
    else:
        for path, leaf in tree.places(output):
            yield tree.name(path, ""), leaf


class _Layers:
    """The layers of one kind in a module."""

    def __init__(self, module: nn.Module, is_one: Callable[[nn.Module], bool]) -> None:
        self._layers = [layer for layer in module.modules() if is_one(layer)]
        self.names = [name for name, layer in module.named_modules() if is_one(layer)]

    @property
    def prefixes(self) -> tuple[str, ...]:
        """How the names of their buffers begin."""
        return tuple(f"{name}." if name else "" for name in self.names)

    def turn_off(self) -> None:
        """Puts them into evaluation mode."""
        for layer in self._layers:
            if isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
                layer.dropout = 0.0
            else:
                layer.training = False


def _normalizes(layer: nn.Module) -> bool:
    """Whether a layer keeps statistics of the batch, which are a shard's on a replica."""
    if isinstance(layer, _INSTANCE_NORMS):
        return layer.training and layer.track_running_stats
    return isinstance(layer, BATCH_NORMS) and layer.training and not is_synced(layer)


def _drops(layer: nn.Module) -> bool:
    if isinstance(layer, (*_DROPOUTS, *_ALPHA_DROPOUTS)):
        return layer.training and layer.p > 0
    return isinstance(layer, nn.RNNBase | nn.MultiheadAttention) and layer.dropout > 0


def _own_graph() -> AbstractContextManager[Any]:
    """Keeps the saved tensors of the call's graph, where the call runs inside of a checkpoint.

    The hooks of `torch.utils.checkpoint` would drop them, and recompute the outer call within the
    check's backward, which deadlocks. Hooks that do nothing take their place.
    """
    if saved_tensors_functions() is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)


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
