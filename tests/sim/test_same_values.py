"""Random numbers and autocast of a simulated device.

Models of many kinds are compared in `tests/same_numbers`.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


def test_random_numbers_are_those_of_the_cpu() -> None:
    results = []
    for device in (torch.device("cpu"), torch.device("sim:3")):
        on: Any = {"device": device}
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5)).to(device)
        x = torch.randn(6, 4).to(device).requires_grad_()
        torch.manual_seed(7)
        drawn = [torch.rand(100, **on), torch.randn(100, **on), torch.randperm(50, **on)]
        drawn += [torch.randint(9, (20,), **on), torch.multinomial(torch.ones(8, **on), 3)]
        drawn += [torch.bernoulli(drawn[0]), torch.empty(9, **on).exponential_()]
        drawn += [output := checkpoint(body, x, use_reentrant=False)]
        drawn += [*torch.autograd.grad(output.square().sum(), [x]), F.dropout(drawn[1], 0.3)]
        assert all(tensor.device == device for tensor in drawn)
        results.append(drawn)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(other.cpu(), one, rtol=1e-4, atol=1e-5)


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
