"""Keys: which names in two state dicts mean the same.

Decided here: which prefixes are those of wrappers and not a child's name (`matching`, by the `tree`
of a module's keys), and how keys are renamed (`renaming`, `state_dicts`). Strings and state dicts.
"""

from lightning_dp.keys.matching import bare, match_keys
from lightning_dp.keys.renaming import (
    Renaming,
    add_prefix,
    as_they_are,
    shared_prefix,
    strip_prefix,
)
from lightning_dp.keys.state_dicts import (
    PREFIXES,
    keys_of,
    normalize_state_dict,
    renamed,
    renaming_like,
)

__all__ = [
    "PREFIXES",
    "Renaming",
    "add_prefix",
    "as_they_are",
    "bare",
    "keys_of",
    "match_keys",
    "normalize_state_dict",
    "renamed",
    "renaming_like",
    "shared_prefix",
    "strip_prefix",
]
