"""Checks of numbers that models and data modules take from the configuration."""


def check_at_least(key: str, value: object, least: float) -> None:
    """Raises a ValueError unless the value of an option is so large a number.

    Args:
        key: the option's name.
        value: its value.
        least: the smallest that can be; if it is an integer, the value has to be one too.

    Example:
        >>> check_at_least("noise", 0.5, 0.0)
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
    """Raises a ValueError unless a size is a multiple of a factor.

    Example:
        >>> check_multiple("height", 6, 4, "levels=3")
        Traceback (most recent call last):
        ...
        ValueError: height: expected a multiple of 4, as levels=3, got 6.
    """
    if value % factor:
        raise ValueError(f"{key}: expected a multiple of {factor}, as {why}, got {value}.")
