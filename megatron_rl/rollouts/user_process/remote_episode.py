"""The episode that an environment sees in its process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.contracts.routes import RouteError
from megatron_rl.environments.episode import RESPONSE_PENDING, Response
from megatron_rl.environments.rollout_builder import RolloutRejected
from megatron_rl.models.tokenizer import UnknownText
from megatron_rl.rollouts.user_process.frames import encode_frame, receive_frame
from megatron_rl.rollouts.user_process.messages import (
    ActionError,
    DemonstrateAction,
    EpisodeState,
    ObserveAction,
    ObserveMessagesAction,
    QuickAction,
    RespondAction,
    WithdrawAction,
)
from sglang_bridge.client import RequestExpired
from sglang_bridge.errors import EngineError
from sglang_bridge.generation import GenerationRejected

_decoder = msgspec.msgpack.Decoder(EpisodeState)
# Exceptions that an environment may tell from others
_ERRORS: Mapping[str, type[Exception]] = {
    error.__name__: error for error in (RequestExpired, EngineError, UnknownText, ValueError)
}


class QuickActions:
    """Sends actions that take no time, and waits for the answer. The event loop waits too.

    A thread may call it.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def perform(self, action: QuickAction) -> EpisodeState:
        """Perform an action and return the episode's state. Raises `OSError`."""
        frame = encode_frame(action)
        with self._lock:
            self._connection.sendall(frame)
            return _decoder.decode(receive_frame(self._connection))

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class RemoteEpisode:
    """One rollout of `prompt` while an environment plays it. The collector holds its tokens.

    It has the methods and the attributes of `environments.episode.Episode`, which documents them.
    Once its call has ended or is cancelled, `respond` never returns, so that code which asks again
    and again blocks nothing. The other actions raise RuntimeError.

    send: delivers a request for a response. quick_actions: performs everything else.
    """

    def __init__(
        self,
        call: int,
        prompt: Prompt,
        send: Callable[[RespondAction], None],
        quick_actions: QuickActions,
    ) -> None:
        self.prompt = prompt
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.sampled_tokens = 0
        self.rejected_tokens = Counter[str]()
        self._call = call
        self._send = send
        self._quick_actions = quick_actions
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[EpisodeState]] = {}
        self._errors: dict[int, Exception] = {}
        self._is_closed = False

    @property
    def is_waiting(self) -> bool:
        """True while a response is sampled."""
        return bool(self._pending)

    def close(self) -> None:
        """Take no further action."""
        self._is_closed = True

    async def respond(self) -> Response:
        """Let the model continue all tokens so far."""
        number = next(self._numbers)
        future = asyncio.get_running_loop().create_future()
        if self._is_closed:
            await future
        self._require_rest()
        self._pending[number] = future
        self._send(RespondAction(self._call, number))
        try:
            state = await future
        except asyncio.CancelledError:
            # The answer comes before any later action of this episode.
            if not self._is_closed:
                with contextlib.suppress(OSError):
                    self._update(self._quick_actions.perform(WithdrawAction(self._call, number)))
            raise
        finally:
            del self._pending[number]
        self._update(state)
        assert self.finish_reason is not None
        return Response(self.text, self.finish_reason)

    def observe(self, text: str) -> None:
        """Add text that was not sampled."""
        _require_text(text)
        self._perform(lambda number: ObserveAction(self._call, number, text))

    def observe_messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Add messages of a chat after a response."""
        rows = [_with_text_keys(message) for message in messages]
        self._perform(lambda number: ObserveMessagesAction(self._call, number, rows))

    def demonstrate(self, text: str) -> None:
        """Add a demonstration and an end-of-sequence token."""
        _require_text(text)
        self._perform(lambda number: DemonstrateAction(self._call, number, text))

    def receive(self, state: EpisodeState) -> None:
        """Take the answer to a request for a response."""
        future = self._pending.get(state.action)
        if future is not None and not future.done():
            future.set_result(state)

    def action_of(self, error: BaseException) -> int:
        """Return the number of the action that raised this exception, 0 for none."""
        numbers = [number for number, other in self._errors.items() if other is error]
        return numbers[0] if numbers else 0

    def _perform(self, make_action: Callable[[int], QuickAction]) -> None:
        if self._is_closed:
            raise RuntimeError("the call of this episode has ended")
        self._require_rest()
        self._update(self._quick_actions.perform(make_action(next(self._numbers))))

    def _require_rest(self) -> None:
        """Refuse an action while a response is sampled.

        The collector may hear of it before it hears of the response: they take two connections.
        """
        if self._pending:
            raise ValueError(RESPONSE_PENDING)

    def _update(self, state: EpisodeState) -> None:
        """Take over the state. Raises the action's exception."""
        self.text = state.text
        self.finish_reason = state.finish_reason
        self.sampled_tokens = state.sampled_tokens
        self.rejected_tokens = Counter(state.rejected_tokens)
        if state.error is not None:
            error = _exception_of(state.error)
            self._errors[state.action] = error
            raise error


def _exception_of(error: ActionError) -> Exception:
    """Return an exception of the same class, or one that names it."""
    match error.kind:
        case "RolloutRejected":
            return RolloutRejected(error.reason, error.message)
        case "RouteError":
            return RouteError(error.reason, error.message)
        case "GenerationRejected":
            rejection = GenerationRejected(error.reason, "")
            rejection.args = (error.message,)
            return rejection
    kind = _ERRORS.get(error.kind)
    if kind is None:
        return RuntimeError(f"{error.kind}: {error.message}")
    return kind(error.message)


def _require_text(text: object) -> None:
    if not isinstance(text, str):
        raise TypeError(f"expected a text, got {type(text).__name__}")


def _with_text_keys(message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not all(isinstance(key, str) for key in message):
        raise TypeError("a message of a chat is a dict with `role` and `content`")
    return dict(message)
