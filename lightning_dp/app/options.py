"""The error of an option, which Hydra prints in one line."""

from hydra.errors import CompactHydraException


class OptionError(CompactHydraException, ValueError):
    """An option that cannot be used; Hydra prints the message without a traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(f"error: {message}")
