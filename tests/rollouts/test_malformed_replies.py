"""Whatever an engine answers becomes a rollout that says what it said, or a rejection with a
counted reason.

What a reply says is read a second time here, by the standard library alone, and compared with the
rollout.
"""

import asyncio
import base64
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_rl.contracts.prompt import Sampling
from megatron_rl.contracts.rollout import Role, Rollout
from megatron_rl.contracts.routes import RouteError, RouteShape
from megatron_rl.environments.episode import Episode, EpisodeRules
from megatron_rl.environments.rollout_builder import RolloutRejected
from megatron_rl.rollouts.collector import Collector
from megatron_rl.rollouts.messages import (
    ENVIRONMENT_FAILURE,
    FromCollector,
    GroupDone,
    GroupRequest,
    Release,
)
from megatron_rl.rollouts.store import read_rollout
from sglang_bridge.generation import Generation, GenerationRejected, decode_generation
from tests.support.fake_engine import LAYERS, TOPK, configuration, fake_engine
from tests.support.scripted_model import EOS, PROMPT, TOKENIZER

VOCABULARY, EXPERTS, BUDGET = 48, 8, 16
SHAPE = RouteShape(
    moe_layers=(0, 1, 2, 3), num_hidden_layers=LAYERS, num_experts=EXPERTS, topk=TOPK
)
SAMPLING = Sampling(max_new_tokens=BUDGET, temperature=1.0, stop_token_ids=(EOS,))
Reply = dict[str, Any]


@dataclass(frozen=True)
class Said:
    """What a reply says of its output tokens: (token, log-probability, version), and the rows of
    its routes.
    """

    tokens: list[tuple[int, float, int]]
    rows: list[list[tuple[int, ...]]]


def reading(body: bytes, num_prompt: int, budget: int) -> Said | None:
    """None for a reply that cannot be trained on."""
    try:
        reply = json.loads(body, parse_constant=lambda name: 1 / 0)
        meta, ids = reply["meta_info"], reply["output_ids"]
        logprobs = [(float32(value), token) for value, token, _ in meta["output_token_logprobs"]]
        spans = meta.get("weight_versions") or [
            {"version": meta["weight_version"], "start": 0, "end": len(ids)}
        ]
        versions = [
            int(span["version"].encode("ascii"))
            for span in spans
            for _ in range(span["start"], span["end"])
        ]
        raw = base64.b64decode(meta["routed_experts"], validate=True)
        experts = struct.unpack(f"<{len(raw) // 4}i", raw)
        usable = (
            meta["finish_reason"]["type"] in ("stop", "length")
            and 0 < len(ids) <= budget
            and [token for _, token in logprobs] == ids
            and all(0 <= token < VOCABULARY for token in ids)
            and all(-1e4 <= value <= 1e-3 for value, _ in logprobs)
            and [(s["start"], s["end"]) for s in spans]
            == list(zip([0, *(s["end"] for s in spans)], [s["end"] for s in spans], strict=False))
            and all(s["start"] < s["end"] for s in spans)
            and isinstance(meta["weight_version"], str)
            and versions == sorted(versions)
            and min(versions) >= 0
            and meta.get("num_retractions", 0) >= 0
            and meta.get("cached_tokens", 0) >= 0
            and len(versions) == len(ids)
            and (meta.get("num_retractions", 0) == 0 or len(set(versions)) == 1)
            and len(experts) == (num_prompt + len(ids) - 1) * LAYERS * TOPK
            and all(0 <= expert < EXPERTS for expert in experts)
        )
        choices = [experts[i : i + TOPK] for i in range(0, len(experts), TOPK)]
        if not usable or any(len(set(choice)) < TOPK for choice in choices):
            return None
        rows = [choices[i : i + LAYERS] for i in range(0, len(choices), LAYERS)]
        return Said([(t, v, n) for t, (v, _), n in zip(ids, logprobs, versions, strict=True)], rows)
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        ArithmeticError,
        struct.error,
        RecursionError,
    ):
        return None


def float32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def said_by(rollout: Rollout) -> Said:
    """The same of a rollout, whose prompt must be the one that was asked for; rows of all tokens."""
    assert rollout.segments[0].role is Role.PROMPT
    tokens = [
        (int(token), float(logprob), segment.version)
        for segment in rollout.segments
        if segment.role is Role.RESPONSE and segment.logprobs is not None
        for token, logprob in zip(segment.tokens, segment.logprobs, strict=True)
    ]
    assert rollout.routes is not None
    at = 0
    for segment in rollout.segments:
        assert segment.route_rows == (at, min(at + len(segment.tokens), len(rollout.routes)))
        at += len(segment.tokens)
    assert at == len(rollout.routes) + 1
    return Said(tokens, [[tuple(choice) for choice in row] for row in rollout.routes.tolist()])


def encoded(rows: list[list[tuple[int, int]]], form: str = "i") -> str:
    flat = [expert for row in rows for choice in row for expert in choice]
    return base64.b64encode(struct.pack(f"<{len(flat)}{form}", *flat)).decode()


def recorded(draw: st.DrawFn, count: int) -> list[list[tuple[int, int]]]:
    """Rows of distinct experts."""
    seed = draw(st.integers(0, 2**20))
    pairs = [
        (first, second) for first in range(EXPERTS) for second in range(EXPERTS) if first != second
    ]
    return [
        [pairs[(seed + 31 * row + 7 * layer) % len(pairs)] for layer in range(LAYERS)]
        for row in range(count)
    ]


@st.composite
def sound(draw: st.DrawFn, num_prompt: int, budget: int = BUDGET) -> Reply:
    """What an engine may answer: any length, versions, retractions, cached prefix."""
    count = draw(st.integers(1, budget))
    ids = draw(st.lists(st.integers(2, VOCABULARY - 1), min_size=count, max_size=count))
    cut = draw(st.integers(1, count))
    split = [("3", 0, cut), ("4", cut, count)] if cut < count else [("3", 0, count)]
    meta: Reply = {
        "finish_reason": {"type": draw(st.sampled_from(["stop", "length"]))},
        "weight_version": "3",
        "output_token_logprobs": [[draw(st.floats(-20, 0)), token, None] for token in ids],
        "routed_experts": encoded(recorded(draw, num_prompt + count - 1)),
        "cached_tokens": draw(st.integers(0, num_prompt)),
        "num_retractions": draw(st.integers(0, 2)) if cut == count else 0,
    }
    if draw(st.booleans()):
        meta["weight_versions"] = [{"version": v, "start": a, "end": b} for v, a, b in split]
    return {"output_ids": ids, "meta_info": meta}


def sound_routes(rows: int) -> str:
    return encoded([[(1, 2)] * LAYERS] * rows)


def other_routes(
    change: Callable[[list[list[tuple[int, int]]]], Any], form: str = "i"
) -> Callable[[Reply], None]:
    def spoil(reply: Reply) -> None:
        raw = base64.b64decode(reply["meta_info"]["routed_experts"])
        flat = struct.unpack(f"<{len(raw) // 4}i", raw)
        choices = list(zip(flat[::TOPK], flat[1::TOPK], strict=True))
        rows = [choices[i : i + LAYERS] for i in range(0, len(choices), LAYERS)]
        reply["meta_info"]["routed_experts"] = encoded(change(rows) or rows, form)

    return spoil


def meta(key: str, value: Any) -> Callable[[Reply], None]:
    """value: what the key becomes; of a function, what it makes of the reply; None drops the key."""

    def spoil(reply: Reply) -> None:
        made = value(reply) if callable(value) else value
        if made is None:
            reply["meta_info"].pop(key, None)
        else:
            reply["meta_info"][key] = made

    return spoil


def entries(change: Callable[[list[list[Any]]], Any]) -> Callable[[Reply], None]:
    return lambda reply: change(reply["meta_info"]["output_token_logprobs"])


def spans(*parts: tuple[str, float, float]) -> Callable[[Reply], None]:
    """Versions of shares of the output tokens."""

    def made(reply: Reply) -> list[Reply]:
        n = len(reply["output_ids"])
        return [{"version": v, "start": round(a * n), "end": round(b * n)} for v, a, b in parts]

    return meta("weight_versions", made)


def first_choice(value: tuple[int, int]) -> Callable[[Reply], None]:
    return other_routes(lambda rows: [[value, *rows[0][1:]], *rows[1:]])


# Each makes a sound reply one that must not be trained on; by the reason that is counted.
SPOILT: dict[str, tuple[Callable[[Reply], None], str]] = {
    "a row too few": (other_routes(lambda rows: rows[:-1]), "routes_length"),
    "a row too many": (other_routes(lambda rows: [*rows, rows[-1]]), "routes_length"),
    "no rows": (other_routes(lambda rows: rows.clear()), "routes_length"),
    "a layer too few": (other_routes(lambda rows: [row[:-1] for row in rows]), "routes_length"),
    "an expert too few": (
        other_routes(lambda rows: [[(a,) for a, _ in row] for row in rows]),
        "routes_length",
    ),
    "16 bits": (other_routes(lambda rows: None, "h"), "routes_length"),
    "64 bits": (other_routes(lambda rows: None, "q"), "routes_length"),
    "floats": (other_routes(lambda rows: [[(1, 2)] * LAYERS for _ in rows], "f"), "routes_range"),
    "an expert that is not there": (first_choice((0, EXPERTS)), "routes_range"),
    "a negative expert": (first_choice((-1, 2)), "routes_range"),
    "an expert that is one in its lowest byte": (first_choice((256, 1)), "routes_range"),
    "an expert twice": (first_choice((5, 5)), "routes_duplicate"),
    "nothing recorded": (
        other_routes(lambda rows: [[(0, 0)] * LAYERS for _ in rows]),
        "routes_duplicate",
    ),
    "not base64": (
        meta("routed_experts", lambda r: "%" + r["meta_info"]["routed_experts"][1:]),
        "routes_encoding",
    ),
    "cut base64": (
        meta("routed_experts", lambda r: r["meta_info"]["routed_experts"][:-1]),
        "routes_encoding",
    ),
    "no routes": (meta("routed_experts", None), "routes_missing"),
    "a list of routes": (meta("routed_experts", [1, 2]), "malformed"),
    "no log-probabilities": (meta("output_token_logprobs", None), "logprobs_length"),
    "one fewer": (entries(lambda given: given.pop()), "logprobs_length"),
    "one more": (entries(lambda given: given.append(given[-1])), "logprobs_length"),
    "of other tokens": (entries(lambda given: given[0].__setitem__(1, 1)), "logprobs_length"),
    "null": (entries(lambda given: given[-1].__setitem__(0, None)), "logprobs_nonfinite"),
    "NaN": (entries(lambda given: given[-1].__setitem__(0, float("nan"))), "malformed"),
    "minus infinity": (entries(lambda given: given[-1].__setitem__(0, float("-inf"))), "malformed"),
    "beyond float32": (
        entries(lambda given: given[-1].__setitem__(0, -1e300)),
        "logprobs_nonfinite",
    ),
    "float32's lowest": (
        entries(lambda given: given[-1].__setitem__(0, -3.4028234663852886e38)),
        "logprobs_tiny",
    ),
    "positive": (entries(lambda given: given[0].__setitem__(0, 0.5)), "logprobs_positive"),
    "words": (entries(lambda given: given[0].__setitem__(0, "x")), "malformed"),
    "no version": (meta("weight_version", None), "malformed"),
    "a version that is a word": (
        meta(
            "weight_versions",
            lambda r: [{"version": "default", "start": 0, "end": len(r["output_ids"])}],
        ),
        "version",
    ),
    "a version in other digits": (spans(("٣", 0, 1)), "version"),
    "a version below zero": (spans(("-1", 0, 1)), "version"),
    "versions that end early": (spans(("3", 0, 0.4)), "versions"),
    "versions that start late": (spans(("3", 0.6, 1)), "versions"),
    "an empty span": (spans(("3", 0, 0), ("4", 0, 1)), "versions"),
    "aborted": (meta("finish_reason", {"type": "abort"}), "aborted"),
    "an unknown end": (meta("finish_reason", {"type": "tired"}), "finish_reason"),
    "no end": (meta("finish_reason", None), "malformed"),
    "a token beyond the vocabulary": (
        lambda reply: reply["output_ids"].__setitem__(0, VOCABULARY),
        "token_range",
    ),
    "no tokens": (lambda reply: reply.update(output_ids=[]), "routes_length"),
    "retractions below zero": (meta("num_retractions", -1), "malformed"),
}


def older_later(reply: Reply) -> None:
    spans(("4", 0, 0.5), ("3", 0.5, 1))(reply)


def retracted_into_new_weights(reply: Reply) -> None:
    """Its old tokens' rows are those of the new weights."""
    spans(("3", 0, 0.5), ("4", 0.5, 1))(reply)
    reply["meta_info"]["num_retractions"] = 1


OF_TWO_TOKENS = {  # and more
    "an older version later": (older_later, "versions"),
    "retracted into new weights": (retracted_into_new_weights, "routes_rewritten"),
}


class Lab:
    """A collector before an engine whose next reply is ours."""

    def __init__(self) -> None:
        self.body, self.count = b"", 0
        self._loop = asyncio.new_event_loop()
        self._outbox: asyncio.Queue[FromCollector] = asyncio.Queue()
        self._engine = fake_engine(lambda n, request: self.body, seconds=0.0)
        url = self._loop.run_until_complete(self._engine.__aenter__())
        self._collector = Collector(0, configuration(url), self._outbox.put)

    def ask(self, body: bytes) -> Rollout | str:
        """The rollout that comes of a reply, or the reason why there is none."""
        self.body, self.count = body, self.count + 1
        return self._loop.run_until_complete(self._ask(f"g{self.count}"))

    async def _ask(self, name: str) -> Rollout | str:
        await self._collector.handle(
            GroupRequest(group_id=name, prompt=PROMPT, num_samples=1, sampling=SAMPLING)
        )
        done = await asyncio.wait_for(self._outbox.get(), 30)
        assert isinstance(done, GroupDone), done
        kept = [read_rollout(ref) for ref in done.group.rollouts]
        reasons = [reason for reason, count in done.group.rejections.items() for _ in range(count)]
        assert len(kept) + len(reasons) == 1, "neither a rollout nor a counted reason"
        await self._collector.handle(Release((name,)))
        return kept[0] if kept else reasons[0]

    def close(self) -> None:
        self._loop.run_until_complete(self._collector.close())
        self._loop.run_until_complete(self._engine.__aexit__(None, None, None))
        self._loop.close()


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    opened = Lab()
    yield opened
    opened.close()


N = len(PROMPT.token_ids)
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def check(lab: Lab, body: bytes) -> Rollout | str:
    found, expected = lab.ask(body), reading(body, N, BUDGET)
    if isinstance(found, str):
        assert found != ENVIRONMENT_FAILURE, "the engine's fault is blamed on the environment"
    else:
        assert expected is not None, "trained on what cannot be"
        assert said_by(found) == expected
        assert found.segments[0].tokens.tolist() == list(PROMPT.token_ids)
    return found


@quick
@given(st.data())
def test_a_sound_reply_becomes_the_rollout_that_it_says(lab: Lab, data: st.DataObject) -> None:
    assert isinstance(check(lab, json.dumps(data.draw(sound(N))).encode()), Rollout)


@pytest.mark.parametrize("name", [*SPOILT, *OF_TWO_TOKENS])
@settings(max_examples=3, deadline=None)
@given(st.data())
def test_a_spoilt_reply_is_rejected_for_its_reason(
    lab: Lab, name: str, data: st.DataObject
) -> None:
    spoil, reason = (SPOILT | OF_TWO_TOKENS)[name]
    reply = data.draw(sound(N).filter(lambda r: len(r["output_ids"]) > 1))
    spoil(reply)
    body = json.dumps(reply).encode()
    assert reading(body, N, BUDGET) is None
    assert check(lab, body) == reason


@quick
@given(st.data())
def test_several_faults_at_once_are_one_rejection_unless_they_cancel(
    lab: Lab, data: st.DataObject
) -> None:
    reply = data.draw(sound(N))
    for name in data.draw(
        st.lists(st.sampled_from(list(SPOILT)), min_size=2, max_size=3, unique=True)
    ):
        try:
            SPOILT[name][0](reply)
        except (LookupError, TypeError, ValueError, struct.error):
            continue  # nothing left to spoil
    check(lab, json.dumps(reply).encode())


@settings(quick, max_examples=150)
@given(st.data())
def test_bytes_that_were_changed_on_their_way_are_rejected_or_read_as_they_are(
    lab: Lab, data: st.DataObject
) -> None:
    body = bytearray(json.dumps(data.draw(sound(N))).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body) - 1))
        if data.draw(st.booleans()):
            body[at] = data.draw(st.integers(0, 255))
        else:
            del body[at : at + data.draw(st.integers(1, 40))]
            body = body or bytearray(b"{")
    check(lab, bytes(body))


def test_what_breaks_a_parser_is_a_malformed_reply(lab: Lab) -> None:
    for body in (
        b'{"x":' + b"[" * 200_000,
        b"",
        b"\xff\xfe",
        b'{"output_ids":[1],"meta_info":{"weight_version":"\xff"',
        b'{"output_ids":[2],"meta_info":{"finish_reason":{"type":"stop"},"weight_version":"3","\x80":0,'
        b'"output_token_logprobs":[[-0.5,2,null]],"routed_experts":"%s"}}'
        % sound_routes(N).encode(),
    ):
        assert check(lab, body) == "malformed"


def test_an_engine_that_draws_more_than_it_was_asked_for_is_not_believed(lab: Lab) -> None:
    reply = {
        "output_ids": [5] * (BUDGET + 1),
        "meta_info": {
            "finish_reason": {"type": "length"},
            "weight_version": "3",
            "output_token_logprobs": [[-0.5, 5, None]] * (BUDGET + 1),
            "routed_experts": encoded([[(1, 2)] * LAYERS] * (N + BUDGET)),
        },
    }
    assert check(lab, json.dumps(reply).encode()) == "too_long"


@quick
@given(st.data())
def test_a_second_turn_keeps_the_rows_of_when_a_token_was_first_read(data: st.DataObject) -> None:
    """And what the second reply says of tokens that were read before, right or wrong, is not looked
    at.
    """
    replies: list[tuple[bytes, int, int]] = []

    async def generate(tokens: Any, sampling: Sampling) -> Generation:
        reply = data.draw(sound(len(tokens), sampling.max_new_tokens))
        if not replies:
            reply = data.draw(sound(len(tokens), 4))
            reply["meta_info"]["finish_reason"] = {"type": "stop"}
        elif data.draw(st.booleans()):
            SPOILT[data.draw(st.sampled_from(list(SPOILT)))][0](reply)
        body = json.dumps(reply).encode()
        replies.append((body, len(tokens), sampling.max_new_tokens))
        return decode_generation(
            body, num_prompt_tokens=len(tokens), route_shape=(LAYERS, TOPK), vocab_size=VOCABULARY
        )

    rules = EpisodeRules(sampling=SAMPLING, routes=SHAPE, train_truncated=True)
    episode = Episode(PROMPT, generate, TOKENIZER, rules, rollout_id="g/0")

    async def play() -> None:
        await episode.respond()
        episode.observe("12")
        await episode.respond()

    try:
        asyncio.run(play())
    except (GenerationRejected, RolloutRejected, RouteError) as error:
        assert error.reason
        return
    found = said_by(episode.rollout())
    first, second = (reading(*reply) for reply in replies)
    known = N + len(first.tokens) - 1 if first is not None else 0
    assert first is not None
    assert found.tokens[: len(first.tokens)] == first.tokens
    assert found.rows[:known] == first.rows
    if second is not None:
        assert found.tokens[len(first.tokens) :] == second.tokens
        assert found.rows[known:] == second.rows[known:]
