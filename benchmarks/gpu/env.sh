# . env.sh SITE [PROJECT]: what commands need on a machine that the packages were carried to
site=$1
export PYTHONPATH=$site:${2:-$PWD}:$site/nvidia_cutlass_dsl/dsl_packages
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK=1 PYTHONUNBUFFERED=1 # cuDNN 9.19 instead of 9.20
unset PYTHONDONTWRITEBYTECODE
