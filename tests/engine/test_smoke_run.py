"""The smoke experiment as a user runs it, resumed from its checkpoint, and in two halves."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil
import pytest
from safetensors.torch import load_file

from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.models.families import read_shape
from megatron_rl.rollouts.recording.format import batch_directory
from megatron_rl.rollouts.recording.reader import read_groups
from megatron_rl.run.checkpoints.state_file import read_state
from sglang_bridge.keys import create_keys
from tests.support.comparable import weights_of
from tests.support.engines import running_engine
from tests.support.jobs import (
    ROOT,
    process_tree,
    processes_named,
    start_job,
    survivors,
    wait_for_step,
)
from tests.support.policies import TWO_DIGIT_ADDITION

pytestmark = [pytest.mark.engine, pytest.mark.distributed, pytest.mark.timeout(420)]
# Every metric of the run. Dashboards read them, so this test holds their names.
NAMES = {
    "account/engine_tokens",
    "account/evaluation",
    "account/zero_variance_dropped",
    "account/generated",
    "account/trained/zero_variance",
    "account/trained/mixed",
    "account/trained/tied",
    "account/unaccounted",
    "eval/accuracy",
    "eval/accuracy_ci95",
    "eval/finished",
    "eval/parseable",
    "eval/questions",
    "eval/rejected",
    "eval/version",
    "lengths/known",
    "mismatch/ess",
    "mismatch/icepop_masked",
    "mismatch/k3_kl",
    "mismatch/logprob_abs_mean",
    "mismatch/mis_masked",
    "mismatch/route_disagreement",
    "mismatch/tis_truncated",
    "mismatch/tis_weight_mean",
    "policy/advantage_mixed",
    "policy/clip_fraction_high",
    "policy/clip_fraction_low",
    "policy/entropy",
    "policy/first_ratio_deviation",
    "policy/inverse_ratio_max",
    "policy/ratio_max",
    "policy/ratio_mean",
    "replay/bytes_per_token",
    "reward/mean",
    "reward/no_correctness",
    "reward/no_verdict",
    "reward/shaping_share",
    "rollout/engines_left_out",
    "rollout/groups/all_correct",
    "rollout/groups/all_incorrect",
    "rollout/groups/tied_reward",
    "rollout/groups/mixed",
    "rollout/groups/tied_correct",
    "rollout/groups/tied_incorrect",
    "rollout/groups/too_few_verdicts",
    "rollout/rejected",
    "rollout/repeated",
    "rollout/response_length",
    "rollout/samples",
    "rollout/tokens",
    "rollout/truncated",
    "rollout/wasted_token_fraction",
    "rollout/zero_variance_rate",
    "phase/index",
    "phase/tokens",
    "run/effective_time",
    "samples/failed",
    "samples/kept",
    "samples/left_out",
    "step",
    "sync/audit_compared",
    "sync/engines",
    "sync/audit_mismatches",
    "sync/bytes",
    "sync/version",
    "time/account",
    "time/checkpoint",
    "time/credit",
    "time/eval",
    "time/exchange",
    "time/old_policy",
    "time/replay",
    "time/reward_exposed",
    "time/rollout",
    "time/samples",
    "time/step",
    "time/sync",
    "time/sync/audit",
    "time/sync/flush",
    "time/sync/gather",
    "time/sync/load",
    "time/sync/quantise",
    "time/sync/send",
    "time/train",
    "train/zero_variance_samples",
    "train/grad_norm",
    "train/loss",
    "train/lr",
    "train/micro_batches",
    "train/nonfinite",
    "train/optimizer_steps",
    "train/samples",
}
CURRICULUM = (
    "curriculum=[{name: first, until: {steps: 1}},"
    "{name: second, rollout.samples_per_prompt: 4, rollout.max_new_tokens: 5,"
    "rollout.temperature: 0.8,optimizer.lr: 1e-5}]"
)


class CompleteRun(NamedTuple):
    """A finished run, its output, and the processes that lived during it."""

    run: Path
    output: str
    processes: list[psutil.Process]

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]


def token_total(record: dict[str, float]) -> float:
    """Sum of a step's token counts over all outcomes."""
    other_metrics = ("account/engine_tokens", "account/generated", "account/unaccounted")
    return sum(
        n for name, n in record.items() if name.startswith("account/") and name not in other_metrics
    )


def complete(job: subprocess.Popen[str], run: Path) -> CompleteRun:
    wait_for_step(run, 1, job)
    processes = process_tree(job)
    output, _ = job.communicate(timeout=360)
    assert job.returncode == 0, output[-4000:]
    return CompleteRun(run, output, processes)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> CompleteRun:
    root = tmp_path_factory.mktemp("smoke")
    overrides = (
        "parallel=pp2_vpp2",
        "train.total_steps=3",
        "run.save_weights=true",
        "logger.progress=true",
        CURRICULUM,
    )
    checkpoints = ("run.checkpoint_every=1", "run.keep_checkpoints=3")
    return complete(start_job(root, *overrides, *checkpoints, ranks=2), root / "job")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    """Overrides for runs that share one engine."""
    directory = tmp_path_factory.mktemp("engine")
    keys = create_keys()
    (directory / "keys.json").touch(mode=0o600)
    (directory / "keys.json").write_bytes(msgspec.json.encode(keys))
    with running_engine(TWO_DIGIT_ADDITION, directory, keys=keys) as server:
        yield (
            "engine=external",
            f"engine.urls=['{server.url}']",
            f"engine.key_file={directory}/keys.json",
        )


def assert_weights_changed(run: Path) -> None:
    """The weights after step 3 have the names of the start checkpoint, and other values."""
    before = load_file(TWO_DIGIT_ADDITION / "model.safetensors")
    files = [*(run / "checkpoints/step-3").glob("*.safetensors")]
    assert len(files) == 2, "each stage writes its own layers"
    after = weights_of(run, 3)
    assert before.keys() == after.keys()
    assert any(not before[name].equal(after[name]) for name in before)


def test_interleaved_pipeline_run_is_complete(smoke: CompleteRun) -> None:
    run = smoke.run
    records = smoke.records
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    names = {name for record in records for name in record}
    links = {name for name in names if name.startswith("sync/bytes/")}
    assert names - links == NAMES
    assert {"sync/bytes/0/0_of_node_0", "sync/bytes/1/0_of_node_0"} <= links
    assert [record.get("sync/version") for record in records[1:]] == [1, 2, 3]
    assert records[-1]["sync/audit_mismatches"] == 0
    assert [record["account/unaccounted"] for record in records] == [0.0, 0.0, 0.0, 0.0]
    for name in ("account/generated", "account/engine_tokens"):
        assert all(token_total(record) == record[name] > 0 for record in records)
    assert records[-1]["mismatch/logprob_abs_mean"] < 1e-4
    assert json.loads((run / "exit.json").read_text())["code"] == 0
    assert str(run) in smoke.output.splitlines()[-1]
    assert_weights_changed(run)
    assert records[-1]["sync/audit_compared"] == records[0]["sync/audit_compared"] > 0
    assert survivors(smoke.processes, 10) == []


def test_second_curriculum_phase_uses_its_own_settings(smoke: CompleteRun) -> None:
    first, second, third = smoke.records[1:]
    assert [record["phase/index"] for record in (first, second, third)] == [0, 1, 1]
    assert [record["rollout/samples"] for record in (first, second, third)] == [128, 64, 64]
    assert second["phase/tokens"] == first["rollout/tokens"] + second["rollout/tokens"]
    assert first["train/lr"] > 1e-4 > 1e-5 >= second["train/lr"] > third["train/lr"]
    # The log-probabilities match only at the temperature at which the engines sampled.
    assert max(record["mismatch/logprob_abs_mean"] for record in (first, second, third)) < 1e-4
    assert "phase second (2 of 2) begins with step 2: rollout.samples_per_prompt=4" in smoke.output


@pytest.mark.nightly
def test_another_layout_resumes_prompts_versions_and_weights(
    smoke: CompleteRun, engine: tuple[str, ...], tmp_path: Path
) -> None:
    """Two interleaved pipeline stages saved it after step 2; one rank resumes it.

    The engine is another one too.
    """
    resume = f"run.resume={smoke.run}/checkpoints/iter_0000002"
    resumed_run = complete(
        start_job(
            tmp_path, *engine, resume, "train.total_steps=3", "run.checkpoint_every=1", CURRICULUM
        ),
        tmp_path / "job",
    )
    (record,) = resumed_run.records
    assert record["step"] == 3 and record["sync/version"] == 3
    assert record["mismatch/logprob_abs_mean"] < 1e-4, (
        "the engine sampled from the checkpoint's weights"
    )
    assert (
        record["sync/audit_mismatches"] == 0 and record["train/lr"] == smoke.records[3]["train/lr"]
    )
    here, there = (
        read_state(run / "checkpoints/iter_0000003") for run in (resumed_run.run, smoke.run)
    )
    assert here.position.selection == there.position.selection
    assert here.position.features["curriculum"]["index"] == 1
    assert (
        (here.position.version, here.optimizer_steps)
        == (there.position.version, there.optimizer_steps)
        == (3, 6)
    )


def assert_recording_is_complete(recording: Path) -> None:
    """Two batches of 16 groups without a repeated prompt, and routes of every rollout."""
    batches = [read_groups(batch_directory(recording, step)) for step in (1, 2)]
    assert [len(groups) for groups in batches] == [16, 16]
    groups = [group for batch in batches for group in batch]
    assert len({group.prompt.id for group, _ in groups}) == 32, "no prompt is repeated"
    shape = read_shape(TWO_DIGIT_ADDITION)
    for _, rollouts in groups:
        for rollout in rollouts:
            assert rollout.routes is not None
            assert rollout.routes.shape[1:] == (len(shape.moe_layers), shape.topk)


@pytest.mark.nightly
def test_recorded_rollouts_are_trained_on_without_an_engine(
    engine: tuple[str, ...], tmp_path: Path
) -> None:
    """The engine computes in float32, and the trainer in bfloat16.

    Their log-probabilities differ accordingly.
    """
    steps = "train.total_steps=2"
    rolled_out = complete(
        start_job(tmp_path / "rollouts", *engine, steps, "mode=rollout_only"),
        tmp_path / "rollouts/job",
    )
    first_record = rolled_out.records[0]
    assert first_record["sync/audit_mismatches"] == 0 and first_record["sync/audit_compared"] > 0
    for record in rolled_out.records[1:]:
        assert record["account/recorded"] == record["account/engine_tokens"] > 0
    recording = rolled_out.run / "recorded"
    assert_recording_is_complete(recording)
    recorded = f"rollout.recording={rolled_out.run}"
    overrides = ("mode=train_only", recorded, steps, "model.dtype=bfloat16")
    train_only = complete(start_job(tmp_path / "trained", *overrides), tmp_path / "trained/job")
    assert processes_named(train_only.processes, "sglang") == []
    assert [record["account/unaccounted"] for record in train_only.records[1:]] == [0.0, 0.0]
    first = train_only.records[1]
    assert 1e-3 < first["mismatch/logprob_abs_mean"] < 0.2, "bfloat16 rounds"
    assert 0 < first["mismatch/route_disagreement"] < 0.2 and first["train/samples"] > 0
    for name in ("reward/mean", "rollout/tokens", "rollout/zero_variance_rate"):
        assert [r[name] for r in train_only.records[1:]] == [
            r[name] for r in rolled_out.records[1:]
        ], name


@pytest.mark.nightly
def test_model_from_scratch_learns_a_user_defined_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cold start of a checkpoint, with a user-defined prompt source and reward."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests/plugins/examples"), prepend=":")
    job = start_job(
        tmp_path,
        "data=custom",
        "data.source=my_source:Products",
        "data.num_train=500",
        "reward=custom",
        "reward.name=my_reward:CorrectAndShort",
        "reward.options={limit: 24}",
        "rollout.max_new_tokens=8",
        "train.total_steps=6",
        "eval.start_step=6",
        "run.save_weights=true",
        "logger.progress=true",
        experiment="cold_start",
    )
    output, _ = job.communicate(timeout=360)
    assert job.returncode == 0, output[-4000:]
    assert "warning: eval.stop_at=0.3 was not reached in 6 steps" in output
    records = [
        json.loads(line) for line in (tmp_path / "job/metrics.jsonl").read_text().splitlines()
    ]
    assert records[6]["train/loss"] < 0.9 * records[1]["train/loss"]
    assert [record["step"] for record in records if "eval/accuracy" in record] == [6]
    weights = load_file(tmp_path / "job/checkpoints/step-6/model.safetensors")
    experts = [weights[f"model.layers.0.mlp.experts.{index}.up_proj.weight"] for index in range(2)]
    assert not experts[0].equal(experts[1])


def test_second_run_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "precious").write_text("data")
    job = start_job(tmp_path)
    output, _ = job.communicate(timeout=120)
    assert job.returncode == ExitCode.REFUSED
    assert "run.name" in output and "choose another" in output.lower()
    assert (tmp_path / "job" / "precious").read_text() == "data"
