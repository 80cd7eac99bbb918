import json
from pathlib import Path

import msgspec
import pytest

from megatron_rl.config.schema import DataSettings
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.prompts.pass_rates import (
    Header,
    PassRate,
    PassRateFile,
    identity_of,
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
    reward="r",
    date="2026-11-22",
)
RIGHT_OF_FOUR = {"p0": 0, "p1": 1, "p2": 2, "p3": 3, "p4": 4}


def rates(right: dict[str, int] = RIGHT_OF_FOUR) -> list[PassRate]:
    return [PassRate(id=name, right=count, samples=4) for name, count in right.items()]


def written(path: Path, header: Header = HEADER) -> Path:
    file = PassRateFile(path, header)
    file.add(rates())
    file.finish()
    return path


def source(
    n: int = 5, *, band: list[float] | None, known: list[PassRate] | None = None
) -> PromptSource:
    prompts = [Prompt(id=f"p{i}", token_ids=(i,), answer="1", task="t") for i in range(n)]
    settings = DataSettings(source="column_addition", pass_rate_range=band)
    return PromptSource(
        prompts,
        prompts[:1],
        settings,
        rates={r.id: r for r in (rates() if known is None else known)},
    )


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "rates.jsonl")
    assert list(read_pass_rates(path, SETTINGS).values()) == rates()
    assert [json.loads(line) for line in path.read_text().splitlines()][1] == {
        "id": "p0",
        "right": 0,
        "samples": 4,
    }
    assert not (tmp_path / "rates.jsonl.part").exists()


def test_rates_of_another_data_set_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "rates.jsonl")
    with pytest.raises(
        PromptDataError, match=r"data\.pass_rates=.*another data set \(seed: 0 there, 1 here\)"
    ):
        read_pass_rates(path, DataSettings(source="column_addition", seed=1))
    read_pass_rates(
        path, DataSettings(source="column_addition", num_train=7, num_eval=9, shuffle=False)
    )
    questions = tmp_path / "train.jsonl"
    questions.write_text('{"prompt": "1+1=", "answer": 2}\n')
    of_file = DataSettings(source="jsonl", train_path=str(questions))
    path = written(
        tmp_path / "others.jsonl", msgspec.structs.replace(HEADER, data=identity_of(of_file))
    )
    assert read_pass_rates(path, of_file)
    questions.write_text('{"prompt": "1+2=", "answer": 3}\n')
    with pytest.raises(PromptDataError, match=r"another data set \(sha256: .*profile_prompts"):
        read_pass_rates(path, of_file)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([], "line 1: it is no such line"),
        (["{}"], "line 1: .*missing required field `data`"),
        (["HEADER", '{"id": "p0", "right": 5, "samples": 4}'], "line 2: .*right=5 of samples=4"),
        (["HEADER", '{"id": "p0", "right": -1, "samples": 4}'], "line 2: "),
        (
            [
                "HEADER",
                '{"id": "p0", "right": 1, "samples": 4}',
                '{"id": "p0", "right": 1, "samples": 4}',
            ],
            "line 3: .*p0",
        ),
        (["HEADER", '{"id": "p0", "ri'], "line 2: it is no such line"),
        (["FORMAT"], "format 9, and this version reads 1"),
    ],
)
def test_a_file_that_is_no_such_file_is_refused_by_line(
    tmp_path: Path, lines: list[str], told: str
) -> None:
    header = msgspec.json.encode(HEADER).decode()
    other = msgspec.json.encode(msgspec.structs.replace(HEADER, format=9)).decode()
    path = tmp_path / "rates.jsonl"
    path.write_text("\n".join(lines).replace("HEADER", header).replace("FORMAT", other))
    with pytest.raises(PromptDataError, match=f"data.pass_rates=.*{told}"):
        read_pass_rates(path, SETTINGS)


def test_an_interrupted_profile_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rates.jsonl"
    PassRateFile(path, HEADER).add(rates()[:2])
    with path.with_name("rates.jsonl.part").open("a") as file:
        file.write('{"id": "p2", "ri')  # it was killed in the middle of a line
    again = PassRateFile(path, msgspec.structs.replace(HEADER, date="2026-11-23"))
    assert list(again.done) == ["p0", "p1"]
    again.add(rates()[2:])
    again.finish()
    assert list(read_pass_rates(path, SETTINGS).values()) == rates()


def test_what_an_attempt_with_other_settings_left_is_not_mixed_in(tmp_path: Path) -> None:
    PassRateFile(tmp_path / "rates.jsonl", HEADER)
    with pytest.raises(PromptDataError, match=r"other settings left \(temperature\)\. Remove it"):
        PassRateFile(tmp_path / "rates.jsonl", msgspec.structs.replace(HEADER, temperature=0.5))


@pytest.mark.parametrize(
    ("band", "inside"),
    [
        (None, "p0 p1 p2 p3 p4 p5"),
        ([0.25, 0.75], "p1 p2 p3"),
        ([0.0, 0.0], "p0"),
        ([0.3, 1.0], "p2 p3 p4"),  # p5 has no rate
    ],
)
def test_only_prompts_in_the_band_are_taken(band: list[float] | None, inside: str) -> None:
    running, wanted = source(6, band=band), set(inside.split())
    assert running.num_available == len(wanted)
    for _ in range(3):
        assert {prompt.id for prompt in running.take(len(wanted))} == wanted


def test_a_band_that_leaves_too_few_prompts_is_refused_with_what_there_is() -> None:
    known = [
        *rates(),
        PassRate(id="stranger", right=1, samples=4),
        PassRate(id="p5", right=0, samples=0),
    ]
    running = source(7, band=[0.25, 0.75], known=known)
    with pytest.raises(PromptDataError) as refused:
        running.require(4)
    assert str(refused.value).startswith(
        "data.pass_rate_range=[0.25, 0.75]: it leaves 3 prompts, and rollout.prompts_per_step=4"
    )
    assert "pass rates: of 5 of 7 training prompts, and of 1 unknown ids; 3 in data.pass_rate_range" in str(
        refused.value
    )
    with pytest.raises(PromptDataError, match=r"data\.band"):
        running.take(4)


def test_a_band_that_changes_keeps_the_place_in_the_epoch() -> None:
    running, other = source(5, band=[0.0, 1.0]), source(5, band=None)
    first = [prompt.id for prompt in running.take(2)]
    assert first == [prompt.id for prompt in other.take(2)]
    running.choose([0.5, 1.0])
    later = [prompt.id for prompt in running.take(3)]
    assert set(later) == {"p2", "p3", "p4"}
    went_on = source(5, band=[0.5, 1.0])
    running.choose(None)
    went_on.choose(None)
    went_on.seek(running.cursor)
    assert [p.id for p in went_on.take(4)] == [p.id for p in running.take(4)]
