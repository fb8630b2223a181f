"""State that a step keeps in buffers: of a batch, it has to be gathered."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import Classifier, assert_same, loader, run, trainer
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dp import DataParallelStrategy

pytestmark = pytest.mark.usefixtures("on", "one_thread")


class Queueing(Classifier):
    """A queue of keys, a place in it and a moving centre, all of the batch."""

    gathers = False
    leaves: Callable[[Any, Tensor], None]

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(64, 3))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))
        self.register_buffer("centre", torch.zeros(3))
        self.register_buffer("mask", torch.ones(3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def loss(self, batch: Any) -> Tensor:
        z = self.net(batch[0])
        loss = F.cross_entropy(z + self.queue.mean(0) - self.centre, batch[1])
        if self.training:
            keys = z.detach()
            self.steps += 1
            type(self).leaves(self, self.all_gather(keys) if self.gathers else keys)
        return loss


def fill_queue(net: Queueing, keys: Tensor) -> None:
    place = int(net.place)
    rows = (torch.arange(len(keys), device=keys.device) + place) % len(net.queue)
    net.queue[rows] = keys
    net.place[()] = (place + len(keys)) % len(net.queue)


def move_centre(net: Queueing, keys: Tensor) -> None:
    net.centre = 0.9 * net.centre + 0.1 * keys.mean(0)


def move_centre_without_a_trace(net: Queueing, keys: Tensor) -> None:
    net.centre.data.mul_(0.9).add_(0.1 * keys.mean(0))


def nothing(net: Queueing, keys: Tensor) -> None:
    """Counts steps, as always, and leaves nothing of the batch."""


LEAVES = {fill_queue: "queue, place", move_centre: "centre", move_centre_without_a_trace: "centre"}


def module(leaves: Any, **attributes: Any) -> type[Queueing]:
    return type("Queueing", (Queueing,), {"leaves": staticmethod(leaves), **attributes})


@pytest.mark.parametrize("leaves", [fill_queue, move_centre])
@pytest.mark.parametrize("how", ["gathers", "forward", "nothing"])
def test_the_ways_out_are_as_on_one_device(leaves: Any, how: str) -> None:
    torch.set_default_dtype(torch.float64)
    options: dict[str, Any] = {"data": lambda: loader(72, 24)}  # of shards of one size
    strategy: dict[str, Any] = {"parallel_modules": ["net"], "mode": "forward"}
    make = module(nothing if how == "nothing" else leaves, gathers=how == "gathers")
    several = run(make, 3, strategy=strategy if how == "forward" else {}, **options)
    assert_same(several, run(module(make.leaves), 1, **options))


def test_what_is_kept_by_choice_is_not_told() -> None:
    torch.set_default_dtype(torch.float64)
    options: dict[str, Any] = {"data": lambda: loader(50, 25)}
    make = module(lambda net, keys: net.centre.mul_(0.9).add_(0.1 * keys.mean(0)))
    several = run(make, 3, strategy={"buffers": "mean"}, **options)
    assert_same(several, run(make, 1, **options))


class Normalised(Classifier):
    """Layers whose statistics are known to be those of shards, or the same everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(10, 6)),
            nn.BatchNorm1d(6),
            nn.Linear(6, 3),
        )


def test_layers_that_normalise_are_not_told() -> None:
    trainer(3).fit(Normalised(), loader(50, 25), loader())


@pytest.mark.parametrize("leaves", [*LEAVES, nothing])
def test_the_check_of_the_first_step_finds_it(leaves: Any) -> None:
    strategy = DataParallelStrategy(check_first_step=True)
    texts: list[str] = []
    with pytest.warns(UserWarning) as caught:
        torch.manual_seed(0)
        trainer(3, strategy, max_epochs=1).fit(module(leaves)(), loader(50, 25), loader())
        import warnings

        warnings.warn("one at least", stacklevel=1)
    texts = [str(w.message) for w in caught if "check_first_step" in str(w.message)]
    if leaves is nothing:
        assert not texts
    else:
        [text] = texts
        assert all(f"- buffer {name}: " in text for name in LEAVES[leaves].split(", ")), text
