"""Lengths of rollouts: what is expected of a prompt, what a checkpoint keeps, and bad states."""

import io
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.contracts.run_state import LoopState, PromptCursor, SelectorState
from megatron_rl.prompts.pass_rates import Header, PassRate, PassRateFile
from megatron_rl.records.progress import Progress
from megatron_rl.run.features.lengths.history import LengthHistory, LengthState
from megatron_rl.run.features.lengths.observer import Lengths, open_lengths
from megatron_rl.run.features.observer import Observers
from megatron_rl.run.features.parts import FeatureParts
from tests.support.configurations import configuration_of
from tests.support.groups import group
from tests.support.leaders import ScriptedParts, lead


def prompt(name: str, task: str = "t") -> Prompt:
    return Prompt(id=name, token_ids=(1,), answer="1", task=task)


def group_of(name: str, *num_generated: int, task: str = "t", is_cut: bool = False) -> Group:
    """Return a group with rollouts of these lengths."""
    verdicts = [1.0] * len(num_generated)
    whole = group(*verdicts, name=name, num_generated=num_generated)
    if is_cut:
        rollouts = tuple(
            msgspec.structs.replace(rollout, finish_reason=FinishReason.LENGTH)
            for rollout in whole.rollouts
        )
        whole = msgspec.structs.replace(whole, rollouts=rollouts)
    return msgspec.structs.replace(whole, prompt=prompt(name, task))


def measure(*groups: Group) -> tuple[LengthHistory, dict[str, float]]:
    """Measure groups, one after the other. Returns the metrics of the last one."""
    history = LengthHistory()
    values: dict[str, float] = {}
    for measured_group in groups:
        values = {}
        Lengths(history).after_sampling([measured_group], values)
    return history, values


def test_nothing_is_expected_before_the_first_rollout() -> None:
    assert LengthHistory().expected_tokens(prompt("a")) == 0


def test_a_prompt_has_its_mean_drawn_towards_its_task_and_others_have_that_of_the_task() -> None:
    history, _ = measure(group_of("a", 10, 1000), group_of("b", 100, 100), group_of("c", task="u"))
    assert history.expected_tokens(prompt("a")) == 100
    assert history.expected_tokens(prompt("new")) == 100
    assert history.expected_tokens(prompt("new", task="unknown")) == 100
    history, _ = measure(group_of("a", 10), group_of("b", 1000))
    assert history.expected_tokens(prompt("a")) == round(10**1.5)
    assert history.expected_tokens(prompt("b")) == round(10**2.5)


def test_a_response_that_was_cut_off_counts_at_least_as_its_tokens() -> None:
    history, _ = measure(group_of("a", 1000), group_of("a", 10, is_cut=True))
    assert history.expected_tokens(prompt("a")) == 1000
    history, _ = measure(group_of("a", 10), group_of("a", *[1000] * 8, is_cut=True))
    assert history.expected_tokens(prompt("a")) > 400


def test_rollouts_without_tokens_do_not_count() -> None:
    history, values = measure(group_of("a", 0, 0), group_of("a", 0))
    assert history.expected_tokens(prompt("a")) == 0
    assert values == {"lengths/known": 0.0}


def test_metrics_compare_with_what_was_known_before() -> None:
    _, values = measure(group_of("a", 10, 10))
    assert values == {"lengths/known": 0.0}
    _, values = measure(group_of("a", 10, 10), group_of("a", 10, 100))
    assert values["lengths/known"] == 1.0
    assert values["lengths/log_error"] == pytest.approx(math.log(10) / math.sqrt(2))
    _, values = measure(group_of("a", 100), group_of("a", 10, is_cut=True))
    assert values["lengths/log_error"] == 0.0, "it might have become as long"


def test_the_latest_rollouts_count_most() -> None:
    history, _ = measure(group_of("a", *[10] * 1000), group_of("a", *[1000] * 128))
    assert history.expected_tokens(prompt("a")) > 400


_GROUPS = st.lists(
    st.tuples(
        st.sampled_from("abc"), st.sampled_from("tu"), st.lists(st.integers(0, 9000), max_size=5)
    ),
    max_size=8,
)


@given(first=_GROUPS, later=_GROUPS)
def test_a_restored_history_goes_on_bit_for_bit(first: Any, later: Any) -> None:
    whole = LengthHistory()
    restored = LengthHistory()
    for name, task, lengths in first:
        whole.add(prompt(name, task), [(length, False) for length in lengths])
    stored = msgspec.json.encode(msgspec.to_builtins(whole.state()))
    restored.restore(msgspec.json.decode(stored, type=LengthState))
    for history in (whole, restored):
        for name, task, lengths in later:
            history.add(prompt(name, task), [(length, True) for length in lengths])
    assert whole.state() == restored.state()


def damaged_state(**changes: Any) -> dict[str, Any]:
    history, _ = measure(group_of("a", 10), group_of("b", 10))
    state = history.state()
    prompts = msgspec.structs.replace(state.prompts, **changes)
    stored: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(state, prompts=prompts))
    return stored


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"means": np.array([1.0, math.nan]).tobytes()}, "'b' has mean=nan .* between 0 and 20.7"),
        ({"means": np.array([-1.0, 1.0]).tobytes()}, "'a' has mean=-1 "),
        ({"means": np.array([1.0, 99.0]).tobytes()}, "'b' has mean=99 "),
        ({"counts": np.array([0.0, 1.0]).tobytes()}, "'a' has .* count=0. .*count is positive"),
        ({"counts": np.array([1.0, math.inf]).tobytes()}, "'b' has .* count=inf"),
        ({"counts": b""}, "do not have 2 rows"),
        ({"names": ("a", "a")}, "a name appears twice"),
    ],
)
def test_a_damaged_history_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    observers = Observers([Lengths(LengthHistory())])
    message = rf"features\.lengths: .*{words}.*another checkpoint"
    with pytest.raises(Failure, match=message) as failure:
        observers.restore({"lengths": damaged_state(**changes)})
    assert failure.value.exit_code is ExitCode.BAD_DATA


def test_every_sampled_group_is_measured_and_a_resumed_run_knows_it(tmp_path: Path) -> None:
    """Also a step whose update is skipped."""
    parts = ScriptedParts(groups=[group_of("a", 10, 10)], finite=[False, True, True])
    lead(parts, tmp_path, steps=3)
    assert [parts.metrics[step]["lengths/known"] for step in (1, 2, 3)] == [0.0, 1.0, 1.0]
    assert parts.queue.expected_tokens(prompt("a")) == 10
    history, _ = measure(group_of("a", 10, 10))
    state = LoopState(
        step=1,
        version=1,
        weights_synced=True,
        selection=SelectorState(prompts=PromptCursor(epoch=0, position=0, digest="d")),
        features={"lengths": msgspec.to_builtins(history.state())},
    )
    resumed_parts = ScriptedParts(groups=[group_of("a", 10, 10)])
    lead(resumed_parts, tmp_path, steps=2, resume_state=state)
    assert resumed_parts.metrics[2]["lengths/known"] == 1.0


def open_with_profile(path: Path, model: str | None = None) -> tuple[Any, str]:
    """Open the feature of a run with pass rates. Returns its queue, and its log.

    model: that they are of, None for the model of the run.
    """
    c = configuration_of(["experiment=smoke"])
    c = replace(c, data=replace(c.data, pass_rates=str(path)))
    header = Header(
        data={},
        model=model or c.model.path,
        samples=4,
        temperature=1.0,
        max_new_tokens=8,
        reward={},
        environment={},
        date="2026-11-28",
    )
    file = PassRateFile(path, header)
    file.add([PassRate(id="a", correct=1, samples=4, mean_tokens=250.0)])
    file.add([PassRate(id="b", correct=1, samples=4)])
    file.finish()
    screen = io.StringIO()
    progress = Progress(1, is_enabled=True, stream=screen)
    source = SimpleNamespace(train=(prompt("a"), prompt("b")))
    setup: Any = SimpleNamespace(
        configuration=c,
        progress=progress,
        run_data=SimpleNamespace(training_prompts=source),
    )
    queue = SimpleNamespace()
    stand_in: Any = SimpleNamespace(queue=queue)
    open_lengths(
        FeatureParts(
            setup=setup,
            dispatcher=stand_in,
            worker=stand_in,
            connections=stand_in,
            metrics=stand_in,
            checkpoints=stand_in,
            enter=lambda context: context,
        )
    )
    return queue, screen.getvalue()


def test_the_first_epoch_has_the_history_of_a_profile(tmp_path: Path) -> None:
    queue, log = open_with_profile(tmp_path / "rates.jsonl")
    assert queue.expected_tokens(prompt("a")) == queue.expected_tokens(prompt("b")) == 250
    assert log == ""


def test_lengths_of_another_model_are_not_used_and_that_is_said(tmp_path: Path) -> None:
    queue, log = open_with_profile(tmp_path / "rates.jsonl", "another_model")
    assert queue.expected_tokens(prompt("a")) == 0
    assert "data.pass_rates=" in log and "its lengths are of another_model" in log
