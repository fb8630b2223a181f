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

from lightning_dp.parallel.check.compare import (
    UNCHANGED,
    Key,
    Outcome,
    differing,
    distance,
    fitted_weights,
    weighted_sum,
)
from lightning_dp.parallel.check.report import NAMES, Difference, Report
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
    make_call: Callable[[], Call], report: Report, loss_reduction: LossReduction = "mean"
) -> Report:
    """Runs a call alone and split, compares, looks for the cause, and puts everything back.

    An error in the check is reported and does not reach the caller: the real call will raise it.

    Args:
        make_call: makes the call and its engine.
        report: the report of a call without differences.
        loss_reduction: the strategy's.
    """
    with muted():
        try:
            call = make_call()
            try:
                trial = Trial(call)
                try:
                    return _Comparison(trial, loss_reduction).report(report)
                finally:
                    trial.end()
            finally:
                call.engine.close()
        except NotChecked as reason:
            return replace(report, skipped=str(reason))
        except Exception as error:
            text = f"the check raised {type(error).__name__}: {described(error, str)}"
            return replace(report, skipped=text, raised=True)


class _Comparison:
    """One comparison, and the experiments that a difference asks for.

    `_alone`, `_split` and `_found` are of the latest experiment, under `_conditions`: both outcomes
    and the distances of the values that differ. `_causes` are those found so far.
    """

    def __init__(self, trial: Trial, loss_reduction: LossReduction) -> None:
        self._trial, self._call = trial, trial.call
        self._is_sum = loss_reduction == "sum"
        self._causes: dict[str, str] = {}
        self._run_both(Conditions())

    def _run_both(self, conditions: Conditions) -> None:
        self._conditions = conditions
        self._alone = self._trial.alone(conditions)
        if conditions == Conditions() and not self._alone.is_finite:
            raise NotChecked("its loss or gradient is not finite on the root alone.")
        self._split = self._trial.split(conditions)
        self._found = differing(self._alone, self._split, self._trial.eps)

    def report(self, empty: Report) -> Report:
        """Where both calls differ, looks for the causes."""
        if self._found:
            self._look_for_causes()
        differences = [
            Difference(
                k, self._alone.values.get(k, UNCHANGED), self._split.values.get(k, UNCHANGED)
            )
            for k in sorted(self._found, key=lambda key: list(NAMES).index(key.kind))
        ]
        return replace(empty, differences=differences, causes=self._causes)

    def _look_for_causes(self) -> None:
        trial = self._trial
        first = trial.alone(Conditions(one_number_per_draw=True))
        draws = trial.draws
        if trial.computes_in(draws.dtypes):  # autocast
            self._found = differing(self._alone, self._split, trial.eps)
        unstable = differing(self._alone, trial.alone(), trial.eps)
        if any(_is_result(key) and key in self._found for key in unstable):
            self._causes["not repeatable"] = _WHY["not repeatable"]
            return
        self._found = {k: off for k, off in self._found.items() if k not in unstable}
        if self._found and trial.norms:
            before = self._found
            self._run_both(Conditions(norms_off=True))
            found = self._found
            if found.keys() != before.keys() or any(found[k] < before[k] / 2 for k in found):
                self._name("batch norm", _listed(list(trial.norms)))
        if self._found:
            other = trial.alone(Conditions(one_number_per_draw=True, python_seed=1))
            if draws.names or differing(first, other, trial.eps).keys() - unstable.keys():
                self._without_chance(list(draws.names), is_controlled=not draws.uncontrolled)
        if self._found:  # up to 30 times what a change of parameters by one rounding error makes
            perturbed = (replace(self._conditions, perturbed=i) for i in (1, 2, 3))
            self._keep_beyond(perturbed, _ROUNDING_FACTOR)
        if self._found:
            self._name_causes()

    def _without_chance(self, drawn: list[str], *, is_controlled: bool) -> None:
        """Both calls with random numbers that do not depend on how many samples there are."""
        plain, runs = self._conditions, []
        # One number may hide a difference (a path that is dropped) or divide by a deviation of 0.
        for seed in range(3):
            self._run_both(replace(plain, one_number_per_draw=True, seed=seed))
            runs.append((self._conditions, self._alone, self._split, self._found))
        usable = [run for run in runs if run[1].is_finite]
        if usable:
            best = max(usable, key=lambda run: len(run[3]))
            self._conditions, self._alone, self._split, self._found = best
        if self._found and not (usable and is_controlled and not self._draws_for_each_sample()):
            others = (replace(self._conditions, seed=seed) for seed in range(4, 12))
            self._keep_beyond(others, _CHANCE_FACTOR)
        if not (self._found and drawn == ["randperm"]):  # pairs that differ are no chance
            self._name("random", ", ".join(drawn) or "numpy's or Python's")

    def _draws_for_each_sample(self) -> bool:
        """Whether the call draws random numbers of Python or NumPy for each sample.

        If not, each replica draws the same ones as the root alone: its generators start alike.
        """
        states = []
        for shard in (None, self._trial.active[0]):
            self._trial.alone(replace(self._conditions, shard=shard))
            states.append(self._trial.python_state)
        return states[0] != states[1]

    def _keep_beyond(self, others: Iterable[Conditions], factor: float) -> None:
        """Keeps differences above `factor` times the largest from `alone` under `others`."""
        largest = dict.fromkeys(self._found, 0.0)
        for conditions in others:
            other = self._trial.alone(conditions)
            for key in largest:
                off = distance(self._alone.values.get(key), other.values.get(key))
                largest[key] = max(largest[key], off)
        self._found = {k: off for k, off in self._found.items() if off > factor * largest[k]}

    # What is the call's own

    def _name(self, cause: str, *names: str, sentence: str = "") -> None:
        self._causes[cause] = _WHY[sentence or cause].format(*names)

    def _name_causes(self) -> None:
        """Why values of each kind differ."""
        before = len(self._causes)
        keys: dict[str, list[Key]] = {}
        for key in self._found:
            keys.setdefault(key.kind, []).append(key)
        if "loss" in keys or "gradient" in keys:
            self._name_cause_of_loss(keys)
        if "whole batch" in self._causes:  # which mends the loss where it is logged, too
            alone, eps = self._alone, self._trial.eps
            logs = [
                k for k in keys.pop("log", []) if distance(alone.loss, alone.values.get(k), eps)
            ]
            keys |= {"log": logs} if logs else {}
        for kind, names in keys.items():
            if kind in ("loss", "gradient"):
                continue
            cause = "logged value" if kind == "log" else kind
            listed = _listed([f"output{k.name}" if kind == "output" else k.name for k in names])
            if kind == "output" and self._is_padded(names):
                self._name("shapes", listed)
            elif kind == "output" and not self._call.reports_loss:
                self._name(cause, listed, sentence="forward")
            else:
                self._name(cause, listed)
        if len(self._causes) == before:
            self._name("state", sentence="apart")
        may_mix = self._causes.keys() & {"whole batch", "output", "logged value"}
        if may_mix and self._trial.mixes_in_transfer():
            self._causes.pop("whole batch", None)
            self._causes = {"transfer hook": _WHY["transfer hook"], **self._causes}

    def _name_cause_of_loss(self, keys: dict[str, list[Key]]) -> None:
        """Which weights make the shards' losses and gradients those of the batch."""
        made = [k.name for k in keys.get("gradient", ()) if k.name not in self._trial.parameters]
        if made:
            self._name("made in step", _listed(made))
            return
        if not self._call.reports_loss:
            if "output" not in keys:
                self._name("whole batch", "The backward of forward", sentence="forward")
            return
        sizes = [size for size in self._call.sizes if size]
        sums, means = [loss_weights(sizes, how) for how in ("sum", "mean")]
        fitted = self._fitted()
        if self._is_made_of(sums):
            if not self._is_sum:
                self._name("sum")
        elif self._is_made_of(means):
            if self._is_sum:
                self._name("mean")
            elif self._call.counts_items:
                self._name("mean", sentence="no items")
        elif self._is_made_of(fitted):
            self._name("items", _shares(fitted), _shares(means))
        else:
            self._name("whole batch")

    @cached_property
    def _parts(self) -> list[Outcome]:
        """Each shard's outcome on the root."""
        return [self._trial.alone(replace(self._conditions, shard=k)) for k in self._trial.active]

    def _fitted(self) -> list[float]:
        """The shares of the shards in a mean over anything: at least 0, and 1 in sum."""
        finite = [part for part in self._parts if part.is_finite]  # a mean over nothing is NaN
        fitted = dict(zip(map(id, finite), fitted_weights(self._alone, finite), strict=True))
        counts = [max(fitted.get(id(part), 0.0), 0.0) for part in self._parts]
        return [count / (sum(counts) or 1.0) for count in counts]

    def _is_made_of(self, weights: Sequence[float]) -> bool:
        joint = weighted_sum(self._parts, weights)
        own = {k: v for k, v in self._alone.values.items() if k.kind in ("loss", "gradient")}
        return not differing(Outcome(own), joint, self._trial.eps)

    def _is_padded(self, keys: Sequence[Key]) -> bool:
        """Whether shards differ in a shape beside the dimension of samples."""
        dim = self._call.engine.row_rules.dim
        for key in keys:
            values = [outcome.values.get(key) for outcome in (self._alone, *self._parts)]
            shapes = [tuple(v.shape) for v in values if isinstance(v, torch.Tensor)]
            if len({shape[:dim] + shape[dim + 1 :] for shape in shapes}) > 1:
                return True
        return False


def _is_result(key: Key) -> bool:
    """Whether it has to be the same in every run; a logged time, say, is not."""
    return key.kind in ("loss", "gradient", "output")


def _shares(weights: Sequence[float]) -> str:
    return ", ".join(f"{weight:.3f}" for weight in weights)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)


_WHY = {
    "sum": 'The loss is a sum over samples, not a mean: use loss_reduction="sum".',
    "mean": 'The loss is a mean over samples, not a sum: use loss_reduction="mean".',
    "no items": (
        "The loss is a mean over samples, and not over the num_items that the step returns: leave "
        "them out."
    ),
    "items": (
        "The loss is a mean over something else than samples, such as valid tokens: the shards "
        "have the weights {} in it; by number of samples they would have {}. Return "
        '{{"loss": loss, "num_items": n}} from training_step, with the number n of what it is a '
        "mean over."
    ),
    "whole batch": (
        "The loss is not a mean over samples. It looks at the whole batch at once (as Dice, "
        "contrastive and triplet losses and mixup do) or depends on how many samples there are: "
        'use mode="forward".'
    ),
    "forward": (
        "{} looks at more than one sample at a time, or is not one row per sample. Compute it "
        "outside of forward, from what forward returns for the whole batch; or say how it is "
        'joined by gather_overrides={{"name": "sum"}}.'
    ),
    "logged value": (
        "Logged values that are not means over samples: {}. Log a torchmetrics metric, or pass "
        'what the value is: self.log(..., reduce_fx="sum") for a sum, batch_size=n for a mean over '
        "n items."
    ),
    "output": (
        "{} is not one row per sample, or looks at other samples of the batch. Return rows, say "
        'how they are joined by gather_overrides={{"name": "cat"}}, or use mode="forward".'
    ),
    "shapes": (
        "{} has a shape that depends on the other samples of a shard (padded to the longest, say). "
        "Pad to a fixed length, or return one item per sample in a list."
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
    "apart": (
        "Run one by one from the same state, the shards add up to the batch; run as replicas they "
        "do not. The step writes to something that the replicas share, or keeps something from "
        "call to call."
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
    "transfer hook": (
        "on_after_batch_transfer or transfer_batch_to_device looks at more than one sample at a "
        "time, and sees each shard alone. Do that in on_before_batch_transfer, which has the whole "
        "batch."
    ),
    "made in step": (
        "The step makes parameters ({}): every replica makes its own. Make them in __init__ or "
        "configure_model."
    ),
    "batch norm": (
        "batch norm in training normalizes each shard by its own statistics, as in DDP ({}); "
        "Trainer(sync_batchnorm=True) takes those of the whole batch."
    ),
    "random": (
        "random numbers ({}) are drawn by each replica for its own samples, so that numbers differ "
        "by chance, as from seed to seed."
    ),
    "not repeatable": (
        "The step differs from run to run on one device, with the same seeds: it keeps state or "
        "draws random numbers where they cannot be reached from the module. Use "
        "Trainer(deterministic=True), and seed what it draws from."
    ),
}
"""Each cause, with what to write instead."""
