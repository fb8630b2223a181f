"""CUDA in worker threads: what it does at first use, and cannot do in several threads at once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch


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
