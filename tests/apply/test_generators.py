"""Each device draws its own random numbers, and an activation checkpoint its own again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.oracle import Classifier, devices_of, loader, trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_dp import DataParallel, DataParallelStrategy

pytestmark = pytest.mark.usefixtures("on", "one_thread")
REFUSED = r'Expected no activation checkpoint.*Choose executor="inorder"'
WAYS = pytest.mark.parametrize("is_reentrant", [False, True], ids=["new", "reentrant"])
CALLS = 8


class Dropped(nn.Module):
    """Linear in its weights: with their gradients multiplied, these add up to the outputs."""

    def __init__(self, is_reentrant: bool = False, p: float = 0.5, preserve: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, 1024, dtype=torch.float64))
        self.p = p
        self.options = {"use_reentrant": is_reentrant, "preserve_rng_state": preserve}

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = checkpoint(self.part, x.requires_grad_(), **self.options)
        return x

    def part(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.weight.expand_as(x), self.p)


def has_the_forwards_numbers(wrapper: Any, net: Dropped) -> bool:
    net.weight.grad = None
    total = wrapper(torch.zeros(8, 1024, dtype=torch.float64)).sum()
    total.backward()
    assert net.weight.grad is not None
    return torch.allclose((net.weight * net.weight.grad).sum(), total)


def wrapped(net: Dropped, devices: Any, executor: Any) -> DataParallel[Dropped]:
    return DataParallel(net.to(devices[0]), devices, executor=executor)


@pytest.mark.on("cpu")
@WAYS
@pytest.mark.parametrize("executor", ["auto", "inorder"])
def test_replicas_of_one_generator_take_turns(is_reentrant: bool, executor: Any) -> None:
    net = Dropped(is_reentrant)
    wrapper = wrapped(net, devices_of(1) * 3, executor)
    assert all([has_the_forwards_numbers(wrapper, net) for _ in range(CALLS)])
    wrapper.close()


@WAYS
def test_in_threads_they_are_refused_and_go_on_in_turns(is_reentrant: bool) -> None:
    net = Dropped(is_reentrant)
    wrapper = wrapped(net, devices_of(1) * 3, "threads")
    with pytest.raises(RuntimeError, match=REFUSED):
        wrapper(torch.zeros(8, 1024, dtype=torch.float64))
    assert all([has_the_forwards_numbers(wrapper, net) for _ in range(CALLS)])
    wrapper.close()


@pytest.mark.on("sim", "multigpu")
def test_devices_with_generators_of_their_own_may_run_at_once() -> None:
    net = Dropped()
    wrapper = wrapped(net, devices_of(3), "threads")
    assert all([has_the_forwards_numbers(wrapper, net) for _ in range(CALLS)])
    wrapper.close()


@pytest.mark.on("cpu")
@pytest.mark.parametrize("preserve", [True, False])
def test_checkpoints_that_draw_nothing_run_in_threads(preserve: bool) -> None:
    net = Dropped(p=0.0, preserve=preserve)
    wrapper = wrapped(net, devices_of(1) * 3, "threads")
    assert all([has_the_forwards_numbers(wrapper, net) for _ in range(3)])
    wrapper.close()


@pytest.mark.on("cpu")
@pytest.mark.parametrize(("mode", "executor"), [("step", "auto"), ("forward", "inorder")])
def test_a_fit_has_the_forwards_numbers(mode: Any, executor: Any) -> None:
    class Fitted(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.dropped = Dropped()
            self.agrees: list[bool] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            zeros = torch.zeros(len(batch[0]), 1024, dtype=torch.float64, device=self.device)
            return self.dropped(zeros).mean()

        def on_after_backward(self) -> None:
            weight = self.dropped.weight
            assert weight.grad is not None
            self.agrees.append((weight * weight.grad).sum().item())

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.agrees[-1] = abs(self.agrees[-1] - outputs["loss"].item()) < 1e-9

    options: Any = {"parallel_modules": ["dropped"]} if mode == "forward" else {}
    module, strategy = Fitted(), DataParallelStrategy(mode=mode, executor=executor, **options)
    trainer(3, strategy, max_epochs=2).fit(module, loader(n=96, batch_size=8), loader())
    assert len(module.agrees) == 24 and all(module.agrees)


class Drawing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.rand_like(x) + 0 * F.dropout(x)


def drawn(seeds: list[int], calls: int = 2) -> list[list[Tensor]]:
    """What each of three devices draws, call by call."""
    wrapper = DataParallel(Drawing(), devices_of(3), output_device="cpu", executor="threads")
    found = []
    for seed in seeds:
        torch.manual_seed(seed)
        found += [list(wrapper(torch.zeros(6, 4)).chunk(3)) for _ in range(calls)]
    wrapper.close()
    return found


@pytest.mark.on("sim", "multigpu")
def test_devices_of_one_seed_draw_different_numbers() -> None:
    numbers = [shard for call in drawn([0, 1]) for shard in call]
    assert len({tuple(shard.flatten().tolist()) for shard in numbers}) == 12


@pytest.mark.on("sim", "multigpu")
def test_equal_seeds_give_equal_numbers_and_the_root_draws_as_if_alone() -> None:
    first, other = drawn([5, 6]), drawn([5, 6])
    assert all(all(map(torch.equal, *calls)) for calls in zip(first, other, strict=True))
    torch.manual_seed(5)
    alone = Drawing()(torch.zeros(2, 4, device=devices_of(1)[0]))
    assert torch.equal(first[0][0], alone.cpu())
