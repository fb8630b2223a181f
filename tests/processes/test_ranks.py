"""Who is who among the processes, which devices are whose, and how large a part of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import ClusterEnvironment, LightningEnvironment
from oracle import QUIET
from torch.distributed import HashStore

from lightning_dp import DataParallelStrategy
from lightning_dp.parallel.split import (
    OwnShare,
    agreed_shares,
    between_processes,
    chunk,
    even,
    weighted,
)
from lightning_dp.processes.machine import share

Variables = Mapping[str, object]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)


def torchrun(rank: int, machines: int, per_machine: int) -> dict[str, object]:
    """What `torchrun --nnodes N --nproc-per-node P` tells a process."""
    machine, local = divmod(rank, per_machine)
    return {
        "TORCHELASTIC_RUN_ID": "test",
        "RANK": rank,
        "LOCAL_RANK": local,
        "GROUP_RANK": machine,
        "WORLD_SIZE": machines * per_machine,
        "LOCAL_WORLD_SIZE": per_machine,
        "GROUP_WORLD_SIZE": machines,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 12345,
    }


def slurm(rank: int, machines: int, per_machine: int) -> dict[str, object]:
    """What `srun --nodes N --ntasks-per-node P` tells a process."""
    machine, local = divmod(rank, per_machine)
    return {
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_ID": 1234,
        "SLURM_NTASKS": machines * per_machine,
        "SLURM_NTASKS_PER_NODE": per_machine,
        "SLURM_NNODES": machines,
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": local,
        "SLURM_NODEID": machine,
        "SLURM_NODELIST": "host[0-9]",
    }


def by_hand(rank: int, machines: int, per_machine: int) -> dict[str, object]:
    """What a user sets who starts the processes."""
    machine, local = divmod(rank, per_machine)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 12345, "NODE_RANK": machine}
    return (
        where
        if per_machine == 1
        else where
        | {
            "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": per_machine,
        }
    )


def made(
    monkeypatch: pytest.MonkeyPatch,
    variables: Variables,
    count: int,
    num_nodes: int = 1,
    **options: Any,
) -> Trainer:
    """A Trainer as the process has it of which the variables tell."""
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    strategy = DataParallelStrategy(**options)
    given = {} if "devices" in options else {"devices": count}
    return Trainer(accelerator="cpu", strategy=strategy, num_nodes=num_nodes, **given, **QUIET)


def sizes_of(trainer: Trainer, n: int) -> tuple[int, ...]:
    return tuple(trainer.strategy.split_policy(n))


@pytest.mark.parametrize("started_by", [torchrun, slurm, by_hand])
@pytest.mark.parametrize("machines, per_machine", [(1, 2), (2, 1), (2, 2), (3, 4)])
def test_processes_are_numbered_and_share_the_devices_out(
    started_by: Any, machines: int, per_machine: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    for rank in range(machines * per_machine):
        variables = started_by(rank, machines, per_machine)
        with monkeypatch.context() as own:
            trainer = made(own, variables, 7, num_nodes=machines)
            strategy = trainer.strategy
            assert (trainer.world_size, trainer.global_rank) == (machines * per_machine, rank)
            assert (trainer.node_rank, trainer.local_rank) == divmod(rank, per_machine)
            assert trainer.is_global_zero == (rank == 0) == (rank_zero_only.rank == 0)
            counts.append(len(strategy.parallel_devices))
            assert trainer.num_devices == 7 or trainer.num_devices == counts[-1]
    assert counts == machines * list(even(7, per_machine))


def test_devices_of_the_strategy_are_those_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, count in enumerate((2, 1)):
        trainer = made(monkeypatch, torchrun(rank, 1, 2), 0, devices=["cpu"] * 3)
        assert trainer.strategy.parallel_devices == [torch.device("cpu")] * count


@pytest.mark.on("sim")
@pytest.mark.usefixtures("on")
def test_each_process_has_devices_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["sim:4", "sim:1", "sim:6"]
    for rank, own in enumerate((names[:2], names[2:])):
        for name, value in torchrun(rank, 1, 2).items():
            monkeypatch.setenv(name, str(value))
        strategy = DataParallelStrategy(devices=names)
        trainer = Trainer(accelerator="sim", strategy=strategy, **QUIET)
        assert list(map(str, strategy.parallel_devices or ())) == own
        assert str(trainer.strategy.root_device) == str(strategy.output_device) == own[0]
        Trainer(strategy=strategy, **QUIET)  # they are not shared out twice
        assert list(map(str, strategy.parallel_devices or ())) == own


@pytest.mark.on("sim")
@pytest.mark.usefixtures("on")
@pytest.mark.parametrize(
    "output, fits", [("cpu", (True, True)), ("sim:1", (True, False)), ("sim:7", (True, True))]
)
def test_outputs_do_not_go_to_another_process(
    output: str, fits: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(2):
        for name, value in torchrun(rank, 1, 2).items():
            monkeypatch.setenv(name, str(value))
        strategy = DataParallelStrategy(output_device=output)
        if fits[rank]:
            Trainer(accelerator="sim", devices=4, strategy=strategy, **QUIET)
            assert str(strategy.output_device) == output
            continue
        with pytest.raises(ValueError, match=r"output_device: expected .*'sim:2', 'sim:3'.*sim:1"):
            Trainer(accelerator="sim", devices=4, strategy=strategy, **QUIET)


@pytest.mark.on("sim")
@pytest.mark.usefixtures("on")
def test_a_split_by_memory_asks_a_process_s_own_devices_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To ask a GPU would take memory on it."""
    asked: list[list[str]] = []

    def capacities(devices: Any) -> list[int]:
        asked.append(list(map(str, devices)))
        return [100] * len(devices)

    monkeypatch.setattr("lightning_dp.options.memory_capacities", capacities)
    for name, value in torchrun(1, 1, 2).items():
        monkeypatch.setenv(name, str(value))
    strategy = DataParallelStrategy(split="memory")
    Trainer(accelerator="sim", devices=4, strategy=strategy, **QUIET)
    assert asked and all(own == ["sim:2", "sim:3"] for own in asked)


def test_weights_are_shared_out_as_devices_are(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    for rank in range(2):
        trainer = made(monkeypatch, torchrun(rank, 1, 2), 6, weights=[1, 1, 1, 2, 4, 2])
        told.append(trainer.strategy.own_share)
        assert sizes_of(trainer, 8) == [(3, 3, 2), (2, 4, 2)][rank]
    assert agreed_shares(told)(22) == (6, 16)


def test_weights_of_0_for_all_devices_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    for rank in range(2):
        trainer = made(monkeypatch, torchrun(rank, 1, 2), 4, weights=[0, 0, 1, 3])
        told.append(trainer.strategy.own_share)
        assert sizes_of(trainer, 1) == [(1, 0), (0, 1)][rank]
    assert agreed_shares(told)(8) == (0, 8)


def test_weights_are_counted_against_the_machine_s_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"weights: expected 4 numbers.*got 2"):
        made(monkeypatch, torchrun(0, 1, 2), 4, weights=[1, 2])


@pytest.mark.parametrize(
    "split, rule", [("chunk", "chunk"), ("even", "even"), ("adaptive", "even")]
)
def test_the_rule_between_processes(split: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = made(monkeypatch, torchrun(1, 1, 2), 4, split=split)
    assert trainer.strategy.own_share == OwnShare(2, None, rule)


def test_a_function_of_one_s_own_splits_what_a_process_has(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = made(monkeypatch, torchrun(1, 1, 2), 4, split=lambda n, devices: (n - 1, 1))
    assert sizes_of(trainer, 5) == (4, 1)
    assert trainer.strategy.own_share == OwnShare(2)


@pytest.mark.parametrize(
    "variables, devices, num_nodes, message",
    [
        (torchrun(0, 2, 1), 2, 1, r"num_nodes: expected 2, as 2 processes were started, 1 on"),
        (torchrun(0, 1, 2), 2, 2, r"num_nodes: expected 1, as 2 processes were started, 2 on"),
        (slurm(0, 2, 2), 2, 3, r"num_nodes: expected 2, as 4 processes"),
        (torchrun(0, 1, 1), 2, 2, r"num_nodes: expected 1, as nobody has started processes"),
        ({}, 2, 2, r"num_nodes: expected 1, as nobody.*by hand, with NODE_RANK, MASTER_ADDR"),
        (
            {"NODE_RANK": 1},
            2,
            2,
            r"variables NODE_RANK.*nothing for MASTER_ADDR, MASTER_PORT",
        ),
        (by_hand(2, 3, 1), 2, 2, r"NODE_RANK: expected a number from 0 to 1, .*got 2"),
        (by_hand(1, 1, 2) | {"LOCAL_RANK": 2}, 2, 1, r"LOCAL_RANK: expected a number from 0 to 1"),
        (torchrun(0, 1, 3), 2, 1, r"devices: expected at least 3, one for each.*got 2"),
    ],
)
def test_what_does_not_go_together_is_refused(
    variables: Variables,
    devices: int,
    num_nodes: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match=message):
        made(monkeypatch, variables, devices, num_nodes)


def test_machines_may_have_unequal_numbers_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two agents of torchrun: one with a process, the other with three."""
    own = torchrun(2, 2, 2) | {"LOCAL_WORLD_SIZE": 3, "LOCAL_RANK": 1}
    trainer = made(monkeypatch, own, 6, num_nodes=2)
    assert trainer.world_size == 4 and len(trainer.strategy.parallel_devices) == 2


def test_variables_of_a_cluster_that_has_started_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a shell of SLURM, a user starts a process on each machine."""
    shell = {"SLURM_NTASKS": 4, "SLURM_NTASKS_PER_NODE": 2, "SLURM_JOB_NAME": "bash"}
    trainer = made(monkeypatch, shell | by_hand(1, 2, 1), 2, num_nodes=2)
    assert isinstance(trainer.strategy.cluster_environment, LightningEnvironment)
    assert (trainer.world_size, trainer.global_rank) == (2, 1)
    assert len(trainer.strategy.parallel_devices) == 2


class OwnEnvironment(ClusterEnvironment):
    """A user's, who knows the processes in a way of their own."""

    creates_processes_externally = True
    main_address, main_port = "127.0.0.1", 12345

    @staticmethod
    def detect() -> bool:
        return True

    def world_size(self) -> int:
        return 4

    def set_world_size(self, size: int) -> None:
        raise NotImplementedError

    def global_rank(self) -> int:
        return 3

    def set_global_rank(self, rank: int) -> None:
        raise NotImplementedError

    def local_rank(self) -> int:
        return 1

    def node_rank(self) -> int:
        return 1


def test_an_environment_of_the_user_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    own = OwnEnvironment()
    trainer = made(monkeypatch, {}, 4, num_nodes=2, cluster_environment=own)
    assert (trainer.world_size, trainer.global_rank, trainer.local_rank) == (4, 3, 1)
    assert len(trainer.strategy.parallel_devices) == 2


# Shares


@given(st.integers(1, 40), st.integers(1, 8))
def test_devices_are_shared_out_without_rest(count: int, processes: int) -> None:
    if count < processes:
        with pytest.raises(ValueError, match="devices: expected at least"):
            share(count, processes, 0)
        return
    parts = [list(range(count))[share(count, processes, rank)] for rank in range(processes)]
    assert [device for part in parts for device in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(
    st.integers(0, 300),
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
    st.sampled_from(["even", "chunk", "weights"]),
    st.data(),
)
def test_a_process_gets_what_its_devices_would_get_in_one_process(
    n: int, counts: list[int], how: str, data: st.DataObject
) -> None:
    k = sum(counts)
    weights: tuple[float, ...] | None = None
    if how == "weights":
        drawn = data.draw(st.lists(st.integers(0, 5), min_size=k, max_size=k).filter(any))
        weights = tuple(drawn)
    sizes = {"even": even, "chunk": chunk}[how](n, k) if weights is None else weighted(n, weights)
    told, at, expected = [], 0, []
    for count in counts:
        own = None if weights is None else weights[at : at + count]
        told.append(OwnShare(count, own, "chunk" if how == "chunk" else "even"))
        expected.append(sum(sizes[at : at + count]))
        at += count
    shares = agreed_shares(told)
    assert shares(n) == tuple(expected)
    assert sum(shares(n)) == n
    assert shares(n) == between_processes(n, counts, weights, shares.rule)


@pytest.mark.parametrize(
    "told, message",
    [
        ([OwnShare(1, (1,)), OwnShare(1)], r"weights: .*\[1\] in process 0, None in process 1"),
        ([OwnShare(1, (0,)), OwnShare(1, (0,))], r"weights: expected one above 0"),
        ([OwnShare(1), OwnShare(1, None, "chunk")], r"split: .*'even' in process 0, 'chunk' in"),
    ],
)
def test_shares_that_do_not_go_together(told: list[OwnShare], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        agreed_shares(told)


# The process group


@pytest.mark.parametrize("seconds, expected", [(90, 90.0), (1.5, 1.5), (timedelta(minutes=2), 120)])
def test_timeouts(seconds: Any, expected: float) -> None:
    assert DataParallelStrategy(timeout=seconds)._timeout == timedelta(seconds=expected)


@pytest.mark.parametrize("timeout", [0, -1, True, "60", float("nan"), float("inf"), timedelta(0)])
def test_timeouts_that_are_none(timeout: Any) -> None:
    with pytest.raises(ValueError, match="timeout: expected more than 0 seconds"):
        DataParallelStrategy(timeout=timeout)


@pytest.mark.parametrize("backend", ["gloo", "nccl", "cpu:gloo,cuda:nccl", "GLOO"])
def test_backends(backend: str) -> None:
    DataParallelStrategy(process_group_backend=backend)


@pytest.mark.parametrize("backend", ["glo", "", "cpu:", "cpu:gloo,nccl", "a:b:c", 5, "undefined"])
def test_backends_that_are_none(backend: Any) -> None:
    with pytest.raises(ValueError, match="process_group_backend: expected a name"):
        DataParallelStrategy(process_group_backend=backend)


def test_a_backend_that_does_not_serve_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = made(monkeypatch, torchrun(0, 1, 2), 2, process_group_backend="nccl")
    with pytest.raises(ValueError, match="process_group_backend: expected one for cpu devices"):
        trainer.strategy.setup_environment()


def test_a_process_group_of_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = made(monkeypatch, torchrun(1, 1, 2), 2)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match=r"process 1 of 2, got process 0 of 1"):
            trainer.strategy.setup_environment()
    finally:
        dist.destroy_process_group()
