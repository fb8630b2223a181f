"""The README: what it shows runs as it stands there, and prints what it says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.doc_blocks import (
    GUIDES,
    README,
    Block,
    as_loud_as_before,
    beside,
    blocks,
    compare,
    run,
    script,
    shell,
    without_noise,
)
from support.programs import ROOT

TESTS = "python -m pytest"


def test_it_is_read_in_ten_minutes() -> None:
    assert 200 <= len(README.read_text().splitlines()) <= 250


def test_every_guide_is_in_its_table() -> None:
    assert {f"examples/guides/{guide.name}" for guide in GUIDES} <= set(links(README))


def links(path: Path) -> list[str]:
    return re.findall(r"\]\(([^)#]+|#[^)]+|[^)]+#[^)]+)\)", path.read_text())


def anchors(path: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [README, *GUIDES], ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in links(page):
        if link.startswith("http"):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("block", blocks(README.read_text(), "python"), ids=str)
def test_a_block_runs_and_prints_what_it_says(
    block: Block,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with as_loud_as_before():
        exec(compile(block.code, str(README), "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out == (block.prints or "")


# --- from top to bottom ---------------------------------------------------------------------------


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[Path]:
    """A fresh clone of what is committed; it and all beside it is gone afterwards: some GB."""
    if not (ROOT / ".git").exists():
        pytest.skip("a copy without its history: there is nothing to clone")
    subprocess.run(["git", "clone", "-q", ROOT, tmp_path / "clone"], check=True)
    yield tmp_path / "clone"
    shutil.rmtree(tmp_path)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """That of a person who has just made a fresh virtual environment and has entered it."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    ours = ("PYTHON", "PYTEST", "COLUMNS", "OMP_", "LIGHTNING_DP", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    # What Lightning says of a torch that is newer than itself is not the page's.
    quiet = "ignore:`isinstance(treespec:FutureWarning"
    path = beside(tmp_path / "env" / "bin" / "python")
    return {**kept, "PATH": path, "PYTHONWARNINGS": quiet}


@pytest.mark.slow
def test_from_top_to_bottom_in_a_fresh_clone(
    clone: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """Every block in order and word for word, as a person runs it. It needs a package index."""
    page = (clone / "README.md").read_text()
    assert page == README.read_text(), "Commit README.md: a clone has what is committed."
    for block in blocks(page):
        where = f"README.md:{block.line}"
        if block.language == "python":
            printed = script(block.code, tmp_path, environment, where)
            compare(without_noise(printed, where), block.prints or "", where)
            continue
        if TESTS in block.code:
            # The tests do not run within a test: what runs them has just done that, and this test
            # would begin once more. What stands before them, the installation, is run.
            block = block._replace(code=block.code.replace(f" && {TESTS}", ""))
            assert TESTS not in block.code
        printed = shell(block, clone, environment, where)
        if "pip install" not in block.code:
            without_noise(printed, where, block.code)
        if block.prints is not None:
            compare(ending(printed, block.prints), of_any_machine(block.prints), where)
    run(["python", "-m", "pip", "check"], clone, environment, "what the README installs")
    run(["python", "-m", "pytest", "--version"], clone, environment, "the extra [test]")


def ending(printed: str, wanted: str) -> str:
    """As many of the last lines as the page shows; that replicas took turns depends on times."""
    lines = [line for line in printed.splitlines() if not line.startswith("The replicas took")]
    return of_any_machine("\n".join(lines[-len(wanted.splitlines()) :]))


def of_any_machine(text: str) -> str:
    """Without times and widths; processors differ in a loss's last digits."""
    text = re.sub(r"[\d.,]+ (m?s)\b", r"# \1", text)
    text = re.sub(r"(test/loss 0\.\d\d)\d\d", r"\1##", text)
    return re.sub(r"([━─ ])\1+", r"\1", text)


def test_what_differs_between_machines_is_all_that_is_left_out() -> None:
    first = "test/acc {}   test/loss {}"
    wanted = "│ 1 │  3.7 s │\n.../a.png\n"
    wanted = f"{first.format('1.0000', 0.1477)}\n{wanted}"
    printed = "│ 1 │ 13.7 s │\n/b/a.png\nThe replicas took turns\n"
    printed = f"before\n{first.format('1.0000', 0.1476)}\n{printed}"
    compare(ending(printed, wanted), of_any_machine(wanted), "right")
    for right, wrong in (
        ("│ 1 │", "│ 2 │"),
        ("a.png", "b.png"),
        ("1.0000", "0.9944"),
        ("0.1476", "0.1576"),
    ):
        with pytest.raises(AssertionError, match="wrong says"):
            compare(ending(printed.replace(right, wrong), wanted), of_any_machine(wanted), "wrong")
