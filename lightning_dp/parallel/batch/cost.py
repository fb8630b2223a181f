"""What each sample of a batch costs, as the module or an entry of the batch says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp.parallel.batch import tree


class CostError(ValueError):
    """There is no cost for each sample; the message says what was found."""


def sample_costs(module: nn.Module, batch: Any, n: int, key: str | None = None) -> list[float]:
    """The costs of a batch's samples, by `module.sample_cost(batch)` or an entry of the batch.

    Dots in the key lead into nested entries ("text.lengths"), numbers into lists ("1").

    Example:
        >>> sample_costs(nn.Identity(), {"lengths": torch.tensor([3, 9])}, 2, "lengths")
        [3.0, 9.0]
    """
    if hasattr(module, "split_batch"):
        raise ValueError(
            f"split='cost': expected a module without split_batch, got "
            f"{type(module).__qualname__}, which has one: it is told sizes, but not "
            "which samples go where. Leave out one of the two."
        )
    source = f"sample_cost={key!r}" if key else f"{type(module).__qualname__}.sample_cost"
    if key:
        found = _entry(batch, key)
    elif hasattr(module, "sample_cost"):
        found = module.sample_cost(batch)  # type: ignore[operator]  # a method, not a submodule
    else:
        raise no_costs(module)
    costs = _as_numbers(found)
    if costs is None or costs.shape != (n,) or not (costs.isfinite() & (costs >= 0)).all():
        shape = "" if costs is None else f" of shape {tuple(costs.shape)}"
        raise CostError(
            f"{source}: expected {n} finite numbers of at least 0, one per sample, got "
            f"{type(found).__qualname__}{shape}: {found!r:.60}. Give one number per sample."
        )
    return [float(cost) for cost in costs]


def no_costs(module: nn.Module) -> CostError:
    """The error where neither the module nor an option says what samples cost."""
    return CostError(
        f"split='cost': expected a method sample_cost(batch) on {type(module).__qualname__}, "
        "or sample_cost='lengths' to name an entry of the batch, got neither. Define one of them, "
        "or use split='even'."
    )


def _as_numbers(found: Any) -> Tensor | None:
    try:
        return torch.as_tensor(found, dtype=torch.double, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError):
        return None


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
