"""Which prompts are asked: what each way of choosing reads, and what it needs."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from megatron_rl.config.schema import Configuration

_READ = {
    "uniform": ("name",),
    "oversample": ("name", "budget", "surplus"),
    "belief": ("name", "budget", "enough", "floor", "age", "target", "power", "probe", "rescue_budget"),
}


def check_selection(c: Configuration, given: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """A selector's keys, probes that are smaller than groups, and groups that can be compared. given: of the command
    line."""
    selection, samples = c.selection, c.rollout.samples_per_prompt
    asked = [key for key in given if key.partition(".")[0] == "selection"]
    for key in asked:
        name = key.partition(".")[2]
        if name and name not in _READ[selection.name]:
            owners = " or ".join(f"selection={owner}" for owner, names in _READ.items() if name in names)
            yield key, f"selection.name={selection.name} does not read it", f"Remove it, or use {owners}"
    if asked and c.mode in ("train_only", "eval", "profile"):
        yield "selection.name", f"mode={c.mode} chooses no prompts", "Remove it, or use mode=train"
    if selection.name != "uniform" and c.algo.advantages == "one":
        rule = "With algo.advantages=one every judged rollout is trained on: no group is worth more than another"
        yield "selection.name", rule, "Use selection=uniform, or algo.advantages=group"
    if selection.name == "belief":
        if selection.probe == 1 or selection.probe >= samples:
            rule = f"A probe is compared within itself, and is less than a group of {samples}"
            yield "selection.probe", rule, f"Give 2 to {samples - 1}, or 0 for whole groups" if samples > 2 else "Use 0"
        if selection.rescue_budget and not selection.probe:
            yield "selection.rescue_budget", "selection.probe=0 leaves no probe to rescue", "Use 0, or probe"
    if selection.surplus == "keep" and selection.name == "oversample":
        if c.rollout.max_staleness < 1:
            rule = "What is kept for the next step was drawn from older weights, and rollout.max_staleness=0"
            yield "selection.surplus", rule, "Use cut, or rollout.max_staleness=1"
        if c.stages:
            yield "selection.surplus", "A stage may change what a group is, and stages are set", "Use cut"
        if c.run.checkpoint_every:
            yield "selection.surplus", "A checkpoint holds no rollouts, and run.checkpoint_every is set", "Use cut"
