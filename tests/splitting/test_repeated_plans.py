"""A batch of the size of the one before is split as that was, unless something says otherwise."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_dp import DataParallel
from lightning_dp.parallel.split import Planner, split_policy

CPU = torch.device("cpu")
NOTHING: Callable[[], list[float]] = list
STEPS = st.tuples(
    st.sampled_from(["plan", "telling", "whole", "out of memory", "trial", "done"]),
    st.integers(1, 12),
    st.booleans(),
)


@given(st.lists(STEPS, max_size=30), st.integers(1, 3), st.sampled_from([None, [1, 2, 0]]))
def test_it_is_what_the_planner_would_decide(
    steps: list[tuple[str, int, bool]], least: int, weights: list[float] | None
) -> None:
    asked, told = (Planner(3, split_policy("even", weights, [CPU] * 3)) for _ in range(2))
    trains = True  # what was planned last, of which success or its lack is told
    for what, n, training in steps:
        trains = training if what in ("plan", "telling") else trains
        if what in ("plan", "telling"):
            about: dict[str, Any] = {"training": training, "telling": what == "telling"}
            kind = (n, training)
            plan = asked.plan(n, NOTHING, least=lambda: least, **about)
            if what == "telling" or told.repeated != kind:
                told.plan(n, NOTHING, least=lambda: least, kind=kind, **about)
            assert told.latest.sizes == plan.sizes
        for planner in (asked, told):
            if what == "whole":
                planner.whole()
            elif what == "trial":
                trains = trains if planner.trial(n, training=training) is None else training
            elif what == "done" and not (planner is told and planner.is_recorded):
                planner.record_success(training=trains)
            elif what == "out of memory" and planner.latest.sizes[0]:
                planner.record_oom([0], training=trains)


@pytest.mark.parametrize("function", ["Planner.plan", "Planner._begin", "Planner._sizes"])
def test_an_interrupt_while_it_is_decided_does_not_leave_the_plan_of_another_batch(
    function: str,
) -> None:
    net = nn.Linear(3, 1, bias=False)
    parallel = DataParallel(net, ["cpu"] * 2, executor="inorder")
    for _ in range(2):
        parallel(torch.ones(8, 3))
    come: list[str] = []

    def trace(frame: Any, event: str, _: Any) -> Any:
        name = f"{type(frame.f_locals.get('self')).__qualname__}.{frame.f_code.co_name}"
        if event == "call" and name == function and not come:
            come.append(name)
            raise KeyboardInterrupt

    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            parallel(torch.ones(6, 3))
    finally:
        sys.settrace(None)
    for _ in range(2):
        net.zero_grad()
        outputs = parallel(torch.ones(6, 3))
        outputs.sum().backward()
        assert parallel.last_sizes == (3, 3) and len(outputs) == 6
        assert net.weight.grad is not None and net.weight.grad.tolist() == [[6.0] * 3]
    parallel.close()


def test_batch_norm_that_is_frozen_needs_no_more_than_one_sample() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    parallel = DataParallel(net, ["cpu"] * 4, executor="inorder")
    for is_frozen, sizes in [(False, (3, 2, 0, 0)), (True, (2, 1, 1, 1)), (False, (3, 2, 0, 0))]:
        net[1].train(not is_frozen)
        for _ in range(2):
            parallel(torch.randn(5, 3))
            assert parallel.last_sizes == sizes
    parallel.close()
