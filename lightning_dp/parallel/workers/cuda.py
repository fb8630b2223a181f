"""CUDA of several replicas: what it does at first use, and cannot do in several threads at once.

And graphs of CUDA, which `torch.compile(mode="reduce-overhead")` makes: replicas that share a GPU
share these, too, and take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress

import torch

from lightning_dp.parallel.contexts import Lasting
from lightning_dp.parallel.torch_private import one_invocation
from lightning_dp.parallel.workers.thread_state import ThreadState


def enter_context(device: torch.device) -> None:
    """Makes the context of a GPU the calling thread's, for which cuBLAS looks.

    To make a device current which is so already, as the first one is in every new thread, makes no
    context; any call of CUDA's runtime does. Torch warns where a product of matrices is the first.
    """
    if device.type == "cuda":
        # A device that has failed tells so in the call: a thread that ended here would not.
        with suppress(RuntimeError):
            torch.cuda.current_stream(device).query()


def load_linear_algebra(devices: Sequence[torch.device]) -> None:
    """Has `torch.linalg` load its library where several threads are about to compute on GPUs.

    It does so at its first call, and refuses others meanwhile: "lazy wrapper should be called at
    most once" (https://github.com/pytorch/pytorch/issues/90613).
    """
    gpus = [device for device in devices if device.type == "cuda"]
    if len(gpus) > 1:
        one = torch.ones((1, 1), device=gpus[0], dtype=torch.float32)
        torch.linalg.solve_triangular(one, one, upper=True)  # it takes neither time nor memory


class InTurns(Lasting):
    """Replicas compute in turns; what graphs return for one is kept while the others compute.

    On each GPU only the first one's call of compiled code may write over what the call before has
    returned, as on one device the call for the next batch does.
    """

    def __init__(self, state: ThreadState) -> None:
        self._state = state
        self._seen: set[torch.device] = set()
        self._kept: list[AbstractContextManager[object]] = []

    def begin(self) -> None:
        """Nobody has computed."""

    def next(self, device: torch.device) -> None:
        """The next replica computes on this device."""
        if device.type == "cuda" and device in self._seen:
            self._kept.append(one_invocation(device.index))
            self._kept[-1].__enter__()
        self._seen.add(device)

    def moved_to(self, device: torch.device) -> AbstractContextManager[None]:
        """The thread of all, while the next replica computes in it."""
        self.next(device)
        return self._state.moved_to(device)

    def end(self) -> None:
        """All have computed."""
        while self._kept:
            self._kept.pop().__exit__(None, None, None)
