"""Overrides of the command line as Hydra reads them."""

import re
from pathlib import Path

import pytest

from megatron_rl.config.cli import compose
from megatron_rl.config.hydra_errors import repeated_settings, unparsable_overrides
from megatron_rl.config.keys import declared_keys
from megatron_rl.config.overrides import quote_text, split_override
from megatron_rl.contracts.refusal import ConfigurationRefused
from tests.support.configurations import accept


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("seed=1", "seed", "1"),
        ("+seed=1", "seed", "1"),
        ("++seed=1", "seed", "1"),
        ("~seed", "seed", ""),
        ("model.path='a=b'", "model.path", "'a=b'"),
        ("+engine@other=managed", "engine@other", "managed"),
        ("hydra/job_logging=none", "hydra/job_logging", "none"),
        ("model.path=/a b/c=d", "model.path", "/a b/c=d"),
        ("+no value", "no value", ""),
    ],
)
def test_an_override_is_split_into_key_and_value(text: str, key: str, value: str) -> None:
    assert split_override(text) == (key, value)


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("run.name=2026_11_21", "run.name='2026_11_21'"),
        ("run.name=1e3", "run.name='1e3'"),
        ("++run.name=true", "++run.name='true'"),
        ("run.name=null", "run.name=null"),
        ("run.root=2026_11_21", "run.root='2026_11_21'"),
        ("logger.wandb=1e3", "logger.wandb='1e3'"),
        ("logger.wandb=0", "logger.wandb='0'"),
        ("algo.kl.reference=1_0", "algo.kl.reference='1_0'"),
        ("data.columns.answer=1e3", "data.columns.answer='1e3'"),
        ("+data.sources.sums.split=1.10", "+data.sources.sums.split='1.10'"),
        ("+data.sources.sums.weight=1e3", "+data.sources.sums.weight=1e3"),
        ("+eval.sets.hard=1_0", "+eval.sets.hard='1_0'"),
        ("+eval.sets.hard.path=1_0", "+eval.sets.hard.path='1_0'"),
        ("+eval.sets.hard.top_p=1", "+eval.sets.hard.top_p=1"),
        ("+data.options.level=1e3", "+data.options.level=1e3"),
        ("parallel.timeout_s=1e3", "parallel.timeout_s=1e3"),
        ("run.root.name=1e3", "run.root.name=1e3"),
        ("no_such.key=1e3", "no_such.key=1e3"),
        ("run.name='7'", "run.name='7'"),
        ("run.name=a,b", "run.name=a,b"),
        ("seed=7", "seed=7"),
        ("run.name=${", "run.name=${"),
        ("~run.name", "~run.name"),
    ],
)
def test_numbers_are_quoted_where_text_is_expected(text: str, result: str) -> None:
    assert quote_text(text) == result


def test_a_name_of_digits_stays_as_it_was_typed(checkpoint: Path) -> None:
    assert accept(checkpoint, "run.name=2026_11_21").run.name == "2026_11_21"
    assert accept(checkpoint, "run.name=1e3").run.name == "1e3"
    assert accept(checkpoint, "run.name=null").run.name is None
    assert accept(checkpoint, "run.root=2026_11_21").run.root == "2026_11_21"
    assert accept(checkpoint, "logger.wandb=0").logger.wandb is None


def test_every_declared_text_is_quoted() -> None:
    text = re.compile(r"\b(Text|Name|PluginName|Address|str)\b")
    for key, field in declared_keys().items():
        plain_types = re.sub(r"(dict|list)\[[^]]*\]|Options", "", field.type)
        is_text = text.search(plain_types)
        quoted = f"{key}='1e3'" if is_text else f"{key}=1e3"
        assert quote_text(f"{key}=1e3") == quoted


@pytest.mark.parametrize(
    "first",
    [
        "data.options.a=1",
        pytest.param("+data.options.a=1", marks=pytest.mark.slow),
        pytest.param("++data.options.a=1", marks=pytest.mark.slow),
    ],
)
def test_a_second_value_with_a_plus_is_refused_alone(first: str) -> None:
    overrides = ["data=custom", first, "+data.options.a=2"]
    assert list(repeated_settings(overrides)) == []
    with pytest.raises(ConfigurationRefused) as error:
        compose(overrides)
    (refusal,) = error.value.refusals
    assert (refusal.key, refusal.value) == ("data.options.a", "2")
    assert refusal.rule == "This key has a value already"
    assert refusal.remedy == "Write it without the +: data.options.a=2"


@pytest.mark.parametrize(
    ("overrides", "values"),
    [(["=5"], ["5"]), (["="], [""]), (["seed=1", "=", "="], ["", ""]), (["a=1", "=2"], ["2"])],
)
def test_a_value_without_a_key_is_refused(overrides: list[str], values: list[str]) -> None:
    refusals = list(unparsable_overrides(overrides))
    assert [(refusal.key, refusal.value) for refusal in refusals] == [("", v) for v in values]
    for refusal, value in zip(refusals, values, strict=True):
        assert "before its = is missing" in refusal.rule
        assert refusal.remedy == f"Write KEY={value or 'VALUE'}, without spaces"
