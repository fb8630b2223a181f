"""`python -m lightning_dp.convert`: renames and rewrites files, and harms none."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.oracle import Classifier, assert_equal_trees, loader, trainer
from torch import nn

from lightning_dp import table
from lightning_dp.checkpointing.convert import main
from lightning_dp.checkpointing.files import read, weights_in

W = torch.ones(4, 3)
EXACT = {"atol": 0.0, "rtol": 0.0}
SUFFIXES = [".pt", ".ckpt", ".SAFETENSORS"]


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
    optimizer = torch.optim.Adam(net().parameters()).state_dict()
    content = {"model": nn.DataParallel(net()).state_dict(), "optimizer": optimizer, "epoch": 3}
    torch.save({**content, "ema": {"shadow": content["model"]}}, tmp_path / "script.pth")
    return tmp_path


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A Trainer's checkpoint."""
    job = trainer(2, max_epochs=1)
    job.fit(Classifier(), loader(), loader())
    job.save_checkpoint(tmp_path / "last.ckpt")
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
    nn.DataParallel(net()).load_state_dict(found)


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
    assert "the reference has 2 others: ['weight', 'bias']" in error
    assert not (files / "none.pt").exists()


@pytest.mark.parametrize("target", SUFFIXES)
@pytest.mark.parametrize("source", SUFFIXES)
def test_every_format_into_every_other(source: str, target: str, files: Path) -> None:
    pytest.importorskip("safetensors")
    assert run(files, "old.pt", f"source{source}") == 0
    assert set(keys(files / f"source{source}")) == set(keys(files / "old.pt")), "no new names"
    assert run(files, f"source{source}", f"target{target}", "--strip") == 0
    found = weights_in(read(files / f"target{target}"), "target")
    assert_equal_trees(found, net().state_dict(), "target", **EXACT)


def test_what_else_is_in_a_file(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.load(files / "script.pth", weights_only=True)
    assert run(files, "script.pth", "new.pt", "--strip") == 0  # both are torch's
    found = torch.load(files / "new.pt", weights_only=True)
    clean = net().state_dict()
    expected = {**before, "model": clean, "ema": {"shadow": clean}}
    assert_equal_trees(found, expected, "script", **EXACT)
    capsys.readouterr()
    assert run(files, "script.pth", "new.ckpt", "--strip") == 0
    assert "Of ['model', 'optimizer', 'epoch', 'ema'] only the weights" in capsys.readouterr().out
    found = torch.load(files / "new.ckpt", weights_only=True)
    assert found.keys() == {"state_dict", "pytorch-lightning_version"}


def test_trainers_checkpoints_are_resumed_from_after_a_conversion(trained: Path) -> None:
    before = torch.load(trained / "last.ckpt", weights_only=True)
    assert run(trained, "last.ckpt", "added.ckpt", "--add") == 0
    added = torch.load(trained / "added.ckpt", weights_only=True)
    assert list(added["state_dict"]) == [f"module.{key}" for key in before["state_dict"]]
    assert run(trained, "added.ckpt", "back.ckpt", "--strip") == 0
    back = torch.load(trained / "back.ckpt", weights_only=True)
    assert back.pop("lightning_dp", {}) == {}
    assert_equal_trees(back, before, "back", **EXACT)
    ends = []
    for name in ("last.ckpt", "added.ckpt", "back.ckpt"):
        module = Classifier()
        trainer(2, max_epochs=2).fit(module, loader(), loader(), ckpt_path=trained / name)
        ends.append(module.state_dict())
    for end in ends[1:]:
        assert_equal_trees(end, ends[0], "resumed", **EXACT)
    assert run(trained, "last.ckpt", "bare.pt") == 0
    Classifier().load_state_dict(torch.load(trained / "bare.pt", weights_only=True))
    assert run(trained, "bare.pt", "weights.ckpt") == 0
    Classifier.load_from_checkpoint(trained / "weights.ckpt")


def test_strip_takes_what_add_has_added_to_a_trainers_checkpoint(tmp_path: Path) -> None:
    weights = {"module.a": torch.ones(1), "module.module.b": torch.ones(2)}
    content = {
        "pytorch-lightning_version": "2.6.0",
        "loops": {},
        "state_dict": weights,
        # Averages of another module, and those of this one in another wrapper.
        "callbacks": {"One": {"module.c": torch.ones(3)}, "Two": {"module.module.a": weights}},
    }
    torch.save(content, tmp_path / "a.ckpt")
    assert run(tmp_path, "a.ckpt", "b.ckpt", "--add") == 0
    assert keys(tmp_path / "b.ckpt") == ["module.module.a", "module.module.module.b"]
    assert run(tmp_path, "b.ckpt", "c.ckpt", "--strip") == 0
    found = torch.load(tmp_path / "c.ckpt", weights_only=True)
    assert_equal_trees(found, {**content, "lightning_dp": {}}, "there and back", **EXACT)
    assert run(tmp_path, "b.ckpt", "c.pt", "--strip") == 0
    assert keys(tmp_path / "c.pt") == list(weights)
    assert run(tmp_path, "a.ckpt", "d.ckpt", "--strip") == 0  # no note: a guess about the model
    found = torch.load(tmp_path / "d.ckpt", weights_only=True)
    assert list(found["state_dict"]) == ["a", "module.b"]
    assert list(found["callbacks"]["One"]) == ["module.c"]


def test_nothing_is_written_over_or_by_a_dry_run(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = (files / "clean.pt").read_bytes()
    assert run(files, "old.pt", "clean.pt", "--strip") == 1
    assert "which exists. Give another name, or --force" in capsys.readouterr().err
    assert run(files, "old.pt", "clean.pt", "--strip", "--dry-run") == 0
    assert "Nothing was written" in capsys.readouterr().out
    assert run(files, "old.pt", "none.pt", "--strip", "--dry-run") == 0
    assert (files / "clean.pt").read_bytes() == content and not (files / "none.pt").exists()
    assert run(files, "old.pt", "old.pt", "--strip", "--force") == 0  # in place
    assert keys(files / "old.pt") == keys(files / "clean.pt")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["module.pt", "new.pt"], "with code in it, of which nothing was run"),
        (["both.pt", "new.pt", "--like", "clean.pt"], "got both 'module.0.weight' and '0.weight'"),
        (["none.pt", "new.pt"], "none.pt: expected a checkpoint file, got the name of no file"),
        (["empty.pt", "new.pt"], r"empty\.pt: expected .* got a file of 0 bytes"),
        (["old.pt", "new.pt", "--like", "none.pt"], "got the name of no file"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (files / "empty.pt").touch()
    torch.save({"model": net(), "epoch": 3}, files / "module.pt")
    torch.save({**torch.load(files / "old.pt"), "0.weight": W}, files / "both.pt")
    assert run(files, *arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert re.search(message, error), error
    assert not (files / "new.pt").exists()
    with pytest.raises(SystemExit):
        run(files, "old.pt", "new.pt", "--strip", "--add")
    assert "not allowed with" in capsys.readouterr().err
    assert run(files, "module.pt", "new.pt", "--add", "--unsafe") == 0
    found = torch.load(files / "new.pt", weights_only=True)
    assert keys(files / "new.pt") == keys(files / "old.pt") and found["epoch"] == 3


@pytest.mark.parametrize("has_rich", [True, False])
def test_the_table_with_and_without_rich(
    has_rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not has_rich:
        for name in ("rich", "rich.console", "rich.table"):
            monkeypatch.setitem(sys.modules, name, None)
    rows: list[Any] = [(f"a[{i}]." + "x" * 90, "b", "(1,)") for i in range(table.MOST_ROWS + 7)]
    table.print_table(("key", "new name", "shape"), rows)
    printed = capsys.readouterr().out
    assert rows[3][0] in printed, "rows are not broken in a file"
    assert "... and 7 more" in printed and "a[60]" not in printed
