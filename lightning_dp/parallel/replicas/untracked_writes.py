"""Parameters that change without a trace: through `.data`, while nobody trains them.

Teachers and momentum encoders are often averaged that way. Versions do not show it, and copying
every frozen weight in every step would cost what freezing is to save. So their norms are watched:
between steps for replicas that have copies, and in steps for those that share the root's memory.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from lightning_dp.parallel.torch_private import norm_of_each, version

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
        self._norms = self._read()

    def look(self) -> set[int]:
        """Compares with the last look, if it is time to."""
        self._steps += 1
        if self._steps <= LOOKS or self._steps % LOOKS == 0:
            before, self._norms = self._norms, self._read()
            new = {
                i
                for i, (count, norm) in self._norms.items()
                if i in before and count == before[i][0] and norm != before[i][1]
            }
            new -= self.found
            self.found |= new
            if new and self._steps > LOOKS:
                self._warn(new)
        return self.found

    def _read(self) -> dict[int, tuple[int, float]]:
        """Version and norm of every parameter that is not trained."""
        norms = _norms_of_frozen(self._parameters)
        return {i: (version(self._parameters[i]), norm) for i, norm in norms.items()}

    def _warn(self, new: set[int]) -> None:
        warnings.warn(
            f"{len(new)} parameters that are not trained ({_shapes(self._parameters, new)}) were "
            "written to "
            f"through .data, which leaves no trace: in up to {LOOKS - 1} steps replicas on other "
            "devices have used their older values. From now on they are always copied. Write to "
            "them under torch.no_grad() instead, such as p.copy_(...), and every step is right.",
            stacklevel=2,
        )


class SharedWrites:
    """Notices steps that write to weights that they do not train, where replicas share them.

    Every replica then does it, once each. Those that are trained autograd watches itself.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._steps = 0
        self._has_warned = False

    @contextlib.contextmanager
    def noticed(self) -> Iterator[None]:
        """Looks before and after a step, if it is time to; warns once."""
        self._steps += 1
        if self._has_warned or (self._steps > LOOKS and self._steps % LOOKS):
            yield
            return
        memory = [parameter.data_ptr() for parameter in self._parameters]
        before = _norms_of_frozen(self._parameters)
        yield
        after = _norms_of_frozen(self._parameters) if before else {}
        changed = [i for i, norm in after.items() if before.get(i, norm) != norm]
        written = {i for i in changed if self._parameters[i].data_ptr() == memory[i]}
        if written:
            self._has_warned = True
            self._warn(written)

    def _warn(self, written: set[int]) -> None:
        warnings.warn(
            f"A step writes in place to {len(written)} parameters that it does not train "
            f"({_shapes(self._parameters, written)}). Replicas on one device share them, and each "
            "of them does so: that is right only where doing it again changes nothing. Do it in a "
            "hook, such as on_train_batch_end, or bind new values: p.data = 0.9 * p.data + ....",
            stacklevel=2,
        )


def _shapes(parameters: Sequence[nn.Parameter], positions: set[int]) -> str:
    return f"of shapes {[tuple(parameters[i].shape) for i in sorted(positions)[:3]]}"


def _norms_of_frozen(parameters: Sequence[nn.Parameter]) -> dict[int, float]:
    """The norms of the parameters that are not trained, by position."""
    frozen = {
        i: parameter.data
        for i, parameter in enumerate(parameters)
        if not parameter.requires_grad and parameter.is_floating_point()
    }
    if not frozen:
        return {}
    norms = norm_of_each(list(frozen.values()))
    values = torch.stack([norm.double() for norm in norms]).tolist()
    return dict(zip(frozen, values, strict=True))
