"""Files and paths that we did not make: notes in safetensors, deep keys, links, devices, pipes."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from oracle import assert_equal_trees
from torch import nn

from lightning_dp import ModulePrefixCheckpointIO
from lightning_dp.checkpointing import load_weights
from lightning_dp.checkpointing.files import read, replacing, write_safetensors

EXACT: dict[str, Any] = {"rtol": 0, "atol": 0}
STATE = {"weight": torch.arange(4.0).view(2, 2), "bias": torch.arange(2.0) + 7}


# --- tied weights ---


class Tied(LightningModule):
    """Two names for one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 3)
        self.decoder = nn.Linear(3, 3)
        self.decoder.weight = self.encoder.weight

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Takes no loss."""

    def test_dataloader(self) -> list[torch.Tensor]:
        return [torch.ones(2, 3)]


@pytest.mark.parametrize("left_out", ["encoder.weight", "decoder.weight"])
def test_the_module_says_what_a_file_left_out_because_it_is_tied(
    left_out: str, tmp_path: Path
) -> None:
    library = pytest.importorskip("safetensors.torch")
    net, other, third = Tied(), Tied(), Tied()
    state = {key: value for key, value in net.state_dict().items() if key != left_out}
    path = str(tmp_path / "theirs.safetensors")
    library.save_file(state, path)
    load_weights(other, path)
    assert_equal_trees(dict(other.state_dict()), dict(net.state_dict()), "loaded", **EXACT)
    silent = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(strategy="dp_custom", accelerator="cpu", devices=2, **silent)
    trainer.test(third, ckpt_path=path, verbose=False)
    assert_equal_trees(dict(third.state_dict()), dict(net.state_dict()), "tested", **EXACT)


def test_a_weight_that_is_missing_and_not_tied_is_still_missing(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    state = {key: value for key, value in Tied().state_dict().items() if "weight" not in key}
    library.save_file(state, str(tmp_path / "x.safetensors"))
    with pytest.raises(RuntimeError, match=r"Missing key.*encoder.weight"):
        load_weights(Tied(), tmp_path / "x.safetensors")


# --- links, devices, pipes ------------------------------------------------------------------------

SUFFIXES = [".ckpt", ".safetensors"]
CHECKPOINT = {"state_dict": STATE, "pytorch-lightning_version": "2.6.6"}


def save(path: Path) -> None:
    """Writes STATE as the converter does, in the format of the name."""
    if path.suffix == ".safetensors":
        pytest.importorskip("safetensors")
        write_safetensors(STATE, path)
    else:
        ModulePrefixCheckpointIO().save_checkpoint(dict(CHECKPOINT), path)


def weights(path: Path) -> Any:
    loaded = read(path)
    return loaded.get("state_dict", loaded)


@pytest.mark.skipif(os.name == "nt", reason="links and permissions of POSIX")
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_link_stays_and_its_target_is_written(suffix: str, tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    target, link, second = (tmp_path / name for name in ("far/t", "link" + suffix, "two" + suffix))
    target.write_bytes(b"old")
    target.chmod(0o640)
    link.symlink_to(Path("far") / "t")  # relative, as people make them
    second.symlink_to(link)
    save(second)
    assert second.is_symlink() and link.is_symlink() and not target.is_symlink()
    assert_equal_trees(weights(second), STATE, "through the link", **EXACT)
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert sorted(p.name for p in (tmp_path / "far").iterdir()) == ["t"]


@pytest.mark.skipif(os.name == "nt", reason="links of POSIX")
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_link_to_nothing_makes_its_target(suffix: str, tmp_path: Path) -> None:
    link = tmp_path / f"link{suffix}"
    link.symlink_to(tmp_path / "new" / "file")
    save(link)
    assert link.is_symlink() and (tmp_path / "new" / "file").is_file()


@pytest.mark.skipif(os.name == "nt", reason="permissions of POSIX")
@pytest.mark.parametrize("mode", [0o600, 0o644, 0o664])
def test_permissions_are_those_of_the_file_before(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    path.write_bytes(b"old")
    path.chmod(mode)
    save(path)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    save(tmp_path / "new.ckpt")
    (tmp_path / "plain").open("wb").close()
    new, plain = (stat.S_IMODE((tmp_path / n).stat().st_mode) for n in ("new.ckpt", "plain"))
    assert new == plain  # as the umask says


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes of POSIX")
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_pipe_is_written_to_and_stays_a_pipe(suffix: str, tmp_path: Path) -> None:
    path, link = tmp_path / f"pipe{suffix}", tmp_path / f"link{suffix}"
    os.mkfifo(path)
    link.symlink_to(path)
    for name in (path, link):
        got: list[bytes] = []
        reader = threading.Thread(target=lambda got=got: got.append(path.read_bytes()))
        reader.start()
        save(name)
        reader.join(timeout=60)
        (tmp_path / f"copy{suffix}").write_bytes(got[0])
        assert_equal_trees(weights(tmp_path / f"copy{suffix}"), STATE, "piped", **EXACT)
        assert stat.S_ISFIFO(path.stat().st_mode) and link.is_symlink()


def test_after_an_error_a_linked_file_is_as_it_was(tmp_path: Path) -> None:
    target, link = tmp_path / "t", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(target)
    with pytest.raises(RuntimeError, match="half"), replacing(link) as temporary:
        temporary.write_bytes(b"new")
        raise RuntimeError("half")
    assert target.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 2
