"""Alike: processes that build a module each begin with the first one's, and with its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parameter import is_lazy

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import World


def begin_alike(module: nn.Module, world: World) -> None:
    """Gives a module's parameters and buffers the first process's values, in every process.

    Those that have no shape yet stay as they are.
    """
    from lightning_dp.parallel.processes import make_alike

    named = [*module.named_parameters(), *module.named_buffers()]
    make_alike({name: t for name, t in named if not is_lazy(t)}, world, "parameters and buffers")


_OF_TRAINER = (
    *("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "precision"),
    *("max_epochs", "min_epochs", "max_steps", "min_steps", "val_check_interval"),
    *("check_val_every_n_epoch", "num_sanity_val_steps", "overfit_batches", "log_every_n_steps"),
    *(f"limit_{stage}_batches" for stage in ("train", "val", "test", "predict")),
)
"""What decides which steps there are, and what they do."""


def check_options(options: Mapping[str, Any], trainer: Any, world: World) -> None:
    """All processes must have been given the same options.

    Args:
        options: of the strategy.
        trainer: has its own.
        world: the processes.

    Raises:
        ValueError: two of them have not.
    """
    job = {"the Trainer's method": trainer.state.fn}
    own = {**options, **{f"Trainer's {n}": getattr(trainer, n) for n in _OF_TRAINER}, **job}
    first, *others = world.gather({name: _told(value) for name, value in own.items()})
    for rank, other in enumerate(others, 1):
        for name, value in first.items():
            if other[name] != value:
                raise ValueError(
                    f"{name}: expected the same in all processes, got {value} in process 0 and "
                    f"{other[name]} in process {rank}. Start all of them with the same options."
                )


def _told(value: Any) -> str:
    """A value for people; a function by its name, as each process has its own."""
    return getattr(value, "__qualname__", None) or repr(value)
