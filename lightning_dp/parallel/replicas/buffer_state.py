"""State in buffers and frozen parameters: what a step leaves there, each replica its own.

Queues of keys, banks and centres are of the batch. The root keeps one replica's, so a buffer that
replicas leave different is told, by name and once; and so is a parameter that is not trained, such
as a codebook. Statistics of batch norm are known to differ, and are not looked at.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import torch
from torch import Tensor, nn

from lightning_dp.parallel.generated import context
from lightning_dp.parallel.replicas.buffers import Table, version_of
from lightning_dp.parallel.replicas.structure import ModuleStructure
from lightning_dp.parallel.replicas.untracked_writes import LOOKS
from lightning_dp.parallel.torch_private import BatchNorm, buffer_table, parameter_table

Place: TypeAlias = tuple[int, str]
"""The number of a module, and a name."""

_PLAIN = (Tensor, nn.Parameter)
_NORMS = (BatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_LOOKS_AT_VALUES = 2
"""So many looks at first compare all values: a write through `.data` does not show elsewhere."""


def keeps_state(module: nn.Module) -> bool:
    """Whether buffers of a module may be state of a batch, and are not known to be of a shard."""
    return bool(buffer_table(module)) and not isinstance(module, _NORMS)


class BufferState:
    """Notices buffers and parameters that steps leave different on the replicas.

    If floating buffers become their means in training, these may differ. Parameters are looked at
    where a step has written to one that it does not train. At `positions` are the modules that have
    such.
    """

    def __init__(self, root: nn.Module, means: bool) -> None:
        self._root = root
        self._means = means
        self._told: set[str] = set()

    def follow(
        self,
        structure: ModuleStructure,
        submodules: Sequence[Sequence[nn.Module]],
        tables: Sequence[Sequence[Table]],
    ) -> None:
        """Looks at other replicas from now on: of the root's modules, and these have such buffers.

        What is apart has rules of its own.
        """
        self._steps = Counter[bool]()  # of training, and others
        self._submodules, self._tables = submodules, [structure.buffer_tables, *tables]
        own = [(j, m) for j, m in enumerate(structure.modules) if id(m) not in structure.apart]
        self._with_buffers = [j for j, module in own if keeps_state(module)]
        self._with_frozen = [j for j, module in own if _frozen(module)]
        self.positions = [*self._with_buffers, *self._with_frozen]

    def noticed(self, active: Sequence[int], training: bool) -> AbstractContextManager[None]:
        """What surrounds a step, of training or not.

        Nothing, if it is not the time to look.
        """
        self._steps[training] += 1
        steps = self._steps[training]
        is_time = steps <= LOOKS or not steps % LOOKS
        return self._looked_at(active, training) if is_time and len(active) > 1 else nullcontext()

    @context
    def _looked_at(self, active: Sequence[int], training: bool) -> Iterator[None]:
        before, frozen = self._marks(active), self._marks_of_frozen(active)
        yield
        if self._steps[training] <= _LOOKS_AT_VALUES or self._marks(active) != before:
            self._compare(active, means=training and self._means)
        after = self._marks_of_frozen(active)
        self._compare_frozen(
            active, [at for at in frozen if after.get(at, frozen[at]) != frozen[at]]
        )

    @torch.no_grad()
    def _compare(self, active: Sequence[int], *, means: bool) -> None:
        """Warns of buffers that the step has left different, where they become no means."""
        first, *others = active
        names = [
            (j, name)
            for j in self._with_buffers
            for name, buffer in self._tables[first][j].items()
            if buffer is not None and not (means and buffer.is_floating_point())
            if not all(alike(buffer, self._tables[k][j].get(name)) for k in others)
        ]
        if names:
            kept = "their mean, or the first replica's" if means else "the first replica's"
            self._tell("buffers", names, kept, f"{WAYS_OUT}{OR_MEANS}.")

    @torch.no_grad()
    def _compare_frozen(self, active: Sequence[int], places: Sequence[Place]) -> None:
        """Warns of those of these parameters that the step has left different."""
        names = []
        for j, name in places:
            first, *others = (_frozen(self._submodules[k][j]).get(name) for k in active)
            if first is not None and not all(alike(first, other) for other in others):
                names.append((j, name))
        if names:
            self._tell("parameters", names, "the first replica's", f"{WAYS_OUT}.")

    def _marks(self, active: Sequence[int]) -> list[tuple[int, float]]:
        """What shows whether anybody has bound or written to a buffer."""
        return [
            (id(buffer), version_of(buffer))
            for k in active
            for j in self._with_buffers
            for buffer in self._tables[k][j].values()
        ]

    def _marks_of_frozen(self, active: Sequence[int]) -> dict[Place, list[tuple[float, ...]]]:
        """What shows whether anybody has bound new data to a parameter or written to it."""
        marks: dict[Place, list[tuple[float, ...]]] = {}
        for k in active:
            for j in self._with_frozen:
                for name, own in _frozen(self._submodules[k][j]).items():
                    mark = (own.data_ptr(), version_of(own))
                    marks.setdefault((j, name), []).append(mark)
        return marks

    def _tell(self, what: str, found: Sequence[Place], kept: str, ways_out: str) -> None:
        paths = {id(module): path for path, module in self._root.named_modules()}
        owners = [(paths.get(id(self._submodules[0][j]), ""), name) for j, name in found]
        names = [f"{path}.{name}".lstrip(".") for path, name in owners]
        new = [name for name in names if name not in self._told]
        self._told.update(new)
        if new:
            warnings.warn(
                f"A step leaves {what} different on the replicas ({', '.join(new)}): each writes "
                f"what it has of its own samples, and the module keeps {kept}. {ways_out}",
                stacklevel=2,
            )


def _frozen(module: nn.Module) -> dict[str, Tensor]:
    """The parameters that are not trained, and plainly lie somewhere."""
    table = parameter_table(module).items()
    return {
        name: p
        for name, p in table
        if p is not None and not p.requires_grad and type(p) in _PLAIN and not p.is_meta
    }


WAYS_OUT = (
    "Gather what is written to them first, with self.all_gather(...); or write to them in "
    'a step with mode="forward", in which it has the whole batch'
)
OR_MEANS = '; or choose buffers="mean", if they are running means of training'


def alike(a: Tensor, b: Tensor | None, tolerance: float = 0.0) -> bool:
    """Whether two tensors are equal up to rounding or a tolerance, whatever their devices."""
    if b is None or (a.shape, a.dtype, a.layout) != (b.shape, b.dtype, b.layout):
        return False
    if a.is_meta or a.is_nested or a.layout is not torch.strided or not a.numel():
        return True
    b = b.to(a.device)
    if a.is_floating_point() and a.dtype.itemsize == 1:  # of 8 bits, which are hardly computed with
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    if torch.equal(a, b):
        return True
    if not a.is_floating_point() and not a.is_complex():
        return False
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b, eps = a.cpu().to(wide), b.cpu().to(wide), torch.finfo(a.dtype).eps
    limit = float(max(eps**0.5, tolerance) * a.abs().max().nan_to_num(0.0))
    return torch.allclose(a, b, rtol=0.0, atol=limit, equal_nan=True)
