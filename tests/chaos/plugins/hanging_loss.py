"""A user-defined loss that hangs on rank 1 in its second step, for a while."""

import os
import time
from pathlib import Path

import torch

from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.losses import LossResult, Objective, ResponseTokens

_MAX_SECONDS = 120.0


class HangingLoss:
    """The policy-gradient loss of tokens.

    calls: the calls before the loss hangs. end_file: the loss goes on once this file exists.
    """

    def __init__(self, calls: int, end_file: str) -> None:
        self._calls = calls
        self._end_file = Path(end_file)

    def prepare(self, response: ResponseTokens) -> Objective:
        def objective(logprobs: torch.Tensor, denominators: Denominators) -> LossResult:
            self._calls -= 1
            if not self._calls and os.environ["RANK"] == "1":
                wait_for_file(self._end_file)
            loss = -(response.advantages * logprobs).sum() / (denominators.tokens or 1.0)
            return LossResult(loss, sums={})

        return objective


def wait_for_file(file: Path) -> None:
    deadline = time.monotonic() + _MAX_SECONDS
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(1.0)
