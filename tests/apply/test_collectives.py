"""Collectives inside a step: replicas meet, and get what one device would have."""

from __future__ import annotations

import contextlib
import contextvars
import signal
import threading
import time
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
from support.waiting import quickest, soon
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dp.parallel.apply import RendezvousError, collectives, current_participant
from lightning_dp.parallel.step import StepParallel

CPU = torch.device("cpu")
EXACT = {"atol": 1e-12, "rtol": 0.0}
Step = Callable[[nn.Module, Tensor], Any]

pytestmark = pytest.mark.usefixtures("on")


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
    module = Net(step).to(devices[0])
    split = lambda n: sizes
    engine = StepParallel(module, devices, output_device=CPU, split=split, **options)
    try:
        yield engine
    finally:
        engine.close()


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


def assert_as_one_device(step: Step, sizes: tuple[int, ...], **options: Any) -> StepParallel:
    """The loss and its gradients are those of one call with the whole batch."""
    one = Net(step)
    expected = one.training_step(batch_of(sizes))
    expected.backward()
    with engine_of(step, sizes, **options) as engine:
        for _ in range(2):  # a second one over the first one's marks
            engine.module.zero_grad()
            loss = engine.train("training_step", engine.scatter(batch_of(sizes)))
            loss.backward()
        torch.testing.assert_close(loss, expected, **EXACT)
        assert_equal_trees(gradients(engine.module), gradients(one), "gradients", **EXACT)
        return engine


# What they give


@pytest.mark.parametrize("sizes", [(3, 2, 1), (2, 0, 3), (4,)])
def test_all_gather_gives_every_replica_the_batch(sizes: tuple[int, ...], executor: str) -> None:
    seen = evaluated(lambda net, x: collectives.all_gather({"x": x * 2, "n": "a"}), sizes, executor)
    assert len(seen) == sum(size > 0 for size in sizes)
    devices = [device for device, size in zip(devices_of(len(sizes)), sizes, strict=True) if size]
    for joined, device in zip(seen, devices, strict=True):
        assert joined["x"].device == device and joined["n"] == "a"
        torch.testing.assert_close(joined["x"].cpu(), batch_of(sizes) * 2, **EXACT)


@pytest.mark.on("cpu")
@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("mean", lambda x: x.mean(0)),
        ("max", lambda x: torch.stack([x[:3].mean(0), x[3:5].mean(0), x[5:].mean(0)]).amax(0)),
        ("min", lambda x: torch.stack([x[:3].mean(0), x[3:5].mean(0), x[5:].mean(0)]).amin(0)),
        ("SUM", lambda x: x[:3].mean(0) + x[3:5].mean(0) + x[5:].mean(0)),
        ("product", lambda x: x[:3].mean(0) * x[3:5].mean(0) * x[5:].mean(0)),
        (torch.distributed.ReduceOp.AVG, lambda x: x.mean(0)),
    ],
)
def test_reduce(op: Any, expected: Callable[[Tensor], Tensor], executor: str) -> None:
    sizes = (3, 2, 1)
    for result in evaluated(lambda net, x: collectives.reduce(x.mean(0), op), sizes, executor):
        torch.testing.assert_close(result.cpu(), expected(batch_of(sizes)), **EXACT)


def test_reduced_counts_stay_integers_and_numbers_numbers() -> None:
    def step(net: nn.Module, x: Tensor) -> Any:
        count = torch.tensor(len(x), device=x.device)
        sums = collectives.reduce(count, "sum"), collectives.reduce(len(x), "sum")
        return int(sums[0]), sums[0].dtype, sums[1], collectives.reduce(float(len(x)))

    assert evaluated(step, (3, 1)) == [(4, torch.int64, 4, 2.5)] * 2


@pytest.mark.parametrize("src", [0, 1])
def test_broadcast_gives_all_what_one_has(src: int, executor: str) -> None:
    sizes = (3, 0, 1)
    seen = evaluated(
        lambda net, x: collectives.broadcast({"x": x, "n": len(x)}, src), sizes, executor
    )
    expected = batch_of(sizes)[3:] if src else batch_of(sizes)[:3]
    for got in seen:
        assert got["n"] == len(expected)
        torch.testing.assert_close(got["x"].cpu(), expected, **EXACT)


def test_what_replicas_get_is_their_own(executor: str) -> None:
    """Each may change it in place."""

    def step(net: nn.Module, x: Tensor) -> Any:
        results = [
            collectives.all_gather(x),
            collectives.all_gather(torch.ones(7, device=x.device)),
            collectives.reduce(x.sum(0)),
            collectives.broadcast(x.clone()),
        ]
        before = [result.clone() for result in results]
        collectives.barrier("before")
        for result in results:
            result.zero_()
        collectives.barrier("after")
        x.zero_()
        return all(float(b.abs().sum()) > 0 for b in before)

    assert evaluated(step, (2, 2, 1), executor) == [True] * 3


@pytest.mark.on("cpu")
def test_decisions(executor: str) -> None:
    step = lambda net, x: (
        collectives.decide(len(x) > 1),
        collectives.decide(len(x) > 1, everybody=False),
    )
    assert evaluated(step, (3, 1), executor) == [(False, True)] * 2


def test_outside_of_replicas_they_return_what_they_were_given() -> None:
    x = torch.ones(2)
    assert collectives.all_gather(x) is x and collectives.reduce(x, "sum") is x
    assert collectives.broadcast(x) is x and collectives.decide(True)
    collectives.barrier()


def test_samples_in_another_order_are_gathered_in_the_batchs() -> None:
    from lightning_dp.parallel.split import split_policy

    batch = batch_of((6,)).abs()
    batch[:, 0] = torch.tensor([5.0, 1, 1, 1, 1, 1])
    seen: list[Tensor] = []

    def step(net: nn.Module, x: Tensor) -> None:
        seen.append(collectives.all_gather(x))

    devices = devices_of(2)
    module = Net(step).to(devices[0])
    module.sample_cost = lambda batch: batch[:, 0]
    policy = split_policy("cost", None, devices)
    engine = StepParallel(module, devices, output_device=CPU, split=policy)
    engine.evaluate("training_step", engine.scatter(batch))
    engine.close()
    assert engine.last_sizes == (1, 5)
    for gathered in seen:
        torch.testing.assert_close(gathered.cpu(), batch, **EXACT)


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


@pytest.mark.parametrize(
    ("step", "sizes"),
    [(gathered, (4, 4)), (gathered, (1, 0, 1, 5)), (reduced_and_broadcast, (3, 2, 1))],
)
def test_a_loss_over_the_whole_batch_is_exact(
    step: Step, sizes: tuple[int, ...], executor: str
) -> None:
    assert assert_as_one_device(step, sizes, executor=executor).calls.crossed


def test_without_gradients_every_replica_runs_its_own_backward() -> None:
    def step(net: nn.Module, x: Tensor) -> Tensor:
        z = net(x)
        with torch.no_grad():
            scale = collectives.all_gather(z).std()
        return (z / collectives.all_gather(z.detach()).norm()).square().mean() * scale

    assert not assert_as_one_device(step, (3, 3)).calls.crossed


@pytest.mark.on("cpu")
def test_the_graph_is_gone_after_the_step(executor: str) -> None:
    import gc
    import weakref

    alive: list[weakref.ref[Tensor]] = []

    def step(net: nn.Module, x: Tensor) -> Tensor:
        z = net(x)
        gathered = collectives.all_gather(z)
        alive.extend([weakref.ref(z), weakref.ref(gathered)])
        return nt_xent(gathered)

    gc.disable()
    try:
        with engine_of(step, (3, 2), executor=executor) as engine:
            loss = engine.train("training_step", engine.scatter(batch_of((3, 2))))
            loss.backward()
            del loss
            assert len(alive) == 4 and soon(lambda: all(ref() is None for ref in alive))
    finally:
        gc.enable()


# Who does not come


def assert_refused(step: Step, match: str, sizes: tuple[int, ...] = (3, 2, 1)) -> None:
    for executor in ("threads", "inorder"):
        with engine_of(step, sizes, executor=executor) as engine:
            with pytest.raises(RendezvousError, match=match) as caught:
                engine.train("training_step", engine.scatter(batch_of(sizes)))
            assert caught.value.__cause__ is None
            engine.module.step = lambda net, x: collectives.reduce(net(x).mean())
            engine.train("training_step", engine.scatter(batch_of(sizes))).backward()


def device(k: int) -> str:
    return names_of(3)[k]


def barrier_unless(x: Tensor, n: int, name: str | None = None) -> Tensor:
    if len(x) != n:
        collectives.barrier(name)
    return x


@pytest.mark.on("cpu")
@pytest.mark.parametrize(
    ("before", "match"),
    [
        (
            lambda x: barrier_unless(x, 1),
            r"all replicas at barrier, got: replica 0 on \S+ is at barrier, replica 1 on \S+ is at "
            r"barrier, replica 2 on \S+ has ended\. Make the same",
        ),
        (
            lambda x: barrier_unless(x, 3),
            r"replica 0 on \S+ has ended, replica 1 on \S+ is at barr",
        ),
        (
            lambda x: barrier_unless(barrier_unless(x, 1, "a"), 2, "b"),
            r"is at barrier 'a', .*replica 2 on \S+ is at barrier 'b'",
        ),
    ],
    ids=["ends", "meets alone", "elsewhere"],
)
def test_replicas_that_do_not_all_come_are_named(
    before: Callable[[Tensor], Tensor], match: str
) -> None:
    assert_refused(lambda net, x: net(before(x)).mean(), match)


@pytest.mark.on("cpu")
def test_a_replica_that_swallows_the_error_does_not_hide_it() -> None:
    def step(net: nn.Module, x: Tensor) -> Tensor:
        for _ in range(3):
            with contextlib.suppress(Exception):
                if len(x) > 1:
                    collectives.barrier()
        return net(x).mean()

    assert_refused(step, r"replica 2 on \S+ has ended")


@pytest.mark.on("cpu")
@pytest.mark.parametrize("k", [0, 2])
def test_the_error_of_a_replica_ends_the_others_and_arrives_as_it_is(k: int, executor: str) -> None:
    raised = KeyError("mine")
    sizes = (3, 2, 1)

    def step(net: nn.Module, x: Tensor) -> Tensor:
        collectives.barrier()
        if len(x) == sizes[k]:
            raise raised
        return net(collectives.all_gather(x)).mean()

    with engine_of(step, sizes, executor=executor) as engine:
        with pytest.raises(KeyError) as caught:
            engine.train("training_step", engine.scatter(batch_of(sizes)))
        assert caught.value is raised
        assert f"replica {k} on {device(k)}" in str(getattr(raised, "__notes__", raised.args))


@pytest.mark.on("cpu")
def test_an_error_of_the_collective_reaches_all_and_can_be_handled(executor: str) -> None:
    def step(net: nn.Module, x: Tensor) -> str:
        try:
            collectives.reduce(x)
        except ValueError as error:
            collectives.barrier()
            return str(error)
        return ""

    for text in evaluated(step, (3, 1), executor):
        assert "tensors of one shape" in text
    with pytest.raises(ValueError, match="expected op 'mean'"):
        evaluated(lambda net, x: collectives.reduce(x, "mode"), (3, 1), executor)
    with pytest.raises(ValueError, match="expected src from 0 to 1"):
        evaluated(lambda net, x: collectives.broadcast(x, 2), (3, 1), executor)


@pytest.mark.on("cpu")
def test_an_interrupt_ends_the_replicas_that_wait(executor: str) -> None:
    ended: list[int] = []

    def step(net: nn.Module, x: Tensor) -> None:
        try:
            if len(x) == 1:
                time.sleep(0.03)  # the last one: by now the others wait
                signal.raise_signal(signal.SIGINT)
                time.sleep(0.03)
            collectives.barrier()
        finally:
            ended.append(len(x))

    with engine_of(step, (3, 2, 1), executor=executor) as engine:
        with pytest.raises(KeyboardInterrupt):
            engine.train("training_step", engine.scatter(batch_of((3, 2, 1))))
        assert sorted(ended) == [1, 2, 3]


@pytest.mark.on("cpu")
def test_in_order_replicas_take_turns_from_meeting_to_meeting() -> None:
    turns: list[tuple[int, int]] = []
    running = threading.Lock()

    def step(net: nn.Module, x: Tensor) -> Tensor:
        for i in range(3):
            assert running.acquire(blocking=False)
            turns.append((i, len(x)))
            time.sleep(0.001)
            running.release()
            collectives.barrier()
        return net(x).mean()

    evaluated(step, (3, 2, 1), "inorder")
    assert turns == [(i, n) for i in range(3) for n in (3, 2, 1)]


@pytest.mark.on("cpu")
def test_waiting_is_not_work(executor: str) -> None:
    def step(net: nn.Module, x: Tensor) -> Tensor:
        if len(x) == 2:
            time.sleep(0.1)
        collectives.barrier()
        return net(x).mean()

    def busy() -> list[float]:
        with engine_of(step, (1, 2), executor=executor) as engine:
            engine.train("training_step", engine.scatter(batch_of((1, 2))))
            return [usage.busy_seconds for usage in engine.meter.usage]

    assert busy()[1] > 0.09
    assert quickest(lambda: busy()[0], 0.05) < 0.05


@pytest.mark.on("cpu")
def test_backward_inside_of_a_step_through_a_collective_is_refused(executor: str) -> None:
    def step(net: nn.Module, x: Tensor) -> Tensor:
        loss = nt_xent(collectives.all_gather(net(x)))
        (gradient,) = torch.autograd.grad(loss, net[0].weight, create_graph=True)
        return loss + gradient.norm()

    with (
        engine_of(step, (2, 2), executor=executor) as engine,
        pytest.raises(RuntimeError, match="inside of training_step: other replicas"),
    ):
        engine.train("training_step", engine.scatter(batch_of((2, 2))))


@pytest.mark.on("cpu")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_collective_inside_of_an_activation_checkpoint_is_refused(use_reentrant: bool) -> None:
    def step(net: nn.Module, x: Tensor) -> Tensor:
        whole = torch.utils.checkpoint.checkpoint(
            lambda x: nt_xent(collectives.all_gather(net(x))),
            x.requires_grad_(),
            use_reentrant=use_reentrant,
        )
        return whole

    with engine_of(step, (2, 2)) as engine:
        loss = engine.train("training_step", engine.scatter(batch_of((2, 2))))
        with pytest.raises(RuntimeError, match=r"an activation checkpoint|inside of training_step"):
            loss.backward()


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


# Another thread of a replica


@pytest.mark.on("cpu")
def test_a_collective_in_another_thread_of_a_replica_is_refused(executor: str) -> None:
    def step(net: nn.Module, x: Tensor) -> str:
        results: list[Any] = []

        def call() -> None:
            try:
                collectives.barrier()
            except RendezvousError as error:
                results.append(str(error))

        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(call,))
        thread.start()
        thread.join(60)
        return str(results[0])

    for text in evaluated(step, (3, 2), executor):
        assert "Expected barrier in the thread that runs replica" in text
