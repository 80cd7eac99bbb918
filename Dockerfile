# CUDA image. Versions come from requirements/ and from these arguments. CONTRIBUTING.md lists what is tested of it.
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04
FROM ${CUDA_IMAGE}

ARG APEX_REF=6424da3b4faa6c8f062da4a48c424fff3f02d42d
ARG CUDA_ARCHITECTURES="9.0 10.0"
ARG BUILD_JOBS=8

ENV DEBIAN_FRONTEND=noninteractive \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    TORCH_CUDA_ARCH_LIST=${CUDA_ARCHITECTURES} \
    VIRTUAL_ENV=/opt/venv \
    PATH=/opt/venv/bin:${PATH}

RUN apt-get update \
 && apt-get install --yes --no-install-recommends git make g++ libibverbs-dev libnuma1 python3 python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/* \
 && python3 -m venv ${VIRTUAL_ENV}

WORKDIR /opt/trainer
COPY requirements requirements
RUN python requirements/merge_constraints.py requirements/constraints.txt requirements/gpu-constraints.txt \
    > requirements/merged.txt

# torch comes first, because Transformer Engine and Apex compile against the installed torch.
RUN pip install --constraint requirements/merged.txt torch setuptools ninja packaging numpy wheel
RUN MAX_JOBS=${BUILD_JOBS} NVTE_FRAMEWORK=pytorch pip install --no-build-isolation --constraint requirements/merged.txt \
    --requirement requirements/gpu.txt --requirement requirements/runtime.txt
# NVIDIA's Apex comes from source. The `apex` of the package index is an unrelated project.
RUN APEX_CPP_EXT=1 APEX_CUDA_EXT=1 APEX_PARALLEL_BUILD=${BUILD_JOBS} NVCC_APPEND_FLAGS="--threads 4" \
    pip install --no-build-isolation --no-deps "apex @ git+https://github.com/NVIDIA/apex.git@${APEX_REF}"
RUN pip install --constraint requirements/merged.txt --requirement requirements/dev.txt

COPY . .
RUN pip install --no-deps --no-build-isolation --editable .

CMD ["python", "launch/train_rl.py", "--help"]
