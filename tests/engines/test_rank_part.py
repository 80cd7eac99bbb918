"""The ranks that send weights, by the settings of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl.config.schema import EngineSettings, SyncSettings
from megatron_rl.engines import rank_part
from sglang_bridge.engine import Engine
from sglang_bridge.keys import create_keys
from sglang_bridge.weights.crew import Order, Target
from sglang_bridge.weights.source import SoleSource
from tests.support import thread_ranks


class Transport:
    """Connects at once."""

    timeout_seconds = 1.0

    def connect(self, admins: Any) -> dict[str, str]:
        return {}


@pytest.mark.parametrize(("engines_per_tree", "owners"), [(1, [True, True]), (2, [True, False])])
def test_one_rank_sends_to_trees(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engines_per_tree: int, owners: list[bool]
) -> None:
    """Two broadcasts to the same engines wait for each other if engines begin with different ones.

    An engine takes one at a time, in the order in which the requests of owners arrive.
    """
    monkeypatch.setattr(rank_part, "gather_bytes", thread_ranks.gather_bytes)
    settings = SyncSettings(engines_per_tree=engines_per_tree)
    target = Target("connection", Engine(url="http://127.0.0.1:1"))
    source = SoleSource(lambda: iter([("w", torch.zeros(1))]))

    def work(group: thread_ranks.Group) -> list[bool]:
        job: Any = SimpleNamespace(rank=group[1], control_group=group, device=torch.device("cpu"))
        part = rank_part.open_rank_part(
            job,
            create_keys(),
            settings,
            EngineSettings(),
            directory=tmp_path,
            model_path=tmp_path,
            log=lambda _: None,
            transport=Transport(),  # type: ignore[arg-type]
        )
        results = part.connect(Order(1, (target,), ()), source)
        return [result.is_owner for result in results]

    assert thread_ranks.run_on_ranks(2, work) == [owners, owners]
