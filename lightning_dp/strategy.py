"""Lightning's face of the engine: each hook of the strategy is one call into it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_dp.auto_split import AutoSplitSteps
from lightning_dp.first_step import FirstSteps
from lightning_dp.layer_sync import replicas_own
from lightning_dp.lightning_private import devices_asked_for, layer_sync, set_layer_sync
from lightning_dp.measured import MeasuredMixin
from lightning_dp.mode import Mode
from lightning_dp.options import OptionsMixin
from lightning_dp.parallel.apply import optimizer_threads
from lightning_dp.parallel.check import Report
from lightning_dp.parallel.contexts import replaced
from lightning_dp.parallel.split import Auto
from lightning_dp.user_hooks import has_user_hooks


class DataParallelMixin(MeasuredMixin):
    """The strategy for either of Lightning's packages; its options are in `OptionsMixin`."""

    strategy_name = "dp_custom"
    package: ClassVar[str]
    """The package whose Trainer it is for."""

    first_step: Mapping[str, Report] = MappingProxyType({})
    """What `check_first_step` has found in the latest run, by the name of the step."""

    _mode: Mode | None = None  # while a Trainer runs on several devices
    _first_steps: FirstSteps | None = None  # while a Trainer runs
    _asks_why = False  # Lightning, about a training step that has returned None

    def __getstate__(self) -> dict[str, Any]:
        """Replicas and threads stay behind: a copy is as between two fits, until it is set up."""
        state = {**super().__getstate__(), "_mode": None, "_auto": None}
        return {**state, "_first_steps": None}

    # Setting up and tearing down

    @override
    def model_to_device(self) -> None:
        cast(LightningModule, self.model).to(self.root_device)

    @override
    def connect(self, model: LightningModule) -> None:
        """Takes the module, before any data is loaded."""
        self.check_costs(model)
        super().connect(model)

    @override
    def setup(self, trainer: Trainer) -> None:
        devices = cast(list[torch.device], self.parallel_devices)
        self._check_devices(trainer)
        self._close()  # what an interrupted end of an earlier run has left
        super().setup(trainer)
        if self._world is not None:
            _check_callbacks(trainer)
            self.begin_together(self._world, self.options_of_all, trainer)
        if len(devices) == 1 and self._world is None:
            return  # every hook is then the base class's: plain Lightning on one device
        plugin = layer_sync(self)
        if plugin is not None:
            set_layer_sync(self, replicas_own(plugin))
            layer_sync(self).apply(cast(LightningModule, self.lightning_module))
        why = self._why_forward(cast(LightningModule, self.lightning_module))
        if why:
            name = type(self.lightning_module).__name__
            rank_zero_info(f"{name} runs in forward mode, as {why}.")
        self._mode = self._new_mode()
        if self._world is None and isinstance(self.split_policy, Auto):
            self._auto = AutoSplitSteps(self._mode, self.split_policy, trainer)
        profiler = cast(Any, trainer).profiler
        if type(profiler).__name__ == "SimpleProfiler":  # others see what torch.profiler sees
            self._mode.engine.profile = profiler.profile
        if trainer.state.fn == TrainerFn.FITTING:
            self.usage = self._mode.engine.meter.usage
        reports: dict[str, Report] = {}
        self.first_step = reports
        if self._check_first_step:
            self._first_steps = FirstSteps(
                reports,
                self._check_first_step,
                trainer,
                self._new_mode,
                super().batch_to_device,
                self._loss_reduction,
                self.as_only_process,
            )

    def _check_devices(self, trainer: Trainer) -> None:
        asked, own = devices_asked_for(trainer), self.machine_devices or []
        if "devices" in self.given_options and asked not in (None, len(own)):
            raise ValueError(
                f"devices: expected as many as Trainer(devices=...) names, {asked}, got "
                f"{[*map(str, own)]}. Leave out one of the two: the strategy's devices are taken "
                "in place of the Trainer's."
            )

    @override
    def on_exception(self, exception: BaseException) -> None:
        try:
            super().on_exception(exception)
        finally:
            self._close()

    @override
    def teardown(self) -> None:
        self._close()
        if layer_sync(self) is not None and self.lightning_module is not None:
            layer_sync(self).revert(self.lightning_module)
        super().teardown()

    # Steps

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Does what the mode does with a batch; with a device, moves it there as Lightning does."""
        if self._mode is None or device is not None:
            return super().batch_to_device(batch, device, dataloader_idx)
        if self._auto is not None and not self._is_to_be_checked(self._auto):
            return self._auto.batch(batch, dataloader_idx, super().batch_to_device)
        return self._mode.batch(batch, dataloader_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        output = self._step("training_step", *args, **kwargs)
        if output is None:  # after a step by hand Lightning does not ask
            module = cast(LightningModule, self.lightning_module)
            self._asks_why = module.automatic_optimization
        return output

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("validation_step", *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("test_step", *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        output = self._step("predict_step", *args, **kwargs)
        return self.own_rows(output, sum(self.last_sizes))

    @override
    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._mode is None:
            return super().backward(closure_loss, *args, **kwargs)
        if self._auto is not None and self._auto.is_alone:
            return self._auto.backward(partial(super().backward, closure_loss, *args, **kwargs))
        return self._backward(self._mode, closure_loss, *args, **kwargs)

    def _backward(self, mode: Mode, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if getattr(self.precision_plugin, "scaler", None) is not None:
            closure_loss = mode.to_be_scaled(closure_loss)
        with mode.during_backward():
            try:
                return super().backward(closure_loss, *args, **kwargs)
            except torch.OutOfMemoryError as error:
                mode.recover_backward(error, self.precision_plugin.train_step_context)
        # What Lightning would have done after a backward that did not end at once.
        module = cast(LightningModule, self.lightning_module)
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any
    ) -> Any:
        mode = self._mode
        if mode is None:
            return super().optimizer_step(optimizer, closure, *args, **kwargs)
        engine, num_threads = mode.engine, torch.get_num_threads()
        is_spread = (
            engine.on_cpu and engine.meter.kind and engine.executor.is_in_threads(engine.meter.kind)
        )

        def with_all_gradients() -> Any:
            if is_spread:  # an optimizer may call this several times
                torch.set_num_threads(num_threads)
            result = closure()
            if self._auto is None or not self._auto.is_alone:
                # of a training step that returned None, no backward has come
                engine.reducer.sum_waiting()
                if is_spread:
                    torch.set_num_threads(optimizer_threads(optimizer))
            return result if self._world is None else mode.loss_of_closure(result)

        try:
            return super().optimizer_step(optimizer, with_all_gradients, *args, **kwargs)
        finally:
            if is_spread:
                torch.set_num_threads(num_threads)

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        """While it lasts, processes keep their gradient sums; the next backward adds them up."""
        with super().block_backward_sync():
            if self._mode is None:
                yield
                return
            with replaced(self._mode.engine.reducer, accumulating=True):
                yield

    # Callbacks may write weights in ways that leave no trace, and they do it at these times.

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._resync()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if batch_idx == 0:
            self._resync()
            if self._mode is not None:
                self._mode.engine.frozen_may_change = has_user_hooks(self._mode.module.trainer)

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._resync()

    def _resync(self) -> None:
        if self._mode is not None:
            self._mode.engine.resync()

    @contextmanager
    def as_only_process(self) -> Iterator[None]:
        """While it lasts, it asks no other process."""
        world, self._world = self._world, None
        try:
            yield
        finally:
            self._world = world

    # A training step may return None, and its batch is skipped. Lightning refuses that where it
    # finds more than one process: some would wait for gradients that others do not have. Here None
    # comes from all processes or from none. So there is one process when Lightning asks for this
    # reason: it is the first that asks after the step.

    @property
    @override
    def world_size(self) -> int:
        if self._asks_why:
            self._asks_why = False
            return 1
        return super().world_size

    def _step(self, method: str, *args: Any, **kwargs: Any) -> Any:
        own = partial(getattr(super(), method), *args, **kwargs)
        if self._mode is None:
            return own()
        batch, *rest = (*args, *kwargs.values())
        several = partial(self._step_of_all, self._mode, method, batch, tuple(rest))
        auto = self._auto
        output = several() if auto is None else auto.step(method, batch, own, several)
        self.last_sizes = self._mode.engine.last_sizes
        return output

    def _step_of_all(self, mode: Mode, method: str, batch: Any, rest: tuple[Any, ...]) -> Any:
        if method != "training_step" and rest[:1] in ((), (0,)):
            mode.engine.resync()
        checks = self._first_steps
        if checks is not None and method in checks.due:
            checks.check(mode, method, batch, rest, self._world)
        name = method.replace("training", "train").replace("validation", "val")
        with getattr(self.precision_plugin, f"{name}_context")():
            return mode.step(method, batch, rest)

    def _is_to_be_checked(self, auto: AutoSplitSteps) -> bool:
        """Whether the batch that is being moved is the first of its kind of step."""
        checks = self._first_steps
        return checks is not None and auto.next_step in checks.due

    def _close(self) -> None:
        if self._mode is not None:
            self._mode.close()
        self._mode = self._auto = self._first_steps = None

    def __repr__(self) -> str:
        """Options and devices; until a Trainer has it, which can: Lightning refuses others so."""
        options = ", ".join(f"{option}={value}" for option, value in self.given_options.items())
        name, other = f"{type(self).__qualname__}({options})", "lightning"
        if self.accelerator is not None:
            return f"<{name} on {', '.join(self.replica_names)}>"
        twin = "lightning_dp.DataParallelStrategy"
        if self.package == other:
            other, twin = "pytorch_lightning", "lightning_dp.pytorch_lightning.DataParallelStrategy"
        return f"<{name} for a Trainer of {self.package}; one of {other} takes {twin}>"

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        name, text = cls.strategy_name, "Data parallelism in one process"
        if name not in strategy_registry:
            strategy_registry.register(name, cls, text)
            forward = f"{text}: forward mode"
            strategy_registry.register(f"{name}_forward", cls, forward, mode="forward")


def _check_callbacks(trainer: Any) -> None:
    """Refuses what cannot be in several processes."""
    for callback in trainer.callbacks:
        if any(kind.__name__ == "BatchSizeFinder" for kind in type(callback).__mro__):
            raise ValueError(
                f"Expected no {type(callback).__qualname__} in several processes, as each of them "
                "would look for a checkpoint that the first one alone has written. Look for the "
                "batch size with one process: it is that of all samples together."
            )


class DataParallelStrategy(DataParallelMixin, ParallelStrategy):  # noqa: D101  # it is `__doc__`
    __doc__ = OptionsMixin.__doc__

    package = "lightning"
