"""The first-step check of a LightningModule.

Lightning runs a sanity check of validation before it trains; this is one of the split. Before the
first batch of each kind of step, the step runs on a few samples once on the root alone and once
split over the devices, and everything is put back. Here is how a LightningModule's
steps run for it; the other files compare them and find the cause of a difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torchmetrics import Metric
from typing_extensions import override

from lightning_dp.first_step import (
    Call,
    FirstCalls,
    ForwardCall,
    Key,
    NotChecked,
    Report,
    announce,
    check,
    check_is_cheap,
    copied,
    copy_to_cpu,
    small_part,
)
from lightning_dp.forward_mode import ForwardMode
from lightning_dp.lightning_private import own_device, state_defaults
from lightning_dp.mode import Mode, Transfer
from lightning_dp.parallel.contexts import ObjectProxy, replaced, standing_in
from lightning_dp.parallel.reduce import LossReduction, StepOutput
from lightning_dp.parallel.split import Sizes

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import World

CheckFirstStep: TypeAlias = bool | Literal["auto"]
OPTION = "check_first_step"

_LOSS_SCALE = 256.0
"""Of float16, whose small gradients would become 0."""

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class FirstSteps:
    """Checks the first step of each kind in one run of a Trainer.

    Args:
        reports: receives what is found, by the name of the step.
        option: the value of `check_first_step`.
        trainer: the Trainer that runs.
        make_mode: makes a mode for the check alone; takes options of an engine.
        transfer: moves a batch to a device through the hooks of the module.
        loss_reduction: the strategy's.

    Attributes:
        due: the names of the steps that have not run yet.
    """

    def __init__(
        self,
        reports: dict[str, Report],
        option: CheckFirstStep,
        trainer: Trainer,
        make_mode: Callable[..., Mode],
        transfer: Transfer,
        loss_reduction: LossReduction,
    ) -> None:
        self._reports, self._option, self._trainer = reports, option, trainer
        self._new_mode = partial(make_mode, executor="inorder", world=None)
        self._transfer, self._loss_reduction = transfer, loss_reduction
        self.due = set(_STEPS)
        self._method = ""  # whose calls `FirstCalls` checks now

    def check(
        self, mode: Mode, method: str, batch: Any, args: tuple[Any, ...], world: World | None
    ) -> None:
        """Checks a step that is about to run; in forward mode, the calls that it will spread.

        With several processes, each checks its own part of the batch if all of them can.

        Args:
            mode: the mode that will run the step.
            method: the step's name.
            batch: the batch, as the mode takes it.
            args: the step's other arguments.
            world: the processes; None if this is the only one.
        """
        self.due.discard(method)
        self._method = method
        report, part, why = Report(OPTION, method), None, ""
        try:
            if self._option == "auto" and getattr(self._trainer, "fast_dev_run", False):
                raise NotChecked("fast_dev_run.")
            if self._option == "auto":
                check_is_cheap(mode.engine)
            if not isinstance(mode, ForwardMode):
                sizes, part = small_part(mode.engine, batch)
                report = replace(report, sizes=sizes)
                if not sizes:
                    raise NotChecked("the batch has samples for one replica alone.")
        except NotChecked as reason:
            why = str(reason)
        if world is not None:
            cannot = world.all_gather_objects(bool(why))
            if any(cannot) and not why:
                why = f"{sum(cannot)} of {len(cannot)} processes cannot check theirs."
        if why:
            self._found(replace(report, skipped=why))
        elif isinstance(mode, ForwardMode):
            if mode.engine.first_calls is None:
                mode.engine.first_calls = FirstCalls(
                    lambda split: self._new_mode(split=split).engine,  # type: ignore[arg-type,return-value]  # a forward mode's
                    OPTION,
                    always=self._option is True,
                    report=self._found,
                    make_call=partial(_SpreadCall, self._trainer),
                )
        else:
            transfer = partial(self._transfer, dataloader_idx=mode.dataloader_idx)

            def make_call() -> Call:
                own = self._new_mode(split=lambda n: report.sizes)
                return _StepCall(own, method, part, report.sizes, args, transfer, self._trainer)

            self._found(check(make_call, report, self._loss_reduction))

    def _found(self, report: Report) -> None:
        before = self._reports.get(self._method)
        if before is None or not before.differences:  # of several calls, the one that differs
            self._reports[self._method] = report
        announce(report, asked=self._option is True, info=rank_zero_info, stacklevel=4)


class _InTrainer(Call):
    """A call of a LightningModule, with the Trainer's log, metrics, loggers and optimizers."""

    module: LightningModule
    trainer: Trainer

    def _surround(self, module: LightningModule, trainer: Trainer) -> None:
        self.module, self.trainer = module, trainer
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self.others = [*trainer.strategy.optimizers, *schedulers]

    @override
    @contextmanager
    def recording(self) -> Iterator[dict[Key, Any]]:
        """Records what a step logs, measures, and does with loggers; none of it reaches anything.

        Nor does it stop the training, or ask other processes. The snapshot puts metrics back.
        """
        values: dict[Key, Any] = {}
        used: Counter[str] = Counter()
        trainer: Any = self.trainer
        loggers, stops = trainer.loggers, trainer.should_stop
        trainer.loggers = [_SilentLogger(logger, used) for logger in loggers]
        log = standing_in(self.module, "log", partial(_record, values))
        # In forward mode the step's own code is on the output device, but the call's on the root.
        on_root = own_device(self.module, self.engine.devices[0])
        try:
            with trainer.strategy.as_only_process(), log, replaced(self.module, **on_root):
                yield values
            values.update({Key("logger", name): count for name, count in used.items()})
            values.update(_metric_states(self.module))
            for i, optimizer in enumerate(trainer.optimizers):
                for j, group in enumerate(optimizer.param_groups):
                    of = f"optimizer {i}" + (f", group {j}" if j else "")
                    numbers = [(n, v) for n, v in group.items() if isinstance(v, float)]
                    values.update({Key("option", f"{name} of {of}"): v for name, v in numbers})
        finally:
            trainer.loggers, trainer.should_stop = loggers, stops


class _SpreadCall(_InTrainer, ForwardCall):
    """A call that forward mode spreads."""

    def __init__(self, trainer: Trainer, *args: Any) -> None:
        super().__init__(*args)
        self._surround(self.module, trainer)


class _StepCall(_InTrainer):
    """One step of a LightningModule with a few samples, in step mode."""

    def __init__(
        self,
        mode: Mode,
        method: str,
        batch: Any,
        sizes: Sizes,
        args: tuple[Any, ...],
        transfer: Callable[[Any, torch.device], Any],
        trainer: Trainer,
    ) -> None:
        self.engine, self.sizes = mode.engine, sizes
        self._surround(mode.module, trainer)
        self._mode, self._method, self._transfer = mode, method, transfer
        self._batch, self._args = batch, args
        precision = trainer.precision_plugin
        self._context: Callable[[], AbstractContextManager[None]]
        name = method.replace("training", "train").replace("validation", "val")
        self._context = getattr(precision, f"{name}_context")
        scaler = getattr(precision, "scaler", None)
        if scaler is not None and scaler.is_enabled():
            self.loss_scale = _LOSS_SCALE

    @override
    def alone(self, shard: int | None) -> Any:
        batch = copied(self._batch)
        if shard is not None:
            batch = self.engine.cut(batch, self.sizes)[shard]
        batch = self._transfer(batch, self.engine.devices[0])
        with self._context():
            return getattr(self.module, self._method)(batch, *self._args)

    @override
    def split(self) -> Any:
        batch = self._mode.batch(copied(self._batch), 0)
        with self._context():
            return self._mode.step(self._method, batch, self._args)

    @override
    def parse(self, output: Any) -> tuple[Tensor | None, Any]:
        if output is None or self._method != "training_step":
            return None, output
        parsed = StepOutput.parse(output)
        self.counts_items = parsed.num_items is not None
        return parsed.loss, parsed.extras

    @override
    def during_backward(self) -> AbstractContextManager[None]:
        return self._mode.during_backward()


def _record(values: dict[Key, Any], name: str, value: Any, *args: Any, **options: Any) -> None:
    """Stands for `self.log`: the k-th value under a name is compared with the k-th."""
    key, count = Key("log", name), 1
    while key in values:
        count += 1
        key = Key("log", f"{name} (call {count})")
    if isinstance(value, Tensor) and value.numel() == 1:
        value = float(value.detach())
    # Of a metric the states are compared.
    values[key] = None if isinstance(value, nn.Module) else copy_to_cpu(value)


def _metric_states(module: nn.Module) -> Iterator[tuple[Key, Any]]:
    """The states of all metrics of a module; lists of tensors as one."""
    for name, metric in module.named_modules():
        for state in state_defaults(metric) if isinstance(metric, Metric) else ():
            value = getattr(metric, state)
            if isinstance(value, list) and value and all(isinstance(v, Tensor) for v in value):
                value = torch.cat([torch.atleast_1d(v) for v in value])
            yield Key("metric", f"{name}.{state}"), copy_to_cpu(value)


class _SilentLogger(ObjectProxy):
    """A logger that counts how it is used, and keeps nothing."""

    def __init__(self, logger: Any, used: Counter[str]) -> None:
        super().__init__(logger)
        self._used = used

    def __getattr__(self, name: str) -> Any:
        """The logger's attributes; methods that write are counted and write nothing."""
        if name == "experiment":
            self._used[name] += 1
            return DummyLogger().experiment
        value = super().__getattr__(name)
        writes = name.startswith("log_") or name in ("save", "finalize", "after_save_checkpoint")
        if not (writes and callable(value)):
            return value
        self._used[name] += 1
        return lambda *args, **kwargs: None
