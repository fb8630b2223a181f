"""What the guides show runs, without a warning, and prints what they say."""

import io
import linecache
import os
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support.doc_blocks import (
    GUIDES,
    Block,
    as_loud_as_before,
    beside,
    blocks,
    compare,
    script,
    shell,
    without_noise,
)
from support.programs import ROOT

each_guide = pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)


def run_python(block: Block, namespace: dict[str, object], where: str) -> None:
    printed = io.StringIO()
    # Tracebacks, and those who look for a class's source, find it.
    linecache.cache[where] = (len(block.code), None, block.code.splitlines(True), where)
    with redirect_stdout(printed):
        exec(compile(block.code, where, "exec"), namespace)
    compare(printed.getvalue(), block.prints or "", where)


@pytest.fixture
def as_before() -> Iterator[None]:
    """Simulated devices are as fast and as large as before, afterwards, and Lightning as loud."""
    with as_loud_as_before():
        yield
    if hasattr(torch, "sim"):
        for index in range(torch.sim.device_count()):
            torch.sim.synchronize(index)
            torch.sim.set_memory_limit(index, None)
            torch.sim.set_speed(index)
        torch.sim.set_links(None)
        torch.sim.set_clock("wall")


@pytest.mark.usefixtures("as_before")
@each_guide
def test_python_blocks_run(guide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = ModuleType(f"guide_{guide.stem.replace('-', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks(guide.read_text(), "python"):
        run_python(block, module.__dict__, f"{guide.name}:{block.line}")


@pytest.fixture
def environment() -> dict[str, str]:
    return {**os.environ, "PATH": beside(), "PYTHONPATH": str(ROOT)}


@pytest.mark.slow
@each_guide
def test_python_blocks_are_a_script_that_prints_nothing_else(
    guide: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    found = blocks(guide.read_text(), "python")
    printed = script("\n".join(b.code for b in found), tmp_path, environment, guide.name)
    wanted = "".join(block.prints or "" for block in found)
    compare(without_noise(printed, guide.name), wanted, guide.name)


@pytest.mark.slow
@each_guide
def test_commands_run(guide: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    for block in blocks(guide.read_text(), "bash"):
        where = f"{guide.name}:{block.line}"
        printed = shell(block, tmp_path, environment, where)
        without_noise(printed, where, block.code)
        if block.prints is not None:
            compare(printed, block.prints, where)


def test_there_are_guides() -> None:
    assert GUIDES


def test_a_guide_that_is_wrong_is_noticed() -> None:
    text = "```python\nprint(12)\nprint(3)\n```\n\n```text\n1...\n3\n```\n"
    right, wrong = blocks(text), blocks(text.replace("...", "1"))
    run_python(right[0], {}, "right")
    with pytest.raises(AssertionError, match="wrong says"):
        run_python(wrong[0], {}, "wrong")
    assert not blocks("<!-- not run: needs a GPU -->\n" + text)
    with pytest.raises(AssertionError, match=r"noisy prints:\nFutureWarning: soon$"):
        without_noise("a line\nFutureWarning: soon\n", "noisy")
