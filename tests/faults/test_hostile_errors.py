"""Whatever a replica raises arrives by identity, with the replica's name, and nobody waits."""

from __future__ import annotations

import faulthandler
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import oracle
import pytest
import torch
from hostile_errors import HOSTILE, groups
from lightning.pytorch import Callback
from oracle import Classifier, devices_of, loader
from patience import not_kept
from places import as_parameters
from spreading import said
from torch import Tensor
from torchmetrics import MeanMetric, Metric

from lightning_dp import DataParallelStrategy
from lightning_dp.metrics.no_value import NoValue
from lightning_dp.parallel.errors import add_note, chain, described, forget_frames, is_a
from lightning_dp.parallel.workers import Calls, Executor, ExecutorName, Task, collectives

pytestmark = pytest.mark.usefixtures("on", "one_thread")

EXECUTORS: tuple[ExecutorName, ...] = ("threads", "inorder")
WHERE = ("before a rendezvous", "at a rendezvous", "between two", "after the last", "alone")
MAKERS: dict[str, Callable[[], BaseException]] = {
    **{name: partial(kind, "text") for name, kind in HOSTILE.items()},
    **{name: partial(lambda name: groups()[name], name) for name in groups()},
}
TAKES_NO_NOTE = {"notes", "notes, which are no list", "notes and add_note", "setattr"}
UNREADABLE = {"getattribute"}
CHANGED_BY_LIGHTNING = {
    "setattr",  # its context managers write to what passes
    "StopIteration",  # its loops take it for their end
    "KeyboardInterrupt",  # SystemExit arrives
}


@pytest.fixture(autouse=True)
def hangs_end_the_tests() -> Iterator[None]:
    """With the stacks of all threads, instead of waiting for good."""
    faulthandler.dump_traceback_later(60, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def caught(call: Callable[[], Any]) -> BaseException | None:
    """What a call raises: `pytest.raises` would look at it."""
    try:
        call()
    except BaseException as error:
        return error
    return None


def notes_of(error: BaseException) -> str:
    """An error's notes, past its own methods."""
    attributes = BaseException.__getattribute__(error, "__dict__")
    return "".join(attributes.get("__notes__", "")) or "".join(map(str, error.args))


def replica(k: int, failing: int, where: str, error: BaseException) -> int:
    """What one replica does, of which one fails; at a rendezvous, what it is about fails."""

    def act(calls: Calls, values: list[Any]) -> list[Any]:
        raise error

    if where != "alone":
        if k == failing and where == "before a rendezvous":
            raise error
        collectives.barrier("first")
        if where == "at a rendezvous":
            collectives.meet("act", k, act)
        if k == failing and where == "between two":
            raise error
        collectives.barrier("second")
    if k == failing:
        raise error
    return k


@pytest.mark.parametrize("how", EXECUTORS)
@pytest.mark.parametrize("kind", MAKERS)
def test_any_error_of_a_replica_arrives_with_a_note_and_ends_all(
    kind: str, how: ExecutorName, caplog: pytest.LogCaptureFixture
) -> None:
    devices = devices_of(3)
    executor = Executor(devices, how)
    for where in WHERE:
        for failing in range(3):
            error = MAKERS[kind]()
            work = partial(replica, failing=failing, where=where, error=error)
            tasks = [Task(k, device, partial(work, k)) for k, device in enumerate(devices)]
            caplog.clear()
            arrived = caught(lambda: executor.run("work", tasks, calls=Calls([1, 1, 1])))  # noqa: B023  # called now
            assert arrived is error, (where, failing, type(arrived))
            first = 0 if where == "at a rendezvous" else failing  # it is raised in all of them
            note = f"in replica {first} on {devices[first]}"
            if kind in TAKES_NO_NOTE or kind in UNREADABLE:
                assert [note in record.getMessage() for record in caplog.records] == [True]
            else:
                assert note in notes_of(error) and not caplog.records, (where, failing)
    assert executor.run("work", [Task(k, d, partial(int, k)) for k, d in enumerate(devices)]) == [
        0,
        1,
        2,
    ]
    executor.close()


FAULTS: list[BaseException] = []


class Failing(Classifier):
    """Raises an error in one replica, in a step, a forward, a backward or a metric."""

    def __init__(self, place: str, fault: BaseException, *, by_hand: bool = False) -> None:
        super().__init__()
        self.place = place
        FAULTS[:] = [fault]  # not an attribute, at which torch and the replicas would look
        self.automatic_optimization = not by_hand
        self.row = loader(32).dataset.tensors[0][9, 0]  # in the second of two shards of 8

    def at(self, place: str, x: Tensor) -> None:
        if place == self.place and bool((x[:, 0].cpu() == self.row).any()):
            raise FAULTS[0]

    def forward(self, x: Tensor) -> Tensor:
        self.at("forward", x)
        z = self.net(x)
        if z.requires_grad:
            at = not_kept(self.at)
            z.register_hook(lambda gradient: at("backward", x))
        return z

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.at("step", batch[0])
        loss = torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        self.at("end", batch[0])
        return loss


class Sour(Metric):
    """A metric that refuses a certain sample."""

    def __init__(self, refuse: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.refuse = refuse
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, x: Tensor) -> None:
        self.refuse(x)
        self.total += x.sum()

    def compute(self) -> Tensor:
        return self.total


class Seen(Callback):
    def __init__(self) -> None:
        self.errors: list[BaseException] = []

    def on_exception(self, job: Any, module: Any, error: BaseException) -> None:
        self.errors.append(error)


def arrives(module: Failing, devices: int, **options: Any) -> tuple[str, int]:
    """How a fit ends whose module fails; and how many steps it has done."""
    seen = Seen()
    strategy = DataParallelStrategy(**options) if devices > 1 else "auto"
    options = {"callbacks": [seen], "max_epochs": 1, "num_sanity_val_steps": 0}
    job = oracle.trainer(devices, strategy, **options)
    arrived = caught(lambda: job.fit(module, loader(32, 16), loader(16)))
    assert not [t for t in threading.enumerate() if t.name.startswith("dp-")]
    told = "nothing" if not seen.errors else type(seen.errors[0]).__qualname__
    same = bool(seen.errors) and seen.errors[0] is FAULTS[0]
    FAULTS.clear()  # its frames hold the run
    ended = "no error" if arrived is None else type(arrived).__qualname__
    return f"{ended}, the fault itself: {same}, callbacks were told of: {told}", job.global_step


MODES = {
    "step": {"mode": "step"},
    "by hand": {"mode": "step"},
    "forward": {"mode": "forward"},
}


SOME = ("repr", "bool", "add_note, by StopIteration", "class", "setattr", "SystemExit")


@pytest.mark.parametrize("kinds", [SOME, pytest.param(tuple(MAKERS), marks=pytest.mark.slow)])
@pytest.mark.parametrize("on", as_parameters(marks={"sim": pytest.mark.slow}), indirect=True)
@pytest.mark.parametrize("how", EXECUTORS)
@pytest.mark.parametrize("mode", MODES)
def test_a_fit_ends_as_on_one_device(mode: str, how: str, on: str, kinds: Sequence[str]) -> None:
    for place in ("step", "forward", "backward", "end"):
        for kind in kinds:
            if mode == "forward" and place in ("step", "end") and kind != "repr":
                continue  # they are on the main thread, once
            outcomes = []
            for devices in (1, 2):
                module = Failing(place, MAKERS[kind](), by_hand=mode == "by hand")
                outcomes.append(arrives(module, devices, executor=how, **MODES[mode]))
            assert outcomes[0] == outcomes[1], (place, kind)
            if kind not in CHANGED_BY_LIGHTNING:
                assert "itself: True" in outcomes[0][0], (place, kind)


@pytest.mark.parametrize("how", EXECUTORS)
@pytest.mark.parametrize("method", ["update", "forward"])
@pytest.mark.parametrize("kind", [ValueError, StopIteration])
def test_an_error_of_a_metric_names_the_metric(
    method: str, how: str, kind: type[Exception]
) -> None:
    fault = kind("a value out of range")

    class Measuring(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.scores = torch.nn.ModuleDict({"good": MeanMetric(), "sour": Sour(refuse)})

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.scores["good"].update(batch[0].mean())
            metric = self.scores["sour"]
            metric(batch[0]) if method == "forward" else metric.update(batch[0])
            return self.loss(batch)

    def refuse(x: Tensor) -> None:
        raise fault

    strategy = DataParallelStrategy(executor=how)
    job = oracle.trainer(3, strategy, max_epochs=1, num_sanity_val_steps=0)
    arrived = caught(lambda: job.fit(Measuring(), loader(32, 16), loader(16)))
    # Lightning's loops take a StopIteration for their end, on one device, too.
    assert arrived is (fault if kind is ValueError else None)
    assert "metric scores.sour (Sour)" in said(fault) or "a metric (Sour)" in said(fault)


def test_notes_and_descriptions_of_any_error() -> None:
    for name, make in MAKERS.items():
        error = make()
        add_note(error, "[a note]")
        assert type(error).__name__ in described(error) or name == "repr, which is odd text"
        assert isinstance(described(error, str), str)
        assert is_a(error, type(error)) and not is_a(error, RecursionError)
        takes_no_note = name in TAKES_NO_NOTE | UNREADABLE
        assert takes_no_note or "[a note]" in notes_of(error), name


def raised_from(cause: BaseException, *, chained: bool) -> ValueError:
    """An error that came from another one, whose cause may be itself."""
    error = ValueError("too few samples")
    try:
        try:
            raise cause
        except BaseException:
            raise error from cause
    except ValueError:
        if chained:
            BaseException.__setattr__(cause, "__cause__", error)
        return error


@pytest.mark.parametrize("chained", [False, True], ids=["", "in a circle"])
@pytest.mark.parametrize("kind", MAKERS)
def test_errors_that_another_came_from_are_not_asked(kind: str, chained: bool) -> None:
    cause = MAKERS[kind]()
    error = raised_from(cause, chained=chained)
    assert [each is known for each, known in zip(chain(error), (error, cause), strict=True)]
    forget_frames(error)
    for each in (error, cause):
        assert BaseException.__getattribute__(each, "__traceback__") is None

    error = raised_from(cause, chained=chained)
    arrived = caught(NoValue(error, "Mean.forward").fail)
    assert arrived is error and "over the samples of one replica" in notes_of(error)
    assert error.__context__ is None and error.__cause__ is cause
    assert BaseException.__getattribute__(cause, "__traceback__") is None
