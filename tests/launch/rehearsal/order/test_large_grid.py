"""512 ranks of a published model, rehearsed once, with faults in what one rank recorded."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from launch.rehearsal.order.check import OrderResult, check_order
from launch.rehearsal.order.grid import require_equal_groups
from launch.rehearsal.order.simulation import OrderFault
from launch.rehearsal.order.trace import RECEIVE, SEND, Operation, Trace
from tests.support.policies import TWO_DIGIT_ADDITION

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[4]
RANKS = 512
CULPRIT = 300  # a rank in the middle of its groups, on a stage in the middle
SETTINGS = (
    "model=qwen3_235b_a22b",
    "model.init=random",
    "parallel=tp4_pp8_ep16",
    "engine=external",
    "engine.urls=[http://10.0.0.7:30000]",
    "engine.tp=4",
)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Trace]:
    """One rank of each class, with one layer on each stage."""
    folder = tmp_path_factory.mktemp("grid")
    command = [sys.executable, "-m", "launch.rehearsal.order", f"ranks={RANKS}", *SETTINGS]
    options = ("layers_per_stage=1", f"model.path={published_model(folder)}", f"traces={folder}")
    result = subprocess.run(
        [*command, *options],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"operations of {RANKS} ranks" in result.stdout
    files = sorted(folder.glob("rank-*.trace"))
    return [msgspec.msgpack.decode(file.read_bytes(), type=Trace) for file in files]


def published_model(folder: Path) -> Path:
    """The configuration of Qwen3-235B-A22B, and the tokenizer of a tiny model."""
    target = folder / "published"
    target.mkdir()
    for file in Path(TWO_DIGIT_ADDITION).iterdir():
        if file.name.startswith("tokenizer"):
            (target / file.name).write_bytes(file.read_bytes())
    source = ROOT / "tests/support/published/qwen3_235b_a22b/config.json"
    config = json.loads(source.read_text())
    (target / "config.json").write_text(json.dumps(config | {"eos_token_id": 1}))
    return target


class FaultyPhase:
    """One phase of all ranks, with changes in what the culprit recorded of it."""

    def __init__(self, traces: list[Trace], phase: str) -> None:
        self._others = [only_phase(trace, phase) for trace in traces]
        grid = require_equal_groups(self._others)
        of_class = {grid.class_of(trace.rank): trace for trace in self._others}
        representative = msgspec.msgpack.encode(of_class[grid.class_of(CULPRIT)])
        copy = msgspec.msgpack.decode(representative, type=Trace)
        self.trace = msgspec.structs.replace(copy, rank=CULPRIT)
        self._phase = self.trace.phases[0]

    @property
    def operations(self) -> list[Operation]:
        """The operations of the phase, in order."""
        return [self.trace.operations[event] for event in self._phase.events if event >= 0]

    def find(self, condition: Callable[[Operation, Operation], bool], which: int = 0) -> int:
        """The place of two adjacent operations that meet a condition: the first, or -1 the last."""
        pairs = enumerate(itertools.pairwise(self.operations))
        return [place for place, pair in pairs if condition(*pair)][which]

    def swap(self, place: int) -> None:
        """Swap an operation with the next one. The waits stay where they are."""
        first = self._position(place)
        second = self._position(place + 1)
        events = self._phase.events
        events[first], events[second] = events[second], events[first]

    def replace(self, place: int, **changes: int | str) -> None:
        """Change an operation."""
        operation = msgspec.structs.replace(self.operations[place], **changes)
        self.trace.operations.append(operation)
        self._phase.events[self._position(place)] = len(self.trace.operations) - 1

    def leave_out(self, place: int) -> None:
        """Drop an operation, and the wait for it."""
        number = place + 1
        events = self._phase.events
        del events[self._position(place)]
        other_events = [event for event in events if event != -number]
        self._phase.events = [event + 1 if event < -number else event for event in other_events]

    def check(self) -> OrderResult:
        """Check all ranks. The other traces stand for their classes."""
        return check_order([self.trace, *self._others])

    def fault(self) -> str:
        """The fault that the check finds."""
        with pytest.raises(OrderFault) as error:
            self.check()
        return str(error.value)

    def _position(self, place: int) -> int:
        return [index for index, event in enumerate(self._phase.events) if event >= 0][place]


def only_phase(trace: Trace, name: str) -> Trace:
    """A trace without its other phases. A million operations are the creation of groups."""
    phases = [phase for phase in trace.phases if phase.name == name]
    return msgspec.structs.replace(trace, phases=phases)


def are_collectives_of_two_groups(first: Operation, second: Operation) -> bool:
    return not first.is_message and not second.is_message and first.group != second.group


def are_of_two_dtypes(first: Operation, second: Operation) -> bool:
    is_same_group = first.group == second.group
    return not first.is_message and is_same_group and first.dtype != second.dtype


def are_collective_and_message(first: Operation, second: Operation) -> bool:
    return not first.is_message and second.name in (SEND, RECEIVE)


def test_the_order_of_512_ranks_has_no_fault(traces: list[Trace]) -> None:
    result = check_order(traces)
    assert len(traces) == 16
    assert result.operations > 1_000_000
    assert result.groups > 1000


@pytest.mark.parametrize("which", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("phase", ["save of the weights", "step", "step with NaN", "checkpoint"])
@pytest.mark.parametrize("condition", [are_collectives_of_two_groups, are_of_two_dtypes])
def test_a_swap_on_one_rank_of_512_is_named(
    traces: list[Trace],
    condition: Callable[[Operation, Operation], bool],
    phase: str,
    which: int,
) -> None:
    faulty = FaultyPhase(traces, phase)
    place = faulty.find(condition, which)
    faulty.swap(place)
    assert_names_culprit(faulty.fault(), phase, faulty.operations[place])


@pytest.mark.parametrize("phase", ["step", "step with NaN"])
def test_a_message_before_a_collective_on_one_rank_of_512_is_named(
    traces: list[Trace], phase: str
) -> None:
    faulty = FaultyPhase(traces, phase)
    place = faulty.find(are_collective_and_message)
    faulty.swap(place)
    assert_names_culprit(faulty.fault(), phase, faulty.operations[place])


def test_a_swap_that_makes_no_rank_wait_is_no_fault(traces: list[Trace]) -> None:
    """The other stage waits for the last message already."""
    faulty = FaultyPhase(traces, "step")
    faulty.swap(faulty.find(are_collective_and_message, -1))
    assert faulty.check().operations > 100_000


def test_a_collective_that_one_rank_of_512_leaves_out_is_named(traces: list[Trace]) -> None:
    faulty = FaultyPhase(traces, "step")
    faulty.leave_out(faulty.find(are_collectives_of_two_groups))
    assert f"rank {CULPRIT}, phase 'step'" in faulty.fault()


def test_another_dtype_on_one_rank_of_512_is_named(traces: list[Trace]) -> None:
    faulty = FaultyPhase(traces, "save of the weights")
    place = faulty.find(are_collectives_of_two_groups)
    faulty.replace(place, dtype="float16")
    assert_names_culprit(faulty.fault(), "save of the weights", faulty.operations[place])


def assert_names_culprit(fault: str, phase: str, operation: Operation) -> None:
    """Require a fault to name the culprit, with the operation that it began out of order."""
    words = f"rank {CULPRIT}, phase {phase!r}"
    assert words in fault
    assert operation.name.strip("_") in fault.partition(words)[2].partition(" in ")[0]
