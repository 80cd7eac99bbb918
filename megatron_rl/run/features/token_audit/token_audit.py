"""Compares the token counts of engines and run, while no engine works."""

from __future__ import annotations

from typing import Any

import msgspec

from megatron_rl.contracts.wire_types import Count
from megatron_rl.engines.token_counter import TokenCounter
from megatron_rl.run.features.observer import Observer
from megatron_rl.run.features.parts import FeatureParts


class AuditState(msgspec.Struct, frozen=True, kw_only=True):
    """uncompared_tokens: tokens that engines had sampled for the record of the next step."""

    uncompared_tokens: Count = 0


class TokenAudit(Observer):
    """Adds what the engines have counted to the account of a step."""

    name = "token_audit"

    def __init__(self, counter: TokenCounter) -> None:
        self._counter = counter
        self._uncompared_tokens = 0  # sampled for the next record before the checkpoint

    def after_quiet(self, num_tokens: int, values: dict[str, float]) -> None:
        """Add the tokens that the engines counted since the last call, if all of them count."""
        comparison = self._counter.compare(num_tokens)
        if comparison is None:
            return
        earlier_tokens = self._uncompared_tokens
        self._uncompared_tokens = 0
        tokens_by_name = {
            "account/engine_tokens": earlier_tokens + comparison.engine_tokens,
            "account/unaccounted": comparison.uncounted_tokens,
        }
        for name, tokens in tokens_by_name.items():
            values[name] = values.get(name, 0.0) + tokens

    def keep_tokens(self, num_tokens: int) -> None:
        """Keep tokens for the first comparison of the run that resumes."""
        self._uncompared_tokens += num_tokens

    def state_to_save(
        self, state: dict[str, Any], *, has_open_steps: bool, num_uncounted: int
    ) -> dict[str, Any]:
        """Return the tokens that no record has yet."""
        num_tokens = self._uncompared_tokens + num_uncounted
        saved: dict[str, Any] = msgspec.to_builtins(AuditState(uncompared_tokens=num_tokens))
        return saved

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where a run was saved."""
        self._uncompared_tokens = msgspec.convert(state, AuditState).uncompared_tokens


def open_token_audit(parts: FeatureParts) -> TokenAudit | None:
    """Return the audit on rank 0, None without engines, or where nothing is saved."""
    if parts.checkpoints is None or parts.connections is None:
        return None
    return TokenAudit(parts.connections.token_counter)
