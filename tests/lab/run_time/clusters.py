"""Simulates what sampling ahead brings on machines that engines and trainer do not share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal, NamedTuple

from megatron_rl.config.schema import RolloutSettings
from tests.lab.run_time.simulation.cluster import Machines
from tests.lab.run_time.simulation.engine import EngineSpeed
from tests.lab.run_time.simulation.lengths import Knowledge, LogNormalLengths
from tests.lab.run_time.simulation.run import SimulatedRun, TrainerSpeed, simulate

OnUpdate = Literal["wait", "resume"]

# Seconds of a forward pass of an engine. Guesses of the size that a 30B model with 3B active
# parameters has on one GPU.
SPEED = EngineSpeed(step=8e-3, request=45e-6, kv_token=33e-9, prompt_token=20e-6, dispatch=0.05)
SYNC_SECONDS = 5.0
INTERRUPT_SECONDS = 1.0
SHARES = (0.2, 0.5, 0.8)
WAYS: tuple[tuple[OnUpdate, int], ...] = (
    ("wait", 1),
    ("resume", 1),
    ("resume", 2),
    ("resume", 4),
)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The size of a simulation.

    spreads: standard deviations of the logarithm of lengths. The first and the last `edge` steps
    do not count, because engines fill and empty there.
    """

    prompts: int = 128
    samples: int = 8
    median: int = 4000
    cap: int = 32768
    prompt_tokens: int = 200
    between_prompts: float = 0.7
    spreads: tuple[float, ...] = (0.8, 1.2)
    engines: int = 8
    max_running: int = 64
    steps: int = 24
    edge: int = 5
    seeds: int = 3

    def lengths(
        self,
        spread: float,
        seed: int,
        *,
        prompts: int | None = None,
        knowledge: Knowledge = "nothing",
    ) -> LogNormalLengths:
        """Return the lengths of its responses. prompts: None means its own number."""
        return LogNormalLengths(
            prompts=self.prompts if prompts is None else prompts,
            samples=self.samples,
            median=self.median,
            spread=spread,
            between_prompts=self.between_prompts,
            cap=self.cap,
            prompt_tokens=self.prompt_tokens,
            seed=seed,
            knowledge=knowledge,
        )

    @property
    def steady(self) -> range:
        """The steps that count."""
        return range(self.edge + 1, self.steps - self.edge + 1)


SMALL = Scenario(prompts=8, median=200, cap=1600, steps=14, seeds=2, engines=2, max_running=16)


class Gain(NamedTuple):
    """A way to sample ahead against none.

    speed_ups: by seed, the seconds of a step without sampling ahead over those with it.
    bound_shares: by seed, max(sampling, training) + sync over the seconds of a step. `sampling` is
    the time of a step alone.
    """

    speed_ups: list[float]
    bound_shares: list[float]


def cluster_table(scenario: Scenario) -> Iterator[str]:
    """Yield the table of what each way brings at each share of training."""
    yield (
        "| spread | `on_update` | `max_staleness` | "
        + " | ".join(f"training {share:.0%}" for share in SHARES)
        + " |"
    )
    yield "|---" * (3 + len(SHARES)) + "|"
    for spread in scenario.spreads:
        bases = [sampling_seconds(scenario, spread, seed) for seed in range(scenario.seeds)]
        for on_update, staleness in WAYS:
            gains = [
                measure_gain(scenario, spread, bases, on_update, staleness, share)
                for share in SHARES
            ]
            label = "1 or more" if on_update == "wait" else str(staleness)
            cells = [f"{spread:g}", f"`{on_update}`", label, *map(_cell, gains)]
            yield "| " + " | ".join(cells) + " |"


def measure_gain(
    scenario: Scenario,
    spread: float,
    bases: Sequence[Sequence[float]],
    on_update: OnUpdate,
    staleness: int,
    share: float,
) -> Gain:
    """Simulate a way to sample ahead with each seed.

    bases: by seed and step, the seconds in which a step is sampled alone. share: of training in a
    step without sampling ahead.
    """
    speed_ups = []
    bound_shares = []
    for seed, base in enumerate(bases):
        # While a step of `scenario.steady` trains, the next one is sampled
        sampling = [base[step] for step in scenario.steady]
        mean_training = share / (1 - share) * (fmean(sampling) + SYNC_SECONDS)
        run = _simulate(scenario, spread, seed, on_update, staleness, mean_training)
        steps = [run.steps[step - 1] for step in scenario.steady]
        scale = mean_training / fmean(step.tokens for step in steps)
        training = [scale * step.tokens for step in steps]
        seconds = fmean(step.seconds for step in steps)
        speed_ups.append((fmean(sampling) + mean_training + SYNC_SECONDS) / seconds)
        slower = fmean(map(max, sampling, training))
        bound_shares.append((slower + SYNC_SECONDS) / seconds)
    return Gain(speed_ups, bound_shares)


def sampling_seconds(scenario: Scenario, spread: float, seed: int) -> list[float]:
    """Return the seconds in which each step is sampled alone."""
    run = _simulate(scenario, spread, seed, "wait", 0, 0.0)
    return [step.taken_at - step.start for step in run.steps]


def _simulate(
    scenario: Scenario,
    spread: float,
    seed: int,
    on_update: OnUpdate,
    staleness: int,
    training: float,
) -> SimulatedRun:
    """Simulate a run. training: the mean seconds of training on a step."""
    lengths = scenario.lengths(spread, seed)
    tokens = fmean(sum(map(sum, lengths.lengths(step))) for step in scenario.steady)
    return simulate(
        RolloutSettings(
            max_new_tokens=scenario.cap,
            max_staleness=staleness,
            on_update=on_update,
        ),
        lengths,
        Machines(speed=SPEED, engines=scenario.engines, max_running=scenario.max_running),
        TrainerSpeed(token=training / tokens, sync=SYNC_SECONDS, interrupt=INTERRUPT_SECONDS),
        scenario.steps,
    )


def _cell(gain: Gain) -> str:
    mean = fmean(gain.speed_ups)
    num_seeds = len(gain.speed_ups)
    error = stdev(gain.speed_ups) / num_seeds**0.5 if num_seeds > 1 else 0.0
    return f"{mean:.2f} ± {error:.2f} x, {fmean(gain.bound_shares):.0%}"


def assumption_table(scenario: Scenario) -> Iterator[str]:
    """Yield all that the table of clusters stands on."""
    yield "| assumption | value | kind |"
    yield "|---|---|---|"
    responses = scenario.engines * scenario.max_running
    rows = {
        "engines x responses that each runs at a time": (
            f"{scenario.engines} x {scenario.max_running}"
        ),
        "prompts x samples of a step": f"{scenario.prompts} x {scenario.samples}, "
        f"{scenario.prompts * scenario.samples / responses:g} for each place in an engine",
        "length of a response": f"lognormal, median {scenario.median:,}, at most "
        f"{scenario.cap:,} tokens",
        "spread of the logarithm": ", ".join(f"{spread:g}" for spread in scenario.spreads),
        "share of its variance between prompts": f"{scenario.between_prompts:g}",
        "length of a prompt": f"{scenario.prompt_tokens} tokens",
        "a decode pass": f"{SPEED.step * 1e3:g} ms + {SPEED.request * 1e6:g} µs a response + "
        f"{SPEED.kv_token * 1e9:g} ns a token of its context",
        "reading a prompt or a partial response": f"{SPEED.prompt_token * 1e6:g} µs a token, "
        "nothing is in the prefix cache",
        "a request until its engine has it": f"{SPEED.dispatch:g} s",
        "a sync": f"{SYNC_SECONDS:g} s",
        "an interruption": f"{INTERRUPT_SECONDS:g} s",
        "training": "in proportion to the tokens of the step",
        "rewards, selection, evaluations, checkpoints, failures": "none",
        "cores, memory or network that engines and trainer share": "none",
        "memory for contexts": "enough for all responses that run",
    }
    for name, value in rows.items():
        yield f"| {name} | {value} | assumed |"
    yield "| which request goes where, what a sync waits for | as `megatron_rl/rollouts/` | code |"
