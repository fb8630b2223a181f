"""Devices as people name them, and errors that tell apart the machine's ids and the process's."""

import pytest
import torch

from lightning_dp import DataParallel, DataParallelStrategy
from lightning_dp.parallel import devices
from lightning_dp.parallel.devices import (
    all_devices,
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


def test_a_machine_without_accelerator_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "accelerator_type", lambda: None)
    with pytest.raises(ValueError, match=r"device_ids\[0\].*no accelerator.*\['cpu'\] \* K"):
        DataParallel(torch.nn.Linear(1, 1), device_ids=[0, 1])
    assert all_devices() == [torch.device("cpu")]
