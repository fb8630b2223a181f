"""Errors in users' code that come from cutting the batch: the note says what the likely cause is.

On one device the same code works: that is shown, too, where it can be.
"""

import itertools
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
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader

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


# Plain objects that keep tensors, which somebody uses after the step


class Meter:
    """Keeps what it is called with."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Tensor]] = {"values": []}

    def __call__(self, x: Tensor) -> None:
        self.seen["values"].append(x.detach())

    def mean(self) -> Tensor:
        return torch.stack(self.seen["values"]).mean()


class Measured(oracle.Classifier):
    """Calls a meter in a step, and asks it at the end of the epoch."""

    phase, by_hand = "train", False

    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()
        self.automatic_optimization = not self.by_hand

    def forward(self, x: Tensor) -> Tensor:
        self.meter(x.sum())
        return super().forward(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return self.manual_backward(loss) if self.by_hand else loss

    def val_dataloader(self) -> Any:
        return loader()

    def on_train_epoch_end(self) -> None:
        if self.phase == "train":
            self.meter.mean()

    def on_validation_epoch_end(self) -> None:
        if self.phase == "validation":
            self.meter.mean()


class MeasuredByHand(Measured):
    by_hand = True


@on_separate
@pytest.mark.parametrize("executor", ["threads", "inorder"])
@pytest.mark.parametrize("phase", ["train", "validation"])
@pytest.mark.parametrize(
    ("make", "mode"), [(Measured, "step"), (Measured, "forward"), (MeasuredByHand, "step")]
)
def test_a_meter_that_has_kept_tensors_of_all_replicas_is_named(
    make: Any, mode: Any, phase: str, executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Measured, "phase", phase)
    text = failed(make, error=RuntimeError, mode=mode, executor=executor)
    name = r"self.meter.seen\['values'\]"
    assert text.startswith("Expected all tensors to be on the same device")
    assert re.search(
        rf"likely cause: {name}\[\d+\] lies on \w+:\d and {name}\[\d+\] on \w+:\d", text
    )
    assert "on_train_batch_end" in text and text.count("likely cause") == 1
    works_on_one_device(make)


@on_separate
def test_an_error_about_devices_after_a_step_that_is_nobody_elses_is_left_alone() -> None:
    class Wrong(oracle.Classifier):
        def on_train_epoch_end(self) -> None:
            one, other = devices_of(2)
            torch.ones(1, device=one) + torch.ones(1, device=other)

    class Other(Measured):
        def on_train_epoch_end(self) -> None:
            raise LookupError("no sim:1 here")

    assert "likely" not in failed(Wrong)
    assert "likely" not in failed(Other)


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


# Padding


class Padded(oracle.Classifier):
    """Unpacks sequences without saying how long they are to be."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(1, 1, batch_first=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        packed = pack_padded_sequence(
            batch["x"][..., None], batch["lengths"].cpu(), batch_first=True, enforce_sorted=False
        )
        y = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]
        return (y[..., 0] - batch["target"]).square().mean()


def padded() -> Any:
    lengths = torch.tensor([9, 8, 7, 6, 5, 4, 3, 2])
    samples = [
        {"x": torch.ones(9), "target": torch.zeros(9), "lengths": length} for length in lengths
    ]
    return DataLoader(samples, 8)


def test_padding_that_is_longer_than_the_shard_is_named() -> None:
    text = failed(Padded, padded(), k=2, executor="inorder")
    assert "padded to 9" in text and "total_length=9" in text
    works_on_one_device(Padded, padded())


# Objects that all replicas share


class Env:
    """An environment whose episode ends after two steps."""

    def __init__(self) -> None:
        self.steps = itertools.count()

    def step(self) -> float:
        if next(self.steps) >= 2:
            raise RuntimeError("the episode is over: call reset()")
        return 0.0


@pytest.mark.parametrize("mode", ["step", "manual"])
@pytest.mark.parametrize("executor", ["threads", "inorder"])
def test_an_object_that_all_replicas_share_is_named(executor: str, mode: str) -> None:
    class Agent(oracle.Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.parts = {"env": Env()}
            self.automatic_optimization = mode == "step"

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.parts["env"].step()
            if mode == "manual":
                return self.manual_backward(self.loss(batch))
            return super().training_step(batch, batch_idx)

    text = failed(Agent, loader(25), executor=executor, error=RuntimeError)
    assert text.startswith("the episode is over")
    assert "raised in self.parts['env'] (Env), one object that all 3 replicas call" in text
    if mode == "step":
        works_on_one_device(Agent, loader(25))


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


# What is no cause, and a batch that is none


def loss_of_nobody(x: Tensor) -> Tensor:
    """Fails in a function, where nothing is called `self`, or it is None."""
    self = None
    return x @ torch.ones(3, 3) if self is None else x


def test_a_function_is_no_object_that_replicas_share() -> None:
    class Failing(oracle.Classifier):
        example_input_array = None

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return loss_of_nobody(batch[0].cpu())

    assert "one object" not in failed(Failing)


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")
def test_a_single_sample_is_named() -> None:
    data = DataLoader(oracle.samples(20), batch_size=None)
    text = failed(oracle.Classifier, data)
    assert "likely cause: the batch may be a single sample, a row of 10 numbers and a label" in text
    works_on_one_device(oracle.Classifier, data)
