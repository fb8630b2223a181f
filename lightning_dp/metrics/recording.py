"""Recording: what replicas say and leave while a step runs, and while its backward does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_dp.metrics.logs import LateLog
from lightning_dp.parallel.batch import Shards
from lightning_dp.parallel.replicas import Replicas
from lightning_dp.parallel.torch_private import has_backward_hooks

if TYPE_CHECKING:
    from lightning_dp.metrics.journal import Journals

LOOKS = 2
"""Backwards that are recorded where no module has such hooks: a step may add some itself."""


class Recording:
    """One step, see `Journals.around`. What has to be put back it has entered itself."""

    def __init__(
        self, journals: Journals, replicas: Replicas, shards: Shards, is_rerun: bool
    ) -> None:
        self._journals, self._is_rerun = journals, is_rerun
        self._replicas, self._shards = replicas, shards

    def __enter__(self) -> None:
        """The step begins."""
        self._inside = self._journals.begin(self._replicas, self._shards.active)
        try:
            self._inside.__enter__()
        except torch.OutOfMemoryError:
            self._journals.undo()
            raise

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        """It ends."""
        logs: list[LateLog] = []
        try:
            self._inside.__exit__(kind, *error)
            if kind is None and not self._is_rerun:
                logs = self._journals.settle(self._replicas, self._shards)
        except torch.OutOfMemoryError:
            self._journals.undo()
            raise
        finally:
            if (exchange := self._journals.exchange) is not None:
                exchange.syncs.in_step = False
        if kind is None and not self._is_rerun:
            self._journals.log(logs)
        elif kind is None or issubclass(kind, torch.OutOfMemoryError):
            self._journals.undo()


class Backwards:
    """Records what the replicas' own backwards leave: hooks may append to lists, log, call metrics.

    In the first backwards, and in all if one of these has left something, or a module has hooks.

    Args:
        journals: which record.
        root: the module.
        end: called when no more is to be recorded.
    """

    def __init__(self, journals: Journals, root: nn.Module, end: Callable[[], None]) -> None:
        self._journals, self._root, self._end = journals, root, end
        self._left = LOOKS

    def around(
        self, replicas: Replicas, name: str, shards: Shards, is_rerun: bool
    ) -> AbstractContextManager[None]:
        """Records one backward."""
        return _RecordedBackward(self, self._journals, replicas, shards, is_rerun)

    def went(self, *, left_something: bool) -> None:
        """One has ended."""
        if left_something or any(map(has_backward_hooks, self._root.modules())):
            self._left = LOOKS
            return
        self._left -= 1
        if not self._left:
            self._end()


class _RecordedBackward(Recording):
    """One backward of the replicas, whose step has been recorded before."""

    def __init__(
        self,
        backwards: Backwards,
        journals: Journals,
        replicas: Replicas,
        shards: Shards,
        is_rerun: bool,
    ) -> None:
        super().__init__(journals, replicas, shards, is_rerun)
        self._backwards = backwards

    def __enter__(self) -> None:
        """It begins: what the step has bound is there before."""
        self._replicas.attributes.look()
        super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        """It ends."""
        super().__exit__(kind, *error)
        self._journals.end_backward()
        if kind is None:
            self._backwards.went(left_something=self._journals.left_something)
