"""One call on a small batch, run alone on the root and split over the devices, without a trace."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    redirect_stderr,
    redirect_stdout,
)
from contextvars import ContextVar
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp.first_step.compare import Key, Outcome, rounding
from lightning_dp.first_step.snapshot import ModuleSnapshot, copy_to_cpu
from lightning_dp.parallel.apply import is_synced
from lightning_dp.parallel.contexts import ObjectProxy
from lightning_dp.parallel.engine import Engine
from lightning_dp.parallel.scatter import tree
from lightning_dp.parallel.split import Sizes
from lightning_dp.parallel.torch_private import (
    BATCH_NORMS,
    TorchDispatchMode,
    argument_names,
)

_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)


class Call(ABC):
    """What is checked: one call of a module with a small batch, and the program around it.

    Attributes:
        module: the user's module, on the root device.
        engine: an engine of the check's own, whose replicas run one after another.
        sizes: how many of the batch's samples each device gets.
        others: containers, optimizers and schedulers outside of the module that it may change.
        loss_scale: by which a loss is multiplied before its backward, so that small gradients of
            float16 do not become 0.
        reports_loss: whether the loss is the user's own, and not made by the check.
        counts_items: whether the call says over how many items its loss is a mean.
    """

    module: nn.Module
    engine: Engine
    sizes: Sizes
    others: Sequence[Any] = ()
    loss_scale: float = 1.0
    reports_loss: bool = True
    counts_items: bool = False

    @abstractmethod
    def alone(self, shard: int | None) -> Any:
        """Calls the module on the root with the whole small batch, or with one shard of it."""

    @abstractmethod
    def split(self) -> Any:
        """Calls it split over the devices; it was called alone before."""

    @abstractmethod
    def parse(self, output: Any) -> tuple[Tensor | None, Any]:
        """The loss whose gradients are compared, if there is one, and everything else."""

    def recording(self) -> AbstractContextManager[dict[Key, Any]]:
        """Records what a call reports elsewhere than in its output; filled when it ends."""
        return nullcontext({})

    def during_backward(self) -> AbstractContextManager[None]:
        """What surrounds a split call and its backward."""
        return nullcontext()


class CallRunner:
    """Runs a call alone and split, each time from the same state, with dropout layers off.

    Attributes:
        active: the shards that have samples.
        eps: the relative rounding error of the call.
        norms: layers that keep statistics of the batch, which are a shard's on a replica, by name.
        draws: the random operations of the latest run, if it had constant draws.
        python_state: where generators of Python and NumPy were after the latest call alone.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self.active = [k for k, size in enumerate(call.sizes) if size]
        known = {p.dtype for p in call.module.parameters() if p.is_floating_point()}
        self.eps = rounding(known or {torch.get_default_dtype()}, call.engine.devices[0].type)
        layers = list(call.module.named_modules())
        self.norms = {name: layer for name, layer in layers if _normalizes(layer)}
        self._dropouts = [layer for _, layer in layers if _drops(layer)]
        self.draws, self.python_state = ConstantDraws(), b""
        devices = [*call.engine.devices, call.engine.output_device]
        self._snapshot = ModuleSnapshot(call.module, devices, call.others)

    def computes_in(self, dtypes: Iterable[torch.dtype]) -> None:
        """Raises `eps` to the rounding error of these dtypes, such as autocast's."""
        self.eps = max(self.eps, rounding(dtypes, self.call.engine.devices[0].type))

    def end(self) -> None:
        """Puts everything back as it was when the runner was made."""
        try:
            self._snapshot.end()
        finally:
            self.call.engine.before_replica = None  # it refers to this runner: a cycle

    def run(
        self,
        *,
        split: bool = False,
        shard: int | None = None,
        seed: int = 0,
        perturbed: int = 0,
        norms_off: bool = False,
        constant_draws: bool = False,
    ) -> Outcome:
        """Makes the call and its backward, and puts everything back.

        Args:
            split: over the devices; else on the root alone.
            shard: which shard the root gets alone; None for the whole small batch.
            seed: of the random generators.
            perturbed: if not 0, parameters are moved by rounding errors that follow from this.
            norms_off: batch norm uses its running statistics.
            constant_draws: see `ConstantDraws`.
        """
        call, engine, snapshot = self.call, self.call.engine, self._snapshot
        try:
            self.draws = ConstantDraws()
            self._begin_draws(seed)
            if perturbed:
                snapshot.perturb(self.eps, perturbed)
            for layer in (*self._dropouts, *(self.norms.values() if norms_off else ())):
                if isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
                    layer.dropout = 0.0
                else:
                    layer.training = False
            with ExitStack() as stack:
                if constant_draws:
                    stack.enter_context(self.draws)
                values = stack.enter_context(call.recording())
                if split:
                    stack.enter_context(call.during_backward())
                    engine.resync()
                    engine.before_replica = self._begin_draws  # as the root alone does
                    output = call.split()
                    if engine.last_sizes != call.sizes:
                        sizes = f"{call.sizes}, got {engine.last_sizes}"
                        raise RuntimeError(f"expected the samples split as {sizes}.")
                else:
                    output = call.alone(shard)
                    self.python_state = snapshot.python_state()
                loss, rest = call.parse(output)
                if loss is not None and loss.requires_grad:
                    (loss * call.loss_scale).backward()
            return Outcome({**values, **self._values(loss, rest)})
        finally:
            snapshot.restore()

    def _begin_draws(self, seed: int = 0) -> None:
        self._snapshot.reseed(seed)
        self.draws.count = 0

    def _values(self, loss: Tensor | None, rest: Any) -> dict[Key, Any]:
        """Loss, outputs, gradients, and what the call has changed on the module."""
        module = self.call.module
        values: dict[Key, Any] = {}
        if loss is not None and self.call.reports_loss:
            values[Key("loss")] = float(loss.detach())
        for path, leaf in () if rest is None else tree.places(rest):
            values[Key("output", tree.name(path, ""))] = copy_to_cpu(leaf)
        norms = tuple(f"{name}." if name else "" for name in self.norms)
        for (kind, name), value in self._snapshot.changes().items():
            if not (kind == "buffer" and name.startswith(norms)):
                values[Key(kind, name)] = value
        for name, tensor in chain(module.named_parameters(), module.named_buffers()):
            if loss is not None and tensor.is_leaf and tensor.requires_grad:
                gradient = copy_to_cpu(tensor.grad)
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


class ConstantDraws(TorchDispatchMode):
    """Has the k-th random operation of a replica give one number, which depends on k alone.

    A step that adds noise to each sample draws n numbers for n samples: a shard cannot draw those
    of the whole batch. With constant draws both compute the same, and what still differs is not
    chance. Bernoulli draws are 1, since 0 would hide all that samples contribute. `randperm`
    returns n-1 ... 0: a step that mixes samples mixes other pairs in a shard than in the whole
    batch, and the check sees that.

    Attributes:
        names: of the random operations that ran.
        count: how many have run in this replica.
        dtypes: in which floating point numbers were computed.
        uncontrolled: whether one of them stayed random (a multinomial, dropout in a fused kernel).
    """

    _FILLED = frozenset(
        (
            *("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal"),
            *(
                "normal_",
                "uniform_",
                "exponential_",
                "random_",
                "log_normal_",
                "cauchy_",
                "geometric_",
            ),
        )
    )

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.names: dict[str, None] = {}
        self.count = 0
        self.dtypes: set[torch.dtype] = set()
        self.uncontrolled = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs one operation."""
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            name = str(func.overloadpacket).removeprefix("aten.")
            self.names[name] = None
            self.count += 1
            given = dict(zip(argument_names(func), args, strict=False))
            if name in self._FILLED:
                lowest = given.get("low", given.get("from", 0)) or 0
                spread = (self.count * 0.618) % 0.8 + 0.1
                result.fill_(lowest + spread * result.is_floating_point())
            elif name in ("bernoulli", "bernoulli_"):
                result.fill_(1)
            elif name == "randperm":
                result.copy_(result.sort(descending=True).values)
            elif name == "native_dropout" and given["p"] < 1:  # of accelerators
                result[0].copy_(given["input"] / (1 - given["p"]))
            else:
                self.uncontrolled = True
        if isinstance(result, Tensor) and result.is_floating_point():
            self.dtypes.add(result.dtype)
        return result


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
    handle = patched.handle

    def is_held_back() -> bool:
        current = threading.current_thread()
        return current is thread or current.name.startswith("dp-")

    def handle_others(logger: logging.Logger, record: logging.LogRecord) -> None:
        is_own = record.name == "lightning_dp" and record.levelno >= logging.WARNING
        if is_own or not is_held_back():
            handle(logger, record)

    class OfOtherThreads(ObjectProxy):
        def write(self, text: str) -> int:
            return len(text) if is_held_back() else int(self._original.write(text))

    token = _checking.set(True)
    patched.handle = handle_others
    out, err = (OfOtherThreads(stream) for stream in (sys.stdout, sys.stderr))
    try:
        with warnings.catch_warnings(), redirect_stdout(out), redirect_stderr(err):
            warnings.simplefilter("ignore")
            yield
    finally:
        patched.handle = handle
        _checking.reset(token)
