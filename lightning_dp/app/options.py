"""Checks of numbers that models and data modules take from the configuration."""


def check_at_least(key: str, value: object, least: float) -> None:
    """Raises a ValueError unless an option is so large; if `least` is an integer, it has to be too.

    Example:
        >>> check_at_least("batch_size", 0.5, 1)
        Traceback (most recent call last):
        ...
        ValueError: batch_size: expected a whole number of at least 1, got 0.5.
    """
    kinds = int if isinstance(least, int) else (int, float)
    if isinstance(value, kinds) and not isinstance(value, bool) and value >= least:
        return
    kind = "a whole number" if isinstance(least, int) else "a number"
    raise ValueError(f"{key}: expected {kind} of at least {least}, got {value!r}.")


def check_multiple(key: str, value: int, factor: int, why: str) -> None:
    """Raises a ValueError, which says why, unless a size is a multiple of a factor."""
    if value % factor:
        raise ValueError(f"{key}: expected a multiple of {factor}, as {why}, got {value}.")
