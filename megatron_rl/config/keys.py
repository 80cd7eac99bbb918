"""What follows from the declared sections: every key's full name, the tree that Hydra composes, and
the nearest key.
"""

from __future__ import annotations

import difflib
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from megatron_rl.config.algorithms import ALGORITHMS, CorrectionSettings
from megatron_rl.config.schema import Configuration, SelectionExpertSettings
from megatron_rl.contracts.refusal import Refusal

ASSETS = Path(__file__).resolve().parents[1] / "models" / "assets"
SECTIONS: dict[str, Any] = {
    name: cls for name, cls in get_type_hints(Configuration).items() if is_dataclass(cls)
}
# The sections within a section.
INNER: dict[str, Any] = {
    "algo.correction": CorrectionSettings,
    "selection.expert": SelectionExpertSettings,
}


def declared_keys(algorithm: str | None = None) -> dict[str, Field[Any]]:
    """The keys of a configuration with this algorithm, or with any, by full name; a section's name
    before its keys.
    """
    found: dict[str, Field[Any]] = {}
    for top in fields(Configuration):
        classes = [SECTIONS[top.name]] if top.name in SECTIONS else []
        if top.name == "algo":
            classes = [ALGORITHMS[algorithm]] if algorithm else list(ALGORITHMS.values())
        found[top.name] = top
        found |= {f"{top.name}.{inner.name}": inner for cls in classes for inner in fields(cls)}
        for name in (name for name in INNER if name in found and name.startswith(f"{top.name}.")):
            found |= {f"{name}.{inner.name}": inner for inner in fields(INNER[name])}
    return found


def register() -> None:
    """Make every key known to Hydra, and `${asset:NAME}`, the path of a checkpoint shipped with the
    package.

    The sections are open to other keys while Hydra composes: pydantic then refuses them together
    with all the rest.
    """
    sections = {name: _defaults(section) for name, section in SECTIONS.items()}
    tree = OmegaConf.create(
        {f.name: sections.get(f.name, f.default) for f in fields(Configuration)}
    )
    for name in sections:
        OmegaConf.set_struct(tree[name], False)
    store = ConfigStore.instance()
    store.store(group="schema", name="train_rl", node=tree, package="_global_")
    for name, algorithm in ALGORITHMS.items():
        store.store(group="schema/algo", name=name, node=_defaults(algorithm))
    OmegaConf.register_new_resolver("asset", lambda name: str(ASSETS / name), replace=True)


def _defaults(section: Any) -> dict[str, Any]:
    made = {
        f.name: f.default_factory() for f in fields(section) if f.default_factory is not MISSING
    }
    inner = {name.rpartition(".")[2]: asdict(cls()) for name, cls in INNER.items()}
    made |= {name: inner[name] for name in made if name in inner}
    return {
        f.name: made.get(f.name, "???" if f.default is MISSING else f.default)
        for f in fields(section)
    }


def unknown_key(key: str, value: Any) -> Refusal:
    """The refusal of a key, with the declared keys that look most like it."""
    keys, (section, _, name) = declared_keys(), key.rpartition(".")
    siblings = {
        known.rpartition(".")[2]: known for known in keys if known.rpartition(".")[0] == section
    }
    siblings |= {} if section else {"experiment": "experiment"}
    elsewhere = [known for known in keys if known.rpartition(".")[2] == name]
    close = [
        siblings[match] for match in difflib.get_close_matches(name.lower(), siblings, n=2)
    ] or elsewhere[:3]
    remedy = "The command python launch/train_rl.py --cfg job prints every key"
    if key in keys:
        remedy = f"It belongs to {' or '.join(f'algo={name}' for name in ALGORITHMS if key in declared_keys(name))}"
    elif close:
        remedy = f"Did you mean {' or '.join(close)}?"
    elif siblings:
        remedy = (
            f"The keys {f'of {section}' if section else 'at the top'} are {', '.join(siblings)}"
        )
    return Refusal(key, value, "There is no such key", remedy)
