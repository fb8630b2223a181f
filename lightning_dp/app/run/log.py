"""What is in a run's log file: its options, machine, warnings and error, and how it ended.

Hydra opens the file, for one process of a run; where there is none, nothing is written. The screen
shows what it has always shown.
"""

import logging
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Trainer
from omegaconf import DictConfig, OmegaConf

from lightning_dp.doctor import processor, versions

note = logging.getLogger("lightning_dp.run")
"""Of what is in the file alone."""
note.propagate = False
note.addHandler(logging.NullHandler())

_LIGHTNINGS = ("lightning.pytorch", "lightning.fabric")
_MADE_AT_START = {".hydra", "config.yaml"}


@contextmanager
def run_log(cfg: DictConfig) -> Iterator[None]:
    """Tells the story of a run in its log file."""
    files = log_files(Path(cfg.paths.output_dir))
    # Lightning's loggers have a handler of their own, and may keep their records from others.
    loggers = [note, *(lg for lg in map(logging.getLogger, _LIGHTNINGS) if not lg.propagate)]
    for logger in loggers:
        for file in files:
            logger.addHandler(file)
    begin = time.monotonic()
    try:
        if files:
            note.info("options:\n%s", _options(cfg))
        with warnings.catch_warnings():
            warnings.showwarning = _Noting()
            yield
        note.info("ended after %.1f s", time.monotonic() - begin)
    except BaseException as error:
        note_error(error, time.monotonic() - begin)
        raise
    finally:
        for logger in loggers:
            for file in files:
                logger.removeHandler(file)


def _options(cfg: DictConfig) -> str:
    """All options, resolved; above them those that are not the default ones."""
    resolved = _flat(OmegaConf.to_container(cfg, resolve=True, throw_on_missing=False))
    lines = ["all:", *(f"  {key}: {value!r}" for key, value in resolved.items())]
    # As they were written, so that what follows from a change is not told as one more.
    own = _flat(OmegaConf.to_container(cfg))
    # What an earlier program of this process has left knows no configs any more.
    is_composed = HydraConfig.initialized() and GlobalHydra.instance().is_initialized()
    default = compose(HydraConfig.get().job.config_name) if is_composed else cfg
    defaults = _flat(OmegaConf.to_container(default))
    changed = [key for key in own if key not in defaults or own[key] != defaults[key]]
    left_out = [f"  {key}: left out" for key in defaults if key not in own]
    told = [f"  {key}: {resolved.get(key)!r}" for key in changed]
    return "\n".join(["not the default:", *(told + left_out or ["  none"]), *lines])


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    """By dotted keys, as they are given on the command line."""
    if not isinstance(value, Mapping) or not value:
        return {key: value}
    found: dict[str, Any] = {}
    for name, inner in value.items():
        found |= _flat(inner, f"{key}.{name}" if key else str(name))
    return found


def log_files(folder: Path) -> list[logging.FileHandler]:
    """Those that are open in a run folder."""
    files = [h for h in logging.getLogger().handlers if isinstance(h, logging.FileHandler)]
    return [file for file in files if Path(file.baseFilename).parent == folder.resolve()]


def note_machine(trainer: Trainer) -> None:
    """Notes what a run uses."""
    strategy = trainer.strategy
    own = getattr(strategy, "parallel_devices", None) or [strategy.root_device]
    processes = f", in each of {trainer.world_size} processes" if trainer.world_size > 1 else ""
    note.info("devices: %s%s", ", ".join(map(str, own)), processes)
    note.info("strategy: %s; processor: %s", type(strategy).__name__, processor())
    note.info("versions: %s", ", ".join(f"{name} {v}" for name, v in versions().items()))


def note_error(error: BaseException, seconds: float) -> None:
    """Notes what has ended a run; Lightning makes an exit of Ctrl-C."""
    causes = (error, error.__context__)
    if any(isinstance(cause, KeyboardInterrupt) for cause in causes):
        note.info("ended after %.1f s: interrupted", seconds)
        return
    note.error("%s", error, exc_info=error)
    note.error("ended after %.1f s: %s", seconds, type(error).__qualname__)


def remove_unused(folder: Path) -> None:
    """Removes the folder of a run that has left nothing but what is there at its start."""
    files, own = log_files(folder), folder.resolve()
    names = {path.name for path in own.iterdir()} if own.is_dir() else {""}
    if names - _MADE_AT_START - {Path(file.baseFilename).name for file in files}:
        return
    if own == Path.cwd() or own in Path.cwd().parents:
        return
    for file in files:
        logging.getLogger().removeHandler(file)
        file.close()
    shutil.rmtree(own)


class _Noting:
    """Notes each warning once, beside showing it as before."""

    def __init__(self) -> None:
        self._show: Any = warnings.showwarning
        self._seen: set[tuple[type, str]] = set()

    def __call__(
        self, message: Any, category: type, filename: str, lineno: int, *others: Any, **kwargs: Any
    ) -> None:
        key = (category, str(message))
        if key not in self._seen:
            self._seen.add(key)
            note.warning("%s: %s (%s:%d)", category.__name__, message, filename, lineno)
        self._show(message, category, filename, lineno, *others, **kwargs)
