# rlcore on NVIDIA GPUs. From the repository's root:
#   docker build -f docker/cuda.Dockerfile -t rlcore:cuda .
#   docker run --rm --gpus all --shm-size=16g -v /data:/data rlcore:cuda \
#     rlcore train experiment=math_fp8_gpu run_dir=/data/a ...
# The development image has nvcc: --build-arg FLASH_ATTN=1 builds flash-attn against the torch of the
# lock, which takes hours. Without it the learner uses torch's own variable-length attention.
ARG CUDA_IMAGE=nvidia/cuda:13.0.2-cudnn-devel-ubuntu22.04
FROM ${CUDA_IMAGE}

RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends software-properties-common \
 && add-apt-repository -y ppa:deadsnakes/ppa \
 && apt-get install -y --no-install-recommends bash build-essential git libnuma1 make ninja-build procps wget \
    python3.11 python3.11-dev python3.11-venv \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 1000 rlcore \
 && install -d -o rlcore -g rlcore /opt/rlcore /data
USER rlcore
WORKDIR /opt/rlcore

# Packages are a separate layer, because the lock changes less often than the code. MAX_JOBS limits
# the memory that nvcc uses, FLASH_ATTN_CUDA_ARCHS the time (flash-attn ignores torch's list).
ARG FLASH_ATTN=0
ARG MAX_JOBS=8
ARG FLASH_ATTN_CUDA_ARCHS="80;90"
ARG RLCORE_TORCH_INDEX=
COPY --chown=rlcore pyproject.toml README.md LICENSE ./
COPY --chown=rlcore requirements requirements
COPY --chown=rlcore rlcore/__init__.py rlcore/__init__.py
RUN PIP_COMPILE=1 FLASH_ATTN="$FLASH_ATTN" RLCORE_TORCH_INDEX="$RLCORE_TORCH_INDEX" \
  bash requirements/install.sh cuda
COPY --chown=rlcore . .

ENV PATH=/opt/rlcore/.venv/bin:$PATH HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 PROFILE=cuda
CMD ["rlcore", "--help"]
