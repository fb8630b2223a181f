"""The README and the guides: what they show runs as it stands there, and prints what they say."""

from __future__ import annotations

import io
import linecache
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType

import pytest
from support.doc_blocks import (
    GUIDES,
    README,
    Block,
    beside,
    blocks,
    compare,
    script,
    shell,
    without_noise,
)
from support.programs import ROOT

PAGES = [README, *GUIDES]
TESTS = "python -m pytest"

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
each_guide = pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)


def test_pages_are_short() -> None:
    assert len(README.read_text().splitlines()) <= 150
    assert sum(len(guide.read_text().splitlines()) for guide in GUIDES) <= 900


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)]+)\)", page.read_text())


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@each_page
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in links(page):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_readme_leads_to_every_guide() -> None:
    assert {f"examples/guides/{guide.name}" for guide in GUIDES} <= set(links(README))


def run_python(block: Block, namespace: dict[str, object], where: str) -> None:
    printed = io.StringIO()
    # Tracebacks, and those who look for a class's source, find it.
    linecache.cache[where] = (len(block.code), None, block.code.splitlines(True), where)
    with redirect_stdout(printed):
        exec(compile(block.code, where, "exec"), namespace)
    wanted = block.prints or ""
    # In the README a Trainer also prints its summary and its bar, before what is compared.
    lines = printed.getvalue().splitlines()[-len(wanted.splitlines()) :]
    compare("\n".join(lines) if where.startswith("README") else printed.getvalue(), wanted, where)


@each_page
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = ModuleType(f"page_{page.stem.replace('-', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks(page.read_text(), "python"):
        run_python(block, module.__dict__, f"{page.name}:{block.line}")


@pytest.fixture
def environment() -> dict[str, str]:
    return {**os.environ, "PATH": beside(), "PYTHONPATH": str(ROOT)}


@pytest.mark.slow
@each_guide
def test_commands_run(page: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    for block in blocks(page.read_text(), "bash"):
        where = f"{page.name}:{block.line}"
        printed = without_noise(shell(block.code, tmp_path, environment, where), where, block.code)
        if block.prints is not None:
            compare(printed, block.prints, where)


# --- the README in a fresh clone and a fresh environment ------------------------------------------


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[Path]:
    """A fresh clone of what is committed; it and all beside it is gone afterwards: some GB."""
    if not (ROOT / ".git").exists():
        pytest.skip("a copy without its history: there is nothing to clone")
    subprocess.run(["git", "clone", "-q", ROOT, tmp_path / "clone"], check=True)
    yield tmp_path / "clone"
    shutil.rmtree(tmp_path)


@pytest.fixture
def fresh(tmp_path: Path) -> dict[str, str]:
    """The environment of a person who has just made a virtual environment and has entered it."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    ours = ("PYTHON", "PYTEST", "COLUMNS", "OMP_", "LIGHTNING_DP", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    # What Lightning says of a torch that is newer than itself is not the page's.
    quiet = "ignore:`isinstance(treespec:FutureWarning"
    path = beside(tmp_path / "env" / "bin" / "python")
    return {**kept, "PATH": path, "PYTHONWARNINGS": quiet}


@pytest.mark.slow
def test_the_readme_from_top_to_bottom(clone: Path, fresh: dict[str, str], tmp_path: Path) -> None:
    """Every command word for word, then its Python. It needs a package index."""
    page = (clone / "README.md").read_text()
    assert page == README.read_text(), "Commit README.md: a clone has what is committed."
    for block in blocks(page, "bash"):
        where = f"README.md:{block.line}"
        # The tests do not run within a test: what runs them has just done that, and this test
        # would begin once more. What stands before them, the installation, is run.
        code = block.code.replace(f" && {TESTS}", "")
        assert TESTS not in code
        printed = shell(code, clone, fresh, where)
        if "pip install" not in code:
            without_noise(printed, where, code)
        if block.prints is not None:
            compare(ending(printed, block.prints), of_any_machine(block.prints), where)
    found = blocks(page, "python")
    printed = script("\n".join(block.code for block in found), tmp_path, fresh, "README.md")
    results = [line for line in printed.splitlines() if line.startswith("[")]
    assert results == [block.prints.strip() for block in found if block.prints]
    shell("python -m pip check && python -m pytest --version", clone, fresh, "what it installs")


def ending(printed: str, wanted: str) -> str:
    """As many of the last lines as the page shows."""
    return of_any_machine("\n".join(printed.splitlines()[-len(wanted.splitlines()) :]))


def of_any_machine(text: str) -> str:
    """Without times and widths; processors differ in a loss's last digits."""
    text = re.sub(r"[\d.,]+ (m?s)\b", r"# \1", text)
    text = re.sub(r"(?<![\d.])\d+%", "##%", text)  # of the time busy
    text = re.sub(r"(test/loss 0\.\d\d)\d\d", r"\1##", text)
    return re.sub(r"([━─ ])\1+", r"\1", text)
