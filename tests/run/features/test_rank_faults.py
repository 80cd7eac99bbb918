"""Errors of a rank in the values or tokens of samples: they reach rank 0 as text, and end no step.

A rank that raised alone would leave the others waiting in the next collective.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_rl.contracts.commands import GatherSamples, SampleSource
from megatron_rl.contracts.step_plan import Denominators, OptimizerStep, StepPlan
from megatron_rl.losses import LossResult, ResponseTokens
from megatron_rl.losses.sft import Sft
from megatron_rl.records.samples.parts import SamplePart
from megatron_rl.training.exchange.transfer_plan import Receiver
from megatron_rl.training.old_policy import BatchObjective
from megatron_rl.training.samples import gathering, token_values
from megatron_rl.training.samples.token_values import TokenValues
from tests.support.rollout_refs import make_ref
from tests.support.rollouts import make_rollout

ROLLOUT = make_rollout(2, 3)
REF = make_ref(ROLLOUT)


def fail(*arguments: Any) -> Any:
    raise ArithmeticError("a\nfault")


def make_values() -> TokenValues:
    """One rollout of three trained tokens, in one micro-batch."""
    logprobs = torch.tensor([-0.1, -0.2, -0.3])
    response = ResponseTokens(
        logprobs, logprobs, logprobs - 1, logprobs, torch.tensor([0, 3]).int()
    )
    step = OptimizerStep(micro_batches=(((0,),),), denominators=Denominators(sequences=1, tokens=3))
    plan = StepPlan(step=1, rollouts=(REF,), advantages=(1.0,), optimizer_steps=(step,))
    return TokenValues(plan, 0, [BatchObjective(Sft().prepare(response), response)])


def update(values: TokenValues) -> LossResult:
    """Compute the loss of the update, as the trainer does."""
    (objective,) = values.observed_objectives()
    logprobs = torch.tensor([-0.1, -0.2, -0.3])
    return objective(logprobs, torch.ones(3), Denominators(sequences=1, tokens=3))


def gather(values: TokenValues | None, monkeypatch: pytest.MonkeyPatch) -> list[SamplePart]:
    monkeypatch.setattr(gathering, "read_rollout", lambda ref: ROLLOUT)
    receivers = [Receiver(dp_rank=0, node=0, moe_rows=())]
    return gathering.gather_samples(
        GatherSamples((SampleSource(REF, 0),)), values, receivers, 0, None
    )


def test_a_step_without_faults_has_values_and_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    values = make_values()
    update(values)
    assert set(values.extremes()) == {"highest-mismatch"}
    with_values, with_tokens = gather(values, monkeypatch)
    assert with_values.values is not None and with_values.values.ratios is not None
    assert with_tokens.tokens is not None
    assert not with_values.problem and not with_tokens.problem


@pytest.mark.parametrize(
    ("faulty", "use"),
    [("limited_ratio", update), ("sequence_means", TokenValues.extremes)],
)
def test_an_error_in_the_values_is_kept_for_rank_zero(
    monkeypatch: pytest.MonkeyPatch, faulty: str, use: Callable[[TokenValues], Any]
) -> None:
    values = make_values()
    with monkeypatch.context() as faults:
        faults.setattr(token_values, faulty, fail)
        use(values)
    problem, with_values, with_tokens = gather(values, monkeypatch)
    assert problem.problem == "ArithmeticError: a fault"
    assert with_values.values is not None and with_values.values.ratios is None
    assert with_tokens.tokens is not None


@pytest.mark.parametrize("faulty", ["values", "tokens"])
def test_an_error_in_a_part_takes_its_place(monkeypatch: pytest.MonkeyPatch, faulty: str) -> None:
    values = make_values()
    update(values)
    if faulty == "values":
        monkeypatch.setattr(TokenValues, "part", fail)
    else:
        monkeypatch.setattr(gathering, "encode_tokens", fail)
    parts = gather(values, monkeypatch)
    assert [part.problem for part in parts if part.problem] == ["ArithmeticError: a fault"]
    assert len(parts) == 2
