"""Trains a module in step mode, and its twin on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from lightning_dp.parallel.step import StepParallel
from support.forward_twins import EXACT, engine_of, update
from support.oracle import assert_equal_trees, gradients

LossOf = Callable[[Any], Any]
Around = Callable[[Any, LossOf, int], None]
"""What happens to a module before a step, by its number."""


step_engine = partial(engine_of, kind=StepParallel)


def steps_of(net: Any, loss_of: LossOf, batches: Sequence[Any], around: Around) -> list[Any]:
    """The losses, and the gradients, of a training by gradient descent."""
    found = []
    for step, batch in enumerate(batches):
        around(net, loss_of, step)
        loss = loss_of(batch)
        loss.backward()
        found.append((loss.detach(), copy.deepcopy(gradients(net))))
        update(net)
    return found


def compare_steps(
    make: Callable[[], Any],
    batches: Sequence[Any],
    sizes: Sequence[int],
    around: Around = lambda *_: None,
    **options: Any,
) -> Any:
    """Asserts that both trainings are the same; returns the module that several devices trained."""
    torch.manual_seed(0)
    one = make().double()
    net = copy.deepcopy(one)
    expected = steps_of(one, one.training_step, batches, around)
    with step_engine(net, sizes, **options) as engine:
        actual = steps_of(net, partial(engine.train, "training_step"), batches, around)
    assert_equal_trees(actual, expected, "steps", **EXACT)
    assert_equal_trees(dict(net.state_dict()), dict(one.state_dict()), "state", **EXACT)
    return net
