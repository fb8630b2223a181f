"""DataParallelMonitor: what each device did, exactly, in loggers and in a picture."""

import base64
import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import matplotlib
import matplotlib.figure
import matplotlib.pyplot
import pytest
import torch
from lightning.pytorch.loggers import Logger
from support.oracle import (
    BATCH,
    EPOCHS,
    QUIET,
    SAMPLES,
    Classifier,
    assert_same,
    loader,
    names_of,
    run,
    trainer,
)

from lightning_dp import DataParallelMonitor, DataParallelStrategy
from lightning_dp import monitor as monitors
from lightning_dp.monitor import Period

STEPS = EPOCHS * 3
PNG = b"\x89PNG\r\n\x1a\n"


class Rows(Logger):
    """Keeps what is logged under `dp/`: the step and the values of every row."""

    name, version = "rows", 0

    def __init__(self, separator: str = "/") -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []
        self.steps_of_lightning: list[int | None] = []
        self._separator = separator

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


def watched(
    devices: int = 2, module: L.LightningModule | None = None, **kwargs: Any
) -> DataParallelMonitor:
    """The monitor of a fit."""
    monitor = DataParallelMonitor()
    job = trainer(devices, kwargs.pop("strategy", "dp_custom"), callbacks=[monitor], **kwargs)
    job.fit(module or Classifier(), loader(), loader())
    if of_strategy := getattr(job.strategy, "usage", ()):
        assert monitor.total.samples in ((), tuple(part.samples for part in of_strategy))
    return monitor


def test_samples_and_time_of_the_devices_sum_to_those_of_training(on: str) -> None:
    monitor = watched(4)
    total, rows = monitor.total, monitor.summary()
    # Of a batch of 3, the last device has nothing.
    assert total.samples == (EPOCHS * (7 + 7 + 1),) + (EPOCHS * (6 + 6 + 1),) * 2 + (EPOCHS * 12,)
    assert sum(monitor.periods, Period()) == total and total.steps == STEPS
    assert [sum(period.samples) for period in monitor.periods] == [BATCH, BATCH, 3] * EPOCHS
    assert all(seconds > 0 for seconds in total.busy_seconds)
    assert all(seconds >= 0 for seconds in total.waiting_seconds)
    assert all(total.peak_bytes) == (on != "cpu"), "the CPU does not count its memory"
    assert ("peak memory" in str(monitor)) == (on != "cpu")
    assert tuple(row.samples for row in rows) == total.samples
    shown = [line.split()[0] for line in str(monitor).splitlines()[1:5]]
    assert shown == list(monitor.replicas) == [row.device for row in rows] == names_of(4)
    assert sum(row.share for row in rows) == pytest.approx(1)
    for row in rows:
        together = row.busy_seconds + row.waiting_seconds
        assert row.busy_share * together == pytest.approx(row.busy_seconds)


def test_a_monitor_changes_no_number_of_the_training() -> None:
    for mode in ("step", "forward"):
        options = {"mode": mode, "executor": "inorder"}
        result = run(Forward, 4, strategy=options, callbacks=[DataParallelMonitor()])
        assert_same(result, run(Forward, 4, strategy=options), atol=0.0)


def test_in_forward_mode_each_spread_call_is_a_step_and_an_idle_device_is_idle() -> None:
    total = watched(module=Forward(), strategy=DataParallelStrategy(mode="forward")).total
    assert (total.steps, sum(total.samples)) == (2 * STEPS, 2 * EPOCHS * SAMPLES)
    unequal = watched(3, strategy=DataParallelStrategy(weights=[0, 1, 2])).total
    assert unequal.samples[0] == 0 and unequal.busy_seconds[0] == 0


@pytest.fixture
def slow_device(on: str) -> Iterator[None]:
    """Four simulated devices, of which the last has a quarter of the speed."""
    for device, factor in enumerate([1, 1, 1, 4]):
        torch.sim.set_speed(device, seconds_per_element=1e-7 * factor)
    torch.sim.set_clock("virtual")
    yield
    torch.sim.set_clock("wall")
    for device in range(4):
        torch.sim.set_speed(device)


@pytest.mark.on("sim")  # GPUs cannot be given a speed.
def test_a_device_waits_while_others_work(slow_device: None) -> None:
    monitor = DataParallelMonitor()
    trainer(4, callbacks=[monitor], max_epochs=1).fit(Classifier(), loader(80, 40), loader())
    total = monitor.total
    assert total.waiting_seconds[3] == 0
    # Of so little work, additions of gradients are some; the last device has none of them.
    assert total.waiting_seconds[1] == pytest.approx(0.75 * total.busy_seconds[3], rel=0.1)
    assert total.imbalance(total.busy_seconds) == pytest.approx(16 / 7, rel=0.12)


LOGGING: dict[str, tuple[dict[str, Any], list[int], list[float]]] = {
    "every step": ({}, list(range(STEPS)), [13, 13, 2] * EPOCHS),
    "means since the row before": (
        {"log_every_n_steps": 4, "max_epochs": 3},
        [3, 7],
        [(13 + 13 + 2 + 13) / 4, (13 + 2 + 13 + 13) / 4],
    ),
    "accumulation": ({"accumulate_grad_batches": 2}, list(range(2 * EPOCHS)), [13, 2] * EPOCHS),
    "one step": ({"fast_dev_run": True, "log_every_n_steps": 50}, [], []),
}


@pytest.mark.parametrize("name", LOGGING)
def test_loggers_get_a_row_whenever_lightning_logs(name: str, on: str) -> None:
    options, steps, samples = LOGGING[name]
    rows = Rows(separator="-")
    monitor = watched(logger=rows, **options)
    assert [step for step, _ in rows.rows] == steps == rows.steps_of_lightning
    names = [name.replace(":", "_") for name in names_of(2)]
    values = ["samples", "busy_seconds", "waiting_seconds", *(["peak_MiB"] * (on != "cpu"))]
    keys = {f"dp-{name}-{value}" for name in names for value in values}
    assert all(set(row) == keys for _, row in rows.rows)
    assert [row[f"dp-{names[0]}-samples"] for _, row in rows.rows] == samples
    assert monitor.total.steps == (1 if name == "one step" else 3 * options.get("max_epochs", 2))


def test_a_monitor_shows_itself_and_draws_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = watched()
    shown = monitor._repr_mimebundle_(include=None, exclude=None)
    assert shown["text/plain"] == str(monitor)
    picture = re.search(r'src="data:image/png;base64,([^"]+)"', shown["text/html"])
    assert picture is not None and base64.b64decode(picture[1]).startswith(PNG)
    assert str(monitor) in shown["text/html"] and "cpu:1" in shown["text/html"]
    figure = monitor.plot()
    assert isinstance(figure, matplotlib.figure.Figure) and figure._repr_png_().startswith(PNG)
    assert matplotlib.pyplot.get_fignums() == []
    for name, begin in {"a.png": PNG, "b.SVG": b"<?xml", "c.pdf": b"%PDF", "d": PNG}.items():
        assert monitor.plot(tmp_path / "new" / name) == tmp_path / "new" / name
        assert (tmp_path / "new" / name).read_bytes().startswith(begin)
    with pytest.raises(ValueError, match="not supported"):
        monitor.plot(tmp_path / "devices.no")
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    assert monitor._repr_mimebundle_() == {"text/plain": str(monitor)}
    with pytest.raises(ModuleNotFoundError, match="matplotlib"):
        monitor.plot(tmp_path / "devices.png")


@pytest.mark.parametrize("strategy", [None, "dp_custom", "auto"])
def test_nothing_is_measured_before_a_fit_and_on_one_device(strategy: str | None) -> None:
    rows = Rows()
    monitor = watched(1, strategy=strategy, logger=rows) if strategy else DataParallelMonitor()
    assert not rows.rows and monitor.devices == () and monitor.total == Period()
    assert monitor.summary() == []
    assert monitor._repr_mimebundle_() == {"text/plain": str(monitor)}
    assert str(monitor) == "DataParallelMonitor: no training step on several devices was measured"
    with pytest.raises(ValueError, match=r"plot: expected .* got none\. "):
        monitor.plot()


def test_a_long_fit_is_summed_up_in_few_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitors, "_MOST_PERIODS", 4)
    monitor = watched(max_epochs=5)
    assert [period.steps for period in monitor.periods] == [4, 4, 4, 3]
    assert sum(monitor.periods, Period()) == monitor.total


def test_each_fit_is_measured_anew(tmp_path: Path) -> None:
    monitor, rows = DataParallelMonitor(), Rows()
    job = trainer(2, callbacks=[monitor], max_epochs=1)
    job.fit(Classifier(), loader(), loader())
    job.save_checkpoint(tmp_path / "last.ckpt")
    job.fit_loop.max_epochs = 3
    job.fit(Classifier(), loader(), loader())
    assert sum(monitor.total.samples) == 2 * SAMPLES
    job.validate(Classifier(), loader(), verbose=False)
    assert sum(monitor.total.samples) == 2 * SAMPLES, "a validation is no training"
    resumed = trainer(2, callbacks=[monitor], logger=rows)
    resumed.fit(Classifier(), loader(), loader(), ckpt_path=tmp_path / "last.ckpt")
    assert sum(monitor.total.samples) == (EPOCHS - 1) * SAMPLES
    assert [step for step, _ in rows.rows] == list(range(3, STEPS))
    trainer(1, "auto", callbacks=[monitor]).fit(Classifier(), loader(), loader())
    assert monitor.total == Period() and monitor.periods == []


def test_a_monitor_can_be_pickled() -> None:
    monitor = watched(max_epochs=1)
    again = pickle.loads(pickle.dumps(monitor))
    assert again.total == monitor.total and str(again) == str(monitor)


def test_a_monitor_of_the_package_pytorch_lightning() -> None:
    package = pytest.importorskip("pytorch_lightning")
    from pytorch_lightning.demos.boring_classes import BoringModel

    from lightning_dp.pytorch_lightning import DataParallelMonitor as ForThat

    monitor = ForThat()
    few: Any = {"max_epochs": 1, "limit_train_batches": 5, "callbacks": [monitor]}
    job = package.Trainer(strategy="dp_custom", accelerator="cpu", devices=2, **QUIET, **few)
    job.fit(BoringModel())
    assert isinstance(monitor, package.Callback) and monitor.total.steps == 5
