"""Private names of torch's DataLoader: what a copy of one needs to load something else.

A release may take any of them away. Batches are then those of all processes in each of them, and
`SlicedLoader` raises an error, since none of its parts has been loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from lightning_dp.parallel.split import Sizes
from lightning_dp.processes.draws import Parts

L = TypeVar("L", bound=DataLoader[Any])


class LoaderOfParts(DataLoader[Any]):
    """Loads the parts in place of what its sampler yields, which stays as it is to be seen.

    Attributes:
        parts: what it loads.
        taken: of the batches that it has yielded since somebody has looked, what each process has.
    """

    parts: Parts
    taken: list[Sizes]

    @property
    def _index_sampler(self) -> Any:
        return self.parts

    def __iter__(self) -> Any:
        """Begins at once, as a DataLoader does: it draws a seed, and its workers start."""
        iterator = super().__iter__()
        draws = self.parts.latest
        return iterator if draws is None else self._noted(iterator, draws.sizes)

    def _noted(self, batches: Iterable[Any], sizes: Any) -> Iterator[Any]:
        for batch in batches:
            self.taken.append(sizes.popleft())
            yield batch


def copied(loader: DataLoader[Any], kind: type[L], **attributes: Any) -> L:
    """A loader like another one, of another class, with its own workers and some other attributes.

    Nothing is made anew: `__init__` is not called, and DataLoader's `__setattr__` not asked.
    """
    own = object.__new__(kind)
    vars(own).update(vars(loader), _iterator=None, **attributes)
    return own
