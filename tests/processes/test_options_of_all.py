"""Options that decide what steps do are those of all processes, or the start is refused."""

import os
from typing import Any

import pytest
from oracle import Classifier, loader, trainer
from several_processes import run_in_processes

from lightning_dp import DataParallelStrategy
from lightning_dp.parallel.processes import World
from lightning_dp.processes import check_options

UNLIKE: list[tuple[str, Any, Any]] = [
    ("strategy mode", "step", "forward"),
    ("strategy buffers", "first", "mean"),
    ("strategy loss_reduction", "mean", "sum"),
    ("strategy split", "even", "adaptive"),
    ("accumulate_grad_batches", 1, 2),
    ("gradient_clip_val", None, 0.5),
    ("max_epochs", 1, 2),
    ("limit_train_batches", 1.0, 2),
    ("precision", "32-true", "64-true"),
    ("num_sanity_val_steps", 0, 2),
]


def refused(_: None) -> list[str]:
    rank, told = int(os.environ["RANK"]), []
    for name, *values in UNLIKE:
        kind, _, option = name.rpartition(" ")
        own = {option: values[rank]}
        job = trainer(
            2,
            DataParallelStrategy(**(own if kind else {})),
            **{"max_epochs": 1, **({} if kind else own)},
        )
        try:
            job.fit(Classifier(), loader(), loader())
        except ValueError as error:
            told.append(str(error))
        else:
            told.append("nothing")
    return told


def test_unequal_ones_are_refused_with_both_values() -> None:
    for own in run_in_processes(refused, 2, None):
        for (name, first, second), text in zip(UNLIKE, own, strict=True):
            option = name.rpartition(" ")[2]
            assert option in text and "Start all of them with the same options" in text
            assert f"{first!r} in process 0 and {second!r} in process 1" in text


class Told(World):
    """A world in which the others have told this."""

    def __init__(self, *others: Any) -> None:
        self.others = others

    def gather(self, own: Any, device: Any = None) -> list[Any]:
        return [own, *({**own, **other} for other in self.others)]


def test_functions_go_by_their_names_and_the_first_that_differs_is_named() -> None:
    job: Any = trainer(1, "auto")
    own = {"split": lambda n, devices: (n,), "mode": "step"}
    name = own["split"].__qualname__
    check_options(own, job, Told({"split": name}))
    with pytest.raises(ValueError, match=r"mode: .*'step' in process 0 and 'x' in process 2\."):
        check_options(own, job, Told({}, {"mode": "'x'"}))
