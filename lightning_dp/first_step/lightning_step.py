"""The first-step check of a LightningModule: how its steps run for a check, and when.

Lightning runs a sanity check of validation before it trains; this is one of the split. It comes
before the first batch of each kind of step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_dp.first_step.check import Call, check
from lightning_dp.first_step.compare import Key, Report, Values, announce
from lightning_dp.first_step.first_call import FirstCalls, small_part
from lightning_dp.first_step.snapshot import NotChecked, copy_to_cpu
from lightning_dp.lightning_private import own_device
from lightning_dp.mode import Mode, Transfer
from lightning_dp.parallel.contexts import StandIn, replaced
from lightning_dp.parallel.forward import ForwardParallel
from lightning_dp.parallel.step import LossReduction, StepOutput

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import World

OPTION = "check_first_step"


@dataclass
class FirstSteps:
    """Checks the first step of each kind in one run of a Trainer.

    Attributes:
        reports: receives what is found, by the name of the step.
        option: the value of `check_first_step`.
        trainer: the Trainer that runs.
        make_mode: makes a mode for the check alone; takes options of an engine.
        transfer: moves a batch to a device through the hooks of the module.
        loss_reduction: the strategy's.
        due: the names of the steps that have not run yet.
    """

    reports: dict[str, Report]
    option: bool | Literal["auto"]
    trainer: Any
    make_mode: Callable[..., Mode]
    transfer: Transfer
    loss_reduction: LossReduction
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
        report, part = Report(OPTION, method), None
        try:
            if not always and self.trainer.fast_dev_run:
                raise NotChecked("fast_dev_run.")
            if isinstance(mode.engine, ForwardParallel):
                self._check_calls(mode.engine)
                return
            report.sizes, part = small_part(mode.engine, batch, always=always)
            if not report.sizes:
                raise NotChecked("the batch has samples for one replica alone.")
        except NotChecked as reason:
            report.skipped = str(reason)
        if world is not None:
            cannot = world.all_gather_objects(bool(report.skipped))
            if any(cannot) and not report.skipped:
                report.skipped = f"{sum(cannot)} of {len(cannot)} processes cannot check theirs."
        if not report.skipped:
            transfer = partial(self.transfer, dataloader_idx=mode.dataloader_idx)

            def make_call() -> Call:
                own = self.make_mode(executor="inorder", world=None, split=lambda n: report.sizes)
                around = _around(self.trainer)
                return StepCall(own, method, args, transfer, report.sizes, part, **around)

            check(make_call, report, self.loss_reduction)
        self._found(report)

    def _check_calls(self, engine: Any) -> None:
        def make_engine(split: Any) -> Any:
            return self.make_mode(executor="inorder", world=None, split=split).engine

        engine.first_calls = engine.first_calls or FirstCalls(
            make_engine,
            OPTION,
            always=self.option is True,
            report=self._found,
            around=_around(self.trainer),
            attributes=False,  # the mode names those
        )

    def _found(self, report: Report) -> None:
        before = self.reports.get(self._method)
        if before is None or not before.differences:  # of several calls, the one that differs
            self.reports[self._method] = report
        announce(report, asked=self.option is True, info=rank_zero_info, stacklevel=4)


class StepCall(Call):
    """One step of a LightningModule, in step mode."""

    def __init__(
        self,
        mode: Mode,
        method: str,
        args: tuple[Any, ...],
        transfer: Transfer,
        *rest: Any,
        **kw: Any,
    ) -> None:
        super().__init__(mode.module, mode.engine, *rest, **kw)
        self._mode, self._method, self._args, self._transfer = mode, method, args, transfer
        name = method.replace("training", "train").replace("validation", "val")
        self._context = getattr(mode.module.trainer.precision_plugin, f"{name}_context")

    @override
    def to_root(self, batch: Any) -> Any:
        return self._transfer(batch, self.engine.devices[0])

    @override
    def on_root(self, batch: Any) -> Any:
        with self._context():
            return getattr(self.module, self._method)(batch, *self._args)

    @override
    def split(self, batch: Any) -> Any:
        batch = self._mode.batch(batch, 0)
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


# The Trainer around a call


def _around(trainer: Any) -> dict[str, Any]:
    """What is recorded, and what is put back, around a call of a Trainer's module."""
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    others = [*trainer.strategy.optimizers, *schedulers]
    return {"recording": partial(_recording, trainer), "others": others}


@contextmanager
def _recording(trainer: Any) -> Iterator[Values]:
    """Records what a step logs and does with loggers and optimizers' options.

    None of it reaches anything, stops the training, or asks other processes.
    """
    module, root = trainer.lightning_module, trainer.strategy.root_device
    values: Values = {}
    used: Counter[str] = Counter()
    loggers, stops = trainer.loggers, trainer.should_stop
    trainer.loggers = [_SilentLogger(logger, used) for logger in loggers]
    log = replaced(module, log=StandIn(module, "log", partial(_record, values)))
    # In forward mode the step's own code is on the output device, but the call's on the root.
    on_root = replaced(module, **own_device(module, root))
    try:
        with replaced(trainer.strategy, world=None), log, on_root:
            yield values
        values.update({Key("logger", name): count for name, count in used.items()})
        for i, optimizer in enumerate(trainer.optimizers):
            for j, group in enumerate(optimizer.param_groups):
                of = f"optimizer {i}" + (f", group {j}" if j else "")
                numbers = {f"{n} of {of}": v for n, v in group.items() if isinstance(v, float)}
                values.update({Key("option", name): v for name, v in numbers.items()})
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
