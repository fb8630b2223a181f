"""`python -m lightning_dp estimate`: what it says is what a training then uses."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from oracle import trainer
from program_runs import command_line, read_json
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import DataParallelStrategy
from lightning_dp import __main__ as program
from lightning_dp.app.estimate import command as estimate

K = 4
KIB, MIB = 2**10, 2**20
on_sim = pytest.mark.sim_only("Of a GPU's memory no limit can be set to the byte.")


class Model(LightningModule):
    """A network, its optimizer, and a small data set."""

    n = 64  # samples in a batch

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-3)

    def rows(self, n: int) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def train_dataloader(self) -> Any:
        return self.data(self.n, 2)

    def data(self, n: int, steps: int) -> DataLoader[Any]:
        torch.manual_seed(1)
        return DataLoader(TensorDataset(*self.rows(n * steps)), batch_size=n, shuffle=True)


class MLP(Model):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 3)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)

    def rows(self, n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(n, 16), torch.randint(0, 3, (n,))


class MLPWithMomentum(MLP):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.1)


class Convnet(Model):
    n = 24

    def __init__(self) -> None:
        layers = [nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3)]
        super().__init__(nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 36, 10)))

    def rows(self, n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(n, 3, 16, 16), torch.randint(0, 10, (n,))


class Transformer(Model):
    n = 16

    def __init__(self) -> None:
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        super().__init__(
            nn.Sequential(nn.Embedding(64, 32), layers, nn.Flatten(), nn.LazyLinear(4))
        )
        self.net(torch.zeros(1, 12, dtype=torch.long))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)

    def rows(self, n: int) -> tuple[Tensor, Tensor]:
        return torch.randint(0, 64, (n, 12)), torch.randint(0, 4, (n,))


class Words(nn.Module):
    def __init__(self, words: int = 4096) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(words, 16), nn.GRU(16, 16, batch_first=True)
        self.scores = nn.Linear(16, words)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.scores(self.body(self.words(x))[0])
        return scores.transpose(1, 2)


class LanguageModel(Model):
    """What takes memory is the scores of all words."""

    n = 32

    def __init__(self) -> None:
        super().__init__(Words())

    def rows(self, n: int) -> tuple[Tensor, Tensor]:
        text = torch.randint(0, 4096, (n, 9))
        return text[:, :-1], text[:, 1:]


class NoData(MLP):
    train_dataloader: Any = LightningModule.train_dataloader


class OwnData(LightningDataModule):
    """Its loader hands out whole batches."""

    def train_dataloader(self) -> Any:
        batches: Any = [MLP().rows(10) for _ in range(3)]
        return DataLoader(batches, batch_size=None)


class Trained:
    """A real training: the peaks of its devices, and whether memory sufficed."""

    def __init__(self, make: Any, n: int, options: Any, limit: int | None = None) -> None:
        gc.collect()
        sim: Any = torch.get_device_module("sim")
        before = [sim.memory_allocated(k) for k in range(K)]
        for k in range(K):
            sim.reset_peak_memory_stats(k)
            sim.set_memory_limit(k, None if limit is None else before[k] + limit)
        failures = self._failures()
        module, self.ended = make(), True
        try:
            job = trainer(K, DataParallelStrategy(**options), max_epochs=1)
            job.fit(module, module.data(n, 11))
        except torch.OutOfMemoryError:
            self.ended = False
        finally:
            for k in range(K):
                sim.set_memory_limit(k, None)
        self.peaks = [sim.max_memory_allocated(k) - before[k] for k in range(K)]
        self.ran_out = self._failures() != failures

    def _failures(self) -> list[int]:
        sim: Any = torch.get_device_module("sim")
        return [sim.memory_stats(k)["num_ooms"] for k in range(K)]


def options_of(split: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in split["options"].items() if value is not None}


def found(tmp_path: Path, make: type[Model], *more: str) -> dict[str, Any]:
    file = tmp_path / "estimate.json"
    name = f"test_estimate.{make.__name__}"
    assert estimate.main(["--module", name, "--json", str(file), *more]) == 0
    return read_json(file)


def check(tmp_path: Path, make: type[Model], memory: int, *more: str) -> None:
    """Peaks within 3 % of a training's; the largest batch runs, and one sample more does not."""
    content = found(tmp_path, make, "--memory", str(memory), *more)
    for split in content["splits"]:
        options = options_of(split)
        seen = Trained(make, content["batch"], options)
        for use, peak in zip(split["run"]["uses"], seen.peaks, strict=True):
            parts = ("weights", "gradients", "optimizer", "activations", "other")
            own = sum(use[part] for part in parts)
            assert own == pytest.approx(peak, rel=0.03) and min(use[part] for part in parts) >= 0
        most = split["largest"]
        assert most["is_proven"] and most["samples"] > 0
        fits = Trained(make, most["samples"], options, memory)
        more_ = Trained(make, most["samples"] + 1, options, memory)
        assert fits.ended, split["name"]
        if split["name"] == "memory":
            assert not more_.ended
        else:
            assert not fits.ran_out and more_.ran_out, split["name"]


@pytest.fixture
def on_simulated(room: Any) -> None:
    """As many simulated devices as all tests have."""


@pytest.mark.slow
@on_sim
def test_it_says_what_a_training_uses(tmp_path: Path, on_simulated: None) -> None:
    check(tmp_path, MLP, 200 * KIB)


@pytest.mark.slow
@on_sim
@pytest.mark.parametrize(
    ("make", "memory"),
    [
        (MLP, 300_001),
        (MLPWithMomentum, 160 * KIB),
        (Convnet, 2 * MIB),
        (Transformer, MIB),
        (LanguageModel, 8 * MIB),
    ],
)
def test_it_says_what_trainings_use(
    make: type[Model], memory: int, tmp_path: Path, on_simulated: None
) -> None:
    check(tmp_path, make, memory, "--weights", "1,3,3,2")


@on_sim
def test_the_report(tmp_path: Path, on_simulated: None, capsys: Any) -> None:
    content = found(tmp_path, MLPWithMomentum, "--batch", "40", "--devices", "2")
    assert content["batch"] == 40 and content["memory"] is None
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    rows = [line.split() for line in text.splitlines() if line.lstrip().startswith("sim:")]
    assert [row[:2] for row in rows] == [["sim:0", "20"], ["sim:1", "20"]]
    weights = 4 * sum(p.numel() for p in MLP().parameters())
    root, other = content["splits"][0]["run"]["uses"]
    assert root["weights"] == other["weights"] == weights
    assert root["optimizer"] >= 2 * weights and other["optimizer"] == 0
    assert re.search(r"sim:0 holds .* more than sim:1: \+ .* for the optimizer's state", text)
    assert "split=memory" in text.splitlines()[-2] + text.splitlines()[-1]


@on_sim
def test_batches_of_any_size_are_made_of_whole_batches(tmp_path: Path, on_simulated: None) -> None:
    more = ("--data", "test_estimate.OwnData", "--devices", "1")
    assert found(tmp_path, NoData, *more)["batch"] == 10
    content = found(tmp_path, NoData, *more, "--batch", "23")
    assert [split["run"]["sizes"] for split in content["splits"]] == [[23]]


@on_sim
def test_what_this_machine_cannot_try_is_called_about(
    tmp_path: Path, on_simulated: None, capsys: Any
) -> None:
    content = found(tmp_path, MLP, "--memory", "10TB", "--devices", "2")
    even = content["splits"][0]["largest"]
    assert not even["is_proven"] and even["samples"] > 10**9
    assert "about" in capsys.readouterr().out


HERE = ("--module", "test_estimate.MLP")
MISTAKES = [
    ((), "expected experiment=NAME or --module package.Class, got nothing."),
    (("--batch", "8"), "expected experiment=NAME or --module package.Class, got --batch alone."),
    (("--module", "test_estimate.MPL"), "--module: expected the path of a class"),
    (("--module", "test_estimate.OwnData"), "--module: expected a LightningModule"),
    (("--module", "test_estimate.NoData"), "expected a train_dataloader"),
    ((*HERE, "experiment=digits"), "--module: expected to be alone"),
    ((*HERE, "--batch", "0"), "--batch: expected at least 1 sample, got 0."),
    ((*HERE, "--batch", "some"), "argument --batch: invalid int value: 'some'"),
    ((*HERE, "--memory", "lots"), "argument --memory: expected a size such as 101MB, 24GiB"),
    ((*HERE, "--memory", "0"), "--memory: expected at least 1 byte, got 0."),
    ((*HERE, "--devices", "cpu:4"), "--devices: expected devices that count their memory"),
    ((*HERE, "--devices", "sim:0,sim:0"), "--devices: expected each device once"),
    ((*HERE, "--devices", "4000"), "--devices"),
    ((*HERE, "--weights", "1,x"), "expected a number for each device, such as 1,3,3,3"),
    ((*HERE, "--weights", "1,2"), "weights: expected 4 numbers, one per device, got 2"),
    ((*HERE, "--memory", "1KiB"), "--memory: expected at least 41.6 KiB, what a step of one"),
    ((*HERE, "--memory", "24kB"), "sample takes on sim:0, got 23.4 KiB. Use larger devices"),
]


@on_sim
@pytest.mark.parametrize(("arguments", "words"), MISTAKES)
def test_a_mistake_is_one_line(
    arguments: tuple[str, ...], words: str, on_simulated: None, capsys: Any
) -> None:
    with pytest.raises(SystemExit) as end:
        estimate.main(arguments)
    said = capsys.readouterr()
    assert end.value.code == 2 and not said.out
    assert said.err.startswith("error: ") and said.err.count("\n") == 1
    assert words in said.err


def test_memory_has_units() -> None:
    parse = estimate._parser().parse_args
    sizes = [parse(["--memory", text]).memory for text in ("24GB", "24GiB", "24000000000")]
    assert sizes == [24e9, 24 * 2**30, 24e9]


def test_the_help_fits_a_screen(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("sys.argv", ["lightning-dp", "estimate", "--help"])
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        program.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100


@pytest.mark.slow
def test_as_a_program(tmp_path: Path) -> None:
    text = command_line("estimate", "experiment=digits", "--devices", "2", cwd=tmp_path)
    assert "experiment=digits: 240 samples, 2 devices" in text
    assert not list(tmp_path.iterdir())
