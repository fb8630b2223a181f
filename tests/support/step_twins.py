"""Trains a module in step mode, and its twin on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_dp.parallel.split import weighted
from lightning_dp.parallel.step import StepParallel
from support.forward_twins import CPU, EXACT, update
from support.oracle import assert_equal_trees, devices_of, gradients

LossOf = Callable[[Any], Any]
Around = Callable[[Any, LossOf, int], None]
"""What happens to a module before a step, by its number."""


@contextmanager
def step_engine(
    module: nn.Module, sizes: Sequence[int], places: Sequence[int] | None = None, **options: Any
) -> Iterator[StepParallel]:
    """An engine whose devices get shards of these sizes, or in proportion to them.

    `places` are the devices of the replicas, by their positions; the root is the first.
    """
    places = places or range(len(sizes))
    devices = [devices_of(max(places) + 1)[k] for k in places]
    defaults = {
        "output_device": CPU,
        "executor": "threads",
        "split": lambda n: tuple(sizes) if sum(sizes) == n else weighted(n, sizes),
    }
    engine = StepParallel(module.to(devices[0]), devices, **{**defaults, **options})
    try:
        yield engine
    finally:
        engine.close()


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
