"""Devices as people name them, and errors that tell apart the machine's ids and the process's."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dp import DataParallel, DataParallelStrategy
from lightning_dp.parallel import devices
from lightning_dp.parallel.devices import (
    all_devices,
    replica_names,
    resolve_devices,
    resolve_output_device,
)


def test_ids_are_those_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(devices, "accelerator_type", lambda: "cuda")
    assert resolve_devices([1, "cuda:0"]) == [torch.device("cuda", 1), torch.device("cuda", 0)]
    assert all_devices() == [torch.device("cuda", 0), torch.device("cuda", 1)]
    for use in (
        lambda: DataParallelStrategy(devices=[7, 9]),
        lambda: DataParallel(torch.nn.Linear(1, 1), device_ids=[7, 9]),
        lambda: resolve_output_device(9, [torch.device("cuda", 0)]),
    ):
        with pytest.raises(ValueError, match=r": expected one of cuda:0 to cuda:1, got .*[79]"):
            use()


@pytest.mark.parametrize("given", [[], "cuda:0", 3, [True], ["cuda:-1"], [-1], ["gpu"], ["cpu:1"]])
def test_what_is_no_list_of_devices_says_so(given: object) -> None:
    with pytest.raises(ValueError, match=r"devices.*: expected .*, got "):
        resolve_devices(given)


def test_a_machine_without_accelerator_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "accelerator_type", lambda: None)
    with pytest.raises(ValueError, match=r"device_ids\[0\].*no accelerator.*\['cpu'\] \* K"):
        DataParallel(torch.nn.Linear(1, 1), device_ids=[0, 1])
    assert all_devices() == [torch.device("cpu")]


@given(st.lists(st.sampled_from(["cpu", "cuda:0", "cuda:1", "cuda:10", "xpu:0"]), max_size=12))
def test_replicas_of_all_processes_have_names_of_their_own(devices: list[str]) -> None:
    places = list(map(torch.device, devices))
    alone = replica_names(places)
    assert [name == device for name, device in zip(alone, devices, strict=True)] == [
        devices.count(device) == 1 for device in devices
    ]
    everybody = [*alone, *(name for rank in range(3) for name in replica_names(places, rank))]
    assert len(set(everybody)) == len(everybody)
