"""Megatron, SGLang and transformers agree on the trained tiny model's log-probabilities, float32, routes replayed.

`pytest -s tests/engine/test_parity.py` prints the table.
"""

from pathlib import Path

import pytest
import torch

from megatron_rl.contracts import Prompt, Rollout, Sampling
from megatron_rl.mcore.hf_config import read_hf_config
from megatron_rl.prompts.factory import open_prompts
from megatron_rl.tokenizer import Tokenizer
from sglang_bridge.cpu_support import declare_torchvision_schemas
from support.engines import running_engine, sample
from support.rollout_files import write_rollouts
from support.torchrun import torchrun

SCRIPT = Path(__file__).with_name("megatron_logprobs.py")
CHECKPOINT = Path(__file__).parents[2] / "megatron_rl/assets/qwen3_moe_tiny_column_addition"
MEAN, MAX = 2e-6, 5e-5


def rollout_logprobs(rollouts: list[Rollout]) -> dict[str, torch.Tensor]:
    return {
        r.trajectory_id: torch.cat([torch.from_numpy(s.logprobs.copy()) for s in r.segments if s.logprobs is not None])
        for r in rollouts
    }


def transformers_logprobs(rollouts: list[Rollout]) -> dict[str, torch.Tensor]:
    """One sequence at a time, with the recorded experts forced through forward hooks on the routers."""
    declare_torchvision_schemas()
    from transformers import Qwen3MoeForCausalLM
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    model = Qwen3MoeForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
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
        result[rollout.trajectory_id] = picked[num_prompt - 1 :]
    return result


def difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> tuple[float, float, int]:
    assert left.keys() == right.keys()
    deltas = torch.cat([(left[name] - right[name]).abs() for name in sorted(left)])
    return float(deltas.mean()), float(deltas.max()), len(deltas)


@pytest.mark.engine
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_three_implementations_agree(tmp_path: Path) -> None:
    model = read_hf_config(CHECKPOINT)
    prompts: list[Prompt] = list(open_prompts("column_addition", Tokenizer.from_directory(CHECKPOINT)).held_out[:320])
    with running_engine(CHECKPOINT, tmp_path) as engine:
        sampling = Sampling(max_new_tokens=32, temperature=1.0, stop_token_ids=model.eos_token_ids)
        rollouts = sample(engine, model, prompts, sampling)
    write_rollouts(tmp_path / "rollouts.bin", rollouts)
    logprobs = {"SGLang": rollout_logprobs(rollouts), "transformers": transformers_logprobs(rollouts)}
    for name, ranks, tokens in (
        ("Megatron 1 rank", 1, 4096),
        ("Megatron 1 rank, small packs", 1, 300),
        ("Megatron EP2", 2, 2048),
    ):
        out = tmp_path / f"{ranks}-{tokens}.pt"
        torchrun(
            SCRIPT, str(CHECKPOINT), str(tmp_path / "rollouts.bin"), str(out), str(ranks), str(tokens), ranks=ranks
        )
        logprobs[name] = torch.load(out, weights_only=True)
    rows = {}
    for name in ("Megatron 1 rank", "Megatron 1 rank, small packs", "Megatron EP2"):
        for reference in ("SGLang", "transformers"):
            rows[f"{name} against {reference}"] = difference(logprobs[name], logprobs[reference])
    rows["SGLang against transformers"] = difference(logprobs["SGLang"], logprobs["transformers"])
    for name, (mean, largest, count) in rows.items():
        print(f"{name}: mean {mean:.2e}, max {largest:.2e} over {count} tokens")
    assert all(count >= 5000 for _, _, count in rows.values())
    assert all(mean <= MEAN and largest <= MAX for mean, largest, _ in rows.values()), rows
