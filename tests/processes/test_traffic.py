"""What processes tell each other in a step, also where one of them has to do it again."""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks.steps_in_files import Entered, plain_step
from several_processes import run_in_processes
from test_gradient_states import _cut, world_of
from torch import Tensor, nn

from lightning_dp import sim
from lightning_dp.parallel.contexts import replaced
from lightning_dp.parallel.processes import World
from lightning_dp.parallel.step import StepParallel
from lightning_dp.parallel.workers import ExecutorName

CPU = torch.device("cpu")


class Net(nn.Module):
    """Several buckets of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(512, 512) for _ in range(10)])
        self.norm = nn.BatchNorm1d(512)

    def training_step(self, x: Tensor) -> Tensor:
        return self.net(self.norm(x)).square().mean()


class Counted:
    """Counts the calls of the world, and what is added up asynchronously."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def of(self, name: str, call: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return call(*args, **kwargs)

        return counted

    def taken(self) -> dict[str, int]:
        calls, self.calls = dict(self.calls), Counter()
        return calls


def engine_of(world: World, devices: list[torch.device], **options: Any) -> StepParallel:
    torch.manual_seed(0)
    net = options.pop("net", Net)().to(devices[0])
    split = partial(_cut, k=len(devices))
    return StepParallel(net, devices, output_device=devices[0], split=split, world=world, **options)


def plain_steps(count: int) -> list[dict[str, int]]:
    world = world_of([count] * 2)
    counted = Counted()
    vars(world)["gather"] = counted.of("gather", world.gather)
    vars(world)["broadcast"] = counted.of("broadcast", world.broadcast)
    found = []
    engine = engine_of(world, [CPU] * count)
    with replaced(dist, all_reduce=counted.of("all_reduce", dist.all_reduce)):
        for accumulates in (False, False, True, True, False):
            with replaced(engine.reducer, accumulating=accumulates):
                engine.train("training_step", torch.randn(4, 512)).backward()
            engine.module.zero_grad() if not accumulates else None
            found.append(counted.taken())
        engine.resync()
        found.append(counted.taken())
    engine.close()
    return found


def test_a_step_is_one_exchange_and_one_sum_for_each_bucket() -> None:
    # Of 10 layers, each a little over 1 MiB, three are in a bucket.
    step, accumulating = {"gather": 1, "all_reduce": 4}, {"gather": 1}
    expected = [step, step, accumulating, accumulating, step, {"broadcast": 1}]
    for found in run_in_processes(plain_steps, 2, 1):
        assert found == expected
    for found in run_in_processes(plain_steps, 2, 2):
        assert found == expected


def entered(executor: ExecutorName) -> Entered:
    return plain_step(4, executor=executor, warm_up=20)


@pytest.mark.parametrize("executor, most", [("inorder", 548), ("threads", 581)])
def test_a_plain_step_with_a_log_is_one_exchange_and_one_sum(
    executor: ExecutorName, most: int
) -> None:
    # Also that a process is told to end, and what is logged, go with the exchange.
    for step in run_in_processes(entered, 2, executor):
        assert dict(step.messages) == {"allgather": 1, "allreduce": 1}
        assert step.frames <= most, step.calls.most_common(30)


def left_early(count: int, executor: ExecutorName) -> list[int]:
    """How many buckets had left when the backward ended."""
    world = world_of([count] * 2)
    engine = engine_of(world, [CPU] * count, executor=executor)
    found = []
    after = engine.reducer.after_backward

    def counted(*args: Any) -> None:
        between: Any = engine.reducer.between
        found.append(between._sums.left)
        after(*args)

    with replaced(engine.reducer, after_backward=counted):
        for _ in range(2):
            engine.train("training_step", torch.randn(4, 512)).backward()
            engine.module.zero_grad()
    engine.close()
    return found


def test_buckets_leave_while_the_backward_runs() -> None:
    assert run_in_processes(left_early, 2, 1, "inorder") == [[3, 3], [3, 3]]
    # In order several replicas fill the root's gradients: they are complete in the last backward.
    assert run_in_processes(left_early, 2, 2, "inorder") == [[3, 3], [3, 3]]
    assert run_in_processes(left_early, 2, 2, "threads") == [[0, 0], [0, 0]]


class Routed(nn.Module):
    """Each sample goes through the layer that it names, so replicas use different ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(512, 512) for _ in range(10)])
        self.double()

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, names = batch
        used = [self.layers[n](x[names == n]).square().sum() for n in names.unique().tolist()]
        return torch.stack(used).sum() / (512 * len(x))


ROUTES = [
    # Of two processes with two replicas of two samples: the last replica of one of them uses
    # nothing that the others do, or all of it; the layers 8 and 9 are never used.
    [0, 1, 2, 3, 4, 5, 6, 7],
    [7, 6, 5, 4, 3, 2, 1, 0],
    [0, 0, 7, 7, 7, 7, 0, 0],
    [1, 2, 1, 2, 1, 2, 1, 2],
    [3, 3, 3, 3, 0, 1, 6, 7],
]


def routed(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 512, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return x, torch.tensor(ROUTES[step])


def gradients_of_routes(executor: ExecutorName, accumulates: bool) -> list[list[Tensor | None]]:
    world = world_of([2, 2])
    engine = engine_of(world, [CPU] * 2, net=Routed, executor=executor)
    found = []
    for step in range(len(ROUTES)):
        own = slice(4 * world.rank, 4 * world.rank + 4)
        x, names = routed(step)
        with replaced(engine.reducer, accumulating=accumulates and not step % 2):
            engine.train("training_step", (x[own], names[own])).backward()
        if engine.reducer.between is not None and not (accumulates and not step % 2):
            found.append([p.grad for p in engine.module.parameters()])
            engine.module.zero_grad()
    engine.close()
    return found


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("executor", ["inorder", "threads"])
def test_replicas_that_use_other_layers(executor: ExecutorName, accumulates: bool) -> None:
    several = run_in_processes(gradients_of_routes, 2, executor, accumulates)
    torch.manual_seed(0)
    net = Routed()
    expected = []
    for step in range(len(ROUTES)):
        net.training_step(routed(step)).backward()
        if not (accumulates and not step % 2):
            expected.append([p.grad for p in net.parameters()])
            net.zero_grad()
    for own in several:
        for step, (got, wanted) in enumerate(zip(own, expected, strict=True)):
            assert [g is None for g in got] == [g is None for g in wanted], step
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))
        self.double()

    def training_step(self, x: Tensor) -> Any:
        y = self.net(x)
        return {"loss": y.square().mean(), "pred": y.detach()}


def out_of_memory(fails: str) -> Any:
    """On the second process's second device a step does not fit at first."""
    sim.enable(4)
    torch.sim.set_memory_limit(1, 2**28)  # type: ignore[attr-defined]  # there now
    logging.getLogger("lightning_dp").setLevel(logging.ERROR)
    world = world_of([2, 2])
    devices = [torch.device("sim", i) for i in (0, 1)]
    engine = engine_of(world, devices, net=Wide)
    found: list[Any] = []
    for step in range(3):
        x = torch.randn(12, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        own = x[6 * world.rank : 6 * world.rank + 6]
        is_to_fail = world.rank == 1 and step == 1
        result = one_step(engine, own, fails if is_to_fail else "")
        gradients = [p.grad.cpu() for p in engine.module.parameters() if p.grad is not None]
        found.append((result["loss"].cpu().detach(), result["pred"].cpu(), gradients))
        engine.module.zero_grad()
    engine.close()
    return found


def one_step(engine: StepParallel, batch: Tensor, fails: str) -> Any:
    """A step and its backward; some part of it fails once for want of memory."""
    from contextlib import nullcontext

    from lightning_dp.parallel.step import TrainingStep

    left = [1]

    def fail(own: Any, *args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs)
        if left and left.pop():
            torch.empty(2**28, device="sim:1")
        return result

    call = TrainingStep(engine, "training_step", ())
    places = {"forward": (engine.replicas, "adopt_rows"), "gather": (engine, "join")}
    places["backward"] = (engine.reducer, "before_backward")
    if fails in places:
        owner, name = places[fails]
        context: Any = replaced(owner, **{name: partial(fail, getattr(owner, name))})
    else:
        context = nullcontext()
    with context:
        result = engine.run(call, batch)
        try:
            result["loss"].backward()
        except torch.OutOfMemoryError as error:
            engine.rerun(call, batch, nullcontext, error)
    return result


@pytest.mark.slow
def test_a_process_that_runs_out_of_memory_does_it_again_alone() -> None:
    torch.manual_seed(0)
    net = Wide()
    for fails in ("", "gather", "backward"):
        several = run_in_processes(out_of_memory, 2, fails)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            one = net.training_step(torch.randn(12, 64, dtype=torch.float64, generator=generator))
            net.zero_grad()
            one["loss"].backward()
            for own in several:
                loss, _, gradients = own[step]
                torch.testing.assert_close(loss, one["loss"].detach(), rtol=0, atol=1e-10)
                expected = [p.grad for p in net.parameters()]
                torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-10)
            rows = torch.cat([own[step][1] for own in several])
            torch.testing.assert_close(rows, one["pred"], rtol=0, atol=1e-10)
