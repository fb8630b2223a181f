"""Converts checkpoint files: `python -m lightning_dp.convert old.pt clean.ckpt --strip`."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from lightning_dp.checkpointing import (
    add_to,
    added_to,
    as_lightnings,
    is_lightnings,
    note_added,
    rename,
    rename_states,
    safetensors_files,
    take_added,
)
from lightning_dp.checkpointing import files as checkpoint_files
from lightning_dp.keys import (
    PREFIXES,
    Renaming,
    add_prefix,
    as_they_are,
    renaming_like,
    shared_prefix,
    strip_prefix,
)
from lightning_dp.table import ScreenParser, print_table

State = Mapping[str, Any]

DESCRIPTION = """\
Renames the weights in a checkpoint file and writes them to another file. The
ending of DST says what is written: .safetensors, .ckpt for Lightning, any other
for torch. If SRC has an ending of the same kind, all else in it is kept too
(optimizers, epoch); otherwise DST holds the weights alone. Without an option
that renames, keys stay as they are.
"""


def convert(options: Namespace) -> None:
    """Converts a file as the options of the command line say, after showing what is renamed."""
    if options.target.exists() and not (options.force or options.dry_run):
        raise ValueError(
            f"DST: expected a new file, got {str(options.target)!r}, which exists. Give another "
            "name, or --force to replace it."
        )
    if options.target.is_dir():
        raise ValueError(f"DST: expected a file, got the folder {str(options.target)!r}.")
    loaded = _without_modules(_read(options.source, options))
    weights = checkpoint_files.weights_in(loaded, options.source)
    renaming = _renaming(weights, added_to(loaded), options)
    renamed = rename(weights, renaming)  # two keys may fall together: before the table
    _show(weights, renaming)
    if _kind(options.source) == _kind(options.target) and isinstance(loaded, Mapping):
        content = _rename_all(loaded, renaming, options)
    else:
        content = renamed
        left = [] if loaded is weights or not isinstance(loaded, Mapping) else list(loaded)
        if left:
            print(f"Of {left} only the weights go into {options.target.name}.")
    if options.dry_run:
        print("Nothing was written (--dry-run).")
    else:
        _write(content, options.target)
        print(f"Wrote {options.target}.")


def _read(path: Path, options: Namespace) -> Any:
    try:
        return checkpoint_files.read(path, weights_only=False if options.unsafe else None)
    except FileNotFoundError as error:
        raise ValueError(
            f"{path}: expected a checkpoint file, got the name of no file. Correct it."
        ) from error


def _without_modules(loaded: Any) -> Any:
    """What a file held, with the states of modules in their place: those can be renamed."""
    if isinstance(loaded, nn.Module):
        return loaded.state_dict()
    if isinstance(loaded, Mapping):
        modules = {key: value for key, value in loaded.items() if isinstance(value, nn.Module)}
        return {**loaded, **{k: v.state_dict() for k, v in modules.items()}} if modules else loaded
    return loaded


def _write(content: Any, path: Path) -> None:
    if _kind(path) == safetensors_files.SUFFIX:
        safetensors_files.write(content, path)
    else:
        checkpoint_files.write(as_lightnings(content) if _kind(path) == ".ckpt" else content, path)


def _kind(path: Path) -> str:
    """.safetensors, .ckpt, or "" for a file of torch."""
    suffix = path.suffix.lower()
    return suffix if suffix in (safetensors_files.SUFFIX, ".ckpt") else ""


def _renaming(weights: State, added: str | None, options: Namespace) -> Renaming:
    if options.strip:
        # What a note in the file says was added is known; all else is a guess.
        return strip_prefix(weights, added or shared_prefix(weights, PREFIXES))
    if options.add:
        return add_prefix(weights, PREFIXES[0])
    if options.like is not None:
        return _like(weights, _reference(options.like, options), options.like)
    if options.by_order is not None:
        for path in (options.source, options.by_order):
            _check_order(path)
        return _by_order(weights, _reference(options.by_order, options), options.by_order)
    return as_they_are(weights)


def _rename_all(loaded: State, renaming: Renaming, options: Namespace) -> Any:
    """All that SRC held, with its model states under other names."""
    is_trainers = is_lightnings(loaded)
    if options.add and is_trainers:
        return add_to(loaded, PREFIXES[0])
    if options.strip and added_to(loaded):
        return take_added(loaded)

    def renamed(state: State) -> State:
        if state.keys() <= renaming.keys.keys():  # such as averaged weights
            return rename(state, renaming)
        if options.strip and not is_trainers:  # there, they have their callbacks' names
            return rename(state, strip_prefix(state, shared_prefix(state, PREFIXES)))
        return state

    content = rename_states(loaded, renamed)
    return note_added(content, None) if renaming.changes else content


def _reference(path: Path, options: Namespace) -> State:
    return checkpoint_files.weights_in(_read(path, options), path)


def _like(weights: State, reference: State, path: Path) -> Renaming:
    renaming = renaming_like(weights, reference)
    names = set(renaming.keys.values())
    missing, unexpected = sorted(reference.keys() - names), sorted(names - reference.keys())
    if missing or unexpected:
        raise ValueError(
            f"--like: expected keys that match those of {str(path)!r} but for prefixes, got "
            f"others: {len(missing)} are missing {missing[:4]}, {len(unexpected)} are not in it "
            f"{unexpected[:4]}. Use --by-order for other names of the same architecture."
        )
    return renaming


def _by_order(weights: State, reference: State, path: Path) -> Renaming:
    """Names the first key as the first one of the reference, and so on, as far as shapes agree."""
    pairs = list(zip(weights, reference, strict=False))
    for place, (key, name) in enumerate(pairs, start=1):
        shapes = [_shape(value) for value in (weights[key], reference[name])]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"--by-order: expected the same shapes in the same order as in {str(path)!r}; "
                f"number {place} is {key!r} of shape {shapes[0]}, there {name!r} of shape "
                f"{shapes[1]}. These are not the same architecture, or not in the same order."
            )
    if len(weights) != len(reference):
        longer = list(weights if len(weights) > len(reference) else reference)
        raise ValueError(
            f"--by-order: expected as many keys as in {str(path)!r}, got {len(weights)} for "
            f"{len(reference)}; {longer[len(pairs)]!r} has no partner."
        )
    return Renaming.of(dict(pairs))


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if hasattr(value, "shape") else None


def _check_order(path: Path) -> None:
    if _kind(path) == safetensors_files.SUFFIX and not safetensors_files.keeps_order(path):
        raise ValueError(
            f"--by-order: expected a file that keeps the order of the module's keys, got "
            f"{str(path)!r}: .safetensors files sort them, unless written by this program. Take a "
            "file of torch."
        )


def _show(weights: State, renaming: Renaming) -> None:
    changes = renaming.changes
    rows = [(key, name, str(_shape(weights[key]) or "")) for key, name in changes.items()]
    if rows:
        print_table(("key", "new name", "shape"), rows)
    print(f"{len(changes)} of {len(weights)} keys get another name.")


def _parse(arguments: Sequence[str] | None) -> Namespace:
    parser = ScreenParser("python -m lightning_dp convert", description=DESCRIPTION)
    parser.add_argument("source", metavar="SRC", type=Path, help="the file to read")
    parser.add_argument("target", metavar="DST", type=Path, help="the file to write")
    names = parser.add_mutually_exclusive_group()
    names.add_argument(
        "--strip",
        action="store_true",
        help="take the prefixes of wrappers away (module., _orig_mod., ...) that all keys share",
    )
    names.add_argument("--add", action="store_true", help="put module. before every key")
    names.add_argument(
        "--like",
        metavar="REFERENCE",
        type=Path,
        help="take the keys of this file, which differ in prefixes of wrappers only, at any depth",
    )
    names.add_argument(
        "--by-order",
        metavar="REFERENCE",
        type=Path,
        help="take the keys of this file, the first for the first and so on: for the same "
        "architecture under other names; stops where shapes differ",
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would be renamed")
    parser.add_argument("--force", action="store_true", help="replace DST if it exists")
    parser.add_argument(
        "--unsafe",
        action="store_true",
        help="run the code that pickles in these files ask for: only for files that you trust",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command line; returns the exit code."""
    try:
        convert(_parse(arguments))
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
