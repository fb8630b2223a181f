"""Where batch norm trains, a replica that works has two samples: what one device trains on, trains.

Steps are compared with those of one device on the shards, one after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support import oracle
from support.oracle import ByHand, Classifier, devices_of, loader, run, trainer
from test_planner import SPLITS
from torch import Tensor, nn

from lightning_dp import DataParallel, DataParallelStrategy
from lightning_dp.layer_sync import ReplicaBatchNorm
from lightning_dp.parallel.forward import ForwardParallel
from lightning_dp.parallel.split import split_policy
from lightning_dp.parallel.step import StepParallel

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = [options for options in SPLITS if options.get("split") not in ("memory", "auto")]


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

    def sample_cost(self, batch: Any) -> Tensor:
        x = batch[0] if isinstance(batch, dict) else batch
        return torch.arange(len(x)) * 7 % 5 + 1


def net(**kwargs: Any) -> Net:
    torch.manual_seed(0)
    return Net(**kwargs).double()


def batch(n: int) -> Tensor:
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(n), dtype=torch.float64)


def expected_gradients(x: Tensor, order: Sequence[Sequence[int]]) -> list[Tensor]:
    """One device: the shards, one after the other."""
    one = net()
    for positions in order:
        loss = one.training_step(x[list(positions)])
        (loss * len(positions) / len(x)).backward()
    return [p.grad for p in one.parameters() if p.grad is not None]


def parts_of(engine: StepParallel, sizes: Sequence[int]) -> Any:
    latest = engine.planner.latest
    if latest.order is not None:
        return [part for part in latest.order if part]
    positions = iter(range(sum(sizes)))
    return [list(itertools.islice(positions, size)) for size in sizes if size]


@pytest.mark.parametrize("executor", ["threads", pytest.param("inorder", marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", OPTIONS)
def test_steps_of_every_size_are_done(on: str, options: Any, executor: Any) -> None:
    devices = devices_of(4)
    policy = split_policy(options.get("split", "even"), options.get("weights"), devices)
    for n in (2, 3, 5, 9):
        module = net().to(devices[0])
        engine = StepParallel(
            module, devices, output_device=devices[0], split=policy, executor=executor
        )
        x = batch(n)
        for _ in range(2):
            module.zero_grad()
            engine.train("training_step", x).backward()
            sizes = engine.last_sizes
            assert sum(sizes) == n and 1 not in sizes
            got = [p.grad.cpu() for p in module.parameters()]
            expected = expected_gradients(x, parts_of(engine, sizes))
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
        engine.close()


@pytest.mark.parametrize("options", OPTIONS)
def test_the_drop_in_takes_every_size(on: str, options: Any) -> None:
    wrapper = DataParallel(net().to(devices_of(1)[0]), devices_of(4), **options)
    for n in (2, 3, 5, 9):
        wrapper(batch(n)).square().mean().backward()
        assert sum(wrapper.last_sizes) == n and 1 not in wrapper.last_sizes
    wrapper.close()


def one_and_several(make: Callable[[], Net], method: str, n: int, executor: str) -> list[Any]:
    """What a step of one device and one of four come to: a result, or an error."""
    results: list[Any] = []
    for k in (1, 4):
        devices = devices_of(k)
        module = make().to(devices[0])
        module.train(method == "training_step")
        engine = StepParallel(
            module,
            devices,
            output_device=torch.device("cpu"),
            split=split_policy("even", None, devices),
            executor=executor,
        )
        try:
            if k == 1:
                results.append(getattr(module, method)(batch(n).to(devices[0])).detach().cpu())
            else:
                call = engine.train if method == "training_step" else engine.evaluate
                results.append(call(method, batch(n)).detach().cpu())
        except ValueError as error:
            results.append((type(error), str(error)))
        engine.close()
    return results


class OverPairs(nn.BatchNorm1d):
    """Batch norm over a sample's values, which are more than one."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(
            x.unsqueeze(-1).expand(-1, -1, 2) * torch.tensor([1.0, 2.0]).to(x)
        )
        return y.sum(-1)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.BatchNorm1d(4),
    "untracked": lambda: nn.BatchNorm1d(4, track_running_stats=False),
    "spatial": lambda: OverPairs(4),
    "frozen": lambda: nn.BatchNorm1d(4).eval().requires_grad_(False),
}


@pytest.mark.parametrize("executor", ["threads", "inorder"])
@pytest.mark.parametrize("method", ["training_step", "validation_step"])
@pytest.mark.parametrize("norm", NORMS)
def test_a_batch_of_one_does_what_it_does_on_one_device(
    on: str, norm: str, method: str, executor: str
) -> None:
    one, several = one_and_several(lambda: net(norm=NORMS[norm]), method, 1, executor)
    assert type(one) is type(several)
    if isinstance(one, tuple):
        assert several == one
    else:
        torch.testing.assert_close(several, one)


def test_statistics_of_shards_are_used_in_evaluation_too_if_none_are_kept(on: str) -> None:
    devices = devices_of(4)
    module = net(norm=NORMS["untracked"]).to(devices[0]).eval()
    engine = StepParallel(
        module, devices, output_device=devices[0], split=split_policy("even", None, devices)
    )
    assert engine.evaluate("validation_step", batch(5)).shape == (5, 2)
    assert engine.last_sizes == (3, 2, 0, 0)
    module.norm.track_running_stats = True
    module.norm.running_mean = torch.zeros(4).to(module.first.weight)
    module.norm.running_var = torch.ones(4).to(module.first.weight)
    engine.evaluate("validation_step", batch(5))
    assert engine.last_sizes == (2, 1, 1, 1)
    engine.close()


def test_only_batch_norm_that_trains_on_shards_counts() -> None:
    devices = [torch.device("cpu")] * 4
    sizes = []
    for change in (
        lambda m: None,
        lambda m: m.norm.eval(),
        lambda m: ReplicaBatchNorm().apply(m),
        lambda m: setattr(m, "norm", nn.GroupNorm(2, 4).double()),
    ):
        module = net()
        change(module)
        engine = StepParallel(
            module, devices, output_device=devices[0], split=split_policy("even", None, devices)
        )
        for _ in range(2):
            engine.train("training_step", batch(5)).backward()
        sizes.append(engine.last_sizes)
        engine.close()
    assert sizes == [(3, 2, 0, 0), *[(2, 1, 1, 1)] * 3]


def test_a_layer_that_comes_between_two_steps_counts_at_once() -> None:
    devices = [torch.device("cpu")] * 4
    module = net(norm=lambda: nn.Identity())
    engine = StepParallel(
        module, devices, output_device=devices[0], split=split_policy("even", None, devices)
    )
    for _ in range(2):
        engine.train("training_step", batch(5)).backward()
    assert engine.last_sizes == (2, 1, 1, 1)
    module.norm = nn.BatchNorm1d(4).double()
    engine.train("training_step", batch(5)).backward()
    assert engine.last_sizes == (3, 2, 0, 0)
    engine.close()


class Normed(Classifier):
    """Batch norm in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
        self.sizes: set[tuple[int, ...]] = set()

    def on_train_batch_end(self, *args: Any) -> None:
        self.sizes.add(getattr(self.trainer.strategy, "last_sizes", ()))


class Manual(ByHand, Normed):
    """The same by hand."""


@pytest.mark.parametrize("n, batch_size", [(5, 5), (9, 4), (13, 10)])
@pytest.mark.parametrize("make, mode", [(Normed, "step"), (Normed, "forward"), (Manual, "step")])
def test_fits_that_one_device_completes_are_completed(
    on: str, make: Any, mode: Any, n: int, batch_size: int
) -> None:
    """A last batch of one sample is an error on one device, too: there is none here."""
    data = lambda: loader(n, batch_size, drop_last=n % batch_size == 1)
    result = run(make, 4, data=data, strategy={"mode": mode})
    sizes = [s for s in result.module.sizes if s] or [result.trainer.strategy.last_sizes]
    assert all(torch.isfinite(p).all() for p in result.module.parameters())
    if mode == "step":
        assert not [s for s in sizes if 1 in s]


def test_a_fit_in_which_one_replica_can_work_is_one_devices() -> None:
    torch.set_default_dtype(torch.float64)
    data = lambda: loader(6, 3)
    oracle.assert_same(run(Normed, 4, data=data), run(Normed, 1, data=data))


@pytest.mark.parametrize("mode", ["step", "forward"])
def test_a_last_batch_of_one_sample_is_the_error_of_one_device(on: str, mode: Any) -> None:
    messages = []
    for devices, strategy in ((1, "auto"), (4, DataParallelStrategy(mode=mode))):
        with pytest.raises(ValueError) as caught:
            trainer(devices, strategy, max_epochs=1).fit(Normed(), loader(5, 4), loader(4, 4))
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


class Split(nn.Module):
    """An encoder without batch norm, and a head with it, each of which can be spread."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(3, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_calls_without_batch_norm_may_have_shards_of_one_sample() -> None:
    devices = [torch.device("cpu")] * 4
    module = Split().double()
    engine = ForwardParallel(
        module,
        devices,
        output_device=devices[0],
        split=split_policy("even", None, devices),
        parallel_modules=["encoder", "head"],
    )
    with engine.spreading():
        hidden = module.encoder(batch(5))
        assert engine.last_sizes == (2, 1, 1, 1)
        module.head(hidden).sum().backward()
        assert engine.last_sizes == (3, 2, 0, 0)
    engine.close()
