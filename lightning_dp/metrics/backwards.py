"""Backwards: what the replicas' own backwards say and leave is recorded as what steps do."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Any

from lightning_dp.metrics.journal import Journals, Recording
from lightning_dp.parallel.batch import Shards
from lightning_dp.parallel.replicas import Replicas
from lightning_dp.parallel.step import StepParallel
from lightning_dp.parallel.torch_private import has_backward_hooks

LOOKS = 2
"""Backwards that are recorded where no module has such hooks: a step may add some itself."""


class Backwards:
    """Records what the replicas' own backwards leave: hooks may append to lists, log, call metrics.

    In the first backwards, and in all if one of these has left something, or a module has hooks.

    Args:
        journals: which record.
        engine: whose backwards; it refers to this, and a cycle would keep it alive.
    """

    def __init__(self, journals: Journals, engine: StepParallel) -> None:
        self._journals, self._engine = journals, weakref.ref(engine)
        self._left = LOOKS

    def around(
        self, replicas: Replicas, name: str, shards: Shards, is_rerun: bool
    ) -> AbstractContextManager[None]:
        """Records one backward."""
        return _RecordedBackward(self, self._journals, replicas, shards, is_rerun)

    def went(self, *, left_something: bool) -> None:
        """One has ended."""
        engine = self._engine()
        if engine is None:
            return
        if left_something or any(map(has_backward_hooks, engine.module.modules())):
            self._left = LOOKS
            return
        self._left -= 1
        if not self._left:
            engine.around_backward = None


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
