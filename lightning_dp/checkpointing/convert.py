"""Converts checkpoint files: `lightning-dp convert old.pt clean.ckpt --strip`."""

from __future__ import annotations

import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from lightning_dp.checkpointing import files
from lightning_dp.checkpointing.io import add_prefix, as_lightnings, remove_added, rename_all
from lightning_dp.parallel.state_keys import match_keys, summarize_mismatch, without_outer
from lightning_dp.table import OneLineParser, print_table

DESCRIPTION = """\
Renames the weights in a checkpoint file and writes them to another file. The
ending of DST says what is written: .safetensors, .ckpt for Lightning, any other
for torch. If SRC has an ending of the same kind, all else in it is kept too
(optimizers, epoch); otherwise DST holds the weights alone. Without an option
that renames, keys stay as they are.
"""


def convert(options: Namespace) -> None:
    """Converts a file as the options of the command line say, after showing what is renamed."""
    source, target = options.source, options.target
    if target.exists() and not (options.force or options.dry_run):
        raise ValueError(
            f"DST: expected a new file, got {str(target)!r}, which exists. Give another name, or "
            "--force to replace it."
        )
    content = loaded = _read(source, options)
    before = files.weights_in(loaded, source)
    if options.strip:
        content = remove_added(loaded)
        content = rename_all(loaded, without_outer(before)) if content is loaded else content
    elif options.add:
        content = add_prefix(loaded)
    elif options.like:
        reference = files.weights_in(_read(options.like, options), options.like)
        names = match_keys(before, reference)
        if set(names.values()) != set(reference):
            raise ValueError(f"--like {options.like}: {summarize_mismatch(names, [*reference])}")
        content = rename_all(loaded, names)
    weights = files.weights_in(content, source)
    pairs = [(old, new) for old, new in zip(before, weights, strict=True) if old != new]
    if pairs:
        shapes = [str(tuple(getattr(weights[new], "shape", ())) or "") for _, new in pairs]
        rows = [(old, new, shape) for (old, new), shape in zip(pairs, shapes, strict=True)]
        print_table(("key", "new name", "shape"), rows)
    print(f"{len(pairs)} of {len(weights)} keys get another name.")
    if _kind(source) != _kind(target) and content is not weights:
        print(f"Of {list(content)} only the weights go into {target.name}.")
        content = weights
    if options.dry_run:
        print("Nothing was written (--dry-run).")
        return
    if _kind(target) == files.SAFETENSORS:
        files.write_safetensors(weights, target)
    else:
        files.write(as_lightnings(content) if _kind(target) == ".ckpt" else content, target)
    print(f"Wrote {target}.")


def _read(path: Path, options: Namespace) -> Any:
    """What a file holds, with the states of modules in their place: those can be renamed."""
    try:
        loaded = files.read(path, weights_only=False if options.unsafe else None)
    except FileNotFoundError as error:
        raise ValueError(
            f"{path}: expected a checkpoint file, got the name of no file. Correct it."
        ) from error
    if isinstance(loaded, nn.Module):
        return loaded.state_dict()
    if isinstance(loaded, Mapping):
        modules = {k: v.state_dict() for k, v in loaded.items() if isinstance(v, nn.Module)}
        return {**loaded, **modules} if modules else loaded
    return loaded


def _kind(path: Path) -> str:
    """.safetensors, .ckpt, or "" for a file of torch."""
    suffix = path.suffix.lower()
    return suffix if suffix in (files.SAFETENSORS, ".ckpt") else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command line; returns the exit code."""
    parser = OneLineParser(
        "python -m lightning_dp convert",
        description=DESCRIPTION,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SRC", type=Path, help="the file to read")
    parser.add_argument("target", metavar="DST", type=Path, help="the file to write")
    names = parser.add_mutually_exclusive_group()
    strip = "take away the wrappers around all keys (module., _orig_mod., ...)"
    names.add_argument("--strip", action="store_true", help=strip)
    names.add_argument("--add", action="store_true", help="put module. before every key")
    like = "take the keys of this file, which differ in prefixes of wrappers only"
    names.add_argument("--like", metavar="REFERENCE", type=Path, help=like)
    for option, text in (
        ("--dry-run", "show what would be renamed"),
        ("--force", "replace DST if it exists"),
        ("--unsafe", "run the code that pickles in these files ask for: only if you trust them"),
    ):
        parser.add_argument(option, action="store_true", help=text)
    try:
        convert(parser.parse_args(arguments))
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
