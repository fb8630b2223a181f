"""Devices as people name them, and errors that tell apart the machine's ids and the process's."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lightning_dp
from lightning_dp import DataParallel, DataParallelStrategy
from lightning_dp.parallel import devices
from lightning_dp.parallel.devices import (
    all_devices,
    replica_names,
    resolve_devices,
    resolve_output_device,
)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that sees two of the machine's GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(devices, "accelerator_type", lambda: "cuda")


@pytest.mark.usefixtures("two_gpus")
def test_ids_are_those_of_the_process() -> None:
    assert resolve_devices([1, "cuda:0"]) == [torch.device("cuda", 1), torch.device("cuda", 0)]
    assert all_devices() == [torch.device("cuda", 0), torch.device("cuda", 1)]
    uses = [
        lambda: DataParallelStrategy(devices=[7, 9]),
        lambda: DataParallel(torch.nn.Linear(1, 1), device_ids=[7, 9]),
        lambda: resolve_output_device(9, [torch.device("cuda", 0)]),
    ]
    for use in uses:
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
    assert all(name.startswith(device) for name, device in zip(alone, devices, strict=True))
    assert [name == device for name, device in zip(alone, devices, strict=True)] == [
        devices.count(device) == 1 for device in devices
    ]
    of_processes = [replica_names(places, rank) for rank in range(3)]
    everybody = [*alone, *(name for names in of_processes for name in names)]
    assert len(set(everybody)) == len(everybody)


def test_one_function_says_which_replica_it_is() -> None:
    """So that errors, tables and pictures cannot come to name replicas in two ways."""
    files = Path(lightning_dp.__file__).parent.rglob("*.py")
    found = [file.stem for file in files if "replica {" in file.read_text(encoding="utf-8")]
    assert found == ["devices"]
