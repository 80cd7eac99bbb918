"""The schema's registration with Hydra, and the `asset` resolver."""

from __future__ import annotations

from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from megatron_rl.config import schema

ASSETS = Path(__file__).resolve().parents[1] / "models" / "assets"
ALGORITHMS: dict[str, type[schema.AlgoConfig]] = {
    "grpo": schema.GrpoConfig,
    "gspo": schema.GspoConfig,
    "espo": schema.EspoConfig,
}


def register() -> None:
    """Make the typed schema known to Hydra, and `${asset:NAME}`, the path of a checkpoint shipped with the package."""
    store = ConfigStore.instance()
    store.store(group="schema", name="train_rl", node=schema.TrainRlConfig, package="_global_")
    for name, node in ALGORITHMS.items():
        store.store(group="schema/algo", name=name, node=node)
    OmegaConf.register_new_resolver("asset", lambda name: str(ASSETS / name), replace=True)
