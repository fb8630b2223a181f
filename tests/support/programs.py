"""Running the programs as a user does, and reading what they leave behind."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]


def command_line(*arguments: str, cwd: Path) -> str:
    """Runs the program and returns what it prints; fails if it does."""
    command = [sys.executable, "-m", "lightning_dp", *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def in_here(main: Callable[[], None], *arguments: str) -> str:
    """What a script prints, run in this process: its imports take longer than its work."""
    printed = io.StringIO()
    with mock.patch.object(sys, "argv", ["script", *arguments]), redirect_stdout(printed):
        main()
    return printed.getvalue()


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content
