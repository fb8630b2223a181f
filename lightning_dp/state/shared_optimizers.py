"""Optimizers in a step of all replicas, which share them: what one does to one is done once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_not
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_dp.parallel.contexts import Lasting
from lightning_dp.parallel.replicas import Replicas
from lightning_dp.parallel.workers import current_participant

Options = dict[str, Any]


class shared_optimizers(Lasting):
    """While it lasts, replicas share the optimizers of a module.

    `group["lr"] *= 0.9` in every replica's step takes effect once: the leader's change is the
    optimizer's, and each of the others sees what it has written itself. A rerun, and a step that
    did not fit and will run again, change nothing.

    No replica alone makes a step of an optimizer of the module's parameters: all would make it, at
    the same time and each with its own samples' gradients.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        replicas: Replicas,
        leader: int,
        *,
        is_rerun: bool = False,
    ) -> None:
        self._replicas = replicas
        self._keeps = not is_rerun
        self._handle: RemovableHandle | None = None
        self._shared = []
        for groups in map(attrgetter("param_groups"), optimizers):
            self._shared.append((groups, [_SharedGroup(group, leader) for group in groups]))

    def begin(self) -> None:
        """Gives the optimizers groups that the replicas share, and looks at steps of all."""
        self._handle = register_optimizer_step_pre_hook(self._check_step)
        for groups, shared in self._shared:
            groups[:] = shared

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """They get their own back, as the step has changed them."""
        if kind is not None and issubclass(kind, torch.OutOfMemoryError):
            self._keeps = False
        super().__exit__(kind, *error)

    def end(self) -> None:
        """They get their own back."""
        if self._handle is not None:
            self._handle.remove()
        for groups, shared in self._shared:
            # Those that were added in the meantime come after these.
            groups[: len(shared)] = [group.release(self._keeps) for group in shared]

    def _check_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        participant = current_participant()
        if participant is None:
            return
        own = set(map(id, chain.from_iterable(self._replicas.parameters)))
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise RuntimeError(
                "Expected steps of optimizers of the module's parameters to be made once for all "
                f"replicas, got {type(optimizer).__qualname__}.step from replica "
                f"{participant.replica}, in a way that does not show before the step. With "
                "automatic_optimization=False call optimizer.step() of an optimizer that "
                "configure_optimizers returns or that is an attribute of self, or use "
                'DataParallelStrategy(mode="forward").'
            )


class _SharedGroup(Options):
    """A group of an optimizer, of whose options every replica but the leader has a copy."""

    def __init__(self, group: Options, leader: int) -> None:
        super().__init__(group)
        self._group = group
        self._leader = leader
        self._before = dict(group)
        self._copied = dict(group)  # what the copies begin with
        self._copies: dict[int, Options] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the optimizer has plain groups, with the caller's options."""
        return dict, (dict(self._own() or self),)

    def release(self, keeps: bool) -> Options:
        """The optimizer's own group, with the changes if they are to be kept."""
        now, before = dict(self), self._before
        # No frame for each option: this is in every step.
        values = map(now.__getitem__, before)
        if keeps and (now.keys() != before.keys() or any(map(is_not, values, before.values()))):
            self._group.clear()
            self._group.update(now)
        return self._group

    def _own(self) -> Options | None:
        """The calling replica's copy; None for the leader, and for code outside of replicas."""
        participant = current_participant()
        if participant is None or participant.replica == self._leader:
            return None
        return self._copies.setdefault(participant.replica, dict(self._copied))

    def __getitem__(self, key: str) -> Any:
        own = self._own()
        return super().__getitem__(key) if own is None else own[key]

    def get(self, key: str, default: Any = None) -> Any:
        """As `dict.get`."""
        own = self._own()
        return super().get(key, default) if own is None else own.get(key, default)

    def __setitem__(self, key: str, value: Any) -> None:
        own = self._own()
        if own is not None:
            own[key] = value
            return
        super().__setitem__(key, value)
        if current_participant() is None:  # all replicas stand still
            self._copied[key] = value
            for copy in self._copies.values():
                copy[key] = value

    def update(self, *args: Any, **kwargs: Any) -> None:
        """As `dict.update`."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        """As `dict.setdefault`."""
        own = self._own()
        return super().setdefault(key, default) if own is None else own.setdefault(key, default)
