"""The check of a module whose calls are spread, and the small part of a batch that it uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_dp.first_step.check import Call, check, copied, is_checking
from lightning_dp.first_step.compare import Report
from lightning_dp.first_step.snapshot import NotChecked, copy_to_cpu
from lightning_dp.parallel.apply import fewest_samples
from lightning_dp.parallel.engine import Engine
from lightning_dp.parallel.forward import ForwardParallel, SpreadCall
from lightning_dp.parallel.scatter import to_device, tree
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
        make_engine: makes an engine for the check alone, given how it splits; its replicas run one
            after another.
        option: the option that asks for the check, for messages.
        always: whether also modules are checked that `"auto"` leaves out.
        report: receives each report.
        around: what is recorded and put back around a call, see `Call`.
        attributes: whether those that a call binds on modules are compared.
        seen: the paths of the calls that were checked, and whether they trained.
    """

    make_engine: Callable[[Callable[[int], Sizes]], ForwardParallel]
    option: str
    always: bool
    report: Callable[[Report], object]
    around: dict[str, Any] = field(default_factory=dict)
    attributes: bool = True
    seen: set[tuple[str, bool]] = field(default_factory=set)

    def before(
        self, engine: ForwardParallel, path: str, num_args: int, arguments: dict[Any, Any]
    ) -> None:
        """Checks the call that is about to be made, if it is the first of its kind."""
        kind = (path, engine.is_training and torch.is_grad_enabled())
        # Within a checkpoint, whose hooks would run the call again in the check's backward.
        in_checkpoint = saved_tensors_functions() is not None
        if kind in self.seen or backward_id() >= 0 or in_checkpoint or is_checking():
            return
        report = Report(self.option, f"{path}.forward".lstrip("."))
        try:
            sizes, part = small_part(engine, arguments, path, always=self.always)
        except NotChecked as reason:
            report.skipped = str(reason)
        else:
            if not sizes:  # a later call may have more samples
                return
            report.sizes = sizes

            def make_call() -> Call:
                own = self.make_engine(lambda n: sizes)
                call = ForwardCall(path, num_args, own, sizes, part, **self.around)
                call.compares_attributes = self.attributes
                return call

            check(make_call, report)
        self.seen.add(kind)
        self.report(report)


class ForwardCall(Call):
    """The call of `forward` of a submodule; in training the backward of a weighted sum of outputs.

    Its batch are the arguments: the first `num_args` by position, the others by name.
    """

    engine: ForwardParallel
    reports_loss = False
    _returned: Any = None

    def __init__(
        self, path: str, num_args: int, engine: ForwardParallel, *args: Any, **kw: Any
    ) -> None:
        super().__init__(engine.module, engine, *args, **kw)
        self._path, self._num_args = path, num_args

    def to_root(self, batch: Any) -> Any:
        """Moves the arguments."""
        return to_device(batch, self.engine.devices[0])

    def on_root(self, batch: Any) -> Any:
        """Calls `forward`."""
        call = SpreadCall(self.engine, self._path, self._num_args, training=False)
        output = call.on_replica(self.module, batch)
        if self._returned is None:  # the first run is that of the whole batch
            self._returned = copy_to_cpu(output)
        return output

    def split(self, batch: Any) -> Any:
        """Spreads the call; outputs of one number, stacked to one per replica, are joined."""
        args = tuple(batch.pop(i) for i in range(self._num_args))
        output = self.engine.call(self._path, args, batch)
        sizes = torch.tensor([size for size in self.sizes if size], dtype=torch.float64)
        returned = dict(tree.places(self._returned))

        def joined(path: Any, leaf: Any) -> Any:
            one = returned.get(path)
            is_stacked = isinstance(leaf, Tensor) and leaf.shape == sizes.shape
            if not (is_stacked and isinstance(one, Tensor) and not one.shape):
                return leaf
            # As the user joins them: as a sum or as a mean, whichever is nearer to one device's.
            ways = leaf.sum(), (leaf * (sizes / sizes.sum()).to(leaf)).sum()
            return min(ways, key=lambda value: abs(complex(value) - complex(one)))

        leaves = iter([joined(path, leaf) for path, leaf in tree.places(output)])
        return tree.map_leaves(lambda _: next(leaves), output)

    def parse(self, output: Any) -> tuple[Tensor | None, Any]:
        """A weighted sum of all outputs.

        A plain sum would have zero gradients behind a softmax or layer norm.
        """
        terms = []
        trains = torch.is_grad_enabled() and any(m.training for m in self.module.modules())
        for leaf in tree.leaves(output) if trains else ():
            if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.layout is torch.strided:
                # Multiples of the golden ratio, modulo 1: even, and without random numbers.
                golden = torch.arange(1, leaf.numel() + 1, dtype=torch.float64) * 0.6180339887498949
                weights = (golden.frac() - 0.5).view(leaf.shape).to(leaf)
                terms.append((leaf * weights).sum().to(self.engine.output_device).double().real)
        return torch.stack(terms).sum() if terms else None, copy_to_cpu(output)


# The part of a batch that is checked


def small_part(engine: Engine, batch: Any, path: str = "", *, always: bool) -> tuple[Sizes, Any]:
    """How many of a batch's first samples each device gets in a check, and a copy of these samples.

    The sizes are empty if fewer than two devices would get any.

    Raises:
        NotChecked: if the check would be dear; if the batch cannot be cut, and the real call raises
            that error, too; or if something in it cannot be copied, such as an open file.
    """
    tensors = chain(engine.module.parameters(), engine.module.buffers())
    size = sum(t.numel() * t.element_size() for t in tensors if not is_lazy(t))
    if not always and engine.replicas.compiles:
        raise NotChecked("it has compiled parts, which would compile anew for the small batch.")
    if not always and size > MOST_BYTES:
        raise NotChecked(f"its tensors take {size / 2**30:.0f} GiB, and the check copies them.")
    policy = engine.planner.policy
    try:
        n = engine.count_samples(batch) or 0
        active = map(bool, policy(n)) if is_fixed(policy) else [True] * len(engine.devices)
        sizes = unequal_sizes(n, list(active), fewest_samples(engine.module, path)) if n else ()
        count = sum(sizes)
        if sum(map(bool, sizes)) < 2:
            return (), None
        part = batch if n == count else engine.cut(batch, (count, n - count))[0]
        return sizes, tree.map_leaves(copied, part)
    except Exception as error:
        raise NotChecked(f"{type(error).__name__}: {error}") from error


def unequal_sizes(batch_size: int, active: Sequence[bool], least: int = 1) -> Sizes:
    """About three samples per active replica, more for earlier ones, and at least `least` each.

    At least two each where there are enough, since a deviation over samples needs two.

    Example:
        >>> unequal_sizes(100, [True] * 4), unequal_sizes(5, [False, True, True])
        ((4, 3, 3, 2), (0, 3, 2))
    """
    k = sum(active)
    n = min(batch_size, SAMPLES * k)
    falling = iter(range(k + 1, 1, -1))
    wanted = weighted(n, [next(falling) if is_active else 0 for is_active in active])
    return fitted(wanted, least=max(least, 2 if n >= 2 * k else 1)) or ()
