"""A user-defined loss with numbers that go wrong, and kills of rank 0 during a rollback.

KILL_AT in the environment names the place of the kill: `rename`, `load` or `commit`.
"""

import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import megatron_rl.mcore.checkpoint as tensors
from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.losses import LossResult, Objective, ResponseTokens
from megatron_rl.run.checkpoints.store import CheckpointStore

# A batch with this log-probability of a sampled token goes wrong
MARKER = -7.25


class PlantedNumbers:
    """The policy-gradient loss of tokens.

    action: what becomes of a loss at fault. spike: it is multiplied by 1000. nan: it is NaN.
    poison: an embedding that no token uses becomes NaN, and the loss stays. calls: the calls of the
    loss at fault, counted from 1 with that of the warm-up. Empty: those with the marker.
    """

    def __init__(self, action: str, calls: tuple[int, ...] = ()) -> None:
        self._action = action
        self._calls = set(calls)
        self._count = 0

    def prepare(self, response: ResponseTokens) -> Objective:
        def objective(logprobs: torch.Tensor, denominators: Denominators) -> LossResult:
            self._count += 1
            loss = -(response.advantages * logprobs).sum() / (denominators.tokens or 1.0)
            if self._is_at_fault(response):
                loss = self._spoil(loss)
            return LossResult(loss, sums={})

        return objective

    def _is_at_fault(self, response: ResponseTokens) -> bool:
        if self._calls:
            return self._count in self._calls
        return bool((response.rollout_logprobs == MARKER).any())

    def _spoil(self, loss: torch.Tensor) -> torch.Tensor:
        if self._action == "poison":
            gc.unfreeze()  # the run hides its objects from the collector
            embedding = next(m for m in gc.get_objects() if _is_embedding(m))
            embedding.weight.data[0] = float("nan")
            return loss
        return loss * (1000.0 if self._action == "spike" else float("nan"))


def _is_embedding(value: Any) -> bool:
    return type(value).__name__ == "VocabParallelEmbedding"


def _kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_after(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **options: Any) -> None:
        function(*arguments, **options)
        if os.environ.get("RANK", "0") == "0":
            _kill_this_process()

    return run


def _kill_before_commit(commit: Callable[..., Path]) -> Callable[..., Path]:
    def run(store: CheckpointStore, step: int) -> Path:
        if any(store.folder.glob("*.rolled")):
            _kill_this_process()
        return commit(store, step)

    return run


def _mark_rollback(retire: Callable[..., None]) -> Callable[..., None]:
    def run(store: CheckpointStore, step: int) -> None:
        retire(store, step)
        (store.folder / "any.rolled").touch()

    return run


def _plant_kill(place: str | None) -> None:
    store: Any = CheckpointStore
    match place:
        case "rename":
            store.retire_newer = _kill_after(store.retire_newer)
        case "load":
            tensors.load_tensors = _kill_after(tensors.load_tensors)
        case "commit":
            store.retire_newer = _mark_rollback(store.retire_newer)
            store.commit = _kill_before_commit(store.commit)


_plant_kill(os.environ.get("KILL_AT"))
