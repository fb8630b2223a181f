"""A law that may take minutes, looked at in a process of its own that nobody has to wait for."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lightning_dp.doctor.law import Law, Result


class Aside:
    """Has another doctor look at one law.

    Args:
        law: the law.
        command: the program; it is given `--only` and `--output`.
    """

    def __init__(self, law: Law, command: Sequence[str]) -> None:
        self.law = law
        self._folder = tempfile.TemporaryDirectory()
        self._output = Path(self._folder.name) / "doctor.json"
        self._process = subprocess.Popen(
            [*command, "--only", law.name, "--output", str(self._output)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **self._environment()},
            start_new_session=True,  # compilers have processes of their own
        )
        if hasattr(os, "setpriority"):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, 10)  # others are in a hurry

    def _environment(self) -> dict[str, str]:
        """One thread, and a cache of its own for compiled code.

        It may be killed in the midst of a file, which would be taken for a whole one in the user's.
        """
        cache = str(Path(self._folder.name) / "compiled")
        threads = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        return {**threads, "TORCHINDUCTOR_CACHE_DIR": cache}

    def result(self, seconds: float) -> Result:
        """What it has found, or that it has not in so many seconds."""
        again = how_to_look_at(self.law)
        try:
            self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self.close()
            return Result(self.law.name, "skip", remark=f"not ready in time; {again}")
        if not self._output.is_file():
            return Result(self.law.name, "fail", remark=f"its process failed; {again}")
        (content,) = json.loads(self._output.read_text(encoding="utf-8"))["proof"]
        if content["difference"] is not None:
            content["difference"] = float(content["difference"])
        return Result(**{**content, "culprits": tuple(content["culprits"])})

    def close(self) -> None:
        """Ends the process, and those that it has started."""
        end(self._process)
        if Path(self._folder.name).exists():
            self._folder.cleanup()


def how_to_look_at(law: Law) -> str:
    """What a user can do who is not told of a law."""
    return f"see doctor --only {law.name!r}"


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that has a session of its own, and those that it has started."""
    if sys.platform == "win32":
        process.kill()
    else:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
