"""Prepares kept responses for the page: the tokens with their colours."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.records.samples.sample import Sample
from megatron_rl.records.samples.visible_text import visible_text

_MAX_SAMPLES = 24
_MAX_TOKENS = 600
_MAX_PROMPT_CHARACTERS = 1200
_FULL_ENTROPY = 2.0  # nats, at which a token has the strongest colour


@dataclass(frozen=True)
class TokenView:
    """A token on the page.

    strength: 0 to 1, of the colour of its entropy. clip: `low`, `high`, `both` or "". tooltip: its
    numbers.
    """

    text: str
    strength: float
    clip: str
    tooltip: str


@dataclass(frozen=True)
class SampleView:
    """A response on the page. hidden_tokens: how many tokens at its end are not shown."""

    title: str
    facts: str
    prompt: str
    expected_answer: str
    tokens: tuple[TokenView, ...]
    hidden_tokens: int


def sample_views(samples: Sequence[Sample]) -> list[SampleView]:
    """Return the most telling samples: those that were kept for a reason come first."""
    samples_by_reason = sorted(samples, key=lambda sample: not sample.kinds)
    return [_view(sample) for sample in samples_by_reason[:_MAX_SAMPLES]]


def _view(sample: Sample) -> SampleView:
    kinds = ", ".join(kind.value.replace("-", " ") for kind in sample.kinds)
    title = f"step {sample.step}, {sample.prompt_id}, response {sample.sample_index}"
    return SampleView(
        title=f"{title}: {kinds}" if kinds else title,
        facts=" · ".join(_facts(sample)),
        prompt=visible_text(sample.prompt[-_MAX_PROMPT_CHARACTERS:], keep_newlines=True),
        expected_answer=visible_text(sample.expected_answer),
        tokens=tuple(_token(sample, index) for index in range(len(sample.tokens))[:_MAX_TOKENS]),
        hidden_tokens=max(0, len(sample.tokens) - _MAX_TOKENS),
    )


def _facts(sample: Sample) -> Iterator[str]:
    verdict = sample.verdict
    if verdict.reward is None:
        yield f"no reward ({verdict.reason or 'no reason'})"
    else:
        yield f"reward {verdict.reward:g}"
    if verdict.correctness is not None:
        names = {0.0: "incorrect", 1.0: "correct"}
        yield names.get(verdict.correctness, f"correctness {verdict.correctness:g}")
    if sample.advantage is not None:
        yield f"advantage {sample.advantage:+.3f}"
    yield f"{sample.group_kind.replace('_', ' ')} group"
    yield f"{len(sample.tokens)} tokens"
    yield f"ended by {sample.finish_reason.value}"
    if not sample.is_trained:
        yield "not trained"
    clip_share = sample.clip_share
    if clip_share:
        yield f"{clip_share:.1%} clipped"


def _token(sample: Sample, index: int) -> TokenView:
    numbers = {
        "log-probability": sample.rollout_logprobs[index],
        "entropy": sample.entropies[index],
        "ratio": sample.ratios[index],
        "mismatch": sample.mismatches[index],
        "advantage": sample.advantages[index],
    }
    tooltip = ", ".join(f"{name} {value:.3g}" for name, value in numbers.items() if value == value)
    entropy = float(sample.entropies[index])
    return TokenView(
        text=visible_text(sample.token_texts[index], keep_newlines=True),
        strength=0.0 if math.isnan(entropy) else round(min(1.0, entropy / _FULL_ENTROPY), 2),
        clip=_clip(sample, index),
        tooltip=tooltip,
    )


def _clip(sample: Sample, index: int) -> str:
    if sample.clips is None:
        return ""
    value = int(np.int8(sample.clips[index]))
    return {0: "", -1: "low", 1: "high"}.get(value, "clipped")
