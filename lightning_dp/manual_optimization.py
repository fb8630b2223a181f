"""Manual optimisation in step mode: what a step does with optimizers, all replicas do together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_dp.lightning_private import lightning_optimizers
from lightning_dp.parallel.gradients import items_of
from lightning_dp.parallel.manual import ManualStep
from lightning_dp.parallel.replaced import replaced
from lightning_dp.parallel.torch_private import backwards_go_to
from lightning_dp.parallel.workers import Calls, current_participant

Arguments: TypeAlias = tuple[tuple[Any, ...], Mapping[str, Any]]
Conduct: TypeAlias = Callable[[ManualStep, Callable[..., Any], list[Arguments]], Any]
"""What the host does for all replicas: given the step, the method that they called, and each one's
arguments."""


class ManualOptimization:
    """Runs the training steps of a module that calls its optimizers itself.

    While such a step runs, these act once for all replicas, whichever way the step gets hold of
    them: `manual_backward`, `toggle_optimizer`, `untoggle_optimizer` and `clip_gradients` of the
    module, `step`, `zero_grad` and `add_param_group` of its optimizers, `step` of its schedulers,
    and every backward, `loss.backward()` too.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self.step: ManualStep | None = None  # that runs

    @contextlib.contextmanager
    def running(self, step: ManualStep) -> Iterator[ManualStep]:
        """While it lasts, what the replicas do with optimizers is a part of this step."""
        self.step = step
        try:
            yield step
        finally:
            self.step = None
            step.end()

    @contextlib.contextmanager
    def acting_together(self, step: ManualStep) -> Iterator[None]:
        """While it lasts, what replicas do with optimizers is done once."""
        with contextlib.ExitStack() as stack:
            for owner, name, what, conduct in self._methods():
                call = _Collective(step, what, getattr(owner, name), conduct)
                is_module = owner is self._module
                for each in step.engine.replicas.modules if is_module else [owner]:
                    stack.enter_context(replaced(each, **{name: call}))
            backward = _Collective(step, "backward", torch.autograd.backward, _joint_backward)
            stack.enter_context(backwards_go_to(partial(_hand_over, backward)))
            yield

    def _methods(self) -> Iterator[tuple[Any, str, str, Conduct]]:
        """Object, method, name for people, and what the host does in its place."""
        yield self._module, "manual_backward", "manual_backward", _joint_backward
        for name in ("toggle_optimizer", "untoggle_optimizer", "clip_gradients"):
            yield self._module, name, name, _once
        strategy = self._module.trainer.strategy
        for optimizers in (lightning_optimizers(strategy), strategy.optimizers):
            for i, optimizer in enumerate(optimizers):
                label = f"{type(optimizer).__name__} (optimizer {i})"
                yield optimizer, "step", f"step of {label}", _optimizer_step
                yield optimizer, "zero_grad", f"zero_grad of {label}", _once
                yield optimizer, "add_param_group", f"add_param_group of {label}", _once
        for i, config in enumerate(strategy.lr_scheduler_configs):
            label = f"{type(config.scheduler).__name__} (scheduler {i})"
            yield config.scheduler, "step", f"step of {label}", _scheduler_step


@dataclass
class _Collective:
    """Stands for a method: called in a replica, it waits for the others and acts once for all."""

    _step: ManualStep
    _what: str
    _original: Callable[..., Any]
    _conduct: Conduct

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        participant = current_participant()
        if participant is None:
            return self._original(*args, **kwargs)
        return participant.meet(self._what, (args, kwargs), self._act)

    def is_for(self, calls: Calls) -> bool:
        """Whether these are the calls of its step's replicas."""
        return calls is self._step.engine.calls

    def __getattr__(self, name: str) -> Any:
        """The method's own: schedulers mark the `step` of optimizers."""
        if "_original" not in vars(self):  # a copy that is being made
            raise AttributeError(name)
        return getattr(self._original, name)

    def _act(self, _: Calls, arguments: list[Arguments]) -> list[Any]:
        return [self._conduct(self._step, self._original, arguments)] * len(arguments)


def _once(step: ManualStep, method: Callable[..., Any], calls: list[Arguments]) -> Any:
    args, kwargs = calls[0]
    return step.once(lambda: method(*args, **kwargs))


def _scheduler_step(step: ManualStep, method: Callable[..., Any], calls: list[Arguments]) -> Any:
    """A metric that every replica has of its shard is the batch's."""
    args, kwargs = calls[0]
    args = tuple(_joined(step, [args[i] for args, _ in calls]) for i in range(len(args)))
    kwargs = {name: _joined(step, [kwargs[name] for _, kwargs in calls]) for name in kwargs}
    return step.once(lambda: method(*args, **kwargs))


def _joined(step: ManualStep, values: list[Any]) -> Any:
    is_number = isinstance(values[0], float | Tensor)
    return step.joined(values) if is_number else values[0]


def _optimizer_step(step: ManualStep, method: Callable[..., Any], calls: list[Arguments]) -> Any:
    """Closures run in the replicas, whose steps they are a part of, as often as it asks for."""
    closures: list[Any] = [args[0] if args else kwargs.get("closure") for args, kwargs in calls]
    args, kwargs = calls[0]
    if closures[0] is not None:
        kwargs = {**kwargs, "closure": lambda: step.in_replicas(closures)}
        args = args[1:]
    return step.once(lambda: method(*args, **kwargs))


def _hand_over(
    backward: _Collective,
    run: Callable[[], Any],
    tensors: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    keep_graph: bool,
    create_graph: bool,
    inputs: Sequence[Tensor],
) -> Any:
    """`loss.backward()` or `torch.autograd.backward(...)` in a replica of this step.

    There may be others: those of a wrapper inside of it, or, where an interrupt has kept this
    handler from being taken away, those of a later step.
    """
    participant = current_participant()
    if participant is None or not backward.is_for(participant.calls):
        return run()
    gradient = gradients[0] if len(tensors) == 1 else None
    loss = tensors[0] if len(tensors) == 1 else _sum_of(tensors, gradients)
    return backward(loss, gradient, keep_graph, create_graph, inputs=inputs or None)


def _joint_backward(step: ManualStep, method: Callable[..., Any], calls: list[Arguments]) -> Any:
    losses = [args[0] if args else kwargs["loss"] for args, kwargs in calls]
    inputs = [kwargs.get("inputs") for _, kwargs in calls]
    return step.backward(losses, inputs, partial(_call_with_loss, method, *calls[0]))


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
