"""Refusals of scorers, and of the parts of a reward."""

from pathlib import Path

import pytest

from tests.support.configurations import refusals

# reward.name, reward.parts, the key of the refusal, a fragment of it
CASES = [
    ("parts", "{}", "reward.parts", "needs its scorers by name"),
    ("exact_match", "{a: {name: exact_match}}", "reward.parts", "Only reward.name=parts reads"),
    ("parts", "{a/b: {name: exact_match}}", "reward.parts", "only letters, digits"),
    ("parts", "{a: {name: exact_match, weight: 0}}", "reward.parts", "other tasks add up to 0"),
    (
        "parts",
        "{a: {name: exact_match, tasks: [x], gate: true}, b: {name: exact_match, tasks: [y]}}",
        "reward.parts",
        "of the task x add up to 0",
    ),
    (
        "parts",
        "{a: {name: exact_match, gate: true, weight: 2}}",
        "reward.parts.a.weight",
        "A gate has no weight",
    ),
    ("parts", "{a: {name: exact_match, weight: -1}}", "reward.parts.a.weight", "at least 0"),
    ("parts", "{a: {name: exact_match, options: {x: 1}}}", "reward.parts.a.options", "no options"),
    (
        "parts",
        "{a: {name: exact_match, wieght: 1}}",
        "reward.parts.a.wieght",
        "reward.parts.a.weight",
    ),
    ("parts", "{a: {name: no_such_module:X}}", "reward.parts.a.name", "no module no_such_module"),
    ("parts", "{a: {name: exact}}", "reward.parts.a.name", "exact_match"),
    ("parts", "{a: {weight: 1}}", "reward.parts.a.name", "was not given"),
]


@pytest.mark.parametrize(("name", "parts", "key", "fragment"), CASES)
def test_a_part_is_refused_with_its_key(
    checkpoint: Path, name: str, parts: str, key: str, fragment: str
) -> None:
    results = refusals(checkpoint, f"reward.name={name}", f"reward.parts={parts}")
    assert any(
        refusal.key == key and fragment in f"{refusal.rule} {refusal.remedy}" and refusal.remedy
        for refusal in results
    ), [str(refusal) for refusal in results]


@pytest.mark.parametrize("override", ["reward.options={x: 1}", "reward.answer=boxed"])
def test_each_part_has_its_own_options_and_answer(checkpoint: Path, override: str) -> None:
    parts = "reward.parts={a: {name: exact_match}}"
    (refusal,) = refusals(checkpoint, "reward=parts", parts, override)
    assert refusal.key == override.partition("=")[0] and "each part has its own" in refusal.rule
