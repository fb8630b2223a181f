"""Errors in users' code that come from cutting the batch: the note says what the likely cause is.

On one device the same code works: that is shown, too, where it can be.
"""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from oracle import devices_of, loader, trainer
from places import on_separate
from spreading import inputs, said, wrapping
from torch import Tensor, nn

from lightning_dp import DataParallelStrategy

pytestmark = [
    pytest.mark.usefixtures("on"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]


def failed(
    make: Callable[[], Any], data: Any = None, *, k: int = 3, error: Any = Exception, **options: Any
) -> str:
    """What a fit says that fails on several devices."""
    torch.manual_seed(0)
    options = {"executor": "threads", **options}
    job = trainer(k, DataParallelStrategy(**options), max_epochs=1)
    with pytest.raises(error) as caught:
        job.fit(make(), data or loader())
    return said(caught.value)


def works_on_one_device(make: Callable[[], Any], data: Any = None) -> None:
    torch.manual_seed(0)
    trainer(1, max_epochs=1).fit(make(), data or loader())


# Tensors of plain objects


class Scaler:
    """Caches a tensor where it sees the first sample."""

    def __init__(self) -> None:
        self.parts: dict[str, Any] = {"scale": None}

    def __call__(self, x: Tensor) -> Tensor:
        if self.parts["scale"] is None:
            self.parts["scale"] = torch.full((10,), 2.0, device=x.device)
        return x * self.parts["scale"]


class Cached(oracle.Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.helper = Scaler()

    def on_fit_start(self) -> None:
        self.helper(torch.zeros(10, device=self.device))

    def loss(self, batch: Any) -> Tensor:
        return super().loss([self.helper(batch[0]), batch[1]])


class Hidden(oracle.Classifier):
    """The helper hangs on a layer, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].helpers = [Scaler()]

    def on_fit_start(self) -> None:
        self.net[0].helpers[0](torch.zeros(10, device=self.device))

    def loss(self, batch: Any) -> Tensor:
        return super().loss([self.net[0].helpers[0](batch[0]), batch[1]])


class Prior(oracle.Classifier):
    """A distribution, which `to` does not move."""

    def on_fit_start(self) -> None:
        self.prior = torch.distributions.Normal(torch.zeros(10).to(self.device), 1.0)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) - self.prior.log_prob(batch[0]).mean()


@on_separate
@pytest.mark.parametrize("executor", ["threads", "inorder"])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Cached, r"self.helper.parts\['scale'\]"),
        (Hidden, r"self.net.0.helpers\[0\].parts\['scale'\]"),
        (Prior, "self.prior.loc"),
    ],
)
def test_a_tensor_in_a_plain_object_elsewhere_is_named(make: Any, name: str, executor: str) -> None:
    text = failed(make, executor=executor)
    assert re.search(rf"likely cause: {name} lies on \w+:\d, and this replica on \w+:\d", text)
    assert "register_buffer" in text
    works_on_one_device(make)


@on_separate
@pytest.mark.parametrize("executor", ["threads", "inorder"])
def test_in_forward_mode_and_in_the_drop_in_too(executor: str) -> None:
    class Net(nn.Linear):
        def __init__(self) -> None:
            super().__init__(10, 2)
            self.helper = Scaler()
            self.helper(torch.zeros(10, device=devices_of(1)[0]))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.helper(x))

    with wrapping() as wrap, pytest.raises(Exception) as caught:
        wrap(Net(), 2, executor=executor)(inputs(6, 10).float())
    assert f"self.helper.parts['scale'] lies on {devices_of(1)[0]}" in said(caught.value)

    class Forward(oracle.Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self(batch[0]).sum()

    text = failed(Forward, mode="forward", executor=executor)
    assert f"self.net.helper.parts['scale'] lies on {devices_of(1)[0]}" in text


@on_separate
def test_an_error_about_devices_that_is_nobody_elses_is_left_alone() -> None:
    class Wrong(oracle.Classifier):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) + torch.zeros(2, device=devices_of(4)[3]).sum()

    assert "lies on" not in failed(Wrong)


# What was made for whole batches


class State(oracle.Classifier):
    """Keeps a state for 25 samples."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(25, 10))

    def loss(self, batch: Any) -> Tensor:
        return super().loss([batch[0] + self.state, batch[1]])


class Sizes(oracle.Classifier):
    """Knows the batch's size by heart."""

    batch_length = 25

    def loss(self, batch: Any) -> Tensor:
        return super().loss([batch[0].view(self.batch_length, 10), batch[1]])


def test_what_is_made_for_whole_batches_is_named() -> None:
    data = lambda: loader(50)
    text = failed(State, data())
    assert "25 is the size of the whole batch, and 9 that of this shard" in text
    assert "self.state has the shape (25, 10)" in text
    works_on_one_device(State, data())
    text = failed(Sizes, data())
    assert "25 is the size of the whole batch" in text and "has the shape" not in text
    works_on_one_device(Sizes, data())


def test_an_error_in_a_module_or_in_ones_own_code_has_no_cause() -> None:
    class Plain(oracle.Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(width=3, device=self.device)

        def loss(self, batch: Any) -> Tensor:
            if len(batch[0]) < 25:
                raise ValueError("some device says 7 of 25")
            return super().loss(batch)

    text = failed(Plain)
    assert "likely" not in text and "lies on" not in text and "raised in self" not in text


def test_hostile_objects_on_self_do_not_replace_the_error() -> None:
    class Hostile:
        def __getattr__(self, name: str) -> Any:
            raise SystemError("hands off")

        def __repr__(self) -> str:
            raise SystemError("hands off")

        def __eq__(self, other: object) -> bool:
            raise SystemError("hands off")

        __hash__ = None

    class Holder(oracle.Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.hostile = Hostile()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise LookupError("device 25")

    text = failed(Holder, error=LookupError)
    assert text.startswith("device 25") and "in replica 0 on" in text
