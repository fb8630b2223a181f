"""Options that do not exist: one line with the nearest name, instead of Hydra's many."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.main import get_args_parser  # type: ignore[attr-defined]  # imported there, not declared
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

_FULL = "HYDRA_FULL_ERROR"
_CONF = "lightning_dp.conf"
_SWEEPERS = {"hydra/sweeper/optuna": "hydra-optuna-sweeper"}
_EXPECTED = "expected KEY=VALUE, such as trainer.devices=2"
_HELP = "--help tells which keys there are."
_own_value: list[str | None] = []  # of HYDRA_FULL_ERROR, while Hydra composes


@contextmanager
def composed_in_one_line(config_name: str) -> Iterator[None]:
    """Ends the program with one line where Hydra cannot compose what the command line asks for.

    Until the task begins, see `task_begins`, Hydra is made to raise its errors.
    """
    if os.environ.get(_FULL) == "1":
        yield
        return
    _own_value.append(os.environ.get(_FULL))
    os.environ[_FULL] = "1"
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        sys.exit(f"error: {in_one_line(error, config_name, sys.argv[1:])}")
    except OSError as error:
        if not _own_value or error.filename is None:
            raise
        sys.exit(
            f"error: expected a folder to write to, got {str(error.filename)!r} "
            f"({error.strerror}). Give another one: paths.log_dir=FOLDER, or hydra.run.dir=FOLDER."
        )
    finally:
        task_begins()


def check_flags(arguments: Sequence[str]) -> None:
    """Refuses what is none of Hydra's flags; Hydra itself would print all of its own."""
    _, unknown = get_args_parser().parse_known_args(arguments)
    if unknown:
        sys.exit(f"error: {unknown[0]}: {_EXPECTED}, got an option that there is not. {_HELP}")


def task_begins() -> None:
    """Leaves errors from now on to Hydra, as the user wants them."""
    while _own_value:
        value = _own_value.pop()
        os.environ.pop(_FULL)
        if value is not None:
            os.environ[_FULL] = value


def in_one_line(error: Exception, config_name: str, arguments: Sequence[str]) -> str:
    """What is wrong with a command line that Hydra refuses, and what was meant perhaps."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _unknown_option(error.missing_cfg_file, error.options or ())
    if isinstance(error, OverrideParseException):
        if "=" not in error.override and error.override[:1] != "~":
            return f"{error.override}: {_EXPECTED}, got a word alone. {_HELP}"
        return (
            f"{error.override}: expected KEY=VALUE as Hydra reads it, got a value with blanks or "
            f"brackets, perhaps. Quote it twice: '{error.override.partition('=')[0]}=\"...\"'"
        )
    found = re.search(r"Could not override '([^']*)'.*\n.*use (\+.*)", str(error))
    if found is not None:
        return _unknown_key(found[1], found[2], _known(config_name, found[2][1:], arguments))
    words = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    return f"{words} (HYDRA_FULL_ERROR=1 shows where)"


def _unknown_option(file: str, options: Sequence[str]) -> str:
    group, _, name = file.rpartition("/")
    package = _SWEEPERS.get(file)
    if package is not None:
        return (
            f"{group}: expected the package {package}, which is not installed. Install it: "
            f"pip install {package}"
        )
    expected = f"one of {', '.join(sorted(options))}" if options else "the name of a file"
    return f"{group}: expected {expected}, got {name!r}.{_meant(_near(name, options))}"


def _unknown_key(key: str, to_add: str, known: Sequence[str]) -> str:
    last = key.rpartition(".")[2]
    elsewhere = [name for name in known if name.rpartition(".")[2] == last]
    meant = _near(key, known) or elsewhere[:3]
    meant = meant or [name for name in known if _near(last, [name.rpartition(".")[2]])][:3]
    hint = _meant(meant) or " --cfg job shows all keys."
    return (
        f"{key}: expected a key or group that there is, got {to_add[1:]}.{hint} To add it: {to_add}"
    )


def _meant(names: Sequence[str]) -> str:
    return f" Did you mean {' or '.join(names)}?" if names else ""


def _near(name: str, names: Sequence[str]) -> list[str]:
    return get_close_matches(name, names, n=2, cutoff=0.7)


def _known(config_name: str, mistake: str, arguments: Sequence[str]) -> list[str]:
    """All groups, and all keys of what the other arguments compose; or of nothing but defaults."""
    folders = Path(str(files(_CONF).joinpath("train.yaml"))).parent.iterdir()
    groups = [folder.name for folder in folders if any(folder.glob("*.yaml"))]
    others = [a for a in arguments if "=" in a and a[0] != "-" and a != mistake]
    for overrides in (others, []):
        try:
            with initialize_config_module(_CONF, version_base="1.3"):
                composed = compose(config_name, overrides=overrides)
        except (HydraException, OmegaConfBaseException):
            continue  # a second mistake, or a sweep
        content = OmegaConf.to_container(composed, resolve=False)
        return list(dict.fromkeys([*_keys(content), *groups]))
    return groups


def _keys(node: Any, before: str = "") -> Iterator[str]:
    if isinstance(node, dict):
        for name, child in node.items():
            yield f"{before}{name}"
            yield from _keys(child, f"{before}{name}.")
