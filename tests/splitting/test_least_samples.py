"""Where batch norm trains, a replica that works has two samples: what one device trains on, trains.

Sizes are compared with the best of all possible ones, and steps with those of one device on the
shards, one after the other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import ByHand, Classifier, devices_of, loader, run, trainer
from torch import Tensor, nn

from lightning_dp import DataParallel, DataParallelStrategy
from lightning_dp.layer_sync import ReplicaBatchNorm
from lightning_dp.parallel.forward import ForwardParallel
from lightning_dp.parallel.split import Planner, StepUsage, split_policy
from lightning_dp.parallel.split.adaptive import PROBE_EVERY, Adaptive
from lightning_dp.parallel.split.least import at_least, has_room
from lightning_dp.parallel.split.planner import Capacity
from lightning_dp.parallel.step import StepParallel

pytestmark = pytest.mark.usefixtures("one_thread")

# Arithmetic

some_sizes = st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple)
some_caps = st.lists(st.none() | st.integers(0, 5), min_size=4, max_size=4)


def possible(n: int, limits: Sequence[float], least: int) -> list[tuple[int, ...]]:
    """All sizes that a batch of n samples may have."""
    least = min(least, n)
    choices = [[0, *range(max(least, 1), int(min(n, limit)) + 1)] for limit in limits]
    return [sizes for sizes in itertools.product(*choices) if sum(sizes) == n]


def changes(wanted: Sequence[int], sizes: Sequence[int]) -> int:
    return sum(abs(a - b) for a, b in zip(wanted, sizes, strict=True))


@given(some_sizes, st.integers(1, 2), some_caps, st.booleans())
def test_fewest_samples_change_their_device(
    wanted: tuple[int, ...], least: int, caps: list[int | None], spreads: bool
) -> None:
    caps = [c if c is None else max(c, n) for c, n in zip(caps, wanted, strict=False)]
    limits = [math.inf if cap is None else cap for cap in caps]
    best = possible(sum(wanted), limits, least)
    sizes = at_least(wanted, least, caps, spreads=spreads)
    assert (sizes is None) == (not best)
    assert has_room(sum(wanted), caps, least) == bool(best)
    if sizes is not None:
        assert sizes in best
        enough = [k for k, size in enumerate(wanted) if size >= min(least, sum(wanted))]
        # Only if memory is so tight that one of these cannot go on, there may be a closer one.
        closest = [other for other in best if all(other[k] for k in enough)]
        if closest:
            fewest = min(changes(wanted, other) for other in closest)
            assert changes(wanted, sizes) == fewest


@given(some_sizes, st.integers(1, 4), st.booleans())
def test_without_caps_there_is_always_a_way(
    wanted: tuple[int, ...], least: int, spreads: bool
) -> None:
    n = sum(wanted)
    sizes = at_least(wanted, least, spreads=spreads)
    assert sizes is not None and sum(sizes) == n
    assert all(not size or size >= min(least, n) for size in sizes)
    assert not [k for k, size in enumerate(sizes) if size and not wanted[k]]
    best = possible(n, [math.inf] * len(wanted), least)
    assert changes(wanted, sizes) == min(changes(wanted, other) for other in best)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=8).map(tuple))
def test_sizes_that_will_do_stay_as_they_are(wanted: tuple[int, ...]) -> None:
    will_do = tuple(size + (size == 1) for size in wanted)
    assert at_least(will_do, 2) == at_least(will_do, 2, spreads=True) == will_do


@pytest.mark.parametrize(
    ("wanted", "sizes", "spread"),
    [
        ((2, 1, 1, 1), (3, 2, 0, 0), (3, 2, 0, 0)),  # K + 1 samples
        ((1, 1, 1, 1), (2, 2, 0, 0), (2, 2, 0, 0)),
        ((1, 1, 1, 0), (3, 0, 0, 0), (3, 0, 0, 0)),
        ((63, 1), (64, 0), (62, 2)),
        ((3, 3, 1), (4, 3, 0), (3, 2, 2)),
        ((0, 9, 1), (0, 10, 0), (0, 8, 2)),
        ((1, 0), (1, 0), (1, 0)),
        ((0, 0), (0, 0), (0, 0)),
    ],
)
def test_known_sizes(wanted: Any, sizes: Any, spread: Any) -> None:
    assert at_least(wanted, 2) == sizes
    assert at_least(wanted, 2, spreads=True) == spread


# What fits

rooms = st.lists(st.integers(0, 12), min_size=1, max_size=4)


@given(rooms, st.integers(1, 30), st.integers(1, 2))
def test_a_split_that_fits_is_found_if_there_is_one(room: list[int], n: int, least: int) -> None:
    """A step fits where no device has more than its room; all others run out of memory."""
    planner = Planner(len(room), split_policy("even", None, room))
    found = False

    def attempt(sizes: Sequence[int]) -> bool:
        assert all(not size or size >= min(least, n) for size in sizes), sizes
        failed = [k for k, size in enumerate(sizes) if size > room[k]]
        if failed:
            planner.record_oom(failed, training=True)
        else:
            planner.record_success(training=True)
        return not failed

    for _ in range(200):
        sizes = planner.plan(n, list, training=True, least=lambda: least).sizes
        assert sum(sizes) == n
        found = attempt(sizes)
        if found:
            break
        if not planner.has_room(n, training=True):
            while (trial := planner.trial(n, training=True)) is not None:
                attempt(trial.sizes)
            if planner.most(n, training=True) < n:
                break
    else:
        raise AssertionError("no end")
    assert found == bool(possible(n, room, least))
    if not found:
        # Whether fewer would do is not tried: the module refuses them, as far as is known.
        tried = (0, *range(min(least, n), n))
        largest = max(m for m in tried if possible(m, room, least))
        assert planner.most(n, training=True) == largest


def test_a_device_with_room_for_one_has_none_for_batch_norm() -> None:
    capacity = Capacity(2)
    capacity.record_oom((2, 2), [1])
    assert capacity.caps == [None, 1]
    assert not Capacity(1).caps and capacity.has_room(3, 2)
    assert at_least(capacity.within((2, 1)), 2, capacity.caps) == (3, 0)


# Every split

SPLITS: list[dict[str, Any]] = [
    {},
    {"split": "chunk"},
    {"split": "adaptive"},
    {"split": "cost"},
    {"weights": [5, 1, 1, 1]},
    {"weights": [0, 1, 0, 2]},
    {"split": lambda n, devices: (n - n // 2, *[0] * (len(devices) - 2), n // 2)},
    {"split": lambda n, devices: (max(n - 1, 0), *[0] * (len(devices) - 2), min(n, 1))},
]


def policy_of(k: int, split: Any = "even", weights: Any = None) -> Any:
    return split_policy(split, weights, range(k), lambda: [100] * k)


@given(
    st.sampled_from([*SPLITS, {"split": "memory"}]),
    st.lists(st.tuples(st.integers(1, 14), st.booleans()), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_every_split_keeps_to_it(options: dict[str, Any], batches: Any, draw: Any) -> None:
    planner = Planner(4, policy_of(4, **options))
    for n, telling in batches:
        costs = [draw.choice([1.0, 2.0, 50.0]) for _ in range(n)]
        plan = planner.plan(n, lambda c=costs: c, training=True, telling=telling, least=lambda: 2)
        assert sum(plan.sizes) == n
        assert all(size != 1 for size in plan.sizes) or n == 1
        if plan.order is not None:
            assert sorted(i for part in plan.order for i in part) == list(range(n))
            assert tuple(map(len, plan.order)) == plan.sizes
            assert not plan.loads or plan.loads == tuple(
                sum(costs[i] for i in part) for part in plan.order
            )
        busy = tuple(size * draw.uniform(0.5, 2.0) for size in plan.sizes)
        peaks = tuple(10 + 3 * size for size in plan.sizes)
        planner.learn(StepUsage(plan.sizes, busy, max(busy), peaks, (10,) * 4))
        planner.record_success(training=True)


def test_nobody_is_asked_where_no_shard_has_one_sample() -> None:
    def least() -> int:
        raise AssertionError("asked")

    planner = Planner(2, policy_of(2))
    assert planner.plan(4, list, training=True, least=least).sizes == (2, 2)
    assert planner.plan(1, list, training=True, least=least).sizes == (1, 0)


def test_a_costly_sample_gets_a_cheap_one_for_company() -> None:
    planner = Planner(2, policy_of(2, "cost"))
    costs = [3.0, 100.0, 2.0, 5.0]
    plan = planner.plan(4, lambda: costs, training=True, least=lambda: 2)
    assert plan.order == [[1, 2], [0, 3]] and plan.loads == (102.0, 8.0)


def test_loads_that_do_not_fit_any_more_make_it_a_split_by_number() -> None:
    planner = Planner(2, policy_of(2, "cost"))
    costs = [1.0, 1.0, 8.0]
    plan = planner.plan(3, lambda: costs, training=True)
    assert plan.sizes == (1, 2)
    planner.record_oom([0], training=True)  # from now on at most 7 there
    plan = planner.plan(3, lambda: costs, training=True, least=lambda: 2)
    assert plan.loads == () and plan.order is None and plan.sizes == (3, 0)


def test_idle_devices_are_probed_with_two_samples() -> None:
    split = Adaptive(2)
    sizes = set()
    for _ in range(2 * PROBE_EVERY):
        a, b = split(8)
        sizes.add((a, b))
        split.learn(StepUsage((a, b), (a * 0.01, b * 9.0)))
    assert (8, 0) in sizes and (6, 2) in sizes and not [s for s in sizes if 1 in s and s != (7, 1)]


# Steps


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
@pytest.mark.parametrize("options", SPLITS)
def test_steps_of_every_size_are_done(on: str, options: Any, executor: Any) -> None:
    devices = devices_of(4)
    policy = split_policy(options.get("split", "even"), options.get("weights"), devices)
    for n in (2, 3, 5, 9):
        module = net().to(devices[0])
        engine = StepParallel(
            module, devices, output_device=devices[0], split=policy, executor=executor
        )
        x = batch(n)
        for _ in range(2):  # the first one is cut unequally
            module.zero_grad()
            engine.train("training_step", x).backward()
            sizes = engine.last_sizes
            assert sum(sizes) == n and 1 not in sizes
            got = [p.grad.cpu() for p in module.parameters()]
            expected = expected_gradients(x, parts_of(engine, sizes))
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
        engine.close()


@pytest.mark.parametrize("options", SPLITS)
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


# Whole fits


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
