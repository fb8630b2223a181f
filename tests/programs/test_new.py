"""`python -m lightning_dp new FOLDER`: what it writes, and that it runs as written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from lightning_dp.app import new
from lightning_dp.app.devices import register_resolvers
from lightning_dp.app.template.checks import trained


def test_the_template_composes_with_our_groups() -> None:
    register_resolvers()
    with initialize_config_dir(str(new.TEMPLATE / "conf"), version_base="1.3"):
        cfg = compose("main", ["strategy=dp_adaptive", "trainer.devices=2", "data.features=3"])
    assert cfg.strategy.split == "adaptive" and cfg.trainer.devices == 2
    model, data = instantiate(cfg.model), instantiate(cfg.data)
    assert type(model).__module__ == "lightning_dp.app.template.model"
    assert model.net[0].in_features == 3 and len(data.train) == 600


def test_the_templates_module_trains() -> None:
    assert all(p.isfinite().all() for p in trained(2).parameters())


def test_a_project_has_its_own_name_everywhere(tmp_path: Path) -> None:
    folder = tmp_path / "My-Net 2"
    assert new.create(folder) == "my_net_2"
    files = {str(f.relative_to(folder)): f.read_text() for f in folder.rglob("*.*") if f.is_file()}
    wanted = {"__main__.py", "model.py", "data.py", "conf/main.yaml", "conf/model/own.yaml"}
    assert {f"my_net_2/{name}" for name in wanted} | {"README.md", "pytest.ini"} <= set(files)
    assert "tests/test_same_numbers.py" in files
    assert not [name for name, text in files.items() if "app.template" in text]


@pytest.mark.parametrize(
    "folder, name",
    [
        ("net", "net"),
        ("3d", "project_3d"),
        ("torch", "project_torch"),
        ("json", "project_json"),
        ("...", "project"),
        ("lambda", "project_lambda"),
        ("Über Netz", "ber_netz"),
    ],
)
def test_names_can_be_imported(folder: str, name: str) -> None:
    assert new.package_name(folder) == name and name.isidentifier()


def test_what_exists_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "kept.txt"
    kept.write_text("mine")
    for folder in (tmp_path, kept):
        assert new.main([str(folder)]) == 2
        assert "expected a new or an empty folder" in capsys.readouterr().err
    assert kept.read_text() == "mine" and list(tmp_path.iterdir()) == [kept]


def test_an_empty_folder_is_taken_and_another_name_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "2 nets").mkdir()
    assert new.main([str(tmp_path / "2 nets")]) == 0
    assert "The package is called project_2_nets" in capsys.readouterr().out


@pytest.mark.slow
def test_a_project_runs_as_written(tmp_path: Path) -> None:
    folder = tmp_path / "own-net"
    name = new.create(folder)
    for command in (["pytest", "-q"], [name, "trainer.devices=2", "trainer.max_epochs=2"]):
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=300,
        )
        told = done.stdout + done.stderr
        assert done.returncode == 0, told
        assert "warning" not in told.lower(), told
    assert list(folder.glob("logs/train/runs/*/checkpoints/*.ckpt"))
