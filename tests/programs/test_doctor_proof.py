"""The doctor's laws: they hold on devices in order, and with a planted fault name the culprit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from oracle import devices_of
from places import not_repeated, on_separate
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dp.doctor import LAWS, Law, Result, prove
from lightning_dp.doctor.bench import Bench
from lightning_dp.doctor.culprits import MISSING_WAIT
from lightning_dp.parallel.links.lanes import Lane

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = ("links", "devices compute", "gather(", "replicas", "float64", "uneven", "error in")
K = 3


CPU = torch.device("cpu")


def bench(count: int, folder: Path) -> Bench:
    return Bench(devices_of(count), folder)


def laws(*words: str) -> list[Law]:
    return [law for law in LAWS if any(word in law.name for word in words)]


def verdicts(results: Sequence[Result]) -> dict[str, str]:
    return {result.law: result.verdict for result in results}


def failed(results: Sequence[Result]) -> list[Result]:
    return [result for result in results if result.verdict == "fail"]


# --- devices in order ----------------------------------------------------------------------------


def test_laws_hold(on: str, tmp_path: Path) -> None:
    results = prove(bench(3, tmp_path), laws(*QUICK))
    skipped = ["links carry what was sent"] if on == "cpu" else []
    assert [r.law for r in results if r.verdict == "skip"] == skipped
    assert not failed(results), results
    assert all(0 < r.difference < 1e-2 for r in results if "step" in r.law and r.difference)


@pytest.mark.slow
@not_repeated
@pytest.mark.parametrize("count", [2, 8])
def test_all_laws_hold(on: str, count: int, tmp_path: Path) -> None:
    told: list[str] = []
    results = prove(bench(count, tmp_path), LAWS, told.append)
    assert told == [law.name for law in LAWS]
    assert not failed(results), results
    skipped = {r.law: r.remark for r in results if r.verdict == "skip"}
    assert set(skipped) == (
        {"links carry what was sent", "on side streams", "out of memory"} if on == "cpu" else set()
    )
    assert all(skipped.values())


def test_laws_hold_for_two_replicas_on_one_device(on: str, tmp_path: Path) -> None:
    (root,) = bench(1, tmp_path).devices
    results = prove(Bench([root] * 2, tmp_path), laws(*QUICK, "out of memory"))
    assert not failed(results), results
    assert verdicts(results)["out of memory"] == "skip"


def test_a_proof_gives_the_same_numbers_again(tmp_path: Path) -> None:
    looked_at = laws("float64", "float32", "gather(")
    first, second = (prove(Bench([CPU] * 3, tmp_path), looked_at) for _ in range(2))
    assert [r.difference for r in first] == [r.difference for r in second]


# --- a device that computes wrongly ---------------------------------------------------------------


class OneDeviceIsWrong(TorchDispatchMode):
    """Matrix products on one device are off by a little; or everything is, by a bit."""

    def __init__(self, device: torch.device, by: float) -> None:
        super().__init__()
        self._device, self._by = device, by

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            return out * (1 + self._by) if out.device == self._device else out
        return out


@on_separate
@pytest.mark.parametrize("wrong", [0, 2])
@pytest.mark.parametrize("by", [1e-6, float("nan")])
def test_a_device_that_computes_wrongly_is_named(
    on: str, wrong: int, by: float, tmp_path: Path
) -> None:
    machine = bench(K, tmp_path)
    with OneDeviceIsWrong(machine.devices[wrong], by):
        results = prove(machine, laws("links", "devices compute", "one step, float64"))
    by_law = {result.law: result for result in results}
    assert by_law["links carry what was sent"].verdict == "pass"
    assert by_law["devices compute as the CPU"].culprits == (str(machine.devices[wrong]),)
    assert by_law["one step, float64"].verdict == "fail"


@pytest.mark.slow
@on_separate
def test_a_law_about_all_devices_finds_the_wrong_one_by_itself(on: str, tmp_path: Path) -> None:
    machine = bench(K, tmp_path)
    with OneDeviceIsWrong(machine.devices[2], 1e-6):
        (result,) = prove(machine, laws("ten steps, float64"))
    assert result.verdict == "fail" and result.culprits == (str(machine.devices[2]),)
    assert result.difference is not None and result.difference > 1e-9


def test_a_replica_on_the_cpu_that_computes_wrongly_is_named(tmp_path: Path) -> None:
    from lightning_dp.doctor import parts

    calls = []
    whole = parts._Work.forward

    def wrong_for_one(self: Any, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        calls.append(self)
        return [tensor + (self.number == 1) for tensor in whole(self, device, dtype)]

    def numbered(self: Any) -> None:
        torch.nn.Module.__init__(self)
        self.number = next(numbers)

    numbers = iter([-1, 0, 1, 2])  # the first one is the CPU alone
    with mock.patch.multiple(parts._Work, __init__=numbered, forward=wrong_for_one):
        (result,) = prove(Bench([CPU] * 3, tmp_path), laws("devices compute"))
    assert len(calls) == 4
    assert result.verdict == "fail" and result.culprits == ("cpu:1",)


# --- a link that corrupts ------------------------------------------------------------------------


class OneLinkCorrupts(TorchDispatchMode):
    """One element of what goes from one device to another arrives wrong."""

    def __init__(self, source: str, target: str) -> None:
        super().__init__()
        self._way = torch.device(source), torch.device(target)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten._to_copy:
            self._spoil(args[0], out)
        elif func.overloadpacket is torch.ops.aten.copy_:
            self._spoil(args[1], out)
        return out

    def _spoil(self, source: Tensor, arrived: Tensor) -> None:
        if (source.device, arrived.device) == self._way and arrived.numel() > 1:
            arrived[(-1,) * arrived.dim()].zero_()


@on_separate
@pytest.mark.parametrize("source, target", [(2, 0), (1, 2), ("cpu", 1), (2, "cpu")])
def test_a_link_that_corrupts_is_named(
    on: str, source: int | str, target: int | str, tmp_path: Path
) -> None:
    machine = bench(K, tmp_path)
    ends = [end if end == "cpu" else str(machine.devices[end]) for end in (source, target)]
    with OneLinkCorrupts(*ends):
        results = prove(machine, laws("links"))
    (result,) = results
    assert result.verdict == "fail" and result.culprits == (f"{ends[0]} -> {ends[1]}",)
    assert result.difference is not None and 0 < result.difference < 1e-3


@on_separate
def test_scatter_and_gather_name_the_links_too(on: str, tmp_path: Path) -> None:
    machine = bench(K, tmp_path)
    root, one, other = map(str, machine.devices)
    for source, target, culprits in (
        (other, root, {f"{other} -> {root}"}),
        ("cpu", one, {one, f"{one} -> {root}"}),
    ):
        with OneLinkCorrupts(source, target):
            (result,) = prove(machine, laws("gather("))
        assert result.verdict == "fail" and set(result.culprits) == culprits


@pytest.mark.slow
@on_separate
def test_a_training_over_a_link_that_corrupts_is_wrong(on: str, tmp_path: Path) -> None:
    machine = bench(K, tmp_path)
    root, _, other = map(str, machine.devices)
    with OneLinkCorrupts(other, root):
        (result,) = prove(machine, laws("ten steps, float64"))
    assert result.verdict == "fail" and result.culprits == (str(machine.devices[2]),)


# --- a wait that is missing -----------------------------------------------------------------------


def no_wait_for_copies_to_the_host() -> contextlib.AbstractContextManager[Any]:
    return mock.patch("lightning_dp.parallel.engine.host_waits_for", lambda *devices: None)


def workers_do_not_enter_the_callers_streams() -> contextlib.AbstractContextManager[Any]:
    nothing = lambda streams: contextlib.nullcontext()
    return mock.patch("lightning_dp.parallel.workers.thread_state.on_streams", nothing)


@pytest.fixture
def nothing_is_under_way() -> Iterator[None]:
    yield
    for device in range(torch.sim.device_count()):
        torch.sim.synchronize(device)


def gradients_are_added_too_early() -> contextlib.AbstractContextManager[Any]:
    """Before they are there."""
    return mock.patch.object(Lane, "arrive", lambda lane, later=(): None)


WAITS: list[tuple[Callable[[], contextlib.AbstractContextManager[Any]], str]] = [
    (no_wait_for_copies_to_the_host, "loss on the host"),
    (no_wait_for_copies_to_the_host, "outputs on the host"),
    (workers_do_not_enter_the_callers_streams, "on side streams"),
    (gradients_are_added_too_early, "all layers have gradients"),
]


@pytest.mark.sim_only("A GPU may be quick enough for a wait that is missing.")
@pytest.mark.usefixtures("nothing_is_under_way", "on")
@pytest.mark.parametrize("drop, law", WAITS)
def test_a_wait_that_is_missing_is_named(
    drop: Callable[[], contextlib.AbstractContextManager[Any]], law: str, tmp_path: Path
) -> None:
    machine = bench(3, tmp_path)
    looked_at = [*laws("links"), *laws(law)]
    assert not failed(prove(machine, looked_at))
    with drop():
        results = failed(prove(machine.afresh(), looked_at))
    assert law in {result.law for result in results}
    assert {name for result in results for name in result.culprits} == {MISSING_WAIT}, results


# --- laws that would miss their fault are none ----------------------------------------------------


def test_every_law_can_fail(tmp_path: Path) -> None:
    """Where whatever is compared is far apart, no law says that it holds."""
    machine = Bench([CPU] * 3, tmp_path)
    wrong = mock.Mock(return_value=1.0)
    names = [f"lightning_dp.doctor.{room}.relative" for room in ("bench", "parts", "steps")]
    with contextlib.ExitStack() as stack:
        for name in (*names, "lightning_dp.doctor.failures.relative"):
            stack.enter_context(mock.patch(name, wrong))
        stack.enter_context(mock.patch("torch.equal", lambda a, b: False))
        results = prove(
            machine, laws("devices", "gather(", "replicas", "float64", "drop-in", "metrics")
        )
    assert set(verdicts(results).values()) == {"fail"}


def test_an_error_in_a_law_is_told_with_its_notes(tmp_path: Path) -> None:
    def look(on: Bench) -> Any:
        error = ValueError("too much")
        error.add_note("[in replica 2]") if hasattr(error, "add_note") else None
        raise error

    (result,) = prove(Bench([CPU] * 2, tmp_path), [Law("broken", look)])
    assert result.verdict == "fail" and "ValueError: too much" in result.remark
    assert result.difference is None


def test_a_swallowed_error_of_a_replica_is_no_pass(tmp_path: Path) -> None:
    from lightning_dp.doctor.failures import _Failing

    def never(self: Any, batch: Any, batch_idx: int) -> None:
        self.last = float("nan")

    with mock.patch.object(_Failing, "on_train_batch_start", never):
        (result,) = prove(Bench([CPU] * 2, tmp_path), laws("error in"))
    assert result.verdict == "fail" and "got none" in result.remark
