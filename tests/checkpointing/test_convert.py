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
SUFFIXES = [".pt", ".ckpt"]


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
    torch.save(nn.DataParallel(net()).state_dict(), tmp_path / "old.pt")
    torch.save(net().state_dict(), tmp_path / "clean.pt")
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "names.pt")
    content = {"model": nn.DataParallel(net()).state_dict(), "epoch": 3}
    torch.save({**content, "ema": {"module.w": torch.ones(2)}}, tmp_path / "script.pth")
    return tmp_path


def test_strip_and_add(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(files, "old.pt", "new.pt", "--strip") == 0
    printed = capsys.readouterr().out
    assert printed.index("module.0.weight") < printed.index("9 of 9 keys") < printed.index("Wrote")
    found = torch.load(files / "new.pt", weights_only=True)
    assert_equal_trees(found, net().state_dict(), "stripped", **EXACT)
    assert found._metadata["1"] == {"version": 2}
    assert run(files, "new.pt", "back.pt", "--add") == 0
    found = torch.load(files / "back.pt", weights_only=True)
    assert_equal_trees(found, nn.DataParallel(net()).state_dict(), "added", **EXACT)


def test_like_a_reference(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(files, "old.pt", "new.pt", "--like", "clean.pt") == 0
    assert keys(files / "new.pt") == list(net().state_dict())
    assert run(files, "clean.pt", "as_old.pt", "--like", "old.pt") == 0
    assert keys(files / "as_old.pt") == keys(files / "old.pt")
    capsys.readouterr()
    assert run(files, "old.pt", "none.pt", "--like", "names.pt") == 1
    error = capsys.readouterr().err
    assert "--like" in error and "names.pt: state_dict: expected" in error
    assert "got 9 of 9 that fit none of them: ['module.0.weight'" in error
    assert "the reference has 2 others: ['bias', 'weight']" in error
    assert not (files / "none.pt").exists()


@pytest.mark.parametrize("target", SUFFIXES)
@pytest.mark.parametrize("source", SUFFIXES)
def test_every_format_into_every_other(source: str, target: str, files: Path) -> None:
    assert run(files, "old.pt", f"source{source}") == 0
    assert set(keys(files / f"source{source}")) == set(keys(files / "old.pt")), "no new names"
    assert run(files, f"source{source}", f"target{target}", "--strip") == 0
    found = weights_in(read(files / f"target{target}"), "target")
    assert_equal_trees(found, net().state_dict(), "target", **EXACT)


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


def test_nothing_is_written_over(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = (files / "clean.pt").read_bytes()
    assert run(files, "old.pt", "clean.pt", "--strip") == 1
    assert "which exists. Give another name, or --force" in capsys.readouterr().err
    assert (files / "clean.pt").read_bytes() == content
    assert run(files, "old.pt", "old.pt", "--strip", "--force") == 0  # in place
    assert keys(files / "old.pt") == keys(files / "clean.pt")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["code.pt", "new.pt"], "with code in it, of which nothing was run"),
        (["both.pt", "new.pt", "--like", "clean.pt"], "for both 'module.0.weight' and '0.weight'"),
        (["none.pt", "new.pt"], r"No such file or directory: .*none\.pt"),
        (["old.pt", "new.SAFETENSORS"], r"DST: expected .*safetensors\.torch\.save_file"),
        (["empty.pt", "new.pt"], r"empty\.pt: expected .* got a file that begins with b''"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (files / "empty.pt").touch()
    torch.save({"model": net().state_dict(), "options": nn.Linear(1, 1)}, files / "code.pt")
    torch.save({**torch.load(files / "old.pt"), "0.weight": torch.ones(4, 3)}, files / "both.pt")
    assert run(files, *arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert re.search(message, error), error
    assert not (files / "new.pt").exists()


def test_unsafe_runs_the_code_and_strip_and_add_exclude_each_other(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(files, "old.pt", "new.pt", "--strip", "--add")
    assert "not allowed with" in capsys.readouterr().err
    torch.save({"model": net().state_dict(), "options": nn.Linear(1, 1)}, files / "code.pt")
    assert run(files, "code.pt", "new.pt", "--add", "--unsafe") == 0
    found = torch.load(files / "new.pt", weights_only=False)
    assert list(found["model"]) == keys(files / "old.pt") and found["options"].in_features == 1
