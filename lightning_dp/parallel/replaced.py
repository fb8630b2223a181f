"""Attributes of an object that are others for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_ABSENT = object()


@contextlib.contextmanager
def replaced(owner: Any, **names: Any) -> Iterator[None]:
    """Gives an object other attributes, and puts its own back whatever happens.

    They are written to its `__dict__`: a method of its class is hidden for a while, and nothing
    that a module registers is touched. What it had none of before, it has none of afterwards.

    Args:
        owner: a module, a class instance or a Python module.
        names: the attributes.

    Example:
        >>> class Greeter:
        ...     def word(self):
        ...         return "hello"
        >>> greeter = Greeter()
        >>> with replaced(greeter, word=lambda: "goodbye"):
        ...     greeter.word()
        'goodbye'
        >>> greeter.word(), vars(greeter)
        ('hello', {})
    """
    attributes = vars(owner)
    before = {name: attributes.get(name, _ABSENT) for name in names}
    try:  # from here on an interrupt finds its way to `finally`
        attributes.update(names)
        yield
    finally:
        for name, value in before.items():
            if value is _ABSENT:
                attributes.pop(name, None)
            else:
                attributes[name] = value
