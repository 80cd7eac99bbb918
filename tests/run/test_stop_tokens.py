"""The tokens at which a run ends responses."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_rl.run.setup import RunSetup
from tests.support.policies import TWO_DIGIT_ADDITION


def test_engines_stop_at_the_ends_of_all_files(tmp_path: Path) -> None:
    directory = shutil.copytree(TWO_DIGIT_ADDITION, tmp_path / "model")
    (directory / "generation_config.json").write_text('{"eos_token_id": [0, 5]}')
    configuration: Any = SimpleNamespace(model=SimpleNamespace(path=str(directory)))
    others: Any = dict.fromkeys(("shape", "job", "resume_point", "directory", "data", "progress"))
    assert RunSetup(configuration, **others).stop_token_ids == (1, 0, 5)
