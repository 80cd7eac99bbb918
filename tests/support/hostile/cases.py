"""Hostile answers to a verifier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_rl.contracts.prompt import Prompt


@dataclass(frozen=True, kw_only=True)
class HostileCases:
    """Responses that are hostile to one verifier.

    name, options: of the reward. Each response is judged for each of the prompts. ordinary:
    responses with correct ones among them, whose verdicts must stay the same.
    """

    name: str
    options: dict[str, Any]
    prompts: list[Prompt]
    responses: list[str]
    ordinary: list[str]


def make_prompt(answer: str, details: str = "") -> Prompt:
    """Return a prompt with a reference answer and details."""
    return Prompt(id="p", token_ids=(), answer=answer, task="t", details=details)
