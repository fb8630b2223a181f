"""Around a job: which of its messages are shown, and how the program ends."""

import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from hydra.errors import CompactHydraException
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import DictConfig, OmegaConf

from lightning_dp.parallel.errors import chain

R = TypeVar("R")
log = logging.getLogger(__name__)

INTERRUPTED, TERMINATED = 128 + 2, 128 + 15
"""The exit status that a shell reports for a program that SIGINT, or SIGTERM, has ended."""

_EXTRAS = {
    "sklearn": ("scikit-learn", "examples"),
    "rich": ("rich", "examples"),
    "safetensors": ("safetensors", "safetensors"),
}
"""By the name of a module its package, and the extra that brings it."""

_MESSAGES = (
    *("💡 Tip:", "GPU available: False", "TPU available: False", "HPU available: False"),
    "Restoring states from the checkpoint path",  # "Loaded model weights from ..." follows
)
_WARNINGS = (
    r"The '\w+' does not have many workers",  # with images in memory they only cost time
    # Hydra has put its own files into the run folder; a resumed run has a folder of its own.
    r"(Experiment logs|Checkpoint) directory .* exists and is not empty",
    r"The dirpath has changed from",
    r"Be aware that when using `ckpt_path`, callbacks",  # a test needs none of the training's
    r"Using `DistributedSampler` with the dataloaders",  # of strategy=ddp, on the same devices
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # Lightning's own call of torch
)
"""Lightning's words that say nothing about these programs."""

_OF_OTHERS = (
    *("hydra/job_logging=none", "hydra/hydra_logging=none", "hydra.output_subdir=null"),
    *("hydra.run.dir=.", "hydra.sweep.dir=.", "hydra.sweep.subdir=."),
)


def quiet_in_other_processes(main: Callable[[], None]) -> Callable[[], None]:
    """Lets Hydra make no folder and no log in a process that is not the first one.

    torchrun and SLURM start the program several times; what the others have to say reaches the
    first one over torch.distributed.
    """

    @functools.wraps(main)
    def entry() -> None:
        if int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0))) > 0:
            given = {argument.partition("=")[0] for argument in sys.argv}
            sys.argv += [option for option in _OF_OTHERS if option.partition("=")[0] not in given]
        main()

    return entry


class OptionError(CompactHydraException, ValueError):
    """An option that cannot be used; Hydra prints the message without a traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(f"error: {message}")


def as_program(task: Callable[[DictConfig], R]) -> Callable[[DictConfig], R]:
    """Wraps a task for the command line.

    Ctrl-C and SIGTERM end it with the run folder's name, the checkpoint to resume from and exit
    status 130 or 143. Errors are left to Hydra, which prints one about an option in a few lines and
    any other with its traceback; the log file has every traceback.
    """

    @functools.wraps(task)
    def program(cfg: DictConfig) -> R:
        folder = Path(cfg.paths.output_dir)
        if cfg.extras.print_config:
            rank_zero_only(print)(OmegaConf.to_yaml(cfg))
        try:
            with _messages():
                return task(cfg)
        except (KeyboardInterrupt, SystemExit) as stop:
            # Lightning makes an exit of either, Ctrl-C's after it has saved.
            is_interrupt = any(isinstance(e, KeyboardInterrupt) for e in (stop, stop.__context__))
            if not is_interrupt and not isinstance(stop, SIGTERMException):
                raise
            _print_way_on("Interrupted" if is_interrupt else "Terminated", folder)
            sys.exit(INTERRUPTED if is_interrupt else TERMINATED)
        except Exception as error:
            trace = (type(error), error, error.__traceback__)
            record = log.makeRecord(log.name, logging.ERROR, __file__, 0, "failed", (), trace)
            for handler in logging.getLogger().handlers:
                if isinstance(handler, logging.FileHandler):  # Hydra prints it on the screen
                    handler.handle(record)
            for cause in chain(error):
                if isinstance(cause, ModuleNotFoundError) and cause.name in _EXTRAS:
                    package, extra = _EXTRAS[cause.name]
                    raise OptionError(
                        f"expected the package {package}, which is not installed. Install the "
                        f"extra {extra!r}: python -m pip install 'lightning-dp[{extra}]'"
                    ) from error
            if not isinstance(error, CompactHydraException):
                _print_way_on("Failed", folder)
            raise

    return program


@contextmanager
def _messages() -> Iterator[None]:
    """Sends warnings to Hydra's log, and leaves out what says nothing."""
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")  # of rank_zero_info
    with warnings.catch_warnings():
        for message in _WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        logger.addFilter(_is_wanted)
        logging.captureWarnings(bool(logging.getLogger().handlers))
        try:
            yield
        finally:
            logging.captureWarnings(False)
            logger.removeFilter(_is_wanted)


def _is_wanted(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_MESSAGES)


@rank_zero_only
def _print_way_on(what: str, folder: Path) -> None:
    """Names the run folder, and the last epoch's checkpoint to resume from."""
    print(f"{what}. Run folder: {folder}", file=sys.stderr)
    last = folder / "checkpoints" / "last.ckpt"
    if last.is_file():
        print(f"To go on: ckpt_path={last}", file=sys.stderr)
