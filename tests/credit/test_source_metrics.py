import msgspec
import pytest

from megatron_rl.contracts.group import Group
from megatron_rl.credit.source_metrics import source_metrics
from megatron_rl.rollouts.evaluation.evaluation import accuracy_of
from tests.support.groups import group, verdict


def group_of(source: str, *scores: float | None, num_generated: int = 4) -> Group:
    result = group(*scores, num_generated=[num_generated] * len(scores))
    prompt = msgspec.structs.replace(result.prompt, source=source)
    return msgspec.structs.replace(result, prompt=prompt)


def test_each_source_has_its_own_means_and_shares() -> None:
    groups = [
        group_of("sums", 1.0, 1.0),
        group_of("sums", 1.0, 0.0, num_generated=6),
        group_of("sums", None, None),
        group_of("letters", 0.0, 0.0),
    ]
    assert source_metrics(groups) == {
        "source/letters/prompts": 1.0,
        "source/letters/tokens": 8.0,
        "source/letters/zero_variance_rate": 1.0,
        "source/letters/reward": 0.0,
        "source/letters/accuracy": 0.0,
        "source/letters/prompt_share": 0.25,
        "source/sums/prompts": 3.0,
        "source/sums/tokens": 28.0,
        "source/sums/zero_variance_rate": 0.5,
        "source/sums/reward": 0.75,
        "source/sums/accuracy": 0.75,
        "source/sums/prompt_share": 0.75,
    }


def test_without_a_mixture_there_are_no_metrics_of_sources() -> None:
    assert source_metrics([group(1.0, 0.0)]) == {}


def test_a_source_without_verdicts_or_correctness_has_no_accuracy() -> None:
    metrics = source_metrics([group_of("a", None, None)])
    assert metrics["source/a/zero_variance_rate"] == 0.0
    assert not {"source/a/reward", "source/a/accuracy"} & metrics.keys()
    group_with_reward = group_of("a", 1.0)
    rollout = msgspec.structs.replace(
        group_with_reward.rollouts[0],
        verdict=msgspec.structs.replace(verdict(1.0, 0.3), correctness=None),
    )
    metrics = source_metrics([msgspec.structs.replace(group_with_reward, rollouts=(rollout,))])
    assert metrics["source/a/reward"] == 0.3 and "source/a/accuracy" not in metrics


def test_an_evaluation_has_the_accuracy_of_each_source() -> None:
    groups = [group_of("sums", 1.0), group_of("sums", 0.0), group_of("letters", 1.0)]
    accuracy = accuracy_of(groups, 1, max_rejected_share=0.5)
    metrics = accuracy.metrics()
    assert metrics["eval/accuracy"] == pytest.approx(2 / 3)
    assert metrics["eval/source/sums/accuracy"] == 0.5
    assert metrics["eval/source/letters/accuracy"] == 1.0
    assert "letters 1.000 ± 0.000, sums 0.500 ± " in str(accuracy)
