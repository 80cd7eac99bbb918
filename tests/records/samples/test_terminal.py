"""Samples in a terminal: every line fits, and nothing of the model controls it."""

import io
import json
import re

import numpy as np
import pytest
from rich.cells import cell_len

from megatron_rl.contracts.group import Verdict
from megatron_rl.records.samples.columns import schema
from megatron_rl.records.samples.sample import Sample, SampleKind
from megatron_rl.records.samples.terminal import SamplePrinter, to_json
from tests.support.samples import make_sample

HOSTILE = "\x1b[2J\x1b[31m\x9b1A\r\x07\u202e[bold]:smile:\n" + "wörd 漢字 " * 40 + "x" * 300


def show(sample: Sample, *, width: int = 80, is_full: bool = False) -> str:
    stream = io.StringIO()
    SamplePrinter(stream, width=width, is_full=is_full).print(sample)
    return stream.getvalue()


@pytest.mark.parametrize("width", [40, 80, 133])
def test_every_line_fits_and_nothing_controls_the_terminal(width: int) -> None:
    verdict = Verdict(reward=None, correctness=None, answer=HOSTILE, reason=HOSTILE)
    text = show(
        make_sample(
            HOSTILE,
            tool=HOSTILE,
            prompt=HOSTILE,
            prompt_id=HOSTILE,
            task=HOSTILE,
            expected_answer=HOSTILE,
            verdict=verdict,
            kinds=tuple(SampleKind),
        ),
        width=width,
    )
    assert max(map(cell_len, text.splitlines())) <= width
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert "[bold]:smile:" in text.replace("\n│ ", ""), "no markup, no emoji names"
    assert r"\x1b[2J" in text


def test_a_sample_in_80_columns() -> None:
    sample = make_sample(
        "17+25=42.",
        tool="ok",
        kinds=(SampleKind.SHORTEST, SampleKind.MOST_CLIPPED),
        texts=("17", "+", *"25=42.ok"),
        repetition=0.25,
        weight=1.5,
    )
    assert show(sample).splitlines() == [
        "step 10 · shortest, most-clipped · group 1 " + "─" * 37,
        "question  q7 of sums, expected 42",
        "verdict   reward 1, correctness 1, repetition 25%, answer 42",
        "training  trained, group mixed, advantage +0.500, weight 1.5, weights of version",
        "          3",
        "tokens    11, end by stop, mean log-probability -1.500, entropy 1.000, clipped",
        "          11%, mismatch 2.5e-01, least likely '17' -2.00, '+' -1.88, '2' -1.75",
        "prompt",
        "│ 17+25=",
        "response (9 tokens)",
        "│ 17+25=42.",
        "tool (2 tokens, without loss)",
        "│ ok",
        "",
    ]


def test_a_response_that_did_not_train() -> None:
    nothing = np.full(2, np.nan, np.float32)
    verdict = Verdict(reward=None, correctness=None, reason="timeout")
    arrays = dict.fromkeys(("logprobs", "entropies", "ratios", "advantages"), nothing)
    text = show(
        make_sample(is_trained=False, advantage=None, clips=None, verdict=verdict, **arrays)
    )
    assert "verdict   no verdict (timeout), no answer\n" in text
    assert "training  not trained, group mixed, weights of version 3\n" in text
    assert "entropy" not in text and "clipped" not in text and "mismatch" not in text


def test_a_demonstration_is_in_no_group_of_verdicts() -> None:
    """Shows no kind of group beside `trained`. A rollout without verdicts keeps it: it says why."""
    kind = "too_few_verdicts"
    assert kind not in show(make_sample(group_kind=kind))
    assert f"group {kind}" in show(make_sample(group_kind=kind, is_trained=False))


def test_long_texts_have_a_gap_unless_full() -> None:
    lines = "\n".join(f"line {number}" for number in range(100))
    text = show(make_sample(lines))
    shown_lines = [line for line in text.splitlines() if line.startswith("│ line")]
    assert len(shown_lines) == 23 and shown_lines[-1] == "│ line 99"
    assert "│ [77 lines: --full shows them]" in text
    assert all(
        f"│ line {number}\n" in show(make_sample(lines), is_full=True) for number in range(9)
    )
    assert show(make_sample(lines), is_full=True).count("│ line") == 100


def test_json_holds_every_value_without_nan() -> None:
    sample = make_sample("4\x1b\ud800", tool="!", kinds=(SampleKind.LONGEST,))
    line = json.dumps(to_json(sample), allow_nan=False)
    assert line.isascii() and line.isprintable()
    values = json.loads(line)
    assert values["text"] == "4\x1b\ud800!" and values["kinds"] == ["longest"]
    assert values["ratios"] == [1.0, 1.125, 1.25, None] and values["clips"] == [1, 0, 0, 0]
    assert values["reward"] == 1.0 and values["finish_reason"] == "stop"
    assert values["segments"][1]["role"] == "tool"
    other_names = {"scoring_seconds": "seconds", "no_reward_reason": "reason", "num_tokens": "text"}
    assert values.keys() == {other_names.get(name, name) for name in schema().names}
