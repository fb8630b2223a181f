"""`ModulePrefixCheckpointIO`: names on save and load, other IOs in it and around it."""

import copy
import inspect
import itertools
import re
import warnings
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from support.oracle import Classifier, assert_equal_trees, loader, trainer
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_avg_fn

from lightning_dp import DataParallelStrategy, ModulePrefixCheckpointIO
from lightning_dp.checkpointing.io import AtomicTorchCheckpointIO

EXACT = {"atol": 0.0, "rtol": 0.0}
W, B = torch.ones(2, 2), torch.zeros(2)
ON_SAVE = ("strip", "add", "keep")


def state(prefix: str = "") -> dict[str, Tensor]:
    return {f"{prefix}fc.weight": W, f"{prefix}fc.bias": B}


def trainers(prefix: str = "") -> dict[str, Any]:
    """A checkpoint as a Trainer makes it, with averaged weights and a callback's copy of them."""
    return {
        "epoch": 3,
        "global_step": 7,
        "pytorch-lightning_version": "2.6.0",
        "loops": {"fit_loop": {}},
        "state_dict": state(prefix),
        "current_model_state": state(prefix),
        "averaging_state": {"n_averaged": torch.tensor(4)},
        "callbacks": {
            "Teacher": {"weights": [state(prefix)], "decay": 0.9},
            "Best": {"best_model_score": torch.tensor(0.5)},
        },
        "optimizer_states": [{"state": {0: {"exp_avg": W}}, "param_groups": [{"params": [0]}]}],
        "lr_schedulers": [{"last_epoch": 3}],
        "hyper_parameters": {"module.lr": 0.1},
    }


def scripts(prefix: str = "") -> dict[str, Any]:
    """A checkpoint as people write it in a script of their own."""
    named = {"state": {f"{prefix}fc.weight": {"exp_avg": W}}, "param_groups": []}
    states = {"model": state(prefix), "ema": {"shadow": state(prefix)}}
    return {**states, "optimizer": named, "epoch": 3}


def saved(io: Any, checkpoint: Any, path: Path) -> Any:
    io.save_checkpoint(checkpoint, path)
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("on_save", ON_SAVE)
def test_states_of_models_are_renamed_and_nothing_else(on_save: Any, tmp_path: Path) -> None:
    io = ModulePrefixCheckpointIO(on_save=on_save)
    for before in ("", "module.", "_orig_mod.module."):
        prefix = {"strip": "", "add": "module.", "keep": before}[on_save]
        checkpoint = scripts(before)
        found = saved(io, checkpoint, tmp_path / "script.pt")
        expected = {**scripts(prefix), "optimizer": scripts(before)["optimizer"]}
        assert_equal_trees(found, expected, "script", **EXACT)
        assert_equal_trees(checkpoint, scripts(before), "the input", **EXACT)
        found = saved(io, state(before), tmp_path / "bare.pt")
        assert_equal_trees(found, state(prefix), "bare", **EXACT)
    other = {"steps": 3, "rng": [1, 2], "names": {"module.a": 1}}
    assert saved(io, other, tmp_path / "x") == other == io.load_checkpoint(tmp_path / "x")


@pytest.mark.parametrize("on_save", ON_SAVE)
@pytest.mark.parametrize("inner", ["", "module."])  # a LightningModule's only child may be `module`
def test_what_a_trainer_saves_comes_back_as_it_was(
    on_save: Any, inner: str, tmp_path: Path
) -> None:
    io = ModulePrefixCheckpointIO(on_save=on_save)
    found = saved(io, trainers(inner), tmp_path / "last.ckpt")
    prefix = "module." if on_save == "add" else ""
    note = {"lightning_dp": {"added_prefix": "module."}} if on_save == "add" else {}
    expected = trainers(prefix + inner) | note | {"callbacks": trainers(inner)["callbacks"]}
    assert_equal_trees(found, expected, "file", **EXACT)
    loaded = ModulePrefixCheckpointIO().load_checkpoint(tmp_path / "last.ckpt")
    assert_equal_trees(
        loaded, trainers(inner) | ({"lightning_dp": {}} if note else {}), "", **EXACT
    )
    # A prefix that no submodule has goes from a Trainer's checkpoint, too.
    found = saved(ModulePrefixCheckpointIO(), trainers("_orig_mod."), tmp_path / "compiled.ckpt")
    assert_equal_trees(found, trainers(), "stripped", **EXACT)


FILES = itertools.product(
    [None, "state_dict", "model", "model_state_dict", "net"],
    [
        ("auto", "module.", ""),
        ("auto", "module._orig_mod.", ""),
        ("auto", "net.", "net."),
        ("keep", "module.", "module."),
    ],
)


@pytest.mark.parametrize(("key", "names"), list(FILES))
def test_what_people_have_is_loaded_as_a_trainer_needs_it(
    key: str | None, names: Any, tmp_path: Path
) -> None:
    on_load, prefix, expected = names
    content = {key: state(prefix), "epoch": 5} if key else state(prefix)
    torch.save(content, tmp_path / "weights.pt")
    loaded = ModulePrefixCheckpointIO(on_load=on_load).load_checkpoint(tmp_path / "weights.pt")
    assert_equal_trees(loaded["state_dict"], state(expected), "state_dict", **EXACT)
    assert "optimizer_states" not in loaded
    assert loaded.get("epoch") == (5 if key else None)


@given(st.sets(st.sampled_from(["w", "fc.w", "module.w", "net.module.b", "a.b"]), min_size=1))
def test_add_and_load_is_the_identity(tmp_path_factory: Any, keys: set[str]) -> None:
    path = tmp_path_factory.mktemp("add") / "last.ckpt"
    checkpoint = {**trainers(), "state_dict": {key: W for key in sorted(keys)}}
    ModulePrefixCheckpointIO(on_save="add").save_checkpoint(checkpoint, path)
    raw = torch.load(path, weights_only=True)["state_dict"]
    assert list(raw) == [f"module.{key}" for key in sorted(keys)]
    loaded = ModulePrefixCheckpointIO().load_checkpoint(path)
    assert list(loaded["state_dict"]) == sorted(keys)


@pytest.mark.parametrize("option", [{"on_save": "auto"}, {"on_load": "add"}, {"on_load": None}])
def test_wrong_options_are_refused(option: Any) -> None:
    with pytest.raises(ValueError, match=r"on_(save|load): expected one of .*, got .*\. Write"):
        ModulePrefixCheckpointIO(**option)


# Other IOs in it and around it


class Recording(CheckpointIO):
    """An IO of a user, in memory, as those written for Lightning before 2.6."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.content: dict[str, Any] = {}

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.calls.append(("save", path, storage_options))
        self.content[str(path)] = checkpoint

    def load_checkpoint(self, path: Any, map_location: Any = "default") -> Any:
        self.calls.append(("load", path, map_location))
        return self.content[str(path)]

    def remove_checkpoint(self, path: Any) -> None:
        self.calls.append(("remove", path))

    def teardown(self) -> None:
        self.calls.append("teardown")


def test_calls_are_passed_on(tmp_path: Path) -> None:
    inner = Recording()
    io = ModulePrefixCheckpointIO(inner)
    io.save_checkpoint(state("module."), "s3://a/b", storage_options={"key": 1})
    assert list(inner.content["s3://a/b"]) == list(state())
    io.load_checkpoint("s3://a/b", weights_only=None)
    io.load_checkpoint("s3://a/b", map_location="meta")
    io.remove_checkpoint("s3://a/b")
    io.teardown()
    assert inner.calls == [
        ("save", "s3://a/b", {"key": 1}),
        ("load", "s3://a/b", "default"),
        ("load", "s3://a/b", "meta"),
        ("remove", "s3://a/b"),
        "teardown",
    ]
    with pytest.raises(TypeError, match="storage_options"):
        ModulePrefixCheckpointIO().save_checkpoint(state(), tmp_path / "x", storage_options={})
    for name in ("save_checkpoint", "load_checkpoint", "remove_checkpoint"):
        ours = inspect.signature(getattr(ModulePrefixCheckpointIO, name)).parameters
        base = list(inspect.signature(getattr(CheckpointIO, name)).parameters)
        assert list(ours)[: len(base)] == base, "before 2.6 there was no weights_only"


def asynchronous(kind: str, **options: Any) -> Any:
    """Every way to save in a thread."""
    if kind == "around it":
        return AsyncCheckpointIO(ModulePrefixCheckpointIO(**options))
    inside = {"in it": (), "with torch's": (TorchCheckpointIO(),)}
    inner = inside.get(kind, (AtomicTorchCheckpointIO(),))
    return ModulePrefixCheckpointIO(AsyncCheckpointIO(*inner), **options)


@pytest.mark.parametrize("kind", ["in it", "with torch's", "with ours", "around it"])
def test_saving_in_a_thread_both_ways_round(kind: str, tmp_path: Path) -> None:
    io = asynchronous(kind, on_save="add")
    io.save_checkpoint(scripts(), tmp_path / "x.pt")
    io.teardown()
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert list(found["model"]) == list(state("module."))
    assert list(io.load_checkpoint(tmp_path / "x.pt")["state_dict"]) == list(state())


# In the strategy, measured against one device


def fit(
    devices: int, epochs: int, folder: Path, ckpt_path: Path | None = None, **options: Any
) -> tuple[Any, Path]:
    torch.manual_seed(0)
    saving = ModelCheckpoint(folder, filename=f"{devices}-{epochs}", enable_version_counter=False)
    callbacks = [saving, *options.pop("callbacks", [])]
    job = trainer(
        devices, max_epochs=epochs, callbacks=callbacks, enable_checkpointing=True, **options
    )
    module = Classifier()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
        job.fit(module, loader(), loader(), ckpt_path=ckpt_path)
    return module, folder / f"{devices}-{epochs}.ckpt"


@pytest.mark.parametrize(
    ("kind", "on_save", "average"), [("in it", "strip", True), ("around it", "add", False)]
)
def test_training_resumes_as_on_one_device(
    kind: str, on_save: Any, average: bool, tmp_path: Path
) -> None:
    torch.set_default_dtype(torch.float64)
    if average and not hasattr(lightning_callbacks, "WeightAveraging"):
        pytest.skip("Lightning averages weights from 2.6 on")

    def callbacks() -> list[Any]:
        kind = lightning_callbacks.WeightAveraging if average else None
        return [kind(avg_fn=get_ema_avg_fn(0.9))] if kind else []

    expected, _ = fit(1, 3, tmp_path / "plain", strategy="auto", callbacks=callbacks())
    for before, after in ((2, 1), (1, 2)):
        folder = tmp_path / f"{before} {after}"
        plugins = [asynchronous(kind, on_save=on_save)]
        _, checkpoint = fit(before, 1, folder, plugins=plugins, callbacks=callbacks())
        content = torch.load(checkpoint, weights_only=True)
        prefixed = [("module." if on_save == "add" else "") + key for key in expected.state_dict()]
        assert list(content["state_dict"]) == prefixed
        assert list(content.get("current_model_state", ())) == (prefixed if average else [])
        resumed, _ = fit(after, 3, folder, checkpoint, callbacks=callbacks())
        assert_equal_trees(
            resumed.state_dict(), expected.state_dict(), "resumed", atol=1e-10, rtol=0
        )


def test_plain_lightning_reads_what_ours_wrote_and_the_other_way_round(tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float64)
    expected, _ = fit(1, 3, tmp_path / "plain", strategy="auto")
    _, ours = fit(2, 1, tmp_path / "ours")
    resumed, _ = fit(1, 3, tmp_path / "ours", ours, strategy="auto")
    _, plain = fit(1, 1, tmp_path / "plain", strategy="auto")
    other, _ = fit(2, 3, tmp_path / "plain", plain)
    for module in (resumed, other):
        assert_equal_trees(module.state_dict(), expected.state_dict(), "", atol=1e-10, rtol=0)
    again = Classifier.load_from_checkpoint(ours)  # asks no CheckpointIO
    assert_equal_trees(
        again.state_dict(), torch.load(ours, weights_only=True)["state_dict"], "", **EXACT
    )


class Parallel(nn.Module):
    """Has the names of `nn.DataParallel`, which takes a simulated device if there is one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        return self.module(x)


def _compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


WRAPPERS = {"bare": lambda module: module, "parallel": Parallel, "compiled": _compiled}


class HoldsNet(Classifier):
    def __init__(self, wrapper: str) -> None:
        super().__init__()
        self.net = WRAPPERS[wrapper](self.net)


class Copy(lightning_callbacks.Callback):
    """Has a copy of the module's weights under its own names, in its own wrapper."""

    def __init__(self, wrapper: str, whole: bool) -> None:
        self.wrapper, self.whole = wrapper, whole

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        net = copy.deepcopy(getattr(pl_module.net, "_orig_mod", pl_module.net))
        self.copy = WRAPPERS[self.wrapper](nn.ModuleDict({"net": net}) if self.whole else net)

    def state_dict(self) -> dict[str, Any]:
        return {"copy": self.copy.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.copy.load_state_dict(state_dict["copy"])


class Remembers(HoldsNet):
    """Puts states of its own beside the Trainer's, under names that others give to a model's."""

    OWN: ClassVar = {
        "net": {"_orig_mod.a": W},
        "model": {"module.b": B},
        "teacher": {"module.c": W},
    }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint.update(self.OWN)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.found = {key: checkpoint[key] for key in self.OWN}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("on_save", ON_SAVE)
@pytest.mark.parametrize(
    ("inner", "wrapper"),
    [("bare", "bare"), ("parallel", "bare"), ("compiled", "parallel"), ("compiled", "compiled")],
)
def test_callbacks_and_modules_get_their_own_weights_under_the_names_they_gave_them(
    on_save: Any, inner: str, wrapper: str, whole: bool, tmp_path: Path
) -> None:
    options = {"max_epochs": 1, "limit_train_batches": 1, "limit_val_batches": 1}
    saving, loading = (
        trainer(2, callbacks=[Copy(wrapper, whole)], plugins=plugins, **options)
        for plugins in ([ModulePrefixCheckpointIO(on_save=on_save)], None)
    )
    saving.fit(Remembers(inner), loader(), loader())
    saving.save_checkpoint(tmp_path / "last.ckpt")
    module = Remembers(inner)
    loading.fit(module, loader(), loader(), ckpt_path=tmp_path / "last.ckpt")
    before, after = (run.callbacks[0].copy.state_dict() for run in (saving, loading))
    assert_equal_trees(after, before, "the copy", **EXACT)
    assert_equal_trees(module.found, module.OWN, "its own", **EXACT)


def test_a_callbacks_weights_with_the_models_names_go_where_the_models_go(tmp_path: Path) -> None:
    weights = HoldsNet("compiled").state_dict()
    checkpoint = {**trainers(), "state_dict": weights, "current_model_state": weights}
    checkpoint["callbacks"] = {"Copy": {"copy": weights}, "Other": {"copy": state("_orig_mod.")}}
    torch.save(checkpoint, tmp_path / "last.ckpt")
    module = HoldsNet("bare")
    job = trainer(2, max_epochs=1)
    job.strategy.connect(module)
    module.trainer = job
    loaded = job.strategy.load_checkpoint(tmp_path / "last.ckpt")
    job.strategy.load_model_state_dict(loaded)
    own = list(module.state_dict())
    assert list(loaded["state_dict"]) == list(loaded["callbacks"]["Copy"]["copy"]) == own
    assert list(loaded["callbacks"]["Other"]["copy"]) == list(state("_orig_mod."))


class HoldsModule(Classifier):
    """All that it has lies in a submodule called `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = self.net
        del self.net

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.module(batch[0]), batch[1])


@pytest.mark.parametrize("strategy", ["dp_custom", "auto"])
@pytest.mark.parametrize("on_save", ["strip", "add", "keep"])
def test_a_submodule_called_module_keeps_its_name(
    strategy: str, on_save: Any, tmp_path: Path
) -> None:
    devices = 2 if strategy == "dp_custom" else 1
    plugins = [ModulePrefixCheckpointIO(on_save=on_save)]
    job = trainer(devices, strategy, plugins=plugins, max_epochs=1, limit_train_batches=1)
    module = HoldsModule()
    job.fit(module, loader(), loader())
    job.save_checkpoint(tmp_path / "last.ckpt")
    if on_save != "add":
        HoldsModule.load_from_checkpoint(tmp_path / "last.ckpt")
    torch.save(module.state_dict(), tmp_path / "bare.pt")
    torch.save(nn.DataParallel(module).state_dict(), tmp_path / "wrapped.pt")
    # Only our strategy knows the module: elsewhere `module.` in files of others is a wrapper's.
    files = ["last.ckpt", "bare.pt", "wrapped.pt"] if strategy == "dp_custom" else ["last.ckpt"]
    for file in files:
        other = HoldsModule()
        job = trainer(devices, strategy, plugins=[ModulePrefixCheckpointIO()])
        job.validate(other, loader(), ckpt_path=tmp_path / file, verbose=False)
        assert_equal_trees(other.state_dict(), module.state_dict(), file, **EXACT)


def test_the_strategys_default_and_what_the_user_gives(tmp_path: Path) -> None:
    assert isinstance(trainer(2).strategy.checkpoint_io, ModulePrefixCheckpointIO)
    own = TorchCheckpointIO()
    assert trainer(2, plugins=[own]).strategy.checkpoint_io is own
    assert trainer(2, DataParallelStrategy(checkpoint_io=own)).strategy.checkpoint_io is own
    outer = trainer(2, plugins=[AsyncCheckpointIO()]).strategy.checkpoint_io
    assert isinstance(outer.checkpoint_io, ModulePrefixCheckpointIO)
    module = Classifier()
    wrong = {f"module.{key}": value for key, value in module.state_dict().items()}
    content = {"state_dict": wrong, "pytorch-lightning_version": "2.5.0", "loops": None}
    torch.save(content, tmp_path / "old.ckpt")
    for io in (own, ModulePrefixCheckpointIO(on_load="keep")):
        with pytest.raises(RuntimeError, match="Missing key"):
            trainer(2, plugins=[io]).validate(module, loader(), ckpt_path=tmp_path / "old.ckpt")


def test_there_is_nothing_to_resume_from_weights(tmp_path: Path) -> None:
    module = Classifier()
    torch.save(module.state_dict(), tmp_path / "bare.pt")
    job = trainer(2, max_epochs=1)
    job.fit(module, loader(), loader())
    job.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    for name in ("bare.pt", "weights.ckpt"):
        text = rf"expected a checkpoint to resume .*{name}.*no training state.*init_from="
        with pytest.raises(KeyError, match="checkpoint contains only the model") as caught:
            trainer(2).fit(Classifier(), loader(), loader(), ckpt_path=tmp_path / name)
        assert [note for note in caught.value.__notes__ if re.search(text, note)]
        trainer(2).validate(Classifier(), loader(), ckpt_path=tmp_path / name, verbose=False)


@pytest.mark.slow
def test_launchers_hand_weights_over_as_they_are() -> None:
    """Spawned processes send a bare state dict to the main one, through the IO."""
    module = HoldsModule()
    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    plugins = [ModulePrefixCheckpointIO()]
    job = Trainer(
        strategy="ddp_spawn", accelerator="cpu", devices=1, plugins=plugins, max_epochs=1, **silent
    )
    before = {key: value.clone() for key, value in module.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        job.fit(module, loader(), loader())
    after = module.state_dict()
    assert all(not torch.equal(before[key], after[key]) for key in before), "nothing came back"


def test_for_the_package_pytorch_lightning(tmp_path: Path) -> None:
    package = pytest.importorskip("pytorch_lightning")
    plugins = pytest.importorskip("lightning_fabric.plugins")

    from lightning_dp.pytorch_lightning import ModulePrefixCheckpointIO as ForThat

    class Net(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(10, 3)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test/loss", self.net(batch[0]).sum())

    wrapped = package.plugins.io.AsyncCheckpointIO(plugins.TorchCheckpointIO())
    for io in (ForThat(), ForThat(wrapped)):
        job = package.Trainer(
            accelerator="cpu", devices=1, logger=False, plugins=[io], enable_progress_bar=False
        )
        source, target = Net(), Net()
        torch.save(nn.DataParallel(source).state_dict(), tmp_path / "old.pt")
        job.test(target, loader(), ckpt_path=tmp_path / "old.pt", verbose=False)
        assert_equal_trees(target.state_dict(), source.state_dict(), "loaded", **EXACT)
        job.save_checkpoint(tmp_path / "new.ckpt")
        io.teardown()
        Net.load_from_checkpoint(tmp_path / "new.ckpt")
