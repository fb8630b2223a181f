"""What surrounds a program's task: clean process state, clear errors, Ctrl-C."""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar, cast

import torch
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf, read_write

from lightning_dp.app.quiet import quiet
from lightning_dp.app.run.log import remove_unused, run_log
from lightning_dp.app.run.mistyped import task_begins
from lightning_dp.app.run.refusals import is_full_disk, refusal
from lightning_dp.app.run.sweep import JobFailed, is_sweep, noted_job

R = TypeVar("R")

INTERRUPTED = 128 + 2  # what a shell reports for a program that SIGINT ended


def as_program(task: Callable[[DictConfig], R]) -> Callable[[DictConfig], R]:
    """Wraps a task for the command line.

    An unusable option ends the program with one clear message and exit code 1, and leaves no run
    folder; Ctrl-C with the name of the run folder and exit code 130; ``HYDRA_FULL_ERROR=1`` gives
    the whole traceback. Any other error is left to Hydra. All of it is in the run's log file.
    Several jobs of a sweep do not see each other, and go on without one that fails.
    """

    @functools.wraps(task)
    def program(cfg: DictConfig) -> R:
        task_begins()
        with noted_job():
            return in_own_state(cfg)

    def in_own_state(cfg: DictConfig) -> R:
        if cfg.extras.print_config:
            rank_zero_only(print)(OmegaConf.to_yaml(cfg, resolve=True))
        try:
            with (
                _own_process_state(),
                _own_child_processes(),
                quiet(cfg.extras.quiet),
                run_log(cfg),
            ):
                return task(cfg)
        except (KeyboardInterrupt, SystemExit) as stop:
            # After saving, Lightning makes an exit of it.
            if any(isinstance(e, KeyboardInterrupt) for e in (stop, stop.__context__)):
                _print_way_on("Interrupted", Path(cfg.paths.output_dir))
                sys.exit(INTERRUPTED)
            raise
        except Exception as error:
            message = refusal(error, cfg)
            if message is None:
                _print_way_on("Failed", Path(cfg.paths.output_dir))
                raise
            remove_unused(Path(cfg.paths.output_dir))
            if is_full_disk(error):
                _print_way_on("Failed", Path(cfg.paths.output_dir))
            if os.environ.get("HYDRA_FULL_ERROR") == "1":
                raise
            print(f"error: {message}", file=sys.stderr)
            if is_sweep():
                raise JobFailed(message) from error
            sys.exit(1)

    return program


@contextmanager
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


@contextmanager
def _own_child_processes() -> Iterator[None]:
    """Makes the child processes of strategy=ddp run this job alone, not the whole sweep.

    Lightning starts them with this process's arguments and Hydra's single-run folder.
    """
    if not is_sweep():
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


@rank_zero_only
def _print_way_on(what: str, folder: Path) -> None:
    """Names the run folder, and the state to go on from: the latest one."""
    print(f"{what}. Run folder: {folder}", file=sys.stderr)
    names = ("interrupted.ckpt", "last.ckpt")
    found = [path for name in names if (path := folder / "checkpoints" / name).is_file()]
    if found:
        latest = max(found, key=lambda path: path.stat().st_mtime)
        print(f"To go on: ckpt_path={latest}", file=sys.stderr)
