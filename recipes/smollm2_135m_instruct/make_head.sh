#!/usr/bin/env bash
# Prompts, then a head for SmolLM2-135M-Instruct that learns from what the model answers to them: see README.md.
set -euo pipefail
out=${1:?usage: make_head.sh OUT}
mkdir -p "$out"
python -m recipes.smollm2_135m_instruct.prompts --out "$out/templates.jsonl"
python -m recipes.smollm2_135m_instruct.invented --out "$out/invented.jsonl"
head -n 3072 "$out/templates.jsonl" > "$out/first.jsonl"
head -n 2048 "$out/invented.jsonl" | cat "$out/first.jsonl" - > "$out/all.jsonl"

common=(--freeze-head --num-steps 3 --tokens-per-batch 2048)
python -m engine train eagle3 --prompts "$out/first.jsonl" --out "$out/first" "${common[@]}" \
    --layers 8 --layers 16 --layers 24 --layers 30 --epochs 6 --learning-rate 0.0015 --validation-share 0.0833
python -m engine train eagle3 --prompts "$out/all.jsonl" --out "$out/head" "${common[@]}" \
    --start-from "$out/first" --epochs 4 --learning-rate 0.001 --validation-share 0.05
