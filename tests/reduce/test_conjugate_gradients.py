"""Gradients that torch conjugates or negates only as it reads them, such as those of `w.conj()`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import Classifier, assert_same, run
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("on")


class Conjugate(Classifier):
    """Its gradients are conjugates of what lies in memory."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(2, 10, 3, generator=generator, dtype=torch.float64)
        self.net = nn.Module()
        self.weight = nn.Parameter(torch.complex(*values))
        self.bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.lazy: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        z = x.to(torch.complex128) @ self.weight.conj()
        return z.abs() + self.bias

    def on_after_backward(self) -> None:
        gradient = self.weight.grad
        assert gradient is not None
        self.lazy.append(gradient.is_conj())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("executor", ["threads", "inorder"])
@pytest.mark.parametrize("mode", ["step", "forward"])
def test_a_model_with_conjugate_gradients_trains_as_on_one_device(
    k: int, executor: str, mode: str
) -> None:
    alone = run(Conjugate, 1)
    assert all(alone.module.lazy)
    result = run(Conjugate, k, strategy={"mode": mode, "executor": executor})
    assert_same(result, alone, atol=1e-10)
