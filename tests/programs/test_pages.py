"""The README and the guides: what they show runs as it stands there, and prints what they say."""

from __future__ import annotations

import io
import linecache
import os
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
from support.programs import ROOT

README = ROOT / "README.md"
GUIDES = sorted((ROOT / "examples" / "guides").glob("*.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
NOT_RUN = re.compile(r"<!-- not run: .+ -->\n\Z")
NOISE = re.compile(r"Warning|deprecat|litlogger|Tip:|many workers")
# Lightning makes a class that torch 2.13 deprecates: plain Lightning prints it at each fit, too.
LIGHTNINGS = re.compile(r"^.*_pytree\.py:\d+: `isinstance\(treespec, LeafSpec\)` is .*\n", re.M)

each_page = pytest.mark.parametrize("page", [README, *GUIDES], ids=lambda page: page.stem)
each_guide = pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)


# --- what a page says -----------------------------------------------------------------------------


class Block(NamedTuple):
    """A fenced block of a page, and what the page says that it prints."""

    code: str
    where: str
    prints: str


def blocks(page: Path, language: str) -> list[Block]:
    """The blocks that are to be run, in order."""
    found, text = [], page.read_text()
    fences = list(FENCE.finditer(text))
    for fence, following in zip(fences, [*fences[1:], None], strict=True):
        if fence[1] != language or NOT_RUN.search(text[: fence.start()]):
            continue
        prints = ""
        if following is not None and following[1] == "text":
            between = text[fence.end() : following.start()]
            prints = "" if between.strip() else following[2]
        line = text.count("\n", 0, fence.start()) + 2
        found.append(Block(fence[2], f"{page.name}:{line}", prints))
    return found


def compare(printed: str, block: Block) -> None:
    """Line by line; `...` stands for anything within a line."""
    lines, patterns = (text.rstrip().splitlines() for text in (printed, block.prints))
    fits = len(lines) == len(patterns) and all(
        re.fullmatch(re.escape(pattern.rstrip()).replace(r"\.\.\.", ".*"), line.rstrip())
        for line, pattern in zip(lines, patterns, strict=True)
    )
    assert fits, f"{block.where} says that this is printed:\n{block.prints}\nBut it is:\n{printed}"


def shell(block: Block, cwd: Path, environment: dict[str, str]) -> str:
    """What commands print on both streams; they end well, without adverts, tips and warnings."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.code],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, f"{block.where}\n{done.stdout}"
    printed = LIGHTNINGS.sub("", done.stdout)
    noise = [line for line in printed.splitlines() if NOISE.search(line)]
    # `debug=` asks for the full log, and pip has a mind of its own.
    asked_for = "debug=" in block.code or "pip install" in block.code
    assert asked_for or not noise, f"{block.where} prints:\n" + "\n".join(noise)
    return printed


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)]+)\)", page.read_text())


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


# --- pages in this environment --------------------------------------------------------------------


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 150


@each_page
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in links(page):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_readme_leads_to_every_guide() -> None:
    assert {f"examples/guides/{guide.name}" for guide in GUIDES} <= set(links(README))


@each_page
def test_python_blocks_of_a_page_print_what_it_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module = ModuleType(f"page_{page.stem.replace('-', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks(page, "python"):
        printed = io.StringIO()
        # Tracebacks, and those who look for a class's source, find it.
        lines = block.code.splitlines(True)
        linecache.cache[block.where] = (len(block.code), None, lines, block.where)
        with redirect_stdout(printed):
            exec(compile(block.code, block.where, "exec"), module.__dict__)
        # In the README a Trainer also prints its summary and its bar, before what is compared.
        shown = printed.getvalue().splitlines()
        skipped = len(shown) - len(block.prints.splitlines()) if page is README else 0
        compare("\n".join(shown[skipped:]), block)


@pytest.mark.slow
@each_guide
def test_commands_of_a_guide_print_what_it_says(page: Path, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for block in blocks(page, "bash"):
        printed = shell(block, tmp_path, {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)})
        if block.prints:
            compare(printed, block)


# --- the README in a fresh clone and a fresh environment ------------------------------------------


@pytest.mark.slow
def test_the_readme_runs_from_top_to_bottom_in_a_fresh_clone(tmp_path: Path) -> None:
    """Every command word for word, then its Python. It needs a package index, and some GB."""
    if not (ROOT / ".git").exists():
        pytest.skip("a copy without its history: there is nothing to clone")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
    page = clone / "README.md"
    assert page.read_text() == README.read_text(), "Commit README.md: a clone has what is committed"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    # As of a person who has just entered it.
    ours = ("PYTHON", "PYTEST", "COLUMNS", "OMP_", "LIGHTNING_DP", "VIRTUAL_ENV")
    fresh = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    fresh["PATH"] = f"{tmp_path / 'env' / 'bin'}{os.pathsep}{fresh['PATH']}"
    # What Lightning says of a torch that is newer than itself is not the page's.
    fresh["PYTHONWARNINGS"] = "ignore:`isinstance(treespec:FutureWarning"
    for block in blocks(page, "bash"):
        # The tests do not run within a test. What stands before them, the installation, is run.
        code = block.code.replace(" && python -m pytest", "")
        assert "python -m pytest" not in code
        printed = shell(block._replace(code=code), clone, fresh).splitlines()
        if block.prints:
            last = "\n".join(printed[-len(block.prints.splitlines()) :])
            compare(of_any_machine(last), block._replace(prints=of_any_machine(block.prints)))
    found = blocks(page, "python")
    (tmp_path / "own.py").write_text("\n".join(block.code for block in found))
    printed = shell(Block("python own.py 2>own.err", "README.md", ""), tmp_path, fresh)
    results = [line for line in printed.splitlines() if line.startswith("[")]
    assert results == [block.prints.strip() for block in found if block.prints]
    said = (tmp_path / "own.err").read_text()  # Lightning's own tips
    assert not re.search(r"check_first_step|lightning_dp/.*Warning", said), said
    shell(Block("python -m pip check && python -m pytest --version", "", ""), clone, fresh)
    shutil.rmtree(tmp_path)


def of_any_machine(text: str) -> str:
    """Without times and widths; processors differ in a loss's last digits."""
    text = re.sub(r"[\d.,]+ (m?s)\b", r"# \1", text)
    text = re.sub(r"(?<![\d.])\d+%", "##%", text)  # of the time busy
    text = re.sub(r"(test/loss 0\.\d\d)\d\d", r"\1##", text)
    return re.sub(r"([━─ ])\1+", r"\1", text)
