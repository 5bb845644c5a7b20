# rlcore on CPUs. From the repository's root:
#   docker build -f docker/cpu.Dockerfile -t rlcore:cpu \
#     --build-arg RLCORE_TORCH_INDEX=INDEX_OF_CPU_TORCH .
#   docker run --rm --shm-size=2g -v "$PWD/runs:/opt/rlcore/runs" rlcore:cpu make quickstart
# Every command of the README works in it, for example
#   docker run ... rlcore:cpu rlcore train experiment=quickstart run_dir=runs/a
FROM python:3.11-slim-bookworm

RUN apt-get update \
 && apt-get install -y --no-install-recommends bash build-essential git libgomp1 libnuma1 make procps wget \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 1000 rlcore \
 && install -d -o rlcore -g rlcore /opt/rlcore /data
USER rlcore
WORKDIR /opt/rlcore

# Packages are a separate layer, because the lock changes less often than the code.
ARG RLCORE_TORCH_INDEX=
COPY --chown=rlcore pyproject.toml README.md LICENSE ./
COPY --chown=rlcore requirements requirements
COPY --chown=rlcore rlcore/__init__.py rlcore/__init__.py
RUN PIP_COMPILE=1 RLCORE_TORCH_INDEX="$RLCORE_TORCH_INDEX" bash requirements/install.sh cpu
COPY --chown=rlcore . .

ENV PATH=/opt/rlcore/.venv/bin:$PATH HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
CMD ["rlcore", "--help"]
