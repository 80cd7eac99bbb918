"""Which prompts are asked, and what their groups are worth: nothing is switched on that nothing
uses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import fields
from os.path import expanduser
from pathlib import Path

from megatron_rl.config.schema import Configuration, CreditSettings, SelectionSettings
from megatron_rl.contracts.paths import path_problem

_READ = {
    "uniform": ("name",),
    "oversample": ("name", "budget"),
    "belief": tuple(field.name for field in fields(SelectionSettings)),
}


def check_selection(c: Configuration, given: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """A selector's keys, probes that are smaller than groups, and groups that can be compared.
    given: of the command line."""
    selection, samples = c.selection, c.rollout.samples_per_prompt
    asked = [key for key in given if key.partition(".")[0] == "selection"]
    for key in asked:
        name = key.partition(".")[2].partition(".")[0]
        if name and name not in _READ[selection.name]:
            owners = " or ".join(
                f"selection={owner}" for owner, names in _READ.items() if name in names
            )
            yield (
                key,
                f"selection.name={selection.name} does not read it",
                f"Remove it, or use {owners}",
            )
    if asked and c.mode in ("train_only", "eval", "profile"):
        yield "selection.name", f"mode={c.mode} chooses no prompts", "Remove it, or use mode=train"
    if selection.name != "uniform" and c.algo.advantages == "one":
        rule = "With algo.advantages=one every judged rollout is trained on: no group is worth more than another"
        yield "selection.name", rule, "Use selection=uniform, or algo.advantages=group"
    if selection.name == "belief":
        given_run = (
            selection.beliefs_from if c.run.resume == "never" else None
        )  # else it may have gone: it is not read
        if given_run is not None and (problem := path_problem(expanduser(given_run), folder=True)):
            remedy = (
                "Give the directory of a run with selection=belief, or of one of its checkpoints"
            )
            yield "selection.beliefs_from", f"{problem} (from {Path.cwd()})", remedy
        if selection.probe_samples == 1 or selection.probe_samples >= samples:
            rule = f"A probe is compared within itself, and is less than a group of {samples}"
            yield (
                "selection.probe_samples",
                rule,
                f"Give 2 to {samples - 1}, or 0 for whole groups" if samples > 2 else "Use 0",
            )


def check_credit(c: Configuration) -> Iterator[tuple[str, str, str]]:
    """What belongs together, and lengths that a response can have."""
    credit, longest = c.credit, c.rollout.max_new_tokens
    given = {f.name for f in fields(CreditSettings) if getattr(credit, f.name) != f.default}
    if c.algo.advantages == "one":
        rule = (
            "With algo.advantages=one every judged rollout has the advantage 1, whatever its group"
        )
        yield from (
            (f"credit.{name}", rule, "Remove it, or use algo.advantages=group")
            for name in sorted(given)
        )
        return
    zvp, shapes = (
        "zvp" in (credit.all_correct, credit.all_incorrect),
        "shape" in (credit.tied_correct, credit.tied_incorrect),
    )
    for name, used, remedy in (
        ("zvp_alpha", zvp, "credit.all_correct=zvp or credit.all_incorrect=zvp"),
        ("tied_scale", shapes, "credit.tied_correct=shape or credit.tied_incorrect=shape"),
        ("length_buffer", credit.length == "buffer", "credit.length=buffer"),
        ("length_excess", credit.length == "excess", "credit.length=excess"),
        ("tied_correct", credit.length, "credit.length=buffer or excess: only length tells"),
        (
            "tied_incorrect",
            credit.repetition_ngram,
            "credit.repetition_ngram=40: only repetition tells",
        ),
        ("length", credit.shaping or credit.tied_correct == "shape", "credit.shaping above 0"),
        (
            "repetition_ngram",
            credit.shaping or credit.tied_incorrect == "shape",
            "credit.shaping above 0",
        ),
    ):
        if name in given and not used:
            yield f"credit.{name}", "It would change nothing", f"Remove it, or use {remedy}"
    for name, tokens in (
        ("length_buffer", credit.length_buffer),
        ("repetition_ngram", credit.repetition_ngram),
    ):
        if tokens is not None and tokens >= longest + (name == "length_buffer"):
            yield (
                f"credit.{name}",
                f"A response has at most rollout.max_new_tokens={longest} tokens",
                "Give fewer",
            )
