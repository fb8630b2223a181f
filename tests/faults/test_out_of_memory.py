"""A step that does not fit on a device runs again with fewer samples there, as if nothing was."""

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.oracle import Classifier, assert_same, loader, run, trainer
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_dp import DataParallelStrategy

pytestmark = pytest.mark.on("sim")  # Of a GPU's memory no limit can be set to the byte.

WIDTH = 512
"""Wide enough for activations to be what memory goes to."""


class Wide(Classifier):
    """Its steps take memory in proportion to the samples; it leaves state in many places."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)).double()
        self.seen: list[Tensor] = []
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch[1])
        loss = self.loss(batch)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss


class HeavyBackward(torch.autograd.Function):
    """Takes memory in the backward only: `factor` times its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        heavy = gradient.repeat(ctx.factor, 1)
        return gradient + 0 * heavy[: len(gradient)], None


class WideInBackward(Wide):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        h = HeavyBackward.apply(self.net[:2](x), 8)
        return nn.functional.cross_entropy(self.net[2](h), y)


PARAMETERS = 8 * (10 * WIDTH + WIDTH + 3 * WIDTH + 3)
PER_SAMPLE = 8 * WIDTH
SMALL = 3 * PARAMETERS + 6 * PER_SAMPLE
"""Room for weights, gradients, one of both on its way from or to the root, some samples of 13."""


@pytest.mark.parametrize(
    ("make", "split"),
    [
        (Wide, "even"),
        (Wide, "memory"),
        (WideInBackward, "adaptive"),
    ],
)
def test_a_device_that_is_too_small_for_its_share(make: Any, split: str, room: Any) -> None:
    room(1, SMALL)
    options: dict[str, Any] = {"precision": "64-true", "max_epochs": 1}
    result = run(make, 2, strategy={"split": split}, **options)
    assert 0 < result.trainer.strategy.usage[1].samples < result.trainer.strategy.usage[0].samples
    room(1, 2**30)
    expected = run(make, 1, **options)
    assert_same(result, expected)
    kept = [[t.tolist() for t in job.module.seen] for job in (result, expected)]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("make", [Wide, WideInBackward])
def test_when_no_split_fits_the_error_says_where_it_ran_out(make: Any, room: Any) -> None:
    for device in (0, 1):
        room(device, SMALL + 3 * PARAMETERS * (device == 0))  # the root holds the sums too
    job = trainer(2, DataParallelStrategy(), precision="64-true", max_steps=1, max_epochs=-1)
    with pytest.raises(torch.OutOfMemoryError, match=r"sim:[01] with \d+ of 80 samples") as caught:
        job.fit(make(), loader(80, 80), loader(2))
    assert "Make the batch smaller" in str(caught.value) and "said: " in str(caught.value)


class FailsWhileAnotherWorks(torch.autograd.Function):
    """The first backward fails on sim:0 while sim:1 takes its time.

    `was_overtaken` says whether a later step began before sim:1 was through.
    """

    begun, failed, again = threading.Event(), threading.Event(), threading.Event()
    was_overtaken = False
    fail: Callable[[Tensor], object]

    @classmethod
    def prepare(cls, fail: Callable[[Tensor], object]) -> None:
        for event in (cls.begun, cls.failed, cls.again):
            event.clear()
        cls.was_overtaken, cls.fail = False, staticmethod(fail)

    @classmethod
    def begin_step(cls) -> None:
        if cls.failed.is_set():
            cls.again.set()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        own = FailsWhileAnotherWorks
        if gradient.device.index == 1:
            is_first = not own.begun.is_set()
            own.begun.set()
            if is_first and own.failed.wait(30):
                own.was_overtaken = own.again.wait(0.5)
        elif gradient.device.index == 0 and not own.failed.is_set():
            assert own.begun.wait(30)
            own.failed.set()
            own.fail(gradient)
        return gradient


class SlowInBackward(Wide):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        FailsWhileAnotherWorks.begin_step()
        return nn.functional.cross_entropy(FailsWhileAnotherWorks.apply(self.net(x)), y)


@pytest.mark.usefixtures("unchecked")
def test_devices_that_are_still_at_work_are_waited_for(room: Any) -> None:
    """What they hold and write is not to meet the step that runs again."""
    room(0, 2**30)
    options: dict[str, Any] = {"precision": "64-true", "max_epochs": 1}
    FailsWhileAnotherWorks.prepare(lambda gradient: gradient.new_empty(10**12))
    result = run(SlowInBackward, 2, **options)
    assert FailsWhileAnotherWorks.again.is_set() and not FailsWhileAnotherWorks.was_overtaken
    assert_same(result, run(SlowInBackward, 1, **options))


class Careless(Wide):
    """Runs out of memory by itself, whatever its shard is."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise torch.OutOfMemoryError("the user's own")


def test_an_error_that_no_device_has_counted_is_passed_on(room: Any) -> None:
    room(1, SMALL)
    with pytest.raises(torch.OutOfMemoryError, match="the user's own"):
        trainer(2, precision="64-true").fit(Careless(), loader(), loader(2))


class Normed(Wide):
    """Batch norm writes its statistics in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10).double()

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return super().loss((self.norm(x), y))


class NormedInBackward(Normed, WideInBackward):
    pass


@pytest.mark.parametrize("broken", [Normed, NormedInBackward])
def test_what_the_half_done_step_wrote_is_taken_back(broken: Any, room: Any, caplog: Any) -> None:
    """Statistics, lists and counters are those of steps that all were done once; it is told."""
    room(1, SMALL)
    job = trainer(2, DataParallelStrategy(), precision="64-true", max_epochs=1)
    module = broken()
    job.fit(module, loader(50), loader(2))
    assert module.norm.num_batches_tracked == 2
    assert len(module.seen) == 2
    assert job.global_step == 2
    samples = [usage.samples for usage in job.strategy.usage]
    assert sum(samples) == 50 and samples[1] < samples[0]
    (text, *_) = [r.getMessage() for r in caplog.records if r.name == "lightning_dp"]
    assert re.search(r"sim:1 with \d+ of 25 samples.*run again", text)


@pytest.mark.parametrize("make", [Wide, WideInBackward])
@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}])
def test_gradients_that_accumulate_are_not_lost(make: Any, options: Any, room: Any) -> None:
    options = {**options, "precision": "64-true"}
    room(1, SMALL + 2 * PARAMETERS)
    result = run(make, 2, **options)
    room(1, 2**30)
    assert result.trainer.strategy.usage[1].samples < 26 * 3
    assert_same(result, run(make, 1, **options))


def test_forward_mode_recovers_in_the_spread_forward(room: Any) -> None:
    room(1, 3 * PARAMETERS + 60 * PER_SAMPLE)
    result = run(Spread, 2, strategy={"mode": "forward"}, precision="64-true")
    room(1, 2**30)
    assert 0 < result.trainer.strategy.usage[1].samples < result.trainer.strategy.usage[0].samples
    assert_same(result, run(Spread, 1, precision="64-true"))


class Spread(Wide):
    """Its forward takes more than its backward."""

    def forward(self, x: Tensor) -> Tensor:
        heavy = x.new_zeros(8 * len(x), WIDTH)
        z: Tensor = self.net(x) + heavy[: len(x), :3]
        return z

    loss = Classifier.loss
    predict_step = Classifier.predict_step


class Total(Metric):
    """Runs out of memory in an update with the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), "sum")

    def update(self, x: Tensor) -> None:
        self.total += x.sum()
        if len(x) > 20:
            x.new_empty(10**12)

    def compute(self) -> Tensor:
        return self.total


class Measuring(Classifier):
    """Measures in a forward, which in forward mode is spread."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.total = self.net.double(), Total()

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.total.update(x.detach())
        return self.net(x)


@pytest.mark.parametrize("mode", ["step", "forward"])
@pytest.mark.usefixtures("unchecked")
def test_no_room_for_the_whole_batch_is_an_error_that_names_the_metric(
    mode: Any, room: Any
) -> None:
    """Other sizes of shards would not help: the metric gets the whole batch."""
    for device in range(3):
        room(device, 2**30)
    text = r"Expected room.*out of memory.*in update of the metric total \(Total\).*smaller"
    with pytest.raises(RuntimeError, match=text) as caught:
        job = trainer(3, DataParallelStrategy(mode=mode), precision="64-true")
        job.fit(Measuring(), loader(), loader(3))
    assert not isinstance(caught.value, torch.OutOfMemoryError)
