"""Settings that are refused, and the error that reports them."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from sglang_bridge.refusal import Refusal, format_value

__all__ = ["ConfigurationRefused", "Refusal", "format_value"]


class ConfigurationRefused(Failure):
    """A configuration that must not run.

    refusals: one or more, in the order of the configuration's sections.
    """

    exit_code = ExitCode.REFUSED

    def __init__(self, refusals: Sequence[Refusal]) -> None:
        count = len(refusals)
        summary = "1 setting is refused" if count == 1 else f"{count} settings are refused"
        super().__init__("\n".join([*map(str, refusals), f"{summary}; nothing was started."]))
        self.refusals = tuple(refusals)
