"""What a training that ended early may leave behind: threads, and the calling thread's state."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from lightning_dp.parallel.apply import current_participant

_named: set[threading.Thread] = set()


def threads_left(seconds: float = 2) -> list[str]:
    """Names of the engine's threads that do not end within a while, each of them once."""
    end = time.monotonic() + seconds
    while True:
        left = [t for t in threading.enumerate() if t.name.startswith("dp-") and t not in _named]
        if not left or time.monotonic() > end:
            _named.update(left)
            return [t.name for t in left]
        gc.collect()
        time.sleep(0.01)


def thread_state(on: str) -> dict[str, Any]:
    """What PyTorch keeps for the calling thread, and for threads to come."""
    state: dict[str, Any] = {
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default device": torch.get_default_device(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "intra-op threads": torch.get_num_threads(),
        "intra-op threads of new threads": _in_new_thread(torch.get_num_threads),
        "replica": current_participant(),
    }
    if on == "sim":
        accelerator = torch.accelerator
        state["device"] = accelerator.current_device_index()
        state["streams"] = list(map(accelerator.current_stream, range(accelerator.device_count())))
    return state


def _in_new_thread(call: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]
