"""Options that name an environment variable: their values are written nowhere."""

import asyncio
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from omegaconf import OmegaConf

from megatron_rl.config.algorithms import CustomAlgoSettings
from megatron_rl.config.cli import HYDRA_CONF, compose, main
from megatron_rl.config.schema import (
    Configuration,
    DataSettings,
    EnvironmentSettings,
    RewardSettings,
)
from megatron_rl.contracts.plugins import PluginError
from megatron_rl.contracts.prompt import Question, Sampling
from megatron_rl.contracts.refusal import ConfigurationRefused
from megatron_rl.environments.episode import Episode
from megatron_rl.losses import open_loss
from megatron_rl.losses.interface import Objective, ResponseTokens
from megatron_rl.prompts.factory import generate_questions
from megatron_rl.prompts.question import PromptDataError
from megatron_rl.records.past_run import flat_settings
from megatron_rl.records.run_directory import to_yaml
from megatron_rl.rewards import Scorer, open_answer_reader, open_scorer
from megatron_rl.rollouts.collector.collector import Collector
from megatron_rl.rollouts.wire.messages import GroupRequest
from tests.support.collectors import Outbox
from tests.support.configurations import configuration_of
from tests.support.fake_engine import configuration, fake_engine, reply, serving
from tests.support.questions import make_question
from tests.support.scripted_model import EOS, PROMPT

SECRET = "sk-not-to-be-written"
OPTIONS = "{api_key: ${oc.env:JUDGE_KEY}, headers: {auth: 'Bearer ${oc.env:JUDGE_KEY}'}, limit: 3}"
LENGTHS = (120, 285, 400)  # of text before a value: messages end after 200 or 300 characters
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
    return configuration_of([*OVERRIDES, f"reward.options={options}"])


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


class Broken:
    """Every method raises an exception whose message holds the key."""

    def __init__(self, api_key: str, headers: dict[str, str], limit: int) -> None:
        self.error = KeyError(f"401 for https://judge/?key={api_key}")

    def check_answer(self, question: Question) -> None:
        raise self.error

    def questions(self, seed: int) -> Iterator[Question]:
        raise self.error

    def prepare(self, response: ResponseTokens) -> Objective:
        raise self.error

    async def score(self, prompt, text, finish_reason):  # type: ignore[no-untyped-def]
        raise self.error

    async def play(self, episode: Episode) -> None:
        raise self.error


class Verbose(Broken):
    """The key is before the end of a message, where it is cut off, or behind that."""

    def __init__(self, api_key: str, headers: dict[str, str], limit: int) -> None:
        self.error = RuntimeError(f"{'x' * limit} {api_key}")


class Diverse(Broken):
    """Raises each message in turn, first a short one."""

    def __init__(self, api_key: str, headers: dict[str, str], limit: int) -> None:
        super().__init__(api_key, headers, limit)
        self.errors = [self.error, *(RuntimeError(f"{'x' * n} {api_key}") for n in LENGTHS)]

    async def score(self, prompt, text, finish_reason):  # type: ignore[no-untyped-def]
        raise self.errors.pop(0)

    async def play(self, episode: Episode) -> None:
        raise self.errors.pop(0)


class VerboseConstructor:
    def __init__(self, api_key: str, headers: dict[str, str], limit: int) -> None:
        raise RuntimeError(f"{'x' * limit} {api_key}")


def broken_options() -> dict[str, Any]:
    return {"name": f"{__name__}:Broken", "options": make_configuration().reward.options}


def verbose_options(name: str, length: int) -> dict[str, Any]:
    text = OPTIONS.replace("limit: 3", f"limit: {length}")
    return {"name": f"{__name__}:{name}", "options": make_configuration(text).reward.options}


def test_errors_of_reward_source_and_loss_leave_the_value_out() -> None:
    check_answer = open_answer_reader(RewardSettings(**broken_options()))
    name, options = broken_options().values()
    questions = generate_questions(DataSettings(source=name, options=options))
    shape: Any = None
    loss = open_loss(CustomAlgoSettings(name=name, options=options), shape)
    response: Any = None
    calls = (
        lambda: check_answer(make_question("4")),
        lambda: next(questions),
        lambda: loss.prepare(response),
    )
    for call in calls:
        with pytest.raises((PluginError, PromptDataError)) as error:
            call()
        text = "".join(traceback.format_exception(error.value))
        assert "key=${oc.env:JUDGE_KEY}" in text
        assert SECRET not in text


@pytest.mark.slow
@pytest.mark.parametrize("section", ["reward", "environment"])
def test_reports_of_a_collector_leave_the_value_out(
    section: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings_class = {"reward": RewardSettings, "environment": EnvironmentSettings}[section]
    options = {"name": f"{__name__}:Diverse", "options": make_configuration().reward.options}
    first, *others = replies({section: settings_class(**options)}, 1 + len(LENGTHS))
    assert "key=${oc.env:JUDGE_KEY}" in first + caplog.text
    assert ["RuntimeError: xxx" in text for text in others] == [True] * len(LENGTHS)
    assert SECRET[:8] not in "".join([first, *others, caplog.text])


@pytest.mark.parametrize("length", LENGTHS)
def test_messages_that_are_cut_off_hold_no_part_of_the_value(length: int) -> None:
    options = verbose_options("Verbose", length)
    source = DataSettings(source=options["name"], options=options["options"])
    constructor = RewardSettings(**options | {"name": f"{__name__}:VerboseConstructor"})
    text = ""
    for call in (lambda: next(generate_questions(source)), lambda: open_scorer(constructor)):
        with pytest.raises((PluginError, PromptDataError)) as error:
            call()
        text += "".join(traceback.format_exception(error.value))
    assert "xxx" in text
    assert SECRET[:8] not in text


def replies(settings: dict[str, Any], count: int) -> list[str]:
    """Return the messages of a collector after so many requests, one after another."""

    async def run() -> list[str]:
        async with fake_engine(lambda n, body: reply(body, "046")) as url:
            outbox = Outbox()
            configure = msgspec.structs.replace(configuration(), **settings)
            collector = Collector(0, configure, outbox.put)
            await collector.handle(serving(url))
            sampling = Sampling(max_new_tokens=16, temperature=1.0, stop_token_ids=(EOS,))
            messages = []
            for number in range(count):
                await collector.handle(
                    GroupRequest(
                        group_id=str(number), prompt=PROMPT, num_samples=1, sampling=sampling
                    )
                )
                messages.append(str(await asyncio.wait_for(outbox.get(), 8)))
            await collector.close()
            return messages

    return asyncio.run(run())


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


@pytest.mark.slow
def test_the_printed_configuration_leaves_the_value_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train_rl.py", "--cfg", "job", *OVERRIDES, f"reward.options={OPTIONS}"]
    monkeypatch.setattr("sys.argv", arguments)
    # Else a broken pipe would end this process from then on
    monkeypatch.setattr("megatron_rl.config.cli.signal.signal", lambda *_: None)
    assert main(lambda c: 0, Path(HYDRA_CONF)) == 0
    output = capsys.readouterr().out
    assert SECRET not in output
    assert OmegaConf.create(output).reward.options.limit == 3


@pytest.mark.slow
def test_other_keys_read_the_environment_as_before() -> None:
    c = compose(["experiment=smoke", "run.name=${oc.env:JUDGE_KEY}"])
    assert c.run.name == SECRET
