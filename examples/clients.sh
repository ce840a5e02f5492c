#!/usr/bin/env bash
# Clients of a vLLM server. They need not know whether it runs SubSpec: nothing in them changes.
# Usage: examples/clients.sh openai|bench|lm-eval|guidellm MODEL [URL]
#
# MODEL is what the server was started with (a folder, or a name on a hub), for its tokenizer too.
#   openai    the OpenAI client, streaming                                       (pip install openai)
#   bench     vLLM's own benchmark                                               (part of vLLM)
#   lm-eval   answers scored by generation and by log-probabilities              (pip install 'lm-eval[api]')
#   guidellm  one request after another                                          (pip install guidellm)
# TASKS and LM_EVAL_OPTIONS choose others for lm-eval.
set -euo pipefail

client=$1 model=$2 url=${3:-http://127.0.0.1:8000}

case $client in
openai)
    python - "$model" "$url/v1" <<'PYTHON'
import sys

from openai import OpenAI

model, url = sys.argv[1:]
client = OpenAI(base_url=url, api_key="-")
question = [{"role": "user", "content": "Why is the sky blue?"}]
for piece in client.chat.completions.create(
    model=model, messages=question, max_tokens=48, temperature=0, stream=True
):
    print(piece.choices[0].delta.content or "", end="", flush=True)
print()
PYTHON
    ;;
bench)
    vllm bench serve --backend openai-chat --endpoint /v1/chat/completions \
        --base-url "$url" --model "$model" \
        --dataset-name random --random-input-len 64 --random-output-len 32 \
        --num-prompts 4 --max-concurrency 1
    ;;
lm-eval)
    read -ra options <<<"${LM_EVAL_OPTIONS:---limit 8}"
    lm-eval run --model local-completions \
        --model_args "model=$model,base_url=$url/v1/completions,num_concurrent=1,tokenized_requests=False" \
        --tasks "${TASKS:-gsm8k,arc_easy}" "${options[@]}"
    ;;
guidellm)
    guidellm run --backend "kind=openai_http,target=$url,model=$model" \
        --profile kind=synchronous \
        --constraint kind=max_requests,count=4 \
        --data kind=synthetic_text,prompt_tokens=64,output_tokens=32
    ;;
*)
    echo "no client is called $client: openai, bench, lm-eval or guidellm" >&2
    exit 2
    ;;
esac
