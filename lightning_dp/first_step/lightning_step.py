"""The first-step check of a LightningModule: how its steps run for a check, and when.

Lightning runs a sanity check of validation before it trains; this is one of the split. It comes
before the first batch of each kind of step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from lightning_dp.first_step.call import Call
from lightning_dp.first_step.compare import check
from lightning_dp.first_step.first_call import FirstCalls, small_part
from lightning_dp.first_step.report import Key, Report, Values, announce
from lightning_dp.first_step.snapshot import copy_to_cpu
from lightning_dp.modes import Mode, Transfer
from lightning_dp.parallel.contexts import StandIn, replaced
from lightning_dp.parallel.forward import ForwardParallel
from lightning_dp.parallel.scatter import tree
from lightning_dp.parallel.step import EvaluationStep, StepOutput, TrainingStep

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import World

OPTION = "check_first_step"


@dataclass
class FirstSteps:
    """Checks the first step of each kind in one run of a Trainer.

    Attributes:
        reports: receives each report, by the name of the step.
        option: the value of `check_first_step`.
        trainer: the Trainer that runs.
        make_mode: makes a mode for the check alone; takes options of an engine.
        transfer: moves a batch to a device through the hooks of the module.
        due: the names of the steps that have not run yet.
    """

    reports: dict[str, Report]
    option: bool | Literal["auto"]
    trainer: Any
    make_mode: Callable[..., Mode]
    transfer: Transfer
    due: set[str] = field(
        default_factory=lambda: {f"{x}_step" for x in ("training", "validation", "test", "predict")}
    )
    _method: str = ""  # whose calls `FirstCalls` checks now

    def check(
        self, mode: Mode, method: str, batch: Any, args: tuple[Any, ...], world: World | None
    ) -> None:
        """Checks a step that is about to run; in forward mode, the calls that it will spread.

        With several processes, each checks its own part of the batch if all of them can.
        """
        self.due.discard(method)
        self._method, always = method, self.option is True
        report, part, engine = Report(OPTION, method), None, mode.engine
        if not always and self.trainer.fast_dev_run:
            report.skipped = "fast_dev_run."
        elif isinstance(engine, ForwardParallel):
            engine.first_calls = engine.first_calls or FirstCalls(
                self._make_engine, OPTION, always, self._found, _around(self.trainer)
            )
            return
        else:
            part = small_part(report, engine, batch, always=always)
            if not (report.sizes or report.skipped):
                report.skipped = "the batch has samples for one replica alone."
        if world is not None:
            cannot = world.all_gather_objects(bool(report.skipped))
            if any(cannot) and not report.skipped:
                report.skipped = f"{sum(cannot)} of {len(cannot)} processes cannot check theirs."

        def make_call() -> Call:
            engine = self._make_engine()
            name = method.replace("training", "train").replace("validation", "val")
            transfer = partial(self.transfer, dataloader_idx=mode.dataloader_idx)
            kind = TrainingStep if method == "training_step" else EvaluationStep
            return Call(
                engine,
                report.sizes,
                part,
                make=partial(kind, engine, method, args, transfer),
                parse=partial(_parse, method),
                context=getattr(self.trainer.precision_plugin, f"{name}_context"),
                **_around(self.trainer),
            )

        check(make_call, report)
        self._found(report)

    def _make_engine(self) -> Any:
        return self.make_mode(executor="inorder", world=None).engine

    def _found(self, report: Report) -> None:
        before = self.reports.get(self._method)
        if before is None or not before.differences:  # of several calls, the one that differs
            self.reports[self._method] = report
        announce(report, asked=self.option is True, info=rank_zero_info)


def _parse(method: str, output: Any) -> tuple[Tensor | None, list[tuple[tree.Path, Any]]]:
    """The loss that a step has returned, and the leaves of the rest."""
    loss = None
    if output is not None and method == "training_step":
        loss, output = StepOutput.parse(output)[0::3]
    return loss, [] if output is None else tree.places(output)


# The Trainer around a call


def _around(trainer: Any) -> dict[str, Any]:
    """The recording around a call of a Trainer's module, and what is put back after it."""
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    others = {"optimizer": trainer.strategy.optimizers, "scheduler": schedulers}
    return {"recording": partial(_recording, trainer), "others": others}


@contextmanager
def _recording(trainer: Any) -> Iterator[Values]:
    """Records what a step logs, and how it uses loggers.

    None of it reaches anything, stops the training, or asks other processes.
    """
    module = trainer.lightning_module
    values: Values = {}
    used: Counter[str] = Counter()
    loggers, stops = trainer.loggers, trainer.should_stop
    trainer.loggers = [_SilentLogger(logger, used) for logger in loggers]
    log = replaced(module, log=StandIn(module, "log", partial(_record, values)))
    try:
        with replaced(trainer.strategy, world=None), log:
            yield values
        values.update({Key("logger", name): count for name, count in used.items()})
    finally:
        trainer.loggers, trainer.should_stop = loggers, stops


def _record(values: Values, name: str, value: Any, *args: Any, **options: Any) -> None:
    """Stands for `self.log`: the k-th value under a name is compared with the k-th."""
    while (key := Key("log", name)) in values:
        name += " (again)"
    if isinstance(value, Tensor) and value.numel() == 1:
        value = float(value.detach())
    values[key] = None if isinstance(value, nn.Module) else copy_to_cpu(value)  # no metric's


class _SilentLogger:
    """Stands for a logger: counts how it is used, and keeps nothing."""

    def __init__(self, logger: Any, used: Counter[str]) -> None:
        self._logger, self._used = logger, used

    @property  # type: ignore[misc]  # it cannot be set
    def __class__(self) -> type[Any]:
        """The logger's, for `isinstance`."""
        return type(self._logger)

    def __getattr__(self, name: str) -> Any:
        """The logger's attributes; calls of its methods are counted and do nothing."""
        value = DummyLogger().experiment if name == "experiment" else getattr(self._logger, name)
        if not callable(value) and name != "experiment":
            return value
        self._used[name] += 1
        return value if name == "experiment" else lambda *args, **kwargs: None
