"""In which words the check reports what it has found."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from lightning_dp.parallel.checks import short_repr
from lightning_dp.parallel.split import Sizes

log = logging.getLogger("lightning_dp")

NAMES = {
    "loss": "the loss",
    "gradient": "the gradient of {}",
    "log": "self.log({!r})",
    "output": "output{}",
    "list": "the items of {}",
    "state": "{}",
    "attribute": "{}",
    "metric": "{}",
    "buffer": "buffer {}",
    "parameter": "parameter {}",
    "logger": "calls of self.logger.{}",
}
"""The kinds of values that are compared, as a message names and orders them."""


class Key(NamedTuple):
    """One value of a call: its kind, one of `NAMES`, and which of that kind."""

    kind: str
    name: str = ""


Values: TypeAlias = dict[Key, Any]
"""All values of one call, on the CPU; a gradient is None where a parameter has none."""
LOSS = Key("loss")
UNCHANGED = "not set"
"""Stands for a value that a call does not have."""

KNOWN = ("batch norm", "random")
"""Causes that every data-parallel trainer has: one line at INFO, no warning."""
_SHARED = "All replicas write to what they share ({}). Write to it in on_train_batch_end, once."
WHY = {
    "batch norm": (
        "batch norm in training normalizes each shard by its own statistics, as in DDP ({}); "
        "Trainer(sync_batchnorm=True) takes those of the whole batch."
    ),
    "random": (
        "random numbers ({}) are drawn by each replica for its own samples, so that numbers differ "
        "by chance, as from seed to seed."
    ),
    "not repeatable": (
        "The step differs from run to run on one device: it keeps state, or draws from generators "
        "that the module does not hold. Seed these, and use Trainer(deterministic=True)."
    ),
    "made in step": (
        "Every replica makes parameters of its own ({}). Make them in __init__ or configure_model."
    ),
    "sum": 'The loss is a sum over samples, not a mean: use loss_reduction="sum".',
    "mean": 'The loss is a mean over samples: leave out loss_reduction="sum", or num_items.',
    "items": (
        "The loss is a mean over something else than samples, such as valid tokens: the shards "
        "weigh {} in it, by number of samples {}. Return "
        '{{"loss": loss, "num_items": n}}, with the number n of what it is a mean over.'
    ),
    "whole batch": (
        "The loss is not a mean over samples. It looks at the whole batch at once (as Dice, "
        "contrastive and triplet losses and mixup do, in a transfer hook too) or depends on its "
        'size: use mode="forward".'
    ),
    "forward": (
        "{} looks at more than one sample at a time, or is not one row per sample. Compute it from "
        'what forward returns, or say how it is joined by gather_overrides={{"name": "sum"}}.'
    ),
    "logged value": (
        "Logged values that are not means over samples: {}. Log a torchmetrics metric, or pass "
        'self.log(..., reduce_fx="sum") for a sum, or batch_size=n for a mean over n items.'
    ),
    "output": (
        "{} is not one row per sample, or depends on other samples of the batch (padded to the "
        "longest, say). Return rows, or one item per sample in a list, say how outputs are joined "
        'by gather_overrides={{"name": "cat"}}, or use mode="forward".'
    ),
    "list": (
        "The items that the step leaves in {} are not rows or means over samples. Append rows, or "
        "say how items are joined by gather_overrides."
    ),
    "attribute": "Of {} the first replica's value is kept. Return it, to have it joined.",
    "metric": (
        "A metric has seen other samples ({}): some shards leave it out (if len(x) > 1, say), or "
        "pass what is not of their samples. Update it for every shard, with one row per sample."
    ),
    "buffer": (
        "Buffers that the step writes ({}) keep what the first replica left. Write what follows "
        'from the whole batch (self.all_gather), or use buffers="mean" or mode="forward".'
    ),
    "buffer in forward": (
        "Buffers that forward writes ({}) keep what the first replica left. Write what follows "
        'from the whole batch outside of forward, from what it returns, or use buffers="mean".'
    ),
    **dict.fromkeys(("parameter", "state", "logger"), _SHARED),
    "replicas": (
        "Run one by one from the same state, the shards add up to the batch; as replicas they do "
        "not. The step writes to what replicas share, or keeps something from call to call."
    ),
}
"""Each cause of a difference, with what to write instead."""


@dataclass
class Report:
    """What the comparison of a call on one device and split over several has found.

    Attributes:
        option: the option that asks for the check, for messages.
        name: what was called.
        sizes: how many samples each device had.
        differences: the values that differ beyond rounding and chance: on one device, and split.
        causes: why, each with what to write instead; those in `KNOWN` are no mistake.
        skipped: why nothing was compared; empty if it was.
        raised: whether that was an error in the check.
    """

    option: str
    name: str
    sizes: Sizes = ()
    differences: dict[Key, tuple[Any, Any]] = field(default_factory=dict)
    causes: dict[str, str] = field(default_factory=dict)
    skipped: str = ""
    raised: bool = False

    @property
    def is_same(self) -> bool:
        """Whether both gave the same numbers, but for what every data-parallel trainer has."""
        return not (self.skipped or self.differences)

    @property
    def known(self) -> list[str]:
        """The causes that are no mistake."""
        return [text for cause, text in self.causes.items() if cause in KNOWN]

    def __str__(self) -> str:
        """The message, one line or one with a list."""
        if self.skipped:
            return f"{self.option}: {self.name} was not compared with one device: {self.skipped}"
        used = [size for size in self.sizes if size]
        cut = f"the first {sum(used)} samples, split as {', '.join(map(str, used))}"
        if not self.differences:
            but = "".join(f", but for this: {text.rstrip('.')}" for text in self.known)
            return f"{self.option}: {self.name} gives the numbers of one device on {cut}{but}."
        lines = [f"{self.option}: on {cut}, {self.name} does not give the numbers of one device."]
        lines += [text for cause, text in self.causes.items() if cause not in KNOWN]
        for kind, template in NAMES.items():
            of_kind = [item for item in self.differences.items() if item[0].kind == kind]
            for key, (alone, split) in of_kind[:1]:
                values = f"{_short(alone)} on one device, {_short(split)} on {len(used)} devices"
                more = f"; and {len(of_kind) - 1} more" if len(of_kind) > 1 else ""
                lines.append(f"{template.format(key.name)}: {values}{more}")
        return "\n- ".join(lines + self.known) + f"\n({self.option}=False turns this check off.)"


def announce(report: Report, *, asked: bool, info: Callable[[str], object] = log.info) -> None:
    """Warns of a difference; says the rest at INFO or DEBUG.

    Success is worth a line at INFO if the user has `asked` for the check.
    """
    if report.differences:
        warnings.warn(str(report), stacklevel=3)
    elif asked or report.raised or report.known:
        info(str(report))
    else:
        log.debug("%s", report)


def _short(value: Any) -> str:
    """A value, at most as long as a few words."""
    if isinstance(value, Tensor) and value.numel() > 1:
        norm = f", norm {float(value.double().norm()):.9g}" if value.is_floating_point() else ""
        return f"shape {tuple(value.shape)}{norm}"
    if isinstance(value, list | tuple | dict):
        return f"a {type(value).__name__} of {len(value)}"
    if value is UNCHANGED:
        return str(value)
    number = value.item() if isinstance(value, Tensor) and value.numel() else value
    return f"{number:.9g}" if isinstance(number, float) else short_repr(number)
