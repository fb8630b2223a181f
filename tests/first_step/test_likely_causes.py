"""Errors in users' code that come from cutting the batch: the note names a likely cause."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import oracle
from support.device_kinds import on_separate
from support.forward_twins import inputs, said, wrapping
from support.oracle import devices_of, loader, trainer
from torch import Tensor, nn

from lightning_dp import DataParallelStrategy

pytestmark = [pytest.mark.usefixtures("on"), pytest.mark.filterwarnings("ignore")]


class Scaler:
    """Caches a tensor where it sees the first sample."""

    def __init__(self) -> None:
        self.parts: dict[str, Any] = {"scale": None}

    def __call__(self, x: Tensor) -> Tensor:
        if self.parts["scale"] is None:
            self.parts["scale"] = torch.full((10,), 2.0, device=x.device)
        return x * self.parts["scale"]


class Cached(oracle.Classifier):
    """The helper hangs on a layer, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].helpers = [Scaler()]

    def on_fit_start(self) -> None:
        self.net[0].helpers[0](torch.zeros(10, device=self.device))


class OfHelper(Cached):
    def loss(self, batch: Any) -> Tensor:
        return super().loss([self.net[0].helpers[0](batch[0]), batch[1]])


class OfPrior(oracle.Classifier):
    """A distribution is not moved by `to`."""

    def on_fit_start(self) -> None:
        self.prior = torch.distributions.Normal(torch.zeros(10, device=self.device), 1.0)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) - self.prior.log_prob(batch[0]).mean()


class Wrong(oracle.Classifier):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + torch.zeros(2, device=devices_of(4)[3]).sum()


class State(oracle.Classifier):
    """Keeps a state for 25 samples."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(25, 10))

    def loss(self, batch: Any) -> Tensor:
        return super().loss([batch[0] + self.state, batch[1]])


class Sizes(oracle.Classifier):
    """Knows the batch's size by heart."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss([batch[0].view(25, 10), batch[1]])


class Plain(oracle.Classifier):
    def loss(self, batch: Any) -> Tensor:
        if len(batch[0]) < 25:
            raise ValueError("some device says 7 of 25")
        return super().loss(batch)


class Hostile:
    def __getattr__(self, name: str) -> Any:
        raise SystemError("hands off")

    __repr__ = __eq__ = __getattr__  # type: ignore[assignment]  # nothing works on it
    __hash__ = None  # type: ignore[assignment]  # nothing works on it


class Holder(oracle.Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.hostile = Hostile()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise LookupError("device 25")


def note_of(make: Callable[[], Any], executor: Any) -> str:
    torch.manual_seed(0)
    job = trainer(3, DataParallelStrategy(executor=executor), max_epochs=1)
    with pytest.raises(Exception) as caught:
        job.fit(make(), loader(50))
    return said(caught.value)


WHOLE = "25 is the size of the whole batch, and 9 that of this shard"


@pytest.mark.parametrize("executor", ["threads", "inorder"])
@pytest.mark.parametrize(
    ("make", "expected", "absent"),
    [
        (State, [WHOLE, "self.state has the shape (25, 10)"], []),
        (Sizes, [WHOLE], ["has the shape"]),
        (Plain, [], ["likely", "lies on", "raised in self"]),
        (Holder, ["device 25", "in replica 0 on"], ["hands off"]),
    ],
)
def test_what_is_made_for_whole_batches_is_named(
    make: Callable[[], Any], expected: list[str], absent: list[str], executor: Any
) -> None:
    text = note_of(make, executor)
    assert all(part in text for part in expected) and not any(part in text for part in absent)


@on_separate
@pytest.mark.parametrize("executor", ["threads", "inorder"])
@pytest.mark.parametrize(
    ("make", "name"),
    [(OfHelper, "self.net.0.helpers[0].parts['scale']"), (OfPrior, "self.prior.loc"), (Wrong, "")],
)
def test_a_tensor_in_a_plain_object_elsewhere_is_named(make: Any, name: str, executor: Any) -> None:
    text = note_of(make, executor)
    assert (f"likely cause: {name} lies on " in text and "register_buffer" in text) is bool(name)


@on_separate
@pytest.mark.parametrize("executor", ["threads", "inorder"])
def test_the_drop_in_names_it_too(executor: Any) -> None:
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
