"""Embeddings of limited norm (`nn.Embedding(max_norm=...)`): a forward shortens the rows it uses.

A replica with a copy of the weight shortens rows of the copy. Which rows these were is told by the
rows: to shorten is all that a forward does to them, and it does the same wherever it is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from lightning_dp.parallel.torch_private import parameter_table

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import World

Limited = nn.Embedding | nn.EmbeddingBag


def limits_norms(module: nn.Module) -> bool:
    """Whether a forward of the module, or of a part of it, may write to its weights."""
    return any(isinstance(m, Limited) and m.max_norm is not None for m in module.modules())


class LimitedNorms:
    """The root's embeddings, which may get a limit at any time, and their weights."""

    def __init__(self, modules: Sequence[nn.Module], parameters: Sequence[nn.Parameter]) -> None:
        places = {id(parameter): i for i, parameter in enumerate(parameters)}
        self._parameters = parameters
        self.modules: dict[int, Limited] = {
            places[id(parameter_table(module)["weight"])]: module
            for module in modules
            if isinstance(module, Limited) and parameter_table(module).get("weight") is not None
        }

    @property
    def positions(self) -> set[int]:
        """The places of limited weights among the parameters."""
        return {i for i, module in self.modules.items() if module.max_norm is not None}

    @torch.no_grad()
    def adopt(self, parameters: Sequence[nn.Parameter]) -> None:
        """Gives the root the rows that are shorter among a replica's parameters elsewhere.

        They are written without a trace: graphs that have saved the weight stay usable.
        """
        for i in self.positions:
            own, norm_type = self._parameters[i].data, self.modules[i].norm_type
            other = parameters[i].data.to(own.device)
            norms = [rows.norm(norm_type, dim=1, keepdim=True) for rows in (own, other)]
            own.copy_(torch.where(norms[1] < norms[0], other, own))

    @torch.no_grad()
    def share(self, world: World) -> None:
        """Shortens the rows that are still long here, and that another process has shortened."""
        for i in self.positions:
            module, weight = self.modules[i], self._parameters[i].data
            most, norm_type = float(module.max_norm or 0.0), module.norm_type
            norms = weight.norm(norm_type, dim=1)
            # A row may be longer by rounding after it was shortened.
            is_long = norms > most * (1 + 8 * torch.finfo(norms.dtype).eps)
            counts = is_long.to(torch.int32)
            world.sum_(counts)
            rows = (is_long & (counts < world.size)).nonzero()[:, 0]
            if len(rows):
                torch.embedding_renorm_(weight, rows, most, norm_type)
