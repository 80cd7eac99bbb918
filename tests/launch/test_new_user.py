"""A new user's command with one typo: the refusal contains the correction."""

from pathlib import Path

import pytest

from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.refusal import ConfigurationRefused
from tests.support.configurations import configuration_of
from tests.support.scripts import start_script

COMMAND = [
    "experiment=smoke",
    "data=jsonl",
    "data.train_path=sums.jsonl",
    "data.num_eval=16",
    "train.total_steps=2",
]


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.jsonl").write_text('{"prompt": "10+11=", "answer": 21}\n')
    return tmp_path


def refusal_of(*overrides: str) -> str:
    with pytest.raises(ConfigurationRefused) as refusal:
        configuration_of(overrides)
    return str(refusal.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "typo", "reason"),
    [
        (
            "experiment=smoke",
            "experiment=smok",
            "Choose one of cold_start, mixed, own, quickstart, smoke",
        ),
        (
            "experiment=smoke",
            "experiment",
            "experiment='': A setting is key=value, without spaces. Write exper",
        ),
        ("experiment=smoke", "experiments=smoke", "experiments=smoke: There is no such key"),
        ("experiment=smoke", "--experiment=smoke", "Write experiment=smoke"),
        (
            "data=jsonl",
            "data=json",
            "Choose one of column_addition, column_addition_calls, column_addition_mixed, csv,",
        ),
        (
            "data=jsonl",
            "data.source=json",
            "Must be one of column_addition, column_addition_calls, column_addition_mixed,",
        ),
        ("data.train_path=sums.jsonl", "data.train_path=sum.jsonl", "There is no such file (from "),
        (
            "data.train_path=sums.jsonl",
            "data.train_path=.",
            "There is no such file: it is a directory (from ",
        ),
        (
            "data.train_path=sums.jsonl",
            "data.trainpath=sums.jsonl",
            "Did you mean data.train_path?",
        ),
        ("data.num_eval=16", "data.num_eval=0", "Must be at least 1"),
        ("data.num_eval=16", "data.num_eval=sixteen", "Must be a whole number"),
        ("data.num_eval=16", "data.num_train=16", "All rows of data.train_path are used"),
        ("data.num_eval=16", "data.eval_path=sums.jsonl", "It is the training file"),
        ("train.total_steps=2", "train.total_step=2", "Did you mean train.total_steps?"),
        ("train.total_steps=2", "train.total_steps=-2", "Must be at least 1"),
        ("train.total_steps=2", "train.total_steps", "A setting is key=value"),
        (
            "train.total_steps=2",
            "reward.answer=number",
            "Must be one of last_number, last_line, boxed",
        ),
        ("train.total_steps=2", "model=hf", "model.path=???: It has no default and was not given"),
        ("train.total_steps=2", "parallel=ep2", "torchrun --nproc-per-node 2"),
        ("train.total_steps=2", "run.name=my/run", "run.root"),
    ],
)
def test_a_typo_is_refused_with_a_correction(word: str, typo: str, reason: str) -> None:
    assert reason in refusal_of(*(typo if other == word else other for other in COMMAND))


def test_a_model_name_of_a_hub_is_refused() -> None:
    text = refusal_of(*COMMAND, "model=hf", "model.path=Qwen/Qwen3-30B-A3B", "model.dtype=float32")
    assert "There is no such directory" in text and "downloaded" in text


def test_the_command_without_a_typo_is_accepted() -> None:
    assert configuration_of(COMMAND).data.train_path == "sums.jsonl"


@pytest.mark.slow
def test_a_refused_process_leaves_no_traceback_and_no_files(directory: Path) -> None:
    result = start_script("train_rl", *COMMAND, "train.total_step=2", cwd=directory)
    assert (result.returncode, result.stdout) == (ExitCode.REFUSED, "")
    assert "Did you mean train.total_steps?" in result.stderr and "Traceback" not in result.stderr
    assert [path.name for path in directory.iterdir()] == ["sums.jsonl"]
