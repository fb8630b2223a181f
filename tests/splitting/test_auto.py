"""split="auto": one device's numbers whoever works, and as many devices as are fastest."""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle
import places
import pytest
import test_conformance as conformance
import torch
import torchmetrics
from benchmarks.steps_in_files import plain_step
from families import FAMILIES
from lightning.pytorch import Callback
from oracle import (
    ByHand,
    Classifier,
    assert_equal_trees,
    assert_same,
    devices_of,
    loader,
    run,
    trainer,
)
from places import SIM_DEVICES
from torch import Tensor, nn

from lightning_dp import DataParallel, DataParallelMonitor, DataParallelStrategy, sim
from lightning_dp.alone import AloneSteps
from lightning_dp.parallel.split.auto import Auto
from lightning_dp.parallel.split.choice import Choice
from lightning_dp.parallel.split.usage import StepUsage
from lightning_dp.parallel.workers.trial import Trial

pytestmark = pytest.mark.usefixtures("one_thread")

EXACT = {"atol": 1e-10}
KINDS = places.kinds[:2]
ALL = -1
TURNS = [ALL, 0, 0, 1, 0, ALL, ALL, 0, 1, 1]


class Ways(Counter[str]):
    """How many steps of each kind were Lightning's own, and how many the engine's."""


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Ways:
    """Counts steps."""
    seen, step = Ways(), AloneSteps.step

    def counted(self: Any, method: str, *args: Any) -> Any:
        output = step(self, method, *args)
        if self.is_alone:
            seen["alone"] += 1
        else:
            sizes = self._engine.last_sizes
            seen["root" if any(sizes) and not any(sizes[1:]) else "several"] += 1
        return output

    monkeypatch.setattr(AloneSteps, "step", counted)
    return seen


@pytest.fixture
def switching(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ways change from batch to batch, as fast as they never do by themselves."""

    def begin(self: Any, can: Callable[[int], bool], is_settled: Any) -> tuple[int, bool]:
        turns = vars(self).setdefault("turns", itertools.cycle(TURNS))
        way = next(turns)
        most = self._most
        way = most if way == ALL else min(way, most)
        return (way if can(way) else most), True

    monkeypatch.setattr(Choice, "begin", begin)


def families() -> list[Any]:
    """Some families plain; slow are all of them, and every option with each third one."""
    found = []
    for (i, option), (j, family) in itertools.product(
        enumerate(conformance.OPTIONS), enumerate(FAMILIES)
    ):
        own = conformance.OPTIONS[option]
        if "split" in own.strategy(4) or "weights" in own.strategy(4):
            continue
        is_its_turn = i == 0 or (i + j) % 3 == 0
        if is_its_turn and (own.manual or family != "adversarial"):
            on = KINDS[(i + j) % len(KINDS)]
            marks = [] if i == 0 and j % 4 == 0 else [pytest.mark.slow]
            found.append(pytest.param(family, option, on, marks=marks))
    return found


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
@pytest.mark.filterwarnings("ignore:The provided params to be frozen already exist within another")
@pytest.mark.parametrize(("family", "option", "on"), families(), indirect=["on"])
@pytest.mark.usefixtures("switching")
def test_as_one_device_whoever_works(
    family: str, option: str, on: str, ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = conformance.OPTIONS[option]
    auto = replace(own, strategy=lambda k: {**own.strategy(k), "split": "auto"})

    def several(*_: Any) -> Any:
        return conformance.several_devices_with(family, auto)

    monkeypatch.setattr(conformance, "several_devices", several)
    conformance.test_as_one_device(family, option, on)
    assert ways["several"] and ways["alone"] + ways["root"]


# Every mode, with changing ways


class SumOfLosses(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * len(batch[1]) / 25


class MovesTargets(Classifier):
    def loss(self, batch: Any) -> Tensor:
        outputs = self(batch[0])
        return nn.functional.cross_entropy(outputs, batch[1].to(outputs.device))


class CallsItsLayers(Classifier):
    """In forward mode there is nothing to spread."""

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])


class CountsItems(Classifier):
    """A mean over something else than samples, and more in its output."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().loss(batch)
        return {"loss": loss, "num_items": len(batch[1]), "y": batch[1]}


class Stateful(Classifier):
    """Metrics, lists and other state on self, and logs of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        self.seen: list[Tensor] = []
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch[1])
        self.steps += 1
        self.accuracy(self(batch[0]), batch[1])
        self.log("train/acc", self.accuracy, on_step=True, on_epoch=True, batch_size=len(batch[1]))
        return super().training_step(batch, batch_idx)


class SkipsSome(Stateful):
    """Some batches have no loss, the last ones before the optimizer's step among them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx in (1, 3) else loss


class Normalised(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(16))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr)


class WithClosures(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), 0.01, max_iter=3)


class Stateful64(ByHand, Stateful):
    """By hand."""


DOUBLE: dict[str, Any] = {"precision": "64-true"}
MODES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "step": (Stateful, {}, {}),
    "in order": (Stateful, {"executor": "inorder"}, {}),
    "threads": (Stateful, {"executor": "threads"}, {}),
    "forward": (Classifier, {"mode": "forward"}, {}),
    "forward, nothing spread": (CallsItsLayers, {"mode": "forward"}, {}),
    "forward, batch stays": (MovesTargets, {"mode": "forward", "move_batch": False}, {}),
    "manual": (Stateful64, {}, {}),
    "manual, in order": (Stateful64, {"executor": "inorder"}, {}),
    "accumulation": (Stateful, {}, {"accumulate_grad_batches": 2}),
    "accumulation, in order": (Stateful, {"executor": "inorder"}, {"accumulate_grad_batches": 3}),
    "accumulation, some without a loss": (SkipsSome, {}, {"accumulate_grad_batches": 2}),
    "validation in between": (
        Stateful,
        {},
        {"accumulate_grad_batches": 3, "val_check_interval": 1},
    ),
    "clipping": (Classifier, {}, {"gradient_clip_val": 0.1}),
    "sum": (SumOfLosses, {"loss_reduction": "sum"}, {}),
    "items": (CountsItems, {}, {}),
    "output elsewhere": (Stateful, {"output_device": "cpu"}, {}),
    "output on a device": (Stateful, {"output_device": 1}, {}),
    "batch norm": (Normalised, {}, {"sync_batchnorm": True}),
    "closures": (WithClosures, {}, {}),
    "one device twice": (Stateful, {"devices": "twice"}, {}),
}


QUICK = {
    *(
        (False, name)
        for name in ("step", "output elsewhere", "validation in between", "batch norm")
    ),
    *((False, name) for name in ("forward, nothing spread", "accumulation, some without a loss")),
    *((True, name) for name in ("forward", "manual", "accumulation")),
}
"""Whether on an accelerator, and what."""


@pytest.mark.parametrize(
    ("on", "name"),
    [
        pytest.param(on, name, marks=[] if (on != "cpu", name) in QUICK else [pytest.mark.slow])
        for on, name in itertools.product(KINDS, MODES)
    ],
    indirect=["on"],
)
@pytest.mark.filterwarnings("ignore:CallsItsLayers.*expected calls that are spread")
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.usefixtures("switching")
def test_every_mode_has_one_devices_numbers(name: str, on: str, ways: Ways) -> None:
    make, options, kwargs = MODES[name]
    if options.get("devices"):
        options = {**options, "devices": [str(d) for d in devices_of(2) for _ in "ab"]}
    result = run(make, 4, strategy={"split": "auto", **options}, **DOUBLE, **kwargs)
    counted = dict(ways)
    expected = run(make, 1, **DOUBLE, **kwargs)
    assert_same(result, expected, **EXACT)
    if issubclass(make, Stateful):
        assert result.module.steps == expected.module.steps
        kept = [torch.cat(job.module.seen).tolist() for job in (result, expected)]
        assert kept[0] == kept[1]
    stays = on != "cpu" and ("output_device" in options or not options.get("move_batch", True))
    is_unknown = on != "cpu" and make is CallsItsLayers  # what a batch takes on the root
    fewer = counted.get("root" if stays else "alone")
    assert counted.get("several") and bool(fewer) != is_unknown, counted
    assert not stays or not counted.get("alone")


# What is chosen


class Sizes(Callback):
    """The sizes of every training batch."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.seen.append(trainer.strategy.last_sizes)


class Quiet(Classifier):
    """Leaves nothing but gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


goes_by_virtual_time = pytest.mark.sim_only("It goes by virtual time.")


@pytest.fixture
def virtual(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[tuple[int, ...]]]]:
    """Trains on devices of given speeds on virtual time; the sizes of all batches."""
    sim.enable(SIM_DEVICES)
    monkeypatch.setattr(oracle, "ON", "sim")

    def fit(flops: list[float], bytes_per_second: float, steps: int) -> list[tuple[int, ...]]:
        for k, speed in enumerate(flops):
            torch.sim.set_speed(k, flops_per_second=speed)
        for a, b in itertools.permutations(range(len(flops)), 2):
            torch.sim.set_link(a, b, bytes_per_second=bytes_per_second)
        torch.sim.set_clock("virtual")
        torch.manual_seed(0)
        sizes = Sizes()
        options: dict[str, Any] = {"max_steps": steps, "max_epochs": -1, "callbacks": [sizes]}
        strategy = DataParallelStrategy(split="auto", executor="threads")
        trainer(len(flops), strategy, **options).fit(Quiet(), loader(64 * 4, 64), loader(8))
        torch.sim.set_clock("wall")
        return sizes.seen

    yield fit
    torch.sim.set_clock("wall")
    torch.sim.set_links(None)
    for k in range(SIM_DEVICES):
        torch.sim.set_speed(k)


FAST, SLOW = 25e9, 2e5  # bytes per second


@goes_by_virtual_time
def test_where_devices_compute_all_of_them_work(virtual: Any) -> None:
    sizes = virtual([1e6] * 4, FAST, 14)
    assert (64, 0, 0, 0) in sizes and sizes[10:] == [(16,) * 4] * 4
    assert virtual([1e6] * 4, FAST, 14) == sizes


@goes_by_virtual_time
def test_where_links_hold_everything_up_the_root_works_alone(virtual: Any) -> None:
    sizes = virtual([1e9] * 4, SLOW, 14)
    assert sizes[6:] == [(64, 0, 0, 0)] * 8
    assert virtual([1e9] * 4, SLOW, 14) == sizes


@pytest.mark.slow
@goes_by_virtual_time
def test_in_between_some_of_the_devices_work(virtual: Any) -> None:
    sizes = virtual([1e6] * 4, SLOW, 26)
    looked_at = (33, 31, 0, 0)  # the 16th batch that several devices share
    assert sizes[-6:] == [looked_at, *[(32, 32, 0, 0)] * 5]
    assert virtual([1e6] * 4, SLOW, 26) == sizes


@goes_by_virtual_time
def test_a_device_of_an_eighth_of_the_speed_gets_little(virtual: Any) -> None:
    sizes = virtual([1e6, 1e6, 1e6, 1.25e5], FAST, 16)
    assert sizes[0] == (17, 16, 16, 15)
    assert all(own[3] <= 3 and min(own[:3]) >= 19 for own in sizes[-4:]), sizes


@pytest.mark.slow
@goes_by_virtual_time
def test_a_device_of_an_eighth_of_the_speed_is_left_out_where_it_costs_much(virtual: Any) -> None:
    sizes = virtual([1e6, 1e6, 1e6, 1.25e5], 3e5, 28)
    assert all(own[3] == 0 and min(own[:3]) >= 19 for own in sizes[-6:]), sizes


class Deep(Quiet):
    """Many narrow layers: Python is what takes its time."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(10, 10), nn.Tanh()) for _ in range(20))
        self.net = nn.Sequential(*layers, nn.Linear(10, 3))


def fit(module: Any, k: int = 4, steps: int = 40, *, n: int = 53, **kwargs: Any) -> Any:
    sizes = Sizes()
    options: dict[str, Any] = {"split": "auto", "executor": "inorder"}
    options |= {key: kwargs.pop(key) for key in ("mode", "executor") if key in kwargs}
    callbacks = [sizes, *kwargs.pop("callbacks", ())]
    own = {"max_steps": steps, "max_epochs": -1, "callbacks": callbacks}
    job = trainer(k, DataParallelStrategy(**options), **own, **kwargs)
    job.fit(module, loader(n), loader(8))
    job.sizes = sizes.seen
    return job


@pytest.mark.parametrize("mode", ["step", "forward"])
def test_where_python_takes_the_time_the_root_works_alone(
    mode: str, ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In order all is done by one thread, whose own time others on the machine do not change much.
    monkeypatch.setattr(time, "perf_counter", time.thread_time)
    job = fit(Deep(), mode=mode, steps=80)
    alone = [not any(own[1:]) for own in job.sizes]
    assert job.sizes[0] == (7, 6, 6, 6) and sum(alone) > 40, job.sizes  # others are tried again
    assert job.strategy.last_sizes == job.sizes[-1]
    assert ways["alone"] > 40 and not ways["root"]


def test_all_are_timed_once_the_executor_knows_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    # Sizes that go on changing with the load of the machine would void what was timed.
    monkeypatch.setattr(time, "perf_counter", time.thread_time)
    job = fit(Deep(), n=100, executor="auto")
    alone = [i for i, sizes in enumerate(job.sizes) if not any(sizes[1:])]
    tried = 2 * Trial.TURNS * Trial.IN_A_ROW
    assert tried + 2 <= alone[0] <= tried + 14, job.sizes


def test_usage_and_the_monitor_know_what_the_root_has_done_alone() -> None:
    monitor = DataParallelMonitor()
    job = fit(Deep(), callbacks=[monitor])
    expected = [sum(column) for column in zip(*job.sizes, strict=True)]
    assert [usage.samples for usage in job.strategy.usage] == expected
    assert list(monitor.total.samples) == expected and monitor.total.steps == len(job.sizes)
    seconds = [usage.busy_seconds for usage in job.strategy.usage]
    assert all(second > 0 for second in seconds)
    assert monitor.total.busy_seconds == pytest.approx(seconds)


def test_replicas_that_have_rested_end_their_threads() -> None:
    counts: list[int] = []

    class Threads(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            names = [thread.name for thread in threading.enumerate()]
            counts.append(sum(name.startswith("dp-") for name in names))

    fit(Deep(), steps=80, executor="threads", callbacks=[Threads()])
    # On a busy machine others may be tried again later.
    assert counts[0] == 4 and 0 in counts


@pytest.mark.usefixtures("switching")
def test_deterministic_algorithms_leave_no_choice(ways: Ways) -> None:
    job = fit(Deep(), steps=12, deterministic=True)
    assert not ways["alone"] and set(job.sizes) == {(7, 6, 6, 6), (1, 1, 1, 0)}


class KeepsSamples(Classifier):
    """Every replica goes on from its own samples."""

    before: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if self.before is not None:
            x = x + self.before
        self.before = x.detach()
        return nn.functional.cross_entropy(self(x), y)


@pytest.mark.usefixtures("switching")
@pytest.mark.filterwarnings("ignore:A step binds")
def test_where_replicas_keep_something_of_their_samples_sizes_stay() -> None:
    job = fit(KeepsSamples(), steps=12, n=100)
    assert set(job.sizes) == {(7, 6, 6, 6)}


@pytest.mark.usefixtures("switching")
def test_the_check_of_the_first_step_is_made(ways: Ways) -> None:
    strategy = DataParallelStrategy(split="auto", check_first_step=True)
    job = trainer(4, strategy, max_epochs=3)
    job.fit(Classifier(), loader(), loader())
    assert job.strategy.first_step.is_same and ways["alone"]


class Pulls(Classifier):
    def training_step(self, dataloader_iter: Any) -> Any:
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


@pytest.mark.usefixtures("switching")
@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter`")
@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument")
def test_steps_that_take_an_iterator_are_for_all(ways: Ways) -> None:
    torch.set_default_dtype(torch.float64)  # Lightning converts no batches of such steps
    result = run(Pulls, 4, strategy={"split": "auto"})
    assert ways["alone"]  # in validation
    assert all(usage.samples for usage in result.trainer.strategy.usage[:3])
    assert_same(result, run(Pulls, 1), **EXACT)


class Fails(Deep):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 30:
            raise RuntimeError("in the middle")
        return super().training_step(batch, batch_idx)


def test_an_error_of_the_root_alone_is_the_steps_own_and_the_next_fit_is_right(
    monkeypatch: pytest.MonkeyPatch, ways: Ways
) -> None:
    monkeypatch.setattr(Choice, "begin", lambda self, can, _: (0 if can(0) else self._most, True))
    module, one = Fails(), Fails()
    one.load_state_dict(start := copy.deepcopy(module.state_dict()))
    with pytest.raises(RuntimeError, match=r"^in the middle$"):
        fit(module)
    assert ways["alone"] > 20
    module.load_state_dict(start)
    fit(module, steps=29)
    fit(one, k=1, steps=29)
    assert_equal_trees(module.state_dict(), one.state_dict(), "weights", atol=1e-5, rtol=0.0)


# What was learnt


def test_what_was_learnt_goes_into_the_checkpoint(tmp_path: Path, ways: Ways) -> None:
    job = fit(Deep(), steps=81)
    job.save_checkpoint(tmp_path / "last.ckpt")
    learnt = dict(job.strategy.split_policy.state_dict()["choices"]["training_step"])[25]
    sizes = Sizes()
    options: dict[str, Any] = {"max_steps": 87, "max_epochs": -1, "callbacks": [sizes]}
    resumed = trainer(4, DataParallelStrategy(split="auto"), **options)
    resumed.fit(Deep(), loader(), loader(8), ckpt_path=tmp_path / "last.ckpt")
    # The root alone, nearly always: not on a machine that was too busy to tell. Of several that
    # may work, those that were slow by far may have got nothing.
    others = {sum(map(bool, own[1:])) for own in sizes.seen if sum(own) == 25}
    assert max(others) <= learnt["best"] and (min(others) == 0) is (learnt["best"] == 0)


SPLITS = ["even", "auto", "adaptive"]


@pytest.mark.parametrize(("before", "after"), list(itertools.permutations(SPLITS, 2)))
def test_a_checkpoint_of_another_split_or_number_of_devices_begins_anew(
    before: str, after: str, tmp_path: Path
) -> None:
    job = trainer(3, DataParallelStrategy(split=before), max_epochs=2)
    job.fit(Classifier(), loader(), loader())
    job.save_checkpoint(tmp_path / "last.ckpt")
    for k, split in ((3, after), (2, before)):
        resumed = trainer(k, DataParallelStrategy(split=split), max_epochs=3)
        resumed.fit(Classifier(), loader(), loader(), ckpt_path=tmp_path / "last.ckpt")
        assert resumed.global_step == 9


def test_what_other_devices_have_taught_is_not_known() -> None:
    three = Auto(3)
    for _ in range(40):
        piece = three.begin("training_step", 9)
        sizes = three(9)
        three.learn(StepUsage(sizes, (1.0, 2.0, 3.0), 3.0, (0,) * 3, (0,) * 3))
        three.end(piece, 1.0 if piece.way else 9.0, sizes)
    learnt = three.state_dict()
    assert learnt["choices"] and learnt != Auto(3).state_dict()
    for k in (2, 3, 4):
        split = Auto(k)
        split.load_state_dict(learnt)
        known = split.state_dict()
        assert known == (learnt if k == 3 else Auto(k).state_dict())


class WritesLate(Classifier):
    """After a step of the root alone it writes to frozen weights, so that no version counts it."""

    written_after = 45  # of TURNS the fifth is of the root, and the sixth of all

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * self.scale

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == self.written_after:
            self.scale.data.fill_(0.5)


late_look = pytest.mark.xfail(
    raises=UserWarning, reason="who looks for silent writes does not know that all was copied"
)


@places.on_separate
@pytest.mark.parametrize("epochs", [24, pytest.param(36, marks=late_look)])
@pytest.mark.usefixtures("switching")
def test_what_is_written_while_the_root_is_alone_reaches_all(
    on: str, epochs: int, ways: Ways
) -> None:
    options: dict[str, Any] = {"max_epochs": epochs, "data": lambda: loader(50), **DOUBLE}
    result = run(WritesLate, 4, strategy={"split": "auto"}, **options)
    assert ways["alone"] and ways["several"]
    assert_same(result, run(WritesLate, 1, **options), **EXACT)


def test_the_drop_in_refuses_it() -> None:
    with pytest.raises(ValueError, match=r"^split: expected another one than 'auto'"):
        DataParallel(nn.Linear(2, 2), ["cpu", "cpu"], split="auto")


# Memory


class Wide(Quiet):
    """Takes memory in proportion to the samples, and much Python."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 512), nn.Tanh(), nn.Linear(512, 3))


WEIGHTS = 4 * (10 * 512 + 512 + 3 * 512 + 3)
SAMPLE = 4 * 512 * 3  # of a forward and a backward, at least


@pytest.mark.sim_only("Of a GPU's memory no limit can be set to the byte.")
@pytest.mark.parametrize("samples", [100, 400])
def test_a_batch_that_does_not_fit_the_root_never_goes_there(
    samples: int, room: Any, ways: Ways, caplog: Any
) -> None:
    room(0, 8 * WEIGHTS + samples * SAMPLE)
    strategy = DataParallelStrategy(split="auto", executor="inorder")
    sizes = Sizes()
    job = trainer(4, strategy, max_steps=30, max_epochs=-1, callbacks=[sizes])
    job.fit(Wide(), loader(256 * 4, 256), loader(8))
    assert not [r for r in caplog.records if "out of memory" in r.getMessage()]
    went_alone = (256, 0, 0, 0) in sizes.seen
    assert went_alone == (samples == 400), sizes.seen[-1]


# What it costs


@pytest.mark.slow
def test_a_step_of_the_root_alone_enters_few_functions() -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        options = {"split": "auto", "executor": "inorder"}
        entered = process.submit(plain_step, **options).result(timeout=300)
        one = process.submit(plain_step, devices=1).result(timeout=300)
    assert entered.frames <= 40, entered.calls.most_common(60)
    assert one.frames <= 12, one.calls.most_common(20)
    assert not [file for file, _ in entered.calls if "engine" in file or "journal" in file]


class Times(Callback):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.seconds.append(time.thread_time())


@pytest.mark.slow
def test_sixty_narrow_layers_take_about_as_long_as_on_one_device() -> None:
    """Of the thread's own time, which others on the machine do not change much."""

    def seconds(devices: int, strategy: Any) -> float:
        times = Times()
        job = trainer(devices, strategy, max_epochs=1, callbacks=[times], accelerator="cpu")
        module = Deep()
        module.net = nn.Sequential(*(nn.Linear(10, 10) for _ in range(60)), nn.Linear(10, 3))
        job.fit(module, loader(32 * 200, 32), loader(8))
        steps = [b - a for a, b in itertools.pairwise(times.seconds[60:])]
        return statistics.median(steps)

    pairs = [(seconds(4, DataParallelStrategy(split="auto")), seconds(1, "auto")) for _ in "abcde"]
    assert min(auto / one for auto, one in pairs) < 1.1, pairs
