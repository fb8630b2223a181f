"""What a metric returns over a shard that has no value: an error to whoever uses it.

One device calls a metric with the whole batch. A shard may have too few samples for it, which
matters only to a step that uses the shard's value: the metric itself gets the whole batch later.
"""

from __future__ import annotations

from typing import Any, NoReturn

from lightning_dp.parallel.errors import add_note, chain

_USES = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow"),
    *("and", "or", "xor", "lt", "le", "gt", "ge", "eq", "ne"),
    *("neg", "pos", "abs", "invert", "float", "int", "index", "bool", "complex", "round"),
    *("len", "iter", "getitem", "setitem", "contains", "call", "format", "array", "copy"),
)


class NoValue:
    """Stands for a value that there is not; every use of it raises the metric's own error."""

    error: Exception

    def __init__(self, error: Exception, metric: str) -> None:
        add_note(
            error,
            f"[{metric} over the samples of one replica; to log what it is over the whole batch, "
            "log the metric object, and do not use the value that it returns in a step]",
        )
        self.__dict__["error"] = error
        for cause in chain(error, "__cause__"):  # whose frames would keep all that is in them
            BaseException.with_traceback(cause, None)
            BaseException.__setattr__(cause, "__context__", None)

    def fail(self, *_: Any, **__: Any) -> NoReturn:
        """Raises the error."""
        raise self.__dict__["error"]

    def __getattr__(self, name: str) -> Any:
        """To ask it for anything is to use it."""
        self.fail()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        """So is to give it to a function of torch's."""
        _fail_with_first((args, kwargs))


def _fail_with_first(node: Any) -> None:
    if isinstance(node, NoValue):
        node.fail()
    for item in node.values() if isinstance(node, dict) else node:
        if isinstance(item, NoValue | dict | list | tuple):
            _fail_with_first(item)


for _name in _USES:
    for _prefix in ("", "r", "i"):
        setattr(NoValue, f"__{_prefix}{_name}__", NoValue.fail)
