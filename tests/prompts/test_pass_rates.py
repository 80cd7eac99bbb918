import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_rl.config.schema import DataSettings, EnvironmentSettings, RewardSettings
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.run_state import PromptCursor
from megatron_rl.prompts.pass_rates import (
    Header,
    PassRate,
    PassRateFile,
    identity_of,
    judge_differences,
    judge_of,
    read_part,
    read_pass_rates,
)
from megatron_rl.prompts.question import PromptDataError
from megatron_rl.prompts.source import PromptSource

SETTINGS = DataSettings(source="column_addition")
HEADER = Header(
    data=identity_of(SETTINGS),
    model="m",
    samples=4,
    temperature=1.0,
    max_new_tokens=8,
    top_p=1.0,
    reward={"name": "r"},
    environment={},
    date="2026-11-22",
)
RATES = [PassRate(id=f"p{correct}", correct=correct, samples=4) for correct in range(5)]
LINE = '{"id": "p0", "correct": 1, "samples": 4}'


def write_rates(path: Path, header: Header = HEADER) -> Path:
    file = PassRateFile(path, header)
    file.add(RATES)
    file.finish()
    return path


def make_source(
    n: int = 5, *, pass_rate_range: list[float] | None, rates: list[PassRate] = RATES
) -> PromptSource:
    prompts = [Prompt(id=f"p{i}", token_ids=(i,), answer="1", task="t") for i in range(n)]
    settings = DataSettings(source="column_addition", pass_rate_range=pass_rate_range)
    return PromptSource(prompts, prompts[:1], settings, rates={rate.id: rate for rate in rates})


def ids_of(prompts: list[Prompt]) -> list[str]:
    return [prompt.id for prompt in prompts]


def test_rates_are_read_as_written(tmp_path: Path) -> None:
    path = write_rates(tmp_path / "rates.jsonl")
    assert list(read_pass_rates(path, SETTINGS).values()) == RATES
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[1] == {"id": "p0", "correct": 0, "samples": 4}
    assert not (tmp_path / "rates.jsonl.part").exists()


def test_rates_of_another_seed_are_refused(tmp_path: Path) -> None:
    path = write_rates(tmp_path / "rates.jsonl")
    words = r"data\.pass_rates=.*another data set \(seed: 0 .*, 1 .*profile_prompts"
    with pytest.raises(PromptDataError, match=words):
        read_pass_rates(path, DataSettings(source="column_addition", seed=1))


def test_the_size_and_order_of_a_data_set_may_change(tmp_path: Path) -> None:
    path = write_rates(tmp_path / "rates.jsonl")
    settings = DataSettings(source="column_addition", num_train=7, num_eval=9, shuffle=False)
    assert list(read_pass_rates(path, settings).values()) == RATES


def test_rates_of_another_file_are_refused(tmp_path: Path) -> None:
    questions = tmp_path / "train.jsonl"
    questions.write_text('{"prompt": "1+1=", "answer": 2}\n')
    settings = DataSettings(source="jsonl", train_path=str(questions))
    header = msgspec.structs.replace(HEADER, data=identity_of(settings))
    path = write_rates(tmp_path / "rates.jsonl", header)
    assert read_pass_rates(path, settings)
    questions.write_text('{"prompt": "1+2=", "answer": 3}\n')
    with pytest.raises(PromptDataError, match=r"another data set \(sha256: .*profile_prompts"):
        read_pass_rates(path, settings)


def test_a_data_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    settings = DataSettings(source="jsonl", train_path=str(tmp_path / "absent.jsonl"))
    with pytest.raises(PromptDataError, match=r"data\.train_path=.*absent.*No such file"):
        identity_of(settings)


def test_a_file_of_rates_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(PromptDataError, match=r"data\.pass_rates=.*No such file.*profile_prompts"):
        read_pass_rates(tmp_path / "absent.jsonl", SETTINGS)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "line 1: .*no valid header"),
        (["{}"], "line 1: .*missing required field `data`"),
        (["HEADER", LINE.replace("1,", "5,")], "line 2: .*correct=5 .* exceed samples=4"),
        (["HEADER", LINE.replace("1,", "-1,")], "line 2: .*no valid pass rate"),
        (["HEADER", LINE.replace("}", ', "mean_tokens": -1}')], "line 2: .*no valid pass rate"),
        (["HEADER", LINE.replace("}", ', "mean_tokens": NaN}')], "line 2: .*no valid pass rate"),
        (["HEADER", LINE.replace("}", ', "mean_tokens": 1e10}')], "line 2: .*no valid pass rate"),
        (["HEADER", LINE, LINE], "line 3: .*'p0' already has a rate"),
        (["HEADER", LINE[:20]], "line 2: .*no valid pass rate"),
        (["FORMAT"], "format 9, .* reads format 2"),
    ],
)
def test_invalid_lines_are_named(tmp_path: Path, lines: list[str], words: str) -> None:
    header = msgspec.json.encode(HEADER).decode()
    other_format = msgspec.json.encode(msgspec.structs.replace(HEADER, format=9)).decode()
    path = tmp_path / "rates.jsonl"
    text = "\n".join(lines).replace("HEADER", header).replace("FORMAT", other_format)
    path.write_text(text)
    with pytest.raises(PromptDataError, match=f"data.pass_rates=.*{words}.*profile_prompts"):
        read_pass_rates(path, SETTINGS)


def test_an_interrupted_profile_continues(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rates.jsonl"
    PassRateFile(path, HEADER).add(RATES[:2])
    with path.with_name("rates.jsonl.part").open("a") as file:
        file.write(LINE[:20])  # killed while it wrote a line
    file = PassRateFile(path, msgspec.structs.replace(HEADER, date="2026-11-23"))
    assert list(file.rates) == ["p0", "p1"]
    file.add(RATES[2:])
    file.finish()
    assert list(read_pass_rates(path, SETTINGS).values()) == RATES


def test_an_interrupted_profile_with_other_settings_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rates.jsonl"
    PassRateFile(path, HEADER)
    with pytest.raises(PromptDataError, match=r"other settings \(temperature\)\. Remove it"):
        PassRateFile(path, msgspec.structs.replace(HEADER, temperature=0.5))


def test_a_file_that_does_not_say_top_p_is_read_but_not_continued(tmp_path: Path) -> None:
    path = write_rates(tmp_path / "rates.jsonl")
    header, _, lines = path.read_text().partition("\n")
    fields = json.loads(header)
    del fields["top_p"]
    old = f"{json.dumps(fields)}\n{lines}"
    path.write_text(old)
    assert list(read_pass_rates(path, SETTINGS).values()) == RATES
    path.with_name("rates.jsonl.part").write_text(old)
    with pytest.raises(PromptDataError, match=r"other settings \(top_p\)\. Remove it"):
        read_part(path, HEADER)


@pytest.mark.parametrize(
    ("pass_rate_range", "ids"),
    [
        (None, "p0 p1 p2 p3 p4 p5"),
        ([0.25, 0.75], "p1 p2 p3"),
        ([0.0, 0.0], "p0"),
        ([0.3, 1.0], "p2 p3 p4"),  # p5 has no rate
    ],
)
def test_only_prompts_in_the_range_are_taken(pass_rate_range: list[float] | None, ids: str) -> None:
    source = make_source(6, pass_rate_range=pass_rate_range)
    ids_in_range = set(ids.split())
    assert source.num_available == len(ids_in_range)
    for _ in range(3):
        assert set(ids_of(source.take(len(ids_in_range)))) == ids_in_range


def test_a_range_with_too_few_prompts_is_refused() -> None:
    rates = [
        *RATES,
        PassRate(id="unknown", correct=1, samples=4),
        PassRate(id="p5", correct=0, samples=0),
    ]
    source = make_source(7, pass_rate_range=[0.25, 0.75], rates=rates)
    with pytest.raises(PromptDataError) as error:
        source.require(4)
    message = str(error.value)
    assert message.startswith("data.pass_rate_range=[0.25, 0.75]: it leaves 3 prompts")
    assert "rollout.prompts_per_step=4" in message
    assert "pass rates: of 5 of 7 training prompts, and of 1 unknown ids; 3 in" in message
    with pytest.raises(PromptDataError, match=r"data\.pass_rate_range"):
        source.take(4)


def test_a_change_of_the_range_keeps_the_position_in_the_epoch() -> None:
    source = make_source(5, pass_rate_range=[0.0, 1.0])
    without_range = make_source(5, pass_rate_range=None)
    assert ids_of(source.take(2)) == ids_of(without_range.take(2))
    source.set_pass_rate_range([0.5, 1.0])
    assert set(ids_of(source.take(3))) == {"p2", "p3", "p4"}


def source_with_two_of(n: int, pass_rate_range: list[float] | None) -> PromptSource:
    """Source of n prompts: p0 and p1 have a rate of 1/2, and the others of 0."""
    rates = [PassRate(id=f"p{i}", correct=4 if i < 2 else 0, samples=8) for i in range(n)]
    return make_source(n, pass_rate_range=pass_rate_range, rates=rates)


def test_passes_over_a_range_shuffle_its_prompts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_with_two_of(300, [0.4, 0.6])
    num_shuffled = []
    shuffle = random.Random.shuffle

    def count(rng: random.Random, items: list[Any]) -> None:
        num_shuffled.append(len(items))
        shuffle(rng, items)

    monkeypatch.setattr(random.Random, "shuffle", count)
    for _ in range(20):
        assert set(ids_of(source.take(2))) == {"p0", "p1"}
    assert num_shuffled == [2] * 19
    assert source.cursor.epoch == 19


def test_an_epoch_ends_with_the_range_that_it_began_with() -> None:
    source = source_with_two_of(6, None)
    source.take(1)
    source.set_pass_rate_range([0.4, 0.6])
    for _ in range(3):
        assert set(ids_of(source.take(2))) == {"p0", "p1"}
    source.set_pass_rate_range(None)
    assert {prompt.id for _ in range(3) for prompt in source.take(3)} == {f"p{i}" for i in range(6)}


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
def test_a_run_resumes_within_an_epoch_of_another_range(num_steps: int) -> None:
    source = source_with_two_of(40, [0.0, 0.6])
    for _ in range(num_steps):
        source.take(9)
    source.set_pass_rate_range([0.0, 0.3])
    source.take(2)
    cursor = msgspec.json.decode(msgspec.json.encode(source.cursor), type=PromptCursor)
    copy = source_with_two_of(40, [0.4, 0.6])
    copy.set_pass_rate_range([0.0, 0.3])
    copy.seek(cursor)
    for _ in range(8):
        assert ids_of(copy.take(7)) == ids_of(source.take(7))
    assert copy.cursor == source.cursor


def test_a_cursor_does_not_depend_on_the_range() -> None:
    source = make_source(5, pass_rate_range=[0.0, 1.0])
    source.take(2)
    source.set_pass_rate_range(None)
    copy = make_source(5, pass_rate_range=[0.5, 1.0])
    copy.set_pass_rate_range(None)
    copy.seek(source.cursor)
    assert ids_of(copy.take(4)) == ids_of(source.take(4))


def test_a_resumed_pass_over_a_range_needs_the_same_rates() -> None:
    """Rates that were measured again would move prompts into and out of the pass."""
    other_rates = [PassRate(id=f"p{index}", correct=4 - index, samples=4) for index in range(5)]
    narrow = [0.25, 1.0]
    source = make_source(5, pass_rate_range=narrow)
    source.take(2)
    cursor = msgspec.json.decode(msgspec.json.encode(source.cursor), type=PromptCursor)
    make_source(5, pass_rate_range=[0.0, 1.0]).seek(cursor)
    with pytest.raises(PromptDataError, match=r"data\.pass_rates: .* \[0\.25, 1\.0\]"):
        make_source(5, pass_rate_range=narrow, rates=other_rates).seek(cursor)
    of_older_version = msgspec.structs.replace(cursor, range_digest="")
    make_source(5, pass_rate_range=narrow, rates=other_rates).seek(of_older_version)
    whole = make_source(5, pass_rate_range=None)
    whole.take(2)
    make_source(5, pass_rate_range=None, rates=other_rates).seek(whole.cursor)


def write_rates_judged_by(
    path: Path, reward: RewardSettings, environment: EnvironmentSettings
) -> Path:
    header = msgspec.structs.replace(
        HEADER, reward=judge_of(reward), environment=judge_of(environment)
    )
    return write_rates(path, header)


def test_settings_that_judge_responses_otherwise_are_named_with_both_values(tmp_path: Path) -> None:
    reward = RewardSettings(answer="boxed", timeout_s=1.0)
    environment = EnvironmentSettings(timeout_s=2.0)
    path = write_rates_judged_by(tmp_path / "rates.jsonl", reward, environment)
    assert judge_differences(path, reward, environment) == []
    assert judge_differences(path, RewardSettings(answer="boxed"), EnvironmentSettings()) == []
    other_reward = RewardSettings(name="m:C", options={"limit": 3})
    other_environment = EnvironmentSettings(name="m:E")
    assert judge_differences(path, other_reward, other_environment) == [
        "reward.answer: boxed in the file, last_number here",
        "reward.name: exact_match in the file, m:C here",
        "reward.options: {} in the file, {'limit': 3} here",
        "environment.name: single_turn in the file, m:E here",
    ]


def test_demonstrations_are_judged_as_single_turns(tmp_path: Path) -> None:
    demonstration = EnvironmentSettings(name="demonstration")
    single_turn = EnvironmentSettings()
    for number, (first, second) in enumerate(
        ((demonstration, single_turn), (single_turn, demonstration))
    ):
        path = write_rates_judged_by(tmp_path / f"{number}.jsonl", RewardSettings(), first)
        assert judge_differences(path, RewardSettings(), second) == []


def test_a_setting_that_the_file_lacks_is_named(tmp_path: Path) -> None:
    header = msgspec.structs.replace(HEADER, reward={}, environment=judge_of(EnvironmentSettings()))
    path = write_rates(tmp_path / "rates.jsonl", header)
    assert judge_differences(path, RewardSettings(), EnvironmentSettings()) == [
        "reward.answer: None in the file, last_number here",
        "reward.name: None in the file, exact_match here",
        "reward.options: None in the file, {} here",
    ]


def test_a_part_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "rates.jsonl.part").mkdir()
    with pytest.raises(
        PromptDataError, match=r"data\.pass_rates=.*rates\.jsonl\.part: .*directory"
    ):
        read_part(tmp_path / "rates.jsonl", HEADER)


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    (tmp_path / "rates.jsonl.part").write_text("{}\n")
    words = r"data\.pass_rates=.*rates\.jsonl\.part line 1: .*no valid header"
    with pytest.raises(PromptDataError, match=words):
        read_part(tmp_path / "rates.jsonl", HEADER)


def test_a_file_with_the_older_keys_of_reasoning_gym_is_of_the_same_data_set(
    tmp_path: Path,
) -> None:
    options = {"task": "chain_sum", "min_terms": 3}
    settings = DataSettings(source="reasoning_gym", options=options)
    identity: dict[str, Any] = {"source": "reasoning_gym", "seed": 0, "task": "chain_sum"}
    identity["task_config"] = {"min_terms": 3}
    old_header = msgspec.structs.replace(HEADER, data=identity)
    file = write_rates(tmp_path / "rates.jsonl", old_header)
    assert read_pass_rates(file, settings)
    other = DataSettings(source="reasoning_gym", options=options | {"min_terms": 4})
    with pytest.raises(PromptDataError, match="another data set"):
        read_pass_rates(file, other)
