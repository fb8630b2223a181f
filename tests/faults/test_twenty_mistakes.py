"""What people get wrong in their first hour, and the one line that each of it comes to.

A line says what was expected, what came, and what to do, and names the option, device or leaf.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.errors import CompactHydraException
from lightning.pytorch import Trainer
from support import oracle
from support.oracle import Classifier, loader
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_dp import DataParallel, DataParallelStrategy, doctor
from lightning_dp.app.jobs import evaluate, train
from lightning_dp.app.run import as_program
from lightning_dp.checkpointing import convert

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")

SAYS = re.compile(r"[Ee]xpected .+?,? got .+[.)\w] (?:[A-Z(]|--).+", re.DOTALL)
"""What was expected, what came, and a sentence on what to do."""


def one_line(text: str, *names: str) -> None:
    assert "\n" not in text.strip() and len(text) < 1000, text
    assert SAYS.search(text), text
    for name in names:
        assert name in text, f"{name!r} is not in: {text}"


# In Python


def made(**options: Any) -> Trainer:
    """A Trainer with such a strategy on two replicas."""
    return oracle.trainer(2, DataParallelStrategy(**options), max_epochs=1)


def fitted(module: Any = None, data: Any = None, **options: Any) -> None:
    made(**options).fit(module or Classifier(), data or loader())


def stepping(step: Callable[[Any, Any], Any], **methods: Any) -> Any:
    """A module with such a training step."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        return step(self, batch)

    return type("Mine", (Classifier,), {"training_step": training_step, **methods})()


def each_loss(module: Any, batch: Any) -> Tensor:
    return F.cross_entropy(module(batch[0]), batch[1], reduction="none")


def some_items(module: Any, batch: Any) -> Any:
    loss = module.loss(batch)
    return {"loss": loss, "num_items": 3} if batch[1].numel() % 2 else loss


def of_two_sizes() -> DataLoader[Any]:
    x, y = torch.ones(4, 10), torch.zeros(3, dtype=torch.long)
    one: Any = [0]
    return DataLoader(one, batch_size=None, collate_fn=lambda _: {"x": x, "y": y})


class Listed(Classifier):
    """Has a layer that is not registered."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [torch.nn.Linear(10, 10)]


HALVES = {"batch_size": lambda self, batch: 1000}
TEXT = {"batch_size": lambda self, batch: "x"}
COSTS = {"sample_cost": lambda self, batch: torch.ones(3)}


def in_python(do: Callable[[], Any], *names: str) -> Any:
    return pytest.param(do, names, id=names[0])


PYTHON = [
    in_python(lambda: made(mode="foward"), "mode", "'foward'", "['step', 'forward']"),
    in_python(lambda: made(split="memmory"), "split", "'memmory'", "'memory'"),
    in_python(lambda: made(dim="batch"), "dim", "'batch'"),
    in_python(lambda: made(timeout=-1), "timeout", "-1"),
    in_python(lambda: made(output_device=9), "output_device", "from 0 to 1", "got 9"),
    in_python(lambda: made(output_device="gpu:1"), "output_device: expected a device", "'gpu:1'"),
    in_python(lambda: made(devices=4), "devices", "got 4", "list"),
    in_python(lambda: made(devices=["cpu", "cpu:3"]), "devices[1]", "'cpu:3'"),
    in_python(lambda: made(devices=["cpu", "meta"]), "devices[1]: expected a device", "'meta'"),
    in_python(
        lambda: oracle.trainer(3, DataParallelStrategy(devices=["cpu"] * 2)).fit(Classifier()),
        "devices: expected as many as Trainer(devices=...)",
        "names, 3, got ['cpu', 'cpu']",
    ),
    in_python(lambda: fitted(Listed()), "Listed.layers[0]", "nn.ModuleList"),
    in_python(lambda: made(weights=[1, 2, 3]), "weights: expected 2 numbers", "got 3"),
    in_python(lambda: made(weights=[1, -2]), "weights: expected a list", "[1, -2]"),
    in_python(lambda: made(weights=[0, 0]), "not all 0", "weights", "[0, 0]"),
    in_python(lambda: made(weights=[1, 2], split="memory"), "split='memory'", "weights"),
    in_python(lambda: fitted(split=lambda n, d: [n, n]), "with sum 25", "split", "[25, 25]"),
    in_python(lambda: fitted(split=lambda n, d: [n]), "2 integers", "split", "[25]"),
    in_python(lambda: made(sample_cost="lengths"), "sample_cost", "split='cost'"),
    in_python(
        lambda: fitted(split="cost", sample_cost="lengths"), "sample_cost='lengths'", "['0', '1']"
    ),
    in_python(
        lambda: fitted(stepping(each_loss, **COSTS), split="cost"), "Mine.sample_cost", "25", "(3,)"
    ),
    in_python(lambda: made(gather_overrides={"a": "max"}), "gather_overrides['a']", "'max'"),
    in_python(lambda: made(parallel_modules=["net"]), "parallel_modules", 'mode="forward"'),
    in_python(lambda: fitted(mode="forward", parallel_modules=["encoder"]), "'encoder'", "'net.0'"),
    in_python(lambda: made(move_batch=False), "move_batch", 'mode="forward"'),
    in_python(lambda: fitted(stepping(each_loss)), "a loss of one element", "shape"),
    in_python(lambda: fitted(stepping(some_items)), "num_items", "None"),
    in_python(lambda: fitted(stepping(each_loss, **HALVES)), "Mine.batch_size", "(25,)", "1000"),
    in_python(lambda: fitted(stepping(each_loss, **TEXT)), "Mine.batch_size", "'x'"),
    in_python(lambda: fitted(data=of_two_sizes()), "batch['x'] has 4", "batch['y'] has 3"),
    in_python(
        lambda: DataParallel(Classifier(), ["cpu", "cpu"], output_device=5), "from 0 to 1", "5"
    ),
    in_python(lambda: DataParallel(Classifier(), device_ids=["cpu", "gpu"]), "device_ids[1]"),
    in_python(
        lambda: DataParallel(torch.optim.SGD([torch.ones(1)])), "a torch.nn.Module", "got SGD"
    ),
]


@pytest.mark.parametrize(("do", "names"), PYTHON)
def test_in_python(do: Callable[[], Any], names: tuple[str, ...]) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        do()
    one_line(str(caught.value), *names)


# On the command line

ON_TWO = ("trainer.accelerator=cpu", "trainer.devices=2")


def refused(program: Any, tmp_path: Path, *overrides: str) -> str:
    """What Hydra prints of the error that a program of ours ends with."""
    fixed = [f"paths.output_dir={tmp_path / 'run'}", "paths.work_dir=."]
    name = "train" if program is train else "eval"
    with initialize_config_module("lightning_dp.conf", version_base="1.3"):
        cfg = compose(name, overrides=[*fixed, *overrides])
    with pytest.raises(CompactHydraException) as stop:
        as_program(program)(cfg)
    return str(stop.value)


@pytest.mark.parametrize(
    ("option", "names"),
    [
        ("ckpt_path=no.ckpt", ("error: ", "ckpt_path", "'no.ckpt'", "does not exist")),
        ("init_from=no.ckpt", ("error: ", "init_from", "'no.ckpt'", "does not exist")),
        # Hydra says which object could not be made, with the object's own words, and no traceback.
        ("++trainer.devics=2", ("trainer", "unexpected keyword argument 'devics'")),
        ("strategy.weights=[1,2,3]", ("trainer", "weights: expected 2 numbers")),
        ("strategy.devices=[cpu,cpu:7]", ("trainer.strategy", "devices[1]", "'cpu:7'")),
        ("trainer.precision=fp16", ("'fp16'", "'16-mixed'")),
        ("model._target_=lightning_dp.nowhere.Net", ("model", "lightning_dp.nowhere")),
    ],
)
def test_train(option: str, names: tuple[str, ...], tmp_path: Path) -> None:
    text = refused(train, tmp_path, *ON_TWO, option)
    assert all(name in text for name in names), text
    if names[0] == "error: ":
        one_line(text)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ((), ("ckpt_path", "nothing", "run=")),
        (("run=no",), ("run", "'no'")),
        (("ckpt_path=no.ckpt",), ("ckpt_path", "'no.ckpt'")),
    ],
)
def test_evaluate(options: tuple[str, ...], names: Any, tmp_path: Path) -> None:
    one_line(refused(evaluate, tmp_path, *options), *names)


def _named(value: Any) -> str:
    return value.__name__ if isinstance(value, ModuleType) else str(value)


@pytest.mark.parametrize(
    ("program", "arguments", "names"),
    [
        (doctor, "--devices=1", ("--devices", "'1'", "at least 2")),
        (doctor, "--devices=cpu", ("--devices", "'cpu'", "at least 2")),
        (doctor, "--devices=cpu,x", ("--devices[1]", "'x'")),
        (doctor, "--devices=cpu,cpu:9", ("--devices[1]", "'cpu:9'")),
        (convert, "text.ckpt new.ckpt", ("text.ckpt", "b'hello'")),
        (convert, "a.pt text.ckpt", ("DST", "text.ckpt", "--force")),
    ],
    ids=_named,
)
def test_programs_that_read_their_own_options(
    program: ModuleType, arguments: str, names: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.ckpt").write_text("hello")
    for name in "ab":
        torch.save({name: torch.ones(3)}, f"{name}.pt")
    try:
        code = program.main(arguments.split())
    except SystemExit as stop:
        code = stop.code
    printed = capsys.readouterr().err.strip()
    assert code in (1, 2) and printed.startswith("error: ")
    one_line(printed, *names)


@pytest.mark.parametrize("program", [doctor, convert], ids=_named)
def test_an_option_that_is_not_there_is_one_line(program: ModuleType, capsys: Any) -> None:
    with pytest.raises(SystemExit) as stop:
        program.main(["--nothing"])
    assert stop.value.code == 2
    text = capsys.readouterr().err
    assert re.fullmatch(r"error: .*--help lists all options\.\n", text), text
