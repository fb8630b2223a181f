"""What is installed, and what imports what."""

import os
import re
import subprocess
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location

import pytest
from programs import ROOT

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


@pytest.mark.slow
def test_bare_checkout_finds_conf_and_examples() -> None:
    code = (
        "import lightning_dp.conf as c, lightning_dp.examples as e; print(*c.__path__, *e.__path__)"
    )
    done = subprocess.run(
        # -S: no site-packages, hence no installed lightning_dp; its dependencies come by path.
        [sys.executable, "-S", "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *site_packages()])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{ROOT / 'conf'} {ROOT / 'examples'}"


def site_packages() -> list[str]:
    return [path for path in sys.path if path.endswith("site-packages")]


def test_only_the_app_imports_hydra() -> None:
    pattern = re.compile(r"^\s*(?:import|from)\s+(?:hydra|omegaconf)\b", re.MULTILINE)
    importers = {
        file.relative_to(ROOT / "lightning_dp").parts[0]
        for file in (ROOT / "lightning_dp").rglob("*.py")
        if pattern.search(file.read_text())
    }
    assert importers == {"app"}
