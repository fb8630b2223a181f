"""What a split can learn from: the measurements of one training step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from lightning_dp.parallel.split.arithmetic import Caps, Sizes


@dataclass(frozen=True)
class StepUsage:
    """What the devices did in one training step; one entry per replica, root first.

    Attributes:
        sizes: its samples; 0 where it had none.
        busy_seconds: how long its device worked: by events on GPUs, else as its worker saw it.
        step_seconds: how long the step took until the last device was done, as far as
            `busy_seconds` covers it.
        peak_bytes: the most bytes in use on its device during the step; 0 where none counts.
        start_bytes: the bytes in use on its device when the step began; 0 where none counts.
        in_turns: whether several replicas on the CPU ran one after another.
    """

    sizes: Sizes
    busy_seconds: tuple[float, ...]
    step_seconds: float = 0.0
    peak_bytes: tuple[int, ...] = ()
    start_bytes: tuple[int, ...] = ()
    in_turns: bool = False

    @property
    def waiting_seconds(self) -> tuple[float, ...]:
        """How long each replica's device had nothing to do during the step."""
        return tuple(self.step_seconds - busy for busy in self.busy_seconds)


@runtime_checkable
class LearningSplit(Protocol):
    """A split that learns from the training steps."""

    def __call__(self, n: int, caps: Caps | None = None) -> Sizes:
        """The sizes for a batch of n samples, none above its cap."""

    def learn(self, step: StepUsage) -> None:
        """Takes in a training step."""

    def state_dict(self) -> dict[str, Any]:
        """What has been learnt, in plain numbers."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues with what another one has learnt."""
