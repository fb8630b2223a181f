"""Where batch norm trains, a replica that works has two samples: what one device trains on, trains.

Steps are compared with those of one device on the shards, one after the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.oracle import devices_of
from test_split import OPTIONS
from torch import Tensor, nn

from lightning_dp.layer_sync import ReplicaBatchNorm
from lightning_dp.parallel.forward import ForwardParallel
from lightning_dp.parallel.split import split_policy
from lightning_dp.parallel.step import StepParallel

pytestmark = pytest.mark.usefixtures("one_thread")

CPUS = [torch.device("cpu")] * 4


class Net(nn.Module):
    """Batch norm after a layer; a step like Lightning's."""

    def __init__(self, norm: Callable[[], nn.Module] = lambda: nn.BatchNorm1d(4)) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), norm(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.norm(self.first(x)))
        return y

    def training_step(self, x: Tensor) -> Tensor:
        return self(x).square().mean()

    def validation_step(self, x: Tensor) -> Tensor:
        return self(x)

    def sample_cost(self, x: Tensor) -> Tensor:
        return torch.arange(len(x)) * 7 % 5 + 1


def net(**kwargs: Any) -> Net:
    torch.manual_seed(0)
    return Net(**kwargs).double()


def batch(n: int) -> Tensor:
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(n), dtype=torch.float64)


def engine_of(module: Any, devices: Sequence[torch.device] = CPUS, **options: Any) -> StepParallel:
    policy = split_policy(options.get("split", "even"), options.get("weights"), devices)
    return StepParallel(module, devices, output_device=devices[0], split=policy)


@pytest.mark.parametrize("options", [o for o in OPTIONS if o.get("split") != "memory"])
def test_steps_of_every_size_are_done(on: str, options: Any) -> None:
    devices = devices_of(4)
    for n in (2, 3, 5, 9):
        module, one, x = net().to(devices[0]), net(), batch(n)
        engine = engine_of(module, devices, **options)
        engine.train("training_step", x).backward()
        sizes = engine.last_sizes
        assert sum(sizes) == n and 1 not in sizes
        for shard in x.split([size for size in sizes if size]):
            (one.training_step(shard) * len(shard) / n).backward()
        for a, b in zip(module.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=0, atol=1e-10)
        engine.close()


NORMS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.BatchNorm1d(4),
    "untracked": lambda: nn.BatchNorm1d(4, track_running_stats=False),
    "frozen": lambda: nn.BatchNorm1d(4).eval().requires_grad_(False),
}


@pytest.mark.parametrize("norm", NORMS)
def test_a_batch_of_one_does_what_it_does_on_one_device(norm: str) -> None:
    one, module = (net(norm=NORMS[norm]) for _ in range(2))
    engine = engine_of(module)
    try:
        expected = one.training_step(batch(1))
    except ValueError as error:
        with pytest.raises(ValueError, match=re.escape(str(error))):
            engine.train("training_step", batch(1))
    else:
        torch.testing.assert_close(engine.train("training_step", batch(1)), expected)
    engine.close()


@pytest.mark.parametrize(
    ("change", "sizes"),
    [
        (lambda m: None, (3, 2, 0, 0)),
        (lambda m: m.norm.eval(), (2, 1, 1, 1)),
        (lambda m: ReplicaBatchNorm().apply(m), (2, 1, 1, 1)),
        (lambda m: setattr(m, "norm", nn.GroupNorm(2, 4).double()), (2, 1, 1, 1)),
    ],
    ids=["trains", "frozen", "synced", "group norm"],
)
def test_only_batch_norm_that_trains_on_shards_counts(change: Any, sizes: Any) -> None:
    module = net()
    engine = engine_of(module)
    change(module)
    engine.train("training_step", batch(5)).backward()
    assert engine.last_sizes == sizes
    module.norm = nn.BatchNorm1d(4).double()  # between two steps
    engine.train("training_step", batch(5)).backward()
    assert engine.last_sizes == (3, 2, 0, 0)
    engine.close()


def test_statistics_of_shards_are_used_in_evaluation_too_if_none_are_kept() -> None:
    engine = engine_of(net(norm=NORMS["untracked"]).eval())
    assert engine.evaluate("validation_step", batch(5)).shape == (5, 2)
    assert engine.last_sizes == (3, 2, 0, 0)
    engine.close()


def test_calls_without_batch_norm_may_have_shards_of_one_sample() -> None:
    module = nn.ModuleDict({"encoder": nn.Linear(3, 4), "head": nn.BatchNorm1d(4)}).double()
    split = split_policy("even", None, CPUS)
    engine = ForwardParallel(
        module, CPUS, output_device=CPUS[0], split=split, parallel_modules=["encoder", "head"]
    )
    with engine.spreading():
        hidden = module["encoder"](batch(5))
        assert engine.last_sizes == (2, 1, 1, 1)
        module["head"](hidden).sum().backward()
        assert engine.last_sizes == (3, 2, 0, 0)
    engine.close()
