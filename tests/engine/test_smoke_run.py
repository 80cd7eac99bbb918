"""The smoke experiment, start to end, as a user runs it; and then from its checkpoint, and in two
halves.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil
import pytest
from safetensors.torch import load_file

from launch.testbed.jobs import (
    ROOT,
    process_tree,
    processes_named,
    start_job,
    survivors,
    wait_for_step,
)
from launch.testbed.policies import TWO_DIGIT_ADDITION
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.models.families import read_shape
from megatron_rl.rollouts.recording.format import batch_directory
from megatron_rl.rollouts.recording.reader import read_groups
from megatron_rl.run.checkpoints.state_file import read_state
from sglang_bridge.keys import create_keys
from tests.support.comparable import weights_of
from tests.support.engines import running_engine

pytestmark = [pytest.mark.engine, pytest.mark.distributed, pytest.mark.timeout(420)]
# Every metric of the run: people and dashboards read them, so a name that is new, gone or changed
# is a decision.
NAMES = {
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
    "rollout/response_length",
    "rollout/samples",
    "rollout/tokens",
    "rollout/truncated",
    "rollout/wasted_token_fraction",
    "rollout/zero_variance_rate",
    "stage/index",
    "stage/tokens",
    "step",
    "sync/audit_compared",
    "sync/audit_mismatches",
    "sync/version",
    "time/checkpoint",
    "time/eval",
    "time/exchange",
    "time/old_policy",
    "time/replay",
    "time/reward_exposed",
    "time/rollout",
    "time/step",
    "time/sync",
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
STAGES = (
    "curriculum=[{name: first, until: {steps: 1}},"
    "{name: second, rollout.samples_per_prompt: 4, rollout.max_new_tokens: 5, rollout.temperature: 0.8,"
    "optimizer.lr: 1e-5}]"
)


class Done(NamedTuple):
    """A run that is complete, its output, and what was alive in its middle."""

    run: Path
    output: str
    processes: list[psutil.Process]

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]


def classes_of(record: dict[str, float]) -> float:
    """All tokens of a step by what became of them, added up."""
    beside = ("account/generated", "account/unaccounted")
    return sum(
        n for name, n in record.items() if name.startswith("account/") and name not in beside
    )


def complete(job: subprocess.Popen[str], run: Path) -> Done:
    wait_for_step(run, 1, job)
    processes = process_tree(job)
    output, _ = job.communicate(timeout=360)
    assert job.returncode == 0, output[-4000:]
    return Done(run, output, processes)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Done:
    root = tmp_path_factory.mktemp("smoke")
    overrides = (
        "parallel=pp2_vpp2",
        "train.total_steps=3",
        "run.save_weights=true",
        "logger.progress=true",
        STAGES,
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


def test_interleaved_pipeline_run_is_complete(smoke: Done) -> None:
    run = smoke.run
    records = smoke.records
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    assert {name for record in records for name in record} == NAMES
    assert [record.get("sync/version") for record in records[1:]] == [1, 2, 3]
    assert records[-1]["sync/audit_mismatches"] == 0
    assert [record["account/unaccounted"] for record in records[1:]] == [0.0, 0.0, 0.0]
    assert all(classes_of(record) == record["account/generated"] > 0 for record in records)
    assert records[-1]["mismatch/logprob_abs_mean"] < 1e-4
    assert json.loads((run / "exit.json").read_text())["code"] == 0
    assert str(run) in smoke.output.splitlines()[-1]
    before = load_file(
        ROOT / "megatron_rl/models/assets/qwen3_moe_tiny_two_digit_addition/model.safetensors"
    )
    assert len([*(run / "checkpoints/step-3").glob("*.safetensors")]) == 2, (
        "each stage writes its own layers"
    )
    after = weights_of(run, 3)
    assert before.keys() == after.keys()
    assert records[-1]["sync/audit_compared"] == records[0]["sync/audit_compared"] > 0
    assert any(not before[name].equal(after[name]) for name in before)
    assert survivors(smoke.processes, 10) == []


def test_second_curriculum_phase_uses_its_own_settings(smoke: Done) -> None:
    first, second, third = smoke.records[1:]
    assert [record["stage/index"] for record in (first, second, third)] == [0, 1, 1]
    assert [record["rollout/samples"] for record in (first, second, third)] == [128, 64, 64]
    assert second["stage/tokens"] == first["rollout/tokens"] + second["rollout/tokens"]
    assert first["train/lr"] > 1e-4 > 1e-5 >= second["train/lr"] > third["train/lr"]
    # what engines drew at another temperature has these log-probabilities at that temperature alone
    assert max(record["mismatch/logprob_abs_mean"] for record in (first, second, third)) < 1e-4
    assert (
        "stage second (2 of 2) begins with step 2: rollout.samples_per_prompt=4, rollout.max_new_tok"
        in smoke.output
    )


def test_another_layout_resumes_prompts_versions_and_weights(
    smoke: Done, engine: tuple[str, ...], tmp_path: Path
) -> None:
    """The checkpoint of two interleaved pipeline stages after step 2, on one rank and with another
    engine.
    """
    resume = f"run.resume={smoke.run}/checkpoints/iter_0000002"
    done = complete(
        start_job(
            tmp_path, *engine, resume, "train.total_steps=3", "run.checkpoint_every=1", STAGES
        ),
        tmp_path / "job",
    )
    (record,) = done.records
    assert record["step"] == 3 and record["sync/version"] == 3
    assert record["mismatch/logprob_abs_mean"] < 1e-4, (
        "the engine sampled from the checkpoint's weights"
    )
    assert (
        record["sync/audit_mismatches"] == 0 and record["train/lr"] == smoke.records[3]["train/lr"]
    )
    here, there = (read_state(run / "checkpoints/iter_0000003") for run in (done.run, smoke.run))
    assert here.position.selection == there.position.selection
    assert here.position.phase is not None and (
        here.position.phase.index,
        here.position.phase.first_step,
    ) == (1, 2)
    assert (
        (here.position.version, here.optimizer_steps)
        == (there.position.version, there.optimizer_steps)
        == (3, 6)
    )


def test_recorded_rollouts_are_trained_on_without_an_engine(
    engine: tuple[str, ...], tmp_path: Path
) -> None:
    """And what the engine held was rounded as FP8: the trainer, which is not, is as far from it as
    the rounding.
    """
    steps = "train.total_steps=2"
    rounded = "engine.fake_quant=fp8_blockwise"
    rolled_out = complete(
        start_job(tmp_path / "rollouts", *engine, steps, rounded, "mode=rollout_only"),
        tmp_path / "rollouts/job",
    )
    audited = rolled_out.records[0]
    assert audited["sync/audit_mismatches"] == 0 and audited["sync/audit_compared"] > 0
    recorded = rolled_out.run / "recorded"
    shape = read_shape(TWO_DIGIT_ADDITION)
    drawn = [read_groups(batch_directory(recorded, step)) for step in (1, 2)]
    assert [len(groups) for groups in drawn] == [16, 16]
    assert len({group.prompt.id for groups in drawn for group, _ in groups}) == 32, (
        "no prompt twice"
    )
    assert all(
        rollout.routes is not None
        and rollout.routes.shape[1:] == (len(shape.moe_layers), shape.topk)
        for groups in drawn
        for _, rollouts in groups
        for rollout in rollouts
    )
    overrides = ("mode=train_only", f"rollout.recording={rolled_out.run}", steps)
    trained = complete(start_job(tmp_path / "trained", *overrides), tmp_path / "trained/job")
    assert processes_named(trained.processes, "sglang") == []
    assert [record["account/unaccounted"] for record in trained.records[1:]] == [0.0, 0.0]
    first = trained.records[1]
    assert 1e-3 < first["mismatch/logprob_abs_mean"] < 0.2, "rounded weights, and their own rows"
    assert 0 < first["mismatch/route_disagreement"] < 0.2 and first["train/samples"] > 0
    for name in ("reward/mean", "rollout/tokens", "rollout/zero_variance_rate"):
        assert [r[name] for r in trained.records[1:]] == [
            r[name] for r in rolled_out.records[1:]
        ], name


def test_model_from_scratch_learns_a_user_defined_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cold start of a checkpoint, with a prompt source and a reward from outside the project."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests/doors/examples"), prepend=":")
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
