"""From Hydra's composed tree to the checked configuration: types and limits by pydantic, then the
rules.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from megatron_rl.config.algorithms import ALGORITHMS, algorithm_of
from megatron_rl.config.curriculum import phase_refusals, phases_of
from megatron_rl.config.hydra_errors import as_refusal, split_override
from megatron_rl.config.keys import INNER, declared_keys, unknown_key
from megatron_rl.config.rules import broken_rules
from megatron_rl.config.schema import Configuration
from megatron_rl.config.values import DOOR, NAME
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.contracts.refusal import ConfigurationRefused, Refusal, format_value

_CONFIGURATION = TypeAdapter(Configuration)
_FREE = ("options", "task_config")  # what a user's class or a generator takes
_OF_TYPE, _NUMBER = "Give a value of that type", "Give such a number"
_PATTERNS = {
    DOOR: "Must be your own package.module:Name",
    NAME: "A name has letters, digits, '.', '_', '-', starts with a letter or digit, has no '..'; run.root says where",
}
# The beginning of pydantic's type of error | the rule | the remedy
_RULES = (
    ("greater_than_equal", "Must be at least {ge:.12g}", _NUMBER),
    ("greater_than", "Must be greater than {gt:.12g}", _NUMBER),
    ("less_than_equal", "Must be at most {le:.12g}", _NUMBER),
    ("less_than", "Must be less than {lt:.12g}", _NUMBER),
    ("finite_number", "Must be a finite number", _NUMBER),
    ("int", "Must be a whole number", _OF_TYPE),
    ("float", "Must be a number", _OF_TYPE),
    ("bool", "Must be true or false", _OF_TYPE),
    ("string_too_long", "Must have at most {max_length} characters", "Shorten it"),
    ("string", "Must be text", _OF_TYPE),
    ("list", "Must be a list, such as [a,b]", _OF_TYPE),
    ("", "Must be a group of keys, not a value", _OF_TYPE),
)


def checked(
    composed: DictConfig,
    choices: Mapping[str, str | None],
    facts: LaunchFacts | None,
    overrides: Sequence[str] = (),
) -> Configuration:
    """The configuration of a composed tree. choices: the option taken of each group. facts None:
    without the rules.

    Raises `ConfigurationRefused` with everything that types and limits refuse, or else with every
    broken rule.
    """
    try:
        tree: Any = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigurationRefused([as_refusal(error, overrides)]) from error
    missing = OmegaConf.missing_keys(composed)
    refusals = [
        Refusal(key, "???", "It has no default and was not given", f"Give it: {key}=...")
        for key in missing
    ]
    if isinstance(run := tree["run"], dict) and run["experiment"] is None:
        run["experiment"] = choices.get("experiment") or "custom"
    algorithm, chosen = (
        algorithm_of(tree["algo"]),
        (choices.get("algo") or "").partition("_")[0],
    )  # espo of espo_wide
    if chosen in ALGORITHMS and chosen != algorithm:
        rule, remedy = (
            f"The other keys are those of algo={chosen}",
            f"Choose the group: algo={'|'.join(ALGORITHMS)}",
        )
        refusals.append(Refusal("algo.name", tree["algo"]["name"], rule, remedy))
    try:
        configuration = _CONFIGURATION.validate_python(_in_words(tree))
    except ValidationError as error:
        refusals += _from_pydantic(error, algorithm, {refusal.key for refusal in refusals})
    if not refusals:
        refusals = list(
            phase_refusals(configuration, lambda error: _from_pydantic(error, algorithm, ()))
        )
    if not refusals and facts is not None:
        given = {split_override(text)[0] for text in overrides}
        refusals = list(broken_rules(configuration, facts, given))
        for phase in phases_of(configuration):
            broken = (
                refusal
                for refusal in broken_rules(phase.configuration, facts, given)
                if refusal not in refusals
            )
            refusals += [
                r._replace(rule=f"In phase {phase.settings.name}: {r.rule}") for r in broken
            ]
    if refusals:
        places = {key: place for place, key in enumerate(declared_keys())}
        refusals.sort(key=lambda refusal: places.get(refusal.key.partition(".")[0], len(places)))
        raise ConfigurationRefused(refusals)
    return configuration


def _in_words(value: Any) -> Any:
    """Booleans, which are numbers to Python, as words: pydantic then refuses them where a number is
    wanted.
    """
    if isinstance(value, dict):
        return {key: inner if key in _FREE else _in_words(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_in_words(inner) for inner in value]
    return str(value).lower() if isinstance(value, bool) else value


def _from_pydantic(
    error: ValidationError, algorithm: str, known: Collection[str]
) -> Iterator[Refusal]:
    """One refusal for each key.

    known: keys that are refused already, and `algo.name` stands for its whole section.
    """
    by_key: dict[str, list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        depth = 3 if ".".join(map(str, details["loc"][:2])) in INNER else 2
        named, inside = (
            details["loc"][:depth],
            details["loc"][depth:],
        )  # inside: indices, names of a union's members
        key = ".".join(map(str, named)) + "".join(
            f"[{part}]" for part in inside if isinstance(part, int)
        )
        by_key.setdefault(key, []).append(details)
    for key, errors in by_key.items():
        if key not in known and not (key.startswith("algo.") and "algo.name" in known):
            yield _refusal(key, errors, declared_keys(algorithm).get(key))


def _refusal(key: str, errors: Sequence[ErrorDetails], declared: Field[Any] | None) -> Refusal:
    kind, value, context = errors[0]["type"], errors[0]["input"], errors[0].get("ctx", {})
    if kind == "unexpected_keyword_argument":
        return unknown_key(key, value)
    if kind == "literal_error":
        choices = re.findall("'([^']*)'", context["expected"])
        own = ", or your own package.module:Name" if len(errors) > 1 else ""
        return Refusal(
            key, value, f"Must be one of {', '.join(choices)}{own}", "Choose one of these"
        )
    if kind == "string_pattern_mismatch":
        return Refusal(key, value, _PATTERNS[context["pattern"]], "Give such a name")
    rule, remedy = next((r.format(**context), m) for name, r, m in _RULES if kind.startswith(name))
    if remedy is _NUMBER and declared is not None and declared.default is not MISSING:
        remedy += f", or leave the key out for its default {format_value(declared.default)}"
    return Refusal(key, value, "Must not be null" if value is None else rule, remedy)
