"""A callback that collects what `Trainer.predict` gives, from all processes, in order."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer, callbacks
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from typing_extensions import override

from lightning_dp.checkpointing import replacing
from lightning_dp.parallel.batch import Override, check_overrides, gather

if TYPE_CHECKING:
    BasePredictionWriter = callbacks.BasePredictionWriter
else:
    # Each of Lightning's packages has its own: which one comes next is for the class to say that
    # mixes this one in.
    BasePredictionWriter = object

_RANK = "{rank}"

_Part = tuple[bool, list[int] | None, Any]
"""Whether a process has no samples of a batch, the indices of those that it has, what they gave."""


class PredictionGathererMixin(BasePredictionWriter):
    """Gives the first process the predictions of all, as `Trainer.predict` returns them elsewhere.

    With several processes `Trainer.predict` returns each one's own rows: those of its samples in
    each batch, and no rows of a batch of which it has none. At the end of `predict` this callback
    joins them, batch by batch, by the same rules as outputs of several devices are. The first
    process has to have the memory for all of them; `Trainer.predict(return_predictions=False)`
    keeps Lightning from holding a process's own ones as well.

    It works in the same way with one process, and with any strategy of one process.

    Args:
        path: a file that the first process writes at the end, by `torch.save`: a dict with
            `predictions` and `indices` as below. It is whole or not there. With `{rank}` in its
            name every process writes its own rows to a file of its own instead, and nothing is
            sent between them. None to write nothing.
        gather_overrides: how what lies under certain keys is joined, as for the strategy.

    Attributes:
        predictions: in the first process what one process would have returned: a list of batches,
            or of such lists where there are several DataLoaders. In others, and before the end, an
            empty list.
        indices: in the same shape the samples' indices in the data set; None for batches of an
            iterable.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> class Double(LightningModule):
        ...     def predict_step(self, batch):
        ...         return batch * 2
        >>> gatherer = PredictionGatherer()
        >>> quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
        >>> trainer = Trainer(accelerator="cpu", devices=1, callbacks=[gatherer], **quiet)
        >>> _ = trainer.predict(Double(), DataLoader(range(5), batch_size=3))
        >>> gatherer.predictions, gatherer.indices
        ([tensor([0, 2, 4]), tensor([6, 8])], [[0, 1, 2], [3, 4]])
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        gather_overrides: Mapping[str, Override] | None = None,
    ) -> None:
        check_overrides(gather_overrides, "gather_overrides")
        super().__init__("batch")
        self._join = partial(gather, output_device="cpu", overrides=gather_overrides)
        self.path = None if path is None else os.fspath(path)
        self.predictions: list[Any] = []
        self.indices: list[Any] = []
        self._parts: list[list[_Part]] = []
        self._latest: Sequence[int] | None = None

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.predictions, self.indices = [], []
        self._parts = [[] for _ in range(trainer.predict_loop.num_dataloaders)]
        self._latest = trainer.predict_loop.current_batch_indices

    @override
    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Keeps it on the host."""
        own = apply_to_collection(prediction, Tensor, lambda tensor: tensor.detach().cpu())
        world = getattr(trainer.strategy, "world", None)
        is_idle = world is not None and world.is_idle
        # Of an iterable, whose samples have none, Lightning tells those of the batch before.
        is_known = batch_indices is not None and batch_indices is not self._latest
        self._latest = batch_indices
        indices = list(batch_indices or ()) if is_known else None
        self._parts[dataloader_idx].append((is_idle, indices, own))

    @override
    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Joins, and writes."""
        world = getattr(trainer.strategy, "world", None)
        rank = 0 if world is None else world.rank
        if self.path is not None and _RANK in self.path:
            own = [[self._joined([part]) for part in parts] for parts in self._parts]
            _save(self.path.replace(_RANK, str(rank)), *_unzipped(own))
        else:
            joined: list[list[Any]] = [[] for _ in self._parts]
            for batches, parts in zip(joined, self._parts, strict=True):
                for part in parts:
                    told = [part] if world is None else world.gather(part)
                    if rank == 0:
                        batches.append(self._joined(told))
            if rank == 0:
                self.predictions, self.indices = _unzipped(joined)
                if self.path is not None:
                    _save(self.path, self.predictions, self.indices)
        self._parts = []

    def _joined(self, parts: list[_Part]) -> tuple[Any, list[int] | None]:
        """What all processes' samples of a batch gave, in order, and their indices."""
        having = [(indices, own) for is_idle, indices, own in parts if not is_idle]
        if len(having) < 2:
            _, indices, own = next((part for part in parts if not part[0]), parts[0])
            return own, indices
        known = [indices for indices, _ in having if indices is not None]
        is_known = len(known) == len(having)
        sizes = [len(indices) for indices in known] if is_known else None
        everything = self._join([own for _, own in having], sizes=sizes)
        return everything, [i for indices in known for i in indices] if is_known else None


class PredictionGatherer(PredictionGathererMixin, callbacks.BasePredictionWriter):  # noqa: D101  # `__doc__`
    __doc__ = PredictionGathererMixin.__doc__


def _unzipped(loaders: list[list[Any]]) -> tuple[list[Any], list[Any]]:
    predictions: list[Any] = [[own for own, _ in batches] for batches in loaders]
    indices: list[Any] = [[own for _, own in batches] for batches in loaders]
    return (predictions[0], indices[0]) if len(loaders) == 1 else (predictions, indices)


def _save(path: str, predictions: list[Any], indices: list[Any]) -> None:
    with replacing(Path(path)) as temporary:
        torch.save({"predictions": predictions, "indices": indices}, temporary)
