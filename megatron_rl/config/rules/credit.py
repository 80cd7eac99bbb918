"""Groups without a contrast and shaping: nothing is switched on that nothing uses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from megatron_rl.config.schema import Configuration, CreditSettings


def check_credit(c: Configuration) -> Iterator[tuple[str, str, str]]:
    """What belongs together, and lengths that a response can have."""
    credit, longest = c.credit, c.rollout.max_new_tokens
    given = {f.name for f in fields(CreditSettings) if getattr(credit, f.name) != f.default}
    if c.algo.advantages == "one":
        rule = "With algo.advantages=one every judged rollout has the advantage 1, whatever its group"
        yield from ((f"credit.{name}", rule, "Remove it, or use algo.advantages=group") for name in sorted(given))
        return
    zvp, shapes = "zvp" in (credit.flat_right, credit.flat_wrong), "shape" in (credit.tied_right, credit.tied_wrong)
    for name, used, remedy in (
        ("zvp_alpha", zvp, "credit.flat_right=zvp or credit.flat_wrong=zvp"),
        ("tied_scale", shapes, "credit.tied_right=shape or credit.tied_wrong=shape"),
        ("length_buffer", credit.length == "buffer", "credit.length=buffer"),
        ("length_excess", credit.length == "excess", "credit.length=excess"),
        ("tied_right", credit.length, "credit.length=buffer or excess: only length tells"),
        ("tied_wrong", credit.repetition_ngram, "credit.repetition_ngram=40: only repetition tells"),
        ("length", credit.shaping or credit.tied_right == "shape", "credit.shaping above 0"),
        ("repetition_ngram", credit.shaping or credit.tied_wrong == "shape", "credit.shaping above 0"),
    ):
        if name in given and not used:
            yield f"credit.{name}", "It would change nothing", f"Remove it, or use {remedy}"
    for name, tokens in (("length_buffer", credit.length_buffer), ("repetition_ngram", credit.repetition_ngram)):
        if tokens is not None and tokens >= longest + (name == "length_buffer"):
            yield f"credit.{name}", f"A response has at most rollout.max_new_tokens={longest} tokens", "Give fewer"
