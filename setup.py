"""Packages and their data."""

from setuptools import find_packages, setup

# kernels/ is not a package itself: SGLang depends on a distribution whose top-level package is
# called `kernels`.
packages = find_packages(include=["megatron_rl*", "sglang_bridge*"])
packages += find_packages(where="kernels", include=["espo_kernels*"])

setup(
    name="espo-megatron-rl",
    version="0.1.0",
    description="Reinforcement learning for MoE language models on Megatron-Core and SGLang",
    python_requires=">=3.12",
    packages=packages,
    package_dir={"espo_kernels": "kernels/espo_kernels"},
    # torchrun imports the first when it starts, and every process of an engine the second
    entry_points={
        "torchrun.handlers": [
            "espo_megatron_rl = megatron_rl.run.supervision.torchrun_end:install"
        ],
        "sglang.srt.plugins": ["narrow_routes = sglang_bridge.plugin.narrow_routes:register"],
    },
    include_package_data=False,
    package_data={
        "megatron_rl": ["py.typed", "models/assets/**/*", "records/report/*.j2"],
        "sglang_bridge": ["py.typed", "cpu_shim/**/*"],
        "espo_kernels": ["py.typed", "**/*.cpp", "**/*.h"],
    },
)
