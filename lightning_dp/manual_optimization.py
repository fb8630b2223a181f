"""Manual optimisation in step mode: what a step does with optimizers, all replicas do together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from lightning_dp.lightning_private import lightning_optimizers
from lightning_dp.parallel.gradients import items_of
from lightning_dp.parallel.manual import ManualStep
from lightning_dp.parallel.replaced import replaced
from lightning_dp.parallel.replicas import Replicas
from lightning_dp.parallel.torch_private import backwards_go_to
from lightning_dp.parallel.workers import Rendezvous, current_participant

Arguments: TypeAlias = tuple[tuple[Any, ...], Mapping[str, Any]]
"""What a replica has called a method with."""


class ManualOptimization:
    """Runs the training steps of a module that calls its optimizers itself.

    While such a step runs, these act once for all replicas, whichever way the step gets hold of
    them: `manual_backward`, `toggle_optimizer`, `untoggle_optimizer` and `clip_gradients` of the
    module, `step`, `zero_grad` and `add_param_group` of its optimizers, `step` of its schedulers,
    and every backward, `loss.backward()` too.

    Args:
        module: the user's module.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._step: ManualStep | None = None

    @property
    def optimizers(self) -> list[Optimizer]:
        """The module's, also where it does not call them itself."""
        return self._module.trainer.strategy.optimizers

    @contextlib.contextmanager
    def running(self, step: ManualStep) -> Iterator[ManualStep]:
        """While it lasts, what the replicas do with optimizers is a part of this step."""
        self._step = step
        try:
            yield step
        finally:
            self._step = None
            step.end()

    @contextlib.contextmanager
    def acting_together(self, replicas: Replicas) -> Iterator[None]:
        """While it lasts, what replicas do with optimizers is done once."""
        step = self._step
        if step is None:
            yield
            return
        with contextlib.ExitStack() as stack:
            for owner, name, what, kind in self._methods():
                call = kind(step, what, getattr(owner, name))
                owners = replicas.modules if owner is self._module else [owner]
                for each in owners:
                    stack.enter_context(replaced(each, **{name: call}))
            backward = _Backward(step, "backward", torch.autograd.backward)
            stack.enter_context(backwards_go_to(partial(_hand_over, backward)))
            yield

    def _methods(self) -> Iterator[tuple[Any, str, str, type[_Collective]]]:
        """Object, method, name for people, and what stands in its place."""
        yield self._module, "manual_backward", "manual_backward", _Backward
        for name in ("toggle_optimizer", "untoggle_optimizer", "clip_gradients"):
            yield self._module, name, name, _Collective
        strategy = self._module.trainer.strategy
        for optimizers in (lightning_optimizers(strategy), strategy.optimizers):
            for i, optimizer in enumerate(optimizers):
                label = f"{type(optimizer).__name__} (optimizer {i})"
                yield optimizer, "step", f"step of {label}", _OptimizerStep
                yield optimizer, "zero_grad", f"zero_grad of {label}", _Collective
                yield optimizer, "add_param_group", f"add_param_group of {label}", _Collective
        for i, config in enumerate(strategy.lr_scheduler_configs):
            label = f"{type(config.scheduler).__name__} (scheduler {i})"
            yield config.scheduler, "step", f"step of {label}", _SchedulerStep


class _Collective:
    """Stands for a method: called in a replica, it waits for the others and acts once for all."""

    def __init__(self, step: ManualStep, what: str, original: Callable[..., Any]) -> None:
        self._step = step
        self._what = what
        self._original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        participant = current_participant()
        if participant is None:
            return self._original(*args, **kwargs)
        return participant.meet(self._what, (args, kwargs), self._act)

    def __getattr__(self, name: str) -> Any:
        """The method's own: schedulers mark the `step` of optimizers."""
        if "_original" not in vars(self):  # a copy that is being made
            raise AttributeError(name)
        return getattr(self._original, name)

    def _act(self, rendezvous: Rendezvous, calls: list[Arguments]) -> list[Any]:
        return [self._act_once(rendezvous, calls)] * len(calls)

    def _act_once(self, rendezvous: Rendezvous, calls: list[Arguments]) -> Any:
        """What the host does for all replicas, of which it knows the arguments."""
        args, kwargs = calls[0]
        return self._step.once(lambda: self._original(*args, **kwargs))


class _SchedulerStep(_Collective):
    """A metric that every replica has of its shard is the batch's."""

    def _act_once(self, rendezvous: Rendezvous, calls: list[Arguments]) -> Any:
        args, kwargs = calls[0]
        args = tuple(self._joined([args[i] for args, _ in calls]) for i in range(len(args)))
        kwargs = {name: self._joined([kwargs[name] for _, kwargs in calls]) for name in kwargs}
        return super()._act_once(rendezvous, [(args, kwargs)])

    def _joined(self, values: list[Any]) -> Any:
        is_number = isinstance(values[0], float | Tensor)
        return self._step.joined(values) if is_number else values[0]


class _OptimizerStep(_Collective):
    """Closures run in the replicas, whose steps they are a part of, as often as it asks for."""

    def _act_once(self, rendezvous: Rendezvous, calls: list[Arguments]) -> Any:
        closures: list[Any] = [args[0] if args else kwargs.get("closure") for args, kwargs in calls]
        args, kwargs = calls[0]
        if closures[0] is not None:
            kwargs = {**kwargs, "closure": lambda: self._step.in_replicas(rendezvous, closures)}
            args = args[1:]
        return super()._act_once(rendezvous, [(args, kwargs)])


class _Backward(_Collective):
    """Every replica's loss is a part of one loss, whose backward is called as the first one's."""

    def _act_once(self, rendezvous: Rendezvous, calls: list[Arguments]) -> Any:
        losses = [args[0] if args else kwargs["loss"] for args, kwargs in calls]
        inputs = [kwargs.get("inputs") for _, kwargs in calls]
        call = partial(_call_with_loss, self._original, *calls[0])
        return self._step.backward(rendezvous, losses, inputs, call)


def _hand_over(
    backward: _Collective,
    run: Callable[[], Any],
    tensors: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    keep_graph: bool,
    create_graph: bool,
    inputs: Sequence[Tensor],
) -> Any:
    """`loss.backward()` or `torch.autograd.backward(...)` in a replica."""
    if current_participant() is None:
        return run()
    gradient = gradients[0] if len(tensors) == 1 else None
    loss = tensors[0] if len(tensors) == 1 else _sum_of(tensors, gradients)
    return backward(loss, gradient, keep_graph, create_graph, inputs=inputs or None)


def _call_with_loss(
    method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], loss: Tensor
) -> Any:
    """Makes a replica's call of a backward with the joint loss in the place of its own."""
    device = loss.device
    moved = [x.to(device) if isinstance(x, Tensor) else x for x in args[1:]]
    others = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in kwargs.items()
        if name not in ("inputs", "loss", "tensors")
    }
    return method(loss, *moved, **others)


def _sum_of(tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Tensor:
    """Several losses whose backward runs at once are their sum, weighted by their gradients."""
    if any(items_of(tensor) is not None for tensor in tensors):
        raise ValueError(
            f"Expected one loss with num_items, got a backward of {len(tensors)} tensors, some "
            "with num_items. Make a backward of each: shards weigh differently in each of them."
        )
    pairs = zip(tensors, gradients, strict=True)
    return torch.stack([t.sum() if g is None else (t * g).sum() for t, g in pairs]).sum()
