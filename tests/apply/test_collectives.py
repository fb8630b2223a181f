"""Collectives inside a step: replicas meet, and get what one device would have."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.oracle import (
    Classifier,
    assert_equal_trees,
    assert_same,
    devices_of,
    gradients,
    names_of,
    run,
)
from support.waiting import soon
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_dp.parallel.apply import RendezvousError, collectives, current_participant
from lightning_dp.parallel.step import StepParallel

CPU = torch.device("cpu")
EXACT = {"atol": 1e-12, "rtol": 0.0}
Step = Callable[[nn.Module, Tensor], Any]

pytestmark = pytest.mark.usefixtures("on")
on_cpu = pytest.mark.on("cpu")


@pytest.fixture(params=["threads", "inorder"])
def executor(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Net(nn.Module):
    """Calls `step(net, batch)`; `net` maps [n, 4] to [n, 3]."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        self.step = step

    def training_step(self, batch: Tensor) -> Any:
        return self.step(self.net, batch)


@contextlib.contextmanager
def engine_of(step: Step, sizes: tuple[int, ...], **options: Any) -> Iterator[StepParallel]:
    devices = devices_of(len(sizes))
    module, defaults = Net(step).to(devices[0]), {"split": lambda n: sizes, "output_device": CPU}
    with contextlib.closing(StepParallel(module, devices, **{**defaults, **options})) as engine:
        yield engine


def batch_of(sizes: tuple[int, ...]) -> Tensor:
    return torch.randn(sum(sizes), 4, generator=torch.Generator().manual_seed(1)).double()


def evaluated(step: Step, sizes: tuple[int, ...], executor: str = "threads") -> list[Any]:
    """What `step` returns on each replica."""
    seen: dict[int, Any] = {}

    def look(net: nn.Module, batch: Tensor) -> None:
        participant = current_participant()
        assert participant is not None
        seen[participant.replica] = step(net, batch)

    with engine_of(look, sizes, executor=executor) as engine:
        engine.evaluate("training_step", engine.scatter(batch_of(sizes)))
    return [seen[k] for k in sorted(seen)]


def train(engine: StepParallel, sizes: tuple[int, ...]) -> Tensor:
    loss: Tensor = engine.train("training_step", engine.scatter(batch_of(sizes)))
    return loss


# What they give


def means(x: Tensor) -> Tensor:
    """Those of the shards."""
    return torch.stack([x[:3].mean(0), x[3:5].mean(0), x[5:].mean(0)])


def reduced_by(op: Any) -> Step:
    return lambda net, x: collectives.reduce(x.mean(0), op)


def total(net: nn.Module, x: Tensor) -> Tensor:
    return collectives.reduce(torch.tensor(len(x), device=x.device), "sum")


RESULTS: dict[str, tuple[Step, Callable[[Tensor], Any]]] = {
    "all_gather": (lambda net, x: collectives.all_gather({"x": x * 2})["x"], lambda x: x * 2),
    "mean": (reduced_by("mean"), lambda x: x.mean(0)),
    "max": (reduced_by("max"), lambda x: means(x).amax(0)),
    "min": (reduced_by("min"), lambda x: means(x).amin(0)),
    "sum": (reduced_by("SUM"), lambda x: means(x).sum(0)),
    "product": (reduced_by("product"), lambda x: means(x).prod(0)),
    "an op of torch": (reduced_by(torch.distributed.ReduceOp.AVG), lambda x: x.mean(0)),
    "an integer": (total, lambda x: torch.tensor(6)),
    "broadcast": (lambda net, x: collectives.broadcast({"x": x})["x"], lambda x: x[:3]),
    "broadcast from 2": (lambda net, x: collectives.broadcast(x, 2), lambda x: x[5:]),
    "an object": (lambda net, x: collectives.broadcast(len(x), 1), lambda x: 2),
    "all decide": (lambda net, x: collectives.decide(len(x) > 1), lambda x: False),
    "any decides": (lambda net, x: collectives.decide(len(x) > 2, everybody=False), lambda x: True),
}


@pytest.mark.parametrize("name", RESULTS)
def test_each_replica_gets_what_the_whole_batch_gives(name: str, executor: str) -> None:
    step, expected = RESULTS[name]
    seen, devices = evaluated(step, (3, 2, 0, 1), executor), devices_of(4)
    for got, device in zip(seen, [*devices[:2], devices[3]], strict=True):
        right = expected(batch_of((6,)))
        if isinstance(right, Tensor):
            assert got.device == device
            torch.testing.assert_close(got.cpu(), right, **EXACT)
        else:
            assert got == pytest.approx(right)


def test_alone_and_outside_of_replicas_they_return_what_they_were_given() -> None:
    def step(net: nn.Module, x: Tensor) -> bool:
        collectives.barrier()
        decides = collectives.decide(True)
        return collectives.all_gather(x) is collectives.broadcast(x) is x and decides

    assert step(nn.Module(), torch.ones(2)) and evaluated(step, (4,)) == [True]
    x = torch.ones(2)
    assert collectives.reduce(x, "sum") is x


def test_what_replicas_get_is_their_own(executor: str) -> None:
    """Each may change it in place."""

    def step(net: nn.Module, x: Tensor) -> Any:
        results = [
            collectives.all_gather(x),
            collectives.reduce(x.sum(0)),
            collectives.broadcast(x),
        ]
        before = [result.clone() for result in results]
        collectives.barrier("before")
        for result in [x, *results]:
            result.zero_()
        return all(bool(values.any()) for values in before)

    assert evaluated(step, (2, 2, 1), executor) == [True] * 3


# Gradients


def nt_xent(z: Tensor) -> Tensor:
    """Each row's partner is the next one; all rows are compared with all."""
    unit = F.normalize(z, dim=1)
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    logits = (unit @ unit.T).masked_fill(itself, -torch.inf)
    return F.cross_entropy(logits, torch.arange(len(z), device=z.device).roll(1))


def gathered(net: nn.Module, x: Tensor) -> Tensor:
    return nt_xent(collectives.all_gather(net(x)))


def reduced_and_broadcast(net: nn.Module, x: Tensor) -> Tensor:
    z = net(x)
    centre = collectives.reduce(z.mean(0))
    first = collectives.broadcast(collectives.all_gather(z))[:1]
    return ((z - centre) ** 2).mean() + (z * first).mean()


def without_gradients(net: nn.Module, x: Tensor) -> Tensor:
    z = net(x)
    with torch.no_grad():
        scale = collectives.all_gather(z).std()
    return z.square().mean() * scale


@pytest.mark.parametrize(
    ("step", "sizes", "crosses"),
    [
        (gathered, (1, 0, 1, 5), True),
        (reduced_and_broadcast, (3, 2, 1), True),
        (without_gradients, (3, 3), False),
    ],
)
def test_a_loss_over_the_whole_batch_is_exact(
    step: Step, sizes: tuple[int, ...], crosses: bool, executor: str
) -> None:
    """Without gradients that cross, every replica runs its own backward."""
    one = Net(step)
    expected = one.training_step(batch_of(sizes))
    expected.backward()
    with engine_of(step, sizes, executor=executor) as engine:
        loss = train(engine, sizes)
        loss.backward()
        torch.testing.assert_close(loss, expected, **EXACT)
        assert_equal_trees(gradients(engine.module), gradients(one), "gradients", **EXACT)
        assert engine.calls.crossed is crosses


@on_cpu
def test_the_graph_is_gone_after_the_step(executor: str) -> None:
    alive: list[weakref.ref[Tensor]] = []

    def step(net: nn.Module, x: Tensor) -> Tensor:
        z = net(x)
        gathered = collectives.all_gather(z)
        alive.extend([weakref.ref(z), weakref.ref(gathered)])
        return nt_xent(gathered)

    gc.disable()
    try:
        with engine_of(step, (3, 2), executor=executor) as engine:
            train(engine, (3, 2)).backward()
            assert len(alive) == 4 and soon(lambda: all(ref() is None for ref in alive))
    finally:
        gc.enable()


def own_gradient(net: nn.Module, x: Tensor) -> Tensor:
    loss = nt_xent(collectives.all_gather(net(x)))
    (gradient,) = torch.autograd.grad(loss, net[0].weight, create_graph=True)
    return loss + gradient.norm()


def in_checkpoint(net: nn.Module, x: Tensor) -> Any:
    return checkpoint(lambda x: gathered(net, x), x.requires_grad_(), use_reentrant=False)


REFUSED: dict[str, tuple[Step, str]] = {
    "an own gradient": (own_gradient, "inside of training_step: other replicas"),
    "in a checkpoint": (in_checkpoint, "an activation checkpoint"),
    "shapes": (lambda net, x: collectives.reduce(x), "tensors of one shape"),
    "an unknown op": (lambda net, x: collectives.reduce(x, "mode"), "expected op 'mean'"),
    "no such replica": (lambda net, x: collectives.broadcast(x, 2), "expected src from 0 to 1"),
}


@on_cpu
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_by_name(name: str, executor: str) -> None:
    step, match = REFUSED[name]
    with (
        engine_of(step, (2, 1), executor=executor) as engine,
        pytest.raises((RuntimeError, ValueError), match=match),
    ):
        train(engine, (2, 1)).backward()


# Who does not come


def barrier_unless(x: Tensor, n: int, name: str | None = None) -> Tensor:
    if len(x) != n:
        collectives.barrier(name)
    return x


AT = r"replica \d on \S+ is at barrier"
MISSING: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "ends": (
        lambda x: barrier_unless(x, 1),
        rf"all replicas at barrier, got: {AT}, {AT}, replica 2 on \S+ has ended\. Make the same",
    ),
    "meets alone": (lambda x: barrier_unless(x, 3), rf"replica 0 on \S+ has ended, {AT}"),
    "elsewhere": (
        lambda x: barrier_unless(barrier_unless(x, 1, "a"), 2, "b"),
        rf"{AT} 'a', .*{AT} 'b'",
    ),
}


@on_cpu
@pytest.mark.parametrize("name", MISSING)
def test_replicas_that_do_not_all_come_are_named(name: str, executor: str) -> None:
    before, match = MISSING[name]
    step: Step = lambda net, x: net(before(x)).mean()
    with engine_of(step, (3, 2, 1), executor=executor) as engine:
        with pytest.raises(RendezvousError, match=match):
            train(engine, (3, 2, 1))
        engine.module.step = lambda net, x: collectives.reduce(net(x).mean())
        train(engine, (3, 2, 1)).backward()


@on_cpu
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
@pytest.mark.parametrize("k", [0, 2])
def test_the_error_of_a_replica_ends_the_others_and_arrives_as_it_is(
    k: int, error: type[BaseException], executor: str
) -> None:
    raised, sizes, ended = error("mine"), (3, 2, 1), list[int]()

    def step(net: nn.Module, x: Tensor) -> Tensor:
        try:
            collectives.barrier()
            if len(x) == sizes[k]:
                raise raised
            return net(collectives.all_gather(x)).mean()
        finally:
            ended.append(len(x))

    with engine_of(step, sizes, executor=executor) as engine:
        with pytest.raises(error) as caught:
            train(engine, sizes)
        assert caught.value is raised and sorted(ended) == [1, 2, 3]
        note = f"replica {k} on {names_of(3)[k]}"
        assert note in str(getattr(raised, "__notes__", raised.args))


@pytest.mark.on("sim", "multigpu")
def test_values_on_side_streams_are_waited_for() -> None:
    """Strict simulated devices find a race where the host reads it without an event."""

    def step(net: nn.Module, x: Tensor) -> float:
        with torch.get_device_module(x.device).stream(torch.Stream(x.device)):
            values = torch.full((len(x),), 2.0, device=x.device)
            return float((collectives.all_gather(values * 2) + 1).sum())

    for _ in range(3):
        assert evaluated(step, (500, 500)) == [5000.0] * 2


# In the Trainer


class Contrastive(Classifier):
    """Compares each sample with the whole batch, and logs what it sees."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z = self.all_gather(self.net(batch[0]), sync_grads=True)
        loss = nt_xent(z)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        self.log("train/std", z.std(), sync_dist=True)
        self.log("train/mean", self.trainer.strategy.reduce(batch[0].mean()), sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", nt_xent(self.all_gather(self.net(batch[0]))))
        self.trainer.strategy.barrier()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test/loss", nt_xent(self.all_gather({"z": self.net(batch[0])})["z"]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        z = self.net(batch[0])
        return z - self.all_gather(z).mean(0)


@pytest.mark.parametrize("options", [{}, {"executor": "inorder"}, {"mode": "forward"}], ids=str)
@pytest.mark.filterwarnings(r"ignore:.*_step. expected calls that are spread")
def test_collectives_in_all_steps_give_the_numbers_of_one_device(options: dict[str, Any]) -> None:
    torch.set_default_dtype(torch.float64)
    assert_same(run(Contrastive, 3, strategy=options), run(Contrastive, 1))
