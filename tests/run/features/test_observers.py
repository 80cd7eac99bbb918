"""All features of a run as one observer: their order, their states and their contexts."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from megatron_rl.contracts.commands import Command, Poll, Sync, Train
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.records.progress import Progress
from megatron_rl.records.timeline.spans import TIMELINE_FILE, Timeline, read_timeline
from megatron_rl.run.features.observer import Observer, Observers
from megatron_rl.run.features.timeline.run_timeline import RunTimeline
from tests.support.checkpoint_managers import FakeRanks, make_manager
from tests.support.jobs import ROOT
from tests.support.leaders import ScriptedParts, lead

PLAN = StepPlan(step=1, rollouts=(), advantages=(), optimizer_steps=())


class Counter(Observer):
    """Counts steps. name: of its state. calls: notes what it is asked."""

    def __init__(self, name: str, calls: list[str] | None = None) -> None:
        self.name = name
        self.count = 0
        self.calls = [] if calls is None else calls

    @contextlib.contextmanager
    def around(self, command: Command) -> Iterator[None]:
        self.calls.append(f"enter {self.name}")
        yield
        self.calls.append(f"leave {self.name}")

    def prepare(self, command: Train) -> Train:
        return msgspec.structs.replace(command, version=(command.version or 0) + 1)

    def after_step(self, values: dict[str, float]) -> None:
        self.count += 1
        values[f"count/{self.name}"] = float(self.count)

    def ending_key(self, step: int) -> str:
        return self.name if step >= 3 else ""

    def last_step(self, step: int) -> int:
        return step + len(self.name)

    def state(self) -> dict[str, Any]:
        return {"count": self.count} if self.count else {}

    def restore(self, state: dict[str, Any]) -> None:
        self.count = state.get("count", 0)


def test_each_feature_goes_on_with_the_state_under_its_name() -> None:
    counter = Counter("a")
    counter.after_step({})
    state = Observers([counter, Counter("b")]).state()
    assert state == {"a": {"count": 1}}, "an empty state is not saved"
    counters = [Counter(name) for name in ("c", "b", "a")]
    counters[1].count = 9
    Observers(counters).restore(state | {"deleted": {"x": 1}})
    assert [counter.count for counter in counters] == [0, 0, 1]


class CountState(msgspec.Struct):
    count: int = 0


class StrictCounter(Counter):
    """A counter that converts its state, as features do."""

    def restore(self, state: dict[str, Any]) -> None:
        self.count = msgspec.convert(state, CountState).count


def test_a_damaged_state_of_a_feature_names_the_feature_and_the_remedy() -> None:
    observers = Observers([Counter("a"), StrictCounter("b")])
    with pytest.raises(Failure, match=r"features\.b: .*`int`.*run\.resume=PATH") as caught:
        observers.restore({"b": {"count": "many"}})
    assert caught.value.exit_code is ExitCode.BAD_DATA


def test_a_checkpoint_holds_the_states_of_features(tmp_path: Path) -> None:
    ranks = FakeRanks()
    manager = make_manager(ranks, checkpoint_every=1)
    lead(ScriptedParts(), tmp_path, steps=2, checkpoints=manager, observers=[Counter("a")])
    states = [state.position.features["a"] for state in ranks.states]
    assert states == [{"count": 1}, {"count": 2}]
    parts = ScriptedParts()
    state = ranks.states[0].position
    lead(parts, tmp_path, steps=2, resume_state=state, observers=[Counter("a")])
    assert parts.metrics[2]["count/a"] == 2.0


def test_a_feature_may_end_the_run(tmp_path: Path) -> None:
    parts = lead(ScriptedParts(), tmp_path, steps=9, observers=[Counter("a")])
    assert max(parts.metrics) == 3 and parts.calls[-1] == "stop"


def test_answers_of_several_features_are_combined() -> None:
    observers = Observers([Counter("long name"), Counter("b")])
    assert observers.prepare(Train(PLAN)).version == 2
    assert observers.last_step(5) == 6
    assert [observers.ending_key(step) for step in (2, 3)] == ["", "long name"]
    assert (Observers().last_step(5) > 10**6, Observers().ending_key(5)) == (True, "")


def test_a_command_runs_within_the_contexts_of_all_features() -> None:
    calls: list[str] = []
    with Observers([Counter("a", calls), Counter("b", calls)]).around(Poll()):
        calls.append("run")
    assert calls == ["enter a", "enter b", "run", "leave b", "leave a"]


def test_the_timeline_has_each_command_that_ended_well(tmp_path: Path) -> None:
    file = tmp_path / TIMELINE_FILE
    with Timeline(file, print) as timeline:
        observers = Observers([RunTimeline(timeline)])
        with observers.around(Sync(version=3)):
            pass
        with contextlib.suppress(OSError), observers.around(Sync(version=4)):
            raise OSError
    assert [span.name for span in read_timeline(file)] == ["sync"]


def test_the_feature_in_the_documentation_works(tmp_path: Path) -> None:
    blocks = (ROOT / "CONTRIBUTING.md").read_text().split("```python\n")
    (block,) = [block for block in blocks if "open_gradient_alarm" in block.partition("```")[0]]
    names: dict[str, Any] = {}
    exec(compile(block.partition("```")[0], "CONTRIBUTING.md", "exec"), names)
    screen = io.StringIO()

    def open_feature() -> Observer:
        setup = SimpleNamespace(progress=Progress(9, is_enabled=True, stream=screen))
        observer: Observer = names["open_gradient_alarm"](
            SimpleNamespace(setup=setup, checkpoints=object())
        )
        return observer

    ranks = FakeRanks()
    manager = make_manager(ranks, checkpoint_every=1)
    parts = ScriptedParts(extra_metrics={"train/grad_norm": 2.0})
    lead(parts, tmp_path, steps=1, checkpoints=manager, observers=[open_feature()])
    assert parts.metrics[1]["train/largest_grad_norm"] == 2.0 and not screen.getvalue()
    parts = ScriptedParts(extra_metrics={"train/grad_norm": 2.5})
    state = ranks.states[0].position
    lead(parts, tmp_path, steps=3, resume_state=state, observers=[open_feature()])
    assert screen.getvalue().count("warning: train/grad_norm 2.5 is the largest so far") == 1
