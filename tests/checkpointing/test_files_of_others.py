"""Files and paths that we did not make: notes in safetensors, deep keys, links, devices, pipes."""

from __future__ import annotations

import json
import os
import stat
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import LightningModule, Trainer
from oracle import assert_equal_trees
from torch import nn

from lightning_dp import ModulePrefixCheckpointIO, normalize_state_dict
from lightning_dp.checkpointing import load_weights
from lightning_dp.checkpointing.atomic_files import replacing
from lightning_dp.checkpointing.files import read

EXACT: dict[str, Any] = {"rtol": 0, "atol": 0}
STATE = {"weight": torch.arange(4.0).view(2, 2), "bias": torch.arange(2.0) + 7}


def file_with_notes(path: Path, notes: str) -> Path:
    """A `.safetensors` file that holds STATE, with any JSON as its metadata."""
    pytest.importorskip("safetensors")
    header = (
        f'{{"__metadata__":{notes},"weight":{{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}},'
        '"bias":{"dtype":"F32","shape":[2],"data_offsets":[16,24]}}'
    ).encode()
    values = STATE["weight"].flatten().tolist() + STATE["bias"].tolist()
    path.write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<6f", *values))
    return path


# --- notes in safetensors -------------------------------------------------------------------------

NAMES = st.sampled_from(["weight", "bias", "a", "b", "format", "lightning_dp.order"])
TEXTS = st.one_of(NAMES, st.text(max_size=8), st.lists(NAMES, max_size=4).map(json.dumps))


@given(notes=st.dictionaries(NAMES, TEXTS, max_size=6))
def test_notes_never_change_what_the_file_has(
    notes: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = file_with_notes(tmp_path_factory.mktemp("notes") / "x.safetensors", json.dumps(notes))
    found = read(path)
    assert_equal_trees({key: found[key] for key in STATE}, STATE, "found", **EXACT)
    if "lightning_dp.order" not in notes:
        assert list(found.keys() - STATE.keys()) == []


@pytest.mark.parametrize(
    "notes",
    [
        '{"weight": "bias"}',
        '{"a": "weight"}',
        '{"lightning_dp.order": "3"}',
        '{"lightning_dp.order": "[[1]]"}',
        '{"lightning_dp.order": "["}',
        '{"lightning_dp.order": "' + "[" * 100_000 + '"}',
        '{"lightning_dp.order": "[\\"weight\\", \\"x\\"]", "x": "weight"}',
        '{"lightning_dp.order": "[\\"weight\\", \\"bias\\", \\"x\\"]", "x": "gone"}',
        "{}",
    ],
    ids=lambda notes: notes[:60],
)
def test_notes_that_are_not_ours_count_for_nothing(notes: str, tmp_path: Path) -> None:
    path = file_with_notes(tmp_path / "x.safetensors", notes)
    assert_equal_trees(read(path), STATE, "found", **EXACT)
    net = nn.Linear(2, 2)
    load_weights(net, path)
    assert_equal_trees(dict(net.state_dict()), STATE, "loaded", **EXACT)


@pytest.mark.parametrize("notes", ['"x"', "[1]", "5", "null", '{"a": 5}', '{"a":' * 5000])
def test_headers_that_no_library_writes_are_one_line(notes: str, tmp_path: Path) -> None:
    path = file_with_notes(tmp_path / "x.safetensors", notes)
    try:
        found = read(path)
    except ValueError as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error)
    else:
        assert_equal_trees(found, STATE, "found", **EXACT)


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


# --- deep keys ------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [300, 5000, 100_000])
@pytest.mark.parametrize("name", ["a", "module"])
def test_keys_too_deep_for_any_module_are_one_line(levels: int, name: str) -> None:
    deep = f"{name}." * levels + "w"
    for state, reference in (({deep: 1}, ["w"]), ({"w": 1}, [deep]), ({deep: 1}, None)):
        with pytest.raises(ValueError, match=r"^state_dict: expected names of at most") as refused:
            normalize_state_dict(state, reference)
        assert len(str(refused.value)) < 500


@pytest.mark.parametrize("levels", [1, 100, 199])
def test_keys_as_deep_as_modules_can_be_are_matched(levels: int) -> None:
    deep = "module." * levels
    assert list(normalize_state_dict({deep + "w": 1}, ["w"])) == ["w"]
    assert list(normalize_state_dict({"w": 1}, [deep + "w"])) == [deep + "w"]


# --- links, devices, pipes ------------------------------------------------------------------------

SUFFIXES = [".ckpt", ".safetensors"]
CHECKPOINT = {"state_dict": STATE, "pytorch-lightning_version": "2.6.6"}


def save(path: Path) -> None:
    """Writes STATE as the converter does, in the format of the name."""
    from lightning_dp.checkpointing import safetensors_files

    if path.suffix == ".safetensors":
        pytest.importorskip("safetensors")
        safetensors_files.write(STATE, path)
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


@pytest.mark.skipif(os.name == "nt", reason="links of POSIX")
def test_links_in_a_circle_are_an_error_that_names_the_path(tmp_path: Path) -> None:
    one, two = tmp_path / "one.ckpt", tmp_path / "two.ckpt"
    one.symlink_to(two)
    two.symlink_to(one)
    with pytest.raises(OSError, match=r"one\.ckpt"):
        save(one)
    assert one.is_symlink() and two.is_symlink()


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


def test_a_file_that_may_not_be_written_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.ckpt"
    path.write_bytes(b"kept")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everything
    with pytest.raises(PermissionError, match=r"x\.ckpt"):
        save(path)
    assert path.read_bytes() == b"kept"


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


@pytest.mark.skipif(not Path("/dev/null").exists(), reason="devices of POSIX")
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_device_is_written_to_and_stays_a_device(suffix: str, tmp_path: Path) -> None:
    link = tmp_path / f"null{suffix}"
    link.symlink_to("/dev/null")
    save(link)
    assert link.is_symlink() and Path("/dev/null").is_char_device()


def test_after_an_error_a_linked_file_is_as_it_was(tmp_path: Path) -> None:
    target, link = tmp_path / "t", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(target)
    with pytest.raises(RuntimeError, match="half"), replacing(link) as temporary:
        temporary.write_bytes(b"new")
        raise RuntimeError("half")
    assert target.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 2
