"""A model with scripted responses, for tests of environments. It records its requests."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron_rl.contracts.prompt import Prompt, Sampling
from megatron_rl.contracts.routes import RouteShape
from megatron_rl.environments.chat_turns import ChatTurns
from megatron_rl.environments.episode import Episode, EpisodeRules
from megatron_rl.models.tokenizer import Tokenizer
from sglang_bridge.generation import FinishReason, Generation, VersionSpan

CHECKPOINT = (
    Path(__file__).parents[2] / "megatron_rl/models/assets/qwen3_moe_tiny_two_digit_addition"
)
TOKENIZER = Tokenizer.from_directory(CHECKPOINT)
EOS = TOKENIZER.eos_ids[0]
ROUTES = RouteShape(moe_layers=(0, 2), num_hidden_layers=3, num_experts=8, topk=2)
PROMPT = Prompt(
    id="q",
    token_ids=TOKENIZER.encode("12+34="),
    answer="46",
    task="two_digit_addition",
    demonstration="046",
)


@dataclass(frozen=True)
class Turn:
    """One response.

    spans: (weight version, number of tokens sampled with it). The numbers add up to `len(ids)`.
    """

    ids: tuple[int, ...]
    spans: tuple[tuple[str, int], ...]
    finish: FinishReason = FinishReason.STOP
    retractions: int = 0
    routes: bool = True

    @classmethod
    def saying(cls, text: str, *, version: str = "3", **changes: object) -> "Turn":
        """Return a text and its end of sequence, sampled with one version."""
        ids = (*TOKENIZER.encode(text), EOS)
        return cls(ids, ((version, len(ids)),), **changes)  # type: ignore[arg-type]


@dataclass
class ScriptedModel:
    """Implements `generate` of an episode.

    requests: tokens and budget of every request.
    """

    turns: list[Turn]
    requests: list[tuple[tuple[int, ...], int]] = field(default_factory=list)

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
        turn = self.turns[len(self.requests)]
        self.requests.append((tuple(token_ids), sampling.max_new_tokens))
        ends = np.cumsum([count for _, count in turn.spans])
        return Generation(
            output_ids=np.array(turn.ids, np.int32),
            logprobs=logprobs(turn.ids),
            routes=wire_rows(len(self.requests), len(token_ids) + len(turn.ids) - 1)
            if turn.routes
            else None,
            finish_reason=turn.finish,
            version_spans=tuple(
                VersionSpan(v, int(end) - count, int(end))
                for (v, count), end in zip(turn.spans, ends, strict=True)
            ),
            cached_tokens=0,
            retractions=turn.retractions,
        )


def logprobs(ids: Sequence[int]) -> np.ndarray:
    """Return distinct log-probabilities for each token id."""
    return (-np.array(ids) / 64).astype(np.float32)


def wire_rows(call: int, num_inputs: int) -> np.ndarray:
    """Return routes, [num_inputs, 3, 2], that depend on the call and the input position."""
    first = (np.arange(num_inputs)[:, None] + call + np.arange(3)[None]) % 8
    return np.stack([first, (first + call) % 8], axis=-1).astype(np.int32)


def open_episode(
    model: ScriptedModel,
    *,
    budget: int = 32,
    routes: RouteShape | None = ROUTES,
    train_truncated: bool = True,
    prompt: Prompt = PROMPT,
    chat_turns: ChatTurns | None = None,
    tokenizer: Tokenizer = TOKENIZER,
) -> Episode:
    rules = EpisodeRules(
        sampling=Sampling(max_new_tokens=budget, temperature=1.0),
        routes=routes,
        train_truncated=train_truncated,
    )
    return Episode(
        prompt, model.generate, tokenizer, rules, rollout_id="g/0", chat_turns=chat_turns
    )
