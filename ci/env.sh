# shellcheck shell=bash
# Environment of every run on a CPU machine: ci/test and examples/quickstart source it after
# ci/setup.
_venv="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv"

export PATH="$_venv/bin:$PATH"

# Nothing is downloaded and nothing is reported.
export HF_HUB_OFFLINE=1
export VLLM_NO_USAGE_STATS=1
export DO_NOT_TRACK=1

# vLLM keeps a core for itself by default: of two cores that is half the compute.
export VLLM_CPU_NUM_OF_RESERVED_CPU=0
# GiB of KV cache, enough for the example model.
export VLLM_CPU_KVCACHE_SPACE=1

# Intel's OpenMP: with torch's own, speculation on a CPU is several times slower.
_iomp="$_venv/lib/libiomp5.so"
if [[ -e $_iomp && ":${LD_PRELOAD:-}:" != *":$_iomp:"* ]]; then
    export LD_PRELOAD="$_iomp${LD_PRELOAD:+:$LD_PRELOAD}"
fi
unset _venv _iomp
