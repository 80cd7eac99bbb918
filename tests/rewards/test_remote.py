"""A scorer behind an HTTP server: its answers, its failures, and outages."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from aiohttp import web

from megatron_rl.config.schema import RewardSettings
from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.plugins import PluginError
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rewards import RewardRunner, ScorerInThisProcess, open_scorer
from megatron_rl.rewards.remote import RemoteScorer, circuit
from megatron_rl.rollouts.user_process.user_classes import UserClasses
from megatron_rl.rollouts.wire.messages import FromCollector, Problem
from tests.support.fake_engine import configuration, http_server

PROMPT = Prompt(
    id="p", token_ids=(1,), text="2+2=", answer="4", task="sums", details='{"unit": "m"}'
)
OUTAGE_SECONDS = 2.5
KEY_HEADER = "Bearer secret"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def score_by(
    handler: Handler, *texts: str, warnings: list[str] | None = None, **options: Any
) -> list[Verdict]:
    """Score responses at the same time by a server, through the runner."""

    async def run() -> list[Verdict]:
        warn = [].append if warnings is None else warnings.append
        async with http_server({"/score": handler}) as url:
            timeout_s = options.pop("timeout_s", 5.0)
            scorer = RemoteScorer(f"{url}/score", **options)
            scorer.prepare(timeout_s=timeout_s, warn=warn)
            runner = RewardRunner(ScorerInThisProcess(scorer, timeout_s=None))
            calls = (runner.score(PROMPT, text, FinishReason.STOP) for text in texts)
            try:
                return await asyncio.gather(*calls)
            finally:
                await scorer.close()

    return asyncio.run(run())


def test_the_server_gets_the_question_and_gives_the_verdict() -> None:
    requests = []

    async def handler(request: web.Request) -> web.Response:
        requests.append((request.headers.get("Authorization"), await request.json()))
        return web.json_response(
            {"reward": 0.5, "correctness": 1.0, "penalty": 0.25, "answer": "4", "parts": {"a": 2.0}}
            | {"unknown": 1}
        )

    (verdict,) = score_by(handler, "is 4", key="secret")
    assert requests == [
        (
            "Bearer secret",
            {
                "prompt": "2+2=",
                "answer": "4",
                "task": "sums",
                "details": {"unit": "m"},
                "response": "is 4",
                "finish_reason": "stop",
            },
        )
    ]
    expected = Verdict(reward=0.5, correctness=1.0, penalty=0.25, answer="4", parts={"a": 2.0})
    assert msgspec.structs.replace(verdict, seconds=0.0) == expected


def test_a_reward_of_null_is_no_verdict_with_the_reason_of_the_server() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"reward": None, "reason": "the rubric is unclear"})

    (verdict,) = score_by(handler, "is 4")
    assert (verdict.reward, verdict.reason) == (None, "the rubric is unclear")


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (lambda: web.Response(text="not JSON"), "no verdict"),
        (lambda: web.json_response({"correctness": 1.0}), "missing required field `reward`"),
        (lambda: web.json_response({"reward": "1"}), "no verdict"),
        (lambda: web.Response(body=b'{"reward": NaN}'), "no verdict"),
        (lambda: web.Response(body=b" " * 2**20 + b'{"reward": 1}'), "more than 1048576 bytes"),
        (lambda: web.Response(status=400, text="no such task"), "status 400: no such task"),
        (lambda: web.HTTPFound("http://127.0.0.1:1/"), "status 302"),
    ],
)
def test_an_answer_that_cannot_be_used_is_no_verdict_and_is_not_requested_again(
    response: Callable[[], web.Response], reason: str
) -> None:
    count = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal count
        count += 1
        return response()

    (verdict,) = score_by(handler, "is 4")
    assert verdict.reward is None and reason in verdict.reason
    assert count == 1


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_request_without_an_answer_is_made_again(status: int) -> None:
    count = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal count
        count += 1
        return web.Response(status=status) if count < 3 else web.json_response({"reward": 1.0})

    (verdict,) = score_by(handler, "is 4")
    assert (verdict.reward, count) == (1.0, 3)


def test_a_response_that_always_fails_costs_no_other_one_its_verdict() -> None:
    async def handler(request: web.Request) -> web.Response:
        text = (await request.json())["response"]
        if text == "poison":
            return web.Response(status=500)
        if text == "slow":
            await asyncio.sleep(60)
        return web.json_response({"reward": 1.0})

    texts = ["poison", "slow", *(str(number) for number in range(20))]
    poison, slow, *others = score_by(handler, *texts, timeout_s=0.3)
    assert poison.reward is None and "status 500" in poison.reason
    assert slow.reward is None and "reward.timeout_s=0.3" in slow.reason
    assert [verdict.reward for verdict in others] == [1.0] * 20


def test_a_response_that_waits_for_its_turn_loses_no_time() -> None:
    async def handler(request: web.Request) -> web.Response:
        await asyncio.sleep(0.2)
        return web.json_response({"reward": 1.0})

    verdicts = score_by(handler, *map(str, range(8)), max_calls=1, timeout_s=0.5)
    assert [verdict.reward for verdict in verdicts] == [1.0] * 8


def test_responses_wait_for_a_server_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuit, "WARN_AFTER", 0.5)
    warnings: list[str] = []
    attempts: list[float] = []

    async def handler(request: web.Request) -> web.Response:
        attempts.append(time.monotonic())
        if attempts[-1] - attempts[0] < OUTAGE_SECONDS:
            return web.Response(status=503)
        return web.json_response({"reward": float((await request.json())["response"])})

    verdicts = score_by(handler, *map(str, range(16)), warnings=warnings)
    assert [verdict.reward for verdict in verdicts] == [float(number) for number in range(16)]
    during_outage = [at for at in attempts if at - attempts[0] < OUTAGE_SECONDS]
    # 16 at once, and then one after the other
    assert 16 <= len(during_outage) <= 24
    assert len(warnings) == 2
    assert "does not answer (status 503)" in warnings[0] and "answers again" in warnings[1]


def test_patience_has_an_end() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=503)

    verdicts = score_by(handler, *map(str, range(8)), patience_s=1.0)
    assert [verdict.reward for verdict in verdicts] == [None] * 8
    assert any("has not answered for" in verdict.reason for verdict in verdicts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"reward\.options\.url: missing"),
        ({"url": "ftp://host/"}, r"refuses: url must begin with http"),
        ({"url": "http:///score"}, r"refuses: url must begin with http"),
        ({"url": "http://h", "max_calls": 0}, "refuses: max_calls must be at least 1"),
        ({"url": "http://h", "patience_s": float("nan")}, "patience_s at least 0"),
        ({"url": "http://h", "keys": "x"}, r"reward\.options\.keys: .* Did you mean key\?"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        open_scorer(RewardSettings(name="remote", options=options))


def test_a_collector_scores_by_a_server_and_reports_an_outage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(circuit, "WARN_AFTER", 0.2)
    monkeypatch.setenv("REWARD_KEY", "secret")
    messages: list[FromCollector] = []
    start = time.monotonic()

    async def handler(request: web.Request) -> web.Response:
        if time.monotonic() - start < OUTAGE_SECONDS:
            return web.Response(status=503)
        return web.json_response({"reward": float(request.headers["Authorization"] == KEY_HEADER)})

    async def report(message: FromCollector) -> None:
        messages.append(message)

    async def run() -> Verdict:
        async with http_server({"/score": handler}) as url:
            options = {"url": f"{url}/score", "key": "${oc.env:REWARD_KEY}"}
            reward = RewardSettings(name="remote", options=options)
            classes = UserClasses(msgspec.structs.replace(configuration(), reward=reward), report)
            runner = RewardRunner(classes.scorer)
            calls = (runner.score(PROMPT, "4", FinishReason.STOP) for _ in range(8))
            try:
                return (await asyncio.gather(*calls))[0]
            finally:
                await classes.close()

    assert asyncio.run(run()).reward == 1.0
    texts = [message.text for message in messages if isinstance(message, Problem)]
    assert len(texts) == 2 and "does not answer (status 503)" in texts[0], messages
