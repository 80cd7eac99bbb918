"""Answer several engine requests in one process: `python -m ...variants REQUESTS REPLIES`.

The arguments are JSON files. Most of the time goes into importing SGLang.
"""

import sys
from pathlib import Path

import msgspec

from tests.lab.engine_rehearsal.engine_process import answer
from tests.lab.engine_rehearsal.gpu_answers import answer_as
from tests.lab.engine_rehearsal.requests import EngineRequest

if __name__ == "__main__":
    requests = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=dict[str, EngineRequest])
    answer_as(next(iter(requests.values())).gpu)
    replies = {name: answer(request) for name, request in requests.items()}
    Path(sys.argv[2]).write_bytes(msgspec.json.encode(replies))
