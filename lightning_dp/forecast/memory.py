"""Memory: what a device has to hold, by what it keeps a whole copy of.

With all-equal copies, and with each of the three parts cut into as many pieces as there are devices
(S. Rajbhandari, J. Rasley, O. Ruwase, Y. He: ZeRO: Memory optimizations toward training trillion
parameter models, SC 2020).
"""

from __future__ import annotations

from dataclasses import dataclass

OPTIMIZERS = {"sgd": 0, "momentum": 1, "adam": 2}
"""Numbers that an optimizer keeps for each parameter."""


@dataclass(frozen=True)
class Memory:
    """What one device needs for its share of the batch.

    Args:
        weights: bytes of all parameters; gradients have as many.
        state: bytes of the optimizer's state.
        activations: bytes that the forward keeps for the backward of a device's share, and
            whatever else there is.
        layers: into so many equal ones FSDP cuts the model, of which it has two at a time.
        capacity: bytes of a device.
    """

    weights: float
    state: float
    activations: float = 0.0
    layers: int = 24
    capacity: float | None = None

    @property
    def ours(self) -> float:
        """The root's, which alone has an optimizer; see `replica` for the others."""
        return 2 * self.weights + self.state + self.activations

    @property
    def replica(self) -> float:
        """Of every other device of a process."""
        return 2 * self.weights + self.activations

    @property
    def ddp(self) -> float:
        """Every device has all of it."""
        return 2 * self.weights + self.state + self.activations

    def fsdp(self, devices: int) -> float:
        """Weights, gradients and state in pieces, and the whole weights of two layers.

        Example:
            >>> Memory(weights=80.0, state=160.0, activations=10.0, layers=8).fsdp(32)
            40.0
        """
        pieces = (2 * self.weights + self.state) / devices
        return pieces + 2 * self.weights / self.layers + self.activations

    def fits(self, size: float) -> bool:
        """Whether so much fits; it does where nobody knows the capacity."""
        return self.capacity is None or size <= self.capacity
