"""Manual optimisation in step mode: what a step does with optimizers, all replicas do together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeAlias

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_dp.lightning_private import lightning_optimizers
from lightning_dp.parallel.contexts import Contexts, Lasting, standing_in
from lightning_dp.parallel.gradients import sum_of_losses
from lightning_dp.parallel.manual import ManualStep
from lightning_dp.parallel.torch_private import backwards_go_to
from lightning_dp.parallel.workers import Calls, current_participant
from lightning_dp.state import SharedMethods, Tool, own_methods, tools_of

Arguments: TypeAlias = tuple[tuple[Any, ...], Mapping[str, Any]]
Conduct: TypeAlias = Callable[[ManualStep, Callable[..., Any], list[Arguments]], Any]
"""What the host does for all replicas: given the step, the method that they called, and each one's
arguments."""


Act: TypeAlias = Callable[[Calls, list[Arguments]], list[Any]]
"""What is done once: given the calls of all replicas, and each one's arguments; what each gets."""


class ManualOptimization:
    """Runs the training steps of a module that calls its optimizers itself.

    While such a step runs, these act once for all replicas, whichever way the step gets hold of
    them: `manual_backward`, `toggle_optimizer`, `untoggle_optimizer` and `clip_gradients` of the
    module; `step`, `zero_grad`, `add_param_group` and the methods of their own of its optimizers,
    `step` of its schedules and gradient scalers, see `tools_of`; and every backward,
    `loss.backward()` too.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self.step: ManualStep | None = None  # that runs
        self._tools: list[Tool] = []
        self._shared = SharedMethods()

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those that the step which runs can get hold of; of wrappers and what is in them one."""
        optimizers = [tool for tool in self._tools if isinstance(tool, Optimizer)]
        return list({id(optimizer.param_groups): optimizer for optimizer in optimizers}.values())

    def running(self, step: ManualStep) -> AbstractContextManager[None]:
        """While it lasts, what the replicas do with optimizers is a part of this step."""
        return _Running(self, step)

    def begin(self, step: ManualStep) -> None:
        """A step begins: what it can get hold of is looked for."""
        strategy = self._module.trainer.strategy
        schedules = [config.scheduler for config in strategy.lr_scheduler_configs]
        known = [*lightning_optimizers(strategy), *strategy.optimizers, *schedules]
        self.step, self._tools = step, tools_of(self._module, known)

    def end(self) -> None:
        """No step runs."""
        self.step, self._tools = None, []

    def acting_together(self, step: ManualStep) -> AbstractContextManager[None]:
        """While it lasts, what replicas do with optimizers is done once."""
        return Contexts(self._stand_ins(step))

    def _stand_ins(self, step: ManualStep) -> Iterator[AbstractContextManager[None]]:
        for name, conduct in _OF_MODULE.items():
            call = _together(step, name, getattr(self._module, name), conduct)
            for module in step.engine.replicas.modules:
                yield standing_in(module, name, call)
        for tool, label, names in self._methods():
            conduct = _traceless if isinstance(tool, GradScaler) else _with_all
            is_schedule = isinstance(tool, LRScheduler)
            calls = {}
            for name in names:
                own = partial(conduct, uses_gradients=name == "step" and not is_schedule)
                calls[name] = _together(step, f"{name} of {label}", getattr(tool, name), own)
            yield self._shared.standing_in(tool, calls, step.shards.active[0])
        backward = _together(step, "backward", torch.autograd.backward, _joint_backward)
        yield backwards_go_to(partial(_hand_over, step, backward))

    def _methods(self) -> Iterator[tuple[Tool, str, list[str]]]:
        """Optimizers and the like, how people call them, and their methods."""
        numbers: dict[tuple[str, int], int] = {}
        for tool in self._tools:
            # A wrapper has the groups, and the number, of what it wraps.
            key = ("optimizer", id(getattr(tool, "param_groups", None)))
            if isinstance(tool, Optimizer):
                names = ["step", "zero_grad", "add_param_group", *own_methods(tool)]
            elif isinstance(tool, LRScheduler):
                key, names = ("scheduler", id(tool)), ["step"]
            else:
                key, names = ("scaler", id(tool)), ["unscale_", "step", "update"]
            n = numbers.setdefault(key, len([kind for kind, _ in numbers if kind == key[0]]))
            yield tool, f"{type(tool).__name__} ({key[0]} {n})", names


class _Running(Lasting):
    def __init__(self, manual: ManualOptimization, step: ManualStep) -> None:
        self._manual, self._step = manual, step

    def begin(self) -> None:
        self._manual.begin(self._step)

    def end(self) -> None:
        self._manual.end()
        self._step.end()


def together(what: str, original: Callable[..., Any], act: Act) -> Callable[..., Any]:
    """What stands for a method: called in a replica, it waits for the others, and `act` acts once.

    Called by anybody else it is the original.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        participant = current_participant()
        if participant is None:
            return original(*args, **kwargs)
        return participant.meet(what, (args, kwargs), act)

    return call


def _together(
    step: ManualStep, what: str, original: Callable[..., Any], conduct: Conduct
) -> Callable[..., Any]:
    def act(_: Calls, arguments: list[Arguments]) -> list[Any]:
        return [conduct(step, original, arguments)] * len(arguments)

    return together(what, original, act)


def _once(step: ManualStep, method: Callable[..., Any], calls: list[Arguments]) -> Any:
    args, kwargs = calls[0]
    return step.once(lambda: method(*args, **kwargs))


def _with_all(
    step: ManualStep,
    method: Callable[..., Any],
    calls: list[Arguments],
    *,
    uses_gradients: bool = False,
    leaves_trace: bool = True,
) -> Any:
    """With what the replicas give, each for its shard, made that of the batch."""
    args, kwargs = calls[0]
    args = tuple(_of_all(step, [args[i] for args, _ in calls]) for i in range(len(args)))
    kwargs = {name: _of_all(step, [kwargs[name] for _, kwargs in calls]) for name in kwargs}
    trace = {"leaves_trace": leaves_trace, "uses_gradients": uses_gradients}
    return step.once(lambda: method(*args, **kwargs), **trace)


_traceless = partial(_with_all, leaves_trace=False)
"""Of gradient scalers: torch does not count how often they write to gradients."""


def _of_all(step: ManualStep, values: list[Any]) -> Any:
    """A number that every replica has of its shard is the batch's.

    Closures run in the replicas, whose steps they are a part of, as often as they are called.
    """
    if isinstance(values[0], float | Tensor):
        return step.joined(values)
    if isinstance(values[0], Optimizer | Module) or not callable(values[0]):
        return values[0]
    return lambda *args: step.in_replicas([partial(closure, *args) for closure in values])


def _hand_over(
    step: ManualStep,
    backward: Callable[..., Any],
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
    if participant is None or participant.calls is not step.engine.calls:
        return run()
    gradient = gradients[0] if len(tensors) == 1 else None
    loss = tensors[0] if len(tensors) == 1 else sum_of_losses(tensors, gradients)
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


_OF_MODULE: Mapping[str, Conduct] = {
    "manual_backward": _joint_backward,
    "toggle_optimizer": _once,
    "untoggle_optimizer": _once,
    "clip_gradients": _once,
}
