"""Rules of prompt selection and of credit: no setting is without effect."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import fields
from os.path import expanduser
from pathlib import Path

from megatron_rl.config.rules.broken_rule import BrokenRule
from megatron_rl.config.schema import (
    REPETITION_CHECK_TOKENS,
    Configuration,
    CreditSettings,
    SelectionSettings,
)
from megatron_rl.contracts.paths import path_problem

# The keys of `selection` that each selector reads.
_SELECTION_KEYS = {
    "uniform": ("name",),
    "oversample": ("name", "budget", "surplus"),
    "belief": tuple(field.name for field in fields(SelectionSettings) if field.name != "surplus"),
}

# A larger multiple of the median length is probably meant as a number of tokens.
_MAX_MULTIPLE = 10


def check_selection(c: Configuration, keys: Collection[str]) -> Iterator[BrokenRule]:
    """Yield broken rules about the selector, its keys and its probes.

    keys: of the command line.
    """
    selection_keys = [key for key in keys if key.partition(".")[0] == "selection"]
    for key in selection_keys:
        yield from _check_selection_key(c, key)
    if selection_keys and not c.selects_prompts:
        rule = f"mode={c.mode} selects no prompts"
        yield BrokenRule("selection.name", rule, "Remove it, or use mode=train")
    if c.selection.name != "uniform" and not c.algo.compares_groups(c.environment.name):
        rule = (
            "With algo=sft or demonstrations every rollout with a verdict is trained on, so that "
            "no group is worth more than another"
        )
        yield BrokenRule("selection.name", rule, "Use selection=uniform")
    if c.selection.name == "belief":
        yield from _check_beliefs(c)


def _check_selection_key(c: Configuration, key: str) -> Iterator[BrokenRule]:
    """Yield a broken rule if the selector does not read this key."""
    name = key.partition(".")[2].partition(".")[0]
    if name and name not in _SELECTION_KEYS[c.selection.name]:
        owners = [owner for owner, names in _SELECTION_KEYS.items() if name in names]
        rule = f"selection.name={c.selection.name} does not read this key"
        remedy = f"Remove it, or use {' or '.join(f'selection={owner}' for owner in owners)}"
        yield BrokenRule(key, rule, remedy)


def _check_beliefs(c: Configuration) -> Iterator[BrokenRule]:
    beliefs_from = c.selection.beliefs_from
    # A resumed run does not read the other run again, which may have been deleted.
    if beliefs_from is not None and c.run.resume == "never":
        problem = path_problem(expanduser(beliefs_from), folder=True)
        if problem is not None:
            rule = f"{problem} (from {Path.cwd()})"
            remedy = (
                "Give the directory of a run with selection=belief, or of one of its checkpoints"
            )
            yield BrokenRule("selection.beliefs_from", rule, remedy)
    probe = c.selection.probe_samples
    samples = c.rollout.samples_per_prompt
    if probe == 1 or probe >= samples:
        rule = (
            "The responses of a probe are compared with each other, and it is smaller than a group "
            f"of {samples}"
        )
        remedy = f"Give 2 to {samples - 1}, or 0 for whole groups" if samples > 2 else "Use 0"
        yield BrokenRule("selection.probe_samples", rule, remedy)


def check_credit(c: Configuration) -> Iterator[BrokenRule]:
    """Yield broken rules about keys of `credit` without effect, and about lengths."""
    changed_names = {
        field.name
        for field in fields(CreditSettings)
        if getattr(c.credit, field.name) != field.default
    }
    if not c.algo.compares_groups(c.environment.name):
        rule = (
            "With algo=sft or demonstrations every rollout with a verdict has the advantage 1, "
            "whatever its group"
        )
        for name in sorted(changed_names):
            yield BrokenRule(f"credit.{name}", rule, "Remove it")
        return
    for name, is_used, remedy in _uses_of_credit_keys(c.credit):
        if name in changed_names and not is_used:
            rule = "This setting has no effect"
            yield BrokenRule(f"credit.{name}", rule, f"Remove it, or use {remedy}")
    yield from _check_lengths(c)


def check_stop_repetition(c: Configuration, keys: Collection[str]) -> Iterator[BrokenRule]:
    """Yield broken rules about responses that are cut off because they repeat themselves.

    keys: of the command line.
    """
    key = "rollout.stop_repetition"
    if not c.selects_prompts:
        if key in keys:
            rule = f"mode={c.mode} samples no rollouts"
            yield BrokenRule(key, rule, "Remove it, or use mode=train")
        return
    longest = c.rollout.max_new_tokens
    if c.rollout.stop_repetition is not None and longest <= REPETITION_CHECK_TOKENS:
        rule = (
            f"A response is looked at every {REPETITION_CHECK_TOKENS} tokens, and "
            f"rollout.max_new_tokens={longest}"
        )
        yield BrokenRule(key, rule, "Leave it null, or raise rollout.max_new_tokens")


def _uses_of_credit_keys(credit: CreditSettings) -> list[tuple[str, bool, str]]:
    """Return keys that depend on others: the name, whether it is used, and the keys to use it."""
    has_zvp = "zvp" in (credit.all_correct, credit.all_incorrect)
    has_length = bool(credit.length)
    is_shaped = bool(credit.shaping) or credit.tied == "shape"
    return [
        ("zvp_alpha", has_zvp, "credit.all_correct=zvp or credit.all_incorrect=zvp"),
        ("length_start", has_length, "credit.length=buffer or excess"),
        (
            "tied",
            has_length or bool(credit.repetition_ngram),
            "credit.length=buffer or excess, which distinguishes correct responses, or "
            "credit.repetition_ngram=40, which distinguishes incorrect ones",
        ),
        ("length", is_shaped, "credit.shaping above 0"),
        ("repetition_ngram", is_shaped, "credit.shaping above 0"),
    ]


def _check_lengths(c: Configuration) -> Iterator[BrokenRule]:
    longest = c.rollout.max_new_tokens
    buffer = c.credit.length_start if c.credit.length == "buffer" else None
    if buffer is not None and not buffer.is_integer():
        rule = "With credit.length=buffer it is a number of tokens"
        yield BrokenRule("credit.length_start", rule, "Give a whole number, or leave it null")
    multiple = c.credit.length_start if c.credit.length == "excess" else None
    if multiple is not None and multiple > _MAX_MULTIPLE:
        rule = "With credit.length=excess it is a multiple of the group's median length"
        yield BrokenRule("credit.length_start", rule, f"Give at most {_MAX_MULTIPLE}, such as 1.5")
    for name, tokens, limit in (
        ("length_start", buffer, longest),
        ("repetition_ngram", c.credit.repetition_ngram, longest - 1),
    ):
        if tokens is not None and tokens > limit:
            rule = f"A response has at most rollout.max_new_tokens={longest} tokens"
            yield BrokenRule(f"credit.{name}", rule, f"Give at most {limit}")
