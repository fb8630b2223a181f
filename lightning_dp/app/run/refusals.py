"""Which errors are about an option, and what is said of them: one line."""

import errno
import re
import traceback
from typing import TypeGuard

from hydra.errors import InstantiationException
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig

from lightning_dp.app.option_types import targets
from lightning_dp.app.options import in_one_line, not_made
from lightning_dp.checkpointing import nothing_to_resume

_EXTRAS = {
    "sklearn": ("scikit-learn", "examples"),
    "rich": ("rich", "examples"),
    "matplotlib": ("matplotlib", "plot"),
    "safetensors": ("safetensors", "safetensors"),
}
"""What a module needs to be imported: its package, and the extra that brings it."""

_CALLBACKS = "lightning.pytorch.callbacks."  # which refuse what they are to watch


def refusal(error: Exception, cfg: DictConfig) -> str | None:
    """The message for an option that cannot be used; None if the error is about something else."""
    return (
        missing_extra(error)
        or _option_error(error)
        or _of_partial(error, cfg)
        or _does_not_fit(error, cfg)
        or _cannot_resume(error, cfg)
        or _no_room(error)
    )


def missing_extra(error: BaseException | None) -> str | None:
    """Returns which extra to install, if an error comes from a package that an extra brings."""
    while error is not None:
        name = (getattr(error, "name", None) or "").partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and name in _EXTRAS:
            package, extra = _EXTRAS[name]
            return (
                f"expected the package {package}, which is not installed. Install the extra "
                f"{extra!r}: python -m pip install 'lightning-dp[{extra}]'"
            )
        error = error.__cause__ or error.__context__
    return None


def few_keys(text: str) -> str:
    """What `load_state_dict` says, on one line: some keys of each kind, and how many there are."""
    told = []
    kinds = {"Missing": "missing keys", "Unexpected": "keys that are not the model's"}
    for kind, name in kinds.items():
        found = re.search(rf"{kind} key\(s\) in state_dict: (.*)", text)
        if found:
            told.append(_some(name, re.findall(r'"([^"]*)"', found[1])))
    sizes = re.findall(r"size mismatch for (\S+): .* shape (.*) from .* model is (.*)\.", text)
    if sizes:
        told.append(_some("of another size", [f"{k} {a} for {b}" for k, a, b in sizes]))
    return "; ".join(told) or " ".join(text.split())


def _some(kind: str, found: list[str], shown: int = 3) -> str:
    names = ", ".join(found[:shown]) + (", ..." if len(found) > shown else "")
    return f"{len(found)} {kind}: {names}"


def _option_error(error: Exception) -> str | None:
    """Returns the message for an unusable option; None if the error is about something else."""
    if isinstance(error, InstantiationException):
        return not_made(error)
    module, _ = _where_raised(error)
    if isinstance(error, MisconfigurationException) or module.startswith(_CALLBACKS):
        return in_one_line(str(error))
    is_ours = module.startswith("lightning_dp.") and not module.startswith("lightning_dp.examples.")
    return str(error) if isinstance(error, ValueError) and is_ours else None


def _of_partial(error: Exception, cfg: DictConfig) -> str | None:
    """The message for options that an optimizer, say, refuses when the model makes it."""
    if not isinstance(error, TypeError | ValueError):
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    owners = [f.f_locals.get("self") for f in frames if f.f_code.co_name == "__init__"]
    made = {type(owner).__name__ for owner in owners if owner is not None}
    for key, node in targets(cfg.get("model"), "model"):
        if node.get("_partial_") and node["_target_"].rpartition(".")[2] in made:
            options = ", ".join(f"{k!s}={v!r}" for k, v in node.items() if str(k)[:1] != "_")
            return f"{key}: expected options that {node['_target_']} takes, got {options}: {error}"
    return None


def _does_not_fit(error: Exception, cfg: DictConfig) -> str | None:
    """Returns the message for a checkpoint of another model or optimizer; None if that is fine."""
    module, function = _where_raised(error)
    if not module.startswith("torch.") or function != "load_state_dict" or not cfg.get("ckpt_path"):
        return None
    return (
        f"ckpt_path: expected a checkpoint of this model and optimizer, got {cfg.ckpt_path!r}, "
        f"which does not fit: {few_keys(str(error))}"
    )


def _cannot_resume(error: Exception, cfg: DictConfig) -> str | None:
    """Returns the message for weights to resume from; None if the error is about something else."""
    is_about_it = _where_raised(error)[1] == "restore_optimizers_and_schedulers"
    return nothing_to_resume(cfg.ckpt_path) if is_about_it else None


def _no_room(error: Exception) -> str | None:
    """Returns the message for a full disk; None if the error is about something else."""
    if not is_full_disk(error):
        return None
    return (
        f"{error.filename or 'a file'}: expected room on the disk, got none ({error.strerror}). "
        "Make room, or give another folder: paths.log_dir=FOLDER"
    )


def is_full_disk(error: BaseException) -> TypeGuard[OSError]:
    """Whether a file could not be written for want of room."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _where_raised(error: Exception) -> tuple[str, str]:
    """The names of the module and of the function that raised an error."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")), frame.f_code.co_name
