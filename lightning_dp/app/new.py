"""A small project of one's own: ``python -m lightning_dp new FOLDER``."""

import keyword
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_dp.table import ScreenParser

TEMPLATE = Path(__file__).parent / "template"
"""It is a package that runs where it is; a project is a copy of it under another name."""

_NAME = "lightning_dp.app.template"
_OUTSIDE = {"README.md": "README.md", "checks.py": "tests/test_same_numbers.py"}
"""What lies beside the package in a project."""

_PYTEST = """\
[pytest]
testpaths = tests
pythonpath = .
filterwarnings =
    error
    # Lightning's own use of torch, nothing that could be changed here.
    ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning
    ignore:The '.*' does not have many workers:UserWarning
"""


def package_name(folder: str) -> str:
    """A folder's name as one that Python can import.

    Example:
        >>> package_name("My-Net 2"), package_name("3d"), package_name("class")
        ('my_net_2', 'project_3d', 'project_class')
    """
    name = re.sub(r"[^a-z0-9]+", "_", folder.lower()).strip("_")
    taken = keyword.iskeyword(name) or name in sys.stdlib_module_names or name in _TAKEN
    return f"project_{name}".rstrip("_") if taken or not name or name[0].isdigit() else name


_TAKEN = ("conf", "hydra", "lightning", "lightning_dp", "pytest", "tests", "torch")


def create(folder: Path) -> str:
    """Writes a project into a new or empty folder; returns its package's name."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(
            f"FOLDER: expected a new or an empty folder, got {str(folder)!r}, which exists and "
            "is not empty. Give another name."
        )
    name = package_name(folder.resolve().name)
    for file in sorted(TEMPLATE.rglob("*")):
        if file.suffix not in (".py", ".yaml", ".md"):
            continue
        inside = file.relative_to(TEMPLATE)
        target = folder / _OUTSIDE.get(str(inside), Path(name, inside))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(file.read_text("utf-8").replace(_NAME, name), "utf-8")
    (folder / "pytest.ini").write_text(_PYTEST, "utf-8")
    return name


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command line; returns the exit status."""
    parser = ScreenParser(
        "python -m lightning_dp new",
        description="Writes a small project into a new folder: a LightningModule, a data module,\n"
        "conf/, a test and a README. Its package gets the folder's name, made a name that\n"
        "Python can import.",
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    folder = parser.parse_args(arguments).folder
    try:
        name = create(folder)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if name != folder.resolve().name:
        print(f"The package is called {name}: {folder.resolve().name!r} is no name to import.")
    print(f"Wrote {folder}. Now: cd {folder}, python -m pytest, python -m {name}")
    return 0
