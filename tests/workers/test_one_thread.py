"""On the CPU an optimizer's step wakes no team of threads that would take the workers' cores."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from oracle import assert_equal_trees, loader, trainer
from torch import Tensor, nn

from lightning_dp import DataParallelStrategy
from lightning_dp.parallel.contexts import Surroundings
from lightning_dp.parallel.workers import OneThread
from lightning_dp.parallel.workers.thread_state import PAYS, WAKES

OWN = 3  # threads of the caller


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(OWN)
    yield
    torch.set_num_threads(before)


def optimizer_of(*sizes: int) -> Any:
    """Of parameters of such sizes, which take no memory."""
    with_gradient = [SimpleNamespace(numel=lambda n=n: n, grad=1) for n in sizes]
    without = SimpleNamespace(numel=lambda: PAYS, grad=None)
    return SimpleNamespace(param_groups=[{"params": with_gradient}, {"params": [without]}])


@pytest.mark.parametrize(
    ("sizes", "threads"),
    [
        ([], OWN),
        ([WAKES] * 9, OWN),  # torch wakes nobody
        ([WAKES + 1], 1),
        ([1, PAYS - 1], 1),
        ([1, PAYS], OWN),  # alone it would take too long
    ],
)
def test_one_thread_where_it_takes_less_than_a_team_that_spins(
    sizes: list[int], threads: int
) -> None:
    one_thread = OneThread()
    with one_thread:
        assert torch.get_num_threads() == OWN
        for _ in range(2):
            one_thread.take_for(optimizer_of(*sizes))
            assert torch.get_num_threads() == threads
            one_thread.end()
            assert torch.get_num_threads() == OWN
            one_thread.take_for(optimizer_of(*sizes))
    assert torch.get_num_threads() == OWN


def test_an_error_leaves_the_callers_own_number() -> None:
    one_thread = OneThread()
    with pytest.raises(ZeroDivisionError), Surroundings():
        one_thread.__enter__()  # and an interrupt has kept it from ending
        one_thread.take_for(optimizer_of(PAYS))
        raise ZeroDivisionError
    assert torch.get_num_threads() == OWN


def test_it_is_the_callers_number_and_no_other_threads() -> None:
    one_thread = OneThread()
    with one_thread:
        one_thread.take_for(optimizer_of(PAYS))
        other = Thread(target=one_thread.end)
        other.start()
        other.join()
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == OWN


class Seeing(oracle.Classifier):
    """Has a weight for which torch wakes a team, and notes how many threads each of these has."""

    def __init__(self, kind: str = "adam") -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh())
        self.net.append(nn.Linear(200, 3))
        assert self.net[2].weight.numel() > WAKES
        self.kind, self.seen = kind, {}

    def note(self, where: str) -> None:
        self.seen.setdefault(where, set()).add(torch.get_num_threads())

    def on_before_backward(self, loss: Tensor) -> None:
        self.note("backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note("clipping")

    def on_train_batch_end(self, *args: Any) -> None:
        self.note("end")

    def configure_optimizers(self) -> Any:
        if self.kind == "lbfgs":
            return torch.optim.LBFGS(self.parameters(), 0.1, max_iter=3)
        optimizer = torch.optim.AdamW(self.parameters(), self.lr)
        optimizer.register_step_post_hook(lambda *_: self.note("step"))
        return optimizer


class SeeingByHand(oracle.ByHand, Seeing):
    pass


def fitted(make: Any, devices: int, **options: Any) -> Any:
    torch.manual_seed(0)
    module = make()
    job = trainer(devices, DataParallelStrategy(**options) if options else "dp_custom")
    job.fit(module, loader(), loader())
    assert torch.get_num_threads() == OWN
    return module


def as_on_one_device(module: Any, expected: Any) -> None:
    close = {"atol": 1e-4, "rtol": 1e-4}  # of float32
    assert_equal_trees(dict(module.state_dict()), dict(expected.state_dict()), "trained", **close)


def test_the_optimizer_of_replicas_in_threads_takes_one() -> None:
    module = fitted(Seeing, 2, executor="threads")
    all_the_time, first_not = {OWN}, {OWN, 1}  # before the first step nobody knows how it runs
    assert module.seen == {
        "backward": all_the_time,
        "clipping": first_not,
        "step": first_not,
        "end": all_the_time,
    }
    expected = fitted(Seeing, 1)
    as_on_one_device(module, expected)


@pytest.mark.parametrize("devices", [1, 2])
def test_where_no_worker_waits_for_the_cores_it_takes_all(devices: int) -> None:
    module = fitted(Seeing, devices, executor="inorder")
    assert set.union(*module.seen.values()) == {OWN}


def test_forward_mode_as_well() -> None:
    module = fitted(Seeing, 2, executor="threads", mode="forward")
    assert (module.seen["backward"], module.seen["step"]) == ({OWN}, {OWN, 1})


def test_every_closure_of_an_optimizer_has_them_all() -> None:
    module = fitted(lambda: Seeing("lbfgs"), 2, executor="threads")
    assert module.seen["backward"] == {OWN}
    expected = fitted(lambda: Seeing("lbfgs"), 1)
    as_on_one_device(module, expected)


def test_by_hand_it_is_a_workers_number() -> None:
    module = fitted(SeeingByHand, 2, executor="threads")
    expected = fitted(SeeingByHand, 1)
    as_on_one_device(module, expected)


class Failing(Seeing):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.trainer.global_step == 0:
            return
        assert torch.get_num_threads() == 1
        raise ZeroDivisionError("in the optimizer's step")


def test_an_error_in_the_step_leaves_all() -> None:
    with pytest.raises(ZeroDivisionError):
        fitted(Failing, 2, executor="threads")
    assert torch.get_num_threads() == OWN
