#!/usr/bin/env bash
# Prompts, then a head for SmolLM2-135M-Instruct that learns from what the model answers to them: see README.md.
set -euo pipefail
out=${1:?usage: make_head.sh OUT}
prompts=$(mktemp)
trap 'rm -f "$prompts"' EXIT
python -m recipes.smollm2_135m_instruct.prompts --out "$prompts"
head -n 3072 "$prompts" | python -m engine train eagle3 --prompts - --out "$out" \
    --layers 8 --layers 16 --layers 24 --layers 30 --freeze-head \
    --validation-share 0.0833 --num-steps 3 --epochs 6 --learning-rate 0.0015 --tokens-per-batch 2048
