"""The peers: ways to train a model, ours among them; a file for each.

A peer trains from whatever seed is set, on the batches of its job in turns, and asks its pace after
each step whether to go on. All of them train the same: after as many steps the loss is the same,
but for batch norm, whose statistics are those of a device's own samples.
"""

from __future__ import annotations

from benchmarks.peers import (
    accelerate_ddp,
    dp_custom,
    dp_custom_processes,
    lightning_ddp,
    one_device,
    ring_ddp,
    torch_data_parallel,
    torch_ddp,
)
from benchmarks.peers.peer import Peer as Peer

PEERS: dict[str, Peer] = {
    "one device": one_device.PEER,
    "one share": one_device.SHARE,
    "dp_custom": dp_custom.PEER,
    "dp_custom in processes": dp_custom_processes.PEER,
    "torch DDP": torch_ddp.PEER,
    "Lightning ddp": lightning_ddp.PEER,
    "nn.DataParallel": torch_data_parallel.PEER,
    "Accelerate": accelerate_ddp.PEER,
    "DDP's ring": ring_ddp.PEER,
}
"""By their names, in the order of the tables."""
