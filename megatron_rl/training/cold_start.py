"""Supervised fine-tuning on worked examples: the stage before reinforcement learning."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from megatron_rl.contracts.rollout import FinishReason, Role, Rollout, Segment
from megatron_rl.mcore.optimizer import DistributedAdam, StepResult
from megatron_rl.mcore.schedule import run_schedule
from megatron_rl.models.tokenizer import Tokenizer, write_character_tokenizer
from megatron_rl.prompts.worked import WorkedExample
from megatron_rl.training.batch import Batcher, MicroBatch
from megatron_rl.training.logprobs import ResponseLogprobs

TINY_MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.06,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
}


def write_blank_model(directory: Path) -> None:
    """The tiny model's configuration and character tokenizer, without weights."""
    directory.mkdir(parents=True)
    write_character_tokenizer(directory)
    eos = Tokenizer.from_directory(directory).eos_ids[0]
    (directory / "config.json").write_text(json.dumps({**TINY_MODEL, "eos_token_id": eos}, indent=2) + "\n")


class SupervisedTrainer:
    """One rank's supervised steps over worked examples, reshuffled every epoch."""

    def __init__(
        self,
        examples: Sequence[WorkedExample],
        models: Sequence[torch.nn.Module],
        optimizer: DistributedAdam,
        batcher: Batcher,
        logprobs: ResponseLogprobs,
        *,
        batch_size: int,
        seed: int,
    ) -> None:
        self._models = models
        self._optimizer = optimizer
        self._batcher = batcher
        self._logprobs = logprobs
        self._batches = _batches(examples, batch_size, seed)

    def step(self) -> tuple[float, StepResult]:
        """One optimizer step; returns the mean negative log-likelihood in nats per response token."""
        examples = next(self._batches)
        batch = self._batcher.pack([_as_rollout(example) for example in examples], [0.0] * len(examples))

        def loss(logits: torch.Tensor, index: int) -> tuple[torch.Tensor, float]:
            mean = self._mean_loss(logits, batch)
            return mean, float(mean.detach())

        self._optimizer.zero_grad()
        (value,) = run_schedule(self._models, [batch.packed], loss, forward_only=False)
        return value, self._optimizer.step(loss_is_finite=np.isfinite(value))

    def _mean_loss(self, logits: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        logprob, _ = self._logprobs(logits, batch)
        return -logprob.mean()


def _batches(examples: Sequence[WorkedExample], size: int, seed: int) -> Iterator[list[WorkedExample]]:
    """Endless batches; every example once an epoch, the last short batch left out."""
    generator = random.Random(seed)
    order = list(range(len(examples)))
    while True:
        generator.shuffle(order)
        for start in range(0, len(order) - size + 1, size):
            yield [examples[i] for i in order[start : start + size]]


def _as_rollout(example: WorkedExample) -> Rollout:
    prompt, response = np.array(example.prompt_ids, np.int32), np.array(example.response_ids, np.int32)
    return Rollout(
        rollout_id="worked",
        prompt_id="worked",
        sample_index=0,
        finish_reason=FinishReason.STOP,
        segments=(
            Segment(prompt, Role.PROMPT, False, None, (0, len(prompt)), 0),
            Segment(response, Role.RESPONSE, True, None, (len(prompt), len(prompt) + len(response) - 1), 0),
        ),
        routes=None,
    )
