"""What is installed, and what imports what."""

import re
import shutil
import sys
import tarfile
import zipfile
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from support.programs import ROOT, python

import lightning_dp

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def test_every_package_folder_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = {
        ".".join(file.parent.relative_to(ROOT).parts)
        for file in (ROOT / "lightning_dp").rglob("__init__.py")
    }
    listed = project["tool"]["setuptools"]["packages"]
    assert set(listed) == found | {"lightning_dp.conf", "lightning_dp.examples"}


def test_bare_package_finds_conf_and_examples_beside_it() -> None:
    """The package once more, by a path of its own, as if it were not installed."""
    init = ROOT / "lightning_dp" / "__init__.py"
    folders = [str(init.parent)]
    spec = spec_from_file_location("bare", init, submodule_search_locations=folders)
    assert spec is not None and spec.loader is not None
    bare = module_from_spec(spec)
    spec.loader.exec_module(bare)
    for name in ("conf", "examples"):
        found = PathFinder.find_spec(f"bare.{name}", bare.__path__)
        assert found is not None and list(found.submodule_search_locations or []) == [
            str(ROOT / name)
        ]


NOT_OF_THE_REPOSITORY = (
    *(".git", ".venv", "build", "dist", "logs", "lightning_logs", "checkpoints", "shared"),
    *("*.egg-info", "__pycache__", "*.pyc", ".*_cache", ".hypothesis"),
)


def files_of(folder: Path) -> set[str]:
    return {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}


def built(what: str, source: Path, into: Path) -> Path:
    """What setuptools makes of a folder, in a process and a folder of its own."""
    into.mkdir()
    code = f"from setuptools.build_meta import *; print(build_{what}({str(into)!r}))"
    done = python("-c", code, cwd=source)
    return into / done.stdout.split()[-1]


@pytest.mark.slow
def test_the_source_distribution_is_the_repository_and_its_wheel_has_no_tests(
    tmp_path: Path,
) -> None:
    pytest.importorskip("setuptools", minversion="77")
    repository, empty = tmp_path / "repository", tmp_path / "empty"
    shutil.copytree(ROOT, repository, ignore=shutil.ignore_patterns(*NOT_OF_THE_REPOSITORY))
    before = files_of(repository)
    with tarfile.open(built("sdist", repository, tmp_path / "dist")) as archive:
        archive.extractall(empty, filter="data")
    (unpacked,) = empty.iterdir()
    assert unpacked.name == f"lightning_dp-{lightning_dp.__version__}"
    found = {name for name in files_of(unpacked) if ".egg-info" not in name}
    assert found == before | {"PKG-INFO", "setup.cfg"}

    with zipfile.ZipFile(built("wheel", unpacked, tmp_path / "wheels")) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = {name for name in before if name.startswith("lightning_dp/")}
    beside = {f"lightning_dp/{n}" for n in before if re.match(r"conf/|examples/\w+\.py", n)}
    assert names == package | beside
