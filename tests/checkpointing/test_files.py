"""Weights saved anywhere load anywhere; files are written whole, or refused by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import LightningModule
from support.oracle import assert_equal_trees, loader, trainer
from torch import Tensor, nn

from lightning_dp import ModulePrefixCheckpointIO
from lightning_dp.checkpointing.files import load_weights, read

EXACT = {"atol": 0.0, "rtol": 0.0}


class Net(nn.Module):
    """With buffers, tied weights, and a layer that is really called `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10)
        self.module = nn.Linear(10, 10)
        self.head = nn.Linear(10, 10)
        self.head.weight = self.module.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.module(self.norm(x)).tanh())
        return out


class Holder(LightningModule):
    """What people train a bare module in."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = Net() if net is None else net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out: Tensor = self.net(batch[0]).square().mean()
        return out

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.net(batch[0]).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def trained_net() -> Net:
    """Every value differs from what a new one has."""
    torch.manual_seed(1)
    net = Net()
    with torch.no_grad():
        for tensor in net.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape) if tensor.is_floating_point() else 7)
        net.norm.running_var.abs_()
    return net.eval()


def compiled(net: nn.Module) -> Any:
    return torch.compile(net, backend="eager")


Save = Callable[[Net, Path], Any]


def state_of(wrap: Callable[[Net], Any]) -> Save:
    return lambda net, path: torch.save(wrap(net).state_dict(), path)


def by_trainer(devices: int, strategy: str) -> Save:
    def save(net: Net, path: Path) -> None:
        job = trainer(devices, strategy, max_epochs=0)
        job.fit(Holder(net), loader(), loader())
        job.save_checkpoint(path)

    return save


def as_safetensors(net: Net, path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    library.save_file({k: v.clone() for k, v in nn.DataParallel(net).state_dict().items()}, path)


def in_the_old_format(net: Net, path: Path) -> None:
    torch.save(net.state_dict(), path, _use_new_zipfile_serialization=False)


SOURCES: dict[str, Save] = {
    "bare module": state_of(lambda net: net),
    "bare module in the old format": in_the_old_format,
    "torch.compile of nn.DataParallel": state_of(lambda net: compiled(nn.DataParallel(net))),
    "a script's dict": lambda net, path: torch.save({"epoch": 3, "model": net.state_dict()}, path),
    "Lightning": by_trainer(1, "auto"),
    "our strategy": by_trainer(2, "dp_custom"),
    "safetensors": as_safetensors,
}


def into(wrap: Callable[[Net], Any]) -> Callable[[Net, Path], Any]:
    def load(net: Net, path: Path) -> None:
        result = load_weights(wrap(net), path)
        assert not result.missing_keys and not result.unexpected_keys

    return load


def into_our_strategy(net: Net, path: Path) -> None:
    trainer(2).validate(Holder(net), loader(), ckpt_path=path, verbose=False)


TARGETS: dict[str, Callable[[Net, Path], Any]] = {
    "bare module": into(lambda net: net),
    "nn.DataParallel": into(nn.DataParallel),
    "torch.compile of nn.DataParallel": into(lambda net: compiled(nn.DataParallel(net))),
    "a LightningModule with a compiled net": into(lambda net: Holder(compiled(net))),
    "our strategy": into_our_strategy,
}


@pytest.mark.parametrize("source", SOURCES)
def test_weights_saved_anywhere_load_anywhere(source: str, tmp_path: Path) -> None:
    suffix = {"safetensors": ".safetensors", "Lightning": ".ckpt", "our strategy": ".ckpt"}
    path = tmp_path / f"weights{suffix.get(source, '.pt')}"
    saved = trained_net()
    expected = {key: value.clone() for key, value in saved.state_dict().items()}
    SOURCES[source](saved, path)
    x = torch.randn(5, 10)
    for target, load in TARGETS.items():
        net = Net()
        load(net, path)
        assert_equal_trees(dict(net.state_dict()), expected, f"{source} -> {target}", **EXACT)
        assert torch.equal(net.eval()(x), saved.eval()(x)), target
        assert net.head.weight is net.module.weight


def test_remote_files() -> None:
    fsspec = pytest.importorskip("fsspec")
    net, other = trained_net(), Net()
    io = ModulePrefixCheckpointIO()
    io.save_checkpoint({"state_dict": net.state_dict()}, "memory://folder/weights.ckpt")
    load_weights(other, "memory://folder/weights.ckpt")
    assert_equal_trees(other.state_dict(), net.state_dict(), "remote", **EXACT)
    assert io.load_checkpoint("memory://folder/weights.ckpt")["state_dict"].keys()
    io.remove_checkpoint("memory://folder/weights.ckpt")
    assert not fsspec.filesystem("memory").exists("folder/weights.ckpt")


# What is refused: by name, and without harm


class Malicious:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


READERS: dict[str, Callable[[Path], Any]] = {
    "load_weights": lambda path: load_weights(Net(), path),
    "ckpt_path": lambda path: trainer(2).validate(Holder(), loader(), ckpt_path=path),
}


@pytest.mark.parametrize("is_old", [True, False])
def test_a_malicious_pickle_is_not_run(is_old: bool, tmp_path: Path) -> None:
    proof, path = tmp_path / "was run", tmp_path / "evil.ckpt"
    content = {"state_dict": trained_net().state_dict(), "x": Malicious(proof)}
    torch.save(content, path, _use_new_zipfile_serialization=not is_old)
    for reader in READERS.values():
        with pytest.raises(ValueError, match=r"evil\.ckpt: expected .*nothing was run") as caught:
            reader(path)
        assert not proof.exists()
        assert "mkdir" in str(caught.value) and "weights_only=False" in str(caught.value)
    read(path, weights_only=False)
    assert proof.exists(), "it was one"


OTHER = "a file that begins with b'"
FOREIGN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda path: path.write_bytes(b""), f"{OTHER}'"),
    "text": (lambda path: path.write_text("hello world, hello"), f"{OTHER}hello world,'"),
    "list": (lambda path: torch.save([1, 2], path), "got list"),
    "dict": (lambda path: torch.save({"epoch": 1, 2: 3}, path), r"the keys \['epoch', '2'\]"),
    "module": (lambda path: torch.save(nn.Linear(1, 1), path), "nothing was run: .*Linear"),
    "safetensors' beginning": (
        lambda path: path.write_bytes((10_000).to_bytes(8, "little") + b'{"a": {"dtype'),
        OTHER,
    ),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_other_files_are_named_with_what_was_found(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.ckpt"
    write, found = FOREIGN[kind]
    write(path)
    for reader in READERS.values():
        with pytest.raises(ValueError, match=rf"wrong\.ckpt: expected .*{found}"):
            reader(path)
        with pytest.raises(FileNotFoundError, match=r"none\.ckpt"):
            reader(tmp_path / "none.ckpt")


@pytest.fixture(scope="module", params=["torch", "old", "safetensors"])
def complete(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Path:
    """A good file, to be damaged."""
    folder: Path = tmp_path_factory.mktemp("complete")
    if request.param == "safetensors":
        as_safetensors(trained_net(), folder / "x.safetensors")
        return folder / "x.safetensors"
    old = request.param == "old"
    torch.save(trained_net().state_dict(), folder / "x", _use_new_zipfile_serialization=not old)
    return folder / "x"


@given(st.data())
def test_damaged_files_are_named(complete: Path, data: st.DataObject) -> None:
    content = bytearray(complete.read_bytes())
    path = complete.with_name("damaged" + complete.suffix)
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(ValueError, match=r"damaged.*: expected "):
        load_weights(Net(), path)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        read(path)  # damage in the numbers themselves may not be noticed
    except ValueError as error:
        assert "damaged" in str(error), repr(error)


# Written whole or not at all


def save(path: Path, n: int) -> None:
    content = {"state_dict": {"w": torch.full((2**12,), n)}, "n": n}
    ModulePrefixCheckpointIO().save_checkpoint(content, path)


def test_a_save_that_fails_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "last.ckpt", 1)

    def disk_full(file: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="no space left"):
        save(tmp_path / "last.ckpt", 2)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["n"] == 1
    assert os.listdir(tmp_path) == ["last.ckpt"]


@pytest.mark.skipif(os.name == "nt", reason="links of POSIX")
def test_a_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "t", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(Path("far") / "t")  # relative, as people make them
    save(link, 1)
    assert link.is_symlink() and not target.is_symlink()
    assert read(link)["n"] == 1
