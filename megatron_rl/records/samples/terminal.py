"""Prints samples in a terminal, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

import numpy as np
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from megatron_rl.contracts.rollout import Role
from megatron_rl.records.samples.columns import to_row
from megatron_rl.records.samples.sample import (
    Sample,
    SampleQuestion,
    SampleSegment,
    SampleTokens,
)
from megatron_rl.records.samples.visible_text import visible_text

_MIN_COLUMNS = 40
_LABEL_COLUMNS = 10
_GUTTER = "│ "
_HEAD_LINES = 16
_TAIL_LINES = 7
_NUM_UNLIKELY = 3
_ROLE_STYLES = {Role.PROMPT: "cyan", Role.RESPONSE: "", Role.TOOL: "magenta"}


class SamplePrinter:
    """Prints samples as blocks of lines, at most as wide as the terminal.

    is_full: print long texts without a gap.
    """

    def __init__(self, stream: TextIO, *, is_full: bool = False, width: int | None = None) -> None:
        self._console = _Console(
            file=stream, highlight=False, markup=False, emoji=False, width=width
        )
        self._console.width = max(self._console.width, _MIN_COLUMNS)
        self._is_full = is_full

    def print(self, sample: Sample) -> None:
        """Print one sample. Text of the model is escaped."""
        kinds = ", ".join(sample.kinds) or f"response {sample.sample_index}"
        title = f"step {sample.step} · {kinds} · group {sample.group}"
        self._console.print(Rule(Text(title, "bold"), align="left", style="dim"))
        for label, text in _facts(sample).items():
            self._print_fact(label, text)
        self._print_text(Role.PROMPT, "prompt", sample.question.prompt)
        for segment in sample.segments:
            self._print_text(segment.role, _heading(segment), segment.text)
        self._console.print()

    def _print_fact(self, label: str, text: str) -> None:
        width = self._console.width - _LABEL_COLUMNS
        lines = Text(visible_text(text)).wrap(self._console, width)
        for number, line in enumerate(lines):
            prefix = "" if number else label
            self._print_line(prefix.ljust(_LABEL_COLUMNS), line)

    def _print_text(self, role: Role, heading: str, text: str) -> None:
        self._console.print(Text(heading, f"bold {_ROLE_STYLES[role]}"))
        content = Text(visible_text(text, keep_newlines=True), _ROLE_STYLES[role])
        lines = list(content.wrap(self._console, self._console.width - len(_GUTTER)))
        num_hidden = len(lines) - _HEAD_LINES - _TAIL_LINES
        if self._is_full or num_hidden <= 1:
            self._print_lines(lines)
            return
        self._print_lines(lines[:_HEAD_LINES])
        self._print_line(_GUTTER, Text(f"[{num_hidden} lines: --full shows them]", "dim"))
        self._print_lines(lines[-_TAIL_LINES:])

    def _print_lines(self, lines: list[Text]) -> None:
        for line in lines:
            self._print_line(_GUTTER, line)

    def _print_line(self, prefix: str, line: Text) -> None:
        line.rstrip()
        self._console.print(Text(prefix, "dim") + line, no_wrap=True, overflow="crop")


class _Console(Console):
    """A console that leaves a closed pipe to its caller."""

    def on_broken_pipe(self) -> None:
        """Raise the error that is being handled."""
        raise


def to_json(sample: Sample) -> dict[str, Any]:
    """Return a sample as JSON values. NaN and infinities become null.

    Columns and fields of `Verdict` keep their names.
    """
    values = to_row(sample)
    del values["num_tokens"]
    values["seconds"] = values.pop("scoring_seconds")
    values["reason"] = values.pop("no_reward_reason")
    values["text"] = sample.text
    return {name: _json_value(value) for name, value in values.items()}


def _json_value(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [_json_value(number) for number in value.tolist()]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _facts(sample: Sample) -> Mapping[str, str]:
    """Return the lines above the texts, by label."""
    return {
        "question": _join(_question(sample.question)),
        "verdict": _join(_verdict(sample)),
        "training": _join(_training(sample)),
        "tokens": _join(_tokens(sample)),
    }


def _question(question: SampleQuestion) -> Iterator[str]:
    yield f"{question.prompt_id} of {question.task}"
    if question.difficulty:
        yield f"difficulty {question.difficulty}"
    if question.expected_answer:
        yield f"expected {question.expected_answer}"


def _verdict(sample: Sample) -> Iterator[str]:
    verdict = sample.verdict
    if verdict.reward is None:
        yield f"no verdict ({verdict.reason})"
    else:
        yield f"reward {verdict.reward:g}"
    if verdict.correctness is not None:
        yield f"correctness {verdict.correctness:g}"
    for name, reward in verdict.parts.items():
        yield f"{name} {reward:g}"
    if verdict.penalty:
        yield f"penalty {verdict.penalty:g}"
    if sample.repetition:
        yield f"repetition {sample.repetition:.0%}"
    yield "no answer" if verdict.answer is None else f"answer {verdict.answer}"


def _training(sample: Sample) -> Iterator[str]:
    training = sample.training
    yield "trained" if training.is_trained else "not trained"
    if training.has_group_kind:
        yield f"group {training.group_kind}"
    if training.advantage is not None:
        yield f"advantage {training.advantage:+.3f}"
    if training.weight != 1:
        yield f"weight {training.weight:g}"
    versions = sorted({s.version for s in sample.segments if s.role is Role.RESPONSE})
    yield f"weights of version {', '.join(map(str, versions))}"


def _tokens(sample: Sample) -> Iterator[str]:
    tokens = sample.tokens
    yield f"{len(tokens)}, end by {sample.finish_reason}"
    if tokens.mean_logprob is not None:
        yield f"mean log-probability {tokens.mean_logprob:.3f}"
    entropies = tokens.entropies[~np.isnan(tokens.entropies)]
    if len(entropies):
        yield f"entropy {entropies.mean():.3f}"
    if tokens.clip_share is not None:
        yield f"clipped {tokens.clip_share:.0%}"
    if tokens.mean_mismatch is not None:
        yield f"mismatch {tokens.mean_mismatch:.1e}"
    unlikely = ", ".join(_least_likely(tokens))
    if unlikely:
        yield f"least likely {unlikely}"


def _least_likely(tokens: SampleTokens) -> Iterator[str]:
    """Yield the sampled tokens with the lowest log-probabilities."""
    logprobs = np.nan_to_num(tokens.rollout_logprobs, nan=np.inf)
    for index in np.argsort(logprobs, kind="stable")[:_NUM_UNLIKELY]:
        if np.isfinite(logprobs[index]):
            yield f"{tokens.texts[index]!r} {logprobs[index]:.2f}"


def _join(parts: Iterator[str]) -> str:
    return ", ".join(parts)


def _heading(segment: SampleSegment) -> str:
    count = segment.stop - segment.start
    note = "" if segment.trainable else ", without loss"
    return f"{segment.role} ({count} tokens{note})"
