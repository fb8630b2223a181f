"""Whatever is done to gradients between backwards, those of several processes are one device's."""

from __future__ import annotations

import random
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from several_processes import run_in_processes
from torch import Tensor, nn

from lightning_dp.parallel.contexts import replaced
from lightning_dp.parallel.processes import World, buckets, on_the_way
from lightning_dp.parallel.split import between_processes
from lightning_dp.parallel.step import StepParallel

CPU = torch.device("cpu")
FEATURES = 6


class Net(nn.Module):
    """Of its layers some are used for all samples, one for few, one for none, one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.second = nn.Linear(8, 1)
        self.rare = nn.Linear(FEATURES, 1)
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.phase = nn.Parameter(torch.randn(8, dtype=torch.complex128))
        self.single = nn.Linear(1, 1).float()

    def training_step(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        h = h + self.frozen(h).tanh() + (self.phase * h).abs() + self.empty.sum()
        y = self.second(h).squeeze(1) + self.single(h[:, :1].float()).squeeze(1)
        chosen = x[:, 0] > 1.0
        if chosen.any():
            y = y.index_add(0, chosen.nonzero().squeeze(1), self.rare(x[chosen]).squeeze(1))
        return y.square().mean()


def net() -> Net:
    torch.manual_seed(0)
    module = Net()
    for name, own in module.named_children():
        if name != "single":
            own.double()
    return module


Program = list[tuple[Any, ...]]


def programs(count: int) -> list[Program]:
    """Random things that loops and people do with gradients."""
    draw = random.Random(1)
    made = []
    for _ in range(count):
        steps: Program = []
        for _ in range(draw.randint(3, 8)):
            n = draw.choice([1, 2, 3, 5, 9])
            steps.append(("backward", n, draw.random() < 0.5, draw.randint(0, 99)))
            if draw.random() < 0.5:
                steps.append(draw.choice(OTHERS))
        steps.append(("backward", 4, False, 0))
        made.append(steps)
    return made


OTHERS: list[tuple[Any, ...]] = [
    ("none",),
    ("zero",),
    ("scale",),
    ("hook",),
    ("unhook",),
    ("post hook",),
    ("freeze",),
    ("thaw",),
    ("waiting",),
    ("twice",),
]


class Run:
    """Does the steps of a program with one net, and notes its gradients where all are there."""

    def __init__(self, engine: StepParallel | None, world: World | None) -> None:
        self.engine, self.world = engine, world
        self.net: Any = net() if engine is None else engine.module
        self.seen: list[Any] = []
        self.handles: list[Any] = []

    def do(self, program: Program) -> list[Any]:
        for name, *args in program:
            getattr(self, "do_" + name.replace(" ", "_"))(*args)
        for handle in self.handles:
            handle.remove()
        return self.seen

    def note(self) -> None:
        self.seen.append([None if p.grad is None else p.grad.clone() for p in self.parameters()])

    def parameters(self) -> list[Any]:
        return list(self.net.parameters())

    def loss(self, x: Tensor) -> Tensor:
        if self.engine is None or self.world is None:
            return self.net.training_step(x)
        sizes = between_processes(len(x), self.world.device_counts)
        start = sum(sizes[: self.world.rank])
        own = x[start : start + sizes[self.world.rank]]
        with self.world.working(is_idle=not len(own)):
            return self.engine.train("training_step", own if len(own) else x[:1])

    def do_backward(self, n: int, accumulates: bool, seed: int) -> None:
        x = torch.randn(n, FEATURES, generator=torch.Generator().manual_seed(seed)).double()
        reducer = None if self.engine is None else self.engine.reducer
        with replaced(reducer, accumulating=accumulates) if reducer else nullcontext():
            self.loss(x).backward()
        if not accumulates:
            self.note()

    def do_twice(self) -> None:
        loss = self.loss(torch.ones(5, FEATURES).double())
        loss.backward(retain_graph=True)
        loss.backward()
        self.note()

    def do_none(self) -> None:
        self.do_backward(3, False, 7)
        self.net.zero_grad()

    def do_zero(self) -> None:
        self.do_backward(3, False, 8)
        self.net.zero_grad(set_to_none=False)

    def do_scale(self) -> None:
        self.do_backward(2, False, 9)
        for p in self.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)

    def do_hook(self) -> None:
        def hook(gradient: Tensor) -> Tensor:
            self.seen.append(gradient.clone())
            return gradient * 0.5

        self.handles.append(self.net.first.weight.register_hook(hook))

    def do_post_hook(self) -> None:
        def hook(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self.seen.append(parameter.grad.clone())

        self.handles.append(self.net.second.bias.register_post_accumulate_grad_hook(hook))

    def do_unhook(self) -> None:
        for handle in self.handles:
            handle.remove()

    def do_freeze(self) -> None:
        self.net.second.requires_grad_(False)

    def do_thaw(self) -> None:
        self.net.second.requires_grad_(True)

    def do_waiting(self) -> None:
        self.do_backward(5, True, 11)
        if self.engine is not None:
            self.engine.reducer.reduce_waiting()
        self.note()


def world_of(device_counts: list[int]) -> World:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return World(dist.get_rank(), dist.get_world_size(), device_counts)


def run_programs(counts: list[int], executor: Any, count: int) -> list[Any]:
    world = world_of(counts)
    found = []
    for i, program in enumerate(programs(count)):
        # Of many small buckets, and tensors in pieces, few are on their way at a time.
        small = i % 2 == 0
        vars(buckets)["BUCKET_BYTES"] = 200 if small else 4 * 2**20
        vars(on_the_way)["WINDOW_BYTES"] = 700 if small else 32 * 2**20
        devices = [CPU] * counts[world.rank]
        options: Any = {"split": partial(_cut, k=len(devices)), "executor": executor}
        engine = StepParallel(net(), devices, output_device=CPU, world=world, **options)
        found.append(Run(engine, world).do(program))
        engine.close()
    return found


def _cut(n: int, k: int) -> tuple[int, ...]:
    return tuple(n // k + (i < n % k) for i in range(k))


def expected(count: int) -> list[Any]:
    return [Run(None, None).do(program) for program in programs(count)]


def assert_same(own: Any, one: Any, program: Any) -> None:
    assert len(own) == len(one), program
    for mine, its in zip(own, one, strict=True):
        for a, b in zip(mine, its, strict=True) if isinstance(its, list) else [(mine, its)]:
            assert (a is None) == (b is None), program
            if a is not None:
                atol = 1e-5 if a.dtype == torch.float32 else 1e-10
                torch.testing.assert_close(a, b, rtol=0, atol=atol, msg=lambda m: f"{program}: {m}")


@pytest.mark.parametrize(
    "counts, executor",
    [
        ([1, 1], "inorder"),
        ([2, 2], "threads"),
        pytest.param([2, 2], "inorder", marks=pytest.mark.slow),
        pytest.param([2, 1], "threads", marks=pytest.mark.slow),
        pytest.param([1, 1, 1, 1], "inorder", marks=pytest.mark.slow),
    ],
)
def test_gradients_whatever_is_done_in_between(counts: list[int], executor: Any) -> None:
    count = 20
    made, one = programs(count), expected(count)
    for own in run_in_processes(run_programs, len(counts), counts, executor, count):
        for program, mine, its in zip(made, own, one, strict=True):
            assert_same(mine, its, program)
