"""`lightning-dp convert`: renames and rewrites files, and harms none."""

import re
from pathlib import Path

import pytest
import torch
from support.oracle import Classifier, assert_equal_trees, loader, trainer
from torch import nn

from lightning_dp.checkpointing.convert import main
from lightning_dp.checkpointing.files import read, weights_in

EXACT = {"atol": 0.0, "rtol": 0.0}


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def run(folder: Path, *arguments: str) -> int:
    """The converter, with paths in a folder."""
    return main([a if a.startswith("-") else str(folder / a) for a in arguments])


def keys(path: Path) -> list[str]:
    return list(weights_in(read(path), path))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with a wrapped state, a bare one, another, and a script's checkpoint."""
    wrapped = nn.DataParallel(net()).state_dict()
    torch.save(wrapped, tmp_path / "old.pt")
    torch.save({"state_dict": wrapped, "pytorch-lightning_version": "2"}, tmp_path / "old.ckpt")
    torch.save(net().state_dict(), tmp_path / "clean.pt")
    content = {"model": wrapped, "epoch": 3, "ema": {"module.w": torch.ones(2)}}
    torch.save(content, tmp_path / "script.pth")
    torch.save({"model": net().state_dict(), "options": nn.Linear(1, 1)}, tmp_path / "code.pt")
    (tmp_path / "empty.pt").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "is_bare"),
    [
        ("old.pt new.pt --strip", True),
        ("old.pt old.pt --strip --force", True),
        ("old.ckpt new.ckpt --strip", True),
        ("old.pt new.ckpt", False),
        ("clean.pt new.pt --add", False),
    ],
)
def test_renaming_and_formats(
    arguments: str, is_bare: bool, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(files, *arguments.split()) == 0
    printed = capsys.readouterr().out
    is_other = is_bare != arguments.startswith("clean")
    if arguments.count("-"):
        assert printed.index("module.0.weight") < printed.index("9 of 9 keys") and is_other
    assert printed.endswith(f"Wrote {files / arguments.split()[1]}.\n")
    expected = (net() if is_bare else nn.DataParallel(net())).state_dict()
    found = weights_in(torch.load(files / arguments.split()[1], weights_only=True), "it")
    assert_equal_trees(dict(found), dict(expected), "new", **EXACT)
    assert found._metadata[("" if is_bare else "module.") + "1"] == {"version": 2}


def test_what_else_is_in_a_file(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.load(files / "script.pth", weights_only=True)
    assert run(files, "script.pth", "new.pt", "--strip") == 0  # both are torch's
    found = torch.load(files / "new.pt", weights_only=True)
    assert_equal_trees(found, {**before, "model": net().state_dict()}, "script", **EXACT)
    capsys.readouterr()
    assert run(files, "script.pth", "new.ckpt", "--strip") == 0
    assert "Of ['model', 'epoch', 'ema'] only the weights" in capsys.readouterr().out
    found = torch.load(files / "new.ckpt", weights_only=True)
    assert found.keys() == {"state_dict", "pytorch-lightning_version"}
    assert run(files, "code.pt", "code.ckpt", "--add", "--unsafe") == 0


def test_trainers_checkpoints_are_resumed_from_after_a_conversion(tmp_path: Path) -> None:
    job = trainer(2, max_epochs=1)
    job.fit(Classifier(), loader(), loader())
    job.save_checkpoint(tmp_path / "last.ckpt")
    before = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert run(tmp_path, "last.ckpt", "added.ckpt", "--add") == 0
    assert keys(tmp_path / "added.ckpt") == [f"module.{key}" for key in before["state_dict"]]
    assert run(tmp_path, "added.ckpt", "back.ckpt", "--strip") == 0
    back = torch.load(tmp_path / "back.ckpt", weights_only=True)
    assert_equal_trees(back, before, "back", **EXACT)
    ends = []
    for name in ("last.ckpt", "added.ckpt"):
        module = Classifier()
        trainer(2, max_epochs=2).fit(module, loader(), loader(), ckpt_path=tmp_path / name)
        ends.append(module.state_dict())
    assert_equal_trees(*ends, "resumed", **EXACT)
    assert run(tmp_path, "last.ckpt", "bare.pt") == 0
    Classifier().load_state_dict(torch.load(tmp_path / "bare.pt", weights_only=True))
    assert run(tmp_path, "bare.pt", "weights.ckpt") == 0
    Classifier.load_from_checkpoint(tmp_path / "weights.ckpt")
    # Without a note of what was added, --strip takes what is around all keys.
    before["state_dict"] = {f"module.{key}": v for key, v in before["state_dict"].items()}
    torch.save(before, tmp_path / "only.ckpt")
    assert run(tmp_path, "only.ckpt", "stripped.ckpt", "--strip") == 0
    assert keys(tmp_path / "stripped.ckpt") == keys(tmp_path / "last.ckpt")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("code.pt new.pt", "with code in it, of which nothing was run"),
        ("none.pt new.pt", r"No such file or directory: .*none\.pt"),
        ("old.pt new.SAFETENSORS", r"DST: expected .*safetensors\.torch\.save_file"),
        ("empty.pt new.pt", r"empty\.pt: expected .* got a file that begins with b''"),
        ("old.pt clean.pt --strip", "which exists. Give another name, or --force"),
    ],
)
def test_mistakes_are_one_line(
    arguments: str, message: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = (files / "clean.pt").read_bytes()
    assert run(files, *arguments.split()) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert re.search(message, error), error
    assert not (files / "new.pt").exists() and (files / "clean.pt").read_bytes() == content
