"""Megatron, SGLang and transformers agree on the tiny models' log-probabilities.

All compute in float32 and replay the routes.

`pytest -s tests/engine/test_parity.py` prints the table.
"""

from pathlib import Path

import pytest
import torch

from megatron_rl.config.cli import compose
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.models.tokenizer import Tokenizer
from megatron_rl.prompts.factory import open_prompts
from tests.mcore.test_same_sums import EXACT
from tests.support.engine_rollouts import sample_rollouts
from tests.support.recordings import write_rollouts
from tests.support.torchrun import torchrun

SCRIPT = Path(__file__).with_name("megatron_logprobs.py")
ASSETS = Path(__file__).parents[2] / "megatron_rl/models/assets"
MEAN = 2e-6
MAX = 5e-5
# An engine and Megatron add in the same order (docs/on_policy.md), in all layouts of this test.
# Only the last bits of the softmax's logarithm differ.
ON_POLICY_MEAN = 1.5e-7
ON_POLICY_MAX = 2e-6


def rollout_logprobs(rollouts: list[Rollout]) -> dict[str, torch.Tensor]:
    return {
        r.rollout_id: torch.cat(
            [torch.from_numpy(s.logprobs.copy()) for s in r.segments if s.logprobs is not None]
        )
        for r in rollouts
    }


def transformers_logprobs(checkpoint: Path, rollouts: list[Rollout]) -> dict[str, torch.Tensor]:
    """Compute one sequence at a time. Hooks on the routers force the recorded experts."""
    from transformers import Qwen3MoeForCausalLM
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    model = Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    routers = [module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter)]
    current: list[torch.Tensor] = []
    for layer, router in enumerate(routers):
        router.register_forward_hook(routing_hook(current, layer))
    result = {}
    for rollout in rollouts:
        tokens = torch.cat([torch.from_numpy(s.tokens.astype("int64")) for s in rollout.segments])
        assert rollout.routes is not None
        current[:] = [torch.from_numpy(rollout.routes.astype("int64"))]
        with torch.no_grad():
            logprobs = model(tokens[None, :-1]).logits[0].log_softmax(-1)
        num_prompt = len(rollout.segments[0].tokens)
        token_logprobs = logprobs.gather(1, tokens[1:, None])[:, 0]
        result[rollout.rollout_id] = token_logprobs[num_prompt - 1 :]
    return result


def routing_hook(current: list[torch.Tensor], layer: int) -> object:
    """A forward hook of a router. current: the routes of the sequence, [tokens, layers, topk]."""

    def hook(
        router: torch.nn.Module, inputs: object, output: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        logits, weights, _ = output
        experts = current[0][:, layer]
        values = torch.softmax(logits.float(), -1).gather(1, experts)
        return logits, (values / values.sum(-1, keepdim=True)).to(weights.dtype), experts

    return hook


def difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> torch.Tensor:
    assert left.keys() == right.keys()
    return torch.cat([(left[name] - right[name]).abs() for name in sorted(left)])


SAMPLES = 2
# By task: the experiment, and a number of prompts that gives more than 5,000 response tokens.
TASKS = {"two_digit_addition": ("smoke", 700), "column_addition": ("quickstart", 160)}

# By number of ranks: layouts of `tests.support.layouts`, and tokens in a micro-batch.
LAYOUTS = {
    1: (("one-none", 4096), ("one-none", 300)),
    2: (("ep2-none", 2048), ("pp2_vpp2-none", 1024), ("cp2-none", 2048)),
}


def record(task: str, directory: Path) -> list[Rollout]:
    """Sample rollouts of a shipped checkpoint, and write them to `directory`/rollouts."""
    experiment, num_prompts = TASKS[task]
    configuration = compose(
        [
            f"experiment={experiment}",
            f"data.num_train={num_prompts}",
            f"rollout.prompts_per_step={num_prompts}",
            f"rollout.samples_per_prompt={SAMPLES}",
            "engine.extra_args=['--weight-version=0']",
        ]
    )
    prompts = open_prompts(configuration.data, Tokenizer.from_directory(configuration.model.path))
    rollouts = sample_rollouts(configuration, prompts.train, directory)
    assert len(rollouts) == SAMPLES * num_prompts
    write_rollouts(directory / "rollouts", rollouts)
    return rollouts


def compare(task: str, logprobs: dict[str, dict[str, torch.Tensor]]) -> None:
    names = list(logprobs)
    for index, name in enumerate(names):
        for other in names[:index]:
            deltas = difference(logprobs[name], logprobs[other])
            sizes = f"{len(deltas)} tokens, mean {deltas.mean():.2e}, max {deltas.max():.2e}"
            print(f"{task}: {name} against {other}: {sizes}")
            assert len(deltas) >= 5000
            mean = MEAN
            largest = MAX
            if EXACT and name.startswith("Megatron") and other != "transformers":
                mean, largest = (ON_POLICY_MEAN, ON_POLICY_MAX) if other == "SGLang" else (0.0, 0.0)
            assert float(deltas.mean()) <= mean
            assert float(deltas.max()) <= largest


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_three_implementations_agree(tmp_path: Path) -> None:
    rollouts = {}
    for task in TASKS:
        rollouts[task] = record(task, tmp_path / task)
    for ranks, packs in LAYOUTS.items():
        cases = [
            f"{layout}:{ASSETS / f'qwen3_moe_tiny_{task}'}:{tmp_path / task / 'rollouts'}:{tokens}"
            f":{tmp_path / task / f'Megatron {layout}, packs of {tokens}.pt'}"
            for layout, tokens in packs
            for task in TASKS
        ]
        torchrun(SCRIPT, *cases, ranks=ranks)
    for task in TASKS:
        checkpoint = ASSETS / f"qwen3_moe_tiny_{task}"
        megatron = {
            file.stem: torch.load(file, weights_only=True)
            for file in sorted((tmp_path / task).glob("*.pt"))
        }
        assert len(megatron) == sum(map(len, LAYOUTS.values()))
        engines = {
            "SGLang": rollout_logprobs(rollouts[task]),
            "transformers": transformers_logprobs(checkpoint, rollouts[task]),
        }
        compare(task, engines | megatron)
