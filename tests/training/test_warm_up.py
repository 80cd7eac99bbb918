"""Warm-up compiles the kernels with the objects and dtypes of the run."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl.config.algorithms import (
    AlgoSettings,
    CispoSettings,
    EspoSettings,
    GspoSettings,
    KlSettings,
    SftSettings,
)
from megatron_rl.config.schema import ModelSettings, ParallelSettings, RolloutSettings
from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.losses import Objective, Regularization, ResponseTokens, open_loss
from megatron_rl.models.families import read_shape
from megatron_rl.planning.rank_view import RankView
from megatron_rl.training.logprobs import ResponseLogprobs
from megatron_rl.training.micro_batches import Batcher
from megatron_rl.training.warm_up import warm_up
from tests.support.policies import TWO_DIGIT_ADDITION


class Loss:
    """Wraps a loss and records its log-probabilities and their gradient."""

    def __init__(self, loss: Any) -> None:
        self._loss = loss
        self.tensors: list[torch.Tensor] = []

    def prepare(self, response: ResponseTokens) -> Objective:
        objective = self._loss.prepare(response)

        def record(logprobs: torch.Tensor, denominators: Denominators) -> Any:
            self.tensors.append(logprobs)
            logprobs.register_hook(self.tensors.append)
            return objective(logprobs, denominators)

        return record


def assert_ran_forward_and_backward(loss: Loss) -> None:
    value, gradient = loss.tensors
    assert torch.isfinite(value).all()
    assert torch.isfinite(gradient).all()
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize(
    "algo",
    [
        EspoSettings(),
        GspoSettings(),
        SftSettings(),
        CispoSettings(kl=KlSettings(coef=0.1), entropy_coef=0.1),
    ],
    ids=lambda a: a.name,
)
def test_kernels_run_forward_and_backward_without_the_model(algo: AlgoSettings) -> None:
    shape = read_shape(TWO_DIGIT_ADDITION)
    model = torch.nn.Module()
    model.output_layer = torch.nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
    model.forward = None  # type: ignore[method-assign,assignment]  # it is not called
    before = model.output_layer.weight.detach().clone()
    view = RankView.for_rank(shape.num_layers, ParallelSettings(), pp_rank=0, cp_rank=0, tp_rank=0)
    rollout = RolloutSettings(max_new_tokens=4)
    loss = Loss(open_loss(algo, shape))
    regularization = Regularization(algo)
    logprobs = ResponseLogprobs(
        rollout,
        vocab_size=shape.vocab_size,
        tp_group=None,
        entropy_grad=regularization.entropy_grad,
    )
    worker: Any = SimpleNamespace(
        layout=SimpleNamespace(device=torch.device("cpu")),
        policy=SimpleNamespace(
            models=[model], logprobs=logprobs, loss=loss, regularization=regularization
        ),
        batcher=Batcher(view, None, torch.device("cpu")),
        model=ModelSettings(path=str(TWO_DIGIT_ADDITION)),
    )
    warm_up(worker)
    assert_ran_forward_and_backward(loss)
    assert model.output_layer.weight.grad is None and torch.equal(model.output_layer.weight, before)
