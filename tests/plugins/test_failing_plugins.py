"""Errors of failing plugins: key, method, the user's line and a documented exit code."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from megatron_rl.config.algorithms import CustomAlgoSettings
from megatron_rl.config.schema import DataSettings, EnvironmentSettings, RewardSettings
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.plugins import PluginError, load_plugin
from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.environments.environment import open_environment
from megatron_rl.losses import ResponseTokens, open_loss
from megatron_rl.prompts.factory import generate_questions
from megatron_rl.prompts.question import PromptDataError
from megatron_rl.rewards import open_answer_reader, open_scorer
from tests.losses.shapes import shape_of
from tests.support.questions import make_question

MODULE = """
class Missing:
    def __init__(self): {}["limit"]

class Exits:
    def __init__(self): raise SystemExit("no licence")

class Scorer:
    def check_answer(self, question): return 1 / len(question.answer)
    async def score(self, prompt, text): pass

class Checks(Scorer):
    async def score(self, prompt, text, finish_reason): pass

class Awaits(Checks):
    async def check_answer(self, question): pass

class NoMethod(Checks):
    check_answer = None

class Raises:
    def questions(self, seed): raise OSError("no disk")

class RaisesLater:
    def questions(self, seed):
        yield
        raise KeyError("row")

class Nothing:
    def questions(self, seed): pass

class NoSeed:
    def questions(self): yield

class Environment:
    async def play(self): pass

class Loss:
    def __init__(self, gives=None, raises=False):
        self.gives = gives
        self.raises = raises
    def prepare(self, response):
        if self.raises: raise LookupError("no advantages")
        if self.gives == "none": return None
        return lambda logprobs, denominators: self.result(logprobs)
    def result(self, logprobs):
        from megatron_rl.losses import LossResult
        return {"vector": LossResult(logprobs, {}),
                "detached": LossResult(logprobs.detach().sum(), {}),
                "sums": LossResult(logprobs.sum(), {"a": logprobs.sum()}),
                "valid": LossResult(logprobs.sum(), {}), "scalar": logprobs.sum()}[self.gives]

from megatron_rl.environments.environment import Environment as EnvironmentProtocol
from megatron_rl.losses.interface import PolicyLoss
from megatron_rl.prompts.question import Source

class EmptyEnvironment(EnvironmentProtocol): pass
class EmptyLoss(PolicyLoss): pass
class EmptySource(Source): pass

class LossWithoutArguments:
    def prepare(self): pass
"""


@pytest.fixture(autouse=True)
def plugin_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "plugin_classes.py").write_text(MODULE)
    (tmp_path / "plugin_exit.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "plugin_syntax.py").write_text("x = 1\ndef (\n")
    (tmp_path / "plugin_folder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.startswith("plugin_")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "plugin_classes:Missing",
            r"^reward\.name=.*:Missing: .*KeyError: 'limit' \(.*plugin_classes\.py:3, in ",
        ),
        (
            "plugin_classes:Exits",
            r"^reward\.name=.*fails: SystemExit: no licence \(.*plugin_classes\.py:6, in __init__",
        ),
        (
            "plugin_exit:X",
            r"^reward\.name=plugin_exit:X: .* fails: SystemExit: 3 \(.*plugin_exit\.py:1",
        ),
        ("plugin_syntax:X", r"importing plugin_syntax fails: SyntaxError: .*plugin_syntax\.py:2"),
        (
            "plugin_folder:X",
            r"folder without an __init__\.py .*Name a file in it: plugin_folder\.FILE:X",
        ),
        (
            "plugin_classes:Scorer",
            r"`score` is called with \(prompt, text, finish_reason\), .* is \(prompt, text\)",
        ),
        ("plugin_classes:Awaits", r"`check_answer` is asynchronous\. Write `def check_answer`"),
        ("plugin_classes:NoMethod", r"`check_answer` is not a method but NoneType\. Define"),
    ],
)
def test_invalid_scorer(name: str, message: str) -> None:
    with pytest.raises(PluginError, match=message) as error:
        open_scorer(RewardSettings(name=name))
    assert error.value.exit_code is ExitCode.REFUSED


def test_failing_check_answer_is_a_plugin_error() -> None:
    check = open_answer_reader(RewardSettings(name="plugin_classes:Checks"))
    check(make_question("4"))
    with pytest.raises(
        PluginError,
        match=r"reward\.name=plugin_classes:Checks: check_answer\(''\) fails: ZeroDivision.*:9",
    ):
        check(make_question(""))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "Raises",
            r"^data\.source=.*:Raises: questions\(0\) fails: OSError: no disk \(.*\.py:22",
        ),
        ("RaisesLater", r"it yields NoneType, not a Question"),
        ("Nothing", r"questions\(0\) returns NoneType, not an iterator\. Write a generator"),
    ],
)
def test_failing_source_is_bad_data(name: str, message: str) -> None:
    with pytest.raises(PromptDataError, match=message) as error:
        list(generate_questions(DataSettings(source=f"plugin_classes:{name}")))
    assert error.value.exit_code is ExitCode.BAD_DATA


def test_methods_with_other_arguments_are_refused() -> None:
    with pytest.raises(
        PluginError,
        match=r"data\.source=.*`questions` is called with \(seed\), .* is \(\)",
    ):
        next(generate_questions(DataSettings(source="plugin_classes:NoSeed")))
    with pytest.raises(PluginError, match=r"environment\.name=.*`play` is called with \(episode\)"):
        open_environment(EnvironmentSettings(name="plugin_classes:Environment"))
    with pytest.raises(PluginError, match=r"algo\.name=.*`prepare` is called with \(response\)"):
        open_loss(CustomAlgoSettings(name="plugin_classes:LossWithoutArguments"), shape_of(48))


def test_an_empty_method_of_a_protocol_is_no_method() -> None:
    with pytest.raises(PluginError, match=r"data\.source=.*no method `questions`\. Define"):
        next(generate_questions(DataSettings(source="plugin_classes:EmptySource")))
    with pytest.raises(PluginError, match=r"environment\.name=.*no method `play`\. Define"):
        open_environment(EnvironmentSettings(name="plugin_classes:EmptyEnvironment"))
    with pytest.raises(PluginError, match=r"algo\.name=.*no method `prepare`\. Define"):
        open_loss(CustomAlgoSettings(name="plugin_classes:EmptyLoss"), shape_of(48))


def objective_of(**options: object) -> None:
    tokens = torch.zeros(4)
    response = ResponseTokens(
        tokens, tokens, tokens, tokens, torch.tensor([0, 4], dtype=torch.int32)
    )
    loss = open_loss(
        CustomAlgoSettings(name="plugin_classes:Loss", options=dict(options)), shape_of(48)
    )
    loss.prepare(response)(tokens.clone().requires_grad_(), Denominators(sequences=1, tokens=4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"raises": True},
            r"prepare fails: LookupError: no advantages \(.*plugin_classes\.py:\d+, in prepare\)",
        ),
        ({"gives": "none"}, r"prepare returns NoneType\. Return a function"),
        ({"gives": "scalar"}, r"gives Tensor\. Return a LossResult"),
        (
            {"gives": "unknown"},
            r"the objective that prepare returned fails: KeyError: 'unknown' \(.*in result\)",
        ),
        ({"gives": "vector"}, r"whose loss is \[4\]\. Give a scalar tensor"),
        ({"gives": "detached"}, r"a loss without a gradient"),
        ({"gives": "sums"}, r"sums\['a'\].*mean_of"),
    ],
)
def test_failing_loss_and_invalid_loss_result(options: dict[str, object], message: str) -> None:
    objective_of(gives="valid")
    with pytest.raises(PluginError, match=rf"^algo\.name=plugin_classes:Loss: .*{message}"):
        objective_of(**({"gives": "valid"} | options))


def test_long_messages_of_user_code_are_truncated(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("x\n" * 5000)

    module = ModuleType("plugin_classes")
    vars(module)["Long"] = fail
    monkeypatch.setitem(sys.modules, "plugin_classes", module)
    with pytest.raises(PluginError) as error:
        load_plugin("reward.name", "plugin_classes:Long", {})
    assert len(str(error.value)) < 600
    assert "\n" not in str(error.value)
