"""The finding of a guard that asks for a rollback, and the end of a run by a guard."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.contracts.exit_codes import ExitCode, Failure


class StoppedByGuard(Failure):
    """Raised when a guard stops the run, or cannot roll it back."""

    exit_code = ExitCode.NON_FINITE


@dataclass(frozen=True)
class Trouble:
    """The reason for a rollback.

    text: what was measured, and the limit. first_step: the first step whose update may be at fault:
    checkpoints from before it are good. is_repeated: several steps met it, so that it helps no
    longer to go on with the present weights.
    """

    text: str
    first_step: int
    is_repeated: bool = False
