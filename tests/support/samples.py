"""Samples with artificial contents."""

from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.rollout import FinishReason, Role
from megatron_rl.records.samples.files import samples_file
from megatron_rl.records.samples.sample import (
    Sample,
    SampleQuestion,
    SampleSegment,
    SampleTokens,
    SampleTraining,
)
from megatron_rl.records.samples.writer import write_samples


def make_sample(text: str = "42", *, tool: str = "", **changes: Any) -> Sample:
    """Make a trained sample with one token for each character.

    tool: output of a tool after the response, which has no values.
    changes: of the sample, and of its parts: all of their fields have different names.
    """
    count = len(text) + len(tool)

    def floats(start: float) -> np.ndarray:
        values = start + np.arange(count, dtype=np.float32) / 8
        values[len(text) :] = np.nan
        return values

    values: dict[str, Any] = {
        "step": 10,
        "group": 1,
        "sample_index": 0,
        "rollout_id": "step-10-1/0",
        "kinds": (),
        "verdict": Verdict(reward=1.0, correctness=1.0, answer="42", seconds=0.25),
        "repetition": 0.0,
        "finish_reason": FinishReason.STOP,
        "segments": _segments(text, tool),
    }
    parts: dict[str, Any] = {
        "question": SampleQuestion(
            prompt_id="q7", task="sums", difficulty="", prompt="17+25=", expected_answer="42"
        ),
        "training": SampleTraining(group_kind="mixed", is_trained=True, advantage=0.5, weight=1.0),
        "tokens": SampleTokens(
            ids=np.arange(count, dtype=np.int32),
            texts=tuple(text + tool),
            rollout_logprobs=floats(-2.0),
            logprobs=floats(-2.25),
            entropies=floats(0.5),
            ratios=floats(1.0),
            advantages=floats(0.0),
            clips=np.array([1, *[0] * (count - 1)], np.int8),
        ),
    }
    for name, part in parts.items():
        part_changes = {field: changes.pop(field) for field in vars(part) if field in changes}
        parts[name] = replace(part, **part_changes)
    return Sample(**values | parts | changes)


def _segments(text: str, tool: str) -> tuple[SampleSegment, ...]:
    end = len(text)
    response = SampleSegment(
        role=Role.RESPONSE, version=3, trainable=True, start=0, stop=end, text=text
    )
    if not tool:
        return (response,)
    stop = end + len(tool)
    return response, SampleSegment(
        role=Role.TOOL, version=4, trainable=False, start=end, stop=stop, text=tool
    )


def write_step(run: Path, step: int, samples: Sequence[Sample]) -> Path:
    """Write the samples of a step of a run, and return their file."""
    file = samples_file(run, step)
    assert write_samples(file, samples, 2**20) == len(samples)
    return file


def assert_same(left: Any, right: Any) -> None:
    """Compare every field of two samples and of their parts, and arrays with their dtypes."""
    for name, value in vars(left).items():
        other = getattr(right, name)
        if isinstance(value, np.ndarray):
            assert value.dtype == other.dtype, name
            np.testing.assert_array_equal(value, other, err_msg=name)
        elif is_dataclass(value):
            assert_same(value, other)
        else:
            assert value == other, name
