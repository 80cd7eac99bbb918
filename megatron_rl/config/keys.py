"""The full names of all keys, the tree of defaults that Hydra composes, and suggestions for unknown
keys.
"""

from __future__ import annotations

import difflib
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from megatron_rl.config.algorithms import ALGORITHMS, CorrectionSettings, KlSettings
from megatron_rl.config.removed_keys import REMOVED_KEYS
from megatron_rl.config.schema import (
    Configuration,
    EvalSetSettings,
    PartSettings,
    SourceSettings,
)
from megatron_rl.contracts.refusal import Refusal
from megatron_rl.models.families import read_shape

ASSETS = Path(__file__).resolve().parents[1] / "models" / "assets"
SECTIONS: dict[str, Any] = {
    name: cls for name, cls in get_type_hints(Configuration).items() if is_dataclass(cls)
}
# The sections within a section.
INNER_SECTIONS: dict[str, Any] = {
    "algo.correction": CorrectionSettings,
    "algo.kl": KlSettings,
}
# The mappings from a name that the user chooses to a section.
NAMED_SECTIONS: dict[str, Any] = {
    "data.sources": SourceSettings,
    "eval.sets": EvalSetSettings,
    "reward.parts": PartSettings,
}

_LONGEST_DEFAULT = 1024  # tokens of a prompt or a response
_FREE_POSITIONS = 8  # at least those that SGLang keeps free (rules/machine.py)


def declared_keys(algorithm: str | None = None) -> dict[str, Field[Any]]:
    """Return the fields of all keys by full name, a section's name before its keys.

    algorithm: a name in `ALGORITHMS`. With None the keys of all algorithms are included.
    """
    keys: dict[str, Field[Any]] = {}
    for top in fields(Configuration):
        keys[top.name] = top
        for section in _section_classes(top.name, algorithm):
            for field in fields(section):
                key = f"{top.name}.{field.name}"
                keys[key] = field
                if key in INNER_SECTIONS:
                    inner = fields(INNER_SECTIONS[key])
                    keys |= {f"{key}.{inner_field.name}": inner_field for inner_field in inner}
    return keys


def _section_classes(name: str, algorithm: str | None) -> list[Any]:
    """Return the classes that declare the keys of a section; none for a top-level key."""
    if name == "algo":
        return [ALGORITHMS[algorithm]] if algorithm else list(ALGORITHMS.values())
    return [SECTIONS[name]] if name in SECTIONS else []


def register() -> None:
    """Make every key known to Hydra, and two values for files of hydra_conf.

    `${asset:NAME}` is the path of a checkpoint shipped with the package. `${half_context:}` is half
    of the positions of model.path, at most 1024.

    The sections stay open to unknown keys while Hydra composes, so that pydantic refuses these
    together with all other mistakes.
    """
    sections = {name: _defaults(section) for name, section in SECTIONS.items()}
    tree = OmegaConf.create(
        {field.name: sections.get(field.name, field.default) for field in fields(Configuration)}
    )
    tree.data.max_prompt_tokens = "${half_context:}"
    for name in sections:
        OmegaConf.set_struct(tree[name], False)
    store = ConfigStore.instance()
    store.store(group="schema", name="train_rl", node=tree, package="_global_")
    for name, algorithm in ALGORITHMS.items():
        store.store(group="schema/algo", name=name, node=_defaults(algorithm))
    OmegaConf.register_new_resolver("asset", lambda name: str(ASSETS / name), replace=True)
    OmegaConf.register_new_resolver("half_context", _half_context, replace=True)


def _half_context(*, _root_: DictConfig) -> int:
    """Return half of the model's positions, without those that engines keep free, at most 1024.

    A model that cannot be read is refused later, with its reason.
    """
    path = OmegaConf.select(_root_, "model.path", throw_on_missing=False)
    try:
        positions = read_shape(path).max_position_embeddings
    except (OSError, ValueError, TypeError):
        return _LONGEST_DEFAULT
    return max(1, min(_LONGEST_DEFAULT, (positions - _FREE_POSITIONS) // 2))


def _defaults(section: Any) -> dict[str, Any]:
    """Return the default of each key of a section; "???" is Hydra's mark of a mandatory key."""
    defaults = dict[str, Any]()
    for field in fields(section):
        if field.default_factory is not MISSING:
            value = field.default_factory()
            defaults[field.name] = _as_tree(value)
        else:
            defaults[field.name] = "???" if field.default is MISSING else field.default
    return defaults


def _as_tree(value: Any) -> Any:
    is_section = is_dataclass(value) and not isinstance(value, type)
    return asdict(value) if is_section else value


def unknown_key(key: str, value: Any) -> Refusal:
    """Return the refusal of an unknown key.

    The remedy names what replaces a key of older configurations, or else the declared keys that
    look most like it.
    """
    remedy = REMOVED_KEYS.get(key) or _suggestion(key)
    return Refusal(key, value, "There is no such key", remedy)


def _siblings(section: str) -> dict[str, str]:
    """Return the keys of a section by their last name, "" for the top level."""
    mapping, _, _ = section.rpartition(".")
    kind = NAMED_SECTIONS.get(mapping)
    if kind is not None:
        return {field.name: f"{section}.{field.name}" for field in fields(kind)}
    siblings = {
        key.rpartition(".")[2]: key for key in declared_keys() if key.rpartition(".")[0] == section
    }
    return siblings if section else siblings | {"experiment": "experiment"}


def similar_keys(key: str) -> list[str]:
    """Return the declared keys, at most three, that look most like a key that is not declared.

    These are keys of the same section, or else keys with the same last name.
    """
    section, _, name = key.rpartition(".")
    siblings = _siblings(section)
    matches = difflib.get_close_matches(name.lower(), siblings, n=2)
    same_names = [other for other in declared_keys() if other.rpartition(".")[2] == name]
    return [siblings[match] for match in matches] or same_names[:3]


def _suggestion(key: str) -> str:
    if key in declared_keys():
        owners = [name for name in ALGORITHMS if key in declared_keys(name)]
        return f"It belongs to {' or '.join(f'algo={name}' for name in owners)}"
    if suggestions := similar_keys(key):
        return f"Did you mean {' or '.join(suggestions)}?"
    section = key.rpartition(".")[0]
    if siblings := _siblings(section):
        place = f"of {section}" if section else "at the top level"
        return f"The keys {place} are {', '.join(siblings)}"
    return "The command python launch/train_rl.py --cfg job prints every key"
