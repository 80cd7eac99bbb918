"""The smoke experiment, start to end, as a user runs it."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megatron_rl.contracts.exit_codes import ExitCode
from support.jobs import ROOT, family, start_job, survivors, wait_for_step

pytestmark = [pytest.mark.engine, pytest.mark.distributed, pytest.mark.timeout(420)]
# Every metric of the run: people and dashboards read them, so a name that is new, gone or changed is a decision.
NAMES = {
    "eval/accuracy", "eval/accuracy_ci95", "eval/finished", "eval/parseable", "eval/questions", "eval/rejected",
    "mismatch/ess", "mismatch/k3_kl", "mismatch/logprob_abs_mean", "mismatch/route_disagreement",
    "policy/clip_fraction_high", "policy/clip_fraction_low", "policy/entropy", "policy/first_ratio_deviation",
    "policy/inverse_ratio_max", "policy/ratio_max", "policy/ratio_mean", "reward/mean", "reward/no_verdict",
    "rollout/engines_left_out", "rollout/groups/flat_right", "rollout/groups/flat_wrong", "rollout/groups/mixed",
    "rollout/groups/too_few_verdicts", "rollout/rejected", "rollout/response_length", "rollout/samples",
    "rollout/tokens", "rollout/truncated", "rollout/wasted_token_fraction", "rollout/zero_variance_rate", "step",
    "sync/audit_compared", "sync/audit_mismatches", "sync/version", "time/eval", "time/exchange", "time/old_policy",
    "time/reward_exposed", "time/rollout", "time/step", "time/sync", "time/train", "train/grad_norm", "train/loss",
    "train/lr", "train/micro_batches", "train/nonfinite", "train/optimizer_steps", "train/samples",
}  # fmt: skip


def test_two_interleaved_pipeline_stages_train_and_leave_a_complete_run(tmp_path: Path) -> None:
    job = start_job(tmp_path, "parallel=pp2_vpp2", "train.total_steps=3", "run.save_weights=true", ranks=2)
    run = tmp_path / "job"
    wait_for_step(run, 1, job)
    processes = family(job)
    output, _ = job.communicate(timeout=360)
    assert job.returncode == 0, output[-4000:]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    assert {name for record in records for name in record} == NAMES
    assert [record.get("sync/version") for record in records[1:]] == [1, 2, 3]
    assert records[-1]["sync/audit_mismatches"] == 0
    assert records[-1]["mismatch/logprob_abs_mean"] < 1e-4
    assert json.loads((run / "exit.json").read_text())["code"] == 0
    assert str(run) in output.splitlines()[-1]
    before = load_file(ROOT / "megatron_rl/models/assets/qwen3_moe_tiny_two_digit_addition/model.safetensors")
    shards = sorted((run / "checkpoints/step-3").glob("*.safetensors"))
    after = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    assert len(shards) == 2, "each stage writes its own layers"
    assert before.keys() == after.keys()
    assert records[-1]["sync/audit_compared"] == records[0]["sync/audit_compared"] > 0
    assert any(not before[name].equal(after[name]) for name in before)
    assert survivors(processes, 10) == []


def test_a_model_from_scratch_learns_a_users_own_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cold start of a checkpoint, with a prompt source and a reward from outside the project."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests/doors/examples"), prepend=":")
    job = start_job(
        tmp_path, "data=custom", "data.source=own_source:Products", "data.num_train=500", "reward=custom",
        "reward.name=own_reward:RightAndShort", "reward.options={limit: 24}", "rollout.max_new_tokens=8",
        "train.total_steps=6", "eval.first=6", "run.save_weights=true", "logger.progress=true", experiment="cold_start",
    )  # fmt: skip
    output, _ = job.communicate(timeout=360)
    assert job.returncode == 0, output[-4000:]
    assert "warning: eval.stop_at=0.3 was not reached in 6 steps" in output
    records = [json.loads(line) for line in (tmp_path / "job/metrics.jsonl").read_text().splitlines()]
    assert records[6]["train/loss"] < 0.9 * records[1]["train/loss"]
    assert [record["step"] for record in records if "eval/accuracy" in record] == [6]
    weights = load_file(tmp_path / "job/checkpoints/step-6/model.safetensors")
    experts = [weights[f"model.layers.0.mlp.experts.{index}.up_proj.weight"] for index in range(2)]
    assert not experts[0].equal(experts[1])


def test_a_second_run_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "precious").write_text("data")
    job = start_job(tmp_path)
    output, _ = job.communicate(timeout=120)
    assert job.returncode == ExitCode.REFUSED
    assert "run.name" in output and "choose another" in output.lower()
    assert (tmp_path / "job" / "precious").read_text() == "data"
