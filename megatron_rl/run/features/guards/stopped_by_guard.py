"""The failure of a run whose numbers went wrong."""

from __future__ import annotations

from megatron_rl.contracts.exit_codes import ExitCode, Failure


class StoppedByGuard(Failure):
    """Numbers went wrong, and a guard stops the run.

    first_step: the first step whose update may be at fault: checkpoints from before it are good.
    """

    exit_code = ExitCode.NON_FINITE

    def __init__(self, text: str, first_step: int) -> None:
        super().__init__(text)
        self.first_step = first_step
