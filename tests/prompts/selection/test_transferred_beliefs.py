"""A run that begins with what another run believed: `selection.beliefs_from`."""

import functools
from typing import Any

import msgspec
import numpy as np
import pytest

from megatron_rl.config.schema import DataSettings, RolloutSettings, SelectionSettings
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.run_state import SelectorState
from megatron_rl.prompts.pass_rates import PassRate
from megatron_rl.prompts.question import PromptDataError
from megatron_rl.prompts.selection.belief_selector import BeliefSelector
from megatron_rl.prompts.selection.factory import open_selector
from megatron_rl.prompts.selection.transferred_beliefs import TransferredBeliefs
from megatron_rl.prompts.source import PromptSource
from tests.prompts.selection.test_belief import chance, of
from tests.support.answers import make_pool, play_steps

POOL = make_pool(400, tags=4)
ROLLOUT = RolloutSettings(max_new_tokens=8, prompts_per_step=12, samples_per_prompt=8)
BELIEF = SelectionSettings(name="belief", beliefs_from="runs/before")


def source(
    pool: list[Prompt], rates: dict[str, PassRate] | None = None, *, seed: int = 0
) -> PromptSource:
    return PromptSource(
        pool, pool[:1], DataSettings(source="column_addition", seed=seed), rates=rates
    )


def opened(prompts: PromptSource) -> BeliefSelector:
    selector = open_selector(prompts, ROLLOUT, BELIEF, seed=0)
    assert isinstance(selector, BeliefSelector)
    return selector


def two_solved(prompt: Prompt, sample: int) -> float:
    """Tags 0 and 1 are solved."""
    return float(prompt.difficulty in "01" or (sample + prompt.token_ids[0]) % 2)


@functools.cache
def of_all() -> SelectorState:
    return before(POOL)


def before(pool: list[Prompt]) -> SelectorState:
    """What a run left in a checkpoint: each prompt was offered, three of four were drawn, twice or
    so.
    """
    selector, prompts = opened(source(pool)), [p for i, p in enumerate(pool) if i % 16 < 12]
    for prompt in pool:
        selector.beliefs.row(prompt, 1)
    for step in range(1, 13):
        selector.beliefs.observe(
            step, [of(p, *(two_solved(p, i) for i in range(8))) for p in prompts[step % 6 :: 6]]
        )
    return msgspec.json.decode(msgspec.json.encode(selector.state()), type=SelectorState)


def begun(state: SelectorState, prompts: PromptSource) -> BeliefSelector:
    assert state.beliefs is not None
    TransferredBeliefs("selection.beliefs_from=runs/before", state.prompts.digest, state.beliefs).give(
        prompts
    )
    return opened(prompts)


def drawn(state: SelectorState) -> dict[str, float]:
    """Mean by prompt id, of those that were ever drawn."""
    beliefs: Any = state.beliefs
    means, seen = np.frombuffer(beliefs.means, np.float32), np.frombuffer(beliefs.last_group_steps, np.int32)
    return {
        name: float(m) for name, m, s in zip(beliefs.prompts, means, seen, strict=True) if s >= 0
    }


def test_a_new_run_begins_with_what_another_believed_and_with_nothing_else_of_it() -> None:
    state = of_all()
    selector = begun(state, source(POOL))
    now, old = selector.state(), state.beliefs
    assert now.beliefs is not None and old is not None
    assert (
        set(now.beliefs.prompts) == set(drawn(state)) < set(old.prompts)
        and len(drawn(state)) == 300
    )
    assert drawn(now) == pytest.approx(drawn(state), abs=0.02), "as of its last step"
    assert now.beliefs.drift == old.drift and now.beliefs.wander == old.wander
    assert old.strata[0][2][0] > 50 and now.beliefs.strata[0][2][0] == pytest.approx(8), (
        "first groups' worth"
    )
    assert selector.beliefs.prior(("t", "0"))[0] > 1.1 > selector.beliefs.prior(("t", "2"))[0]
    assert (now.prompts.epoch, now.prompts.position, now.prompts.postponed_indices) == (
        0,
        0,
        (),
    ) and now.beliefs.window == ()
    assert now.beliefs.clock == 0 and selector.beliefs.oldest(1) == 1, (
        "as if all had been drawn just before the run"
    )


def test_nothing_is_believed_of_another_policy_until_first_groups_bear_it_out() -> None:
    same, other = (begun(of_all(), source(POOL)).beliefs for _ in range(2))
    assert {same.start(prompt, 1)[1] for prompt in POOL[:4]} == {0.25}
    known, left = drawn(of_all()), POOL[352]
    for step in (1, 2):
        some = [p for p in POOL if p.id in known][step * 32 : step * 32 + 32]
        same.observe(step, [of(p, *(two_solved(p, i) for i in range(8))) for p in some])
        other.observe(step, [of(p, *(1 - two_solved(p, i) for i in range(8))) for p in some])
    assert same.start(left, 3)[1] < 0.1 and chance(same, left, 3) < 0.45, (
        "it is solved, as the other run saw"
    )
    assert other.start(left, 3)[1] > 0.24 and chance(other, left, 3) > 0.5, "another model"
    sure = chance(same, left, 3)
    same.widen()
    assert same.start(left, 3)[1] == 0.25 and chance(same, left, 3) > 0.5 > sure, (
        "a stage may ask for that again"
    )


def test_a_changed_pool_keeps_what_it_can_and_the_rest_aside() -> None:
    state = of_all()
    known = drawn(state)
    rate = {
        "p500": PassRate(id="p500", right=16, samples=16),
        "p1": PassRate(id="p1", right=0, samples=16),
    }
    pool = [*POOL[:100], *make_pool(600, tags=4)[500:]]
    prompts = source(pool, rate)
    selector = begun(state, prompts)
    here = sum(prompt.id in known for prompt in pool)
    assert prompts.told()[
        2
    ] == f"beliefs: of {here} of 200 training prompts, and of {len(known) - here} others" + (
        "; fewer than half are known, and the others begin as their stratum does"
        if here < 100
        else ""
    )
    assert selector.beliefs.aside == len(known) - here > 0
    new, rated, solved = (next(p for p in pool if p.id == name) for name in ("p502", "p500", "p1"))
    assert chance(selector.beliefs, new, 1) == chance(opened_prior(selector), new, 1), (
        "like its stratum"
    )
    assert selector.beliefs.start(rated, 0)[0] > 1.4, "like its rate"
    assert selector.beliefs.start(solved, 0)[0] == drawn(selector.state())["p1"] > 1.3
    assert chance(selector.beliefs, solved, 1) == pytest.approx(0.56, abs=0.02), (
        "a belief wins over a rate"
    )
    play_steps(selector, range(1, 4), two_solved)
    saved = msgspec.json.decode(msgspec.json.encode(selector.state()), type=SelectorState)
    assert set(known) <= set(saved.beliefs.prompts if saved.beliefs else ()), (
        "they are in the run's own checkpoints"
    )
    assert begun(saved, source(POOL)).beliefs.aside == len(
        set(drawn(saved)) - {prompt.id for prompt in POOL}
    )


def opened_prior(selector: BeliefSelector) -> Any:
    """Beliefs with the same strata that know no prompt."""
    state: Any = selector.state().beliefs
    alone = opened(source(POOL))
    empty = msgspec.structs.replace(
        state, prompts=(), means=b"", variances=b"", last_group_steps=b"", last_update_steps=b""
    )
    alone.beliefs.restore(empty)
    return alone.beliefs


def test_few_known_prompts_are_counted_not_refused() -> None:
    prompts = source([*POOL[:3], *make_pool(600)[500:]])
    begun(of_all(), prompts)
    assert (
        "of 3 of 103 training prompts" in prompts.told()[2]
        and "fewer than half" in prompts.told()[2]
    )
    assert source(POOL).told()[2] == ""


def test_beliefs_of_another_data_set_are_refused_with_counts() -> None:
    state = of_all()
    told = rf"selection\.beliefs=runs/before: .*of {len(drawn(state))} prompts, .*100 training prompts.*Give"
    with pytest.raises(PromptDataError, match=told):
        begun(state, source(make_pool(600)[500:]))


def test_a_line_is_no_name_in_another_file() -> None:
    by_line = [msgspec.structs.replace(p, id=f"data.train_path:{i}") for i, p in enumerate(POOL, 1)]
    other = [msgspec.structs.replace(p, token_ids=(i + 1,)) for i, p in enumerate(by_line)]
    state = before(by_line)
    same = begun(state, source(by_line))
    assert same.beliefs.aside == 0 and len(same.beliefs) == len(drawn(state))
    with pytest.raises(PromptDataError, match=r"called by the line.*rows an `id`"):
        begun(state, source(other))
    named = [*other[:10], *POOL]
    assert state.beliefs is not None
    some = begun(before([*by_line[:100], *POOL[100:]]), source(named))
    assert some.beliefs.aside == 0 and not any(":" in name for name in drawn(some.state()))


def test_the_gap_between_two_models_is_neither_drift_nor_wandering() -> None:
    selector = begun(of_all(), source(POOL))
    v, q, prior = (
        selector.beliefs.drift,
        selector.beliefs.wander,
        selector.beliefs.prior(("t", "0"))[0],
    )
    solved = [p for p in POOL if p.difficulty == "0" and p.id in drawn(selector.state())][:20]
    selector.beliefs.observe(30, [of(prompt, *[0.0] * 8) for prompt in solved])
    assert abs(selector.beliefs.drift) <= abs(v) and selector.beliefs.wander <= q
    assert selector.beliefs.prior(("t", "0"))[0] < prior - 0.2, (
        "but it shows how this model does at first"
    )
    selector.beliefs.observe(60, [of(prompt, *[1.0] * 8) for prompt in solved])
    assert selector.beliefs.drift > v, "what follows is this run's own"


def test_a_resumed_run_goes_on_with_its_own() -> None:
    state = of_all()
    whole, first, resumed = (begun(state, source(POOL, seed=1)) for _ in range(3))
    play_steps(whole, range(1, 9), two_solved), play_steps(first, range(1, 5), two_solved)
    resumed.restore(msgspec.json.decode(msgspec.json.encode(first.state()), type=SelectorState))
    play_steps(resumed, range(5, 9), two_solved)
    assert resumed.state() == whole.state()


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: {"last_update_steps": s.last_update_steps[:-1]},
        lambda s: {"strata": ()},
        lambda s: {"prompts": (s.prompts[1], *s.prompts[1:])},
        lambda s: {"means": np.full(len(s.prompts), np.nan, np.float32).tobytes()},
        lambda s: {"means": np.full(len(s.prompts), 2.0, np.float32).tobytes()},
        lambda s: {"variances": np.full(len(s.prompts), -1.0, np.float32).tobytes()},
        lambda s: {"seen": np.full(len(s.prompts), -7, np.int32).tobytes()},
    ],
    ids=["short", "no_strata", "twice", "nan", "beyond", "negative", "never"],
)
def test_damaged_beliefs_are_refused(damage: Any) -> None:
    state = of_all()
    spoilt = msgspec.structs.replace(
        state, beliefs=msgspec.structs.replace(state.beliefs, **damage(state.beliefs))
    )
    with pytest.raises(
        PromptDataError, match=r"selection\.beliefs=runs/before: .*damaged .*Give another"
    ):
        begun(spoilt, source(POOL))
    with pytest.raises(PromptDataError, match=r"run\.resume: .*damaged .*Give another"):
        opened(source(POOL)).restore(spoilt)
