"""Prepares kept responses for the page: the tokens with their colours."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.records.samples.sample import Sample, SampleTokens
from megatron_rl.records.samples.visible_text import visible_text

_MAX_PROMPTS = 6
_MAX_RESPONSES = 8  # to each prompt
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
    """A response on the page.

    verdict: in words. verdict_kind: `good`, `bad` or `partial`, which has a colour. hidden_tokens:
    how many tokens at its end are not shown.
    """

    title: str
    verdict: str
    verdict_kind: str
    facts: str
    tokens: tuple[TokenView, ...]
    hidden_tokens: int


@dataclass(frozen=True)
class PromptView:
    """A prompt on the page, with its responses. title: step and id."""

    prompt: str
    title: str
    expected_answer: str
    responses: list[SampleView]


def prompt_views(samples: Sequence[Sample]) -> list[PromptView]:
    """Return some prompts with some responses: those that were kept for a reason come first."""
    by_group: dict[int, list[Sample]] = {}
    for sample in sorted(samples, key=lambda sample: not sample.kinds):
        by_group.setdefault(sample.group, []).append(sample)
    return [_prompt_view(group) for group in list(by_group.values())[:_MAX_PROMPTS]]


def _prompt_view(samples: Sequence[Sample]) -> PromptView:
    first = samples[0]
    prompt = first.question.prompt[-_MAX_PROMPT_CHARACTERS:].strip()
    return PromptView(
        prompt=visible_text(prompt, keep_newlines=True),
        title=", ".join(_place(first)),
        expected_answer=visible_text(first.question.expected_answer),
        responses=[_view(sample) for sample in samples[:_MAX_RESPONSES]],
    )


def _place(sample: Sample) -> Iterator[str]:
    yield f"step {sample.step}"
    yield sample.question.prompt_id
    if sample.training.has_group_kind:
        yield f"{sample.training.group_kind.replace('_', ' ')} group"


def _view(sample: Sample) -> SampleView:
    kinds = ", ".join(kind.value.replace("-", " ") for kind in sample.kinds)
    title = f"response {sample.sample_index}"
    tokens = sample.tokens
    mismatches = tokens.mismatches
    num_shown = min(len(tokens), _MAX_TOKENS)
    verdict, verdict_kind = _verdict(sample)
    return SampleView(
        title=f"{title}: {kinds}" if kinds else title,
        verdict=verdict,
        verdict_kind=verdict_kind,
        facts=" · ".join(_facts(sample)),
        tokens=tuple(_token(tokens, mismatches[index], index) for index in range(num_shown)),
        hidden_tokens=len(tokens) - num_shown,
    )


def _verdict(sample: Sample) -> tuple[str, str]:
    """Return the verdict in words, and its kind."""
    correctness = sample.verdict.correctness
    if correctness is None:
        reward = sample.verdict.reward
        return ("no reward" if reward is None else f"reward {reward:g}"), "partial"
    names = {0.0: ("incorrect", "bad"), 1.0: ("correct", "good")}
    return names.get(correctness, (f"correctness {correctness:g}", "partial"))


def _facts(sample: Sample) -> Iterator[str]:
    verdict = sample.verdict
    if verdict.reward is None:
        yield f"no reward ({verdict.reason or 'no reason'})"
    else:
        yield f"reward {verdict.reward:g}"
    for name, reward in verdict.parts.items():
        yield f"{name} {reward:g}"
    training = sample.training
    if training.advantage is not None:
        yield f"advantage {training.advantage:+.3f}"
    yield f"{len(sample.tokens)} tokens"
    yield f"ended by {sample.finish_reason.value}"
    if not training.is_trained:
        yield "not trained"
    clip_share = sample.tokens.clip_share
    if clip_share:
        yield f"{clip_share:.1%} clipped"


def _token(tokens: SampleTokens, mismatch: float, index: int) -> TokenView:
    numbers = {
        "log-probability": tokens.rollout_logprobs[index],
        "entropy": tokens.entropies[index],
        "ratio": tokens.ratios[index],
        "mismatch": mismatch,
        "advantage": tokens.advantages[index],
    }
    tooltip = ", ".join(f"{name} {value:.3g}" for name, value in numbers.items() if value == value)
    entropy = float(tokens.entropies[index])
    return TokenView(
        text=visible_text(tokens.texts[index], keep_newlines=True),
        strength=0.0 if math.isnan(entropy) else round(min(1.0, entropy / _FULL_ENTROPY), 2),
        clip=_clip(tokens, index),
        tooltip=tooltip,
    )


def _clip(tokens: SampleTokens, index: int) -> str:
    if tokens.clips is None:
        return ""
    value = int(np.int8(tokens.clips[index]))
    return {0: "", -1: "low", 1: "high"}.get(value, "clipped")
