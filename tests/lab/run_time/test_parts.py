"""The table of what each part brings on a simulated cluster."""

from dataclasses import replace

import pytest

from tests.lab.run_time import parts
from tests.lab.run_time.clusters import SMALL
from tests.lab.run_time.parts import PARTS, part_table


def ratios_of(lines: list[str]) -> list[float]:
    return [float(line.split(" | ")[2].split()[0]) for line in lines[2:]]


def test_every_part_but_the_order_makes_a_step_shorter() -> None:
    before, late, _, fp8, ahead = ratios_of(list(part_table(replace(SMALL, seeds=2))))
    assert before == 1.0 <= late
    assert 1.0 < fp8 < ahead


def test_a_small_cache_costs_time(monkeypatch: pytest.MonkeyPatch) -> None:
    part = replace(PARTS[1], kv_tokens=1e9)
    monkeypatch.setattr(parts, "PARTS", [part, replace(part, kv_tokens=2500)])
    same, slower = ratios_of(list(part_table(replace(SMALL, seeds=2))))
    assert slower < same == 1.0
