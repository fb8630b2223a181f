"""Choices that nothing reads: a strategy that no Trainer of the configuration takes."""

import re
from collections.abc import Iterator
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

# The whole of it, from anywhere: ${strategy}, ${..strategy}, ${oc.select:strategy,null}.
_READS_STRATEGY = re.compile(r"\$\{\s*(\.*|oc\.select:\s*)strategy\s*[,}]")


class StrategyIsRead(Callback):
    """Ends a Hydra program before its task where nobody takes the chosen strategy.

    Each of our strategies brings it into whatever app composes it. It looks for Trainers
    (`_target_: ...Trainer`) that have no interpolation such as `strategy: ${strategy}`. What an
    app's own code reads cannot be seen: an app without such a Trainer passes, and one that gives
    the strategy to a configured Trainer by itself leaves the check out with
    `~hydra.callbacks.strategy_is_read`.
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Looks before there is a run folder."""
        _end_if_unread(config)

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Looks at every job of a sweep."""
        _end_if_unread(config)


def _end_if_unread(config: DictConfig) -> None:
    problem = unread_strategy(config)
    if problem is not None:
        # Hydra makes warnings of a callback's exceptions, but not of this.
        raise SystemExit(f"error: {problem}")


def unread_strategy(config: DictConfig) -> str | None:
    """What is wrong where a strategy was chosen and the Trainers do without; None if nothing is."""
    content: Any = OmegaConf.to_container(config, resolve=False)
    chosen = content.pop("strategy", None)
    hydra = content.pop("hydra", {})
    named = [override.partition("=")[0].lstrip("+") for override in hydra["overrides"]["task"]]
    trainers = dict(_trainers(content))
    is_read = any(_READS_STRATEGY.search(text) for text in _texts(content))
    if chosen is None or is_read or not trainers:
        return None
    key, trainer = next(iter(trainers.items()))
    if f"{key}.strategy" in named and not any(n.split(".")[0] == "strategy" for n in named):
        return None  # what the app takes by default has been replaced, and no choice is lost
    choices = hydra["runtime"]["choices"]
    name = choices.get("strategy") or "..."
    got = f"{key}={choices[key]} with " if key in choices else ""
    return (
        f"strategy={name}: expected a Trainer that takes it, got {got}{key}.strategy="
        f"{trainer.get('strategy')}, so that the choice has no effect. Use trainer=dp_custom, or "
        f"'++{key}.strategy=${{strategy}}'; or leave strategy={name} out. If your own code reads "
        "cfg.strategy: '~hydra.callbacks.strategy_is_read'."
    )


def _trainers(node: Any, key: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The Trainers among the nodes of a configuration, by their keys."""
    if not isinstance(node, dict):
        return
    if str(node.get("_target_", "")).endswith(".Trainer"):
        yield key, node
    for name, child in node.items():
        yield from _trainers(child, f"{key}.{name}" if key else str(name))


def _texts(node: Any) -> Iterator[str]:
    """All strings in a configuration."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict | list):
        for child in node.values() if isinstance(node, dict) else node:
            yield from _texts(child)
