"""A step on many machines, in parts: with one process per machine, by DDP, and by FSDP."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lightning_dp.forecast.costs import (
    AllReduce,
    Gather,
    Link,
    all_reduce,
    gather,
    ring_all_reduce,
    ring_link,
    ring_pass,
)
from lightning_dp.forecast.overlap import exposed, exposed_ahead
from lightning_dp.forecast.waiting import expected_maximum

BUCKET = 4 * 2**20
"""Bytes of gradients that leave together."""

APART = 64 * 2**20
"""Bytes of parameters that leave the root while its forward runs; what is more leaves before."""

_HALVINGS = 60

DDP_BUCKET = 25 * 2**20
MESSAGE = 256
"""Bytes that a process tells the others after its forward."""


@dataclass(frozen=True)
class Job:
    """What one device has to do in a step.

    Args:
        compute: seconds for its share of the batch: forward, backward, and the optimizer's step.
        size: bytes of all gradients, and of the parameters.
        backward_share: the part of `compute` in which gradients come.
        python: seconds that the devices of one process take beyond `compute`, and beyond what
            crosses links: they take turns at the interpreter, so it grows with their number.
        samples: in the batch; None where nobody knows.
        fixed: the part of `compute` in seconds that fewer samples do not shorten.
        strong: whether all machines share this batch, or each has as large a one.
        noise: the standard deviation of a machine's step in seconds.
        layers: into so many FSDP cuts the model.
    """

    compute: float
    size: float
    backward_share: float = 2 / 3
    python: float = 0.0
    samples: int | None = None
    fixed: float = 0.0
    strong: bool = False
    noise: float = 0.0
    layers: int = 24

    def compute_on(self, cluster: Cluster, before: Cluster) -> float:
        """Seconds of the device with the largest share, where `compute` was for a share before."""
        if not self.strong:
            return self.compute
        return self.fixed + (self.compute - self.fixed) * self._shrunk(cluster, before)

    def _shrunk(self, cluster: Cluster, before: Cluster) -> float:
        if self.samples is None:
            return before.total / cluster.total
        largest = math.ceil(self.samples / cluster.total)
        return largest / math.ceil(self.samples / before.total)


@dataclass(frozen=True)
class Cluster:
    """Machines that are alike, and what connects them.

    Args:
        machines: how many.
        devices: of each.
        local: between two devices of a machine.
        network: between two machines.
        bucket: bytes of gradients that leave together.
        overlaps: whether they leave while the backward still runs.
        refreshes: whether weights travel to a machine's devices while the forward runs; on the CPU
            replicas share them.
        reduces: how sums between machines are made.
        gathers: how machines tell each other something.
        exchanges: so many times after the forward.
    """

    machines: int
    devices: int
    local: Link
    network: Link
    bucket: float = BUCKET
    overlaps: bool = True
    refreshes: bool = True
    reduces: AllReduce = "best"
    gathers: Gather = "ring"
    exchanges: int = 1

    @property
    def total(self) -> int:
        """The devices of all machines."""
        return self.machines * self.devices

    @property
    def wider(self) -> Cluster:
        """As many devices in half as many machines."""
        return replace(self, machines=self.machines // 2, devices=2 * self.devices)


@dataclass(frozen=True)
class Step:
    """What a step takes, in seconds, part by part: none of them happens while another does.

    Args:
        compute: on the device with the largest share.
        python: replicas of a process at the interpreter in turns.
        local: by what sums within a machine end after the backward, and the forward waits for new
            weights.
        network: what sums between machines take beyond that.
        exchange: what is told after the forward.
        waiting: for the slowest machine.
    """

    compute: float
    python: float = 0.0
    local: float = 0.0
    network: float = 0.0
    exchange: float = 0.0
    waiting: float = 0.0

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        parts: list[float] = list(vars(self).values())
        return sum(parts)


def ours(job: Job, cluster: Cluster, measured_on: Cluster) -> Step:
    """One process on each machine: sums down a chain of its devices, then between the machines.

    Buckets of gradients go down the chain and on to the other machines while the backward fills the
    next ones. The root alone has an optimizer; the new weights go up the chain while the next
    forward begins.

    Args:
        job: what one device does.
        cluster: the machines.
        measured_on: those on which `job.compute` and `job.python` are what they are.
    """
    compute = job.compute_on(cluster, measured_on)
    backward = job.backward_share * compute if cluster.overlaps else 0.0
    local, both = (_sums(job.size, cluster, backward, across=across) for across in (False, True))
    return Step(
        compute=compute,
        python=job.python * cluster.devices / measured_on.devices,
        local=local + _refresh(job.size, cluster, compute * (1 - job.backward_share)),
        network=both - local,
        exchange=cluster.exchanges
        * gather(MESSAGE, cluster.machines, cluster.network, cluster.gathers),
        waiting=job.noise * expected_maximum(cluster.machines),
    )


def _sums(size: float, cluster: Cluster, backward: float, *, across: bool) -> float:
    buckets = buckets_of(size, cluster.bucket)
    return exposed(_stages(size / buckets, cluster, across=across), buckets, backward)


def _stages(bucket: float, cluster: Cluster, *, across: bool) -> list[float]:
    """What a bucket takes from device to device, and then across the machines."""
    stages = [cluster.local.crossing(bucket)] * (cluster.devices - 1)
    if across and cluster.machines > 1:
        stages.append(all_reduce(bucket, cluster.machines, cluster.network, cluster.reduces))
    return stages


def _refresh(size: float, cluster: Cluster, forward: float) -> float:
    """Layers wait for their own weights, and the root for those that leave from where they are."""
    if not cluster.refreshes or cluster.devices == 1:
        return 0.0
    buckets = buckets_of(size, cluster.bucket)
    stages = _stages(size / buckets, cluster, across=False)
    leaving = cluster.local.crossing(size - APART) if size > APART else 0.0
    return max(leaving, exposed(stages, buckets, forward if cluster.overlaps else 0.0))


def buckets_of(size: float, bucket: float) -> int:
    """How many buckets so many bytes are in, at least one.

    Example:
        >>> buckets_of(9.0, 4.0), buckets_of(0.0, 4.0)
        (3, 1)
    """
    return max(1, math.ceil(size / bucket))


def ddp(job: Job, cluster: Cluster, measured_on: Cluster) -> Step:
    """A process for each device: nobody waits for an interpreter, and each has an optimizer.

    Sums go round a ring of all devices, or round one within each machine and then between machines,
    whichever is faster.
    """
    compute = job.compute_on(cluster, measured_on)
    backward = job.backward_share * compute if cluster.overlaps else 0.0
    buckets = buckets_of(job.size, DDP_BUCKET)
    bucket, k, p = job.size / buckets, cluster.devices, cluster.machines
    link = ring_link(p, k, cluster.local, cluster.network)
    within = [ring_all_reduce(bucket, k, cluster.local)]
    across = [all_reduce(bucket, p, cluster.network, cluster.reduces)]
    ways = [[ring_all_reduce(bucket, p * k, link)], within + across]
    total = min(exposed(way, buckets, backward) for way in ways)
    local = min(total, exposed(within, buckets, backward) if k > 1 else 0.0)
    waiting = job.noise * expected_maximum(p)
    return Step(compute, local=local, network=total - local, waiting=waiting)


def fsdp(job: Job, cluster: Cluster, measured_on: Cluster) -> Step:
    """A process for each device, none of which has a whole model.

    Each layer's weights are gathered before its forward and before its backward, and its gradients
    are summed in pieces: half as much again as DDP sends (ZeRO, stage 3). The next layer is under
    way while one computes.
    """
    compute = job.compute_on(cluster, measured_on)
    backward = job.backward_share * compute if cluster.overlaps else 0.0
    forward = (1 - job.backward_share) * compute if cluster.overlaps else 0.0
    once = _gathered(job.size / job.layers, cluster)
    total = exposed_ahead(once, job.layers, forward) + exposed([2 * once], job.layers, backward)
    waiting = job.noise * expected_maximum(cluster.machines)
    part = {"local" if cluster.machines == 1 else "network": total}
    return Step(compute, **part, waiting=waiting)


def _gathered(size: float, cluster: Cluster) -> float:
    """What the pieces of a layer take to all devices: round all of them, or machine by machine.

    By rings, as NCCL does it: there is no tree for it, so latencies add up where machines are many.
    """
    p, k = cluster.machines, cluster.devices
    link = ring_link(p, k, cluster.local, cluster.network)
    by_machine = ring_pass(size, p, cluster.network) + ring_pass(size, k, cluster.local)
    return min(ring_pass(size, p * k, link), by_machine)


def job_of(step: float, job: Job, machine: Cluster, share: float | None = None) -> Job:
    """The job with which a step of one machine takes what was measured there.

    What its links take beyond computing follows from the same formulas as for many machines.

    Args:
        step: seconds of one machine's step.
        job: all but `compute` and `python`.
        machine: that one.
        share: seconds of one device alone with its share of the batch, if somebody has measured
            it. What neither that nor the links explain is the interpreter's. Where it is None, and
            for a single device, there is no such time.

    Raises:
        ValueError: the links alone take longer.
    """
    compute = _without_links(step, job, machine)
    if compute <= 0:
        raise ValueError(
            f"step: expected more than {step - compute:.3g} s, as gradients and weights of "
            f"{job.size:.3g} bytes take between {machine.devices} devices, got {step:.3g} s. "
            "Is the local link faster, or the model smaller?"
        )
    if share is not None and machine.devices > 1:
        compute = min(compute, share)
    found = replace(job, compute=compute, python=0.0)
    rest = step - ours(found, machine, machine).seconds
    return replace(found, python=max(0.0, rest))


def _without_links(step: float, job: Job, machine: Cluster) -> float:
    """What is left to compute: the more of it, the more of what crosses links it hides."""

    def seconds(compute: float) -> float:
        return ours(replace(job, compute=compute, python=0.0), machine, machine).seconds

    low, high = 0.0, step
    if step <= seconds(low):
        return step - seconds(low)
    for _ in range(_HALVINGS):  # it grows with what is computed
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(middle) < step else (low, middle)
    return high
