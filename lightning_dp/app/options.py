"""Checks of what programs, models and data modules take from the configuration."""

from hydra.errors import InstantiationException

_MOST_SEEDS = 2**32 - 1  # NumPy's


def check_at_least(key: str, value: object, least: float) -> None:
    """Raises a ValueError unless an option is so large; if `least` is an integer, it has to be too.

    Example:
        >>> check_at_least("batch_size", 0.5, 1)
        Traceback (most recent call last):
        ...
        ValueError: batch_size: expected a whole number of at least 1, got 0.5. Give 1 or more.
    """
    kinds = int if isinstance(least, int) else (int, float)
    if isinstance(value, kinds) and not isinstance(value, bool) and value >= least:
        return
    kind = "a whole number" if isinstance(least, int) else "a number"
    raise ValueError(
        f"{key}: expected {kind} of at least {least}, got {value!r}. Give {least} or more."
    )


def check_multiple(key: str, value: int, factor: int, why: str) -> None:
    """Raises a ValueError, which says why, unless a size is a multiple of a factor."""
    if value % factor:
        raise ValueError(
            f"{key}: expected a multiple of {factor}, as {why}, got {value}. Try "
            f"{max(1, round(value / factor)) * factor}."
        )


def check_flag(key: str, value: object) -> None:
    """Raises a ValueError unless an option is true or false: any other text counts as true."""
    if not isinstance(value, bool):
        raise ValueError(f"{key}: expected true or false, got {value!r}. Write one of these.")


def check_seed(key: str, value: object) -> None:
    """Raises a ValueError unless it seeds random numbers, NumPy's among them, or is null."""
    is_seed = type(value) is int and 0 <= value <= _MOST_SEEDS
    if value is not None and not is_seed:
        raise ValueError(
            f"{key}: expected a whole number from 0 to {_MOST_SEEDS} or null, got {value!r}. "
            "Try 42; null gives a new run each time."
        )


def not_made(error: InstantiationException) -> str:
    """What Hydra says of an object that it could not make, in one line: the group and the cause."""
    cause = error.__cause__
    if isinstance(cause, ValueError):  # it names the option
        return in_one_line(str(cause))
    *text, key = str(error).split("full_key: ")
    told = str(cause) if isinstance(cause, Exception) and text else "".join(text) or key
    return f"{key}: {in_one_line(told)} HYDRA_FULL_ERROR=1 shows where."


def in_one_line(text: str) -> str:
    """Several lines as one."""
    return " ".join(text.split())
