"""Gradients on the CPU are added up by the workers, in slices, with the bits of one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_equal_trees
from torch import Tensor, nn

from lightning_dp.parallel.gradients import slices
from lightning_dp.parallel.gradients.slices import add_in_slices, shares
from lightning_dp.parallel.step import StepParallel

CPU = torch.device("cpu")


def in_order(calls: Sequence[Callable[[], None]]) -> None:
    for call in reversed(calls):  # no call may rely on another one
        call()


@given(st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), max_size=6), st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_shares_have_every_element_once_and_are_of_one_size(
    shapes: list[tuple[int, ...]], n: int
) -> None:
    tensors = [torch.zeros(shape) for shape in shapes]
    found = shares([[tensor] for tensor in tensors], n)
    assert len(found) <= n
    for share in found:
        for (part,) in share:
            part += 1
    assert all(tensor.eq(1).all() for tensor in tensors)
    longest_row = max([t[0].numel() if t.dim() and len(t) else 1 for t in tensors], default=0)
    total = sum(map(Tensor.numel, tensors))
    assert all(sum(part.numel() for (part,) in s) < total / n + 1 + longest_row for s in found)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the gradients are."""
    monkeypatch.setattr(slices, "SLICED", 0)
    monkeypatch.setattr(slices, "ALONE", 0)


@pytest.mark.usefixtures("always")
def test_the_bits_are_those_of_one_sum_after_another() -> None:
    shapes = [(7, 3), (), (1,), (4, 3, 2, 2), (0, 2), (2, 9)]
    replicas = [[torch.randn(shape) * 10**k for shape in shapes] for k in range(4)]
    replicas[2][3] = replicas[2][3].to(memory_format=torch.channels_last)
    expected = [tensor.clone() for tensor in replicas[0]]
    for terms in replicas[1:]:
        torch._foreach_add_(expected, terms)
    before = list(replicas[0])
    assert add_in_slices(replicas[0], replicas[1:], in_order)
    assert all(map(torch.equal, replicas[0], expected))
    assert all(a is b for a, b in zip(replicas[0], before, strict=True))


@pytest.mark.usefixtures("always")
def test_a_replica_without_a_gradient_is_left_out() -> None:
    sums: list[Tensor | None] = [torch.ones(3), torch.ones(2), None]
    terms: list[list[Tensor | None]] = [[None] * 3, [torch.ones(3), None, None]]
    assert add_in_slices(sums, terms, in_order)
    assert_equal_trees(sums, [torch.full((3,), 2.0), torch.ones(2), None], "sums")


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("kind", ["no sum yet", "sparse", "one memory", "of other shapes"])
def test_what_has_no_sums_in_slices_is_left_as_it_was(kind: str) -> None:
    sums: list[Tensor | None] = [torch.ones(4, 2), torch.ones(4, 2)]
    terms = [[torch.ones(4, 2), torch.ones(4, 2)]]
    if kind == "no sum yet":
        sums[0] = None
    elif kind == "sparse":
        terms[0][1] = torch.ones(4, 2).to_sparse()
    elif kind == "one memory":
        sums[1] = sums[0]
    else:
        terms[0][0] = torch.ones(1, 2)
    before = [None if total is None else total.clone() for total in sums]
    assert not add_in_slices(sums, terms, in_order)
    assert_equal_trees(sums, before, "sums")


def test_the_calling_thread_alone_adds_up_what_is_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts: list[int] = []
    add = slices.add_to_each

    def noted(sums: Sequence[Tensor], terms: Sequence[Tensor]) -> None:
        parts.extend(map(Tensor.numel, sums))
        add(sums, terms)

    monkeypatch.setattr(slices, "add_to_each", noted)
    sums = [torch.randn(50, slices.ALONE // 20), torch.randn(3)]
    terms = [torch.randn_like(total) for total in sums]
    expected = [total + term for total, term in zip(sums, terms, strict=True)]
    assert add_in_slices(sums, [terms], lambda calls: pytest.fail("told"))
    assert_equal_trees(sums, expected, "sums", rtol=0, atol=0)
    assert max(parts) <= slices.ALONE


class Net(nn.Module):
    """Parameters of several shapes, of which one is not used, in two calls that differ."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))
        self.scale, self.unused = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(2))

    def training_step(self, x: Tensor) -> Tensor:
        return (self.layers(x) * self.scale).square().mean()


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("sizes", [(3, 3, 3, 3), (4, 0, 7, 1), (0, 5, 7, 0), (12, 0, 0, 0)])
def test_workers_add_up_what_they_have_computed(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[str] = set()
    add = slices._add_up
    monkeypatch.setattr(
        slices,
        "_add_up",
        lambda share: (threads.add(threading.current_thread().name), add(share)),
    )
    found = {}
    for executor in ("inorder", "threads"):
        net, torch_batch = Net(), torch.randn(12, 5, generator=torch.Generator().manual_seed(1))
        engine = StepParallel(
            net, [CPU] * 4, output_device=CPU, split=lambda n: sizes, executor=executor
        )
        for _ in range(2):  # the second time onto gradients that are there
            engine.train("training_step", torch_batch).backward()
        found[executor] = {name: p.grad for name, p in net.named_parameters()}
        engine.close()
    assert found["threads"]["unused"] is None
    assert_equal_trees(found["threads"], found["inorder"], "gradients", rtol=0, atol=0)
    assert threads <= {f"dp-replica-{k}" for k in range(4)}
    assert threads or sum(map(bool, sizes)) == 1
