"""Torch's engine of autograd, by private names of torch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_dp.parallel.torch_private import found

renew_engine: Callable[[], bool] = found(
    torch.autograd.Variable, "_execution_engine"
).is_checkpoint_valid
"""Makes the engine anew if the process has forked since it was made.

The first forward of a forked child would do so. Of two threads' first forwards both would, at the
same time, and the process would crash.
"""
