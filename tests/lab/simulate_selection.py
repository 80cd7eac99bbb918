"""Simulate the cost of each way to select prompts, without engines.

The selectors are the same as in a run, and correctness is simulated. Start it in the root of the
repository:

    python -m tests.lab.simulate_selection            # the table of docs/results/selection.md
    python -m tests.lab.simulate_selection --drift 2
    python -m tests.lab.simulate_selection --generalise
    python -m tests.lab.simulate_selection --large-pool
    python -m tests.lab.simulate_selection --small    # seconds

The logits of the pass rates of 6,000 prompts in five strata are around -5, -2.5, 0, 2.5 and 5
(standard deviation 2.5). In every step they drift by 0.004 +- 0.03, whatever is trained, or twice
that with --drift 2. A step needs 128 mixed groups of 8. A correct response has 3,000 tokens and an
incorrect one 7,000. There are 300 steps and four seeds.

With --generalise there are 1,536 prompts, 32 groups a step and 80 steps, and training on other
prompts makes the hardest stratum solvable: from step 20 to 34 its logits rise by 4.

With --large-pool there are 12,000 prompts, 32 groups a step, 600 steps and two seeds. One pass over
the prompts takes more than 100 steps with `belief`, and 375 with `uniform`.

Output: a Markdown table of these columns. All but "first 100" and "unseen > 150" leave out the
first 100 steps, the first 20 with --generalise, the first 400 with --large-pool.

    rollouts/mixed        rollouts for each mixed group
    ktok/mixed            thousands of generated tokens for each mixed group
    accepted              share of the offered prompts that a step accepted
    epoch                 steps in which all prompts were offered once
    of uniform            ktok/mixed divided by uniform's
    of oversampling       ktok/mixed divided by oversample's
    first 100             rollouts for each mixed group in the first steps
    newly solvable, seen  share of the prompts that rise from at most 2 % above 10 % and are sampled
                          within 60 steps (30 with --generalise)
    unseen > 150          share of the prompts that were not sampled for more than 150 steps
    rounds                rounds of requests in a step
    weight ESS            effective sample size of the importance weights, as a share
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np

from megatron_rl.config.schema import (
    DataSettings,
    RolloutSettings,
    SelectionSettings,
)
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.group import Group, RolloutLocation, RolloutRef, Verdict
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.credit.group_kinds import GroupKind, kind_of
from megatron_rl.prompts.selection.factory import open_selector
from megatron_rl.prompts.selection.selector import (
    RolloutRequest,
    SelectionResult,
    Selector,
    StepSelection,
)
from megatron_rl.prompts.source import PromptSource

VARIANTS: Mapping[str, SelectionSettings] = {
    "uniform": SelectionSettings(),
    "oversample": SelectionSettings(name="oversample"),
    "belief": SelectionSettings(name="belief"),
    "belief, skip=zero_variance": SelectionSettings(name="belief", skip="zero_variance"),
    "belief, skip=zero_variance, no probe": SelectionSettings(
        name="belief", skip="zero_variance", probe_samples=0
    ),
}
COLUMNS = (
    "rollouts/mixed",
    "ktok/mixed",
    "accepted",
    "epoch",
    "of uniform",
    "of oversampling",
    "first 100",
    "newly solvable, seen",
    "unseen > 150",
    "rounds",
    "weight ESS",
)
UNIFORM = "uniform"
OVERSAMPLE = "oversample"
STRATUM_LOGITS = (-5.0, -2.5, 0.0, 2.5, 5.0)
CORRECT_TOKENS = 3000
INCORRECT_TOKENS = 7000
LONG_TIME = 150
# Steps in which the hardest stratum becomes solvable
OPENING_STEPS = range(20, 35)


@dataclass(frozen=True)
class Size:
    """Size of a simulation.

    prompts_per_step: mixed groups that a step needs.
    first_steps: steps that most columns leave out.
    soon: number of steps within which a newly solvable prompt should be sampled.
    rise: rise of the logits of the hardest stratum.
    """

    prompts: int = 6000
    prompts_per_step: int = 128
    samples: int = 8
    steps: int = 300
    first_steps: int = 100
    seeds: int = 4
    soon: int = 60
    rise: float = 0.0


SMALL = Size(prompts=2400, prompts_per_step=48, steps=200, first_steps=100, seeds=1)
LARGE_POOL = Size(prompts=12000, prompts_per_step=32, steps=600, first_steps=400, seeds=2)
GENERALISE = Size(prompts=1536, prompts_per_step=32, steps=80, first_steps=20, soon=30, rise=4.0)

SIZES = {"full": Size(), "small": SMALL, "generalise": GENERALISE, "large-pool": LARGE_POOL}


class World:
    """Prompts whose pass rates drift.

    rates: float64 [prompts].
    solvable_since: step in which a hopeless prompt became solvable, or -1.
    was_sampled_soon: True for a prompt that was sampled soon after it became solvable.
    last_samples: step in which each prompt was last sampled.
    """

    def __init__(self, size: Size, seed: int, drift: float) -> None:
        self.size = size
        self.drift = drift
        self.rng = np.random.default_rng([seed, 7])
        self.strata = self.rng.integers(len(STRATUM_LOGITS), size=size.prompts)
        self.logits = self.rng.normal(np.array(STRATUM_LOGITS)[self.strata], 2.5)
        self.prompts = [
            Prompt(id=str(i), token_ids=(1,), answer="", task="sim", difficulty=str(stratum))
            for i, stratum in enumerate(self.strata)
        ]
        self.rates = 1 / (1 + np.exp(-self.logits))
        self.was_hopeless = self.rates <= 0.02
        self.solvable_since = np.full(size.prompts, -1)
        self.was_sampled_soon = np.zeros(size.prompts, np.bool_)
        self.last_samples = np.zeros(size.prompts, np.int64)

    def begin_step(self, step: int) -> None:
        """Let the pass rates drift."""
        self.logits += self.drift * self.rng.normal(0.004, 0.03, self.size.prompts)
        if step in OPENING_STEPS:
            self.logits[self.strata == 0] += self.size.rise / len(OPENING_STEPS)
        self.rates = 1 / (1 + np.exp(-self.logits))
        is_new = self.was_hopeless & (self.rates > 0.1) & (self.solvable_since < 0)
        self.solvable_since[is_new] = step

    def respond(self, request: RolloutRequest, group: Group | None, step: int) -> Group:
        """Return the group with `request.samples` more rollouts."""
        index = int(request.prompt.id)
        self.last_samples[index] = step
        self.was_sampled_soon[index] |= 0 <= self.solvable_since[index] >= step - self.size.soon
        is_correct = self.rng.random(request.samples) < self.rates[index]
        responses = tuple(
            ROLLOUTS[bool(correct)][request.first_sample + i]
            for i, correct in enumerate(is_correct)
        )
        previous = () if group is None else group.rollouts
        return Group(
            group_id=f"{step}-{request.index}",
            prompt=request.prompt,
            rollouts=previous + responses,
        )


def _rollout(sample: int, correct: bool) -> RolloutRef:
    tokens = CORRECT_TOKENS if correct else INCORRECT_TOKENS
    return RolloutRef(
        rollout_id="",
        prompt_id="",
        sample_index=sample,
        num_inputs=tokens,
        num_trainable=tokens,
        num_generated=tokens,
        finish_reason=FinishReason.STOP,
        tokens_by_version=((0, 1),),
        verdict=Verdict(reward=float(correct), correctness=float(correct)),
        location=RolloutLocation(node=0, pid=0, fd=0, offset=0, nbytes=0),
    )


# By correctness and sample index
ROLLOUTS = {
    correct: [_rollout(sample, correct) for sample in range(64)] for correct in (True, False)
}


@dataclass
class Tally:
    """Totals over some steps.

    mixed_groups: mixed groups among those that would be trained.
    offers: prompts that were offered, accepted or not.
    weight_ess: sum over the steps.
    """

    rollouts: int = 0
    tokens: int = 0
    mixed_groups: int = 0
    rounds: int = 0
    steps: int = 0
    prompts: int = 0
    offers: float = 0.0
    weight_ess: float = 0.0

    def add(
        self,
        groups: Sequence[Group],
        result: SelectionResult,
        rounds: int,
        metrics: Mapping[str, float],
    ) -> None:
        """Add one step. metrics: of its selection."""
        for group in groups:
            self.rollouts += len(group.rollouts)
            self.tokens += sum(rollout.num_generated for rollout in group.rollouts)
        self.mixed_groups += sum(kind_of(group) is GroupKind.MIXED for group in result.groups)
        self.rounds += rounds
        self.steps += 1
        self.prompts += len(groups)
        self.offers += len(groups) / metrics.get("select/accept_rate", 1.0)
        self.weight_ess += metrics.get("select/weight_ess", 1.0)

    def columns(self, size: Size) -> dict[str, float]:
        """Return the columns of the table that follow from the totals."""
        return {
            "rollouts/mixed": self.rollouts / self.mixed_groups,
            "ktok/mixed": self.tokens / self.mixed_groups / 1000,
            "accepted": self.prompts / self.offers,
            "epoch": size.prompts * self.steps / self.offers,
            "rounds": self.rounds / self.steps,
            "weight ESS": self.weight_ess / self.steps,
        }


def play(selection: StepSelection, world: World, step: int) -> tuple[dict[int, Group], int]:
    """Respond to all requests of a step. Returns its groups and the number of rounds."""
    groups: dict[int, Group] = {}
    requests = selection.first_round()
    rounds = 0
    while requests:
        rounds += 1
        queue = list(requests)
        for request in queue:
            group = world.respond(request, groups.get(request.index), step)
            groups[request.index] = group
            extension = selection.handle_group(request.index, group)
            if extension is not None:
                queue.append(extension)
        requests = selection.next_round()
    return groups, rounds


def simulate(settings: SelectionSettings, size: Size, seed: int, drift: float) -> dict[str, float]:
    """Simulate one run of one variant and return its columns."""
    world = World(size, seed, drift)
    selector = open_world_selector(settings, world, seed)
    early = Tally()
    late = Tally()
    unseen_shares = []
    for step in range(1, size.steps + 1):
        world.begin_step(step)
        selection = selector.select(step)
        groups, rounds = play(selection, world, step)
        tally = early if step <= size.first_steps else late
        result = selection.result()
        tally.add(list(groups.values()), result, rounds, selection.metrics())
        if step > LONG_TIME:
            unseen_shares.append(float(np.mean(step - world.last_samples > LONG_TIME)))
    return late.columns(size) | {
        "first 100": early.rollouts / early.mixed_groups,
        "newly solvable, seen": _share_sampled_soon(world),
        "unseen > 150": mean(unseen_shares) if unseen_shares else float("nan"),
    }


def open_world_selector(settings: SelectionSettings, world: World, seed: int) -> Selector:
    """Open the selector of a run over the prompts of the world."""
    data = DataSettings(source="column_addition", seed=seed)
    source = PromptSource(world.prompts, world.prompts[:1], data)
    rollout = RolloutSettings(
        max_new_tokens=8192,
        prompts_per_step=world.size.prompts_per_step,
        samples_per_prompt=world.size.samples,
    )
    return open_selector(source, rollout, settings, seed=seed)


def _share_sampled_soon(world: World) -> float:
    """The share of newly solvable prompts that were sampled soon, or NaN without any."""
    last = world.size.steps - world.size.soon
    counts = (world.solvable_since > world.size.first_steps) & (world.solvable_since <= last)
    return float(world.was_sampled_soon[counts].mean()) if counts.any() else float("nan")


def compare(
    size: Size, drift: float, variants: Sequence[str] = tuple(VARIANTS)
) -> dict[str, dict[str, float]]:
    """Simulate variants, and return the means of their columns over the seeds.

    variants: names of variants; `UNIFORM` and `OVERSAMPLE` must be among them.
    """
    results: dict[str, dict[str, float]] = {}
    for name in variants:
        runs = [simulate(VARIANTS[name], size, seed, drift) for seed in range(size.seeds)]
        results[name] = {column: mean(run[column] for run in runs) for column in runs[0]}
    for result in results.values():
        for column, other in (("of uniform", UNIFORM), ("of oversampling", OVERSAMPLE)):
            result[column] = result["ktok/mixed"] / results[other]["ktok/mixed"]
    return results


def table(results: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield "| | " + " | ".join(COLUMNS) + " |"
    yield "|---" * (len(COLUMNS) + 1) + "|"
    for name, result in results.items():
        yield f"| {name} | " + " | ".join(f"{result[column]:.3g}" for column in COLUMNS) + " |"


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab.simulate_selection",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    sizes = parser.add_mutually_exclusive_group()
    for size, text in (
        ("small", "2,400 prompts, 48 groups a step, 200 steps, one seed"),
        ("generalise", "make the hardest stratum solvable; see above"),
        ("large-pool", "12,000 prompts, 32 groups a step; see above"),
    ):
        sizes.add_argument(
            f"--{size}", dest="size", action="store_const", const=size, help=text, default="full"
        )
    parser.add_argument(
        "--drift", type=float, default=1.0, help="factor of the drift of pass rates (default: 1)"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and return the exit code."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if not 0 <= options.drift <= 100:
        parser.error(f"--drift={options.drift:g}: it must be from 0 to 100")
    print("\n".join(table(compare(SIZES[options.size], options.drift))))
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
