"""Lightning's face of the engine: each hook of the strategy is one call into it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_dp.alone import AloneSteps
from lightning_dp.between_steps import BetweenStepsMixin, check_callbacks
from lightning_dp.first_step import FirstStep, check_first_step
from lightning_dp.hints import hint_more_devices
from lightning_dp.layer_sync import replicas_own
from lightning_dp.lightning_private import layer_sync, set_layer_sync
from lightning_dp.measured import MeasuredMixin
from lightning_dp.modes import Mode
from lightning_dp.options import OptionsMixin
from lightning_dp.parallel.contexts import Surroundings, replaced
from lightning_dp.parallel.generated import context
from lightning_dp.parallel.likely_cause import note_kept_tensors
from lightning_dp.parallel.split import CostSplit
from lightning_dp.parallel.workers import PARTICIPANT, Calls, OneThread, current_participant
from lightning_dp.processes import begin_alike, check_options, open_fetcher


class DataParallelMixin(BetweenStepsMixin, MeasuredMixin):
    """The strategy for either of Lightning's packages; its options are in `OptionsMixin`."""

    strategy_name = "dp_custom"
    package: ClassVar[str]
    """The package whose Trainer it is for."""

    first_step: FirstStep | None = None
    """What `check_first_step` has found in the latest fit; None if it has not looked yet."""

    def __getstate__(self) -> dict[str, Any]:
        """Replicas and threads stay behind: a copy is as between two fits, until it is set up."""
        return {**super().__getstate__(), "_mode": None, "_alone": None}

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
        self._close()  # what an interrupted end of an earlier run has left
        super().setup(trainer)
        if self._world is not None:
            check_callbacks(trainer)
            check_options(self.options_of_all, trainer, self._world)
            self.open_slices(self._world)
            begin_alike(cast(LightningModule, self.lightning_module), self._world)
        if len(devices) == 1 and self._world is None:
            if trainer.state.fn == TrainerFn.FITTING and "devices" not in self.given_options:
                hint_more_devices(self.accelerator, devices[0])
            return  # every hook is then the base class's: plain Lightning on one device
        plugin = layer_sync(self)
        if plugin is not None:
            set_layer_sync(self, replicas_own(plugin))
            layer_sync(self).apply(cast(LightningModule, self.lightning_module))
        with Surroundings():
            self._mode = self._new_mode()
        self._alone = self._new_look(self._mode, trainer)
        profiler = cast(Any, trainer).profiler
        if type(profiler).__name__ == "SimpleProfiler":  # others see what torch.profiler sees
            self._mode.engine.ranges.profile = profiler.profile
        if trainer.state.fn == TrainerFn.FITTING:
            self.usage = self._mode.engine.meter.usage
            self.first_step = None

    @override
    def on_exception(self, exception: BaseException) -> None:
        try:
            super().on_exception(exception)
            if self._mode is not None:
                module = cast(LightningModule, self.lightning_module)
                note_kept_tensors(exception, module, set(self._mode.engine.devices))
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
        """Does what the mode says; to another device, as asked for explicitly, it moves.

        A step that has taken a batch by itself may ask for it: then to its replica's device.
        """
        participant = current_participant() if PARTICIPANT.get() else None
        if participant is not None:  # hooks are the root's: on the host, one after another
            own = (batch, device or participant.device, dataloader_idx)
            return participant.meet("batch_to_device", own, self._batches_to_devices)
        if self._mode is None or device is not None:
            return super().batch_to_device(batch, device, dataloader_idx)
        is_to_check = self._check_first_step and self.first_step is None
        if isinstance(self._alone, AloneSteps) and not is_to_check:
            return self._alone.batch(batch, dataloader_idx, super().batch_to_device)
        return self._mode.batch(batch, dataloader_idx)

    def _batches_to_devices(self, _: Calls, arguments: list[Any]) -> list[Any]:
        move = super().batch_to_device
        return [move(*own) for own in arguments]

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
        if self._alone is None or self._alone.is_done:
            return self._backward(self._mode, closure_loss, *args, **kwargs)
        own = super().backward if self._alone.is_alone else partial(self._backward, self._mode)
        return self._alone.backward(partial(own, closure_loss, *args, **kwargs))

    def _backward(self, mode: Mode, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if getattr(self.precision_plugin, "scaler", None) is not None:
            closure_loss = mode.to_be_scaled(closure_loss)
        with Surroundings(), mode.during_backward():
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
        engine = mode.engine
        is_spread = engine.on_cpu and engine.executor.is_in_threads(engine.meter.kind)
        one_thread = OneThread() if is_spread and engine.meter.kind else None

        def with_all_gradients() -> Any:
            if one_thread is not None:  # an optimizer may call this several times
                one_thread.end()
            result = closure()
            if self._alone is None or not self._alone.is_alone:
                with Surroundings():  # of a training step that returned None, no backward has come
                    engine.reducer.reduce_waiting()
                if one_thread is not None:
                    one_thread.take_for(optimizer)
            return result if self._world is None else mode.of_closure(result)

        if one_thread is None:
            return super().optimizer_step(optimizer, with_all_gradients, *args, **kwargs)
        with Surroundings(), one_thread:
            return super().optimizer_step(optimizer, with_all_gradients, *args, **kwargs)

    @context
    @override
    def block_backward_sync(self) -> Iterator[None]:  # type: ignore[override]  # is no class
        """While it lasts, gradients accumulate on the replicas; the next backward sums them all.

        Unless the user's code looks at them after each: then every backward sums them.
        """
        with super().block_backward_sync():
            # Not where a replica says so: there every backward is a joint one.
            if self._mode is None or current_participant() or self.are_gradients_seen():
                yield
                return
            with replaced(self._mode.engine.reducer, accumulating=True):
                yield

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if batch_idx == 0:
            self._resync()

    def _step(self, method: str, *args: Any, **kwargs: Any) -> Any:
        own = partial(getattr(super(), method), *args, **kwargs)
        if self._mode is None:
            return own()
        batch, *rest = (*args, *kwargs.values())
        if self._world is not None:
            open_fetcher(batch, self._world)
        several = partial(self._step_of_all, self._mode, method, batch, tuple(rest))
        alone = self._alone
        output = (
            several() if alone is None or alone.is_done else alone.step(method, batch, own, several)
        )
        self.last_sizes = self._mode.engine.last_sizes
        return output

    def _step_of_all(self, mode: Mode, method: str, batch: Any, rest: tuple[Any, ...]) -> Any:
        if method != "training_step" and rest[:1] in ((), (0,)):
            mode.engine.resync()
        if method == "training_step" and self._check_first_step and self.first_step is None:
            self._compare_first_step(mode, batch, rest)
        name = method.replace("training", "train").replace("validation", "val")
        with Surroundings(), getattr(self.precision_plugin, f"{name}_context")():
            return mode.step(method, batch, rest)

    def _compare_first_step(self, mode: Mode, batch: Any, args: tuple[Any, ...]) -> None:
        # A split that learns would learn from the check's steps.
        policy = self.split_policy
        split = policy if isinstance(policy, CostSplit) else lambda n: policy(n)
        # Of several processes each looks at its own part of the batch, and asks no other.
        with Surroundings(), mode.engine.meter.unmeasured(), self.as_only_process():
            self.first_step = check_first_step(
                cast(LightningModule, self.lightning_module),
                batch,
                args,
                make_mode=partial(self._new_mode, split=split, executor="inorder"),
                loss_reduction=self._loss_reduction,
                transfer=super().batch_to_device,
                precision=self.precision_plugin,
                devices=[*mode.engine.devices, mode.engine.output_device],
            )
        mode.engine.resync()
        self.first_step.tell()

    def _close(self) -> None:
        if self._mode is not None:
            with Surroundings():
                self._mode.engine.close()
        self._mode = self._alone = self._are_seen = None

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


class DataParallelStrategy(DataParallelMixin, ParallelStrategy):  # noqa: D101  # it is `__doc__`
    __doc__ = OptionsMixin.__doc__

    package = "lightning"
