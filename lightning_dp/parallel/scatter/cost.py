"""What each sample of a batch costs, by the module's `sample_cost` or an entry of the batch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp.parallel.scatter import tree


class CostError(ValueError):
    """There is no cost for each sample; the message says what was found."""


def sample_costs(module: nn.Module, batch: Any, n: int, key: str | None = None) -> Tensor:
    """The costs of a batch's samples, by `module.sample_cost(batch)` or an entry of the batch.

    Dots in the key lead into nested entries ("text.lengths"), numbers into lists ("1").

    Example:
        >>> sample_costs(nn.Identity(), {"lengths": torch.tensor([3, 9])}, 2, "lengths")
        tensor([3., 9.], dtype=torch.float64)
    """
    name = type(module).__qualname__
    if hasattr(module, "split_batch"):
        raise ValueError(
            f"split='cost': expected a module without split_batch, got {name}, which has one: it "
            "gets sizes, but not which samples go where. Leave out one of the two."
        )
    if not key and not hasattr(module, "sample_cost"):
        raise no_costs(module)
    source = f"sample_cost={key!r}" if key else f"{name}.sample_cost"
    found: Any = _entry(batch, key) if key else module.sample_cost(batch)  # type: ignore[operator]  # a method
    shape = f" of shape {tuple(found.shape)}" if hasattr(found, "shape") else ""
    error = CostError(
        f"{source}: expected {n} finite numbers of at least 0, one per sample, got "
        f"{type(found).__qualname__}{shape}: {found!r:.60}. Give one number per sample."
    )
    try:
        costs = torch.as_tensor(found, dtype=torch.double, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError):
        raise error from None
    if costs.shape != (n,) or not 0 <= costs.amin() <= costs.amax() < math.inf:
        raise error
    return costs


def no_costs(module: nn.Module) -> CostError:
    """The error where neither the module nor an option says what samples cost."""
    return CostError(
        f"split='cost': expected a method sample_cost(batch) on {type(module).__qualname__}, "
        "or sample_cost='lengths' to name an entry of the batch, got neither. Define one of them, "
        "or use split='even'."
    )


def _entry(batch: Any, key: str) -> Any:
    node = batch
    for part in key.split("."):
        entries = {str(getattr(k, "name", k)): child for k, child in tree.children(node) or ()}
        if part not in entries:
            raise CostError(
                f"sample_cost={key!r}: expected an entry {part!r} in the batch, got "
                f"{sorted(entries) or type(node).__qualname__}. Correct the key (in forward mode "
                "the batch is the arguments of the call, by position or name)."
            )
        node = entries[part]
    return node
