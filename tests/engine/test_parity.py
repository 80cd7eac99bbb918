"""Megatron, SGLang and transformers agree on the trained tiny models' log-probabilities, float32, routes replayed.

`pytest -s tests/engine/test_parity.py` prints the table.
"""

from pathlib import Path

import pytest
import torch

from megatron_rl.contracts.prompt import Prompt, Sampling
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.models.qwen3_moe import read_shape
from megatron_rl.models.tokenizer import Tokenizer
from megatron_rl.prompts.factory import open_prompts
from sglang_bridge.cpu_support import declare_torchvision_schemas
from support.engines import running_engine, sample
from support.rollout_files import write_rollouts
from support.torchrun import torchrun

SCRIPT = Path(__file__).with_name("megatron_logprobs.py")
ASSETS = Path(__file__).parents[2] / "megatron_rl/models/assets"
MEAN, MAX = 2e-6, 5e-5


def rollout_logprobs(rollouts: list[Rollout]) -> dict[str, torch.Tensor]:
    return {
        r.rollout_id: torch.cat([torch.from_numpy(s.logprobs.copy()) for s in r.segments if s.logprobs is not None])
        for r in rollouts
    }


def transformers_logprobs(checkpoint: Path, rollouts: list[Rollout]) -> dict[str, torch.Tensor]:
    """One sequence at a time, with the recorded experts forced through forward hooks on the routers."""
    declare_torchvision_schemas()
    from transformers import Qwen3MoeForCausalLM
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    model = Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    routers = [module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter)]
    current: list[torch.Tensor] = []

    def force(layer: int) -> object:
        def hook(router: torch.nn.Module, inputs: object, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            logits, weights, _ = output
            experts = current[0][:, layer]
            chosen = torch.softmax(logits.float(), -1).gather(1, experts)
            return logits, (chosen / chosen.sum(-1, keepdim=True)).to(weights.dtype), experts

        return hook

    for layer, router in enumerate(routers):
        router.register_forward_hook(force(layer))
    result = {}
    for rollout in rollouts:
        tokens = torch.cat([torch.from_numpy(s.tokens.astype("int64")) for s in rollout.segments])
        assert rollout.routes is not None
        current[:] = [torch.from_numpy(rollout.routes.astype("int64"))]
        with torch.no_grad():
            logprobs = model(tokens[None, :-1]).logits[0].log_softmax(-1)
        num_prompt = len(rollout.segments[0].tokens)
        picked = logprobs.gather(1, tokens[1:, None])[:, 0]
        result[rollout.rollout_id] = picked[num_prompt - 1 :]
    return result


def difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> torch.Tensor:
    assert left.keys() == right.keys()
    return torch.cat([(left[name] - right[name]).abs() for name in sorted(left)])


def all_logprobs(
    task: str, num_prompts: int, max_new_tokens: int, directory: Path
) -> dict[str, dict[str, torch.Tensor]]:
    """By implementation: the log-probabilities of one set of sampled responses."""
    checkpoint = ASSETS / f"qwen3_moe_tiny_{task}"
    model = read_shape(checkpoint)
    source = open_prompts(task, Tokenizer.from_directory(checkpoint), num_train=num_prompts, num_eval=num_prompts // 4)
    prompts: list[Prompt] = [*source.held_out, *source.train][:num_prompts]
    with running_engine(checkpoint, directory) as engine:
        sampling = Sampling(max_new_tokens=max_new_tokens, temperature=1.0, stop_token_ids=model.eos_token_ids)
        rollouts = sample(engine, model, prompts, sampling)
    file = directory / "rollouts.bin"
    write_rollouts(file, rollouts)
    logprobs = {"SGLang": rollout_logprobs(rollouts), "transformers": transformers_logprobs(checkpoint, rollouts)}
    for ranks, tokens in ((1, 4096), (1, 300), (2, 2048)):
        out = directory / f"{ranks}-{tokens}.pt"
        torchrun(SCRIPT, str(checkpoint), str(file), str(out), str(ranks), str(tokens), ranks=ranks)
        logprobs[f"Megatron EP{ranks}, packs of {tokens}"] = torch.load(out, weights_only=True)
    return logprobs


@pytest.mark.engine
@pytest.mark.distributed
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("task", "num_prompts", "max_new_tokens"), [("two_digit_addition", 1400, 6), ("column_addition", 320, 32)]
)
def test_three_implementations_agree(task: str, num_prompts: int, max_new_tokens: int, tmp_path: Path) -> None:
    logprobs = all_logprobs(task, num_prompts, max_new_tokens, tmp_path)
    names = list(logprobs)
    for index, name in enumerate(names):
        for other in names[:index]:
            deltas = difference(logprobs[name], logprobs[other])
            sizes = f"{len(deltas)} tokens, mean {deltas.mean():.2e}, max {deltas.max():.2e}"
            print(f"{task}: {name} against {other}: {sizes}")
            assert len(deltas) >= 5000
            assert float(deltas.mean()) <= MEAN
            assert float(deltas.max()) <= MAX
