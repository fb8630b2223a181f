"""What surrounds a job: Hydra's log, and how it ends."""

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar, cast

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import DictConfig, OmegaConf, read_write

from lightning_dp.app.options import OptionError
from lightning_dp.app.quiet import quiet

R = TypeVar("R")
log = logging.getLogger(__name__)

INTERRUPTED, TERMINATED = 128 + 2, 128 + 15
"""The exit status that a shell reports for a program that SIGINT, or SIGTERM, has ended."""

_EXTRAS = {
    "sklearn": ("scikit-learn", "examples"),
    "rich": ("rich", "examples"),
    "matplotlib": ("matplotlib", "plot"),
    "safetensors": ("safetensors", "safetensors"),
}
"""By the name of a module its package, and the extra that brings it."""


def as_program(task: Callable[[DictConfig], R]) -> Callable[[DictConfig], R]:
    """Wraps a task for the command line.

    Ctrl-C and SIGTERM end it with the run folder's name, the checkpoint to resume from and exit
    status 130 or 143. Errors are left to Hydra, which prints one about an option in a few lines and
    any other with its traceback; the log file has every traceback. Jobs of a sweep do not see each
    other, and continue after one that fails.
    """

    @functools.wraps(task)
    def program(cfg: DictConfig) -> R:
        folder = Path(cfg.paths.output_dir)
        if cfg.extras.print_config:
            rank_zero_only(print)(OmegaConf.to_yaml(cfg))
        try:
            with _own_process_state(), _job_of_sweep(), quiet(cfg.extras.quiet), _hydra_log():
                return task(cfg)
        except (KeyboardInterrupt, SystemExit) as stop:
            # Lightning makes an exit of either, Ctrl-C's after it has saved.
            is_interrupt = any(isinstance(e, KeyboardInterrupt) for e in (stop, stop.__context__))
            if not is_interrupt and not isinstance(stop, SIGTERMException):
                raise
            _print_way_on("Interrupted" if is_interrupt else "Terminated", folder)
            sys.exit(INTERRUPTED if is_interrupt else TERMINATED)
        except Exception as error:
            _log_traceback(error)
            missing = _missing_extra(error)
            if missing is not None:
                raise OptionError(missing) from error
            if not isinstance(error, CompactHydraException):
                _print_way_on("Failed", folder)
            raise

    return program


@contextmanager
def _own_process_state() -> Iterator[None]:
    """Undoes what Lightning's process launchers leave behind, so that a sweep's next job works.

    They set variables by which the next job would take itself for a child process, cut the number
    of threads, and keep a process group whose other members have ended.
    """
    environment, threads = dict(os.environ), torch.get_num_threads()
    try:
        yield
    finally:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        torch.set_num_threads(threads)
        os.environ.clear()
        os.environ.update(environment)


@contextmanager
def _hydra_log() -> Iterator[None]:
    """Sends warnings and Lightning's messages to Hydra's log: the screen and the run's log file."""
    if not logging.getLogger().handlers:  # Hydra is configured to log nothing
        yield
        return
    names = ("lightning", "lightning.pytorch", "lightning.fabric")
    loggers = [logging.getLogger(name) for name in names]
    before = [(logger.handlers, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [], True
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for logger, (handlers, propagate) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate


def _log_traceback(error: Exception) -> None:
    """Writes an error to the log file alone: Hydra prints it on the screen."""
    trace = (type(error), error, error.__traceback__)
    record = log.makeRecord(log.name, logging.ERROR, __file__, 0, "failed", (), trace)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)


def _missing_extra(error: BaseException | None) -> str | None:
    """Returns which extra to install, if an error comes from a package that an extra brings."""
    while error is not None:
        name = (getattr(error, "name", None) or "").partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and name in _EXTRAS:
            package, extra = _EXTRAS[name]
            return (
                f"expected the package {package}, which is not installed. Install the extra "
                f"{extra!r}: python -m pip install 'lightning-dp[{extra}]'"
            )
        error = error.__cause__ or error.__context__
    return None


@rank_zero_only
def _print_way_on(what: str, folder: Path) -> None:
    """Names the run folder, and the latest checkpoint to resume from."""
    print(f"{what}. Run folder: {folder}", file=sys.stderr)
    names = ("interrupted.ckpt", "last.ckpt")
    found = [path for name in names if (path := folder / "checkpoints" / name).is_file()]
    if found:
        latest = max(found, key=lambda path: path.stat().st_mtime)
        print(f"To go on: ckpt_path={latest}", file=sys.stderr)


@contextmanager
def _job_of_sweep() -> Iterator[None]:
    """Keeps the child processes of a sweep's job to it.

    Lightning starts those of strategy=ddp with this process's arguments, which are the whole
    sweep's, and in the folder of a single run.
    """
    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        yield
        return
    config = cast(DictConfig, HydraConfig.get())  # declared as the structure it follows
    arguments = sys.argv[1:]
    flags = [a for a in arguments if a[:1] == "-" or not ("=" in a or a[:1] == "~")]
    flags = [flag for flag in flags if flag not in ("-m", "--multirun")]
    with read_write(config):
        config.run.dir = config.runtime.output_dir
    sys.argv[1:] = [*flags, *config.overrides.task, "hydra.mode=RUN"]
    try:
        yield
    finally:
        sys.argv[1:] = arguments
