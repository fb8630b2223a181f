"""The blocks of code of the README and the guides, and what the page says that they print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from support.programs import ROOT

README = ROOT / "README.md"
GUIDES = sorted((ROOT / "examples" / "guides").glob("*.md"))

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_NOT_RUN = re.compile(r"<!-- not run: .+ -->\n\Z")
_NOISE = re.compile(r"Warning|deprecat|litlogger|Tip:|many workers")
# Lightning makes a class that torch 2.13 deprecates: plain Lightning prints it at each fit, too.
_LIGHTNINGS = re.compile(r"^.*_pytree\.py:\d+: `isinstance\(treespec, LeafSpec\)` is .*\n", re.M)


class Block(NamedTuple):
    """A fenced block of a page, and what the page says that it prints."""

    language: str
    code: str
    line: int
    prints: str | None


def blocks(text: str, *languages: str) -> list[Block]:
    """The blocks that are to be run, in order."""
    found: list[Block] = []
    fences = list(_FENCE.finditer(text))
    for fence, following in zip(fences, [*fences[1:], None], strict=True):
        language, code = fence.groups()
        is_run = language in ("python", "bash") and language in (languages or (language,))
        if not is_run or _NOT_RUN.search(text[: fence.start()]):
            continue
        prints = None
        if following is not None and following[1] == "text":
            between = text[fence.end() : following.start()]
            prints = following[2] if not between.strip() else None
        found.append(Block(language, code, text.count("\n", 0, fence.start()) + 2, prints))
    return found


def compare(printed: str, wanted: str, where: str) -> None:
    """Line by line; `...` stands for anything within a line."""
    lines, patterns = (each.rstrip().splitlines() for each in (printed, wanted))
    fits = len(lines) == len(patterns) and all(
        re.fullmatch(re.escape(pattern.rstrip()).replace(r"\.\.\.", ".*"), line.rstrip())
        for line, pattern in zip(lines, patterns, strict=True)
    )
    assert fits, f"{where} says that this is printed:\n{wanted}\nBut it is:\n{printed}"


def without_noise(printed: str, where: str, code: str = "") -> str:
    """What was printed, if no line of it is an advert, a tip or a warning.

    `debug=` among the code's options asks for the full log: there they stay.
    """
    printed = _LIGHTNINGS.sub("", printed)
    noise = [line for line in printed.splitlines() if _NOISE.search(line)]
    if "debug=" in code:
        return printed
    assert not noise, f"{where} prints:\n" + "\n".join(noise)
    return printed


def shell(code: str, cwd: Path, environment: dict[str, str], where: str) -> str:
    """What commands print on both streams; they have to end well."""
    command = ["bash", "-euo", "pipefail", "-c", code]
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, f"{where}\n{done.stdout}"
    return done.stdout


def script(code: str, cwd: Path, environment: dict[str, str], where: str) -> str:
    """What Python code prints as a file of a person's own, by the `python` of the environment.

    On the other stream there are Lightning's own tips; a warning of ours is an error.
    """
    (cwd / "own.py").write_text(code)
    done = subprocess.run(
        ["python", "own.py"], cwd=cwd, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, f"{where}\n{done.stdout}{done.stderr}"
    is_warned = re.search(r"check_first_step|lightning_dp/.*Warning", done.stderr)
    assert not is_warned, f"{where} prints:\n{done.stderr}"
    return done.stdout


def beside(python: Path = Path(sys.executable)) -> str:
    """A PATH whose `python` is this one."""
    return f"{python.parent}{os.pathsep}{os.environ['PATH']}"
