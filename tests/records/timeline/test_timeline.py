"""The timeline of a run: its file, its rows, its trace and its picture."""

import json
from pathlib import Path

import pytest

from launch import report
from megatron_rl.contracts.commands import Checkpoint, Poll, Sync
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.records.timeline.layout import (
    StepSpan,
    choose_steps,
    place_in_rows,
    sampled_steps,
)
from megatron_rl.records.timeline.spans import Lane, Span, Timeline, read_timeline
from megatron_rl.records.timeline.trace import trace_events
from megatron_rl.rollouts.wire.messages import GroupDone
from megatron_rl.run.features.timeline.run_timeline import RunTimeline
from tests.support.clocks import FakeClock

SPANS = [
    Span(Lane.ROLLOUTS, "step-1-0", 10.0, 12.0, step=1, tokens=7),
    Span(Lane.ROLLOUTS, "step-1-1", 10.0, 13.0, step=1, tokens=9),
    Span(Lane.RANKS, "train", 13.0, 15.0, step=1),
    Span(Lane.ROLLOUTS, "step-2-0", 13.0, 14.0, step=2, tokens=5),
    Span(Lane.RANKS, "sync", 15.0, 15.5),
    Span(Lane.RANKS, "train", 15.5, 18.0, step=2),
    Span(Lane.RANKS, "sync", 18.0, 18.5),
]


def no_log(text: str) -> None:
    raise AssertionError(text)


def answer(group_id: str, seconds: float, num_tokens: int) -> GroupDone:
    prompt = Prompt(id="p", token_ids=(1,), answer="", task="")
    group = Group(group_id=group_id, prompt=prompt, rollouts=())
    return GroupDone(group=group, generated_tokens=num_tokens, seconds=seconds)


def test_a_span_ends_when_its_work_ended(tmp_path: Path) -> None:
    clock = FakeClock()
    clock.now = 100.0
    file = tmp_path / "timeline.jsonl"
    with Timeline(file, no_log, clock) as timeline:
        run = RunTimeline(timeline)
        run.add_group(answer("step-12-3+2", 3.0, 31), 4.0)
        clock.now = 110.5
        run.add_command(Sync(version=3), 0.5)
        run.add_command(Poll(), 0.5)
        run.add_group(answer("eval-12-5", 2.5, 8), 2.0)
        run.add_command(Checkpoint(step=12, state=b""), 1.0)
    assert list(read_timeline(file)) == [
        # It was complete a second before this process read it
        Span(Lane.ROLLOUTS, "step-12-3+2", 96.0, 99.0, step=12, tokens=31),
        Span(Lane.RANKS, "sync", 110.0, 110.5),
        Span(Lane.ROLLOUTS, "eval-12-5", 108.5, 110.5, tokens=8),
        Span(Lane.RANKS, "checkpoint", 109.5, 110.5, step=12),
    ]


def test_a_resumed_run_appends_after_the_torn_line_of_a_killed_one(tmp_path: Path) -> None:
    file = tmp_path / "timeline.jsonl"
    with Timeline(file, no_log) as timeline:
        timeline.add(Lane.RANKS, "train", 1.0, step=1)
        timeline.add(Lane.RANKS, "train", 1.0, step=2)
    file.write_bytes(file.read_bytes()[:-9])
    with Timeline(file, no_log) as timeline:
        timeline.add(Lane.RANKS, "train", 1.0, step=3)
    assert [span.step for span in read_timeline(file)] == [1, 3]


def test_a_full_disk_ends_the_timeline_with_one_warning() -> None:
    lines: list[str] = []
    timeline = Timeline(Path("/dev/full"), lines.append)
    timeline.add(Lane.RANKS, "train", 1.0)
    timeline.add(Lane.RANKS, "train", 1.0)
    assert len(lines) == 1 and "/dev/full is not continued" in lines[0]


def test_a_step_is_sampled_from_its_first_request_to_its_last_group() -> None:
    assert sampled_steps(SPANS) == [StepSpan(1, 10.0, 13.0), StepSpan(2, 13.0, 14.0)]


def test_spans_that_overlap_are_in_different_rows() -> None:
    rows = [(row, span.name) for row, span in place_in_rows(SPANS[:2] + SPANS[3:4])]
    assert rows == [(0, "step-1-0"), (1, "step-1-1"), (0, "step-2-0")]


def test_chosen_steps_come_with_what_happened_meanwhile() -> None:
    names = [span.name for span in choose_steps(SPANS, 2, 2)]
    assert names == ["train", "step-2-0", "sync", "train"]
    assert choose_steps(SPANS, 3, 9) == []


def test_a_trace_counts_microseconds_from_the_first_span() -> None:
    events = trace_events(SPANS)["traceEvents"]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == [*Lane]
    training = [event for event in events if event["name"] == "train"]
    assert [(e["ts"], e["dur"], e["tid"]) for e in training] == [
        (3_000_000, 2_000_000, 0),
        (5_500_000, 2_500_000, 0),
    ]
    assert training[0]["args"] == {"step": 1, "tokens": 0}


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    clock = FakeClock()
    with Timeline(tmp_path / "timeline.jsonl", no_log, clock) as timeline:
        for span in SPANS:
            clock.now = span.end
            seconds = span.end - span.start
            timeline.add(span.lane, span.name, seconds, step=span.step, tokens=span.tokens)
    return tmp_path


@pytest.mark.slow
def test_the_command_writes_a_picture_and_a_trace(run_directory: Path) -> None:
    trace = run_directory / "trace.json"
    code = report.main(["timeline", str(run_directory), "--steps", "1:2", "--trace", str(trace)])
    assert code == ExitCode.OK
    assert (run_directory / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads(trace.read_text())["traceEvents"]) == 2 + len(SPANS) - 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--steps", "8:9"], "no step from 8 to 9"), ([], "timeline.jsonl cannot be read")],
)
def test_the_command_names_what_is_missing(
    run_directory: Path,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if not arguments:
        (run_directory / "timeline.jsonl").unlink()
    assert report.main(["timeline", str(run_directory), *arguments]) == ExitCode.REFUSED
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("steps", ["3", "5:4", "a:b", "-1:2"])
def test_an_invalid_range_of_steps_is_refused(steps: str) -> None:
    with pytest.raises(SystemExit):
        report.parse_arguments(["timeline", "runs/x", f"--steps={steps}"])
