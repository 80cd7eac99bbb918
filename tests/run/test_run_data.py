"""The data of a run is read before torch is imported and before engines start."""

import json
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.run_state import PromptCursor, SelectorState
from megatron_rl.models.families import read_shape
from megatron_rl.prompts.pass_rates import PassRateFile
from megatron_rl.prompts.question import PromptDataError
from megatron_rl.rewards import Scorer
from megatron_rl.rollouts.recording.recorded_rollouts import BadRecording
from megatron_rl.run.data import profile_header, read_data
from sglang_bridge.keys import create_keys
from tests.support.configurations import configuration_of
from tests.support.policies import TWO_DIGIT_ADDITION
from tests.support.recordings import write_recording
from tests.support.torchrun import TORCHRUN

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "train_rl.py"
# Runs the script in an interpreter that cannot import torch.
WITHOUT_TORCH = """
import runpy, sys
sys.modules["torch"] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def settings(tmp_path: Path, *overrides: str) -> list[str]:
    """The settings of a run on 64 rows."""
    file = tmp_path / "sums.jsonl"
    if not file.exists():
        write_rows(file, 64)
    return [
        "experiment=smoke",
        "data=jsonl",
        f"data.train_path={file}",
        "data.num_eval=8",
        f"run.root={tmp_path}/runs",
        *overrides,
    ]


def write_rows(file: Path, count: int) -> None:
    rows = [{"prompt": f"{10 + i}+10=", "response": str(20 + i)} for i in range(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
def test_a_bad_row_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    overrides = settings(tmp_path)
    with (tmp_path / "sums.jsonl").open("a") as file:
        file.write('{"prompt": "1+1="}\n')
    process = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(SCRIPT), *overrides],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == ExitCode.BAD_DATA, process.stderr
    assert "sums.jsonl line 65: `answer` is missing" in process.stderr
    assert "Traceback" not in process.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_a_bad_row_ends_all_ranks_with_one_message(tmp_path: Path) -> None:
    overrides = settings(tmp_path, "parallel=ep2")
    with (tmp_path / "sums.jsonl").open("a") as file:
        file.write('{"prompt": "1+1="}\n')
    process = subprocess.run(
        [*TORCHRUN, "--standalone", "--nproc-per-node=2", str(SCRIPT), *overrides],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,  # much less than parallel.timeout_s
        check=False,
    )
    assert process.stderr.count("(exit code ") == 1, process.stderr
    assert "(exit code 3: bad_data)" in process.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_a_bad_row_ends_the_ranks_of_all_nodes(tmp_path: Path) -> None:
    """The ranks of other nodes would wait until they time out for a rank 0 that never joins."""
    key_file = tmp_path / "keys.json"
    key_file.write_bytes(msgspec.json.encode(create_keys()))
    key_file.chmod(0o600)
    engine = ("engine.urls=[http://127.0.0.1:9]",)
    overrides = settings(tmp_path, "parallel=ep2", *engine, f"engine.key_file={key_file}")
    with (tmp_path / "sums.jsonl").open("a") as file:
        file.write('{"prompt": "1+1="}\n')
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}"]
    nodes = [
        subprocess.Popen(
            [*TORCHRUN, *place, f"--node-rank={node}", str(SCRIPT), *overrides],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    try:
        errors = [node.communicate(timeout=240)[1] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert "sums.jsonl line 65: " in errors[0] and "(exit code 3: bad_data)" in errors[0]
    assert "rank 0 could not open the run" in errors[1]
    assert "sums.jsonl" not in errors[1]


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["data.num_eval=60"], "data.num_eval=60: "),
        (["rollout.prompts_per_step=60"], "rollout.prompts_per_step=60: "),
        (["data.max_prompt_tokens=3"], "sums.jsonl line 1: the prompt has 6 "),
        (["mode=eval", "eval.sets={hard: hard.jsonl}"], "hard.jsonl line 1: "),
        (["data.pass_rates=rates.jsonl", "data.pass_rate_range=[0,1]"], "data.pass_rates="),
    ],
)
def test_unusable_data_is_refused_in_every_mode_that_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hard.jsonl").write_text('{"prompt": "1+1="}\n')
    (tmp_path / "rates.jsonl").write_text("{}\n")
    with pytest.raises(PromptDataError, match=reason.replace(".", r"\.")):
        read_data(configuration_of(settings(tmp_path, *overrides)))


def test_a_recording_with_a_damaged_batch_is_refused(tmp_path: Path) -> None:
    write_recording(tmp_path / "recorded", read_shape(TWO_DIGIT_ADDITION), steps=2)
    mode = ("mode=train_only", f"rollout.recording={tmp_path}", "train.total_steps=2")
    c = configuration_of(["experiment=smoke", *mode])
    for name in ("batch.json", "node-0-00000.safetensors", "node-0-00000.jsonl"):
        assert read_data(c).recording is not None
        file = tmp_path / "recorded" / "step-0000002" / name
        content = file.read_bytes()
        file.write_bytes(content[:7])
        with pytest.raises(BadRecording, match="step-0000002"):
            read_data(c)
        file.write_bytes(content)


@pytest.mark.slow
def test_a_profile_of_another_attempt_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    mode = ("mode=profile", f"data.pass_rates={tmp_path}/rates.jsonl", "data.source=jsonl")
    c = configuration_of(settings(tmp_path, *mode))
    assert list(read_data(c).sets) == ["train"]
    assert not (tmp_path / "rates.jsonl.part").exists()
    PassRateFile(tmp_path / "rates.jsonl", profile_header(c))
    read_data(c)
    for override, name in (
        ("rollout.temperature=0.5", "temperature"),
        ("eval.temperature=0.5", "temperature"),
        ("rollout.max_new_tokens=5", "max_new_tokens"),
        ("eval.max_new_tokens=5", "max_new_tokens"),
        ("eval.top_p=0.5", "top_p"),
    ):
        words = rf"rates\.jsonl\.part belongs to .* other settings \({name}\)"
        with pytest.raises(PromptDataError, match=words):
            read_data(configuration_of(settings(tmp_path, *mode, override)))


def test_rates_of_another_judge_are_warned_about(tmp_path: Path) -> None:
    rates = tmp_path / "rates.jsonl"
    c = configuration_of(settings(tmp_path))
    c = replace(c, data=replace(c.data, pass_rates=str(rates)))
    PassRateFile(rates, profile_header(c)).finish()
    same = replace(c, reward=replace(c.reward, timeout_s=3.0))
    demonstration = replace(c, environment=replace(c.environment, name="demonstration"))
    for configuration in (c, same, demonstration):
        assert read_data(configuration).warnings == ()
    other_answer = replace(c, reward=replace(c.reward, answer="last_line"))
    (warning,) = read_data(other_answer).warnings
    assert warning.startswith(f"data.pass_rates={rates}: ")
    assert "(reward.answer: last_number in the file, last_line here)" in warning
    reward = replace(c.reward, name=f"{__name__}:Accept", options={"limit": 3})
    (warning,) = read_data(replace(c, reward=reward)).warnings
    assert "reward.name: exact_match in" in warning
    assert "reward.options: {} in the file, {'limit': 3} here" in warning


@pytest.mark.parametrize(
    ("texts", "shared"),
    [
        (["10+10=", "11+10=", "99+99="], 2),
        (["10+10= ", " 10+10=", "73+10= ", "1+1="], 2),
        (["70+70=", "1 0+10="], 0),
    ],
)
def test_training_questions_in_an_evaluation_set_are_counted(
    tmp_path: Path, texts: list[str], shared: int
) -> None:
    """Questions that differ in case and outer white space are the same, as in the split."""
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "50+50=", "answer": 100}\n')
    file = tmp_path / "set.jsonl"
    rows = [json.dumps({"prompt": text, "answer": 1}) + "\n" for text in texts]
    file.write_text("".join(rows))
    overrides = (f"eval.sets={{s: {file}}}", f"data.eval_path={held_out}")
    own = [text for text in settings(tmp_path) if not text.startswith("data.num_eval")]
    data = read_data(configuration_of([*own, *overrides]))
    expected = [
        f"eval.sets.s={file}: {shared} of its {len(data.sets['s'])} questions train, too, so its "
        "accuracy does not hold for unseen questions. Name the file in data.eval_path, so that "
        "they do not train, or remove them from one of the files"
    ]
    assert list(data.warnings) == (expected if shared else [])


class Accept(Scorer):
    def __init__(self, limit: int) -> None: ...

    async def score(self, prompt, text, finish_reason):  # type: ignore[no-untyped-def]
        raise NotImplementedError


def test_a_resumed_run_with_other_prompts_is_refused_before_engines_start(tmp_path: Path) -> None:
    data = read_data(configuration_of(settings(tmp_path)))
    assert data.prompts is not None
    data.seek(SelectorState(prompts=data.prompts.cursor))
    other_cursor = PromptCursor(epoch=0, position=0, digest="other")
    with pytest.raises(PromptDataError, match=r"run\.resume"):
        data.seek(SelectorState(prompts=other_cursor))
