"""Options that name an environment variable: their values are written nowhere."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from megatron_rl.config.cli import HYDRA_CONF, compose, main
from megatron_rl.config.schema import Configuration, RewardSettings
from megatron_rl.contracts.plugins import PluginError
from megatron_rl.contracts.refusal import ConfigurationRefused
from megatron_rl.records.past_run import flat_settings
from megatron_rl.records.run_directory import to_yaml
from megatron_rl.rewards import Scorer, open_scorer

SECRET = "sk-not-to-be-written"
OPTIONS = "{api_key: ${oc.env:JUDGE_KEY}, headers: {auth: 'Bearer ${oc.env:JUDGE_KEY}'}, limit: 3}"
OVERRIDES = ["experiment=smoke", "reward=custom", f"reward.name={__name__}:Judge"]


class Judge(Scorer):
    def __init__(self, api_key: str, headers: dict[str, str], limit: int) -> None:
        if limit < 1:
            raise ValueError(f"limit={limit} with the key {api_key}")
        self.api_key = api_key
        self.headers = headers
        self.limit = limit

    async def score(self, prompt, text, finish_reason):  # type: ignore[no-untyped-def]
        raise NotImplementedError


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", SECRET)


def make_configuration(options: str = OPTIONS) -> Configuration:
    return compose([*OVERRIDES, f"reward.options={options}"])


def test_the_configuration_keeps_the_name_of_the_variable() -> None:
    c = make_configuration()
    assert c.reward.options["api_key"] == "${oc.env:JUDGE_KEY}"
    text = to_yaml(c)
    assert "${oc.env:JUDGE_KEY}" in text
    assert SECRET not in text
    assert SECRET not in str(flat_settings(text))


def test_the_class_receives_the_value() -> None:
    scorer = open_scorer(make_configuration().reward)
    assert isinstance(scorer, Judge)
    assert (scorer.api_key, scorer.limit) == (SECRET, 3)
    assert scorer.headers == {"auth": f"Bearer {SECRET}"}


def test_errors_leave_the_value_out() -> None:
    options = OPTIONS.replace("limit: 3", "limit: 0")
    with pytest.raises(PluginError, match=r"limit=0 with the key \$\{oc\.env:JUDGE_KEY\}") as error:
        open_scorer(make_configuration(options).reward)
    assert SECRET not in str(error.value)


def test_a_missing_variable_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigurationRefused, match=r"'JUDGE_KEY' not found.*Set the variable"):
        make_configuration()
    settings = RewardSettings(
        name=f"{__name__}:Judge",
        options=dict.fromkeys(("api_key", "headers", "limit"), "${oc.env:JUDGE_KEY}"),
    )
    with pytest.raises(PluginError, match=r"reward\.options: .*JUDGE_KEY"):
        open_scorer(settings)


def test_the_printed_configuration_leaves_the_value_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train_rl.py", "--cfg", "job", *OVERRIDES, f"reward.options={OPTIONS}"]
    monkeypatch.setattr("sys.argv", arguments)
    assert main(lambda c: 0, Path(HYDRA_CONF)) == 0
    output = capsys.readouterr().out
    assert SECRET not in output
    assert OmegaConf.create(output).reward.options.limit == 3


def test_other_keys_read_the_environment_as_before() -> None:
    c = compose(["experiment=smoke", "run.name=${oc.env:JUDGE_KEY}"])
    assert c.run.name == SECRET
