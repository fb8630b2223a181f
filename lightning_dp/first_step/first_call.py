"""The check of a module whose calls are spread, and the small part of a batch that it uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_dp.first_step.call import Call, copied, is_checking
from lightning_dp.first_step.compare import check
from lightning_dp.first_step.report import Report
from lightning_dp.first_step.snapshot import copy_to_cpu
from lightning_dp.parallel.apply import fewest_samples
from lightning_dp.parallel.engine import Engine
from lightning_dp.parallel.forward import ForwardParallel, SpreadCall
from lightning_dp.parallel.scatter import tree
from lightning_dp.parallel.split import Sizes, fitted, is_fixed, weighted
from lightning_dp.parallel.torch_private import backward_id, saved_tensors_functions

SAMPLES = 3
"""Samples per replica in the part of the batch that is checked."""
MOST_BYTES = 4 * 2**30
"""Of parameters and buffers, which the check copies: above that `"auto"` leaves it out."""


@dataclass
class FirstCalls:
    """Checks the first call of each spread module, in training and otherwise.

    Attributes:
        make_engine: makes an engine for the check alone, whose replicas run one after another.
        option: the option that asks for the check, for messages.
        always: whether also modules are checked that `"auto"` leaves out.
        found: receives each report.
        around: arguments of `Call` for a module of a Trainer; empty without one. In a Trainer
            attributes that the forward binds are not compared: `ModuleState` warns of them.
        latest: the latest report.
        seen: the paths of the calls that were checked, and whether they trained.
    """

    make_engine: Callable[[], ForwardParallel]
    option: str
    always: bool
    found: Callable[[Report], object]
    around: dict[str, Any] = field(default_factory=dict)
    latest: Report | None = None
    seen: set[tuple[str, bool]] = field(default_factory=set)

    def before(
        self, engine: ForwardParallel, path: str, num_args: int, arguments: dict[Any, Any]
    ) -> None:
        """Checks the call that is about to be made, if it is the first of its kind."""
        kind = (path, engine.is_training and torch.is_grad_enabled())
        # Within a checkpoint, whose hooks would run the call again in the check's backward.
        in_checkpoint = saved_tensors_functions() is not None
        if kind in self.seen or backward_id() >= 0 or in_checkpoint or is_checking.get():
            return
        report = Report(self.option, f"{path}.forward".lstrip("."))
        part = small_part(report, engine, arguments, path, always=self.always)
        if not (report.sizes or report.skipped):  # a later call may have more samples
            return

        def make_call() -> Call:
            spread = self.make_engine()
            spread.asked = engine.asked
            return Call(
                spread,
                report.sizes,
                part,
                make=lambda: SpreadCall(spread, path, num_args, training=spread.is_training),
                parse=_parser(spread),
                reports_loss=False,
                compares_attributes=not self.around,
                **self.around,
            )

        check(make_call, report)
        self.seen.add(kind)
        self.latest = report
        self.found(report)


def _parser(engine: ForwardParallel) -> Callable[[Any], tuple[Tensor | None, list[Any]]]:
    """Returns a function that gives a weighted sum of an output's leaves, and these leaves.

    A plain sum would have zero gradients behind a softmax or layer norm.
    """
    of_root: dict[tree.Path, Any] = {}  # the output of the first run: of all samples

    def parse(output: Any) -> tuple[Tensor | None, list[Any]]:
        if not of_root:
            of_root.update(tree.places(copy_to_cpu(output)))
        sizes = engine.last_sizes
        leaves = [
            (path, _joined(leaf, of_root.get(path), sizes)) for path, leaf in tree.places(output)
        ]
        trains = torch.is_grad_enabled() and engine.is_training
        terms = []
        for _, leaf in leaves if trains else ():
            if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.layout is torch.strided:
                # Multiples of the golden ratio, modulo 1: even, and without random numbers.
                golden = torch.arange(1, leaf.numel() + 1, dtype=torch.float64) * 0.6180339887498949
                weights = (golden.frac() - 0.5).view(leaf.shape).to(leaf)
                terms.append((leaf * weights).sum().to(engine.output_device).double().real)
        return torch.stack(terms).sum() if terms else None, leaves

    return parse


def _joined(leaf: Any, one: Any, sizes: Sizes) -> Any:
    """Reduces a scalar output, which comes as one number per replica, to one number.

    Users take its sum or its mean: whichever is nearer to the number of the root alone, `one`.
    """
    used = torch.tensor([size for size in sizes if size], dtype=torch.float64)
    are_stacked = isinstance(leaf, Tensor) and leaf.shape == used.shape
    if not (are_stacked and isinstance(one, Tensor) and one.shape == (1,)):
        return leaf
    ways = leaf.sum(), (leaf * (used / used.sum()).to(leaf)).sum()
    return min(ways, key=lambda value: abs(complex(value) - complex(one)))


# The part of a batch that is checked


def small_part(report: Report, engine: Engine, batch: Any, path: str = "", *, always: bool) -> Any:
    """A copy of a batch's first samples; how many each device gets of them is in `report.sizes`.

    That stays empty if fewer than two devices would get any. `report.skipped` says if the check
    would be dear; if the batch cannot be cut, an error that the real call will raise, too; or if
    something in it cannot be copied, such as an open file.
    """
    tensors = chain(engine.module.parameters(), engine.module.buffers())
    size = sum(t.numel() * t.element_size() for t in tensors if not is_lazy(t))
    if not always and engine.replicas.compiles:
        report.skipped = "it has compiled parts, which would compile anew for the small batch."
    elif not always and size > MOST_BYTES:
        report.skipped = f"its tensors take {size / 2**30:.0f} GiB, and the check copies them."
    if report.skipped:
        return None
    policy = engine.planner.policy
    try:
        n = engine.count_samples(batch) or 0
        active = map(bool, policy(n)) if is_fixed(policy) else [True] * len(engine.devices)
        sizes = unequal_sizes(n, list(active), fewest_samples(engine.module, path)) if n else ()
        if sum(map(bool, sizes)) < 2:
            return None
        part = engine.cut(batch, (sum(sizes), n - sum(sizes)))[0]
        part, report.sizes = tree.map_leaves(copied, part), sizes
        return part
    except Exception as error:
        report.skipped = f"{type(error).__name__}: {error}"


def unequal_sizes(batch_size: int, active: Sequence[bool], least: int) -> Sizes:
    """About three samples per active replica, more for earlier ones, and at least `least` each.

    At least two each where there are enough, since a deviation over samples needs two.
    """
    k = sum(active)
    n = min(batch_size, SAMPLES * k)
    falling = iter(range(k + 1, 1, -1))
    wanted = weighted(n, [next(falling) if is_active else 0 for is_active in active])
    return fitted(wanted, least=max(least, 2 if n >= 2 * k else 1)) or ()
