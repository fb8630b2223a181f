"""What torch keeps of parametrizations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.nn.utils import parametrize

from lightning_dp.parallel.torch_private.found import found

found(parametrize, "_cache")
cached_values: Callable[[], Any] = partial(getattr, parametrize, "_cache")
"""What `parametrize.cached()` keeps, of all threads in one; another object after each such block.

The key of a value is the module that was parametrized, also where a copy of it is asked.
"""
