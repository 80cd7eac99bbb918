"""Engines that serve, and orders of rank 0, from reports, probes and the list of URLs."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from megatron_rl.config.schema import EngineSettings
from megatron_rl.contracts.commands import Sync
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.engines.fleet import NoEngineLeft
from megatron_rl.engines.node.node_reports import NodeOrders, ProcessState
from megatron_rl.engines.token_counter import TokenCounter
from megatron_rl.engines.url_list import UrlList
from tests.support.fleets import ScriptedFleet, engine_of

FIRST = "0 of node 0"
SECOND = "0 of node 1"


def serving_fleet(engines: tuple[int, ...] = (1, 1)) -> ScriptedFleet:
    """Return a fleet whose engines all serve version 0."""
    fleet = ScriptedFleet(engines)
    fleet.sync(0)
    return fleet


def urls_of(fleet: ScriptedFleet) -> list[str]:
    return sorted(fleet.queue.engines)


def test_no_engine_serves_before_its_first_sync() -> None:
    fleet = ScriptedFleet()
    fleet.update(can_join=False)
    assert urls_of(fleet) == []
    assert fleet.fleet.join_command() is None  # there are no weights to send yet
    fleet.sync(0)
    assert urls_of(fleet) == [engine_of(0).url, engine_of(1).url]
    assert fleet.lines == []  # nobody has to hear of the start


def test_an_engine_that_failed_serves_again_only_after_a_sync() -> None:
    fleet = serving_fleet()
    fleet.prober.silent_names.add(FIRST)
    fleet.fleet.handle_engine_failure(engine_of(0).url, "500: broken")
    fleet.update()
    assert urls_of(fleet) == [engine_of(1).url]
    assert fleet.lines == [f"engine {FIRST} ({engine_of(0).url}) serves no longer: 500: broken"]
    assert fleet.fleet.join_command() is None
    fleet.prober.silent_names.clear()
    for _ in range(3):
        fleet.update()
        assert urls_of(fleet) == [engine_of(1).url]
    assert fleet.fleet.join_command() == Sync(version=0, audit=True, only=(FIRST,))
    fleet.join()
    assert urls_of(fleet) == [engine_of(0).url, engine_of(1).url]
    assert fleet.lines[1:] == [f"engine {FIRST} ({engine_of(0).url}) serves"]
    assert fleet.fleet.join_command() is None


def test_a_failure_of_an_engine_that_does_not_serve_changes_nothing() -> None:
    fleet = serving_fleet()
    fleet.fleet.handle_engine_failure(engine_of(0).url, "500: broken")
    fleet.fleet.handle_engine_failure(engine_of(0).url, "500: broken again")
    fleet.fleet.handle_engine_failure("http://unknown:1", "500: broken")
    assert fleet.members[FIRST].reason == "500: broken"
    assert fleet.members[FIRST].num_failures == 1


def test_an_engine_that_was_started_again_joins_at_its_new_address() -> None:
    fleet = serving_fleet()
    fleet.report_engine(0, 1)
    fleet.update()
    assert urls_of(fleet) == [engine_of(1).url]
    fleet.update()
    fleet.join()
    assert urls_of(fleet) == [engine_of(0, epoch=1).url, engine_of(1).url]
    assert fleet.members[FIRST].reason == ""


def test_an_engine_whose_process_ended_serves_no_longer_before_it_is_started_again() -> None:
    fleet = serving_fleet()
    fleet.report_engine(0, 0, state=ProcessState.STARTING)
    fleet.update()
    assert urls_of(fleet) == [engine_of(1).url]
    fleet.report_engine(0, 1)
    for _ in range(2):
        fleet.update()
    fleet.join()
    assert urls_of(fleet) == [engine_of(0, epoch=1).url, engine_of(1).url]


def test_a_managed_engine_is_not_asked_while_its_node_waits_for_it() -> None:
    fleet = serving_fleet()
    fleet.report_engine(0, 1, state=ProcessState.STARTING)
    for _ in range(3):
        fleet.update()
    assert fleet.prober.probes == []
    fleet.report_engine(0, 1, state=ProcessState.RUNNING)
    fleet.update()
    assert fleet.prober.probes == [(FIRST, 1)]
    assert fleet.prober.forgotten_names[-1:] == [FIRST]


def test_an_earlier_report_does_not_bring_an_old_start_back() -> None:
    fleet = serving_fleet()
    fleet.report_engine(0, 2)
    fleet.update()
    fleet.report_engine(0, 1)
    fleet.update()
    assert fleet.members[FIRST].epoch == 2
    fleet.join()
    assert urls_of(fleet) == [engine_of(0, epoch=2).url, engine_of(1).url]


def test_an_answer_of_an_earlier_start_does_not_let_an_engine_join() -> None:
    fleet = serving_fleet()
    fleet.fleet.handle_engine_failure(engine_of(0).url, "500: broken")
    fleet.update()  # the probe of the first start answers after the engine was started again
    fleet.prober.silent_names.add(FIRST)
    fleet.report_engine(0, 1)
    fleet.update()
    assert fleet.fleet.join_command() is None
    assert fleet.states() == ["out", "serving"]


def test_a_probe_that_fails_is_written_once_and_again_when_its_reason_changes() -> None:
    fleet = serving_fleet()
    fleet.prober.problems[FIRST] = "engine.tp=1, and the server has 2"
    fleet.fleet.handle_engine_failure(engine_of(0).url, "500: broken")
    for _ in range(5):
        fleet.update()
    assert fleet.fleet.join_command() is None
    words = f"engine {FIRST} cannot serve: engine.tp=1, and the server has 2"
    assert fleet.lines.count(words) == 1
    fleet.prober.problems[FIRST] = "it does not answer"
    for _ in range(5):
        fleet.update()
    assert fleet.lines.count(f"engine {FIRST} cannot serve: it does not answer") == 1


def test_an_engine_that_is_given_up_leaves_the_run() -> None:
    fleet = serving_fleet()
    reason = "it was killed; recovery.restarts_per_hour=0 allows no further start"
    fleet.report_engine(0, 0, state=ProcessState.GIVEN_UP, reason=reason)
    for _ in range(3):
        fleet.update()
    assert fleet.states() == ["gone", "serving"]
    assert urls_of(fleet) == [engine_of(1).url]
    assert fleet.lines.count(f"engine {FIRST} is given up: {reason}") == 1
    assert fleet.prober.probes == []


def test_the_run_ends_when_every_engine_is_given_up() -> None:
    fleet = serving_fleet()
    for node in (0, 1):
        fleet.report_engine(node, 0, state=ProcessState.GIVEN_UP, reason=f"killed {node}")
    with pytest.raises(NoEngineLeft, match=r"every engine has left the run.*killed 0.*killed 1"):
        fleet.update()


def test_engines_that_are_out_wait_for_the_next_sync_of_all() -> None:
    """Between training and the sync, no engine can receive the current weights."""
    fleet = serving_fleet()
    fleet.fleet.handle_engine_failure(engine_of(0).url, "500: broken")
    fleet.update(can_join=False)
    fleet.update(can_join=False)
    assert fleet.states() == ["waiting", "serving"]
    fleet.sync(1)
    assert fleet.states() == ["serving", "serving"]
    assert urls_of(fleet) == [engine_of(0).url, engine_of(1).url]


def test_a_managed_engine_that_fails_again_and_again_is_started_again_once() -> None:
    fleet = serving_fleet()
    for n in range(3):
        fleet.update()
        assert fleet.board.orders == []
        fleet.fleet.handle_engine_failure(engine_of(0).url, f"logprobs_length {n}")
        if n < 2:
            fleet.update()
            fleet.update()
            fleet.join()
    for _ in range(3):
        fleet.update()
    ((node, orders),) = fleet.board.orders
    assert node == 0
    assert orders.restart_engines == {0: 0} and orders.restart_collector is None
    assert orders.reasons == {"engine 0": "it failed 3 times: logprobs_length 2"}
    fleet.report_engine(0, 1)
    fleet.update()
    fleet.update()
    fleet.join()
    assert fleet.members[FIRST].num_failures == 0
    assert len(fleet.board.orders) == 1


def test_a_managed_engine_that_stays_silent_is_started_again() -> None:
    fleet = serving_fleet()
    fleet.prober.silent_names.add(FIRST)
    fleet.fleet.handle_engine_failure(engine_of(0).url, "the engine answered no request")
    fleet.update()
    fleet.clock.now += 44
    fleet.update()
    assert fleet.board.orders == []
    fleet.clock.now += 2
    fleet.update()
    ((_, orders),) = fleet.board.orders
    assert orders.restart_engines == {0: 0}
    assert orders.reasons == {"engine 0": "it did not answer for 46 s"}


def test_a_start_that_takes_long_is_not_started_again() -> None:
    """Its node limits the time of a start."""
    fleet = serving_fleet()
    fleet.prober.silent_names.add(FIRST)
    fleet.report_engine(0, 1)
    for _ in range(5):
        fleet.update()
        fleet.clock.now += 100
    assert fleet.board.orders == []


def test_orders_about_the_engines_and_the_collector_of_a_node_stand_together() -> None:
    fleet = serving_fleet((2, 1))
    fleet.prober.silent_names |= {FIRST, "1 of node 0"}
    for index in range(2):
        fleet.fleet.handle_engine_failure(engine_of(0, index).url, "silent")
    fleet.update()
    fleet.fleet.handle_lost_collector(0, 3, "it was not heard")
    assert fleet.board.orders == [
        (0, NodeOrders(restart_collector=3, reasons={"collector": "it was not heard"}))
    ]
    fleet.clock.now += 60
    fleet.update()
    node, orders = fleet.board.orders[-1]
    assert (node, orders.restart_engines, orders.restart_collector) == (0, {0: 0, 1: 0}, 3)
    assert set(orders.reasons) == {"engine 0", "engine 1", "collector"}
    fleet.fleet.handle_lost_collector(0, 4, "again")
    _, orders = fleet.board.orders[-1]
    assert (orders.restart_engines, orders.restart_collector) == ({0: 0, 1: 0}, 4)
    assert orders.reasons["collector"] == "again"


def test_a_collector_that_ended_is_disconnected_by_its_report() -> None:
    fleet = serving_fleet()
    fleet.report_collector(1, 0, ProcessState.RUNNING, reason="")
    fleet.update()
    assert not any(call.startswith("disconnect") for call in fleet.queue.calls)
    fleet.report_collector(1, 1, reason="killed by signal 9")
    fleet.update()
    assert "disconnect 1 before 1: ended" in fleet.queue.calls


def test_a_collector_that_is_given_up_is_disconnected_too() -> None:
    fleet = serving_fleet()
    fleet.report_collector(1, 2, ProcessState.GIVEN_UP, reason="killed by signal 9")
    for _ in range(2):
        fleet.update()
    assert "disconnect 1 before 3: is given up" in fleet.queue.calls
    line = "the collector of node 1 is given up: killed by signal 9"
    assert fleet.lines.count(line) == 1


def test_the_run_ends_when_every_collector_is_given_up() -> None:
    fleet = serving_fleet()
    for node in (0, 1):
        fleet.report_collector(node, 0, ProcessState.GIVEN_UP, reason=f"killed {node}")
    fleet.queue.connected_nodes.clear()
    with pytest.raises(NoEngineLeft, match="every collector is given up: killed 0; killed 1"):
        fleet.update()


def fleet_without_engines() -> ScriptedFleet:
    fleet = serving_fleet((1,))
    fleet.prober.silent_names.add(FIRST)
    fleet.fleet.handle_engine_failure(engine_of(0).url, "500: broken")
    return fleet


def test_the_run_waits_for_an_engine_until_the_deadline() -> None:
    fleet = fleet_without_engines()
    fleet.update()
    assert fleet.lines[-1] == (
        f"no engine serves (engine {FIRST}: 500: broken). The run waits for 900 s"
    )
    fleet.clock.now += 900
    fleet.update()
    fleet.clock.now += 0.1
    with pytest.raises(NoEngineLeft, match=r"500: broken.*for longer than 900 s") as error:
        fleet.update()
    assert error.value.exit_code is ExitCode.ENGINE_FAILED


def test_an_engine_that_comes_back_ends_the_outage() -> None:
    fleet = fleet_without_engines()
    fleet.update()
    fleet.clock.now += 800
    fleet.prober.silent_names.clear()
    fleet.update()
    fleet.update()
    fleet.join()
    fleet.update()
    fleet.prober.silent_names.add(FIRST)
    fleet.fleet.handle_engine_failure(engine_of(0).url, "500: broken")
    for _ in range(3):
        fleet.update()
        fleet.clock.now += 290


def test_time_in_which_no_engine_can_join_does_not_count_as_an_outage() -> None:
    """The trainer's weights have changed, and the next sync comes after the step."""
    fleet = fleet_without_engines()
    for _ in range(5):
        fleet.update(can_join=False)
        fleet.clock.now += 800
    fleet.update()
    fleet.clock.now += 890
    fleet.update()
    fleet.update(can_join=False)
    fleet.clock.now += 890
    fleet.update()
    fleet.clock.now += 901
    with pytest.raises(NoEngineLeft):
        fleet.update()


def test_a_run_without_collectors_waits_and_ends_at_the_deadline() -> None:
    fleet = serving_fleet()
    fleet.queue.connected_nodes.clear()
    fleet.update()
    assert fleet.lines == ["no collector is connected. The run waits for 900 s"]
    fleet.clock.now += 600
    fleet.queue.connected_nodes.append(1)
    fleet.update()
    fleet.queue.connected_nodes.clear()
    fleet.clock.now += 600
    fleet.update()
    fleet.clock.now += 901
    with pytest.raises(NoEngineLeft, match="no collector is connected, for longer than"):
        fleet.update()


def test_engines_that_hold_their_own_weights_serve_at_once() -> None:
    """An evaluation of a checkpoint sends them none."""
    fleet = ScriptedFleet()
    fleet.fleet.admit_without_weights()
    assert urls_of(fleet) == [engine_of(0).url, engine_of(1).url]
    fleet.fleet.handle_engine_failure(engine_of(0).url, "500: broken")
    fleet.update()
    assert urls_of(fleet) == [engine_of(1).url]
    fleet.update()
    fleet.fleet.admit_without_weights()
    assert urls_of(fleet) == [engine_of(0).url, engine_of(1).url]


def listed_fleet(path: Path, *urls: str) -> ScriptedFleet:
    """Return a fleet of two nodes whose external engines a file lists."""
    write_urls(path, *urls)
    settings = EngineSettings(urls=str(path))
    url_list = UrlList(settings, lambda line: fleet.lines.append(line))
    fleet = ScriptedFleet((0, 0), urls=url_list)
    for n, url in enumerate(url_list.read_first()):
        fleet.members.add(url, url_list.engine(url, n % 2))
        fleet.members.answer(url, 0)
    fleet.sync(0)
    return fleet


def write_urls(path: Path, *urls: str) -> None:
    path.write_text("\n".join(urls))


def test_engines_are_added_and_removed_with_their_lines_in_the_list(tmp_path: Path) -> None:
    path = tmp_path / "urls"
    first, second, third = (f"http://127.0.0.1:{port}" for port in (1, 2, 3))
    fleet = listed_fleet(path, first)
    fleet.update()
    write_urls(path, first, second)
    fleet.update()
    assert urls_of(fleet) == [first]
    assert f"engine {second} was added in {path}: it serves once it is synced" in fleet.lines
    assert fleet.members[second].engine.node == 1  # it has no engine yet
    fleet.update()
    fleet.join()
    assert urls_of(fleet) == [first, second]
    write_urls(path, second, third)
    fleet.update()
    assert urls_of(fleet) == [second]
    assert f"engine {first} was removed from {path}" in fleet.lines
    assert fleet.members[third].engine.node == 0
    write_urls(path, first, second)
    fleet.update()
    fleet.update()
    fleet.join()
    assert urls_of(fleet) == [first, second]
    assert fleet.members[first].epoch == 1
    assert [member.state.value for member in fleet.members] == ["serving", "serving", "gone"]


def test_an_engine_of_the_list_that_does_not_fit_never_serves(tmp_path: Path) -> None:
    path = tmp_path / "urls"
    first, second = (f"http://127.0.0.1:{port}" for port in (1, 2))
    fleet = listed_fleet(path, first)
    fleet.prober.problems[second] = "engine.dtype=float32: the server has bfloat16"
    write_urls(path, first, second)
    for _ in range(4):
        fleet.update()
    assert fleet.fleet.join_command() is None
    assert urls_of(fleet) == [first]
    assert sum("the server has bfloat16" in line for line in fleet.lines) == 1


@pytest.mark.parametrize("takes_weights", [True, False])
def test_an_external_engine_that_always_fails_joins_a_few_times_an_hour(
    takes_weights: bool, tmp_path: Path
) -> None:
    """Each join holds up all ranks. takes_weights: it fails once it serves."""
    sick, healthy = (f"http://127.0.0.1:{port}" for port in (1, 2))
    fleet = listed_fleet(tmp_path / "urls", sick, healthy)
    fleet.fleet.handle_engine_failure(sick, "503: broken")
    joins = []
    while fleet.clock.now < 3 * 3600:
        fleet.update()
        if fleet.fleet.join_command() is not None:
            joins.append(fleet.clock.now)
            if takes_weights:
                fleet.join()
            fleet.members.fail(sick, 0, "its data path is dead")
        fleet.clock.now += 10
    for start in range(0, 3 * 3600, 600):
        assert sum(start <= time < start + 3600 for time in joins) <= 6
    assert len(joins) == 18
    (line,) = [line for line in fleet.lines if "has joined 6 times" in line][-1:]
    assert "its data path is dead" in line and "recovery.restarts_per_hour=6" in line
    assert sum("has joined" in line for line in fleet.lines) <= 3


def test_the_only_engine_joins_as_often_as_it_answers(tmp_path: Path) -> None:
    only = "http://127.0.0.1:1"
    fleet = listed_fleet(tmp_path / "urls", only)
    for _ in range(20):
        fleet.members.fail(only, 0, "503: broken")
        fleet.update()
        fleet.update()
        fleet.join()
    assert urls_of(fleet) == [only]


def test_an_engine_that_is_added_again_may_join_at_once(tmp_path: Path) -> None:
    path = tmp_path / "urls"
    sick, healthy = (f"http://127.0.0.1:{port}" for port in (1, 2))
    fleet = listed_fleet(path, sick, healthy)
    for _ in range(7):
        fleet.members.fail(sick, 0, "503: broken")
        fleet.update()
        fleet.update()
        if fleet.fleet.join_command() is not None:
            fleet.join()
    assert urls_of(fleet) == [healthy]
    write_urls(path, healthy)
    fleet.update()
    write_urls(path, healthy, sick)
    fleet.update()
    fleet.update()
    fleet.join()
    assert urls_of(fleet) == [sick, healthy]


def test_a_list_that_becomes_unusable_changes_no_engine(tmp_path: Path) -> None:
    path = tmp_path / "urls"
    first = "http://127.0.0.1:1"
    fleet = listed_fleet(path, first)
    for text in ("http://8.8.8.8:1", "http://127.0.0.1"):
        path.write_text(text)
        for _ in range(3):
            fleet.update()
    path.unlink()
    for _ in range(3):
        fleet.update()
    assert urls_of(fleet) == [first]
    assert [line.startswith("warning: engine.urls=") for line in fleet.lines] == [True] * 3


def test_the_list_may_be_empty_for_a_while(tmp_path: Path) -> None:
    """Somebody who exchanges all engines removes the last one before the next one is added."""
    path = tmp_path / "urls"
    first = "http://127.0.0.1:1"
    fleet = listed_fleet(path, first)
    write_urls(path)
    fleet.update()
    assert urls_of(fleet) == []
    write_urls(path, first)
    fleet.update()
    fleet.update()
    fleet.join()
    assert urls_of(fleet) == [first]


class Counter:
    """A token counter that notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def set_engines(self, engines: list[object], *, have_sampled: bool) -> None:
        self.calls.append(f"{len(engines)} after sampling" if have_sampled else len(engines))

    def restart(self) -> None:
        self.calls.append("restart")


def test_tokens_are_counted_on_the_engines_that_serve() -> None:
    counter = Counter()
    token_counter: TokenCounter = counter  # type: ignore[assignment]
    fleet = ScriptedFleet(token_counter=token_counter)
    fleet.sync(0)
    fleet.report_engine(0, 1)
    fleet.update()
    fleet.update()
    fleet.join()
    fleet.fleet.handle_lost_collector(0, 0, "killed")
    assert counter.calls == [2, "1 after sampling", "2 after sampling", "restart"]


def test_tokens_are_counted_on_the_others_after_an_engine_has_left_for_good() -> None:
    counter = Counter()
    token_counter: TokenCounter = counter  # type: ignore[assignment]
    fleet = ScriptedFleet(token_counter=token_counter)
    fleet.sync(0)
    fleet.report_engine(0, 0, state=ProcessState.GIVEN_UP)
    fleet.update()
    assert counter.calls == [2, "1 after sampling"]


def test_tokens_are_counted_on_the_others_as_soon_as_an_engine_ends() -> None:
    """The counter of its next server begins with a warm-up's tokens, and may not go backwards."""
    counter = Counter()
    token_counter: TokenCounter = counter  # type: ignore[assignment]
    fleet = ScriptedFleet(token_counter=token_counter)
    fleet.sync(0)
    fleet.report_engine(0, 0, state=ProcessState.STARTING)
    fleet.update()
    assert counter.calls == [2, "1 after sampling"]
    fleet.update()
    assert counter.calls == [2, "1 after sampling"]


def test_events_of_other_nodes_are_printed_once() -> None:
    """Node 0 prints its own ones at once."""
    fleet = serving_fleet()
    for events in (("a",), ("a",), ("a", "b", "c")):
        for node in (0, 1):
            fleet.report_engine(node, 0)
            report = fleet.board.reports[node]
            fleet.board.reports[node] = msgspec.structs.replace(
                report, events=events, num_events=len(events) + 7
            )
        fleet.update()
    assert fleet.lines == ["a", "b", "c"]
