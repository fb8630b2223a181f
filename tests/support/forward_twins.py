"""Does the same to a module on one device and to its twin whose calls are spread."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_dp import DataParallel
from lightning_dp.parallel.forward import ForwardParallel
from lightning_dp.parallel.split import weighted
from support.oracle import assert_equal_trees, devices_of, gradients

CPU = torch.device("cpu")
SIZES = (3, 2, 1)
EXACT = {"atol": 1e-10, "rtol": 0.0}


def inputs(n: int = 6, width: int = 4, seed: int = 1) -> Tensor:
    """The same samples at every call, as a new tensor on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, width, generator=generator, dtype=torch.float64)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


@contextmanager
def engine_of(
    module: nn.Module,
    sizes: Sequence[int] = SIZES,
    places: Sequence[int] | None = None,
    kind: Any = ForwardParallel,
    **options: Any,
) -> Iterator[Any]:
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
    engine = kind(module.to(devices[0]), devices, **{**defaults, **options})
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def wrapping() -> Iterator[Callable[..., DataParallel[Any]]]:
    """Wraps modules for K devices, as `wrap(module, k, **options)`; the wrappers are closed."""
    wrappers = []

    def wrap(module: nn.Module, k: int, **options: Any) -> DataParallel[Any]:
        wrappers.append(DataParallel(module.to(devices_of(1)[0]), devices_of(k), **options))
        return wrappers[-1]

    yield wrap
    for wrapper in wrappers:
        wrapper.close()


def compare(
    make: Callable[[], nn.Module],
    use: Callable[[nn.Module], Any],
    sizes: Sequence[int] = SIZES,
    *,
    state: bool = True,
    **options: Any,
) -> ForwardParallel:
    """Asserts that `use` leaves the same results, gradients and state on both modules."""
    torch.manual_seed(0)
    one = make().double()
    several = copy.deepcopy(one)
    expected = use(one)
    with engine_of(several, sizes, **options) as engine, engine.spreading():
        actual = use(several)
    assert_equal_trees(actual, expected, "results", **EXACT)
    assert_equal_trees(gradients(several), gradients(one), "gradients", **EXACT)
    if state:
        assert_equal_trees(dict(several.state_dict()), dict(one.state_dict()), "state", **EXACT)
    found: ForwardParallel = engine
    return found


def law(
    table: list[Any],
    make: Callable[[], nn.Module],
    marks: Any = (),
    id: str | None = None,
    **options: Any,
) -> Any:
    """Adds the decorated `use` to a table of arguments of `compare`."""

    def add(use: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
        table.append(pytest.param(make, use, options, id=id or use.__name__, marks=marks))
        return use

    return add


def said(error: BaseException) -> str:
    """An error's text with its notes, which Python 3.10 has in the text itself."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def update(module: nn.Module, rate: float = 0.1) -> None:
    """A step of gradient descent."""
    with torch.no_grad():
        for p in module.parameters():
            if p.grad is not None:
                p -= rate * p.grad
                p.grad = None


def layers() -> nn.Module:
    """Deep enough for several tensors to be saved on every device."""
    return nn.Sequential(*perceptron(), nn.Tanh(), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4))


def _checkpointed(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    result: Tensor = checkpoint(function, x, use_reentrant=False)
    return result


def _several(way: Callable[[nn.Module, Tensor], Tensor]) -> Callable[[nn.Module], list[Any]]:
    def use(net: nn.Module) -> list[Any]:
        gradients = []
        for seed in range(6):
            x = inputs(seed=seed).requires_grad_()
            way(net, x).square().sum().backward()
            gradients.append(x.grad)
        return gradients

    return use


CHECKPOINTED = {
    "one": _several(lambda net, x: _checkpointed(net, x)),
    "two in a row": _several(lambda net, x: _checkpointed(lambda x: net(net(x)), x)),
    "two beside": _several(lambda net, x: _checkpointed(net, x) * _checkpointed(net, 2 * x)),
    "two in one": _several(lambda net, x: _checkpointed(lambda x: net(x) * net(2 * x), x)),
    "in a head": _several(lambda net, x: _checkpointed(lambda x: net(x.exp()).exp(), x)),
    "nested": _several(lambda net, x: _checkpointed(lambda x: _checkpointed(net, x).exp(), x)),
}
"""Uses of a module inside of checkpoints (those that are not reentrant)."""
