"""Converts checkpoint files: `lightning-dp convert old.pt clean.ckpt --strip`."""

from __future__ import annotations

import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

from lightning_dp.checkpointing import files
from lightning_dp.checkpointing.io import add_prefix, as_lightnings, rename_weights, strip
from lightning_dp.checkpointing.state_keys import without_outer
from lightning_dp.table import OneLineParser, table

DESCRIPTION = """\
Renames the weights in a checkpoint file and writes them to another file: for
Lightning if DST ends in .ckpt, else for torch. If SRC is of the same kind, all
else in it is kept too (optimizers, epoch); otherwise DST holds the weights
alone. Without an option that renames, keys stay as they are.
"""


def convert(options: Namespace) -> None:
    """Converts a file as the options of the command line say, after showing what is renamed."""
    source, target = options.source, options.target
    if target.suffix.lower() == ".safetensors":
        raise ValueError(
            f"DST: expected a file of torch (.pt) or Lightning (.ckpt), got {str(target)!r}. "
            "Write it with safetensors.torch.save_file."
        )
    if target.exists() and not options.force:
        raise ValueError(
            f"DST: expected a new file, got {str(target)!r}, which exists. Give another name, or "
            "--force to replace it."
        )
    content = loaded = files.read(source, weights_only=False if options.unsafe else None)
    before = files.weights_in(loaded, source)
    if options.strip:
        content = strip(loaded)
        if content is loaded:  # in a Trainer's checkpoint, `module.` too: it was asked for
            content = rename_weights(loaded, without_outer(before))
    elif options.add:
        content = add_prefix(loaded)
    weights = files.weights_in(content, source)
    pairs = [(old, new) for old, new in zip(before, weights, strict=True) if old != new]
    if pairs:
        print(table(("key", "new name"), pairs, left=2))
    print(f"{len(pairs)} of {len(weights)} keys get another name.")
    from_lightning, to_lightning = (p.suffix.lower() == ".ckpt" for p in (source, target))
    if from_lightning != to_lightning and content is not weights:
        print(f"Of {list(content)} only the weights go into {target.name}.")
        content = weights
    files.write(as_lightnings(content) if to_lightning else content, target)
    print(f"Wrote {target}.")


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
    text = "take away the wrappers around all keys (module., _orig_mod., ...)"
    names.add_argument("--strip", action="store_true", help=text)
    names.add_argument("--add", action="store_true", help="put module. before every key")
    parser.add_argument("--force", action="store_true", help="replace DST if it exists")
    text = "run the code that pickles in these files ask for: only if you trust them"
    parser.add_argument("--unsafe", action="store_true", help=text)
    try:
        convert(parser.parse_args(arguments))
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
