"""Plain Lightning on one device: the whole batch with all cores, or one device's share of both."""

from __future__ import annotations

from benchmarks.job import Job
from benchmarks.pace import Pace
from benchmarks.peers.peer import Peer
from benchmarks.peers.trainer import fit


def train(job: Job, pace: Pace) -> None:
    """The whole batch."""
    fit(job, pace, job.batches(), job.torch_devices[:1], devices=1)


def train_share(job: Job, pace: Pace) -> None:
    """As many samples as one of several devices has; what others take beyond it is overhead."""
    fit(job, pace, job.own_batches(), job.torch_devices[:1], devices=1)


PEER = Peer(train)
SHARE = Peer(train_share, lambda job: "" if job.devices > 1 else "it is one device")
