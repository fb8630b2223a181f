"""Predictions: each process its own rows, with their indices; together in order at the end."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from oracle import assert_equal_trees
from several_processes import run_in_processes
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from worlds import flat

import lightning_dp
from lightning_dp import PredictionGatherer
from lightning_dp.processes.loaders import no_predictions


class Rows(Dataset[Any]):
    def __init__(self, n: int) -> None:
        self.x = torch.randn(n, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Tensor:
        return self.x[i]


class Stream(IterableDataset[Any]):
    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def shard(self, num_shards: int, index: int) -> Stream:
        return Stream(list(self.rows)[index::num_shards])

    def __iter__(self) -> Any:
        return iter(self.rows)


class Predicting(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        y = self.net(batch)
        return {"y": y, "names": [f"{value:.3f}" for value in batch[:, 0]], "all": (y.sum(1), y)}


class Noted(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[Any] = []
        self.epoch: Any = None

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, batch_indices: Any, *rest: Any
    ) -> None:
        self.batches.append((batch_indices, len(prediction["y"]), len(prediction["names"])))

    def write_on_epoch_end(
        self, trainer: Any, module: Any, predictions: Any, batch_indices: Any
    ) -> None:
        self.epoch = [[len(own["y"]) for own in each] for each in predictions], batch_indices


def predicted(devices: int, folder: str, kind: str = "rows") -> dict[str, Any]:
    warnings.simplefilter("ignore")
    torch.manual_seed(3)
    module = Predicting()
    path = f"{folder}/{kind}"
    gatherers = [PredictionGatherer(f"{path}.pt"), PredictionGatherer(f"{path}-{{rank}}.pt")]
    noted = Noted()
    trainer = Trainer(
        accelerator="cpu",
        devices=devices or 1,
        strategy=lightning_dp.DataParallelStrategy() if devices else "auto",
        logger=False,
        enable_progress_bar=False,
        callbacks=[*gatherers, noted] if kind == "rows" else gatherers,
    )
    loaders: Any = [DataLoader(Rows(n), batch_size=5, drop_last=True) for n in (11, 4)]
    if kind == "stream":
        loaders = DataLoader(Stream(Rows(11)), batch_size=4)
    returned = trainer.predict(module, loaders)
    first = gatherers[0]
    return {
        "returned": returned,
        "predictions": first.predictions,
        "indices": first.indices,
        "batches": noted.batches,
        "epoch": noted.epoch,
    }


def test_predictions_are_those_of_one_device_in_order(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    expected = predicted(0, str(tmp_path / "one"))
    first, second = run_in_processes(predicted, 2, 4, str(tmp_path))
    # Lightning sets drop_last=False to predict; the last batch of the first loader is of one.
    assert expected["indices"] == [[[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10]], [[0, 1, 2, 3]]]
    assert_equal_trees(expected["predictions"], expected["returned"], "rows", rtol=1e-5, atol=1e-6)
    assert_equal_trees(first["predictions"], expected["returned"], "rows", rtol=1e-5, atol=1e-6)
    assert first["indices"] == expected["indices"]
    assert second["predictions"] == second["indices"] == []
    told = torch.load(tmp_path / "rows.pt"), torch.load(tmp_path / "one" / "rows.pt")
    assert_equal_trees(told[0]["predictions"], told[1]["predictions"], "rows", rtol=1e-5, atol=1e-6)
    assert told[0]["indices"] == told[1]["indices"]

    assert first["batches"] == [([0, 1, 2], 3, 3), ([5, 6, 7], 3, 3), ([10], 1, 1), ([0, 1], 2, 2)]
    assert second["batches"] == [([3, 4], 2, 2), ([8, 9], 2, 2), ([], 0, 0), ([2, 3], 2, 2)]
    assert first["epoch"] == ([[3, 3, 1], [2]], [[[0, 1, 2], [5, 6, 7], [10]], [[0, 1]]])
    assert second["epoch"] == ([[2, 2, 0], [2]], [[[3, 4], [8, 9], []], [[2, 3]]])
    for rank, own in enumerate((first, second)):
        file = torch.load(tmp_path / f"rows-{rank}.pt")
        assert_equal_trees(file["predictions"], own["returned"], "rows", rtol=1e-5, atol=1e-6)
        assert file["indices"] == own["epoch"][1]


@pytest.mark.slow
@pytest.mark.parametrize("processes, devices", [(2, 2), (3, 3), (4, 4)])
def test_predictions_of_more_processes(tmp_path: Path, processes: int, devices: int) -> None:
    (tmp_path / "one").mkdir()
    expected = predicted(0, str(tmp_path / "one"))
    first, *others = run_in_processes(predicted, processes, devices, str(tmp_path))
    assert_equal_trees(first["predictions"], expected["returned"], "rows", rtol=1e-5, atol=1e-6)
    assert first["indices"] == expected["indices"]
    assert all(other["predictions"] == [] for other in others)


@pytest.mark.slow
def test_predictions_of_a_stream(tmp_path: Path) -> None:
    first, second = run_in_processes(predicted, 2, 2, str(tmp_path), "stream")
    assert first["indices"] == [None] * 3 and second["predictions"] == []
    torch.manual_seed(3)
    net, x = Predicting().net, Rows(11).x
    parts = [torch.cat([x[0::2][2 * i : 2 * i + 2], x[1::2][2 * i : 2 * i + 2]]) for i in range(3)]
    for own, part in zip(first["predictions"], parts, strict=True):
        torch.testing.assert_close(own["y"], net(part))


def test_a_step_of_a_process_without_samples_gives_no_rows() -> None:
    output = {
        "y": torch.ones(1, 3),
        "name": ["a"],
        "pair": (torch.ones(1), torch.tensor(2.0)),
        "kind": "b",
        "texts": ("a",),
    }
    own = no_predictions(output, 1)
    assert own["y"].shape == (0, 3) and own["name"] == [] and own["kind"] == "b"
    assert own["pair"][0].shape == (0,) and own["pair"][1] == 2 and own["texts"] == ()
    assert no_predictions(torch.ones(0, 2), 1).shape == (0, 2)
    assert no_predictions(None, 1) is None
    assert no_predictions(["a", "b"], 2) == [] and no_predictions(["a", "b"], 3) == ["a", "b"]


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "all.pt"
    path.write_text("old")
    gatherer = PredictionGatherer(path)
    module, trainer = Predicting(), partial(Trainer, accelerator="cpu", devices=1, logger=False)

    class Unwritable(Predicting):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return lambda: batch

    options = {"callbacks": [gatherer], "enable_progress_bar": False}
    loader = DataLoader(Rows(3), batch_size=2)
    with pytest.raises(AttributeError, match="pickle"):
        trainer(**options).predict(Unwritable(), loader)
    assert path.read_text() == "old" and [file.name for file in tmp_path.iterdir()] == ["all.pt"]
    trainer(**options).predict(module, loader)
    assert len(torch.load(path)["predictions"]) == 2


def test_a_gatherer_begins_anew() -> None:
    gatherer = PredictionGatherer()
    trainer = Trainer(
        accelerator="cpu", devices=1, logger=False, callbacks=[gatherer], enable_progress_bar=False
    )
    for n in (4, 3):
        trainer.predict(Predicting(), DataLoader(Rows(n), batch_size=3), return_predictions=False)
        assert flat(gatherer.indices) == list(range(n))
        assert sum(len(own["y"]) for own in gatherer.predictions) == n
