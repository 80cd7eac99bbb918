"""Random histories of a run whose engines and collectors come and go.

No engine serves that was not audited, every group is delivered once, and everything goes on once
the faults end.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from megatron_rl.contracts.commands import Sync
from megatron_rl.engines.fleet import Fleet, NoEngineLeft
from megatron_rl.rollouts.hub import CollectorHub
from megatron_rl.rollouts.queue import CollectorFailed, RolloutQueue
from sglang_bridge.errors import WeightMismatch
from tests.support.simulated_run import SimulatedCollector, SimulatedEngine, SimulatedRun

_NUMBER = st.integers(0, 7)
_COUNT = st.integers(1, 3)


class Histories(RuleBasedStateMachine):
    """A run, and what may happen to it."""

    def __init__(self) -> None:
        super().__init__()
        self.simulated_run: SimulatedRun | None = None
        self.has_ended = False

    @property
    def world(self) -> SimulatedRun:
        assert self.simulated_run is not None
        return self.simulated_run

    @property
    def runs(self) -> bool:
        return self.simulated_run is not None and not self.has_ended

    @initialize(
        layout=st.sampled_from([(1, 1), (2, 1), (2,), (0, 0)]),
        audit_every=st.sampled_from([1, 2]),
        reuses_ports=st.booleans(),
    )
    def begin(self, layout: tuple[int, ...], audit_every: int, reuses_ports: bool) -> None:
        self.simulated_run = SimulatedRun(
            layout,
            num_listed=0 if any(layout) else 3,
            audit_every=audit_every,
            reuses_ports=reuses_ports,
        )

    # Rank 0

    @precondition(lambda self: self.runs)
    @rule(count=_COUNT, evaluation=st.booleans())
    def submit(self, count: int, evaluation: bool) -> None:
        self.world.submit(count, evaluation=evaluation)

    @precondition(lambda self: self.runs)
    @rule(seconds=st.sampled_from([1, 5, 15, 50]))
    def collect(self, seconds: int) -> None:
        self._try(lambda: self.world.collect(seconds))

    @precondition(lambda self: self.runs)
    @rule()
    def recover(self) -> None:
        self._try(self.world.recover)

    @precondition(lambda self: self.runs)
    @rule(count=_COUNT)
    def train(self, count: int) -> None:
        self.world.train(count)

    @precondition(lambda self: self.runs and not self.world.pending_groups)
    @rule()
    def sync(self) -> None:
        self._try(self.world.sync)

    # Engines

    @precondition(lambda self: self.runs)
    @rule(number=_NUMBER)
    def kill_engine(self, number: int) -> None:
        self._engine(number).is_alive = False

    @precondition(lambda self: self.runs)
    @rule(number=_NUMBER, is_hung=st.booleans())
    def hang_engine(self, number: int, is_hung: bool) -> None:
        self._engine(number).is_hung = is_hung

    @precondition(lambda self: self.runs)
    @rule(number=_NUMBER, refuses=st.booleans())
    def refuse_weights(self, number: int, refuses: bool) -> None:
        self._engine(number).refuses = refuses

    @precondition(lambda self: self.runs)
    @rule(number=_NUMBER, spoils=st.booleans())
    def spoil_weights(self, number: int, spoils: bool) -> None:
        self._engine(number).spoils = spoils

    @precondition(lambda self: self.runs and self.world.list.urls)
    @rule(number=_NUMBER)
    def restart_unnoticed(self, number: int) -> None:
        self.world.restart_unnoticed(self._engine(number).url)

    @precondition(lambda self: self.runs and self.world.list.urls)
    @rule(number=_NUMBER, is_new=st.booleans())
    def change_list(self, number: int, is_new: bool) -> None:
        urls = self.world.list.urls
        known_urls = [url for url in self.world.engines if url not in urls]
        if number < 3 and len(urls) > 1:
            self.world.list.urls = [url for url in urls if url != urls[number % len(urls)]]
        elif is_new or not known_urls:
            self.world.list.urls = [*urls, self.world.start_engine(0).url]
        else:
            self.world.list.urls = [*urls, known_urls[number % len(known_urls)]]

    # Collectors

    @precondition(lambda self: self.runs)
    @rule(number=_NUMBER)
    def kill_collector(self, number: int) -> None:
        self._collector(number).end()

    @precondition(lambda self: self.runs)
    @rule(number=_NUMBER, is_hung=st.booleans())
    def hang_collector(self, number: int, is_hung: bool) -> None:
        self._collector(number).is_hung = is_hung

    @precondition(lambda self: self.runs)
    @rule(number=_NUMBER, count=_COUNT)
    def answer(self, number: int, count: int) -> None:
        """A collector works, also one that rank 0 has lost."""
        self._every_collector(number).step(count)

    @precondition(lambda self: self.runs)
    @rule(number=_NUMBER, count=_COUNT)
    def answer_late(self, number: int, count: int) -> None:
        """A collector that hung sends its results before it handles what has arrived since."""
        self._every_collector(number).answer(count)

    @precondition(lambda self: self.runs)
    @rule(number=_NUMBER)
    def send_junk(self, number: int) -> None:
        self._every_collector(number).send_raw(b"junk")

    # Nodes

    @precondition(lambda self: self.runs)
    @rule(number=_NUMBER)
    def look_after_node(self, number: int) -> None:
        self.world.nodes[number % len(self.world.nodes)].step()

    @rule(seconds=st.sampled_from([1, 30, 100]))
    def pass_time(self, seconds: int) -> None:
        self.world.clock.now += seconds

    @invariant()
    def nothing_unaudited_serves(self) -> None:
        if self.runs:
            self.world.check()

    def teardown(self) -> None:
        try:
            if self.runs:
                self._try(self.world.finish)
        finally:
            if self.simulated_run is not None:
                self.simulated_run.close()

    def _try(self, action: Callable[[], object]) -> None:
        """Do something that may end the run, if it may."""
        members = self.world.members
        try:
            action()
        except NoEngineLeft:
            connected_nodes = self.world.queue.connected_nodes
            assert not members.serving or not connected_nodes
            self.has_ended = True
        except WeightMismatch:
            assert not members.serving
            self.has_ended = True

    def _engine(self, number: int) -> SimulatedEngine:
        engines = list(self.world.engines.values())
        return engines[-1 - number % len(engines)]

    def _collector(self, number: int) -> SimulatedCollector:
        collectors = [node.collector.process for node in self.world.nodes]
        return collectors[number % len(collectors)]

    def _every_collector(self, number: int) -> SimulatedCollector:
        """Return a collector that lives, if there is one."""
        collectors = list(self.world.router.collectors.values())
        return collectors[number % len(collectors)] if collectors else self._collector(number)


def run_histories(count: int, *, phases: tuple[Phase, ...] = tuple(Phase)) -> None:
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=count,
            stateful_step_count=30,
            deadline=None,
            phases=[phase for phase in phases if phase is not Phase.explain],
            suppress_health_check=list(HealthCheck),
            database=None,
        ),
    )


def test_nothing_is_lost_or_doubled_in_random_histories() -> None:
    run_histories(200)


@pytest.mark.nightly
def test_nothing_is_lost_or_doubled_in_ten_thousand_histories() -> None:
    run_histories(10_000)


def test_requests_of_a_node_whose_engines_have_left_go_to_another_node() -> None:
    """The engines of the other node serve, so the run does not count as without engines."""
    world = SimulatedRun((1, 1))
    try:
        world.submit(2)
        world.nodes[0].engines[0].num_restarts = 100  # as often as it may
        world.nodes[0].engines[0].process.is_alive = False
        world.heal()
        world.collect(400)
        assert not world.pending_groups, world.describe()
    finally:
        world.close()


def test_engines_join_again_although_no_step_waits_for_rollouts() -> None:
    """Rollouts that are sampled ahead are there at once, so nothing else looks after engines."""
    world = SimulatedRun((2,))
    try:
        engine = world.nodes[0].engines[0].process
        engine.is_alive = False
        for _ in range(40):
            world.clock.now += 2
            world.nodes[0].step()
            world.sync()
        assert len(world.members.serving) == 2, world.describe()
    finally:
        world.close()


def admit_without_an_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines that answer serve, without the weights."""

    def join_command(self: Fleet) -> Sync | None:
        for member in self.members.waiting:
            if self.members.version is not None:
                self.members.admit(member.name, member.epoch, self.members.version)
        return None

    monkeypatch.setattr(Fleet, "join_command", join_command)


def admit_in_an_update_without_an_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send joining engines the weights and do not compare them."""
    original = Fleet.join_command

    def join_command(self: Fleet) -> Sync | None:
        command = original(self)
        return None if command is None else Sync(command.version, only=command.only)

    monkeypatch.setattr(Fleet, "join_command", join_command)


def deliver_late_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept what collectors send that are gone."""
    original = CollectorHub._is_current

    def is_current(self: CollectorHub, node: int, epoch: int) -> bool:
        return original(self, node, epoch) or epoch in range(self._gone_epochs.get(node, -1) + 1)

    monkeypatch.setattr(CollectorHub, "_is_current", is_current)


def forget_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the requests of a lost collector where they are."""
    monkeypatch.setattr(RolloutQueue, "_assign_waiting", lambda self: None)


def send_before_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send messages to a collector whose connection was not handled yet."""
    monkeypatch.setattr(RolloutQueue, "_is_configured", lambda self, node: node in self._epochs)


FAULTS = [
    admit_without_an_audit,
    admit_in_an_update_without_an_audit,
    deliver_late_groups,
    forget_requests,
    send_before_the_configuration,
]


@pytest.mark.nightly
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_histories_find_a_fault(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, CollectorFailed)):
        run_histories(2000, phases=(Phase.generate,))
