"""Reading the directory of a run, and errors that name the damage."""

from pathlib import Path

import pytest

from megatron_rl.records.metrics_log import MetricsLog
from megatron_rl.records.past_run import RunUnreadable, flat_settings, read_metrics, read_settings
from megatron_rl.records.run_directory import RunDirectory, to_yaml
from tests.support.configurations import configuration_of
from tests.support.past_runs import make_run_directory


@pytest.mark.slow
def test_metrics_and_settings_are_read_as_they_were_written(tmp_path: Path) -> None:
    configuration = configuration_of(
        ["experiment=smoke", "optimizer.lr=3e-5", f"run.root={tmp_path}", "run.name=a", "seed=7"]
    )
    directory = make_run_directory(configuration)
    with MetricsLog(directory) as log:
        log.write(0, {"eval/accuracy": 0.25, "train/grad_norm": float("nan")})
        log.write(1, {})
    assert read_metrics(directory.path) == [
        {"step": 0, "eval/accuracy": 0.25, "train/grad_norm": None},
        {"step": 1},
    ]
    settings = read_settings(directory.path)
    assert settings == flat_settings(to_yaml(configuration))
    assert (settings["optimizer.lr"], settings["seed"], settings["data.seed"]) == (3e-5, 7, 7)
    assert (settings["engine.extra_args"], settings["data.options"]) == ([], {})


def test_records_of_an_earlier_process_stay(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    for step in (1, 2):
        with MetricsLog(directory) as log:
            log.write(step, {})
    assert read_metrics(tmp_path) == [{"step": 1}, {"step": 2}]


def test_an_incomplete_last_line_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1, "eval/acc')
    assert read_metrics(tmp_path) == [{"step": 0}]


@pytest.mark.parametrize("line", ['{"step": 0', "[1]", '{"step": "one"}', "", "nonsense"])
def test_the_error_names_a_damaged_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 0}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(RunUnreadable, match=r"metrics.jsonl line 2 is damaged .*Remove that line"):
        read_metrics(tmp_path)


def test_bytes_that_are_not_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"\xff\xfe": 1}\n')
    with pytest.raises(RunUnreadable, match="line 1 is damaged"):
        read_metrics(tmp_path)
    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe: 1\n")
    with pytest.raises(RunUnreadable, match=r"config\.yaml is damaged"):
        read_settings(tmp_path)


@pytest.mark.parametrize("text", ["", "a: [", "- 1\n", "a: ${"])
def test_text_without_settings_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(RunUnreadable, match=r"config.yaml is damaged .*run again"):
        read_settings(tmp_path)


def test_errors_distinguish_directories_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(RunUnreadable, match=r"runs/no: there is no such directory. Give"):
        read_metrics(Path("runs/no"))
    with pytest.raises(RunUnreadable, match=r"holds no metrics.jsonl: .*not the directory"):
        read_metrics(tmp_path)
    (tmp_path / "versions.json").touch()
    with pytest.raises(RunUnreadable, match="ended before it wrote one"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(RunUnreadable, match=r"cannot be read: Is a directory"):
        read_metrics(tmp_path)
