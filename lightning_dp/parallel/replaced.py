"""Attributes of an object that are others for a while."""

from __future__ import annotations

import threading
from typing import Any

import torch

_ABSENT = object()


class _Open(threading.local):
    """The replacements that last, of this thread; the innermost is the last."""

    def __init__(self) -> None:
        self.stack: list[replaced] = []


_open = _Open()


class replaced:
    """Gives an object other attributes, and puts its own back whatever happens.

    They are written to its `__dict__`: a method of its class is hidden for a while, and nothing
    that a module registers is touched. What it had none of before, it has none of afterwards.

    No generator: the end of one that an interrupt has kept from ending comes at any later time.

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

    def __init__(self, owner: Any, **names: Any) -> None:
        self._attributes = vars(owner)
        self._names = names
        self._before = {name: self._attributes.get(name, _ABSENT) for name in names}

    def __enter__(self) -> None:
        """The attributes are others from here on."""
        try:
            _open.stack.append(self)
            self._attributes.update(self._names)
        except BaseException:
            self.put_back()
            raise

    def __exit__(self, *error: object) -> None:
        """They are the object's own again."""
        self.put_back()

    def put_back(self) -> None:
        """Does so once; if an interrupt keeps it from that, it can be called again."""
        if self not in _open.stack:
            return
        for name, value in self._before.items():
            if value is _ABSENT:
                self._attributes.pop(name, None)
            else:
                self._attributes[name] = value
        _open.stack.remove(self)


class Surroundings:
    """What a thread has replaced, and whether gradients are on: as it is now.

    An interrupt may come while something is put back, or just before. So whoever runs a step looks
    before it, and puts everything back, once more, when an error leaves it.
    """

    def __init__(self) -> None:
        self._count = len(_open.stack)
        self._grad = torch.is_grad_enabled()

    def restore(self) -> None:
        """As it was when this was made."""
        while len(_open.stack) > self._count:
            _open.stack[-1].put_back()
        torch.set_grad_enabled(self._grad)
