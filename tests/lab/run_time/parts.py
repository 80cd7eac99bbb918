"""Simulates what each part of sampling brings on a cluster, one part after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean

from megatron_rl.config.schema import RolloutSettings
from tests.lab.run_time.clusters import SPEED, SYNC_SECONDS, Scenario
from tests.lab.run_time.simulation.cluster import Machines
from tests.lab.run_time.simulation.engine import EngineSpeed
from tests.lab.run_time.simulation.lengths import Knowledge
from tests.lab.run_time.simulation.run import TrainerSpeed, simulate
from tests.support.intervals import interval

WAVES = 4  # responses of a step for each place in an engine
TRAINING_SECONDS = 300.0  # of a step
# Guesses for a 30B model with 3B active parameters on a GPU with 140 GB: its weights take 60 GB in
# bfloat16 and 30 GB in FP8, and a token of a context 96 kB. FP8 halves what passes read and compute
# of the weights. The contexts stay in bfloat16.
KV_TOKENS = 600_000
FP8_KV_TOKENS = 900_000
FP8_SPEED = replace(SPEED, step=SPEED.step / 2, prompt_token=SPEED.prompt_token / 2)


@dataclass(frozen=True)
class Part:
    """Settings of a run, which one part tells from those before.

    knowledge: of the lengths, for the order. kv_tokens: of contexts in the cache of an engine.
    paper_ratio: the speed-up that the method's paper reports, of another program.
    """

    name: str
    binds_late: bool = False
    knowledge: Knowledge = "nothing"
    speed: EngineSpeed = SPEED
    kv_tokens: float = KV_TOKENS
    max_staleness: int = 0
    paper_ratio: float | None = None


BASE = Part("order of the prompts, early binding")
LATE = replace(BASE, name="late binding", binds_late=True)
LONGEST = replace(LATE, name="longest first, by history", knowledge="history")
FP8 = replace(
    LONGEST, name="FP8 engines", speed=FP8_SPEED, kv_tokens=FP8_KV_TOKENS, paper_ratio=1.52
)
AHEAD = replace(FP8, name="`rollout.max_staleness=1`", max_staleness=1, paper_ratio=None)
PARTS = (BASE, LATE, LONGEST, FP8, AHEAD)


def part_table(scenario: Scenario) -> Iterator[str]:
    """Yield how many times faster a step is with each part and those before it."""
    yield (
        f"| {scenario.engines} engines with {scenario.max_running} responses each "
        "| retractions a step | simulated | published |"
    )
    yield "|---|---|---|---|"
    base_seconds: list[float] = []
    for part in PARTS:
        steps = [_step(scenario, part, seed) for seed in range(scenario.seeds)]
        base_seconds = base_seconds or [seconds for seconds, _ in steps]
        ratios = [before / after for before, (after, _) in zip(base_seconds, steps, strict=True)]
        cells = (
            part.name,
            f"{fmean(retractions for _, retractions in steps):.1f}",
            interval(ratios),
            str(part.paper_ratio or ""),
        )
        yield "| " + " | ".join(cells) + " |"


def _step(scenario: Scenario, part: Part, seed: int) -> tuple[float, float]:
    """Return the seconds of a step, and its retractions."""
    prompts = WAVES * scenario.engines * scenario.max_running // scenario.samples
    lengths = scenario.lengths(
        scenario.spreads[-1], seed, prompts=prompts, knowledge=part.knowledge
    )
    machines = Machines(
        speed=part.speed,
        engines=scenario.engines,
        node_engines=1,
        max_running=scenario.max_running,
        kv_tokens=part.kv_tokens,
        binds_late=part.binds_late,
    )
    settings = RolloutSettings(max_new_tokens=scenario.cap, max_staleness=part.max_staleness)
    trainer = TrainerSpeed(step=TRAINING_SECONDS, sync=SYNC_SECONDS)
    run = simulate(settings, lengths, machines, trainer, num_steps=5)
    return run.seconds_a_step(), run.num_retractions / len(run.steps)
