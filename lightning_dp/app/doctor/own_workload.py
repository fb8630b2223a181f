"""The user's own module, for the doctor to time: a class, or an experiment of ``conf/``."""

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from hydra.utils import instantiate
from lightning.pytorch import LightningDataModule, LightningModule
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_dp.app.devices import register_resolvers
from lightning_dp.app.run import in_one_line
from lightning_dp.doctor import Workload

BATCHES = 4  # that are loaded, and taken in turns
_TRAINER = ("precision", "gradient_clip_val", "sync_batchnorm")
_STRATEGY = "lightning_dp.DataParallelStrategy"


def own_workloads(module: str | None, data: str | None, overrides: Sequence[str]) -> list[Workload]:
    """The workload that the options name; none if they name nothing."""
    if module is not None and overrides:
        raise ValueError(
            f"--module: expected to be alone, got {module!r} beside {' '.join(overrides)}. Name a "
            "module or an experiment."
        )
    if module is None and data is not None:
        raise ValueError(f"--data: expected beside --module, got {data!r} alone. Name a module.")
    if module is not None:
        return [_of_class(module, data)]
    return [_of_experiment(overrides)] if overrides else []


def _of_class(module: str, data: str | None) -> Workload:
    make = _found("--module", module, LightningModule)
    source = make if data is None else _found("--data", data, LightningDataModule)
    return Workload(module, make, partial(_loaded, source, data or module), loader=_made(source))


def _of_experiment(overrides: Sequence[str]) -> Workload:
    """Model, data, precision and strategy's options, but for the devices."""
    for override in overrides:
        if "=" not in override and not override.startswith("~"):
            raise ValueError(
                f"expected options, or KEY=VALUE such as experiment=digits, got {override!r}."
            )
    cfg = _composed(overrides)
    strategy: Any = {}
    if OmegaConf.is_dict(cfg.strategy):
        strategy = OmegaConf.to_container(cfg.strategy, resolve=True)
    is_ours = strategy.pop("_target_", None) == _STRATEGY
    options = {k: v for k, v in strategy.items() if k not in ("devices", "executor")}
    trainer = {name: cfg.trainer[name] for name in _TRAINER if cfg.trainer.get(name) is not None}
    data = partial(instantiate, cfg.data, _convert_="all")
    return Workload(
        " ".join(overrides),
        lambda: instantiate(cfg.model, _convert_="all"),
        partial(_loaded, data, "data"),
        strategy=options if is_ours else {},
        trainer=trainer,
        loader=_made(data),
    )


def _composed(overrides: Sequence[str]) -> DictConfig:
    register_resolvers()
    try:
        with initialize_config_module("lightning_dp.conf", version_base="1.3"):
            return compose("train", overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(in_one_line(error, "train", overrides)) from error


def _made(make: Callable[[], Any]) -> Callable[[], Any]:
    """Makes the DataLoader of a training."""

    def loader() -> Any:
        source = make()
        source.prepare_data()
        source.setup("fit")
        return source.train_dataloader()

    return loader


def _loaded(make: Callable[[], Any], name: str, _: int) -> list[Any]:
    """The first batches of a training, as its DataLoader has them."""
    loader = _made(make)
    try:
        batches = list(islice(loader(), BATCHES))
    except Exception as error:
        raise ValueError(
            f"{name}: expected a train_dataloader that can be used without a Trainer, got "
            f"{type(error).__name__}: {error} Name a LightningDataModule by --data."
        ) from error
    if not batches:
        raise ValueError(f"{name}: expected at least one training batch, got none.")
    return batches


def _found(key: str, path: str, base: type) -> Any:
    package, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(package), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{key}: expected the path of a class, such as package.module.Class, got {path!r} "
            f"({error}). It has to be importable from here."
        ) from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{key}: expected a {base.__name__}, got {path!r}, which is none.")
    return found
