"""Assembles samples on rank 0 from the parts that the ranks send."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import Role
from megatron_rl.models.tokenizer import Tokenizer
from megatron_rl.records.samples.parts import SegmentPart, TokenPart, ValuePart
from megatron_rl.records.samples.sample import (
    Sample,
    SampleQuestion,
    SampleSegment,
    SampleTokens,
    SampleTraining,
)
from megatron_rl.run.features.samples.selection import Choice


@dataclass(frozen=True)
class SampleContext:
    """Everything that rank 0 knows of a chosen response apart from its tokens."""

    step: int
    choice: Choice
    prompt: Prompt
    training: SampleTraining


class SampleTexts:
    """Decodes samples, and each token id once in a run."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._token_texts: dict[int, str] = {}

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens without final end-of-sequence tokens."""
        return self._tokenizer.decode(ids)

    def token_texts(self, ids: Sequence[int]) -> tuple[str, ...]:
        """Return the text of each token."""
        for token in set(ids).difference(self._token_texts):
            self._token_texts[token] = self._tokenizer.token_text(token)
        return tuple(self._token_texts[token] for token in ids)


def assemble(
    context: SampleContext, part: TokenPart, values: ValuePart | None, texts: SampleTexts
) -> Sample:
    """Make a sample from the tokens of a rollout and the values of its trained tokens."""
    ids = np.frombuffer(part.tokens, np.int32)
    num_prompt = _num_prompt_tokens(part.segments)
    rollout = context.choice.rollout
    prompt = context.prompt
    return Sample(
        step=context.step,
        group=context.choice.group,
        sample_index=rollout.sample_index,
        rollout_id=rollout.rollout_id,
        kinds=context.choice.kinds,
        question=SampleQuestion(
            prompt_id=prompt.id,
            task=prompt.task,
            difficulty=prompt.difficulty,
            prompt=texts.text(ids[:num_prompt].tolist()),
            expected_answer=prompt.answer,
        ),
        verdict=rollout.verdict,
        repetition=rollout.repetition,
        finish_reason=rollout.finish_reason,
        training=context.training,
        segments=_segments(part.segments, ids, texts),
        tokens=SampleTokens(
            ids=ids[num_prompt:],
            texts=texts.token_texts(ids[num_prompt:].tolist()),
            rollout_logprobs=np.frombuffer(part.logprobs, np.float32)[num_prompt:],
            **_trainer_values(part.segments, values),
        ),
    )


def _trainer_values(segments: Sequence[SegmentPart], values: ValuePart | None) -> dict[str, Any]:
    """Return the columns of the trainer, NaN for tokens that did not train."""
    is_trained = _trained_tokens(segments)
    arrays: dict[str, Any] = {
        "logprobs": None if values is None else values.old_logprobs,
        "entropies": None if values is None else values.entropies,
        "ratios": None if values is None else values.ratios,
        "advantages": None if values is None else values.advantages,
    }
    num_prompt = _num_prompt_tokens(segments)
    for name, data in arrays.items():
        arrays[name] = _spread(data, is_trained)[num_prompt:]
    arrays["clips"] = None
    if values is not None and values.clips is not None:
        clips = np.zeros(len(is_trained), np.int8)
        clips[is_trained] = np.frombuffer(values.clips, np.int8)
        arrays["clips"] = clips[num_prompt:]
    return arrays


def _num_prompt_tokens(segments: Sequence[SegmentPart]) -> int:
    prompt_segments = itertools.takewhile(lambda s: s.role is Role.PROMPT, segments)
    return sum(segment.length for segment in prompt_segments)


def _trained_tokens(segments: Sequence[SegmentPart]) -> np.ndarray:
    """Return bool [n]. The first token is never trained, because no token precedes it."""
    parts = [np.full(segment.length, segment.trainable) for segment in segments]
    is_trained = np.concatenate(parts)
    is_trained[:1] = False
    return is_trained


def _spread(data: bytes | None, is_trained: np.ndarray) -> np.ndarray:
    """Return the values of the trained tokens at their places, float32 [n], NaN elsewhere."""
    values = np.full(len(is_trained), np.nan, np.float32)
    if data is not None:
        values[is_trained] = np.frombuffer(data, np.float32)
    return values


def _segments(
    parts: Sequence[SegmentPart], tokens: np.ndarray, texts: SampleTexts
) -> tuple[SampleSegment, ...]:
    """Return the segments after the prompt, with ranges that begin after it."""
    num_prompt = _num_prompt_tokens(parts)
    segments = []
    start = 0
    for part in parts:
        stop = start + part.length
        if start >= num_prompt:
            segments.append(
                SampleSegment(
                    role=part.role,
                    version=part.version,
                    trainable=part.trainable,
                    start=start - num_prompt,
                    stop=stop - num_prompt,
                    text=texts.text(tokens[start:stop].tolist()),
                )
            )
        start = stop
    return tuple(segments)
