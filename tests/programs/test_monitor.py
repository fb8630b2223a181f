"""DataParallelMonitor: what each device did, exactly, in loggers and in a picture; and no trace."""

import base64
import copy
import itertools
import pickle
import re
import struct
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import matplotlib
import matplotlib.figure
import matplotlib.pyplot
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.loggers import CSVLogger, Logger
from matplotlib.text import Text
from oracle import (
    BATCH,
    EPOCHS,
    SAMPLES,
    Classifier,
    assert_same,
    devices_of,
    loader,
    names_of,
    run,
    trainer,
)
from places import on_separate
from program_runs import ROOT
from torch.utils.checkpoint import checkpoint

from lightning_dp import DataParallelMonitor, DataParallelStrategy
from lightning_dp.monitor.history import Fit, History, Period
from lightning_dp.monitor.picture import as_png, figure_of, save
from lightning_dp.parallel import usage
from lightning_dp.parallel.apply import EXECUTORS, Executor
from lightning_dp.parallel.apply.executor import Trial
from lightning_dp.parallel.devices import replica_names
from lightning_dp.parallel.split.usage import StepUsage

STEPS = EPOCHS * 3
PNG = b"\x89PNG\r\n\x1a\n"


class Rows(Logger):
    """Keeps what is logged under `dp/`: the step and the values of every row."""

    def __init__(self, separator: str = "/") -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []
        self.steps_of_lightning: list[int | None] = []
        self._separator = separator

    name = "rows"
    version = 0

    @property
    def group_separator(self) -> str:
        return self._separator

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if all(key.startswith("dp") for key in metrics):
            self.rows.append((step, metrics))
        elif "train/loss_step" in metrics:
            self.steps_of_lightning.append(step)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class Forward(Classifier):
    """Calls itself twice in a step."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.cross_entropy(self(x) + self(2 * x), y)


class Stop(Exception):
    pass


class Fails(Classifier):
    """Fails in its fifth step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 4:
            raise Stop
        return super().training_step(batch, batch_idx)


def watched(
    devices: int = 4, module: L.LightningModule | None = None, **kwargs: Any
) -> DataParallelMonitor:
    """The monitor of a fit."""
    monitor = DataParallelMonitor()
    job = trainer(devices, kwargs.pop("strategy", "dp_custom"), callbacks=[monitor], **kwargs)
    job.fit(module or Classifier(), loader(), loader())
    return monitor


def size_of(png: Path) -> tuple[int, int]:
    content = png.read_bytes()
    assert content.startswith(PNG) and content[12:16] == b"IHDR" and b"IEND" in content[-12:]
    width, height = struct.unpack(">II", content[16:24])
    return int(width), int(height)


# --- what is measured -----------------------------------------------------------------------------


def test_samples_of_the_devices_sum_to_those_of_training(on: str) -> None:
    monitor = watched()
    total = monitor.total
    assert total.steps == STEPS
    assert sum(total.samples) == EPOCHS * SAMPLES
    # Of a batch of 3, the last device has nothing.
    assert total.samples == (EPOCHS * (7 + 7 + 1),) + (EPOCHS * (6 + 6 + 1),) * 2 + (EPOCHS * 12,)
    assert sum(monitor.periods, Period()) == total
    assert [sum(period.samples) for period in monitor.periods] == [BATCH, BATCH, 3] * EPOCHS
    assert all(seconds > 0 for seconds in total.busy_seconds)
    assert all(seconds >= 0 for seconds in total.waiting_seconds)
    assert all(total.peak_bytes) == (on != "cpu"), "the CPU does not count its memory"


def test_totals_are_those_of_the_strategy(on: str) -> None:
    monitor = DataParallelMonitor()
    job = trainer(3, DataParallelStrategy(weights=[0, 1, 2]), callbacks=[monitor])
    job.fit(Classifier(), loader(), loader())
    assert monitor.total.samples == tuple(part.samples for part in job.strategy.usage)
    assert monitor.total.samples[0] == 0
    assert monitor.total.busy_seconds[0] == 0


@pytest.mark.parametrize("mode", ["step", "forward"])
def test_it_leaves_no_trace_in_what_is_trained(on: str, mode: str) -> None:
    options = {"mode": mode, "executor": "inorder"}
    result = run(Forward, 4, strategy=options, callbacks=[DataParallelMonitor()])
    # Autograd's threads, one per simulated device, add gradients in any order.
    rounding = 0.0 if on == "cpu" else 1e-6
    assert_same(result, run(Forward, 4, strategy=options), atol=rounding)
    assert_same(result, run(Forward, 1), atol=1e-6, rtol=1e-5)


def test_forward_mode_counts_spread_calls(on: str) -> None:
    monitor = watched(module=Forward(), strategy=DataParallelStrategy(mode="forward"))
    assert monitor.total.steps == 2 * STEPS, "the module calls itself twice in a step"
    assert sum(monitor.total.samples) == 2 * EPOCHS * SAMPLES


def test_each_evaluation_of_a_closure_counts(on: str) -> None:
    class Closure(Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), max_iter=2, max_eval=2)

    monitor = DataParallelMonitor()
    job = trainer(2, callbacks=[monitor], max_epochs=1)
    job.fit(Closure(), loader(), loader())
    assert monitor.total.samples == tuple(part.samples for part in job.strategy.usage)
    assert monitor.total.steps > 3


@pytest.fixture
def slow_device(on: str) -> Iterator[None]:
    """Four simulated devices, of which the last has a quarter of the speed."""
    for device, factor in enumerate([1, 1, 1, 4]):
        torch.sim.set_speed(device, seconds_per_element=1e-7 * factor)
    yield
    for device in range(4):
        torch.sim.set_speed(device)


@pytest.mark.sim_only("GPUs cannot be given a speed.")
def test_waiting_is_the_time_in_which_others_work(slow_device: None) -> None:
    monitor = DataParallelMonitor()
    job = trainer(4, callbacks=[monitor], max_epochs=1)
    job.fit(Classifier(), loader(80, 40), loader())
    total = monitor.total
    assert total.waiting_seconds[3] == 0
    # Of so little work, additions of gradients are some; the last device has none of them.
    assert total.waiting_seconds[1] == pytest.approx(0.75 * total.busy_seconds[3], rel=0.1)
    assert total.imbalance(total.busy_seconds) == pytest.approx(16 / 7, rel=0.12)
    assert total.waiting_share == pytest.approx(9 / 16, rel=0.12)


@pytest.mark.on("cpu", "sim")  # GPUs are measured
def test_what_is_not_measured_is_not_taken_for_waiting(on: str) -> None:
    # Simulated devices without a speed have no clock, and their backward runs in no worker.
    monitor = watched(devices=2, strategy=DataParallelStrategy(executor="inorder"))
    longest = [max(period.busy_seconds) for period in monitor.periods]
    ends = [period.busy_seconds[0] + period.waiting_seconds[0] for period in monitor.periods]
    assert (ends == pytest.approx(longest)) == (on == "sim")


# --- GPUs are asked, never waited for, until training ends ----------------------------------------


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Makes steps last until it says so."""
    answer = [False]
    monkeypatch.setattr(usage._Step, "is_over", lambda step: answer[0])
    monkeypatch.setattr(usage._Step, "wait", lambda step: answer.__setitem__(0, True))
    yield answer


def test_steps_that_end_together_are_each_taken_once(ready: list[bool]) -> None:
    devices = [torch.device("cpu")] * 2
    steps = usage.UsageMeter(devices)
    steps.watch()
    for sizes in [(1, 2), (3, 4), (5, 6)]:
        steps.start(sizes)
        steps.stop()
        assert steps.latest() is None and steps.take() == []
    ready[0] = True
    latest = steps.latest()
    assert latest is not None and latest.sizes == (5, 6)
    assert [step.sizes for step in steps.take()] == [(1, 2), (3, 4), (5, 6)]
    assert steps.take() == [] and steps.latest() is latest


def test_what_devices_are_still_at_when_training_ends_is_waited_for(ready: list[bool]) -> None:
    rows = Rows()
    monitor = watched(logger=rows)
    assert sum(monitor.total.samples) == EPOCHS * SAMPLES
    assert rows.rows == [], "nothing was known in time"


def test_what_nobody_takes_does_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [torch.device("cpu")] * 2
    steps = usage.UsageMeter(devices)
    steps.watch()
    for _ in range(usage._UNTAKEN + 10):
        steps.start((1, 1))
        steps.stop()
        steps.latest()
    assert len(steps.take()) == usage._UNTAKEN


# --- loggers --------------------------------------------------------------------------------------


def test_every_step_is_logged_under_the_names_of_the_devices(on: str) -> None:
    rows = Rows()
    watched(devices=2, logger=rows)
    names = names_of(2)
    values = ["samples", "busy_seconds", "waiting_seconds", *(["peak_MiB"] * (on != "cpu"))]
    keys = {f"dp/{name}/{value}" for name in names for value in values}
    assert [step for step, _ in rows.rows] == list(range(STEPS)) == rows.steps_of_lightning
    assert all(set(row) == keys for _, row in rows.rows)
    of_root = [row[f"dp/{names[0]}/samples"] for _, row in rows.rows]
    assert of_root == [13, 13, 2] * EPOCHS


@on_separate
def test_mixed_devices_have_names_of_their_own(on: str) -> None:
    one, other = devices_of(2)
    rows = Rows(separator="-")
    strategy = DataParallelStrategy(devices=[one, one, other])
    job = L.Trainer(
        strategy=strategy,
        accelerator=oracle.accelerator(),
        logger=rows,
        callbacks=[DataParallelMonitor()],
        max_steps=1,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    job.fit(Classifier(), loader(), loader())
    samples = {key for key in rows.rows[0][1] if key.endswith("samples")}
    assert samples == {
        f"dp-{one}:0-samples",
        f"dp-{one}:1-samples",
        f"dp-{other}-samples",
    }


def test_rows_are_means_since_the_row_before(on: str) -> None:
    rows = Rows()
    monitor = watched(devices=2, logger=rows, log_every_n_steps=4, max_epochs=3)
    assert [step for step, _ in rows.rows] == [3, 7] == rows.steps_of_lightning
    first = next(iter(rows.rows[0][1]))
    assert [row[first] for _, row in rows.rows] == [(13 + 13 + 2 + 13) / 4, (13 + 2 + 13 + 13) / 4]
    assert monitor.total.steps == 3 * 3


def test_gradient_accumulation_logs_a_row_per_optimizer_step(on: str) -> None:
    rows = Rows()
    monitor = watched(devices=2, logger=rows, accumulate_grad_batches=2)
    assert [step for step, _ in rows.rows] == rows.steps_of_lightning == list(range(2 * EPOCHS))
    assert sum(monitor.total.samples) == EPOCHS * SAMPLES


def test_csv_has_a_column_for_each(tmp_path: Path) -> None:
    monitor = watched(devices=2, logger=CSVLogger(tmp_path, name="", version=""))
    header, *rows = (tmp_path / "metrics.csv").read_text().splitlines()
    column = header.split(",").index("dp/cpu:1/samples")
    cells = [row.split(",")[column] for row in rows]
    assert sum(float(cell) for cell in cells if cell) == monitor.total.samples[1]


# --- one name per replica -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["step", "forward"])
@pytest.mark.parametrize("executor", ["threads", "inorder"])
def test_a_replica_has_the_same_name_wherever_it_is_shown(
    on: str, mode: str, executor: str, tmp_path: Path
) -> None:
    class FailsAtLast(Forward):
        def forward(self, x: Any) -> Any:
            if self.training and self.trainer.global_step == 2 and len(x) == 1:
                raise Stop("at last")
            return super().forward(x)

    rows, monitor = Rows(), DataParallelMonitor()
    options: dict[str, Any] = {"mode": mode, "executor": executor}
    strategy = DataParallelStrategy(**options)
    job = trainer(3, strategy, callbacks=[monitor], logger=rows)
    with pytest.raises(Stop) as caught:
        job.fit(FailsAtLast(), loader(), loader())
    names = names_of(3)
    assert len(set(names)) == 3
    assert list(monitor.replicas) == list(job.strategy.replica_names) == names
    assert [usage.name for usage in job.strategy.usage] == names
    assert all(name in text for name, text in zip(names, map(str, job.strategy.usage), strict=True))
    assert {key.split("/")[1] for _, row in rows.rows for key in row} == set(names)
    assert [row.device for row in monitor.summary()] == names
    assert [line.split()[0] for line in str(monitor).splitlines()[1:4]] == names
    told = str(getattr(caught.value, "__notes__", caught.value.args))
    assert f"in replica 0 on {names[0]}, " in told
    assert all(name in repr(job.strategy) for name in names)
    drawn = monitor.plot(tmp_path / "devices.svg").read_text()  # texts are comments there
    assert all(f" {name} -->" in drawn for name in names)


# --- taking turns ---------------------------------------------------------------------------------


WHY = {
    "told to": ({"executor": "inorder"}, {}, r'executor="inorder"'),
    "deterministic": ({}, {"deterministic": True}, r"where algorithms are deterministic"),
}


@pytest.mark.on("cpu")
@pytest.mark.parametrize("mode", ["step", "forward"])
@pytest.mark.parametrize("why", WHY)
def test_it_says_that_replicas_took_turns(why: str, mode: str) -> None:
    own, options, expected = WHY[why]
    strategy = DataParallelStrategy(**{"mode": mode, **own})
    monitor = watched(devices=2, module=Forward(), strategy=strategy, **options)
    note = str(monitor.note)
    assert re.match(rf"The replicas took turns in all steps \(.*{expected}\): ", note), note
    together, alone = map(float, re.findall(r"(\d+\.\d) ms", note))
    assert 0 < alone <= together
    assert str(monitor).splitlines()[-1] == note
    assert note.split("(")[0] in monitor._repr_mimebundle_()["text/html"]


@pytest.mark.parametrize("executor", ["threads", "inorder"])
def test_replicas_at_work_together_take_no_turns(on: str, executor: str) -> None:
    monitor = watched(devices=2, strategy=DataParallelStrategy(executor=executor))
    # Devices that compute by themselves only get their work in turns.
    assert (monitor.note is None) == (executor == "threads" or on != "cpu")


@pytest.mark.on("cpu")
@pytest.mark.parametrize("faster", ["threads", "turns"])
def test_the_choice_is_told_with_what_it_goes_by(
    faster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ways that take so long, whatever the machine is at.
    seconds = {True: 0.002, False: 0.004 if faster == "threads" else 0.001}
    monkeypatch.setattr(Trial, "_read", lambda trial: trial.medians.update(seconds))
    monitor = watched(devices=2, max_epochs=20)
    if faster == "threads":
        assert monitor.note is None
        return
    measured = 'executor="auto" measured: in turns they take 50% of the time in threads'
    note = str(monitor.note)
    assert measured in note and f"of {monitor.total.steps} steps" in note


@pytest.mark.on("cpu")
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_limit_of_norms_is_named_as_the_reason(executor: str) -> None:
    class Words(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.words = torch.nn.Embedding(4, 3, max_norm=1.0)

    note = watched(module=Words(), strategy=DataParallelStrategy(executor=executor)).note
    told_to = "executor=" if executor == "inorder" else "two threads would apply the max_norm of"
    assert f"({told_to}" in str(note)


@pytest.mark.on("cpu")
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_checkpoint_around_the_replicas_is_named_as_the_reason(executor: str) -> None:
    class Checkpointed(Forward):
        def loss(self, batch: Any) -> torch.Tensor:
            x, y = batch
            return torch.nn.functional.cross_entropy(checkpoint(self, x, use_reentrant=False), y)

    strategy = DataParallelStrategy(mode="forward", executor=executor)
    told_to = "executor=" if executor == "inorder" else "an activation checkpoint"
    assert f"({told_to}" in str(watched(module=Checkpointed(), strategy=strategy).note)


def test_of_short_fits_auto_says_that_it_was_measuring() -> None:
    executor = Executor([torch.device("cpu")] * 2)
    assert not executor.choose("step", 2)
    assert "the first call shows" in executor.why_in_order("step")
    assert executor.choose("step", 2)
    assert "still measuring" in executor.why_in_order("step")
    executor.choose("step", 2, compiles=True)
    assert executor.why_in_order("step").startswith("compiled modules")


def test_one_replica_alone_takes_no_turns() -> None:
    strategy = DataParallelStrategy(weights=[0, 1], executor="inorder")
    assert watched(devices=2, strategy=strategy).note is None


# --- notebooks ------------------------------------------------------------------------------------


def test_rows_say_what_each_device_did(on: str) -> None:
    monitor = watched(devices=2, strategy=DataParallelStrategy(weights=[3, 1]))
    rows, total = monitor.summary(), monitor.total
    assert tuple(row.samples for row in rows) == total.samples
    assert sum(row.share for row in rows) == pytest.approx(1) and rows[0].share > 0.7
    assert tuple(row.peak_bytes for row in rows) == total.peak_bytes
    for row in rows:
        assert row._asdict()["device"] == row.device
        together = row.busy_seconds + row.waiting_seconds
        assert row.busy_share * together == pytest.approx(row.busy_seconds)
    assert ("peak memory" in str(monitor)) == (on != "cpu")


def test_a_notebook_shows_picture_and_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = watched(devices=2)
    shown = monitor._repr_mimebundle_(include=None, exclude=None)
    assert shown["text/plain"] == str(monitor)
    picture = re.search(r'src="data:image/png;base64,([^"]+)"', shown["text/html"])
    assert picture is not None and base64.b64decode(picture[1]).startswith(PNG)
    assert shown["text/html"].count("<tr>") == 3 and "cpu:1" in shown["text/html"]
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    shown = monitor._repr_mimebundle_()
    assert "pip install matplotlib" in shown["text/html"] and "<tr>" in shown["text/html"]


def test_a_monitor_without_a_fit_shows_itself() -> None:
    monitor = DataParallelMonitor()
    assert monitor.summary() == [] and monitor.note is None
    assert monitor._repr_mimebundle_() == {"text/plain": str(monitor)}
    assert str(monitor) == "DataParallelMonitor: no training step on several devices was measured"
    for draws in (monitor.figure, monitor.plot):
        with pytest.raises(ValueError, match=r"plot: expected .* got none\. "):
            draws()


def test_a_figure_is_one_of_matplotlib_and_shows_itself(tmp_path: Path) -> None:
    monitor = watched(devices=2)
    for figure in (monitor.figure(), monitor.plot()):
        assert isinstance(figure, matplotlib.figure.Figure)
        assert figure._repr_png_() == monitor.figure()._repr_png_()
        assert pickle.loads(pickle.dumps(figure)).axes
    assert matplotlib.pyplot.get_fignums() == []


@pytest.mark.parametrize(
    ("suffix", "begin"), [("png", PNG), ("PNG", PNG), ("svg", b"<?xml"), ("pdf", b"%PDF")]
)
def test_the_suffix_says_what_is_written(suffix: str, begin: bytes, tmp_path: Path) -> None:
    monitor = watched(devices=2)
    path = tmp_path / "new" / f"devices.{suffix}"
    assert monitor.plot(path) == path
    assert path.read_bytes().startswith(begin)


@pytest.mark.parametrize("name", ["devices", "devices.jpg", "devices.png.gz", ".png", "a.svgz"])
def test_other_suffixes_are_refused_before_anything_is_drawn(name: str, tmp_path: Path) -> None:
    monitor = watched(devices=2)
    monitor.figure = None  # type: ignore[method-assign,assignment]  # nobody draws
    with pytest.raises(ValueError, match=r"^plot: expected .*\.png, \.svg, \.pdf, got '.*\.png\.$"):
        monitor.plot(tmp_path / "new" / name)
    assert not list(tmp_path.iterdir())


# --- where it is to keep quiet, and what else happens to a callback -------------------------------


@pytest.mark.parametrize("strategy", ["dp_custom", "auto"])
def test_one_device_is_not_measured(strategy: str, tmp_path: Path) -> None:
    rows = Rows()
    monitor = watched(devices=1, strategy=strategy, logger=rows)
    assert not rows.rows and monitor.devices == () and monitor.total == Period()
    with pytest.raises(ValueError, match=r"plot: expected .* got none\. "):
        monitor.plot(tmp_path / "devices.png")
    assert not list(tmp_path.iterdir())


def test_each_fit_begins_anew(on: str) -> None:
    monitor = DataParallelMonitor()
    job = trainer(4, callbacks=[monitor], max_epochs=1)
    job.fit(Classifier(), loader(), loader())
    job.fit_loop.max_epochs = 3
    job.fit(Classifier(), loader(), loader())
    assert sum(monitor.total.samples) == 2 * SAMPLES
    job.validate(Classifier(), loader(), verbose=False)
    assert sum(monitor.total.samples) == 2 * SAMPLES, "a validation is no training"
    trainer(1, "auto", callbacks=[monitor]).fit(Classifier(), loader(), loader())
    assert monitor.total == Period() and monitor.periods == []


def test_a_resumed_fit_counts_its_own_steps(on: str, tmp_path: Path) -> None:
    job = trainer(2, callbacks=[DataParallelMonitor()], max_epochs=1)
    job.fit(Classifier(), loader(), loader())
    job.save_checkpoint(tmp_path / "last.ckpt")
    monitor, rows = DataParallelMonitor(), Rows()
    resumed = trainer(2, callbacks=[monitor], logger=rows)
    resumed.fit(Classifier(), loader(), loader(), ckpt_path=tmp_path / "last.ckpt")
    assert sum(monitor.total.samples) == (EPOCHS - 1) * SAMPLES
    assert [step for step, _ in rows.rows] == list(range(3, STEPS))


def test_an_exception_leaves_the_steps_before_it(on: str, tmp_path: Path) -> None:
    monitor = DataParallelMonitor()
    job = trainer(2, callbacks=[monitor])
    with pytest.raises(Stop):
        job.fit(Fails(), loader(), loader())
    assert monitor.total.steps == 4
    assert sum(monitor.total.samples) == SAMPLES + BATCH
    monitor.plot(tmp_path / "devices.png")
    again = trainer(2, callbacks=[monitor])
    again.fit(Classifier(), loader(), loader())
    assert sum(monitor.total.samples) == EPOCHS * SAMPLES


def test_fast_dev_run_is_one_step(on: str, tmp_path: Path) -> None:
    monitor = watched(fast_dev_run=True)
    assert monitor.total.steps == 1
    assert monitor.plot(tmp_path / "devices.png").is_file()


def test_it_can_be_copied_and_pickled(tmp_path: Path) -> None:
    class Copies(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            copies.append(copy.deepcopy(trainer.callbacks[0]))

    copies: list[Any] = []
    monitor = DataParallelMonitor()
    trainer(2, callbacks=[monitor, Copies()]).fit(Classifier(), loader(), loader())
    assert [copied.total.steps for copied in copies] == list(range(1, STEPS + 1))
    again = pickle.loads(pickle.dumps(monitor))
    assert again.total == monitor.total and again.periods == monitor.periods
    assert again.plot(tmp_path / "devices.png").is_file()


@pytest.mark.parametrize("max_points", [1, 0, -3, 2.5, True, None])
def test_impossible_points_are_refused(max_points: Any) -> None:
    with pytest.raises(ValueError, match=r"max_points: expected .*, got "):
        DataParallelMonitor(max_points=max_points)


# --- long trainings -------------------------------------------------------------------------------


@given(
    limit=st.integers(2, 9),
    sizes=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=200),
)
def test_thinning_keeps_totals_and_peaks(limit: int, sizes: list[tuple[int, int]]) -> None:
    history, total = History(limit), Period()
    for i, of_step in enumerate(sizes):
        busy = (float(of_step[0]), float(of_step[1]))
        step = Period.of(StepUsage(of_step, busy, max(busy), peak_bytes=(i % 7, i)))
        history.add(step)
        total += step
    assert sum(history.periods, Period()) == total
    assert total.steps == len(sizes)
    spans = [period.steps for period in history.periods]
    assert len(spans) <= limit
    assert len(set(spans[:-1])) <= 1 and all(span <= spans[0] for span in spans[-1:])
    assert len(sizes) <= limit or len(spans) > limit // 2, "no coarser than it has to be"


def test_a_training_of_many_steps_is_a_few_points() -> None:
    history, step = History(512), Period.of(StepUsage((2, 1), (0.2, 0.1), 0.2))
    for _ in range(100_000):
        history.add(step)
    assert 256 <= len(history.periods) <= 512
    assert sum(history.periods, Period()).samples == (200_000, 100_000)


# --- the picture ----------------------------------------------------------------------------------


def period_of(sizes: tuple[int, ...], peak: int = 0) -> Period:
    busy = tuple(0.01 * size for size in sizes)
    return Period.of(StepUsage(sizes, busy, max(busy), (peak,) * len(sizes)))


PICTURES = {
    "two": (["cuda:0", "cuda:1"], (24, 8), 2**30, 2**33),
    "four replicas on the CPU": (["cpu"] * 4, (7, 6, 6, 6), 0, 0),
    "one has nothing": (["xpu:0", "xpu:1", "xpu:2"], (5, 5, 0), 2**20, 2**36),
    "nobody has anything": (["cpu", "cpu"], (0, 0), 0, 0),
    "eight": ([f"cuda:{i}" for i in range(8)], (4,) * 8, 2**34, 2**35),
    "twenty": ([f"cuda:{i}" for i in range(20)], (4,) + (0,) * 19, 2**34, 2**35),
    "one does not count memory": (["cuda:0", "cpu"], (4, 1), 2**30, 0),
}


def fit_of(devices: list[str], period: Period, capacity: int = 0, note: str | None = None) -> Fit:
    """A fit of two such periods."""
    names = replica_names(list(map(torch.device, devices)))
    return Fit(names, devices, period + period, [period] * 2, [capacity] * len(devices), note)


@pytest.mark.parametrize("name", PICTURES)
def test_picture_is_a_png_of_reasonable_size(name: str, tmp_path: Path) -> None:
    devices, sizes, peak, capacity = PICTURES[name]
    path = tmp_path / "devices.png"
    save(figure_of(fit_of(devices, period_of(sizes, peak), capacity)), path, ".png")
    width, height = size_of(path)
    assert 1000 <= width <= 1400 and 400 <= height <= 1200
    assert 10_000 < path.stat().st_size < 300_000


@pytest.mark.slow
@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize("steps", [1, 60, 30_000])
def test_the_texts_of_a_picture_stay_apart_and_inside(steps: int, name: str) -> None:
    devices, sizes, peak, capacity = PICTURES[name]
    note = "The replicas took turns in all steps: while one works, the others wait. " * 3
    half = fit_of(devices, period_of(sizes, peak), capacity, note)
    long = [replace(period, steps=steps) for period in half.periods]
    figure = figure_of(replace(half, total=sum(long, Period()), periods=long))
    as_png(figure)  # places everything
    drawn = figure.findobj(lambda one: isinstance(one, Text) and one.get_text().strip())
    boxes = [
        (text.get_text(), text.get_window_extent())
        for text in drawn
        if text.get_visible() and not is_beyond_its_axis(text, figure)
    ]
    assert len(boxes) > 10
    for text, box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0, text
        assert box.x1 <= figure.bbox.width and box.y1 <= figure.bbox.height, text
    for (text, box), (other, another) in itertools.combinations(boxes, 2):
        assert not box.overlaps(another), f"{text!r} is over {other!r}"


def is_beyond_its_axis(text: Text, figure: matplotlib.figure.Figure) -> bool:
    """Whether it is of a tick that is not drawn."""
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in axis.get_major_ticks():
                if text in (tick.label1, tick.label2):
                    return not low <= tick.get_loc() <= high
    return False


def test_picture_of_a_real_training(on: str, tmp_path: Path) -> None:
    path = watched().plot(str(tmp_path / "new" / "devices.png"))
    assert size_of(path)[0] > 1000


def test_drawing_touches_nothing_of_the_programs_own(tmp_path: Path) -> None:
    figures, style = matplotlib.pyplot.get_fignums(), dict(matplotlib.rcParams)
    fit = fit_of(["xpu:0", "xpu:1"], period_of((3, 1), 2**20), note="Something else.")
    plain = as_png(figure_of(fit))
    assert (matplotlib.pyplot.get_fignums(), dict(matplotlib.rcParams)) == (figures, style)
    with matplotlib.style.context("dark_background"):
        assert as_png(figure_of(fit)) == plain
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(as_png(figure_of(fit))))
    thread.start()
    thread.join()
    assert found == [plain]


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    monitor = watched(devices=2)
    with pytest.raises(ModuleNotFoundError, match="python -m pip install matplotlib"):
        monitor.plot(tmp_path / "devices.png")


def test_picture_in_the_readme_is_small() -> None:
    path = ROOT / "examples" / "devices.png"
    assert size_of(path)[0] > 1000
    assert path.stat().st_size < 100 * 2**10
