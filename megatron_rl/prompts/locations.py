"""The files of questions that the data settings name."""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.config.schema import DataSettings
from megatron_rl.prompts.files.columns import Columns
from megatron_rl.prompts.files.reader import DataLocation


def settings_of_source(settings: DataSettings, name: str) -> DataSettings:
    """Return the settings of one source of a mixture, as if it were the only source.

    The mixture has its pass rates.
    """
    source = settings.sources[name]
    return replace(
        settings,
        source=source.source,
        train_path=source.train_path,
        eval_path=source.eval_path,
        columns=source.columns,
        split=source.split,
        eval_split=source.eval_split,
        options=source.options,
        num_train=source.num_train or settings.num_train,
        num_eval=source.num_eval or settings.num_eval,
        sources={},
        pass_rates=None,
        pass_rate_range=None,
    )


def training_data(settings: DataSettings, section: str = "data") -> DataLocation:
    """Return where the training questions are. section: of the keys, for messages."""
    assert settings.train_path is not None, "the configuration's rules require it"
    return DataLocation(
        settings.train_path,
        f"{section}.train_path",
        settings.split,
        side="train_path",
        columns=_columns(settings, section),
    )


def held_out_data(settings: DataSettings, section: str = "data") -> DataLocation | None:
    """Return where the held-out questions are, None if train_path reserves them.

    section: of the keys, for messages.
    """
    columns = _columns(settings, section)
    if settings.eval_path is not None:
        key = f"{section}.eval_path"
        return DataLocation(settings.eval_path, key, settings.eval_split, columns=columns)
    if settings.eval_split is None:
        return None
    assert settings.train_path is not None, "the configuration's rules require it"
    key = f"{section}.train_path"
    return DataLocation(settings.train_path, key, settings.eval_split, columns=columns)


def _columns(settings: DataSettings, section: str) -> Columns:
    return Columns(settings.columns, f"{section}.columns")
