"""Why a split call differs from that of one device: found out by experiment.

Layers and random numbers that are known to differ are switched off, one kind after the other, and
both calls run again. What still differs is the call's own. The losses and gradients of single
shards, each run on the root, show how they make up those of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Literal

import torch

from lightning_dp.parallel.check.draws import OneNumberPerDraw
from lightning_dp.parallel.check.outcome import (
    EXACT,
    UNCHANGED,
    Key,
    Outcome,
    differing,
    distance,
    fitted_weights,
    weighted_sum,
)
from lightning_dp.parallel.check.report import Difference, Report
from lightning_dp.parallel.check.snapshot import NotChecked
from lightning_dp.parallel.check.trial import Call, Conditions, Trial, muted
from lightning_dp.parallel.errors import described
from lightning_dp.parallel.reduce import loss_weights

LossReduction = Literal["mean", "sum"]

_ROUNDING_FACTOR = 30.0
"""A difference is rounding if it is at most this times what perturbed parameters make."""
_CHANCE_FACTOR = 3.0
"""A difference is chance if it is at most this times what other seeds make."""


def check(
    make_call: Callable[[], Call],
    report: Report,
    loss_reduction: LossReduction = "mean",
    most_bytes: int | None = None,
) -> Report:
    """Runs a call alone and split, compares, looks for the cause, and puts everything back.

    An error in the check is reported and does not reach the caller: the real call will raise it.

    Args:
        make_call: makes the call and its engine.
        report: the report of a call without differences.
        loss_reduction: the strategy's.
        most_bytes: how much host memory copies of the module's tensors may take; None for any.
    """
    with muted():
        try:
            call = make_call()
            try:
                return _compared(Trial(call, most_bytes), report, loss_reduction)
            finally:
                call.engine.close()
        except NotChecked as reason:
            return report.not_compared(str(reason))
        except Exception as error:
            text = f"{type(error).__name__}: {described(error, str)}"
            return report.not_compared(f"the check raised {text}", raised=True)


def _compared(trial: Trial, report: Report, loss_reduction: LossReduction) -> Report:
    try:
        return _Comparison(trial, report, loss_reduction).report()
    finally:
        trial.end()


class _Comparison:
    """One comparison, and the experiments that a difference asks for."""

    def __init__(self, trial: Trial, report: Report, loss_reduction: LossReduction) -> None:
        self._trial, self._empty = trial, report
        self._loss_reduction = loss_reduction
        self._sizes = [size for size in trial.call.sizes if size]
        self._conditions = Conditions()

    def report(self) -> Report:
        """Runs the call alone and split; where they differ, looks for the causes."""
        trial = self._trial
        alone = trial.alone()
        if not alone.is_finite:
            raise NotChecked("its loss or gradient is not finite on the root alone.")
        split = trial.split(like=alone)
        found = differing(alone, split, trial.tolerance)
        if not found:
            return self._empty
        draws = OneNumberPerDraw()
        first = trial.alone(Conditions(one_number_per_draw=True), draws=draws)
        if trial.lower_tolerance(draws.dtypes):  # autocast inside of the call, say
            found = differing(alone, split, trial.tolerance)
        unstable = differing(alone, trial.alone(), trial.tolerance)
        found = {key: off for key, off in found.items() if key not in unstable or _is_result(key)}
        causes: dict[str, str] = {}
        if any(_is_result(key) and key in found for key in unstable):
            causes["not repeatable"] = _NOT_REPEATABLE
        elif found:
            if trial.norms.names:
                alone, split, found = self._without_norms(found, causes)
            if found and (draws.names or self._python_draws(first) - unstable.keys()):
                alone, split, found = self._without_chance(alone, split, found, draws, causes)
            found = self._beyond_rounding(alone, found)
            causes |= self._causes(alone, split, found)
        differences = [
            Difference(k, alone.values.get(k, UNCHANGED), split.values.get(k, UNCHANGED))
            for k in sorted(found, key=lambda key: _ORDER.index(key.kind))
        ]
        return replace(self._empty, differences=differences, causes=causes)

    def _without_norms(self, found: dict[Key, float], causes: dict[str, str]) -> _Both:
        """Both calls with batch norm switched off; notes whether it made them differ."""
        norms = self._trial.norms.names
        self._conditions = Conditions(norms_off=True)
        alone, split, now = self._both(self._conditions)
        if now.keys() != found.keys() or any(now[key] < found[key] / 2 for key in now):
            causes["batch norm"] = _BATCH_NORM.format(_listed(norms))
        return alone, split, now

    def _without_chance(
        self,
        alone: Outcome,
        split: Outcome,
        found: dict[Key, float],
        draws: OneNumberPerDraw,
        causes: dict[str, str],
    ) -> _Both:
        """Both calls with random numbers that do not depend on how many samples there are."""
        plain, seeds = self._conditions, range(3)
        # One number may hide a difference (a path that is dropped) or divide by a deviation of 0.
        made = [replace(plain, one_number_per_draw=True, seed=seed) for seed in seeds]
        pairs = [(conditions, self._both(conditions)) for conditions in made]
        usable = [pair for pair in pairs if pair[1][0].is_finite]
        if usable:
            self._conditions, (alone, split, found) = max(usable, key=lambda pair: len(pair[1][2]))
        is_controlled = bool(usable) and not draws.uncontrolled
        if found and (not is_controlled or self._draws_more_for_more_samples()):
            seeded = (replace(self._conditions, seed=seed) for seed in range(4, 12))
            others = (self._trial.alone(conditions) for conditions in seeded)
            found = self._beyond(alone, found, others, _CHANCE_FACTOR)
        if not (found and list(draws.names) == ["randperm"]):  # pairs that differ are no chance
            causes["random"] = _RANDOM.format(", ".join(draws.names) or "numpy's or Python's")
        return alone, split, found

    def _both(self, conditions: Conditions) -> _Both:
        alone = self._trial.alone(conditions)
        split = self._trial.split(conditions, like=alone)
        return alone, split, differing(alone, split, self._trial.tolerance)

    def _python_draws(self, alone: Outcome) -> set[Key]:
        """The values that depend on random numbers of Python or NumPy."""
        other = self._trial.alone(Conditions(one_number_per_draw=True), python_seed=1)
        return set(differing(alone, other, self._trial.tolerance))

    def _draws_more_for_more_samples(self) -> bool:
        """Whether the call draws random numbers of Python or NumPy for each sample.

        If not, each replica draws the same ones as the root alone: its generators start alike.
        """
        self._trial.alone(self._conditions)
        whole = self._trial.python_state
        self._trial.alone(self._conditions, self._trial.active[0])
        return whole != self._trial.python_state

    def _beyond_rounding(self, alone: Outcome, found: dict[Key, float]) -> dict[Key, float]:
        """Drops differences that rounding explains.

        Up to 30 times what a change of the parameters by one rounding error makes.
        """
        if not found:
            return found
        perturbed = (self._trial.alone(self._conditions, perturbed=i) for i in (1, 2, 3))
        return self._beyond(alone, found, perturbed, _ROUNDING_FACTOR)

    def _beyond(
        self, alone: Outcome, found: dict[Key, float], others: Iterable[Outcome], factor: float
    ) -> dict[Key, float]:
        """Keeps differences above `factor` times the largest from `alone` to any of `others`."""
        largest = dict.fromkeys(found, 0.0)
        for other in others:  # one at a time: each has all gradients
            for key in found:
                off = distance(alone.values.get(key), other.values.get(key), EXACT)
                largest[key] = max(largest[key], off)
        return {key: off for key, off in found.items() if off > factor * largest[key]}

    @cached_property
    def _parts(self) -> list[Outcome]:
        """Each shard's outcome on the root."""
        return [self._trial.alone(self._conditions, k) for k in self._trial.active]

    def _causes(self, alone: Outcome, split: Outcome, found: dict[Key, float]) -> dict[str, str]:
        """Why values of each kind differ."""
        causes: dict[str, str] = {}
        kinds = {key.kind for key in found}
        if kinds & {"loss", "gradient"}:
            causes |= self._parameters_made(found) or self._of_gradients(alone, found)
        logs = [key for key in found if key.kind == "log"]
        if "whole batch" in causes:  # which mends the loss where it is logged, too
            logs = [key for key in logs if self._differs_from_loss(alone, key)]
        if logs:
            causes["logged value"] = _LOGGED.format(self._of_logs(alone, logs))
        for kind in ("output", "list"):
            keys = [key for key in found if key.kind == kind]
            names = _listed([f"output{key.name}" if kind == "output" else key.name for key in keys])
            if kind == "output" and self._is_padded(alone, keys):
                causes["shapes"] = _SHAPES.format(names)
            elif keys:
                is_call = kind == "output" and not self._trial.call.reports_loss
                causes[kind] = (_FORWARD if is_call else _OF_KIND[kind]).format(names)
        for kind in ("metric", "buffer", "parameter", "state", "logger", "option"):
            if keys := [key for key in found if key.kind == kind]:
                causes[kind] = _OF_KIND[kind].format(_listed([key.name for key in keys]))
        if found and not causes:
            causes["state"] = _APART
        may_mix = causes.keys() & {"whole batch", "output", "logged value"}
        if may_mix and self._trial.mixes_in_transfer():
            causes.pop("whole batch", None)
            causes = {"transfer hook": _TRANSFER, **causes}
        return causes

    def _differs_from_loss(self, alone: Outcome, key: Key) -> bool:
        return bool(distance(alone.loss, alone.values.get(key), self._trial.tolerance))

    def _parameters_made(self, found: dict[Key, float]) -> dict[str, str]:
        made = [
            key.name
            for key in found
            if key.kind == "gradient" and key.name not in self._trial.parameters
        ]
        return {"made in step": _MADE.format(_listed(made))} if made else {}

    def _of_gradients(self, alone: Outcome, found: dict[Key, float]) -> dict[str, str]:
        """Which weights make the shards' losses and gradients those of the batch."""
        if not self._trial.call.reports_loss:
            has_outputs = any(key.kind == "output" for key in found)
            return (
                {} if has_outputs else {"whole batch": _FORWARD.format("The backward of forward")}
            )
        sums, means = [loss_weights(self._sizes, how) for how in ("sum", "mean")]
        is_sum = self._loss_reduction == "sum"
        if self._is_made_of(sums, alone):
            return {} if is_sum else {"sum": _SUM}
        if self._is_made_of(means, alone):
            if is_sum:
                return {"mean": _MEAN}
            return {"mean": _NO_ITEMS} if self._trial.call.counts_items else {}
        # A mean over nothing is NaN, and weighs nothing.
        finite = [part for part in self._parts if part.is_finite]
        fitted = dict(zip(map(id, finite), fitted_weights(alone, finite), strict=True))
        # A mean over anything weighs by shares: at least 0, and 1 in sum.
        counts = [max(fitted.get(id(part), 0.0), 0.0) for part in self._parts]
        weights = [count / (sum(counts) or 1.0) for count in counts]
        if self._is_made_of(weights, alone):
            return {"items": _ITEMS.format(_shares(weights), _shares(means))}
        return {"whole batch": _WHOLE_BATCH}

    def _is_made_of(self, weights: Sequence[float], alone: Outcome) -> bool:
        joint = weighted_sum(self._parts, weights)
        kinds = ("loss", "gradient")
        own = Outcome({key: value for key, value in alone.values.items() if key.kind in kinds})
        own.gradient_norm = alone.gradient_norm
        return not differing(own, joint, self._trial.tolerance)

    def _of_logs(self, alone: Outcome, keys: Sequence[Key]) -> str:
        """Names of logged values, with what they are where that shows."""
        names = []
        for key in keys:
            parts = [part.values.get(key) for part in self._parts]
            numbers = [float(p) for p in parts if isinstance(p, torch.Tensor | float | int)]
            whole = alone.values.get(key)
            is_sum = (
                len(numbers) == len(parts)
                and isinstance(whole, torch.Tensor | float | int)
                and not distance(whole, sum(numbers), self._trial.tolerance)
            )
            names.append(repr(key.name) + (", a sum" if is_sum else ""))
        return "; ".join(names[:5]) + "; ..." * (len(names) > 5)

    def _is_padded(self, alone: Outcome, keys: Sequence[Key]) -> bool:
        """Whether shards differ in a shape beside the dimension of samples."""
        dim = self._trial.call.engine.row_rules.dim
        for key in keys:
            values = [outcome.values.get(key) for outcome in (alone, *self._parts)]
            shapes = [tuple(v.shape) for v in values if isinstance(v, torch.Tensor)]
            if len({shape[:dim] + shape[dim + 1 :] for shape in shapes}) > 1:
                return True
        return False


def _shares(weights: Sequence[float]) -> str:
    return ", ".join(f"{weight:.3f}" for weight in weights)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)


_Both = tuple[Outcome, Outcome, dict[Key, float]]
"""Outcomes alone and split, and the distances of the values that differ."""


def _is_result(key: Key) -> bool:
    """Whether it has to be the same in every run; a logged time, say, is not."""
    return key.kind in ("loss", "gradient", "output")


_ORDER = (
    *("loss", "gradient", "log", "metric", "output", "list", "state", "buffer", "parameter"),
    "logger",
    "option",
)
_SUM = 'The loss is a sum over samples, not a mean: use loss_reduction="sum".'
_MEAN = 'The loss is a mean over samples, not a sum: use loss_reduction="mean".'
_NO_ITEMS = (
    "The loss is a mean over samples, and not over the num_items that the step returns: leave them "
    "out."
)
_ITEMS = (
    "The loss is a mean over something else than samples, such as valid tokens: the shards have "
    "the weights {} in it; by number of samples they would have {}. Return "
    '{{"loss": loss, "num_items": n}} from training_step, with the number n of what it is a mean '
    "over."
)
_WHOLE_BATCH = (
    "The loss is not a mean over samples. It looks at the whole batch at once (as Dice, "
    "contrastive and triplet losses and mixup do) or depends on how many samples there are: use "
    'mode="forward".'
)
_FORWARD = (
    "{} looks at more than one sample at a time, or is not one row per sample. Compute it outside "
    "of forward, from what forward returns for the whole batch; or say how it is joined by "
    'gather_overrides={{"name": "sum"}}.'
)
_LOGGED = (
    "Logged values that are not means over samples: {}. Log a torchmetrics metric, or pass what "
    'the value is: self.log(..., reduce_fx="sum") for a sum, batch_size=n for a mean over n items.'
)
_OF_KIND = {
    "output": (
        "{} is not one row per sample, or looks at other samples of the batch. Return rows, say "
        'how they are joined by gather_overrides={{"name": "cat"}}, or use mode="forward".'
    ),
    "list": (
        "The items that the step leaves in {} are not rows or means over samples. Append rows, or "
        "say how items are joined by gather_overrides."
    ),
    "metric": (
        "{} sees other values than on one device. Update it with what belongs to single samples."
    ),
    "buffer": (
        "Buffers that the step writes ({}) keep what the first replica left. Write what follows "
        'from the whole batch: gather it with self.all_gather first, use buffers="mean", or use '
        'mode="forward".'
    ),
    "parameter": (
        "The step writes to parameters ({}), once on every replica. Write to them in "
        "on_train_batch_end or on_before_zero_grad, which run once."
    ),
    "state": (
        "All replicas share the object that the step writes to ({}), and each of them writes. "
        "Write to it in on_train_batch_end, or append to a list on self."
    ),
    "logger": (
        "The step calls self.logger itself ({}), once on every replica. Return what it shows and "
        "log it in the batch_end hook, or use self.log."
    ),
    "option": (
        "The step, or a scheduler that it steps, changes options of an optimizer ({}), once on "
        "every replica. Change them in on_train_batch_start, let configure_optimizers return the "
        'scheduler, or use mode="forward".'
    ),
}
_APART = (
    "Run one by one from the same state, the shards add up to the batch; run as replicas they do "
    "not. The step writes to something that the replicas share, or keeps something from call to "
    "call."
)
_SHAPES = (
    "{} has a shape that depends on the other samples of a shard (padded to the longest, say). "
    "Pad to a fixed length, or return one item per sample in a list."
)
_TRANSFER = (
    "on_after_batch_transfer or transfer_batch_to_device looks at more than one sample at a time, "
    "and sees each shard alone. Do that in on_before_batch_transfer, which has the whole batch."
)
_MADE = (
    "The step makes parameters ({}): every replica makes its own. Make them in __init__ or "
    "configure_model."
)
_BATCH_NORM = (
    "batch norm in training normalizes each shard by its own statistics, as in DDP ({}); "
    "Trainer(sync_batchnorm=True) takes those of the whole batch."
)
_RANDOM = (
    "random numbers ({}) are drawn by each replica for its own samples, so that numbers differ by "
    "chance, as from seed to seed."
)
_NOT_REPEATABLE = (
    "The step differs from run to run on one device, with the same seeds: it keeps state or draws "
    "random numbers where they cannot be reached from the module. Use Trainer(deterministic=True), "
    "and seed what it draws from."
)
