#!/usr/bin/env bash
# An OpenAI-compatible server with SubSpec. Usage: examples/serve.sh MODEL [vllm serve options]
#
# Ask it from another terminal:
#   curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \
#       -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 64}'
set -euo pipefail
# shellcheck source=ci/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/../ci/env.sh"

exec vllm serve "$1" \
    --host 127.0.0.1 \
    --speculative-config subspec \
    --max-model-len 2048 \
    --max-num-seqs 4 \
    "${@:2}"
