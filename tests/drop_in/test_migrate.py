"""A script for nn.DataParallel gives the weights that one device gives, and clean checkpoints."""

from pathlib import Path

import pytest
import torch
from support.device_kinds import on_separate
from support.oracle import devices_of
from support.programs import in_here

from lightning_dp import DataParallel
from lightning_dp.examples import migrate

CPU = torch.device("cpu")


def trained(model: torch.nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)  # of the order of the data
    migrate.train(model, migrate.load_data()[0], epochs=2, device=device)
    return {key: value.cpu() for key, value in model.state_dict().items()}


@pytest.fixture
def net() -> migrate.Net:
    torch.manual_seed(0)
    return migrate.Net()


@on_separate
def test_weights_are_those_of_the_bare_module_on_the_cpu(net: migrate.Net, on: str) -> None:
    bare = migrate.Net()
    bare.load_state_dict(net.state_dict())
    root, _ = devices_of(2)
    wrapped = DataParallel(net.to(root), device_ids=[0, 1], output_device=0)
    two = trained(wrapped, root)
    wrapped.close()
    assert wrapped.last_sizes == (48, 48)
    one = trained(bare, CPU)
    assert two.keys() == one.keys()
    for key in one:
        torch.testing.assert_close(two[key], one[key], atol=1e-5, rtol=0)


def test_old_keys_are_loaded_and_clean_ones_saved(tmp_path: Path) -> None:
    printed = in_here(migrate.main, "--epochs=3", f"--folder={tmp_path / 'here'}")
    old, new = (
        torch.load(tmp_path / "here" / f"{name}.pt", map_location="cpu") for name in ("old", "new")
    )
    assert all(key.startswith("module.") for key in old)
    assert [f"module.{key}" for key in new] == list(old)
    assert new.keys() == migrate.Net().state_dict().keys()
    lines = [line for line in printed.splitlines() if line.startswith("test/acc")]
    accuracies = [float(line.split()[1]) for line in lines]
    assert len(accuracies) == 2 and accuracies[0] == accuracies[1] > 0.8
