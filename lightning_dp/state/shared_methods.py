"""Methods of an object that all replicas share, in whose place something else is called.

A step may bind a wrapper or a mock in the place of such a method, for a while or for good. All
replicas would do that to the one object: each would wrap what the others have bound, and put back
what another one has wrapped. So for a while the object has a class that shows every replica what
it has bound itself. What the leader has bound is what counts outside of replicas, and it stays in
the end, as if one device had bound it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

from lightning_dp.parallel.contexts import Lasting, StandIn
from lightning_dp.parallel.workers import current_participant

Call: TypeAlias = Callable[..., Any]


class SharedMethods:
    """The classes that objects have for a while: made once for each class and set of methods."""

    def __init__(self) -> None:
        self._classes: dict[tuple[type, tuple[str, ...]], type] = {}
        self._shared: dict[int, _Methods] = {}  # by the ids of the objects

    def standing_in(self, owner: Any, calls: Mapping[str, Call], leader: int) -> _Shared:
        """While it lasts, these are called in the place of methods of an object."""
        cls, methods = type(owner), _Methods(owner, calls, leader)
        key = (cls, tuple(calls))
        if key not in self._classes:
            self._classes[key] = self._class(cls, calls)
        return _Shared(owner, self._classes[key], methods, self._shared)

    def _class(self, cls: type, names: Mapping[str, Any]) -> type:
        def reduce(owner: Any, protocol: Any) -> Any:
            """A copy is of the class that the object has otherwise."""
            parts = cast(Any, cls).__reduce_ex__(owner, protocol)
            if isinstance(parts, str):
                return parts
            function, args, *rest = parts
            args = tuple(cls if arg is own else arg for arg in args)
            # Pickles take nothing but the object's class for this function.
            return (_new if function.__name__ == "__newobj__" else function, args, *rest)

        same = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        methods = {name: _Method(name, cls, self._shared) for name in names}
        own = type(cls.__name__, (cls,), {**same, **methods, "__reduce_ex__": reduce})
        return own


class _Shared(Lasting):
    """While it lasts, an object has another class."""

    def __init__(
        self, owner: Any, cls: type, methods: _Methods, shared: dict[int, _Methods]
    ) -> None:
        self._owner, self._own, self._class = owner, type(owner), cls
        self._methods, self._shared = methods, shared

    def begin(self) -> None:
        self._shared[id(self._owner)] = self._methods  # whose class looks for them there
        self._owner.__class__ = self._class

    def end(self) -> None:
        self._owner.__class__ = self._own
        self._shared.pop(id(self._owner), None)
        self._methods.end(vars(self._owner))


class _Methods:
    """What stands for the methods of one object, and what replicas have bound in their place."""

    def __init__(self, owner: Any, calls: Mapping[str, Call], leader: int) -> None:
        self._stand_ins = {name: StandIn(owner, name, call) for name, call in calls.items()}
        self._bound: dict[tuple[int, str], Any] = {}
        self._leader = leader

    def get(self, name: str) -> Any:
        """What the calling replica sees; code outside of replicas sees what the leader does."""
        return self._bound.get(self._place(name), self._stand_ins[name])

    def bind(self, name: str, value: Any) -> None:
        """Shows the calling replica something else."""
        self._bound[self._place(name)] = value

    def unbind(self, name: str) -> None:
        """Shows the calling replica what it saw at first."""
        self._bound.pop(self._place(name), None)

    def end(self, attributes: dict[str, Any]) -> None:
        """Leaves on the object what the leader has bound."""
        for name, stand_in in self._stand_ins.items():
            value = self._bound.get((self._leader, name), stand_in)
            if value is not stand_in:
                attributes[name] = value
            stand_in.retire()

    def _place(self, name: str) -> tuple[int, str]:
        participant = current_participant()
        return self._leader if participant is None else participant.replica, name


class _Method:
    """A method of such a class."""

    def __init__(self, name: str, cls: type, shared: Mapping[int, _Methods]) -> None:
        self._name, self._cls, self._shared = name, cls, shared

    def __get__(self, owner: Any, _: type | None = None) -> Any:
        name = self._name
        if owner is None:
            return _call_by_name(name)
        methods = self._shared.get(id(owner))
        if methods is not None:
            return methods.get(name)
        # One that the step has made, of the class of another one.
        own = vars(owner).get(name)
        return getattr(self._cls, name).__get__(owner) if own is None else own

    def __set__(self, owner: Any, value: Any) -> None:
        methods = self._shared.get(id(owner))
        if methods is None:
            vars(owner)[self._name] = value
        else:
            methods.bind(self._name, value)

    def __delete__(self, owner: Any) -> None:
        methods = self._shared.get(id(owner))
        if methods is None:
            del vars(owner)[self._name]
        else:
            methods.unbind(self._name)


def _new(cls: type, *args: Any) -> Any:
    return cls.__new__(cls, *args)


def _call_by_name(name: str) -> Call:
    """What `type(optimizer).step` is: a function whose first argument is the object."""

    def call(owner: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(owner, name)(*args, **kwargs)

    call.hooked = True  # type: ignore[attr-defined]  # torch then leaves it as it is
    return call
