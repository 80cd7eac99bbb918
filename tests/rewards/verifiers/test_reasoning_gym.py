"""Answers to tasks of reasoning-gym, scored by the tasks themselves."""

from __future__ import annotations

import ast
import json
import sys
from itertools import islice
from pathlib import Path

import pytest

from megatron_rl.config.schema import RewardSettings
from megatron_rl.contracts.plugins import PluginError
from megatron_rl.contracts.prompt import Prompt, Question
from megatron_rl.prompts.gym import ReasoningGym
from megatron_rl.rewards import open_scorer
from megatron_rl.rewards.verifiers.reasoning_gym import ReasoningGymVerifier
from tests.support.questions import make_question

# They execute what is given to them
EXECUTIONS = ("eval", "exec", "parse_expr", "sympify", "loads", "system", "run", "compile")
SAFE = ("json.loads",)


def questions(task: str, count: int = 5) -> list[Question]:
    pytest.importorskip("reasoning_gym", reason="optional: make extras")
    return list(islice(ReasoningGym({"task": task}).questions(0), count))


def grade(question: Question, text: str) -> float | None:
    verifier = ReasoningGymVerifier()
    verifier.check_answer(question)
    prompt = Prompt(id="p", token_ids=(), answer="", task="t", details=question.details)
    return verifier.grade(prompt, text).reward


def test_a_missing_library_comes_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(PluginError, match=r"reward\.options.*cannot be imported.*make extras"):
        open_scorer(RewardSettings(name="reasoning_gym"))


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym", reason="optional: make extras")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9.9")
    with pytest.raises(PluginError, match=r"reasoning-gym 9\.9: only .* was read"):
        open_scorer(RewardSettings(name="reasoning_gym"))


@pytest.mark.parametrize(
    "task",
    [
        "arc_agi",
        "binary_matrix",
        "chain_sum",
        "countdown",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
        "sudoku",
    ],
)
def test_reference_answers_are_correct_and_others_are_not(task: str) -> None:
    for question in questions(task):
        assert grade(question, f"So it is <answer>{question.answer}</answer>.") == 1
        assert grade(question, question.answer) == 1
        score = grade(question, "<answer>none</answer>")
        assert score is not None and score < 0.1


def test_further_answers_of_a_task_are_correct() -> None:
    entry = {
        "question": "Make 10 of 2, 3 and 4.",
        "answer": "2*3 + 4",
        "metadata": {"source_dataset": "countdown", "numbers": [2, 3, 4], "target": 10},
    }
    pytest.importorskip("reasoning_gym", reason="optional: make extras")
    question = make_question("", json.dumps(entry))
    assert grade(question, r"Hence \boxed{4 + (3*2)}") == 1
    assert grade(question, "<answer>5 + 5</answer>") == pytest.approx(0.05)
    assert grade(question, "<answer>abs(10)</answer>") == pytest.approx(0.01)


def test_tasks_without_a_reference_answer_have_details() -> None:
    (question,) = questions("rubiks_cube", 1)
    assert question.answer == ""
    moves = json.loads(question.details)["metadata"]["example_correct_answer"]
    assert grade(question, f"<answer>{moves}</answer>") == 1


@pytest.mark.parametrize("details", ["", "{}", '{"metadata": {"source_dataset": "no_task"}}'])
def test_unusable_details_are_refused(details: str) -> None:
    pytest.importorskip("reasoning_gym", reason="optional: make extras")
    with pytest.raises(ValueError, match=r"no entry of reasoning-gym .*Give its question"):
        ReasoningGymVerifier().check_answer(make_question("", details))


def test_every_task_that_executes_answers_is_limited() -> None:
    """A module whose `score_answer` calls something that executes is one of a known list."""
    library = pytest.importorskip("reasoning_gym", reason="optional: make extras")
    modules = set()
    for file in Path(library.__file__).parent.rglob("*.py"):
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef) and function.name == "score_answer":
                calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
                names = {ast.unparse(call.func) for call in calls} - set(SAFE)
                if any(name.rpartition(".")[2] in EXECUTIONS for name in names):
                    modules.add(file.stem)
    # The last one executes its own reference answer
    assert modules == {
        "binary_matrix",
        "n_queens",
        "spiral_matrix",
        "string_insertion",
        "countdown",
        "puzzle24",
        "intermediate_integration",
        "polynomial_multiplication",
        "simple_integration",
        "number_sorting",
    }
