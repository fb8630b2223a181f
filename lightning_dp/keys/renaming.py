"""New names for the keys of a state dict, and the prefixes that wrappers put before keys."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from lightning_dp.parallel.checks import told

_MOST_LEVELS = 200  # each takes some of Python's stack, here and where torch loads the module


@dataclass(frozen=True)
class Renaming:
    """New names: of keys, and of modules (the paths in a state dict's metadata)."""

    keys: dict[str, str] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, names: dict[str, str]) -> Renaming:
        """The renaming of keys by a dict; modules go where their keys go."""
        found = cls(names)
        for key, name in names.items():
            found._name_modules(key.rpartition(".")[0], name.rpartition(".")[0])
        return found

    def _name_modules(self, path: str, name: str) -> None:
        """Notes the new path of a module, and of those around it as far as they are the same."""
        while path not in self.modules:
            self.modules[path] = name
            path, _, step = path.rpartition(".")
            name, _, other = name.rpartition(".")
            if step != other:
                return

    @property
    def changes(self) -> dict[str, str]:
        """The keys that get another name."""
        return {key: name for key, name in self.keys.items() if key != name}

    def module(self, path: str) -> str:
        """The new path of a module; one without keys goes where the module above it goes."""
        above, below = path, ""
        while above not in self.modules and above:
            above, _, step = above.rpartition(".")
            below = join(step, below)
        return join(self.modules.get(above, above), below)


def join(*steps: str) -> str:
    """A path of steps, without the empty ones."""
    return ".".join(step for step in steps if step)


def as_they_are(keys: Iterable[str]) -> Renaming:
    """Changes no name."""
    return Renaming({key: key for key in keys})


def add_prefix(keys: Iterable[str], prefix: str) -> Renaming:
    """Puts a prefix before every key."""
    return Renaming({key: prefix + key for key in keys}, {"": prefix.removesuffix(".")})


def strip_prefix(keys: Iterable[str], prefix: str) -> Renaming:
    """Takes a prefix that all keys share from them."""
    wrappers = {"": "", **{beginning[:-1]: "" for beginning in beginnings(prefix)}}
    return Renaming({key: key.removeprefix(prefix) for key in keys}, wrappers)


def beginnings(prefix: str) -> list[str]:
    """The prefixes that one of several steps begins with: `a.b.` with `a.` and itself."""
    return [prefix[: i + 1] for i, character in enumerate(prefix) if character == "."]


def shared_prefix(keys: Collection[str], prefixes: Sequence[str]) -> str:
    """The wrappers that all keys are in, outermost first, as one prefix."""
    check_levels(keys)
    shared = ""
    while keys:
        inner = (shared + prefix for prefix in prefixes)
        longer = next((p for p in inner if all(_is_below(key, p) for key in keys)), None)
        if longer is None:
            break
        shared = longer
    return shared


def check_levels(keys: Collection[str]) -> None:
    """Raises a ValueError where a key is too deep to be one of a module."""
    deepest = max(keys, key=lambda key: key.count("."), default="")
    levels = deepest.count(".")
    if levels > _MOST_LEVELS:
        raise ValueError(
            f"state_dict: expected names of at most {_MOST_LEVELS} levels, got one of {levels}: "
            f"{told(deepest)}. Is this a module's state?"
        )


def _is_below(key: str, prefix: str) -> bool:
    return len(key) > len(prefix) and key.startswith(prefix)
