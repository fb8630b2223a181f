"""Ops give on a simulated device what they give on the CPU, gradients included.

Models of many kinds are compared in `tests/same_numbers`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Case = Callable[[torch.device], list[Tensor]]

CASES: dict[str, Case] = {}


def leaf(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape).to(device).requires_grad_()


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def graded(output: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [output, *torch.autograd.grad(output.float().square().sum(), inputs, retain_graph=True)]


@case
def random_numbers(device: torch.device) -> list[Tensor]:
    body, x = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5)).to(device), leaf(device, 6, 4)
    torch.manual_seed(7)
    on: Any = {"device": device}
    drawn = [torch.rand(100, **on), torch.randn(100, **on), torch.randperm(50, **on)]
    drawn += [torch.randint(9, (20,), **on), torch.multinomial(torch.ones(8, **on), 3)]
    drawn += [torch.bernoulli(drawn[0]), torch.empty(9, **on).exponential_()]
    drawn += graded(checkpoint(body, x, use_reentrant=False), x)
    return [F.dropout(drawn[1], 0.3), *(tensor.float() for tensor in drawn)]


@case
def indexing(device: torch.device) -> list[Tensor]:
    x, values, rows = leaf(device, 5, 4), leaf(device, 3, 4), torch.tensor([0, 2, 2])
    added = x.index_put((rows.to(device),), values, accumulate=True)
    masked = x.clone()
    masked[masked > 0] = 0.5
    masked[:, rows] += 1  # an index on the CPU, as CUDA allows
    gathered = x.gather(0, torch.randint(0, 5, (3, 4)).to(device))
    return [t for y in (added, masked, x[rows], gathered) for t in graded(y, x)]


@case
def views_and_in_place(device: torch.device) -> list[Tensor]:
    x = leaf(device, 4, 6)
    y = x.clone()
    y[1:3].t().mul_(2)
    y.view(2, 2, 6).select(1, 0).add_(1)
    y.unfold(1, 3, 3)[..., 0] *= 3
    z = y.unsqueeze(0).transpose_(0, 1).squeeze_(1)
    assert z.data_ptr() == y.data_ptr()
    return graded(torch.cat([z, y.flip(0), y.roll(1, 1), y.expand(4, 6)]), x)


@pytest.mark.parametrize("name", CASES)
def test_ops_have_the_values_and_gradients_of_the_cpu(name: str) -> None:
    results = []
    for device in (torch.device("cpu"), torch.device("sim:3")):
        torch.manual_seed(0)
        results.append(CASES[name](device))
        assert all(result.device == device for result in results[-1])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(other.cpu(), one, rtol=1e-4, atol=1e-5, check_stride=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_the_ops_that_cuda_casts(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 5))
    device_model, x = copy.deepcopy(model).to("sim:3"), torch.randn(2, 3, 6, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert device_model(x.to("sim:3")).dtype == torch.float32
    with torch.autocast("sim", dtype=dtype):
        output = device_model(x.to("sim:3"))
        assert output.dtype == (output @ output.t()).dtype == dtype
        assert output.softmax(1).dtype == torch.float32  # in full precision, as on CUDA
        with pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
            F.binary_cross_entropy(output.sigmoid(), torch.zeros_like(output))
    output.float().square().mean().backward()
    assert device_model[0].weight.grad.dtype == torch.float32
    torch.testing.assert_close(output.float().cpu(), model(x), rtol=0.05, atol=0.05)
