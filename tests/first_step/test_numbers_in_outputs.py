"""Numbers that steps return beside a loss: those that are no means over samples are told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import ByHand, Classifier, loader, run
from test_logged_means import MEANS, OTHERS, Number
from torch import Tensor
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("one_thread")

TOLD = "expected numbers in its output that are means over samples, or whole numbers that are sums"


def number_in(output: Any) -> float:
    return float(output.detach() if isinstance(output, Tensor) else output)


def returning(number: Number, *bases: type) -> Any:
    """Returns a number of each batch, in training and in evaluation, which hooks get."""

    class Returning(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.got: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            z = self(batch[0])
            return {"loss": F.cross_entropy(z, batch[1]), "own": {"number": number(z, batch[1])}}

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return [number(self(batch[0]), batch[1])]

        def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
            self.got.append(number_in(outputs["own"]["number"]))

        def on_validation_batch_end(self, outputs: Any, *args: Any) -> None:
            self.got.append(number_in(outputs[0]))

    return type("Returning", (*bases, Returning), {})


def got(ran: Any) -> Tensor:
    return torch.tensor(ran.module.got)


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("name", [name for name in MEANS if name != "detached"])  # has a dim
def test_means_over_samples_are_as_on_one_device_and_are_not_told(name: str) -> None:
    make = returning(MEANS[name])
    torch.testing.assert_close(got(run(make, 3)), got(run(make, 1)), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("output_device", [None, "cpu"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_numbers_are_told_once_for_each_step_and_are_not_as_on_one_device(
    name: str, output_device: str | None
) -> None:
    number, text = OTHERS[name]
    make = returning(number)
    with pytest.warns(UserWarning, match=TOLD) as records:
        several = got(run(make, 3, strategy={"output_device": output_device}))
    told = [str(record.message) for record in records if TOLD in str(record.message)]
    places = {"training_step": "['own']['number']", "validation_step": "[0]"}
    assert {message.split(":")[0] for message in told} == places.keys()
    assert sum(message.startswith("training_step") for message in told) == 1
    for message in told:
        assert f"{text}" in message and f"as output{places[message.split(':')[0]]}." in message
    assert not torch.allclose(several, got(run(make, 1)))


def test_whole_numbers_are_added_up_and_told_where_that_is_no_sum() -> None:
    make = returning(lambda z, y: (z.argmax(1) == y).sum())
    torch.testing.assert_close(got(run(make, 3)), got(run(make, 1)))
    with pytest.warns(UserWarning, match=f"{TOLD}, got max over samples as"):
        run(returning(lambda z, y: y.max()), 3)


def test_what_gather_overrides_say_is_not_told() -> None:
    make = returning(lambda z, y: z.abs().sum())
    several = run(make, 3, strategy={"gather_overrides": {"own.number": "sum", "0": "sum"}})
    torch.testing.assert_close(got(several), got(run(make, 1)), rtol=1e-4, atol=1e-4)


def test_later_looks_tell_nothing_twice() -> None:
    with pytest.warns(UserWarning, match=TOLD) as records:
        run(returning(OTHERS["deviation"][0]), 3, data=lambda: loader(500, 25))
    assert sum("training_step: " + TOLD in str(record.message) for record in records) == 1


def test_in_manual_optimisation_too() -> None:
    class Returning(ByHand):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            super().training_step(batch, batch_idx)
            return {"largest": self(batch[0]).max()}

    with pytest.warns(UserWarning, match=f"{TOLD}, got max over samples as output..largest"):
        run(type("Returning", (Returning, Classifier), {}), 3)
