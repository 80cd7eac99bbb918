"""Megatron's optimizer over an Adam with the interface of Apex's `FusedAdam`.

Apex has no wheels, and needs a GPU. The interface is the same as in the commit that `Dockerfile`
installs: the names and order of arguments, the state of a parameter, and where steps are counted.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.mcore.replayed_models import build
from tests.mcore.test_optimizer import adam, save_and_load, snapshot, step_with_gradient

DOCKERFILE = Path(__file__).resolve().parents[2] / "Dockerfile"
# apex/optimizers/fused_adam.py at this commit. After a change of it, read the file again.
APEX_REF = "6424da3b4faa6c8f062da4a48c424fff3f02d42d"
MOMENTS = ("exp_avg", "exp_avg_sq")


class ApexInterface(torch.optim.Optimizer):
    """AdamW in plain torch behind the interface of Apex."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        assert adam_w_mode and not (amsgrad or capturable or master_weights)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"bias_correction": bias_correction})

    def zero_grad(self) -> None:  # type: ignore[override]
        raise AssertionError("Megatron zeroes gradients itself: Apex takes no set_to_none")

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Any = None,
        grads: Any = None,
        output_params: Any = None,
        scale: Any = None,
        grad_norms: Any = None,
        grad_scaler: Any = None,
    ) -> None:
        assert closure is grads is output_params is scale is grad_norms is grad_scaler is None
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group["step"] + 1 if "step" in group else 1
            for param in group["params"]:
                if param.grad is not None:
                    self._update(group, param)

    def _update(self, group: dict[str, Any], param: torch.Tensor) -> None:
        state = self.state[param]
        if not state:  # Apex adds moments where there is no state at all
            state.update({name: torch.zeros_like(param).float() for name in MOMENTS})
        assert set(state) == set(MOMENTS)
        assert param.dtype == param.grad.dtype == state["exp_avg"].dtype == torch.float32
        beta1, beta2 = group["betas"]
        mean, square = (state[name] for name in MOMENTS)
        mean.lerp_(param.grad, 1 - beta1)
        square.mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
        mean_part = mean / (1 - beta1 ** group["step"])
        square_part = (square / (1 - beta2 ** group["step"])).sqrt() + group["eps"]
        param.sub_(group["lr"] * (mean_part / square_part + group["weight_decay"] * param))


@pytest.fixture
def apex(megatron: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Megatron take the optimizer as it takes Apex's."""
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distrib_optimizer

    monkeypatch.setattr(optimizer, "Adam", ApexInterface)
    monkeypatch.setattr(distrib_optimizer, "Adam", ApexInterface)


def test_the_interface_is_that_of_the_commit_in_the_image() -> None:
    match = re.search(r"^ARG APEX_REF=(\w+)$", DOCKERFILE.read_text(), re.MULTILINE)
    assert match is not None and match[1] == APEX_REF


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_equal_those_of_this_projects_adam(
    apex: None, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    changes = {"weight_decay": 0.1, "clip_grad": 1.0}
    weights = []
    for use_apex in (True, False):
        models = build(checkpoint, dtype=dtype)[0]
        if not use_apex:
            monkeypatch.undo()
        optimizer = adam(models, **changes)
        inner = optimizer.scheduler.optimizer.chained_optimizers[0].optimizer
        assert isinstance(inner, ApexInterface) is use_apex
        for gradient in (0.5, -0.2, 0.1):
            step_with_gradient(models, optimizer, gradient)
        assert {group["step"] for group in inner.param_groups if group["params"]} == {3}
        weights.append(snapshot(models))
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_moments_for_a_checkpoint_before_the_first_step_are_apexs(
    apex: None, checkpoint: Path, tmp_path: Path
) -> None:
    models = build(checkpoint)[0]
    optimizer = adam(models)
    save_and_load(models, optimizer, tmp_path, optimizer_steps=7)
    step_with_gradient(models, optimizer, 0.5)
    groups = optimizer.scheduler.optimizer.chained_optimizers[0].optimizer.param_groups
    assert {group["step"] for group in groups if group["params"]} == {8}
