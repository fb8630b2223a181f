"""Why a split call differs from that of one device: found out by experiment.

Batch norm and random numbers, which differ in every data-parallel trainer, are switched off one
after the other, and both calls run again. For differences that remain, single shards run on the
root: their losses and gradients show which weights give those of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from lightning_dp.first_step.compare import (
    UNCHANGED,
    Key,
    Outcome,
    differing,
    distance,
    fitted_weights,
    weighted_sum,
)
from lightning_dp.first_step.report import NAMES, Difference, Report
from lightning_dp.first_step.runner import Call, CallRunner, muted
from lightning_dp.first_step.snapshot import NotChecked
from lightning_dp.parallel.reduce import LossReduction, loss_weights

_ROUNDING_FACTOR = 30.0
"""A difference is rounding if it is at most this times that from slightly perturbed parameters."""
_CHANCE_FACTOR = 3.0
"""A difference is chance if it is at most this times that between seeds."""


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
                runner = CallRunner(call)
                try:
                    return _Comparison(runner, loss_reduction).report(report)
                finally:
                    runner.end()
            finally:
                call.engine.close()
        except NotChecked as reason:
            return replace(report, skipped=str(reason))
        except Exception as error:
            text = f"the check raised {type(error).__name__}: {error}"
            return replace(report, skipped=text, raised=True)


class _Comparison:
    """One comparison, and the experiments that a difference asks for.

    `_alone`, `_split` and `_found` are of the latest experiment, under `_options`: both outcomes
    and the distances of the values that differ. `_causes` are those found so far.
    """

    def __init__(self, runner: CallRunner, loss_reduction: LossReduction) -> None:
        self._runner, self._call = runner, runner.call
        self._is_sum = loss_reduction == "sum"
        self._options: dict[str, bool] = {}
        self._causes: dict[str, str] = {}
        self._run_both()
        if not self._alone.is_finite:
            raise NotChecked("its loss or gradient is not finite on the root alone.")

    def _run_both(self, **options: bool) -> None:
        self._options |= options
        self._alone = self._runner.run(**self._options)
        self._split = self._runner.run(split=True, **self._options)
        self._found = differing(self._alone, self._split, self._runner.eps)

    def report(self, empty: Report) -> Report:
        """Where both calls differ, looks for the causes."""
        if self._found:
            self._switch_off_what_is_known()
        if self._found and "not repeatable" not in self._causes:
            perturbed = (self._runner.run(perturbed=i, **self._options) for i in (1, 2, 3))
            self._keep_beyond(perturbed, _ROUNDING_FACTOR)
            if self._found:
                self._name_causes()
        values = self._alone.values, self._split.values
        differences = [
            Difference(key, *(of.get(key, UNCHANGED) for of in values)) for key in self._in_order()
        ]
        return replace(empty, differences=differences, causes=self._causes)

    def _in_order(self) -> list[Key]:
        return sorted(self._found, key=lambda key: list(NAMES).index(key.kind))

    def _name(self, cause: str, *names: str, sentence: str = "") -> None:
        self._causes[cause] = _WHY[sentence or cause].format(*names)

    def _keep_beyond(self, others: Iterable[Outcome], factor: float) -> None:
        """Keeps differences above `factor` times the largest among other outcomes of `alone`."""
        largest = dict.fromkeys(self._found, 0.0)
        for other in others:
            for key in largest:
                off = distance(self._alone.values.get(key), other.values.get(key))
                largest[key] = max(largest[key], off)
        self._found = {k: off for k, off in self._found.items() if off > factor * largest[k]}

    def _switch_off_what_is_known(self) -> None:
        """Runs both calls again with batch norm in eval mode, then with constant random draws.

        Keeps the differences that remain; names "batch norm", "random" or "not repeatable".
        """
        runner = self._runner
        runner.run(constant_draws=True)
        draws = runner.draws
        runner.computes_in(draws.dtypes)
        unstable = differing(self._alone, runner.run(), runner.eps)
        if any(k.kind in ("loss", "gradient", "output") for k in unstable.keys() & self._found):
            self._name("not repeatable")
            return
        self._found = differing(self._alone, self._split, runner.eps)
        self._found = {k: off for k, off in self._found.items() if k not in unstable}
        if self._found and runner.norms:
            before = self._found
            self._run_both(norms_off=True)
            found = self._found
            if found.keys() != before.keys() or any(found[k] < before[k] / 2 for k in found):
                self._name("batch norm", _listed(list(runner.norms)))
        if self._found:
            self._without_chance(list(draws.names), is_controlled=not draws.uncontrolled)

    def _without_chance(self, drawn: Sequence[str], *, is_controlled: bool) -> None:
        """Drops differences that random numbers explain, and names the cause "random"."""
        # Python and NumPy draws depend on the number of samples if a shard leaves these generators
        # in another state than the whole batch does. Otherwise every replica draws what the root
        # draws, because all start from the same seed.
        states = []
        for shard in (None, self._runner.active[0]):
            self._runner.run(shard=shard, **self._options)
            states.append(self._runner.python_state)
        draws_for_each_sample = states[0] != states[1]
        if not drawn and not draws_for_each_sample:
            return
        plain = self._alone, self._split, self._found
        self._run_both(constant_draws=True)
        if not self._alone.is_finite:  # divided by a deviation of 0, say
            self._alone, self._split, self._found = plain
            self._options["constant_draws"] = is_controlled = False
        if self._found and (draws_for_each_sample or not is_controlled):
            others = (self._runner.run(seed=seed, **self._options) for seed in range(1, 9))
            self._keep_beyond(others, _CHANCE_FACTOR)
        if not (self._found and drawn == ["randperm"]):  # pairs that differ are no chance
            self._name("random", ", ".join(drawn) or "numpy's or Python's")

    # Differences that remain

    def _name_causes(self) -> None:
        """Names a cause for each kind of value that differs."""
        before = len(self._causes)
        keys = {kind: list(of) for kind, of in groupby(self._in_order(), lambda key: key.kind)}
        if "loss" in keys or "gradient" in keys:
            if self._call.reports_loss:
                self._name_cause_of_loss()
            elif "output" not in keys:
                self._name("whole batch", "The backward of forward", sentence="forward")
        if "whole batch" in self._causes:  # a loss that is logged as well has its cause already
            loss, eps, values = self._alone.loss, self._runner.eps, self._alone.values
            keys["log"] = [k for k in keys.get("log", ()) if distance(loss, values.get(k), eps)]
        for kind, of_kind in keys.items():
            if kind == "output":
                sentence = kind if self._call.reports_loss else "forward"
                self._name(kind, _listed([f"output{k.name}" for k in of_kind]), sentence=sentence)
            elif of_kind and kind not in ("loss", "gradient"):
                cause = "logged value" if kind == "log" else kind
                self._name(cause, _listed([key.name for key in of_kind]))
        if len(self._causes) == before:
            self._name("replicas")

    def _name_cause_of_loss(self) -> None:
        """Looks for weights whose sum of the shards' losses and gradients is that of the batch."""
        parts = [self._runner.run(shard=k, **self._options) for k in self._runner.active]
        sizes = [size for size in self._call.sizes if size]
        sums, means = loss_weights(sizes, "sum"), loss_weights(sizes, "mean")
        fitted = _shares_in(self._alone, parts)
        compared = {k: v for k, v in self._alone.values.items() if k.kind in ("loss", "gradient")}

        def is_made_of(weights: Sequence[float]) -> bool:
            return not differing(Outcome(compared), weighted_sum(parts, weights), self._runner.eps)

        if is_made_of(sums):
            if not self._is_sum:
                self._name("sum")
        elif is_made_of(means):
            if self._is_sum or self._call.counts_items:
                self._name("mean")
        elif is_made_of(fitted):
            self._name("items", *(", ".join(f"{w:.3f}" for w in of) for of in (fitted, means)))
        else:
            self._name("whole batch")


def _shares_in(whole: Outcome, parts: Sequence[Outcome]) -> list[float]:
    """The weights of the shards if the loss is a mean over items: at least 0, with sum 1."""
    finite = [part for part in parts if part.is_finite]  # a mean over nothing is NaN
    fitted = iter(fitted_weights(whole, finite))
    counts = [max(next(fitted), 0.0) if part.is_finite else 0.0 for part in parts]
    return [count / (sum(counts) or 1.0) for count in counts]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)


_WHY = {
    "sum": 'The loss is a sum over samples, not a mean: use loss_reduction="sum".',
    "mean": "The loss is a mean over samples: leave out num_items and loss_reduction.",
    "items": (
        "The loss is a mean over something else than samples, such as valid tokens: the shards "
        "have the weights {} in it; by number of samples they would have {}. Return "
        '{{"loss": loss, "num_items": n}}, with the number n of what it is a mean over.'
    ),
    "whole batch": (
        "The loss is not a mean over samples. It looks at the whole batch at once (as Dice, "
        "contrastive and triplet losses and mixup do) or depends on how many samples there are: "
        'use mode="forward". What on_after_batch_transfer mixes, on_before_batch_transfer can.'
    ),
    "forward": (
        "{} looks at more than one sample at a time, or is not one row per sample. Compute it "
        "outside of forward, from what forward returns for the whole batch; or say how it is "
        'joined by gather_overrides={{"name": "sum"}}.'
    ),
    "logged value": (
        "Logged values that are not means over samples: {}. Log a torchmetrics metric, or pass "
        'self.log(..., reduce_fx="sum") for a sum, batch_size=n for a mean over n items.'
    ),
    "output": (
        "{} is not one row per sample, or looks at other samples of the batch (is padded to the "
        'longest, say). Return rows, say how they are joined by gather_overrides={{"name": '
        '"cat"}}, or use mode="forward".'
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
        'from the whole batch (self.all_gather), use buffers="mean", or use mode="forward".'
    ),
    "parameter": (
        "The step writes to parameters ({}), once on every replica. Write to them in "
        "on_train_batch_end or on_before_zero_grad, which run once."
    ),
    "state": (
        "All replicas share the object that the step writes to ({}), and each of them writes. "
        "Write to it in on_train_batch_end, or append to a list on self."
    ),
    "replicas": (
        "Run one by one from the same state, the shards add up to the batch; run as replicas they "
        "do not. The step writes to something that the replicas share, keeps something from call "
        "to call, or makes parameters (make them in __init__ or configure_model)."
    ),
    "logger": (
        "The step calls self.logger itself ({}), once on every replica. Return what it shows and "
        "log it in the batch_end hook, or use self.log."
    ),
    "option": (
        "The step, or a scheduler that it steps, changes options of an optimizer ({}), once on "
        "every replica. Change them in on_train_batch_start, or let configure_optimizers return "
        "the scheduler."
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
        "draws random numbers where they cannot be reached from the module. Seed what it draws "
        "from, and use Trainer(deterministic=True)."
    ),
}
"""Each cause, with what to write instead."""
