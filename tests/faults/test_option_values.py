"""What options may not be is refused in one line that begins with the option's own name.

Every option of the strategy and of the drop-in is given every value of a list of odd ones: it is
taken where the option's documentation allows it, and refused by name everywhere else.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn

from lightning_dp import DataParallel, DataParallelStrategy


class Hostile:
    """Compares with nothing, and cannot be printed."""

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    def __repr__(self) -> str:
        raise RuntimeError("no text")


ODD: dict[str, Any] = {
    "5": 5,
    "1.5": 1.5,
    "nan": float("nan"),
    "True": True,
    "'no'": "no",
    "[]": [],
    "[None]": [None],
    "too large to print": 10**5000,
    "{1: 2}": {1: 2},
    "{'a': 5}": {"a": 5},
    "set": {1, 2},
    "10**30": 10**30,
    "iterator": iter([1, 2]),
    "array": np.array([1.0, 2.0]),
    "numpy float": np.float64(2),
    "tensor": torch.ones(3, 3),
    "hostile": Hostile(),
    "devices": ["cpu", "cpu:99"],
}
ALLOWED = {
    ("dim", "5"),
    ("move_batch", "True"),
    ("check_first_step", "True"),
    ("check_first_call", "True"),
    ("sample_cost", "'no'"),
    ("timeout", "5"),
    ("timeout", "1.5"),
    ("timeout", "numpy float"),
    ("parallel_modules", "[]"),
    ("parallel_modules", "devices"),  # they are names, if not of submodules of this one
}
LIGHTNINGS = {"accelerator", "cluster_environment", "checkpoint_io", "precision_plugin"}


def strategy(option: str, value: Any) -> None:
    options: dict[str, Any] = {"devices": ["cpu", "cpu"], option: value}
    if option == "sample_cost":
        options["split"] = "cost"
    if option in ("parallel_modules", "move_batch"):
        options["mode"] = "forward"
    silent = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    Trainer(
        strategy=DataParallelStrategy(**options),
        accelerator="cpu",
        enable_checkpointing=False,
        **silent,
    )


def drop_in(option: str, value: Any) -> None:
    options: dict[str, Any] = {"device_ids": ["cpu", "cpu"], option: value}
    DataParallel(nn.Linear(2, 2), **options)(torch.ones(4, 2))


MAKERS: dict[str, tuple[Callable[[str, Any], None], list[str]]] = {
    "strategy": (strategy, sorted(set(inspect.signature(DataParallelStrategy).parameters))),
    "drop-in": (drop_in, sorted(set(inspect.signature(DataParallel).parameters) - {"module"})),
}
CASES = [(maker, option) for maker, (_, options) in MAKERS.items() for option in options]


@pytest.mark.parametrize(("maker", "option"), CASES, ids=str)
def test_odd_values_are_refused_in_one_line_with_the_options_name(maker: str, option: str) -> None:
    if option in LIGHTNINGS:
        pytest.skip("Lightning's own options")
    make, _ = MAKERS[maker]
    for name, value in ODD.items():
        if (option, name) in ALLOWED:
            make(option, value)
            continue
        with pytest.raises(ValueError) as refused:
            make(option, value)
        text = str(refused.value)
        assert text.startswith(option), f"{option}={name}: {text}"
        assert "\n" not in text and len(text) < 500, f"{option}={name}: {text}"


def test_numbers_of_numpy_are_numbers() -> None:
    shares = [np.float32(1), np.int64(3)]
    net = DataParallel(nn.Linear(2, 2), device_ids=["cpu", "cpu"], weights=shares)
    assert net(torch.ones(4, 2)).shape == (4, 2)

    def sizes(n: int, devices: Any) -> Any:
        return [np.int64(n - 1), np.int64(1)]

    assert (
        DataParallel(nn.Linear(2, 2), ["cpu", "cpu"], split=sizes)(torch.ones(4, 2)).shape[0] == 4
    )


def test_an_option_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'outputdevice'"):
        DataParallelStrategy(outputdevice=1)  # type: ignore[call-arg]  # on purpose
    with pytest.raises(TypeError, match="takes 1 positional argument but 2 were given"):
        DataParallelStrategy("forward")  # type: ignore[call-arg]  # on purpose


def test_a_strategy_shows_its_options_and_package() -> None:
    options: dict[str, Any] = {"mode": "step", "split": "auto", "weights": None, "dim": 1}
    text = "<DataParallelStrategy(mode='step', split='auto') for a Trainer of lightning>"
    assert repr(DataParallelStrategy(**options)) == text
    trainer = Trainer(strategy="dp_custom_forward", accelerator="cpu", devices=1, logger=False)
    assert "(mode='forward', " in repr(copy.deepcopy(trainer.strategy))
