"""How a step on all devices compares with one on a single device: the last line of a training.

Both train a fresh model of the configuration on the same batches, a few steps at a time and in
turns. What the job has trained, logged and saved is not touched.
"""

import copy
import logging
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from hydra.utils import instantiate
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import DataLoader

from lightning_dp import DataParallelStrategy
from lightning_dp.app.build import Job
from lightning_dp.app.report import device_names
from lightning_dp.doctor import Stopwatch, muted

SECONDS = 3.0  # that all steps together take, about
ROUNDS = 2  # in turns: a machine that is busy for a while is so for all
BATCHES = 4  # that are loaded, and taken in turns
MOST_STEPS = 200  # of a fit

_NOTHING_ELSE: Mapping[str, Any] = {
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "profiler": None,
    "min_epochs": 0,
    "max_epochs": 1,
    "min_steps": None,
    "max_steps": -1,
    "max_time": None,
    "overfit_batches": 0,
    "limit_train_batches": None,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
}
"""Options of the Trainers that only take steps."""

log = logging.getLogger(__name__)
clock: Callable[[], float] = time.perf_counter
"""What times the steps."""


def compared(cfg: DictConfig, job: Job) -> str | None:
    """The line that says how long a step takes on all devices, and how long on one.

    Where that cannot be measured, it says why. None if there is a single device.
    """
    trainer = job.trainer
    devices = len(device_names(trainer))
    if devices == 1:
        return None
    if not isinstance(trainer.strategy, DataParallelStrategy):
        kind = type(trainer.strategy).__name__
        return f"not compared with 1 device: {kind} starts processes, which take no steps in turns"
    if trainer.world_size > 1:
        return f"not compared with 1 device: {trainer.world_size} processes take no steps in turns"
    try:
        with isolate_rng(), muted():
            together, alone = _seconds_per_step(cfg, job)
    except Exception as error:  # the user's model, data or machine; the job itself is through
        log.debug("The comparison with one device has failed.", exc_info=True)
        said = str(error).strip().split("\n")[0]
        return f"not compared with 1 device: {type(error).__name__}: {said}"
    line = f"{devices} devices: {together * 1e3:.1f} ms per step; 1 device: {alone * 1e3:.1f} ms"
    return line if together <= alone else f"{line}: {_faster(cfg.trainer.strategy)}"


def _faster(strategy: DictConfig) -> str:
    """What to do where one device is faster."""
    # Devices that the strategy names are taken whatever the Trainer is told.
    ways = ["strategy=single" if strategy.get("devices") else "trainer.devices=1"]
    ways += [] if strategy.get("split") == "auto" else ["strategy=dp_auto"]
    return f"one device would be faster here: {' or '.join(ways)}"


def _seconds_per_step(cfg: DictConfig, job: Job) -> tuple[float, float]:
    """Medians of all devices and of one."""
    batches = _batches_of(job.data)
    several = _ways(cfg)
    ways: dict[str, Callable[[], Strategy]]
    ways = {"one": partial(SingleDeviceStrategy, job.trainer.strategy.root_device), **several}
    times: defaultdict[str, list[float]] = defaultdict(list)
    end = clock() + SECONDS
    for i in range(ROUNDS):
        if i and clock() > end:
            break  # a few steps of each have taken long enough
        for name, make in ways.items():
            watch = Stopwatch(_devices(job.trainer), SECONDS / ROUNDS / len(ways), clock)
            _take_steps(cfg, job, make(), batches, watch, devices=1 if name == "one" else None)
            times[name] += watch.seconds
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    return min(medians[name] for name in several), medians["one"]


def _take_steps(
    cfg: DictConfig,
    job: Job,
    strategy: Strategy,
    batches: Sequence[Any],
    watch: Stopwatch,
    *,
    devices: int | None,
) -> None:
    """Trains a fresh model until the watch has seen enough."""
    options: Any = OmegaConf.to_container(cfg.trainer, resolve=True)
    options |= _NOTHING_ELSE if devices is None else {**_NOTHING_ELSE, "devices": devices}
    del options["strategy"]  # an object does not replace the keys of one
    options["_partial_"] = True  # as arguments of its own, it would look into the logger's keys
    make = instantiate(options)
    trainer: Trainer = make(strategy=strategy, logger=DummyLogger(), callbacks=[watch])
    trained = job.trainer.strategy
    if isinstance(strategy, DataParallelStrategy) and isinstance(trained, DataParallelStrategy):
        strategy.split_policy = copy.deepcopy(trained.split_policy)  # with what it has learnt
    model: LightningModule = instantiate(cfg.model, _convert_="all")
    trainer.fit(model, datamodule=_in_memory(job.data, batches))
    if not watch.seconds:
        raise ValueError("expected a training that takes some steps, got none that was measured.")


def _ways(cfg: DictConfig) -> dict[str, Callable[[], Strategy]]:
    """What makes the strategy with several devices.

    `executor="auto"` would try both of its ways in the first steps and keep the faster. Here each
    of them is timed by itself, in fewer steps.
    """
    configured = cfg.trainer.strategy
    if not OmegaConf.is_dict(configured):
        raise ValueError(
            f"trainer.strategy: expected the keys of conf/strategy, got {configured!r}, of which "
            "no second one can be made. Use strategy=dp_custom."
        )
    executor = configured.get("executor", "auto")
    names = ("threads", "inorder") if executor == "auto" else (executor,)
    if torch.are_deterministic_algorithms_enabled() and executor == "auto":
        names = ("inorder",)
    make = partial(instantiate, configured, check_first_step=False)
    return {name: partial(make, executor=name) for name in names}


def _devices(trainer: Trainer) -> list[torch.device]:
    return list(getattr(trainer.strategy, "parallel_devices", None) or [])


def _batches_of(data: LightningDataModule) -> list[Any]:
    """The first batches of an epoch, however many there are."""
    loader = iter(CombinedLoader(data.train_dataloader(), "max_size_cycle"))
    batches = [batch for batch, _, _ in islice(loader, BATCHES)]
    if not batches:
        raise ValueError("expected at least one training batch, got none.")
    return batches


def _in_memory(data: LightningDataModule, batches: Sequence[Any]) -> LightningDataModule:
    """The same data module, with its hooks, but for what it loads."""
    own = copy.copy(data)
    # Lightning takes a plain list for several loaders.
    repeated: Any = [batches[i % len(batches)] for i in range(MOST_STEPS)]
    loaded: Any = own
    loaded.prepare_data = lambda: None
    loaded.setup = lambda stage: None
    loaded.teardown = lambda stage: None
    loaded.train_dataloader = lambda: DataLoader(repeated, batch_size=None)
    return own
