"""chemprop: message passing on molecules, whose batches are graphs in one piece."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from comparison import Job, as_one_device, compare
from torch.utils.data import DataLoader

pytest.importorskip("chemprop")

from chemprop import data as molecules
from chemprop import models
from chemprop import nn as layers

pytestmark = pytest.mark.interop

SMILES = ["C" * (1 + i % 5) + tail for i in range(8) for tail in ("O", "N", "C(=O)O", "F", "")]
ATOMS, BONDS = ("V", "batch"), ("E", "rev_edge_index")


def pieces(graph: Any, sizes: Sequence[int]) -> list[Any]:
    """A batch of molecules as smaller ones, each numbered from 0."""
    owner = graph.batch[graph.edge_index[0]]  # of each bond
    found, start = [], 0
    for size in sizes:
        atoms, bonds = (((start <= of) & (of < start + size)) for of in (graph.batch, owner))
        piece = copy.copy(graph)
        piece._BatchMolGraph__size = size
        for name in ATOMS:
            setattr(piece, name, getattr(graph, name)[atoms])
        for name in BONDS:
            setattr(piece, name, getattr(graph, name)[bonds])
        piece.batch = piece.batch - start
        piece.edge_index = graph.edge_index[:, bonds] - int((graph.batch < start).sum())
        piece.rev_edge_index = piece.rev_edge_index - int((owner < start).sum())
        found.append(piece)
        start += size
    return found


class Cut(models.MPNN):
    """Says how its batches are cut: as a step gets them, and as calls get them in forward mode."""

    def batch_size(self, batch: Any) -> int:
        return len(batch[0])

    def split_batch(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        graphs = pieces(batch[0], sizes)
        if isinstance(batch, dict):  # the arguments of a call, which here are the graph and Nones
            return [{**batch, 0: graph} for graph in graphs]
        columns = [[None] * len(sizes) if c is None else c.split(list(sizes)) for c in batch[1:]]
        return [type(batch)(*shard) for shard in zip(graphs, *columns, strict=True)]


def network(cls: type[models.MPNN] = Cut) -> models.MPNN:
    return cls(
        layers.BondMessagePassing(d_h=16, depth=3),
        layers.MeanAggregation(),
        layers.RegressionFFN(input_dim=16, hidden_dim=16),
        warmup_epochs=1,
        init_lr=1e-3,
        max_lr=1e-2,
        final_lr=1e-3,
    ).double()


def in_double(points: list[Any]) -> Any:
    batch = molecules.collate_batch(points)
    batch.bmg.V, batch.bmg.E = batch.bmg.V.double(), batch.bmg.E.double()
    return batch._replace(Y=batch.Y.double(), w=batch.w.double())


def loader() -> DataLoader[Any]:
    values = np.random.default_rng(0).normal(size=(len(SMILES), 1))
    weights = np.random.default_rng(1).uniform(0.5, 1.5, size=len(SMILES))
    rows = zip(SMILES, values, weights, strict=True)
    points = [molecules.MoleculeDatapoint.from_smi(s, y, weight=w) for s, y, w in rows]
    dataset = molecules.MoleculeDataset(points)
    return DataLoader(dataset, batch_size=9, collate_fn=in_double)  # the last batch has 4


MPNN = Job("chemprop", "MPNN", network, loader)


def test_graphs_in_one_piece_are_refused_by_name(on: str) -> None:
    whole = Job("chemprop", "MPNN", lambda: network(models.MPNN), loader)
    with pytest.raises(ValueError, match=r"batch\['bmg'\]\['V'\] has .* split_batch"):
        compare(whole, on)


# The step calls layers and not the module: the one with the work, a row per atom, is named.
NAMED = {"parallel_modules": ["message_passing"], "gather_overrides": {"": "cat"}}
test_as_one_device = as_one_device((MPNN, {}), (MPNN, {"mode": "forward", **NAMED}))
