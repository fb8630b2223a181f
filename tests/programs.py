"""Running the programs as a user does, and reading what they leave behind."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def command_line(*arguments: str, cwd: Path, module: str = "lightning_dp") -> str:
    """Runs a program and returns what it prints; fails if it does."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content
