"""Judges whether a response is JSON that a schema accepts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import jsonschema
from jsonschema.protocols import Validator
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.prompt import Prompt, Question
from megatron_rl.rewards.verifiers.json_text import last_json, read_json
from megatron_rl.rewards.verifiers.verifier import Verifier

# Below these keys, `$ref` is a value and no reference
_VALUES = ("const", "enum", "default", "examples")


class JsonSchemaVerifier(Verifier):
    """Rewards 1 if the JSON in a response fits the schema of the row, and 0 otherwise.

    The row's details are {"schema": ...}, of JSON Schema 2020-12 unless `$schema` says another
    draft. References stay within the schema: nothing is fetched. Formats are not checked.
    """

    def check_answer(self, question: Question) -> None:
        """Raise ValueError for details without a valid schema, or with references out of it."""
        try:
            _check(_read_schema(question.details))
        except (ValueError, jsonschema.SchemaError, Unresolvable) as error:
            problem = str(error).partition("\n")[0]
            raise ValueError(
                f"details {question.details[:80]!r}: {problem}. Give them as "
                '{"schema": {...}} with a valid schema, and its references as #/$defs/NAME'
            ) from None

    def grade(self, prompt: Prompt, text: str) -> Verdict:
        """Validate the last fenced block of JSON in a response, or the whole response."""
        answer = last_json(text).strip()
        try:
            value = read_json(answer)
        except (ValueError, RecursionError):
            return Verdict(reward=0.0, correctness=0.0)
        correctness = float(_validator(prompt.details).is_valid(value))
        return Verdict(reward=correctness, correctness=correctness, answer=answer)


@lru_cache(maxsize=64)
def _validator(details: str) -> Validator:
    return _make_validator(_read_schema(details))


def _read_schema(details: str) -> Any:
    """Return the schema in the details of a row. Raises ValueError."""
    value = read_json(details)
    if not isinstance(value, dict) or set(value) != {"schema"}:
        raise ValueError("they are no object with the one key schema")
    if not isinstance(value["schema"], dict | bool):
        raise ValueError("the schema is neither an object nor a boolean")
    return value["schema"]


def _make_validator(schema: Any) -> Validator:
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    return kind(schema, registry=Registry())  # an empty registry fetches nothing


def _check(schema: Any) -> None:
    """Raise an exception for a schema that cannot judge every response."""
    validator = _make_validator(schema)
    validator.check_schema(schema)
    resource = DRAFT202012.create_resource(schema)
    resolver = Registry().resolver_with_root(resource)
    for key, value in _keywords(schema):
        if key == "$ref" and isinstance(value, str):
            resolver.lookup(value)
    try:
        validator.is_valid(None)
    except RecursionError:
        raise ValueError("its references have no end") from None


def _keywords(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield all keywords with their values."""
    if isinstance(schema, dict):
        for key, value in schema.items():
            yield key, value
            if key not in _VALUES:
                yield from _keywords(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _keywords(value)
