"""The caller is on streams of its own: all that the engine does for it has to be in order there.

Workers and autograd's threads have other current streams. Simulated devices raise an error where
nothing orders the work of two. `--side-streams` brings all other tests into the same position.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.device_kinds import on_accelerators
from support.forward_twins import CHECKPOINTED, EXACT, engine_of, layers
from support.oracle import ByHand, Classifier, assert_equal_trees, assert_same, run
from torch import nn

pytestmark = [on_accelerators, pytest.mark.usefixtures("on", "on_side_streams")]
both_executors = pytest.mark.parametrize("executor", ["threads", "inorder"])


class Manual(ByHand, Classifier):
    pass


class Normed(Classifier):
    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(16)
        self.net = nn.Sequential(nn.Linear(10, 16), norm, nn.Tanh(), nn.Linear(16, 3))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr)  # the first bias has no gradient


CASES: dict[str, tuple[type[Classifier], dict[str, Any], dict[str, Any]]] = {
    "forward": (Classifier, {"mode": "forward"}, {}),
    "manual": (Manual, {}, {}),
    "values on the host": (Classifier, {"output_device": "cpu"}, {}),
    "accumulating": (Classifier, {}, {"accumulate_grad_batches": 2}),
    "synced batch norm": (Normed, {}, {"sync_batchnorm": True}),
}


@both_executors
@pytest.mark.parametrize("case", CASES)
def test_a_fit(case: str, executor: str) -> None:
    make, options, fit = CASES[case]
    expected = run(make, 1, max_epochs=1, accelerator="cpu", **fit)
    result = run(make, 3, max_epochs=1, strategy={"executor": executor, **options}, **fit)
    assert_same(result, expected, atol=1e-4)


@both_executors
@pytest.mark.parametrize("way", CHECKPOINTED)
def test_a_checkpoint_around_spread_calls(way: str, executor: str) -> None:
    """Its calls are made again in a thread of autograd."""
    torch.manual_seed(0)
    one = layers().double()
    torch.manual_seed(0)
    net = layers().double()
    with engine_of(net, executor=executor) as engine:
        with engine.spreading():
            got = CHECKPOINTED[way](net)
        assert_equal_trees(got, CHECKPOINTED[way](one), "gradients", **EXACT)
