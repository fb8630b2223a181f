"""The waits of a package, found in its source, and the package without one of them.

A wait is what lets a stream or the host wait for another stream: a call of `wait_stream`,
`record_event`, `synchronize` and their like; of a function or method that does nothing else, in the
package's folder for copies and streams; a copy to the host that blocks; and what lets a thread wait
for another one.

`Sites` rewrites modules as they are imported. Every wait is then a call that does what it did, and
notes that it was come to; or does nothing, if its site is the one that is `dropped`.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

METHODS = {"wait_stream", "wait_event", "record_stream", "record_event", "synchronize"}
AMBIGUOUS = {"record", "wait", "query", "join"}  # of events and threads, and of others
COPIES = {"to", "cpu", "copy_"}
WAITING = (torch.Stream, torch.Event)
THREADS = (threading.Event, threading.Condition, threading.Barrier, threading.Thread)
OTHERS = {"wait_for_autograd": "none"}  # functions that do nothing else either
HELPER = "__wait_site__"
EVENT = torch.Event  # tests put others in its place


@dataclass(frozen=True, order=True)
class Site:
    """A place in the source: `path:line` and what is written there.

    Whether it is a wait, only a run can tell where methods of that name, or copies, may be none.
    """

    path: str
    line: int
    column: int
    text: str
    is_sure: bool

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


class Sites:
    """The sites of all modules that were imported since `install`."""

    def __init__(self, root: Path, package: str, room: str, leave_out: Sequence[str] = ()) -> None:
        """Finds those of a package below `root`, whose `room` is a folder."""
        self.all: list[Site] = []
        self.reached: set[Site] = set()  # since somebody has emptied it
        self.others: set[Site] = set()  # calls of that name that are no waits
        self.dropped: Site | None = None
        self._root, self._package, self._leave_out = root, package, tuple(leave_out)
        self._room = what_is_in(root / room) | OTHERS
        self._room_module = room.rstrip("/").replace("/", ".")

    def install(self) -> None:
        """From now on modules of the package are rewritten as they are imported."""
        assert not [name for name in sys.modules if name.split(".")[0] == self._package]
        sys.path.insert(0, str(self._root))
        setattr(builtins, HELPER, self._called)
        sys.meta_path.insert(0, _Finder(self))

    def rewritten(self, source: bytes, path: Path) -> CodeType | None:
        """The code of a module; None for one that is left out."""
        name = path.relative_to(self._root).as_posix()
        if name.startswith(self._leave_out) or not name.startswith(self._package):
            return None
        tree = ast.parse(source)
        has_events = b"Event" in source or b"threading." in source
        _Rewriter(name, self.all, self._room, METHODS | (AMBIGUOUS if has_events else set())).visit(
            tree
        )
        code: CodeType = compile(ast.fix_missing_locations(tree), str(path), "exec")
        return code

    def _called(self, number: int, kind: str, function: Any, /, *args: Any, **options: Any) -> Any:
        """What stands for the call at a site."""
        site = self.all[number]
        if kind == "copy":
            return self._copied(site, function, args, options)
        module = getattr(function, "__module__", None) or ""
        is_other = getattr(function, "__name__", None) in OTHERS
        in_room = module.startswith(self._room_module) or is_other
        if (kind in METHODS | AMBIGUOUS and not _is_wait(kind, function)) or not (
            kind in METHODS | AMBIGUOUS or in_room
        ):
            self.others.add(site)
            return function(*args, **options)
        self.reached.add(site)
        if site != self.dropped:
            return function(*args, **options)
        if kind == "record_event":
            return args[0] if args else EVENT(function.__self__.device)
        if kind == "event":
            return EVENT(torch.accelerator.current_accelerator())
        instead: dict[str, Callable[[], Any]] = {
            "context": contextlib.nullcontext,
            "list": list,
            "query": lambda: True,
            "wait": lambda: True,
        }
        return instead.get(kind, lambda: None)()

    def _copied(self, site: Site, function: Any, args: Any, options: dict[str, Any]) -> Any:
        """A copy that blocks is a wait if the host reads what comes, or writes to what goes."""
        source = getattr(function, "__self__", None)
        if not isinstance(source, Tensor | nn.Module) or options.get("non_blocking"):
            return function(*args, **options)
        target = _target(source, function.__name__, args, options)
        if function.__name__ == "copy_":
            source, target = args[0], source
        if not _needs_a_wait(source, target):
            return function(*args, **options)
        self.reached.add(site)
        if site != self.dropped:
            return function(*args, **options)
        options["non_blocking"] = True
        if function.__name__ == "cpu":
            return function.__self__.to("cpu", **options)
        return function(*args, **options)


def _is_wait(name: str, function: Any) -> bool:
    owner = getattr(function, "__self__", None)
    kinds = WAITING if name in METHODS | {"record", "query"} else (*WAITING, *THREADS)
    if name == "record_stream":
        return isinstance(owner, Tensor)
    return isinstance(owner, kinds) or name == "synchronize"  # of a device


def _target(source: Any, name: str, args: Any, options: dict[str, Any]) -> torch.device | None:
    """Where a copy goes; None if it does not change the device."""
    if name == "cpu":
        return torch.device("cpu")
    for value in (*args[:1], options.get("device"), options.get("other")):
        if isinstance(value, Tensor):
            return value.device
        if isinstance(value, torch.device | str):
            return torch.device(value)
    return None


def _needs_a_wait(source: Any, target: Any) -> bool:
    device = target.device if isinstance(target, Tensor) else target
    tensors = [source] if isinstance(source, Tensor) else list(source.parameters())
    if device is None or device.type == "cpu":
        return device is not None and any(t.device.type != "cpu" for t in tensors)
    return any(t.device.type == "cpu" and t.is_pinned() for t in tensors)


def what_is_in(room: Path) -> dict[str, str]:
    """The functions and methods in a folder that only wait, by what stands for one that does not.

    What makes a stream current, or finds out which is, counts, too.
    """
    nodes = [
        node
        for path in sorted(room.glob("*.py"))
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.FunctionDef)
    ]
    kinds: dict[str, str] = {}
    while True:
        before = len(kinds)
        for node in nodes:
            returns = ast.unparse(node.returns) if node.returns is not None else ""
            waits = _only_waits(_body(node), METHODS | set(kinds))
            if "torch.Stream]" in ast.unparse(node.args) and "ContextManager" in returns:
                kinds[node.name] = "context"
            elif returns == "list[torch.Stream]":
                kinds[node.name] = "list"
            elif waits and returns in ("None", "torch.Event"):
                kinds[node.name] = "none" if returns == "None" else "event"
        if len(kinds) == before:
            return {name: kind for name, kind in kinds.items() if name not in METHODS | AMBIGUOUS}


def _body(node: ast.FunctionDef) -> list[ast.stmt]:
    return node.body[1:] if ast.get_docstring(node) is not None else node.body


def _only_waits(body: Sequence[ast.stmt], known: set[str]) -> bool:
    """Whether statements are calls of what is known, with conditions and loops around them."""
    for statement in body:
        if isinstance(statement, ast.If | ast.For):
            if not _only_waits([*statement.body, *statement.orelse], known):
                return False
            continue
        value = getattr(statement, "value", None)
        function = value.func if isinstance(value, ast.Call) else None
        if getattr(function, "attr", getattr(function, "id", None)) not in known:
            return False
    return bool(body)


class _Rewriter(ast.NodeTransformer):
    def __init__(
        self, path: str, sites: list[Site], room: dict[str, str], methods: set[str]
    ) -> None:
        self._path, self._sites, self._room, self._methods = path, sites, room, methods

    def visit_Call(self, node: ast.Call) -> ast.AST:
        text = ast.unparse(node)
        self.generic_visit(node)
        kind = self._kind(node)
        return self._site(node, kind, text, node.args, node.keywords) if kind else node

    def _site(
        self, node: ast.Call, kind: str, text: str, args: list[Any], keywords: list[Any]
    ) -> ast.AST:
        is_sure = kind in METHODS or isinstance(node.func, ast.Name)
        site = Site(self._path, node.lineno, node.col_offset, text, is_sure)
        self._sites.append(site)
        told = [ast.Constant(len(self._sites) - 1), ast.Constant(kind), node.func]
        call = ast.Call(ast.Name(HELPER, ast.Load()), [*told, *args], keywords)
        return ast.copy_location(call, node)

    def _kind(self, node: ast.Call) -> str | None:
        function = node.func
        if isinstance(function, ast.Name):
            return self._room.get(function.id)
        if not isinstance(function, ast.Attribute):
            return None
        name = function.attr
        if name in self._room:
            return self._room[name]
        if name in COPIES:
            options = {keyword.arg: keyword.value for keyword in node.keywords}
            value = options.get("non_blocking")
            never_waits = isinstance(value, ast.Constant) and value.value is True
            return None if never_waits else "copy"
        joins_text = name == "join" and bool(node.args)
        return name if name in self._methods and not joins_text else None


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, sites: Sites) -> None:
        super().__init__(name, path)
        self._sites = sites

    def get_code(self, fullname: str) -> CodeType | None:
        code = self._sites.rewritten(self.get_data(self.path), Path(self.path))
        return super().get_code(fullname) if code is None else code


class _Finder(MetaPathFinder):
    def __init__(self, sites: Sites) -> None:
        self._sites = sites

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.split(".")[0] != self._sites._package:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            spec.loader = _Loader(name, spec.origin, self._sites)
        return spec
