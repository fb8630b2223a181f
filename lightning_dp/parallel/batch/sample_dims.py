"""Which dimension of what a step leaves counts its samples: learnt from the shards' sizes.

Where shards are unequal, a dimension that counts samples is as long as they are, or a constant
multiple of it, and no other is. So the first batch of each kind of step is cut unequally, and what
was learnt from it holds from then on, also for equal shards.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

from lightning_dp.parallel.split import Sizes

Path: TypeAlias = tuple[Any, ...]
"""What is joined (`"output"`, say), and where in it."""

Shape: TypeAlias = tuple[int, ...]
Known: TypeAlias = int | Literal["varies", "constant"]
"""Of a leaf: its dim of samples; or its length varies in some other way; or it has neither."""

Override: TypeAlias = Literal["mean", "sum", "stack", "cat", "first", "list"]

_ASK_AT_MOST = 8
CHANCE = (
    "{}: steps before had equal numbers on shards of unequal sizes, which were taken for the whole "
    "batch's. They were not: now the replicas have {} for shards of {} samples, which add up."
)

log = logging.getLogger(__name__)


class Verdict(NamedTuple):
    """How the leaves that all replicas have at one path belong together.

    `"rows"`: along `dim`, `multiple` for each sample; `"varies"`: along `dim`, in lengths that have
    nothing to do with the samples; `"constant"`: of the batch, not of its samples; `"ragged"`:
    their shapes fit together in no way. It is sure if it follows from shapes and knowledge, and
    not from a lack of both.
    """

    how: Literal["rows", "varies", "constant", "ragged"]
    dim: int = 0
    multiple: int = 1
    is_sure: bool = True


def tells(sizes: Sequence[int]) -> bool:
    """Whether shards of these sizes tell what counts samples from what does not."""
    return len(set(sizes) - {0}) > 1


def multiple_of(lengths: Sequence[int], sizes: Sequence[int]) -> int | None:
    """How many rows each sample has, if lengths follow the sizes.

    Example:
        >>> multiple_of([6, 4], [3, 2]), multiple_of([3, 3], [3, 2]), multiple_of([0, 0], [3, 2])
        (2, None, None)
    """
    multiple = sum(lengths) // max(sum(sizes), 1)
    follows = all(n == multiple * size for n, size in zip(lengths, sizes, strict=True))
    return multiple if multiple and follows else None


def judge(shapes: Sequence[Shape], sizes: Sizes, dim: int, known: Known | None) -> Verdict:
    """What the shapes of a leaf on all replicas say, beside what is known of it.

    Where nothing tells, the dim along which batches are cut is taken.

    Example:
        >>> judge([(3, 2), (1, 2)], (3, 1), 0, None).how, judge([(3, 3)] * 2, (3, 1), 0, None).how
        ('rows', 'constant')
        >>> judge([(2, 12)] * 3, (12,) * 3, 0, 1)[:2], judge([(2, 12)] * 3, (2,) * 3, 0, 1)[1:3]
        (('rows', 1), (1, 6))
    """
    ndim = len(shapes[0])
    if any(len(shape) != ndim for shape in shapes):
        return Verdict("ragged")
    own = dim % ndim if -ndim <= dim < ndim else None
    fitting = [d for d in range(ndim) if len({(*s[:d], *s[d + 1 :]) for s in shapes}) == 1]
    if not fitting:
        return Verdict("ragged")
    if len(set(shapes)) > 1:
        (varying,) = fitting
        multiple = multiple_of([shape[varying] for shape in shapes], sizes)
        if multiple:
            return Verdict("rows", varying, multiple)
        return Verdict("varies", varying) if varying in (own, known) else Verdict("ragged")
    if known is None and not tells(sizes):
        return _guess(shapes[0], sizes, own)
    if known in (None, "constant"):
        return Verdict("constant")
    place = known if isinstance(known, int) else own or 0
    multiple = multiple_of([shape[place] for shape in shapes], sizes)
    return Verdict("rows", place, multiple) if multiple else Verdict("varies", place)


def _guess(shape: Shape, sizes: Sizes, own: int | None) -> Verdict:
    """Equal shards, and nothing is known: a dim as long as they are has samples."""
    dims = [d for d, length in enumerate(shape) if length == sizes[0]]
    if own in dims or len(dims) == 1:
        return Verdict("rows", own if own in dims and own is not None else dims[0], is_sure=False)
    return Verdict("constant", is_sure=False)


class StepDims:
    """What is known of one kind of step.

    It `asks` while a batch that is cut unequally would tell more. It `keeps_sizes` where replicas
    keep something of their samples from batch to batch. It `is_told` that `dim` counts samples
    where nothing tells: then no batch is cut unequally for it. So it is where 0-dim outputs are
    stacked, whose mean is right for equal shards alone.
    """

    def __init__(
        self,
        dim: int = 0,
        overrides: Mapping[str, Override] | None = None,
        *,
        is_told: bool = False,
    ) -> None:
        self.dim = dim
        self.overrides = overrides or {}
        self.asks = not is_told
        self.keeps_sizes = False
        self._asked = 0
        self.is_told = is_told
        self._dims: dict[Path, Known] = {}
        self._counts: dict[Path, bool] = {}
        self._equal: set[Path] = set()  # numbers of unequal shards
        self._looks: Counter[Path] = Counter()
        self._said: set[Path] = set()
        self.varying: set[Path] = set()  # lists that steps have made longer or shorter

    def has_seen(self, sizes: Sequence[int]) -> None:
        """A batch was cut into these sizes."""
        if tells(sizes):
            self.asks = self.keeps_sizes

    def keep_sizes(self) -> None:
        """From now on, batches of one size are cut alike, as the first was."""
        self.asks = self.keeps_sizes = not self.is_told

    def rows(self, path: Path, shapes: Sequence[Shape], sizes: Sizes) -> Verdict:
        """How the leaves at a path are joined; learns from it."""
        known = self._dims.get(path)
        if known is None and not tells(sizes):
            known = self._alike(path)
        if known is None and self.is_told and not tells(sizes) and shapes[0]:
            known = self._as_told(shapes[0], sizes)
        verdict = judge(shapes, sizes, self.dim, known)
        if not verdict.is_sure:
            self._ask()
        elif verdict.how != "ragged" and known != "varies" and 0 not in shapes[0]:
            is_news = len(set(shapes)) > 1 or tells(sizes)
            if is_news or verdict.how == "varies":
                self._dims[path] = verdict.dim if verdict.how == "rows" else verdict.how
        return verdict

    def _as_told(self, shape: Shape, sizes: Sizes) -> Known | None:
        is_dim = -len(shape) <= self.dim < len(shape)
        return self.dim % len(shape) if is_dim and shape[self.dim] % sizes[0] == 0 else None

    def _alike(self, path: Path) -> Known | None:
        """What is known of all other entries of a container on `self`, if it is one thing.

        Steps give such entries new names in every batch.
        """
        if path[0] != "self":
            return None
        family = {known for other, known in self._dims.items() if other[:4] == path[:4]}
        return family.pop() if len(family) == 1 else None

    def counts(
        self, path: Path, numbers: Sequence[int], sizes: Sequence[int], name: str = ""
    ) -> bool | None:
        """Whether numbers of all replicas count what is theirs alone, and add up.

        If not, each is the batch's. None if nothing tells: they are equal, and so are the shards.
        Unequal shards may have equal numbers by chance: once others tell, a warning does.
        """
        if len(numbers) == 1:
            return True
        if len(set(numbers)) > 1:
            if self._counts.get(path) is False and path in self._equal and name:
                self.say((*path, "counts"), CHANCE.format(name, list(numbers), list(sizes)))
            self._counts[path] = True
        elif tells(sizes):
            self._counts.setdefault(path, False)
            if any(numbers):  # nothing is the same either way
                self._equal.add(path)
        elif path not in self._counts:
            self._ask()
        return self._counts.get(path)

    def looks_at(self, path: Path) -> bool:
        """Whether values are compared, for which GPUs are waited: in the first steps only."""
        self._looks[path] += 1
        return self._looks[path] <= _ASK_AT_MOST

    def say(self, path: Path, text: str, *, quietly: bool = False) -> None:
        """Warns, or just says so in the log, once for each path."""
        if path not in self._said:
            self._said.add(path)
            log.warning(text) if quietly else warnings.warn(text, stacklevel=2)

    def _ask(self) -> None:
        self._asked += 1
        self.asks = self.keeps_sizes or (self._asked <= _ASK_AT_MOST and not self.is_told)


class SampleDims(dict[tuple[str, bool], StepDims]):
    """What is known of every kind of step: by its method's name, and whether it trains."""

    def __init__(
        self, dim: int, overrides: Mapping[str, Override] | None, *, is_told: bool
    ) -> None:
        super().__init__()
        self._make = partial(StepDims, dim, overrides, is_told=is_told)

    def __missing__(self, kind: tuple[str, bool]) -> StepDims:
        """Nothing, of a kind of step that is new."""
        self[kind] = self._make()
        return self[kind]
