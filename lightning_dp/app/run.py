"""What surrounds a program's task: clean process state, clear errors, Ctrl-C."""

import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar, cast

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.types import RunMode
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf, read_write

from lightning_dp.app.quiet import quiet
from lightning_dp.checkpointing import nothing_to_resume
from lightning_dp.parallel.contexts import context

R = TypeVar("R")

INTERRUPTED = 128 + 2  # what a shell reports for a program that SIGINT ended


def as_program(task: Callable[[DictConfig], R]) -> Callable[[DictConfig], R]:
    """Wraps a task for the command line.

    An unusable option ends the program with one clear message and exit code 1, Ctrl-C with the
    name of the run folder and exit code 130; ``HYDRA_FULL_ERROR=1`` gives the whole traceback. Any
    other error is left to Hydra. Several jobs of a sweep do not see each other.
    """

    @functools.wraps(task)
    def program(cfg: DictConfig) -> R:
        if cfg.extras.print_config:
            rank_zero_only(print)(OmegaConf.to_yaml(cfg, resolve=True))
        try:
            with _own_process_state(), _own_child_processes(), quiet(cfg.extras.quiet):
                return task(cfg)
        except (KeyboardInterrupt, SystemExit) as stop:
            # After saving, Lightning makes an exit of it.
            if any(isinstance(e, KeyboardInterrupt) for e in (stop, stop.__context__)):
                _print_interrupted(Path(cfg.paths.output_dir))
                sys.exit(INTERRUPTED)
            raise
        except Exception as error:
            message = (
                _option_error(error) or _does_not_fit(error, cfg) or _cannot_resume(error, cfg)
            )
            if message is None or os.environ.get("HYDRA_FULL_ERROR") == "1":
                raise
            print(f"error: {message}", file=sys.stderr)
            sys.exit(1)

    return program


@context
def _own_process_state() -> Iterator[None]:
    """Undoes what Lightning's process launchers leave behind, so that a sweep's next job works.

    They set variables by which the next job would take itself for a child process, cut the number
    of threads, and keep a process group whose other members have ended.
    """
    environment = dict(os.environ)
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        torch.set_num_threads(threads)
        os.environ.clear()
        os.environ.update(environment)


@context
def _own_child_processes() -> Iterator[None]:
    """Makes the child processes of strategy=ddp run this job alone, not the whole sweep.

    Lightning starts them with this process's arguments and Hydra's single-run folder.
    """
    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        yield
        return
    config = cast(DictConfig, HydraConfig.get())  # declared as the structure it follows
    arguments = sys.argv[1:]
    with read_write(config):
        config.run.dir = config.runtime.output_dir
    sys.argv[1:] = [*_config_flags(arguments), *config.overrides.task, "hydra.mode=RUN"]
    try:
        yield
    finally:
        sys.argv[1:] = arguments


def _config_flags(arguments: list[str]) -> list[str]:
    """Returns Hydra's flags that say where the configuration is, each with its value."""
    flags = ("--config-name", "-cn", "--config-path", "-cp", "--config-dir", "-cd")
    kept: list[str] = []
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if argument in flags:
            kept += [argument, following]
        elif argument.startswith(tuple(f"{flag}=" for flag in flags)):
            kept.append(argument)
    return kept


def _option_error(error: Exception) -> str | None:
    """Returns the message for an unusable option; None if the error is about something else."""
    if isinstance(error, InstantiationException):
        cause = error.__cause__
        return str(cause) if isinstance(cause, ValueError) else str(error)
    module, _ = _where_raised(error)
    is_ours = module.startswith("lightning_dp.") and not module.startswith("lightning_dp.examples.")
    return str(error) if isinstance(error, ValueError) and is_ours else None


def _does_not_fit(error: Exception, cfg: DictConfig) -> str | None:
    """Returns the message for a checkpoint of another model or optimizer; None if that is fine."""
    module, function = _where_raised(error)
    if not module.startswith("torch.") or function != "load_state_dict" or not cfg.get("ckpt_path"):
        return None
    return (
        f"ckpt_path: expected a checkpoint of this model and optimizer, got {cfg.ckpt_path!r}, "
        f"which does not fit. {error}"
    )


def _cannot_resume(error: Exception, cfg: DictConfig) -> str | None:
    """Returns the message for weights to resume from; None if the error is about something else."""
    is_about_it = _where_raised(error)[1] == "restore_optimizers_and_schedulers"
    return nothing_to_resume(cfg.ckpt_path) if is_about_it else None


def _where_raised(error: Exception) -> tuple[str, str]:
    """The names of the module and of the function that raised an error."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")), frame.f_code.co_name


@rank_zero_only
def _print_interrupted(folder: Path) -> None:
    print(f"Interrupted. Run folder: {folder}", file=sys.stderr)
    for name in ("interrupted.ckpt", "last.ckpt"):
        checkpoint = folder / "checkpoints" / name
        if checkpoint.is_file():
            print(f"To go on: ckpt_path={checkpoint}", file=sys.stderr)
            return
