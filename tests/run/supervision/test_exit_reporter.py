"""Every end of a run is reported by one rank, with the exit code of its cause."""

import json
import signal
import threading
import time
from pathlib import Path

import pytest

from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.records.exit_record import read_exit_record, write_exit_record
from megatron_rl.run.supervision.exit_reporter import ExitReporter
from megatron_rl.run.supervision.local_ranks import LocalRanks
from tests.support.local_ranks import FakeLocalRanks, torchrun_environment

Capture = pytest.CaptureFixture[str]


def make_reporter(
    rank: int = 0, directory: Path | None = None, *, patience: float = 0.3, **options: object
) -> ExitReporter:
    """patience: choose more when another rank is going to report."""
    ranks = FakeLocalRanks(rank, **options)  # type: ignore[arg-type]
    reporter = ExitReporter(ranks, patience_seconds=patience)
    reporter.directory = directory
    return reporter


def recorded_code(directory: Path) -> int | None:
    record = read_exit_record(directory)
    return None if record is None else record.code


def test_a_cause_is_printed_recorded_and_given_to_torchrun(tmp_path: Path, capsys: Capture) -> None:
    torchrun_environment(0, 2, tmp_path)
    reporter = make_reporter(0, tmp_path, folder=tmp_path)
    reporter.report_cause(ExitCode.ENGINE_FAILED, "engine http://e ended by itself")
    assert (reporter.exit_code, reporter.has_reported) == (4, True)
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines == ["engine http://e ended by itself", "(exit code 4: engine_failed)"]
    record = read_exit_record(tmp_path)
    assert record is not None
    assert (record.code, record.reason) == (4, lines[0])
    error = json.loads((tmp_path / "0/error.json").read_text())
    assert error["message"]["message"] == lines[0]


def test_the_first_cause_stays(tmp_path: Path, capsys: Capture) -> None:
    reporter = make_reporter(0, tmp_path)
    reporter.report_cause(4, "first")
    reporter.report_cause(5, "second")
    reporter.report_signal(signal.SIGTERM)
    reporter.report_success()
    assert reporter.exit_code == 4
    assert "second" not in capsys.readouterr().err


def test_an_unexpected_error_has_its_traceback_before_the_reason(
    tmp_path: Path, capsys: Capture
) -> None:
    trace = "Traceback ...\nValueError: bug\n"
    make_reporter(0, tmp_path).report_cause(1, "ValueError: bug", trace)
    assert capsys.readouterr().err.splitlines() == [
        "",
        *trace.splitlines(),
        "",
        "ValueError: bug",
        "(exit code 1: unexpected error: please report it)",
    ]


def test_a_log_is_recorded_beside_the_reason_and_its_end_printed_before_it(
    tmp_path: Path, capsys: Capture
) -> None:
    log_tail = "\n".join(f"line {number}" for number in range(30))
    reason = "the collector of node 0 ended (SIGKILL); see logs/collector-0.log"
    make_reporter(0, tmp_path).report_cause(4, reason, log_tail=log_tail)
    record = read_exit_record(tmp_path)
    assert record is not None
    assert (record.reason, record.log_tail) == (reason, log_tail)
    assert capsys.readouterr().err.splitlines() == [
        "",
        *(f"  line {number}" for number in range(20, 30)),
        "",
        reason,
        "(exit code 4: engine_failed)",
    ]


def test_the_same_cause_on_every_rank_is_reported_once(tmp_path: Path, capsys: Capture) -> None:
    reporters = [make_reporter(rank, tmp_path, count=4) for rank in range(4)]
    threads = [
        threading.Thread(target=reporter.report_cause, args=(3, "model.path='x': cut"))
        for reporter in reporters
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(reporter.exit_code or 0 for reporter in reporters) == [3, 7, 7, 7]
    assert capsys.readouterr().err.count("model.path='x': cut") == 1


def test_without_a_directory_rank_0_reports_first(tmp_path: Path, capsys: Capture) -> None:
    for rank in (0, 1):
        torchrun_environment(rank, 2, tmp_path)
    first, second = (make_reporter(rank, folder=tmp_path, patience=10.0) for rank in (0, 1))
    other = threading.Thread(target=second.report_cause, args=(3, "from rank 1"))
    other.start()
    first.report_cause(3, "from rank 0")
    other.join()
    assert (first.exit_code, second.exit_code) == (3, 7)
    assert "from rank 1" not in capsys.readouterr().err


def test_a_cause_that_only_another_rank_knows_is_reported(capsys: Capture) -> None:
    reporter = make_reporter(1)
    reporter.report_cause(3, "from rank 1")
    assert reporter.exit_code == 3
    assert "from rank 1" in capsys.readouterr().err


def test_a_lost_connection_is_silent_when_the_peer_has_reported(
    tmp_path: Path, capsys: Capture
) -> None:
    reporter = make_reporter(1, tmp_path, patience=10.0)
    threading.Timer(0.1, write_exit_record, (tmp_path, 5, "NaN or Inf")).start()
    reporter.report_consequence(ExitCode.PEER_FAILED, "another rank ended: Connection closed")
    assert (reporter.exit_code, reporter.has_reported) == (7, False)
    assert capsys.readouterr().err == ""


def test_the_lowest_living_rank_reports_that_rank_0_was_killed(
    tmp_path: Path, capsys: Capture
) -> None:
    second = make_reporter(1, tmp_path, count=3, dead=(0,))
    third = make_reporter(2, tmp_path, count=3, dead=(0,))
    other = threading.Thread(target=third.report_consequence, args=(7, "Connection closed"))
    other.start()
    second.report_consequence(7, "Connection closed")
    other.join()
    text = capsys.readouterr().err
    assert text.count("rank 0 of the training ended without a report") == 1
    assert "Connection closed" not in text
    assert recorded_code(tmp_path) == 7
    assert (second.has_reported, third.has_reported, third.exit_code) == (True, False, 7)


def test_a_rank_reports_when_a_lower_one_is_alive_and_says_nothing(
    tmp_path: Path, capsys: Capture
) -> None:
    reporter = make_reporter(1, tmp_path, patience=0.1)  # rank 0 is alive, and hangs
    reporter.report_consequence(7, "a collective timed out")
    assert (reporter.exit_code, reporter.has_reported, recorded_code(tmp_path)) == (7, True, 7)
    assert "a collective timed out" in capsys.readouterr().err


def test_the_death_of_rank_1_takes_precedence_over_torchruns_signal(
    tmp_path: Path, capsys: Capture
) -> None:
    reporter = make_reporter(0, tmp_path, dead=(1,))
    reporter.report_signal(signal.SIGTERM)
    text = capsys.readouterr().err
    assert reporter.exit_code == 7
    assert "rank 1 of the training ended without a report" in text
    assert "SIGTERM" not in text


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)],
    ids=lambda v: str(v),
)
def test_a_signal_from_outside_is_reported_by_rank_0(
    tmp_path: Path, capsys: Capture, number: signal.Signals, code: int
) -> None:
    first, second = (make_reporter(rank, tmp_path, patience=10.0) for rank in (0, 1))
    other = threading.Thread(target=second.report_signal, args=(number,))
    other.start()
    time.sleep(0.1)
    first.report_signal(number)
    other.join()
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[0] == f"the run was stopped ({number.name})"
    assert len(lines) == 2
    assert (first.exit_code, second.exit_code, second.has_reported) == (code, code, False)


def test_a_consequence_is_reported_when_no_other_rank_reports(
    tmp_path: Path, capsys: Capture
) -> None:
    make_reporter(0, tmp_path).report_consequence(7, "a collective timed out")
    assert "a collective timed out" in capsys.readouterr().err


def test_a_killed_torchrun_is_the_cause(tmp_path: Path, capsys: Capture) -> None:
    reporter = make_reporter(0, tmp_path, torchrun_is_dead=True)
    reporter.report_signal(signal.SIGTERM)
    assert reporter.exit_code == 143
    assert "torchrun (process 1) was killed" in capsys.readouterr().err


def test_a_full_disk_does_not_silence_the_report(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megatron_rl.run.supervision.exit_reporter.write_exit_record", fail)
    reporter = ExitReporter(LocalRanks())
    reporter.directory = tmp_path
    reporter.report_cause(8, "metrics.jsonl cannot be written: the disk is full")
    assert reporter.exit_code == 8
    assert "the disk is full" in capsys.readouterr().err


def test_a_complete_run_is_recorded_by_rank_0_alone(tmp_path: Path, capsys: Capture) -> None:
    second = make_reporter(1, tmp_path)
    second.report_success()
    assert second.exit_code == 0
    assert recorded_code(tmp_path) is None
    make_reporter(0, tmp_path).report_success()
    assert recorded_code(tmp_path) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_resumable_run_asks_for_a_requeue_after_sigterm(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    ranks = FakeLocalRanks(0)
    reporter = ExitReporter(ranks, is_resumable=True, patience_seconds=0.3)
    reporter.directory = tmp_path
    reporter.report_signal(number)
    assert recorded_code(tmp_path) == code
