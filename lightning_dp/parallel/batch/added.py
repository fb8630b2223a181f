"""Entries that a step has added to its batch: whoever sees the batch after the step finds them."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dp.parallel.batch import tree
from lightning_dp.parallel.batch.gather import gather
from lightning_dp.parallel.batch.join import GatherError
from lightning_dp.parallel.batch.shards import Shards


def give_back_added(batch: MutableMapping[Any, Any], shards: Shards, device: torch.device) -> None:
    """Puts into a batch what a step has added to its shards, joined as outputs are, without graphs.

    What a step writes over stays as it was. What has no joint value is left out, with a warning.

    Example:
        >>> batch, parts = {"x": 1}, [{"x": 1, "ids": ["a", "b"]}, {"x": 1, "ids": ["c"]}]
        >>> give_back_added(batch, Shards((2, 1), parts), torch.device("cpu"))
        >>> batch
        {'x': 1, 'ids': ['a', 'b', 'c']}
    """
    parts = [shards.parts[k] for k in shards.active]
    # An optimizer's closure may have run the step before, on the same shards.
    shards.added.update(dict.fromkeys(key for part in parts for key in part if key not in batch))
    for key in shards.added:
        try:
            batch[key] = _joined(key, parts, shards, device)
        except GatherError as error:
            shards.dims.say(("batch", key), f"{error} It is left out of the batch after the step.")


def _joined(key: Any, parts: Sequence[Any], shards: Shards, device: torch.device) -> Any:
    have = [i for i, part in enumerate(parts) if key in part]
    return gather(
        [tree.map_leaves(_without_graph, parts[i][key]) for i in have],
        device,
        sizes=[shards.active_sizes[i] for i in have],
        order=shards.active_order and [shards.active_order[i] for i in have],
        dims=shards.dims,
        where=("batch",),
        at=(key,),
    )


def _without_graph(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
