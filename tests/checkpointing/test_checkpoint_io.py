"""`ModulePrefixCheckpointIO`: names on save and load, other IOs in it and around it."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from support.oracle import Classifier, assert_equal_trees, loader, trainer
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_avg_fn

from lightning_dp import DataParallelStrategy, ModulePrefixCheckpointIO

EXACT = {"atol": 0.0, "rtol": 0.0}
W, B = torch.ones(2, 2), torch.zeros(2)
ON_SAVE = ("strip", "add", "keep")


def state(prefix: str = "") -> dict[str, Tensor]:
    return {f"{prefix}fc.weight": W, f"{prefix}fc.bias": B}


def trainers(prefix: str = "") -> dict[str, Any]:
    """A checkpoint as a Trainer makes it, with averaged weights and what else has such names."""
    return {
        "epoch": 3,
        "global_step": 7,
        "pytorch-lightning_version": "2.6.0",
        "loops": {"fit_loop": {}},
        "state_dict": state(prefix),
        "current_model_state": state(prefix),
        "callbacks": {"Teacher": {"weights": [state("module.")], "decay": 0.9}},
        "optimizer_states": [{"state": {0: {"exp_avg": W}}, "param_groups": [{"params": [0]}]}],
        "hyper_parameters": {"module.lr": 0.1},
    }


def scripts(prefix: str = "") -> dict[str, Any]:
    """A checkpoint as people write it in a script of their own."""
    return {"model": state(prefix), "optimizer": {"module.fc.weight": W}, "epoch": 3}


def saved(io: Any, checkpoint: Any, path: Path) -> Any:
    io.save_checkpoint(checkpoint, path)
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("on_save", ON_SAVE)
@pytest.mark.parametrize("make", [state, scripts])
def test_weights_are_renamed_and_nothing_else(on_save: Any, make: Any, tmp_path: Path) -> None:
    io = ModulePrefixCheckpointIO(on_save=on_save)
    for before in ("", "module.", "_orig_mod.module."):
        prefix = {"strip": "", "add": "module.", "keep": before}[on_save]
        checkpoint = make(before)
        found = saved(io, checkpoint, tmp_path / "x.pt")
        assert_equal_trees(found, make(prefix), "saved", **EXACT)
        assert_equal_trees(checkpoint, make(before), "the input", **EXACT)
    other = {"steps": 3, "rng": [1, 2], "names": {"module.a": 1}}
    assert saved(io, other, tmp_path / "x") == other == io.load_checkpoint(tmp_path / "x")


@pytest.mark.parametrize("on_save", ON_SAVE)
@pytest.mark.parametrize("inner", ["", "module."])  # a LightningModule's only child may be `module`
def test_what_a_trainer_saves_comes_back_as_it_was(
    on_save: Any, inner: str, tmp_path: Path
) -> None:
    io = ModulePrefixCheckpointIO(on_save=on_save)
    found = saved(io, trainers(inner), tmp_path / "last.ckpt")
    is_added = found.pop("lightning_dp_added_prefix", None) == "module."
    assert is_added == (on_save == "add")
    assert_equal_trees(found, trainers("module." * is_added + inner), "file", **EXACT)
    loaded = ModulePrefixCheckpointIO().load_checkpoint(tmp_path / "last.ckpt")
    assert_equal_trees(loaded, trainers(inner), "loaded", **EXACT)
    # A prefix that no submodule has goes from a Trainer's checkpoint, too.
    found = saved(ModulePrefixCheckpointIO(), trainers("_orig_mod."), tmp_path / "compiled.ckpt")
    assert_equal_trees(found, trainers(), "stripped", **EXACT)


@pytest.mark.parametrize("key", [None, "state_dict", "model", "model_state_dict", "net"])
@pytest.mark.parametrize(
    ("on_load", "prefix", "expected"),
    [
        ("auto", "module._orig_mod.", ""),
        ("auto", "net.", "net."),
        ("keep", "module.", "module."),
    ],
)
def test_what_people_have_is_loaded_as_a_trainer_needs_it(
    key: str | None, on_load: Any, prefix: str, expected: str, tmp_path: Path
) -> None:
    content = {key: state(prefix), "epoch": 5} if key else state(prefix)
    torch.save(content, tmp_path / "weights.pt")
    loaded = ModulePrefixCheckpointIO(on_load=on_load).load_checkpoint(tmp_path / "weights.pt")
    assert_equal_trees(loaded["state_dict"], state(expected), "state_dict", **EXACT)
    assert "optimizer_states" not in loaded and loaded["pytorch-lightning_version"]
    assert loaded.get("epoch") == (5 if key else None)


@pytest.mark.parametrize("option", [{"on_save": "auto"}, {"on_load": "add"}, {"on_load": None}])
def test_wrong_options_are_refused(option: Any) -> None:
    with pytest.raises(ValueError, match=r"on_(save|load): expected one of .*, got .*\. Write"):
        ModulePrefixCheckpointIO(**option)


# Other IOs in it and around it


class OfOldLightning(CheckpointIO):
    """An IO of a user, in memory, as those written for Lightning before 2.6."""

    def __init__(self) -> None:
        self.files: dict[Any, Any] = {}

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.files[path] = checkpoint, storage_options

    def load_checkpoint(self, path: Any, map_location: Any = "default") -> Any:
        return {**self.files[path][0], "on": map_location}

    def remove_checkpoint(self, path: Any) -> None:
        del self.files[path]

    def teardown(self) -> None:
        self.files["ended"] = True


def test_calls_are_passed_on(tmp_path: Path) -> None:
    inner = OfOldLightning()
    io = ModulePrefixCheckpointIO(inner)
    io.save_checkpoint({"state_dict": state("module.")}, "s3://a/b", storage_options={"key": 1})
    saved, options = inner.files["s3://a/b"]
    assert list(saved["state_dict"]) == list(state()) and options == {"key": 1}
    assert io.load_checkpoint("s3://a/b", weights_only=None)["on"] == "default"
    assert io.load_checkpoint("s3://a/b", map_location="meta")["on"] == "meta"
    io.remove_checkpoint("s3://a/b")
    io.teardown()
    assert inner.files == {"ended": True}
    with pytest.raises(TypeError, match="storage_options"):
        ModulePrefixCheckpointIO().save_checkpoint(state(), tmp_path / "x", storage_options={})


def asynchronous(kind: str, **options: Any) -> Any:
    """Both ways to save in a thread."""
    if kind == "around it":
        return AsyncCheckpointIO(ModulePrefixCheckpointIO(**options))
    return ModulePrefixCheckpointIO(AsyncCheckpointIO(), **options)


# In the strategy, measured against one device


def fit(
    devices: int, epochs: int, folder: Path, ckpt_path: Path | None = None, **options: Any
) -> tuple[Any, Path]:
    torch.manual_seed(0)
    saving = ModelCheckpoint(folder, filename=f"{devices}-{epochs}", enable_version_counter=False)
    options["callbacks"] = [saving, *options.get("callbacks", [])]
    options["strategy"] = options.get("strategy", "dp_custom" if devices > 1 else "auto")
    job = trainer(devices, max_epochs=epochs, enable_checkpointing=True, **options)
    module = Classifier()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
        job.fit(module, loader(), loader(), ckpt_path=ckpt_path)
    return module, folder / f"{devices}-{epochs}.ckpt"


@pytest.mark.parametrize(
    ("kind", "on_save", "average"),
    [("in it", "strip", True), ("around it", "add", False), ("plain", "", False)],
)
def test_training_resumes_as_on_one_device(
    kind: str, on_save: Any, average: bool, tmp_path: Path
) -> None:
    """From one device to two, and back; the one of both that has the strategy writes and reads."""
    torch.set_default_dtype(torch.float64)
    if average and not hasattr(lightning_callbacks, "WeightAveraging"):
        pytest.skip("Lightning averages weights from 2.6 on")

    def options(*, saves: bool) -> dict[str, Any]:
        own = [lightning_callbacks.WeightAveraging(avg_fn=get_ema_avg_fn(0.9))] if average else []
        plugins = [asynchronous(kind, on_save=on_save)] if saves and kind != "plain" else None
        return {"callbacks": own, "plugins": plugins}

    expected, _ = fit(1, 3, tmp_path / "plain", **options(saves=False))
    for before, after in ((2, 1), (1, 2)):
        folder = tmp_path / f"{before} {after}"
        _, checkpoint = fit(before, 1, folder, **options(saves=True))
        content = torch.load(checkpoint, weights_only=True)
        prefixed = [("module." if on_save == "add" else "") + key for key in expected.state_dict()]
        assert list(content["state_dict"]) == prefixed
        assert list(content.get("current_model_state", ())) == (prefixed if average else [])
        if on_save != "add":
            Classifier.load_from_checkpoint(checkpoint)  # asks no CheckpointIO
        reads = options(saves=True) if on_save == "add" and after == 1 else options(saves=False)
        resumed, _ = fit(after, 3, folder, checkpoint, **reads)
        close = {"atol": 1e-10, "rtol": 0}
        assert_equal_trees(resumed.state_dict(), expected.state_dict(), "resumed", **close)


def test_the_strategys_default_and_what_the_user_gives(tmp_path: Path) -> None:
    assert isinstance(trainer(2).strategy.checkpoint_io, ModulePrefixCheckpointIO)
    own = TorchCheckpointIO()
    assert trainer(2, plugins=[own]).strategy.checkpoint_io is own
    assert trainer(2, DataParallelStrategy(checkpoint_io=own)).strategy.checkpoint_io is own
    outer = trainer(2, plugins=[AsyncCheckpointIO()]).strategy.checkpoint_io
    assert isinstance(outer.checkpoint_io, ModulePrefixCheckpointIO)


def test_for_the_package_pytorch_lightning(tmp_path: Path) -> None:
    package = pytest.importorskip("pytorch_lightning")

    from lightning_dp.pytorch_lightning import ModulePrefixCheckpointIO as ForThat

    class Net(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(10, 3)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test/loss", self.net(batch[0]).sum())

    job = package.Trainer(accelerator="cpu", devices=1, logger=False, plugins=[ForThat()])
    source, target = Net(), Net()
    torch.save(nn.DataParallel(source).state_dict(), tmp_path / "old.pt")
    job.test(target, loader(), ckpt_path=tmp_path / "old.pt", verbose=False)
    assert_equal_trees(target.state_dict(), source.state_dict(), "loaded", **EXACT)
    job.save_checkpoint(tmp_path / "new.ckpt")
    Net.load_from_checkpoint(tmp_path / "new.ckpt")
