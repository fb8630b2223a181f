"""Why a split batch's step is not that of the root alone: found out by experiment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import nn

from lightning_dp.first_step.compare import Difference, Outcome, fitted_weights, weighted_sum
from lightning_dp.parallel.gradients import LossReduction, loss_weights
from lightning_dp.parallel.replicas import WAYS_OUT
from lightning_dp.parallel.torch_private import BatchNorm

if TYPE_CHECKING:
    from lightning_dp.first_step.check import Runs

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_ALPHA_DROPOUTS = (nn.AlphaDropout, nn.FeatureAlphaDropout)


class Diagnosis:
    """Looks for the causes of a difference, the usual ones.

    Layers that are known to see their shard only are turned off, one kind after the other, and the
    step is run again. What then still differs from the outcome `alone`, on the root, is the loss:
    losses and gradients of the shards, each run there, show how they make up those of the batch.
    """

    def __init__(self, runs: Runs, alone: Outcome, loss_reduction: LossReduction) -> None:
        self._runs = runs
        self._alone = alone
        self._sizes = [size for size in runs.sizes if size]
        self._active = [k for k, size in enumerate(runs.sizes) if size]
        self._loss_reduction = loss_reduction
        self._dropouts = _Layers(runs.module, _drops)
        self._norms = _Layers(runs.module, _normalises)

    def causes(self) -> dict[str, str]:
        """What makes the difference, each with what to choose."""
        if self._differ(self._runs.alone(), self._alone):
            return {"not repeatable": _NOT_REPEATABLE}
        calm = self._dropouts.turn_off
        if self._is_random(calm):
            return {"random": _RANDOM}
        found: dict[str, str] = {}
        if self._dropouts.names and self._is_random():
            found["dropout"] = _DROPOUT.format(self._dropouts)
            if not self._still_differs(calm):
                return found
        return {**found, **self._of_norms_and_loss()}

    def _of_norms_and_loss(self) -> dict[str, str]:
        batch_norm = {"batch norm": _BATCH_NORM.format(self._norms)}
        if self._norms.names and not self._still_differs(self._all_off):
            return batch_norm
        if self._runs.spreads_forward:
            return {"forward": _FORWARD}
        name, text, weights = self._of_loss()
        if self._norms.names and weights and not self._is_made_of(weights, self._dropouts.turn_off):
            return {name: text, **batch_norm}
        return {name: text}

    def _of_loss(self) -> tuple[str, str, Sequence[float]]:
        """Which weights make the shards' losses and gradients those of the batch."""
        sums, means = [loss_weights(self._sizes, how) for how in ("sum", "mean")]
        if self._is_made_of(sums):
            return "sum", _SUM, sums
        if self._is_made_of(means):
            return "mean", _MEAN if self._loss_reduction == "sum" else _NO_ITEMS, means
        fitted = fitted_weights(self._runs.alone(off=self._all_off), self._parts(self._all_off))
        # A mean over anything weighs by shares, of at least 0 and in sum 1.
        counts = [max(weight, 0.0) for weight in fitted]
        weights = [count / (sum(counts) or 1.0) for count in counts]
        if self._is_made_of(weights):
            return "items", _ITEMS.format(_listed(weights), _listed(means)), weights
        return "whole batch", _WHOLE_BATCH, ()

    def _all_off(self) -> None:
        self._dropouts.turn_off()
        self._norms.turn_off()

    def _still_differs(self, off: Callable[[], None]) -> bool:
        """Whether the split batch's step still differs with some layers turned off."""
        return self._differ(self._runs.split(off=off), self._runs.alone(off=off))

    def _is_random(self, off: Callable[[], None] = lambda: None) -> bool:
        """Whether the step differs with other random numbers."""
        return self._differ(*(self._runs.alone(off=off, seed=seed) for seed in (1, 2)))

    def _is_made_of(self, weights: Sequence[float], off: Callable[[], None] | None = None) -> bool:
        """Whether the batch's loss and gradient are the weighted sums of the shards'."""
        off = off or self._all_off
        joint = weighted_sum(self._parts(off), weights)
        return not self._differ(joint, self._runs.alone(off=off))

    def _parts(self, off: Callable[[], None]) -> list[Outcome]:
        return [self._runs.alone(k, off=off) for k in self._active]

    def _differ(self, a: Outcome, b: Outcome) -> bool:
        return Difference.between(a, b).largest > self._runs.tolerance


def cause_in_buffers(names: Sequence[str]) -> dict[str, str]:
    """That a step leaves other values in these buffers, with what to choose."""
    return {"buffers": _BUFFERS.format(", ".join(names))} if names else {}


class _Layers:
    """The layers of one kind in a module."""

    def __init__(self, module: nn.Module, is_one: Callable[[nn.Module], bool]) -> None:
        self._layers = [layer for layer in module.modules() if is_one(layer)]
        self.names = [name for name, layer in module.named_modules() if is_one(layer)]

    def turn_off(self) -> None:
        for layer in self._layers:
            if isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
                layer.dropout = 0.0
            else:
                layer.training = False

    def __str__(self) -> str:
        return ", ".join(self.names[:3]) + ", ..." * (len(self.names) > 3)


def _normalises(layer: nn.Module) -> bool:
    return isinstance(layer, BatchNorm) and layer.training


def _drops(layer: nn.Module) -> bool:
    if isinstance(layer, (*_DROPOUTS, *_ALPHA_DROPOUTS)):
        return layer.training and layer.p > 0
    return isinstance(layer, nn.RNNBase | nn.MultiheadAttention) and layer.dropout > 0


def _listed(weights: Sequence[float]) -> str:
    return ", ".join(f"{weight:.3f}" for weight in weights)


CHANCE = {"not repeatable", "random", "dropout"}
_BUFFERS = "Buffers are left with other values than one device leaves ({}). " + WAYS_OUT
_SUM = 'The loss is a sum over samples, not a mean: choose loss_reduction="sum".'
_MEAN = 'The loss is a mean over samples, not a sum: choose loss_reduction="mean".'
_NO_ITEMS = (
    "The loss is a mean over samples, and not over the num_items that the step returns: leave them "
    "out."
)
_ITEMS = (
    "The loss is a mean over something else than samples, such as valid tokens: the shards count "
    'in it for {}, and their samples for {}. Return {{"loss": loss, "num_items": n}} from '
    "training_step, with the number n of what it is a mean over."
)
_WHOLE_BATCH = (
    "The loss is not made up of the shards' losses, it looks at the whole batch (as contrastive, "
    'triplet and Dice losses do): choose mode="forward".'
)
_FORWARD = (
    "forward looks at more than one sample at a time, or what it returns is not joined as one "
    "device returns it (0-dim outputs are stacked): do that in training_step, with what forward "
    "returns for each sample, or choose how outputs are joined with gather_overrides."
)
_BATCH_NORM = (
    "Batch norm in training normalises each shard by its own statistics ({}): choose "
    "Trainer(sync_batchnorm=True), or a norm that looks at one sample (nn.GroupNorm)."
)
_DROPOUT = (
    "Dropout draws its random numbers for each shard ({}): such a difference is chance, as it is "
    "from seed to seed. To see whether there is another one, choose p=0."
)
_RANDOM = (
    "The step draws random numbers, also with all dropout layers turned off, and draws them for "
    "each shard: such a difference is chance, as it is from seed to seed. To see whether there is "
    "another one, take them out."
)
_NOT_REPEATABLE = (
    "The step differs from run to run on one device, with the same random numbers: it has state "
    "or randomness that cannot be reached from the module. Choose Trainer(deterministic=True), and "
    "seed what it draws from."
)
