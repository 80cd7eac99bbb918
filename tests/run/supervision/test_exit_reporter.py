"""Each end of a run is one paragraph from one rank, with the code of its cause."""

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
from tests.support.local_ranks import Known, environment


def words_of(
    rank: int = 0, directory: Path | None = None, *, patience: float = 0.3, **known: object
) -> ExitReporter:
    """patience: more where another rank will speak."""
    words = ExitReporter(Known(rank, **known), patience_seconds=patience)  # type: ignore[arg-type]
    words.directory = directory
    return words


def test_a_cause_is_said_recorded_and_told_to_torchrun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment(0, 2, tmp_path)
    words = words_of(0, tmp_path, folder=tmp_path)
    words.report_cause(ExitCode.ENGINE_FAILED, "engine http://e ended by itself")
    assert (words.code, words.spoke) == (4, True)
    said = capsys.readouterr().err.strip().splitlines()
    assert said == ["engine http://e ended by itself", "(exit code 4: engine_failed)"]
    assert (record := read_exit_record(tmp_path)) is not None and (record.code, record.reason) == (
        4,
        said[0],
    )
    assert json.loads((tmp_path / "0/error.json").read_text())["message"]["message"] == said[0]


def test_the_first_cause_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = words_of(0, tmp_path)
    words.report_cause(4, "first")
    words.report_cause(5, "second")
    words.report_signal(signal.SIGTERM)
    words.report_success()
    assert words.code == 4 and "second" not in capsys.readouterr().err


def test_what_nobody_foresaw_comes_with_its_traceback_after_the_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words_of(0, tmp_path).report_cause(1, "ValueError: bug", "Traceback ...\nValueError: bug\n")
    said = capsys.readouterr().err.strip().splitlines()
    assert said[0] == "ValueError: bug" and "exit code 1" in said[1] and said[2] == "Traceback ..."


def test_the_same_cause_on_every_rank_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    everyone = [words_of(rank, tmp_path, count=4) for rank in range(4)]
    threads = [threading.Thread(target=w.report_cause, args=(3, "model.path='x': cut")) for w in everyone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(w.code or 0 for w in everyone) == [3, 7, 7, 7]
    assert capsys.readouterr().err.count("model.path='x': cut") == 1


def test_before_there_is_a_directory_rank_0_speaks_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        environment(rank, 2, tmp_path)
    first, second = (words_of(rank, folder=tmp_path, patience=10.0) for rank in (0, 1))
    other = threading.Thread(target=second.report_cause, args=(3, "from rank 1"))
    other.start()
    first.report_cause(3, "from rank 0")
    other.join()
    assert (first.code, second.code) == (3, 7)
    assert "from rank 1" not in capsys.readouterr().err


def test_a_cause_that_only_another_rank_met_is_said_all_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = words_of(1)
    words.report_cause(3, "from rank 1")
    assert words.code == 3 and "from rank 1" in capsys.readouterr().err


def test_a_lost_connection_is_quiet_about_a_peer_that_said_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of(1, tmp_path, patience=10.0)
    threading.Timer(0.1, write_exit_record, (tmp_path, 5, "NaN or Inf")).start()
    words.report_consequence(ExitCode.PEER_FAILED, "another rank is gone: Connection closed by peer")
    assert (words.code, words.spoke) == (7, False) and capsys.readouterr().err == ""


def test_rank_0_killed_leaves_a_record_by_the_lowest_living_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second, third = (
        words_of(1, tmp_path, count=3, dead=(0,)),
        words_of(2, tmp_path, count=3, dead=(0,)),
    )
    later = threading.Thread(target=third.report_consequence, args=(7, "Connection closed by peer"))
    later.start()
    second.report_consequence(7, "Connection closed by peer")
    later.join()
    said = capsys.readouterr().err
    assert (
        said.count("rank 0 of the training ended without a word") == 1
        and "Connection closed" not in said
    )
    assert (record := read_exit_record(tmp_path)) is not None and record.code == 7
    assert (second.spoke, third.spoke, third.code) == (True, False, 7)


def test_rank_1_killed_does_not_read_told_to_stop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of(0, tmp_path, dead=(1,))
    words.report_signal(signal.SIGTERM)
    said = capsys.readouterr().err
    assert (
        words.code == 7
        and "rank 1 of the training ended without a word" in said
        and "told to stop" not in said
    )


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)],
    ids=lambda v: str(v),
)
def test_a_signal_from_outside_is_said_by_rank_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals, code: int
) -> None:
    first, second = (words_of(rank, tmp_path, patience=10.0) for rank in (0, 1))
    other = threading.Thread(target=second.report_signal, args=(number,))
    other.start()
    time.sleep(0.1)
    first.report_signal(number)
    other.join()
    said = capsys.readouterr().err.strip().splitlines()
    assert said[0] == f"the run was told to stop ({number.name})" and len(said) == 2
    assert (first.code, second.code, second.spoke) == (code, code, False)


def test_a_peer_that_waits_in_vain_says_what_it_knows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words_of(0, tmp_path).report_consequence(7, "a collective timed out")
    assert "a collective timed out" in capsys.readouterr().err


def test_torchrun_killed_is_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = words_of(0, tmp_path)
    siblings = words._siblings
    siblings.__dict__["without_torchrun"] = True
    words.report_signal(signal.SIGTERM)
    assert words.code == 143 and "torchrun (process 1) was killed" in capsys.readouterr().err


def test_a_full_disk_does_not_silence_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megatron_rl.run.supervision.exit_reporter.write_exit_record", full)
    words = ExitReporter(LocalRanks())
    words.directory = tmp_path
    words.report_cause(8, "metrics.jsonl cannot be written: the disk is full")
    assert words.code == 8 and "the disk is full" in capsys.readouterr().err


def test_a_complete_run_is_recorded_by_rank_0_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second = words_of(1, tmp_path)
    second.report_success()
    assert read_exit_record(tmp_path) is None and second.code == 0
    words_of(0, tmp_path).report_success()
    assert (record := read_exit_record(tmp_path)) is not None and record.code == 0
    assert capsys.readouterr().err == ""
