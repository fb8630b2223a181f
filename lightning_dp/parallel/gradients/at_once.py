"""One backward for all replicas, on accelerators: autograd has a thread for each of these."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from lightning_dp.parallel.gradients.loss import Graph

_NOTHING: AbstractContextManager[None] = nullcontext()


def backward_at_once(
    graphs: Sequence[Graph],
    gradient: Tensor,
    keep_graph: bool,
    inputs: Sequence[Tensor] | None = None,
    during: AbstractContextManager[None] = _NOTHING,
) -> None:
    """One backward runs on all devices.

    It is `during` something that begins when the devices have got their gradients.
    """
    # Autograd makes the gradient anew for each backward: the host need not wait for its copies.
    gradients = [(gradient * g.weight).to(g.loss, non_blocking=True) for g in graphs]
    losses = [graph.loss for graph in graphs]
    with during:
        torch.autograd.backward(losses, gradients, retain_graph=keep_graph, inputs=inputs)


def wait_for_autograd(devices: Sequence[torch.device]) -> None:
    """Waits until autograd's threads are done with a backward that has failed.

    Whoever asked for it is told of the first error, while the threads of other devices may still
    work: they hold its graph, and write gradients. A little backward of all devices goes through
    the same threads after what they have begun. It is made in a new thread, whose work has the
    lowest numbers: among what waits for a device, that comes last.

    Not for code that itself runs in a backward: its own thread would wait for itself. The CPU has
    no such thread.
    """

    def pass_through() -> None:
        ends = [torch.zeros(0, device=device, requires_grad=True) for device in others]
        ways = [end.clone() for end in ends]
        torch.autograd.grad(ways, ends, [torch.zeros_like(end) for end in ends])

    if others := [device for device in dict.fromkeys(devices) if device.type != "cpu"]:
        # No pool's: the program's end would wait for it.
        thread = threading.Thread(target=pass_through, name="dp-autograd", daemon=True)
        thread.start()
        while thread.is_alive():  # Ctrl-C ends short waits on Windows too
            thread.join(0.5)
