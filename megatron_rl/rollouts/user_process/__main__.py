"""Process of a user-defined class: `python -m megatron_rl.rollouts.user_process FD FD FD`.

The descriptors: the connection for calls, the one for actions of episodes, and the memory that
shows the current call. The collector starts it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys

import msgspec

from megatron_rl.contracts.plugins import PluginError, describe_error
from megatron_rl.environments.environment import Environment, open_environment, read_chat_roles
from megatron_rl.rewards import Scorer, open_scorer
from megatron_rl.rollouts.user_process.current_call import CurrentCall
from megatron_rl.rollouts.user_process.frames import encode_frame, receive_frame
from megatron_rl.rollouts.user_process.messages import ClassFailure, ClassReady, OpenClass
from megatron_rl.rollouts.user_process.remote_episode import QuickActions
from megatron_rl.rollouts.user_process.server import UserClassServer, offer_to_the_kernel


def _open(settings: OpenClass) -> tuple[Scorer | None, Environment | None, ClassReady]:
    """Open the class. Raises whatever it raises."""
    scorer = None if settings.reward is None else open_scorer(settings.reward)
    environment = None
    roles: tuple[str, ...] = ()
    if settings.environment is not None:
        environment = open_environment(settings.environment)
        roles = read_chat_roles(environment)
    return scorer, environment, ClassReady(chat_roles=roles)


def main(arguments: list[str]) -> int:
    """Open the class and answer calls until the collector closes the connection."""
    calls, actions = (socket.socket(fileno=int(number)) for number in arguments[:2])
    current = CurrentCall(int(arguments[2]))
    for connection in (calls, actions):
        connection.set_inheritable(False)
        # A copy that is forked must neither answer nor keep the connection open.
        os.register_at_fork(after_in_child=connection.close)
    os.set_inheritable(current.descriptor, False)
    offer_to_the_kernel()
    logging.basicConfig()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    settings = msgspec.msgpack.decode(receive_frame(calls), type=OpenClass)
    sys.path[:] = settings.search_path
    try:
        scorer, environment, ready = _open(settings)
    except PluginError as error:
        calls.sendall(encode_frame(ClassFailure(str(error))))
        return int(error.exit_code)
    except BaseException as error:
        calls.sendall(encode_frame(ClassFailure(describe_error(error))))
        raise
    calls.sendall(encode_frame(ready))
    server = UserClassServer(
        settings,
        scorer=scorer,
        environment=environment,
        current=current,
        quick_actions=QuickActions(actions),
    )
    asyncio.run(server.serve(calls))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
