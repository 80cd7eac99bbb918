"""A class of the user's own that fails: key, method, the user's line and a documented code, never a
traceback.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_rl.config.algorithms import CustomAlgoSettings
from megatron_rl.config.schema import DataSettings, EnvironmentSettings, RewardSettings
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.plugins import PluginError, load_plugin
from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.environments.environment import open_environment
from megatron_rl.losses import ResponseTokens, open_loss
from megatron_rl.prompts.factory import draw_questions
from megatron_rl.prompts.question import PromptDataError
from megatron_rl.rewards import open_answer_check, open_scorer
from tests.losses.shapes import shape_of

MODULE = """
class Missing:
    def __init__(self): {}["limit"]

class Exits:
    def __init__(self): raise SystemExit("no licence")

class Scorer:
    def check_answer(self, answer): return 1 / len(answer)
    async def score(self, prompt, text): pass

class Checks(Scorer):
    async def score(self, prompt, text, finish_reason): pass

class Awaits(Checks):
    async def check_answer(self, answer): pass

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
    def __init__(self, gives=None, raises=False): self.gives, self.raises = gives, raises
    def prepare(self, response):
        if self.raises: raise LookupError("no advantages")
        if self.gives == "none": return None
        return lambda logprobs, denominators: self.result(logprobs)
    def result(self, logprobs):
        from megatron_rl.losses import LossResult
        return {"vector": LossResult(logprobs, {}), "detached": LossResult(logprobs.detach().sum(), {}),
                "sums": LossResult(logprobs.sum(), {"a": logprobs.sum()}), "right": LossResult(logprobs.sum(), {}),
                "scalar": logprobs.sum()}[self.gives]

class LossWithoutArguments:
    def prepare(self): pass
"""


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "user_classes.py").write_text(MODULE)
    (tmp_path / "own_exit.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "own_syntax.py").write_text("x = 1\ndef (\n")
    (tmp_path / "own_folder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "user_classes:Missing",
            r"^reward\.name=user_classes:Missing: .*fails: KeyError: 'limit' \(.*user_classes\.py:3, in ",
        ),
        (
            "user_classes:Exits",
            r"^reward\.name=.*fails: SystemExit: no licence \(.*user_classes\.py:6, in __init__",
        ),
        (
            "own_exit:X",
            r"^reward\.name=own_exit:X: importing own_exit fails: SystemExit: 3 \(.*own_exit\.py:1",
        ),
        ("own_syntax:X", r"importing own_syntax fails: SyntaxError: .*own_syntax\.py:2"),
        (
            "own_folder:X",
            r"own_folder is a folder without an __init__\.py .*Name one: own_folder\.FILE:X",
        ),
        (
            "user_classes:Scorer",
            r"`score` is called with \(prompt, text, finish_reason\), and takes \(prompt, text\)",
        ),
        ("user_classes:Awaits", r"`check_answer` is not awaited\. Write `def check_answer`"),
        ("user_classes:NoMethod", r"`check_answer` is no method but NoneType\. Write a method"),
    ],
)
def test_a_scorer_that_cannot_be_opened(name: str, message: str) -> None:
    with pytest.raises(PluginError, match=message) as refused:
        open_scorer(RewardSettings(name=name))
    assert refused.value.exit_code is ExitCode.REFUSED


def test_check_answer_that_fails_is_the_scorers_fault_not_the_rows() -> None:
    check = open_answer_check(RewardSettings(name="user_classes:Checks"))
    check("4")
    with pytest.raises(
        PluginError,
        match=r"reward\.name=user_classes:Checks: check_answer\(''\) fails: ZeroDivision.*:9",
    ):
        check("")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "Raises",
            r"^data\.source=user_classes:Raises: questions\(0\) fails: OSError: no disk \(.*user_classes\.py:22",
        ),
        ("RaisesLater", r"it yields NoneType, not a Question"),
        ("Nothing", r"questions\(0\) returns NoneType, not an iterator\. Write a generator"),
    ],
)
def test_a_source_that_fails_is_bad_data(name: str, message: str) -> None:
    with pytest.raises(PromptDataError, match=message) as refused:
        list(draw_questions(DataSettings(source=f"user_classes:{name}")))
    assert refused.value.exit_code is ExitCode.BAD_DATA


def test_methods_with_other_arguments_are_refused_on_opening() -> None:
    with pytest.raises(
        PluginError, match=r"data\.source=.*`questions` is called with \(seed\), and takes \(\)"
    ):
        next(draw_questions(DataSettings(source="user_classes:NoSeed")))
    with pytest.raises(PluginError, match=r"environment\.name=.*`play` is called with \(episode\)"):
        open_environment(EnvironmentSettings(name="user_classes:Environment"))
    with pytest.raises(PluginError, match=r"algo\.name=.*`prepare` is called with \(response\)"):
        open_loss(CustomAlgoSettings(name="user_classes:LossWithoutArguments"), shape_of(48))


def objective_of(**options: object) -> None:
    tokens = torch.zeros(4)
    response = ResponseTokens(
        tokens, tokens, tokens, tokens, torch.tensor([0, 4], dtype=torch.int32)
    )
    loss = open_loss(
        CustomAlgoSettings(name="user_classes:Loss", options=dict(options)), shape_of(48)
    )
    loss.prepare(response)(tokens.clone().requires_grad_(), Denominators(sequences=1, tokens=4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"raises": True},
            r"prepare fails: LookupError: no advantages \(.*user_classes\.py:\d+, in prepare\)",
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
def test_a_loss_that_fails_or_returns_something_else(
    options: dict[str, object], message: str
) -> None:
    objective_of(gives="right")
    with pytest.raises(PluginError, match=rf"^algo\.name=user_classes:Loss: .*{message}"):
        objective_of(**({"gives": "right"} | options))


def test_a_long_message_of_the_users_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    sys.modules["user_classes"] = type(sys)("user_classes")
    sys.modules["user_classes"].Long = lambda: (_ for _ in ()).throw(RuntimeError("x\n" * 5000))  # type: ignore[attr-defined]
    with pytest.raises(PluginError) as refused:
        load_plugin("reward.name", "user_classes:Long", {})
    assert len(str(refused.value)) < 600 and not re.search("\n", str(refused.value))
