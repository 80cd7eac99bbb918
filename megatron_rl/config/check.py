"""From Hydra's composed tree to the checked configuration: types and limits by pydantic, then the
rules across keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from megatron_rl.config.algorithms import ALGORITHMS, algorithm_of
from megatron_rl.config.curriculum import phase_refusals, phases_of
from megatron_rl.config.hydra_errors import resolution_refusal
from megatron_rl.config.keys import INNER_SECTIONS, NAMED_SECTIONS, declared_keys, unknown_key
from megatron_rl.config.overrides import split_override
from megatron_rl.config.rules import broken_rules
from megatron_rl.config.schema import Configuration
from megatron_rl.config.values import ADDRESS_PATTERN, NAME_PATTERN, PLUGIN_PATTERN
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.contracts.plugins import keep_variables
from megatron_rl.contracts.refusal import ConfigurationRefused, Refusal, format_value

Recompose = Callable[[Sequence[str]], DictConfig]
"""Composes the tree of other overrides."""

_CONFIGURATION = TypeAdapter(Configuration)
_NO_VALUE = object()
# The name of keys whose values are arguments of user-defined classes or generators.
_FREE_KEY = "options"
_TYPE_REMEDY = "Give a value of that type"
_NUMBER_REMEDY = "Give such a number"
_PLAIN_REMEDY = "Give a number without a unit"
_NUMBER_AND_UNIT = re.compile(r"[\d._]+ ?[A-Za-z]+$")  # such as 10m or 2k
# The ends of keys, and what their values count
_UNITS = {"_s": "seconds", "_mb": "megabytes"}
_PATTERN_RULES = {
    PLUGIN_PATTERN: ("Must be your own package.module:Name", "Give such a name"),
    NAME_PATTERN: (
        "A name starts with a letter or digit, has only letters, digits, '.', '_' and '-', and no "
        "'..'; run.root sets the place",
        "Give such a name",
    ),
    ADDRESS_PATTERN: ("Must be a port, or HOST:PORT", "Give for example 9400 or 0.0.0.0:9400"),
}
# The beginning of pydantic's error type, the rule, and the remedy. The first match counts.
_RULES = (
    ("greater_than_equal", "Must be at least {ge:.12g}", _NUMBER_REMEDY),
    ("greater_than", "Must be greater than {gt:.12g}", _NUMBER_REMEDY),
    ("less_than_equal", "Must be at most {le:.12g}", _NUMBER_REMEDY),
    ("less_than", "Must be less than {lt:.12g}", _NUMBER_REMEDY),
    ("finite_number", "Must be a finite number", _NUMBER_REMEDY),
    ("int", "Must be a whole number", _TYPE_REMEDY),
    ("float", "Must be a number", _TYPE_REMEDY),
    ("bool", "Must be true or false", _TYPE_REMEDY),
    ("string_too_long", "Must have at most {max_length} characters", "Shorten it"),
    ("string", "Must be text", _TYPE_REMEDY),
    ("missing", "It has no default and was not given", "Give it"),
    ("list", "Must be a list, such as [a,b]", _TYPE_REMEDY),
    ("", "Must be a group of keys, not a value", _TYPE_REMEDY),
)


def check_configuration(
    tree: DictConfig,
    choices: Mapping[str, str | None],
    facts: LaunchFacts | None,
    overrides: Sequence[str] = (),
    *,
    recompose: Recompose,
) -> Configuration:
    """Return the configuration of a tree that Hydra composed.

    choices: the option chosen for each group of Hydra.
    facts: the machine to check the rules against. With None only types and limits are checked.
    overrides: from the command line. recompose: called after a mistake, with some of them.

    Raises `ConfigurationRefused` with all violations of types and limits, or else with all broken
    rules.
    """
    values = _resolve(tree, overrides)
    algorithm = algorithm_of(values["algo"])
    refusals = [
        Refusal(key, "???", "It has no default and was not given", f"Give it: {key}=...")
        for key in OmegaConf.missing_keys(tree)
    ]
    refusals += _algorithm_refusals(values["algo"], algorithm, choices.get("algo"))
    try:
        configuration = _CONFIGURATION.validate_python(_booleans_as_words(values))
    except ValidationError as error:
        new_refusals = _pydantic_refusals(error, {refusal.key for refusal in refusals})
        refusals += _name_composed_values(new_refusals, overrides, recompose)
    if not refusals:
        refusals += phase_refusals(configuration, lambda error: _pydantic_refusals(error, ()))
    if not refusals and facts is not None:
        keys = {split_override(text)[0] for text in overrides}
        refusals += _rule_refusals(configuration, facts, keys)
    if refusals:
        raise ConfigurationRefused(_in_order_of_sections(refusals))
    return configuration


def _resolve(tree: DictConfig, overrides: Sequence[str]) -> Any:
    """Return the values of a tree with its interpolations resolved."""
    try:
        return resolve_tree(tree)
    except OmegaConfBaseException as error:
        raise ConfigurationRefused([resolution_refusal(error, overrides)]) from error


def resolve_tree(tree: DictConfig) -> Any:
    """Return the values of a tree with its interpolations resolved.

    Options of user-defined classes keep the names of environment variables, which may hold keys.
    Raises `OmegaConfBaseException`, also if one of these variables is not set.
    """
    values: Any = OmegaConf.to_container(tree, resolve=True)
    texts: Any = OmegaConf.to_container(tree)
    for name, section in values.items():
        if isinstance(section, dict) and "options" in section:
            section["options"] = keep_variables(section["options"], texts[name]["options"])
    for section, _, key in (name.partition(".") for name in NAMED_SECTIONS):
        for name, entry in (values[section].get(key) or {}).items():
            if isinstance(entry, dict) and "options" in entry:
                original = texts[section][key][name]["options"]
                entry["options"] = keep_variables(entry["options"], original)
    return values


def _in_order_of_sections(refusals: Sequence[Refusal]) -> list[Refusal]:
    places = {key: place for place, key in enumerate(declared_keys())}
    return sorted(
        refusals, key=lambda refusal: places.get(refusal.key.partition(".")[0], len(places))
    )


def _algorithm_refusals(algo: Any, algorithm: str, choice: str | None) -> Iterator[Refusal]:
    """Yield the refusal of an algo.name that differs from the chosen group.

    choice: the option of the group `algo`; espo_wide is an option of espo.
    """
    group = (choice or "").partition("_")[0]
    if group in ALGORITHMS and group != algorithm:
        rule = f"The other keys belong to algo={group}"
        remedy = f"Choose the group: algo={'|'.join(ALGORITHMS)}"
        yield Refusal("algo.name", algo["name"], rule, remedy)


def _rule_refusals(c: Configuration, facts: LaunchFacts, keys: Collection[str]) -> list[Refusal]:
    """Return the broken rules of the configuration and of each phase of its curriculum.

    keys: keys that the command line sets.
    """
    refusals = list(broken_rules(c, facts, keys))
    for phase in phases_of(c):
        new_refusals = [
            refusal
            for refusal in broken_rules(phase.configuration, facts, keys)
            if refusal not in refusals
        ]
        place = f"In phase {phase.settings.name}"
        refusals += [refusal._replace(rule=f"{place}: {refusal.rule}") for refusal in new_refusals]
    return refusals


def _booleans_as_words(value: Any) -> Any:
    """Replace booleans by the words true and false.

    Python counts booleans as numbers; as words pydantic refuses them where a number is expected.
    """
    if isinstance(value, dict):
        return {
            key: inner if key == _FREE_KEY else _booleans_as_words(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_booleans_as_words(inner) for inner in value]
    return str(value).lower() if isinstance(value, bool) else value


def _name_composed_values(
    refusals: Iterable[Refusal], overrides: Sequence[str], recompose: Recompose
) -> Iterator[Refusal]:
    """Add to the remedy of a number the value that holds without the command line's override."""
    refusals = list(refusals)
    keys = {split_override(text)[0] for text in overrides}
    numbers = {refusal.key for refusal in refusals if refusal.remedy == _NUMBER_REMEDY} & keys
    others = [text for text in overrides if split_override(text)[0] not in numbers]
    tree = recompose(others) if numbers else OmegaConf.create()
    for refusal in refusals:
        value = OmegaConf.select(tree, refusal.key, default=_NO_VALUE)
        if refusal.key in numbers and value is not _NO_VALUE:
            remedy = f"{refusal.remedy}, or leave the key out, which gives {format_value(value)}"
            refusal = refusal._replace(remedy=remedy)
        yield refusal


def _pydantic_refusals(error: ValidationError, known_keys: Collection[str]) -> Iterator[Refusal]:
    """Yield one refusal for each key of an error.

    known_keys: keys that are refused already. `algo.name` among them stands for its whole section.
    """
    errors_by_key: dict[str, list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        errors_by_key.setdefault(_key_of(details["loc"]), []).append(details)
    for key, errors in errors_by_key.items():
        is_known = key in known_keys or (key.startswith("algo.") and "algo.name" in known_keys)
        if not is_known:
            yield _pydantic_refusal(key, errors)


def _key_of(location: Sequence[int | str]) -> str:
    """Return the key of pydantic's location of an error, with indices as in engine.urls[1].

    Beyond the key, a location has indices and the names of a union's members.
    """
    depth = 3 if ".".join(map(str, location[:2])) in INNER_SECTIONS else 2
    if ".".join(map(str, location[:2])) in NAMED_SECTIONS:
        depth = 4
    indices = [f"[{part}]" for part in location[depth:] if isinstance(part, int)]
    names = [str(part) for part in location[:depth] if part != "[key]"]
    return ".".join(names) + "".join(indices)


def _pydantic_refusal(key: str, errors: Sequence[ErrorDetails]) -> Refusal:
    """Return the refusal of one key. errors: more than one for a value that may be of two types."""
    kind = errors[0]["type"]
    value = errors[0]["input"]
    context = errors[0].get("ctx", {})
    if kind == "unexpected_keyword_argument":
        return unknown_key(key, value)
    if kind == "literal_error":
        choices = ", ".join(re.findall("'([^']*)'", context["expected"]))
        if len(errors) > 1:
            choices += ", or your own package.module:Name"
        return Refusal(key, value, f"Must be one of {choices}", "Choose one of these")
    if kind == "string_pattern_mismatch":
        return Refusal(key, value, *_PATTERN_RULES[context["pattern"]])
    if value is None:
        return Refusal(key, value, "Must not be null", f"Give it: {key}=...")
    rule, remedy = _rule_and_remedy(kind)
    rule = rule.format(**context)
    if isinstance(value, str) and _NUMBER_AND_UNIT.match(value):
        unit = next((name for end, name in _UNITS.items() if key.endswith(end)), "")
        remedy = f"Give {unit}, as a number without a unit" if unit else _PLAIN_REMEDY
    return Refusal(key, value, rule, remedy)


def _rule_and_remedy(kind: str) -> tuple[str, str]:
    """Return the rule, with pydantic's context as fields, and the remedy of a type of error."""
    return next((rule, remedy) for start, rule, remedy in _RULES if kind.startswith(start))
