"""The tests' own modules once more, written for the package `pytorch_lightning`."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

_WORDS = {
    "lightning.pytorch": "pytorch_lightning",
    "from lightning_dp import DataParallelStrategy": (
        "from lightning_dp.pytorch_lightning import DataParallelStrategy"
    ),
    "from oracle import": "from oracle_for_pytorch_lightning import",
}


def for_pytorch_lightning(name: str) -> ModuleType:
    """The module `name` of the tests, with the other package's imports in the place of its own."""
    translated = ModuleType(f"{name}_for_pytorch_lightning")
    if translated.__name__ not in sys.modules:
        (path,) = Path(__file__).parent.rglob(f"{name}.py")
        source = path.read_text(encoding="utf-8")
        for word, other in _WORDS.items():
            source = source.replace(word, other)
        sys.modules[translated.__name__] = translated
        exec(compile(source, str(path), "exec"), translated.__dict__)
    return sys.modules[translated.__name__]
