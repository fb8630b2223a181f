"""Each private name of torch in `torch_private.modes` does what is said of it there."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dp.parallel.contexts import Contexts
from lightning_dp.parallel.torch_private import modes as private


class _Counts(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(threading.current_thread().name)
        return func(*args, **(kwargs or {}))


class _CountsDispatch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(threading.current_thread().name)
        return func(*args, **(kwargs or {}))


def test_get_current_function_mode_stack() -> None:
    outer, inner = _Counts(), _Counts()
    with outer, inner:
        assert private.current_modes() == (None, (outer, inner), ())
    assert private.current_modes() == (None, (), ())


def test_get_current_dispatch_mode_stack() -> None:
    outer, inner = _CountsDispatch(), _CountsDispatch()
    with outer, inner:
        assert private.current_modes() == (None, (), (outer, inner))
    assert private.current_modes() == (None, (), ())


def test_len_torch_function_stack() -> None:
    assert private.count_function_modes() == 0
    with _Counts(), _Counts():
        assert private.count_function_modes() == 2
    with _default_device():
        assert private.count_function_modes() == 1


def test_len_torch_dispatch_stack() -> None:
    assert private.count_dispatch_modes() == 0
    with _CountsDispatch(), _CountsDispatch():
        assert private.count_dispatch_modes() == 2


@contextlib.contextmanager
def _default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("enter", [_default_device, lambda: torch.device("meta")])
def test_device_context_is_the_default_device(enter: Any) -> None:
    counts = _Counts()
    with enter(), counts:
        assert private.current_modes() == (torch.device("meta"), (counts,), ())
    with torch.device("cpu"), enter():
        assert private.current_modes().default_device == torch.device("meta")


def test_push_mode_and_pop_mode_in_other_threads() -> None:
    """Several threads are in the same modes at once, and leave them in any order."""
    counts, dispatches, meta = _Counts(), _CountsDispatch(), torch.device("meta")
    errors: list[BaseException] = []
    barrier = threading.Barrier(2)

    def work() -> None:
        try:
            with Contexts(private.entries_of(private.Modes(meta, (counts,), (dispatches,)))):
                barrier.wait(10)
                assert torch.ones(1).device == meta
                assert private.current_modes() == (meta, (counts,), (dispatches,))
                barrier.wait(10)
            assert private.current_modes() == (None, (), ())
            assert torch.ones(1).device == torch.device("cpu")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, name=f"worker {i}") for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert set(counts.calls) == set(dispatches.calls) == {"worker 0", "worker 1"}
    assert private.current_modes() == (None, (), ())
