"""Each private name of torch in `torch_private.hooks` does what is said of it there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_dp.parallel.torch_private import hooks as private


def test_backward_hooks_and_post_accumulate_grad_hooks_are_seen() -> None:
    plain, first, second, removed = (nn.Parameter(torch.ones(1)) for _ in range(4))
    first.register_hook(lambda gradient: gradient)
    second.register_post_accumulate_grad_hook(lambda parameter: None)
    removed.register_hook(lambda gradient: gradient).remove()
    assert private.hooked([plain, first, second, removed]) == [1, 2]
    on_gradient = [private.gradient_hooks(p) for p in (plain, first, second, removed)]
    assert list(map(bool, on_gradient)) == [False, True, False, False]


@pytest.mark.parametrize("kind", ["_backward_hooks", "_post_accumulate_grad_hooks"])
def test_taken_off_and_put_back(kind: str) -> None:
    parameter, calls = nn.Parameter(torch.ones(1)), []
    if kind == "_backward_hooks":
        handle = parameter.register_hook(lambda gradient: calls.append(gradient.item()))
    else:
        handle = parameter.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.item()))
    (parameter * 2).backward()
    assert calls == [2]
    hooks = private.take_hooks_off(parameter)
    (parameter * 2).backward()
    assert calls == [2] and parameter.grad.item() == 4
    assert sum(len(table or ()) for table in hooks) == 1
    private.put_hooks_back(parameter, hooks)
    parameter.grad = None
    (parameter * 3).backward()
    assert calls == [2, 3]
    handle.remove()
    (parameter * 3).backward()
    assert calls == [2, 3] and private.hooked([parameter]) == []


def test_backward_hooks_that_are_taken_off_take_others_meanwhile() -> None:
    parameter, calls = nn.Parameter(torch.ones(1)), []
    hooks = private.take_hooks_off(parameter)
    parameter.register_hook(lambda gradient: calls.append("meanwhile"))
    (parameter * 2).backward()
    private.put_hooks_back(parameter, hooks)
    (parameter * 2).backward()
    assert calls == ["meanwhile"]
    parameter.register_hook(lambda gradient: calls.append("later"))
    (parameter * 2).backward()
    assert calls == ["meanwhile", "later"]
