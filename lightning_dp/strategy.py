"""Lightning's face of the engine: each hook of the strategy is one call into it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, cast

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from typing_extensions import override

from lightning_dp.journal import Journals
from lightning_dp.one_process import OneProcessStrategy
from lightning_dp.parallel.apply import check_executor
from lightning_dp.parallel.data_parallel import StepParallel
from lightning_dp.parallel.devices import resolve_devices, resolve_output_device
from lightning_dp.parallel.loss import LOSS_REDUCTIONS
from lightning_dp.parallel.reduce import BUFFERS
from lightning_dp.parallel.shards import DeviceUsage, Shards
from lightning_dp.parallel.split import check_split, split_policy

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class DataParallelStrategy(OneProcessStrategy):
    """One process, several devices, and the same numbers as on one device.

    Every batch is split over the devices. Each step runs on all of them at once, on replicas of
    the module that are built once and kept; the losses become one loss, the gradients are summed
    into the user's own module on the root device (the first one), where the optimizer lives.
    Outputs, logs and metrics are those of the whole batch.

    Registered as `"dp_custom"`: after `import lightning_dp`, `Trainer(strategy="dp_custom",
    devices=4)` uses the defaults. With one device it is Lightning's single-device strategy.

    Args:
        devices: the devices, root first, in place of `Trainer(devices=...)`. An entry may repeat
            for several replicas on one device: `["cuda:0", "cuda:0"]`, `["cpu"] * 4`. Integers
            are ids of the machine's accelerator.
        output_device: where loss, logs and gathered outputs end up. None for the root device, a
            name (`"cuda:1"`, `"cpu"`), a `torch.device`, or an integer: a device's id (on the
            CPU, a replica's index).
        split: how samples are shared out. `"even"`: sizes differ by at most one, larger ones
            first, and with fewer samples than devices some are idle. `"chunk"`: the sizes of
            `torch.chunk`, as in `torch.nn.DataParallel`.
        weights: fixed shares, one number of at least 0 per device: `[1, 3, 3, 3]`. Only their
            ratios matter; 0 leaves a device idle. None for equal shares.
        loss_reduction: what the loss of `training_step` is over its samples, `"mean"` or `"sum"`.
            A mean over other things (valid tokens, say) is exact if the step returns
            `{"loss": mean, "num_items": how_many}`.
        buffers: which buffers the module keeps after a training step, running statistics of batch
            norm for instance: those of the `"first"` replica (as in DDP), or the `"mean"` of all,
            weighted by shard size.
        executor: how replicas run: in worker `"threads"`, `"inorder"` on the main thread (for a
            debugger), or `"auto"`, which measures both in the first steps and keeps the faster.
        accelerator: as for every Lightning strategy; the Trainer sets it.
        cluster_environment: as for every Lightning strategy; the Trainer sets it.
        checkpoint_io: as for every Lightning strategy.
        precision_plugin: as for every Lightning strategy.

    Raises:
        ValueError: an argument is out of its range; the message says what was expected. What
            depends on the number of devices is checked when the Trainer is made.
    """

    strategy_name = "dp_custom"

    def __init__(
        self,
        *,
        devices: Sequence[int | str | torch.device] | None = None,
        output_device: int | str | torch.device | None = None,
        split: str = "even",
        weights: Sequence[float] | None = None,
        loss_reduction: Literal["mean", "sum"] = "mean",
        buffers: Literal["first", "mean"] = "first",
        executor: Literal["auto", "threads", "inorder"] = "auto",
        accelerator: Accelerator | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        check_split(split, weights)
        check_executor(executor)
        _check_choice("loss_reduction", loss_reduction, LOSS_REDUCTIONS)
        _check_choice("buffers", buffers, BUFFERS)
        self._output_device = output_device
        self._weights = weights
        self._split = split
        self._engine_options: dict[str, Any] = {
            "loss_reduction": loss_reduction,
            "buffers": buffers,
            "executor": executor,
        }
        self._engine: StepParallel | None = None
        self._batch: Any = None
        self._shards: Shards | None = None
        self._dataloader_idx = 0
        self._last_sizes: tuple[int, ...] = ()
        self._usage: list[DeviceUsage] = []
        super().__init__(
            accelerator=accelerator,
            parallel_devices=None if devices is None else resolve_devices(devices),
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )

    # Devices

    @property
    @override
    def parallel_devices(self) -> list[torch.device] | None:
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, parallel_devices: list[torch.device] | None) -> None:
        """Takes the devices, ours or the Trainer's, and checks what depends on them."""
        self._parallel_devices = parallel_devices
        if parallel_devices:
            self._policy = split_policy(self._split, self._weights, len(parallel_devices))
            self._resolved_output = resolve_output_device(self._output_device, parallel_devices)

    @property
    @override
    def root_device(self) -> torch.device:
        if not self.parallel_devices:
            raise RuntimeError(
                "Expected the strategy to be used in a Trainer, which gives it its devices, or "
                "DataParallelStrategy(devices=[...])."
            )
        return self.parallel_devices[0]

    @property
    def output_device(self) -> torch.device:
        """Where loss, logs and gathered outputs end up."""
        return self._resolved_output

    @property
    def last_sizes(self) -> tuple[int, ...]:
        """Samples per device in the latest step."""
        return self._last_sizes

    @property
    def usage(self) -> list[DeviceUsage]:
        """What every device did in the training steps of the latest fit."""
        return self._usage

    # Setting up and tearing down

    @override
    def model_to_device(self) -> None:
        cast(LightningModule, self.model).to(self.root_device)

    @override
    def setup(self, trainer: Trainer) -> None:
        module = cast(LightningModule, self.lightning_module)
        devices = cast(list[torch.device], self.parallel_devices)
        if len(devices) > 1:
            self._check_supported(module)
        super().setup(trainer)
        if len(devices) == 1:
            return  # every hook is then the base class's: plain Lightning on one device
        journals = Journals(module, devices, self.output_device)
        self._engine = StepParallel(
            module,
            devices,
            output_device=self.output_device,
            split=self._policy,
            rules=journals,
            around=journals.around,
            **self._engine_options,
        )
        if trainer.state.fn == TrainerFn.FITTING:
            self._usage = self._engine.usage

    @override
    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        super().load_model_state_dict(checkpoint, strict=strict)
        self._resync()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._close()

    @override
    def teardown(self) -> None:
        self._close()
        super().teardown()

    # Steps

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Leaves the batch where it is: the step cuts it first and then moves each shard.

        Hooks and callbacks between here and the step see the whole batch, and may still change it.
        """
        if self._engine is None or device is not None:
            return super().batch_to_device(batch, device, dataloader_idx)
        self._batch, self._shards, self._dataloader_idx = batch, None, dataloader_idx
        return batch

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._engine is None:
            return super().training_step(*args, **kwargs)
        with self.precision_plugin.train_step_context():
            return self._step(self._engine.train, "training_step", *args, *kwargs.values())

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._engine is None:
            return super().validation_step(*args, **kwargs)
        with self.precision_plugin.val_step_context():
            return self._step(self._engine.evaluate, "validation_step", *args, *kwargs.values())

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._engine is None:
            return super().test_step(*args, **kwargs)
        with self.precision_plugin.test_step_context():
            return self._step(self._engine.evaluate, "test_step", *args, *kwargs.values())

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._engine is None:
            return super().predict_step(*args, **kwargs)
        with self.precision_plugin.predict_step_context():
            return self._step(self._engine.evaluate, "predict_step", *args, *kwargs.values())

    @contextlib.contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        """While it lasts, gradients accumulate on the replicas; the next backward sums them all."""
        if self._engine is not None:
            self._engine.backward.accumulating = True
        try:
            yield
        finally:
            if self._engine is not None:
                self._engine.backward.accumulating = False

    # Callbacks may write weights in ways that leave no trace, and they do it at these times.

    @override
    def on_train_start(self) -> None:
        self._resync()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self._resync()

    @override
    def on_validation_end(self) -> None:
        self._resync()

    def _step(self, run: Callable[..., Any], method: str, batch: Any, *args: Any) -> Any:
        engine = cast(StepParallel, self._engine)
        is_evaluation_start = method != "training_step" and args[:1] in ((), (0,))
        if is_evaluation_start:
            engine.resync()
        if self._shards is None or batch is not self._batch:
            self._batch, self._shards = batch, engine.scatter(batch, self._transfer)
        self._last_sizes = self._shards.sizes
        return run(method, self._shards, *args)

    def _transfer(self, shard: Any, device: torch.device) -> Any:
        return super().batch_to_device(shard, device, self._dataloader_idx)

    def _resync(self) -> None:
        if self._engine is not None:
            self._engine.resync()

    def _close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = self._batch = self._shards = None

    def _check_supported(self, module: LightningModule) -> None:
        if not module.automatic_optimization:
            raise ValueError(
                f"{type(module).__qualname__}.automatic_optimization: expected True with several "
                "devices under dp_custom, got False. Optimise automatically, or use devices=1."
            )
        if self._layer_sync is not None:
            raise ValueError(
                "Trainer(sync_batchnorm=...): expected False under dp_custom, got True. Leave it "
                "out (running statistics then follow `buffers=`), or use devices=1."
            )
        for step in _STEPS:
            if is_param_in_hook_signature(getattr(module, step), "dataloader_iter", explicit=True):
                raise ValueError(
                    f"{type(module).__qualname__}.{step}: expected (self, batch, batch_idx), got "
                    "dataloader_iter: dp_custom has to see a batch to split it. Take the batch."
                )

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(
                cls.strategy_name, cls, description="Data parallelism in one process"
            )


def _check_choice(key: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{key}: expected one of {list(choices)}, got {value!r}.")
