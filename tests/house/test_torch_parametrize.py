"""Private names of torch, of parametrizations: each does what we take it for."""

from __future__ import annotations

from torch import nn
from torch.nn.utils import parametrizations, parametrize

from lightning_dp.parallel.torch_private import cached_values


def test_cache_is_another_one_after_each_block() -> None:
    layer = parametrizations.weight_norm(nn.Linear(2, 2))
    before = cached_values()
    assert layer.weight is not layer.weight
    assert cached_values() is before
    with parametrize.cached():
        assert layer.weight is layer.weight
        assert cached_values() is before
    assert cached_values() is not before
    assert not cached_values()


def test_a_module_with_the_same_class_gets_the_value_of_the_first() -> None:
    layer = parametrizations.weight_norm(nn.Linear(2, 2))
    other = object.__new__(type(layer))
    other.__dict__.update(layer.__dict__)
    with parametrize.cached():
        assert other.weight is layer.weight
