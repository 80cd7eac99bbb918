"""What each way of choosing prompts costs, without engines: the selectors of a run against
simulated correctness.

    python launch/studies/simulate_selection.py            # the table of docs/selection.md
    python launch/studies/simulate_selection.py --drift 2
    python launch/studies/simulate_selection.py --generalise
    python launch/studies/simulate_selection.py --small    # seconds

6,000 prompts in five tags have logits of their pass rates around -5, -2.5, 0, 2.5 and 5 (standard
deviation 2.5). They drift by 0.004 +- 0.03 a step whatever is trained, or twice that with --drift
2. A step wants 128 mixed groups of 8; a right response has 3,000 tokens, a wrong one 7,000. 300
steps, four seeds; all but "first 100" and "unseen > 150" is from after step 100. Newly seen: of the
prompts that began at 2 % at most and passed 10 %, those drawn within 60 steps. Unseen > 150: the
share of prompts that were not drawn for more than 150 steps. Of uniform, of cut: tokens per mixed
group as a share of theirs.

--generalise: 1,536 prompts, 32 groups a step, 80 steps, and what the policy learns elsewhere opens
the hardest tag: from step 20 to 34 its logits rise by 4. Steps 21 to 80 count, and the opened are
drawn within 30 steps or not.
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
    SelectionExpertSettings,
    SelectionSettings,
)
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.group import Group, RolloutLocation, RolloutRef, Verdict
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.credit.group_kinds import GroupKind, kind_of
from megatron_rl.prompts.selection.factory import open_selector
from megatron_rl.prompts.selection.selector import RolloutRequest, SelectionResult, StepSelection
from megatron_rl.prompts.source import PromptSource

VARIANTS: Mapping[str, SelectionSettings] = {
    "uniform": SelectionSettings(),
    "oversample": SelectionSettings(name="oversample"),
    "belief": SelectionSettings(name="belief"),
    "belief, flat skipped": SelectionSettings(name="belief", skip="zero_variance"),
    "belief, flat skipped, no probe": SelectionSettings(
        name="belief", skip="zero_variance", probe_samples=0
    ),
    "belief, flat skipped, sharp": SelectionSettings(
        name="belief",
        skip="zero_variance",
        expert=SelectionExpertSettings(
            acceptance_target=0.92, acceptance_exponent=14, min_acceptance=0.04
        ),
    ),
}
COLUMNS = (
    "rollouts/mixed",
    "ktok/mixed",
    "of uniform",
    "of cut",
    "first 100",
    "newly seen",
    "unseen > 150",
    "rounds",
    "weight ESS",
)
UNIFORM, CUT = "uniform", "oversample"
TAGS = (-5.0, -2.5, 0.0, 2.5, 5.0)
TOKENS = {True: 3000, False: 7000}
LONG = 150
OPENED = range(20, 35)  # steps in which the hardest tag becomes solvable


@dataclass(frozen=True)
class Size:
    """warm: steps that most columns leave out. soon: in which an opened prompt should be drawn.
    rise: of logits.
    """

    prompts: int = 6000
    wanted: int = 128
    samples: int = 8
    steps: int = 300
    warm: int = 100
    seeds: int = 4
    soon: int = 60
    rise: float = 0.0


SMALL = Size(prompts=2400, wanted=48, steps=200, warm=100, seeds=1)
GENERALISE = Size(prompts=1536, wanted=32, steps=80, warm=20, soon=30, rise=4.0)


class World:
    """Prompts whose pass rates drift.

    rates: float64 [prompts]; last: the step that drew each last.
    """

    def __init__(self, size: Size, seed: int, drift: float) -> None:
        self.size, self.drift = size, drift
        self.rng = np.random.default_rng([seed, 7])
        self.tags = tags = self.rng.integers(len(TAGS), size=size.prompts)
        self.logits = self.rng.normal(np.array(TAGS)[tags], 2.5)
        self.prompts = [
            Prompt(id=str(i), token_ids=(1,), answer="", task="sim", difficulty=str(tag))
            for i, tag in enumerate(tags)
        ]
        self.rates = 1 / (1 + np.exp(-self.logits))
        self.hopeless = self.rates <= 0.02
        self.solvable_at = np.full(size.prompts, -1)
        self.met_soon = np.zeros(size.prompts, np.bool_)
        self.last = np.zeros(size.prompts, np.int64)

    def resume_from(self, step: int) -> None:
        self.logits += self.drift * self.rng.normal(0.004, 0.03, self.size.prompts)
        if step in OPENED:
            self.logits[self.tags == 0] += self.size.rise / len(OPENED)
        self.rates = 1 / (1 + np.exp(-self.logits))
        self.solvable_at[self.hopeless & (self.rates > 0.1) & (self.solvable_at < 0)] = step

    def answer(self, ask: RolloutRequest, before: Group | None, step: int) -> Group:
        """The group with `ask.samples` more rollouts."""
        index = int(ask.prompt.id)
        self.last[index] = step
        self.met_soon[index] |= 0 <= self.solvable_at[index] >= step - self.size.soon
        right = self.rng.random(ask.samples) < self.rates[index]
        drawn = tuple(ROLLOUTS[bool(r)][ask.first_sample + i] for i, r in enumerate(right))
        earlier = () if before is None else before.rollouts
        return Group(group_id=f"{step}-{ask.index}", prompt=ask.prompt, rollouts=earlier + drawn)


def _rollout(sample: int, right: bool) -> RolloutRef:
    return RolloutRef(
        rollout_id="",
        prompt_id="",
        sample_index=sample,
        num_inputs=TOKENS[right],
        num_trainable=TOKENS[right],
        num_generated=TOKENS[right],
        finish_reason=FinishReason.STOP,
        versions=(0,),
        verdict=Verdict(reward=float(right), correctness=float(right)),
        location=RolloutLocation(node=0, pid=0, fd=0, offset=0, nbytes=0),
    )


ROLLOUTS = {right: [_rollout(sample, right) for sample in range(64)] for right in (True, False)}


@dataclass
class Tally:
    """What some steps drew, and the mixed groups among what they would have trained on."""

    rollouts: int = 0
    tokens: int = 0
    mixed: int = 0
    rounds: int = 0
    steps: int = 0

    def note(self, groups: Sequence[Group], chosen: SelectionResult, rounds: int) -> None:
        for group in groups:
            self.rollouts += len(group.rollouts)
            self.tokens += sum(rollout.num_generated for rollout in group.rollouts)
        self.mixed += sum(kind_of(group) is GroupKind.MIXED for group in chosen.groups)
        self.rounds, self.steps = self.rounds + rounds, self.steps + 1


def play(selection: StepSelection, world: World, step: int) -> tuple[dict[int, Group], int]:
    """Answer all that a step asks. Returns its groups and how often it waited."""
    groups: dict[int, Group] = {}
    asks, rounds = selection.first_round(), 0
    while asks:
        rounds += 1
        for ask in (waiting := list(asks)):
            groups[ask.index] = world.answer(ask, groups.get(ask.index), step)
            if (extension := selection.handle_group(ask.index, groups[ask.index])) is not None:
                waiting.append(extension)
        asks = selection.next_round()
    return groups, rounds


def simulate(settings: SelectionSettings, size: Size, seed: int, drift: float) -> dict[str, float]:
    """One run of one variant."""
    world = World(size, seed, drift)
    source = PromptSource(
        world.prompts, world.prompts[:1], DataSettings(source="column_addition", seed=seed)
    )
    rollout = RolloutSettings(
        max_new_tokens=8192, prompts_per_step=size.wanted, samples_per_prompt=size.samples
    )
    selector = open_selector(source, rollout, settings, seed=seed)
    early, late, unseen, weights = Tally(), Tally(), list[float](), list[float]()
    for step in range(1, size.steps + 1):
        world.resume_from(step)
        selection = selector.select(step)
        groups, rounds = play(selection, world, step)
        (early if step <= size.warm else late).note(
            list(groups.values()), selection.result(), rounds
        )
        weights.append(selection.metrics().get("select/weight_ess", 1.0))
        if step > LONG:
            unseen.append(float(np.mean(step - world.last > LONG)))
    told = (world.solvable_at > size.warm) & (world.solvable_at <= size.steps - size.soon)
    return {
        "rollouts/mixed": late.rollouts / late.mixed,
        "ktok/mixed": late.tokens / late.mixed / 1000,
        "first 100": early.rollouts / early.mixed,
        "newly seen": float(world.met_soon[told].mean()) if told.any() else float("nan"),
        "unseen > 150": mean(unseen) if unseen else float("nan"),
        "rounds": late.rounds / late.steps,
        "weight ESS": mean(weights[size.warm :]),
    }


def compare(
    size: Size, drift: float, variants: Sequence[str] = tuple(VARIANTS)
) -> dict[str, dict[str, float]]:
    """The columns of every variant: means over the seeds, and its tokens as a share of uniform's
    and of cutting's.
    """
    results: dict[str, dict[str, float]] = {}
    for name in variants:
        runs = [simulate(VARIANTS[name], size, seed, drift) for seed in range(size.seeds)]
        results[name] = {column: mean(run[column] for run in runs) for column in runs[0]}
    for result in results.values():
        for column, other in (("of uniform", UNIFORM), ("of cut", CUT)):
            result[column] = result["ktok/mixed"] / results[other]["ktok/mixed"]
    return results


def table(results: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """The lines of a Markdown table."""
    yield "| | " + " | ".join(COLUMNS) + " |"
    yield "|---" * (len(COLUMNS) + 1) + "|"
    for name, result in results.items():
        yield f"| {name} | " + " | ".join(f"{result[column]:.3g}" for column in COLUMNS) + " |"


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--small", action="store_true", help="2,400 prompts, 48 groups a step, 200 steps, one seed"
    )
    parser.add_argument(
        "--generalise", action="store_true", help="the hardest tag becomes solvable; see above"
    )
    parser.add_argument(
        "--drift", type=float, default=1.0, help="how fast pass rates change; 1: as above"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and return the exit code."""
    asked = parser().parse_args(arguments)
    size = GENERALISE if asked.generalise else SMALL if asked.small else Size()
    if not 0 <= asked.drift <= 100:
        parser().error("--drift must be from 0 to 100")
    print("\n".join(table(compare(size, asked.drift))))
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
