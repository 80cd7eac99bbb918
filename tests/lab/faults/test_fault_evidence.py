"""The conclusions of the study of faults from the directory of a run."""

from collections import Counter
from pathlib import Path

import pytest

from megatron_rl.models.families import read_shape
from sglang_bridge.generation import GenerationRejected, decode_generation
from tests.lab.faults.evidence import Evidence, digest_weights, read_evidence
from tests.lab.faults.recovery_table import SESSIONS, session_of
from tests.lab.faults.servers import answer_garbage, answer_nan, answer_wrong_version
from tests.support.policies import TWO_DIGIT_ADDITION
from tests.support.recordings import write_recording

REPLY = (
    b'{"output_ids": [5], "meta_info": {"finish_reason": {"type": "stop"}, "weight_version": "3",'
    b' "output_token_logprobs": [[-0.25, 5, null]]}}'
)


def make_evidence(rollouts: dict[str, int], *, num_rejected: int = 0) -> Evidence:
    return Evidence(Counter({1: 1}), Counter(rollouts), num_rejected, 0, "digest")


def test_a_missing_rollout_and_a_rejected_one_are_lost() -> None:
    reference = make_evidence({"a": 1, "b": 1}, num_rejected=1)
    assert make_evidence({"a": 1}, num_rejected=1).num_lost(reference) == 1
    assert make_evidence({"a": 1, "b": 1}, num_rejected=3).num_lost(reference) == 2
    assert make_evidence({"a": 1, "b": 1}, num_rejected=0).num_lost(reference) == 0


def test_a_rollout_and_a_record_that_come_twice_are_doubled() -> None:
    assert make_evidence({"a": 1, "b": 3}).num_doubled == 2
    assert Evidence(Counter({1: 2}), Counter(), 0, 0, "").num_doubled == 1


def test_evidence_counts_each_rollout_of_each_recorded_step(tmp_path: Path) -> None:
    write_recording(tmp_path / "rollouts", read_shape(TWO_DIGIT_ADDITION), steps=2)
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0}\n{"step": 1, "rollout/rejected": 2.0}\n{"step": 1, "rollout/repeated": 5.0}\n'
    )
    evidence = read_evidence(tmp_path)
    assert evidence.rollouts and set(evidence.rollouts.values()) == {1}
    assert len({name.partition("/")[0] for name in evidence.rollouts}) == 2
    assert (evidence.num_rejected, evidence.num_repeated, evidence.num_doubled) == (2, 5, 1)


def test_the_digest_is_that_of_the_last_weights(tmp_path: Path) -> None:
    assert digest_weights(tmp_path) == ""
    for step, data in ((9, b"old"), (10, b"new")):
        (tmp_path / f"checkpoints/step-{step}").mkdir(parents=True)
        (tmp_path / f"checkpoints/step-{step}/model.safetensors").write_bytes(data)
    last = digest_weights(tmp_path)
    (tmp_path / "checkpoints/step-9/model.safetensors").write_bytes(b"other")
    assert digest_weights(tmp_path) == last
    (tmp_path / "checkpoints/step-10/model.safetensors").write_bytes(b"other")
    assert digest_weights(tmp_path) != last


@pytest.mark.parametrize("lie", [answer_garbage, answer_nan])
def test_lies_make_a_reply_unusable(lie: object) -> None:
    assert decode_generation(REPLY, num_prompt_tokens=2).weight_versions == ("3",)
    assert callable(lie)
    with pytest.raises(GenerationRejected):
        decode_generation(lie(REPLY), num_prompt_tokens=2)


def test_a_lie_about_the_version_changes_nothing_else() -> None:
    truth = decode_generation(REPLY, num_prompt_tokens=2)
    lie = decode_generation(answer_wrong_version(REPLY), num_prompt_tokens=2)
    assert lie.weight_versions == ("977",)
    assert (lie.output_ids == truth.output_ids).all()


def test_each_fault_can_strike_alone() -> None:
    for session in SESSIONS:
        for fault in session.faults:
            alone = session_of(f"{session.name}/{fault.name}")
            assert (alone.name, alone.faults) == (session.name, (fault,))
