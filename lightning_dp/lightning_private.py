"""Private names of Lightning and torchmetrics: all that the package uses stand here, nowhere else.

A release may take any of them away. What asks for it then raises an error that names it and
the release, unless it is said below what happens instead.
"""

from __future__ import annotations

import atexit
import sys
from typing import Any, cast

import torch
from torch import Tensor, nn


def found(owner: Any, name: str) -> Any:
    """A private attribute of an object, or a RuntimeError that names the release without it."""
    if not hasattr(owner, name):
        package = type(owner).__module__.partition(".")[0]
        release = getattr(sys.modules.get(package), "__version__", "of an unknown release")
        raise RuntimeError(
            f"Expected {type(owner).__qualname__} to have {name}, got {package} {release} without "
            "it. Install lightning 2.6 and torchmetrics 1.9, with which lightning_dp has been "
            "tested, or a later lightning_dp."
        )
    return getattr(owner, name)


# Modules


def own_device(module: nn.Module, device: torch.device) -> dict[str, torch.device]:
    """What makes `module.device` a device, put into its `__dict__`; nothing if it has no such.

    Lightning sets it when it moves a module, and a replica is not moved. In a release without the
    name there is no error: `self.device` is the root device on every replica.
    """
    return {"_device": device} if "_device" in vars(module) else {}


def state_defaults(metric: nn.Module) -> dict[str, Any]:
    """What the states of a metric are before its first update, by their names."""
    return cast(dict[str, Any], found(metric, "_defaults"))


def unused_state(metric: nn.Module, device: torch.device) -> dict[str, Any]:
    """What makes a metric on a device one that has seen nothing, put into its `__dict__`.

    In a release without one of these names (but `_defaults`) it is set, and no code reads it.
    """
    defaults: dict[str, Any] = {
        name: value.to(device) if isinstance(value, Tensor) else []
        for name, value in state_defaults(metric).items()
    }
    states: dict[str, Any] = {
        n: v.clone() if isinstance(v, Tensor) else [] for n, v in defaults.items()
    }
    counts = {"_update_count": 0, "_computed": None, "_forward_cache": None}
    return {"_defaults": defaults, **states, **counts}


def keep_batch_value(metric: nn.Module, value: Any) -> None:
    """Lets a metric be logged with this value of a batch, as after a call of its `forward`."""
    found(metric, "_forward_cache")
    metric._forward_cache = value


def results_of(trainer: Any) -> Any:
    """What takes the values that the running loop's steps log; None where nothing can be logged."""
    return found(trainer, "_results")


# Strategies


def layer_sync(strategy: Any) -> Any:
    """The plugin that `Trainer(sync_batchnorm=True)` has given a strategy, or None."""
    return found(strategy, "_layer_sync")


def set_layer_sync(strategy: Any, plugin: Any) -> None:
    """Gives a strategy another such plugin."""
    strategy._layer_sync = plugin


def devices_asked_for(trainer: Any) -> int | None:
    """How many devices `Trainer(devices=...)` names; None where it leaves that to the accelerator.

    Gone: None, and a number that contradicts the strategy's devices is not refused.
    """
    connector = getattr(trainer, "_accelerator_connector", None)
    devices = getattr(connector, "_devices_flag", None)
    if isinstance(devices, str):
        devices = [*filter(None, devices.split(","))] if "," in devices else int(devices)
    count = len(devices) if isinstance(devices, list | tuple) else devices
    # By now "auto" is the number of devices that there are.
    is_auto = count is None or count < 0 or count == trainer.accelerator.auto_device_count()
    return None if is_auto else count


def join_process_group(environment: Any, backend: str, **options: Any) -> None:
    """Makes torch's process group; a thread of Gloo's that outlives Python aborts the process."""
    from lightning.fabric.utilities import distributed

    found(distributed, "_init_dist_connection")(environment, backend, **options)
    if backend != "nccl":  # Lightning ends this one
        atexit.register(found(distributed, "_destroy_dist_connection"))


# Checkpoints


def given_io(strategy: Any) -> Any:
    """The CheckpointIO that a strategy was given, or None; `checkpoint_io` would give it one."""
    return found(strategy, "_checkpoint_io")


def set_io(strategy: Any, checkpoint_io: Any) -> None:
    """Gives a strategy another CheckpointIO, after `given_io` has shown that the name is right."""
    strategy._checkpoint_io = checkpoint_io


# Loops


def logged_step(trainer: Any) -> int:
    """The number of steps that Lightning gives loggers: of batches, however many optimizers."""
    return int(found(trainer.fit_loop.epoch_loop, "_batches_that_stepped"))


def is_index_sampler(sampler: Any) -> bool:
    """Whether a batch sampler notes the indices of each batch, in `predict`, for writers."""
    return type(sampler).__name__ == "_IndexBatchSamplerWrapper"


def is_accumulating(trainer: Any) -> bool:
    """Whether the batch that is being trained on ends without a step of the optimizer."""
    return bool(found(trainer.fit_loop, "_should_accumulate")())


def is_time_to_log(trainer: Any) -> bool:
    """Whether `log_every_n_steps` has come round."""
    return bool(found(trainer, "_logger_connector").should_update_logs)


def running_hook(module: nn.Module) -> str | None:
    """The name of the hook or step that Lightning runs now; None if it runs none."""
    return cast("str | None", found(module, "_current_fx_name"))
