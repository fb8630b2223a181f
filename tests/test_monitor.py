"""DataParallelMonitor: what each device did, exactly, in loggers and in a picture; and no trace."""

import copy
import pickle
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import matplotlib
import matplotlib.pyplot
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.loggers import CSVLogger, Logger
from oracle import BATCH, EPOCHS, SAMPLES, Classifier, assert_same, devices_of, loader, run, trainer
from places import on_separate
from programs import ROOT

from lightning_dp import DataParallelMonitor, DataParallelStrategy
from lightning_dp.monitor.history import History, Period
from lightning_dp.monitor.picture import draw
from lightning_dp.parallel import meter
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
    monkeypatch.setattr(meter._Step, "is_over", lambda step: answer[0])
    monkeypatch.setattr(meter._Step, "wait", lambda step: answer.__setitem__(0, True))
    yield answer


def test_steps_that_end_together_are_each_taken_once(ready: list[bool]) -> None:
    devices = [torch.device("cpu")] * 2
    steps = meter.StepMeter(devices, meter.PeakMemory(devices))
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
    steps = meter.StepMeter(devices, meter.PeakMemory(devices))
    for _ in range(meter._UNTAKEN + 10):
        steps.start((1, 1))
        steps.stop()
        steps.latest()
    assert len(steps.take()) == meter._UNTAKEN


# --- loggers --------------------------------------------------------------------------------------


def test_every_step_is_logged_under_the_names_of_the_devices(on: str) -> None:
    rows = Rows()
    watched(devices=2, logger=rows)
    own = [""] * 2 if oracle.are_separate() else ["/replica_0", "/replica_1"]
    names = [f"{device}{part}" for device, part in zip(devices_of(2), own, strict=True)]
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
        f"dp-{one}-replica_0-samples",
        f"dp-{one}-replica_1-samples",
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
    column = header.split(",").index("dp/cpu/replica_1/samples")
    cells = [row.split(",")[column] for row in rows]
    assert sum(float(cell) for cell in cells if cell) == monitor.total.samples[1]


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
    "one has nothing": (["sim:0", "sim:1", "sim:2"], (5, 5, 0), 2**20, 2**36),
    "nobody has anything": (["cpu", "cpu"], (0, 0), 0, 0),
    "eight": ([f"cuda:{i}" for i in range(8)], (4,) * 8, 2**34, 2**35),
    "twenty": ([f"cuda:{i}" for i in range(20)], (4,) + (0,) * 19, 2**34, 2**35),
    "one does not count memory": (["cuda:0", "cpu"], (4, 1), 2**30, 0),
}


@pytest.mark.parametrize("name", PICTURES)
def test_picture_is_a_png_of_reasonable_size(name: str, tmp_path: Path) -> None:
    devices, sizes, peak, capacity = PICTURES[name]
    period = period_of(sizes, peak)
    path = tmp_path / "new" / "devices.png"
    assert draw(path, devices, period + period, [period] * 2, [capacity] * len(sizes)) == path
    width, height = size_of(path)
    assert 1000 <= width <= 1400 and 400 <= height <= 1200
    assert 10_000 < path.stat().st_size < 300_000


def test_picture_of_a_real_training(on: str, tmp_path: Path) -> None:
    path = watched().plot(str(tmp_path / "devices.png"))
    assert size_of(path)[0] > 1000


def test_drawing_touches_nothing_of_the_programs_own(tmp_path: Path) -> None:
    figures, style = matplotlib.pyplot.get_fignums(), dict(matplotlib.rcParams)
    period = period_of((3, 1), 2**20)
    arguments = (["sim:0", "sim:1"], period, [period], [0, 0])
    plain = draw(tmp_path / "plain.png", *arguments).read_bytes()
    assert (matplotlib.pyplot.get_fignums(), dict(matplotlib.rcParams)) == (figures, style)
    with matplotlib.style.context("dark_background"):
        assert draw(tmp_path / "dark.png", *arguments).read_bytes() == plain
    thread = threading.Thread(target=draw, args=(tmp_path / "thread.png", *arguments))
    thread.start()
    thread.join()
    assert (tmp_path / "thread.png").read_bytes() == plain


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
