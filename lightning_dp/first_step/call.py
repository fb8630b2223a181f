"""One call on a small batch, run alone on the root and split over the devices, without a trace."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import random
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    redirect_stderr,
    redirect_stdout,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_dp.first_step.compare import LOSS, Key, Values, rounding
from lightning_dp.first_step.snapshot import ModuleSnapshot, copy_to_cpu
from lightning_dp.parallel.apply import is_synced
from lightning_dp.parallel.engine import Engine
from lightning_dp.parallel.scatter import tree
from lightning_dp.parallel.split import Sizes
from lightning_dp.parallel.torch_private import BATCH_NORMS, TorchDispatchMode

_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)


class Call(ABC):
    """What is checked: a call of a module with a small batch, and the program around it.

    Each run starts from the state at `begin`, with dropout off, and puts everything back.

    Args:
        module: the user's module, on the root device.
        engine: an engine of the check's own, whose replicas run one after another.
        sizes: how many of the batch's samples each device gets.
        batch: the small batch.
        recording: records what a call reports elsewhere than in its output.
        others: optimizers and schedulers outside of the module, which are put back as well.

    Attributes:
        active: the shards that have samples.
        eps: the relative rounding error of the call.
        norms: layers that keep statistics of the batch, which are a shard's on a replica, by name.
        draws: the random operations of the latest run, if it had constant draws.
        python_draws: the state of Python's and NumPy's generators after the latest call.
        reports_loss: whether the loss is the user's own, and not made by the check.
        counts_items: whether the call says over how many items its loss is a mean.
        loss_scale: by which a loss is multiplied before its backward, so that small gradients of
            float16 do not become 0.
    """

    reports_loss = True
    counts_items = False
    loss_scale = 1.0

    def __init__(
        self,
        module: nn.Module,
        engine: Engine,
        sizes: Sizes,
        batch: Any,
        recording: Callable[[], AbstractContextManager[Values]] = lambda: nullcontext({}),
        others: Sequence[Any] = (),
    ) -> None:
        self.module, self.engine, self.sizes, self._batch = module, engine, sizes, batch
        self._recording, self._others = recording, others
        self.active = [k for k, size in enumerate(sizes) if size]
        dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
        self.eps = rounding(dtypes or {torch.get_default_dtype()}, engine.devices[0].type)
        self.norms = {n: layer for n, layer in module.named_modules() if _normalizes(layer)}
        self.draws, self.python_draws = ConstantDraws(), b""
        self._snapshot: ModuleSnapshot | None = None

    @abstractmethod
    def transfer(self, batch: Any) -> Any:
        """Moves the batch or a shard of it to the root."""

    @abstractmethod
    def on_root(self, batch: Any) -> Any:
        """Calls the module on the root alone."""

    @abstractmethod
    def split(self, batch: Any) -> Any:
        """Calls it split over the devices; it was called alone before."""

    @abstractmethod
    def parse(self, output: Any) -> tuple[Tensor | None, Any]:
        """The loss whose gradients are compared, if there is one, and everything else."""

    def during_backward(self) -> AbstractContextManager[None]:
        """What surrounds a split call and its backward."""
        return nullcontext()

    def begin(self) -> None:
        """Takes the snapshot that every run starts from."""
        devices = [*self.engine.devices, self.engine.output_device]
        self._snapshot = ModuleSnapshot(self.module, devices, self._others)

    def end(self) -> None:
        """Puts everything back as it was, and closes the engine."""
        self.engine.before_replica = None  # it refers to this call: a cycle
        try:
            if self._snapshot is not None:
                self._snapshot.end()
        finally:
            self.engine.close()

    def run(
        self,
        *,
        split: bool = False,
        shard: int | None = None,
        cut_late: bool = False,
        seed: int = 0,
        perturbed: int = 0,
        norms_off: bool = False,
        constant_draws: bool = False,
    ) -> Values:
        """Makes the call and its backward, and puts everything back.

        Args:
            split: over the devices; else on the root alone.
            shard: which shard the root gets alone; None for the whole small batch.
            cut_late: the shard is cut from the whole batch after its transfer, not before.
            seed: of the random generators.
            perturbed: if not 0, parameters are moved by rounding errors that follow from this.
            norms_off: batch norm uses its running statistics.
            constant_draws: see `ConstantDraws`.
        """
        assert self._snapshot is not None
        snapshot, self.draws = self._snapshot, ConstantDraws()

        def begin_draws() -> None:
            snapshot.reseed(seed)
            self.draws.count = 0

        def cut(batch: Any, *, is_late: bool) -> Any:
            is_cut = shard is not None and is_late is cut_late
            return self.engine.cut(batch, self.sizes)[shard] if is_cut else batch

        try:
            begin_draws()
            if perturbed:
                snapshot.perturb(self.eps, perturbed)
            for layer in self.module.modules():
                if isinstance(layer, _DROPOUTS):
                    layer.training = False
                elif isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
                    layer.dropout = 0.0
            for layer in self.norms.values() if norms_off else ():
                layer.training = False
            with ExitStack() as stack:
                if constant_draws:
                    stack.enter_context(self.draws)
                values = stack.enter_context(self._recording())
                batch = tree.map_leaves(copied, self._batch)
                if split:
                    stack.enter_context(self.during_backward())
                    self.engine.resync()
                    self.engine.before_replica = begin_draws  # as the root alone does
                    output = self.split(batch)
                    if self.engine.last_sizes != self.sizes:
                        sizes = f"{self.sizes}, got {self.engine.last_sizes}"
                        raise RuntimeError(f"expected the samples split as {sizes}.")
                else:
                    batch = self.transfer(cut(batch, is_late=False))
                    output = self.on_root(cut(batch, is_late=True))
                self.python_draws = pickle.dumps((random.getstate(), np.random.get_state()))
                loss, rest = self.parse(output)
                if loss is not None and loss.requires_grad:
                    (loss * self.loss_scale).backward()
            return {**values, **self._values(loss, rest, snapshot.changes())}
        finally:
            snapshot.restore()

    def _values(self, loss: Tensor | None, rest: Any, changes: Any) -> Values:
        """Loss, outputs, gradients, and what the call has changed on the module."""
        values: Values = {}
        if loss is not None and self.reports_loss:
            values[LOSS] = float(loss.detach())
        for path, leaf in () if rest is None else tree.places(rest):
            values[Key("output", tree.name(path, ""))] = copy_to_cpu(leaf)
        norms = tuple(f"{name}." if name else "" for name in self.norms)
        for (kind, name), value in changes.items():
            if not (kind == "buffer" and name.startswith(norms)):
                values[Key(kind, name)] = value
        for name, parameter in self.module.named_parameters() if loss is not None else ():
            gradient = parameter.grad
            if parameter.requires_grad:
                dense = None if gradient is None else copy_to_cpu(gradient).to_dense()
                values[Key("gradient", name)] = dense
        return values


def copied(leaf: Any) -> Any:
    """A copy of a batch's leaf that shares no memory with it; it may still require gradients."""
    if isinstance(leaf, Tensor):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return copy.deepcopy(leaf)


def _normalizes(layer: nn.Module) -> bool:
    if isinstance(layer, _INSTANCE_NORMS):
        return layer.training and layer.track_running_stats
    return isinstance(layer, BATCH_NORMS) and layer.training and not is_synced(layer)


class ConstantDraws(TorchDispatchMode):
    """Has the k-th random operation of a replica give one number, which depends on k alone.

    A step that adds noise to each sample draws n numbers for n samples: a shard cannot draw those
    of the whole batch. With constant draws both compute the same, and what still differs is not
    chance. Truth values are 1, since 0 would hide all that samples contribute. `randperm` returns
    n-1 ... 0: a step that mixes samples mixes other pairs in a shard than in the whole batch, and
    the check sees that.

    Attributes:
        names: of the random operations that ran.
        count: how many have run in this replica.
        dtypes: in which floating point numbers were computed.
        uncontrolled: whether one of them stayed random (dropout in a fused kernel, say).
    """

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


@contextmanager
def muted() -> Iterator[None]:
    """Drops what is printed, warned and logged meanwhile: the real call shows it again."""
    level, nowhere = logging.root.manager.disable, io.StringIO()
    logging.disable()
    try:
        with warnings.catch_warnings(), redirect_stdout(nowhere), redirect_stderr(nowhere):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
