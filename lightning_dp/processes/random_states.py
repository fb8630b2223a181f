"""Random states: of the generators that a process's numbers come from.

As a checkpoint keeps them all is plain numbers and tensors, so that any program can load it.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

HostState: TypeAlias = tuple[torch.Tensor, Any, Any]
RandomState: TypeAlias = dict[str, Any]


def host_state() -> HostState:
    """The present state of the global generators of torch, Python and NumPy, as these have it."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def set_host_state(state: HostState) -> None:
    """Sets the global generators to what they were."""
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])


def same_states(one: HostState, other: HostState) -> bool:
    """Whether the same numbers would come."""
    return torch.equal(one[0], other[0]) and pickle.dumps(one[1:]) == pickle.dumps(other[1:])


def random_state(devices: Iterable[torch.device] = ()) -> RandomState:
    """The present state of the generators of torch, Python and NumPy, and of devices."""
    on_cpu, (version, words, gauss), numpys = host_state()
    state: RandomState = {
        "torch": on_cpu,
        "python": (version, torch.tensor(words), gauss),
        "devices": [_module(d).get_rng_state(*_name(d)) for d in _with_generators(devices)],
    }
    if isinstance(numpys, tuple):  # else somebody has given it another kind of generator
        name, keys, *rest = numpys
        state["numpy"] = (name, torch.from_numpy(keys.astype(np.int64)), *rest)
    return state


def set_random_state(state: Mapping[str, Any], devices: Iterable[torch.device] = ()) -> None:
    """Sets the generators to what they were; those of devices if there are as many as then."""
    version, words, gauss = state["python"]
    numpys: Any = np.random.get_state()
    if "numpy" in state:
        name, keys, *rest = state["numpy"]
        numpys = (name, keys.numpy().astype(np.uint32), *rest)
    set_host_state((state["torch"], (version, tuple(words.tolist()), gauss), numpys))
    own = _with_generators(devices)
    if len(own) == len(state["devices"]):
        for device, its in zip(own, state["devices"], strict=True):
            _module(device).set_rng_state(its, *_name(device))


def _with_generators(devices: Iterable[torch.device]) -> list[torch.device]:
    """Each of the devices once, but for the CPU, whose generator is torch's own."""
    return [device for device in dict.fromkeys(devices) if device.type != "cpu"]


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)


def _name(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # there it is the only one
