"""Parameters that change without a trace: through `.data`, while nobody trains them.

Teachers and momentum encoders are often averaged that way. Versions do not show it, and copying
every frozen weight in every step would cost what freezing is to save. So their bits are watched
between steps, for replicas that have copies.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Sequence

from torch import nn

from lightning_dp.parallel.replicas.fingerprints import fingerprints
from lightning_dp.parallel.torch_private import version

LOOKS = 16
"""So many looks in a row at first; from then on every so manieth step looks."""


class SilentWrites:
    """Watches the parameters that are not trained; what was once written to is always copied.

    In `found` are their positions. A look reads the weights once on their own device, and waits.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.found: set[int] = set()
        self._parameters = parameters
        self._steps = 0
        self._seen = self._read()

    def look(self) -> set[int]:
        """Compares with the last look, if it is time to."""
        self._steps += 1
        if self._steps <= LOOKS or self._steps % LOOKS == 0:
            before, self._seen = self._seen, self._read()
            new = {
                i
                for i, (count, bits) in self._seen.items()
                if i in before and count == before[i][0] and bits != before[i][1]
            }
            new -= self.found
            self.found |= new
            if new and self._steps > LOOKS:
                self._warn(new)
        return self.found

    def _read(self) -> dict[int, tuple[int, int]]:
        """Version and fingerprint of every parameter that is not trained."""
        bits = fingerprints_of_frozen(self._parameters)
        return {i: (version(self._parameters[i]), value) for i, value in bits.items()}

    def _warn(self, new: set[int]) -> None:
        warnings.warn(
            f"{len(new)} parameters that are not trained ({shapes(self._parameters, new)}) were "
            "written to "
            f"through .data, which leaves no trace: in up to {LOOKS - 1} steps replicas on other "
            "devices have used their older values. From now on they are always copied. Write to "
            "them under torch.no_grad() instead, such as p.copy_(...), and every step is right.",
            stacklevel=2,
        )


def shapes(parameters: Sequence[nn.Parameter], positions: Iterable[int]) -> str:
    """Of some parameters, for people."""
    return f"of shapes {[tuple(parameters[i].shape) for i in sorted(positions)[:3]]}"


def fingerprints_of_frozen(
    parameters: Sequence[nn.Parameter], but: Collection[int] = ()
) -> dict[int, int]:
    """Those of the parameters that are not trained, by position, but for some."""
    frozen = ((i, p) for i, p in enumerate(parameters) if not p.requires_grad and i not in but)
    return fingerprints((i, p.data) for i, p in frozen)
