#!/usr/bin/env bash
# Prompts, then a head for SmolLM2-135M-Instruct that learns from what the model answers to them: see README.md.
set -euo pipefail
out=${1:?usage: make_head.sh OUT}
mkdir -p "$out"
[ -d "$out/texts" ] || bash "$(dirname "$0")/fetch_texts.sh" "$out/texts"
python -m recipes.smollm2_135m_instruct.prompts --out "$out/templates.jsonl"
python -m recipes.smollm2_135m_instruct.invented --out "$out/invented.jsonl" --more-long 400
python -m recipes.smollm2_135m_instruct.real_texts --out "$out/real.jsonl" --texts "$out/texts"
python -m recipes.smollm2_135m_instruct.more_texts --out "$out/more.jsonl" --texts "$out/texts" --count 2600
python -m recipes.smollm2_135m_instruct.more_texts --out "$out/other.jsonl" --texts "$out/texts" --count 1920 --seed 6 --templates 640
head -n 3072 "$out/templates.jsonl" > "$out/first.jsonl"
head -n 2048 "$out/invented.jsonl" > "$out/some.jsonl"
cat "$out/first.jsonl" "$out/some.jsonl" > "$out/second.jsonl"
tail -n +2049 "$out/invented.jsonl" | cat "$out/first.jsonl" - "$out/some.jsonl" > "$out/third.jsonl"  # the same ones are held back
tail -n +2049 "$out/invented.jsonl" | cat "$out/real.jsonl" - "$out/some.jsonl" > "$out/fourth.jsonl"
{
    tail -n 689 "$out/templates.jsonl"
    head -n 335 "$out/real.jsonl"
    cat "$out/more.jsonl"
    tail -n +1921 "$out/other.jsonl"
    head -n 1920 "$out/other.jsonl"  # of these, some are held back
} > "$out/fifth.jsonl"
python -m recipes.smollm2_135m_instruct.prompts --out "$out/code.jsonl" --count 512 --seed 7 --only coding
sed -n '3585,5120p' "$out/fifth.jsonl" | cat - "$out/code.jsonl" > "$out/sixth.jsonl"
python -m recipes.smollm2_135m_instruct.more_texts --out "$out/last_texts.jsonl" --texts "$out/texts" --count 4200 --seed 8 --templates 700
python -m recipes.smollm2_135m_instruct.prompts --out "$out/last_templates.jsonl" --count 800 --seed 8
python -m recipes.smollm2_135m_instruct.prompts --out "$out/last_code.jsonl" --count 300 --seed 9 --only coding
cat "$out"/last_{texts,templates,code}.jsonl | shuf --random-source=<(yes) > "$out/seventh.jsonl"  # of all kinds, some are held back
python -m recipes.smollm2_135m_instruct.more_texts --out "$out/lk_texts.jsonl" --texts "$out/texts" --count 1800 --seed 11 --templates 400
python -m recipes.smollm2_135m_instruct.prompts --out "$out/lk_templates.jsonl" --count 1000 --seed 11
python -m recipes.smollm2_135m_instruct.prompts --out "$out/lk_code.jsonl" --count 150 --seed 12 --only coding
cat "$out"/lk_{texts,templates,code}.jsonl | shuf --random-source=<(yes) > "$out/eighth.jsonl"
of_all_kinds() { # NAME SEED
    python -m recipes.smollm2_135m_instruct.more_texts --out "$out/$1_$2_texts.jsonl" --texts "$out/texts" --count 3600 --seed "$2" --templates 800
    python -m recipes.smollm2_135m_instruct.prompts --out "$out/$1_$2_templates.jsonl" --count 2200 --seed "$2"
    python -m recipes.smollm2_135m_instruct.prompts --out "$out/$1_$2_code.jsonl" --count 300 --seed $(($2 + 1)) --only coding
}
new_ones() { # FILE ...: the lines of these that are not in those before, each once, in another order
    awk '!seen[$0]++' "$@" | grep -vxFf "$out/earlier.jsonl" | shuf --random-source=<(yes)
}
for seed in 14 16; do of_all_kinds ninth $seed; done
cat "$out"/{templates,real,more,other,code,last_*,lk_*}.jsonl > "$out/earlier.jsonl"  # other seeds give some of them again
new_ones "$out"/ninth_{14,16}_{texts,templates,code}.jsonl > "$out/others.jsonl"
sed -n '1,4608p' "$out/others.jsonl" > "$out/ninth.jsonl"
sed -n '4609,10752p' "$out/others.jsonl" > "$out/tenth.jsonl"
for seed in 18 20; do of_all_kinds eleventh $seed; done
cat "$out"/ninth_{14,16}_{texts,templates,code}.jsonl >> "$out/earlier.jsonl"
new_ones "$out"/eleventh_{18,20}_{texts,templates,code}.jsonl > "$out/newest.jsonl"
sed -n '1,4608p' "$out/newest.jsonl" > "$out/eleventh.jsonl"

common=(--freeze-head --num-steps 3 --tokens-per-batch 2048)
python -m engine train eagle3 --prompts "$out/first.jsonl" --out "$out/first" "${common[@]}" \
    --layers 8 --layers 16 --layers 24 --layers 30 --epochs 6 --learning-rate 0.0015 --validation-share 0.0833
python -m engine train eagle3 --prompts "$out/second.jsonl" --out "$out/second" "${common[@]}" \
    --start-from "$out/first" --epochs 4 --learning-rate 0.001 --validation-share 0.05
python -m engine train eagle3 --prompts "$out/third.jsonl" --out "$out/third" "${common[@]}" \
    --start-from "$out/second" --epochs 2 --learning-rate 0.001 --learn-prompts --validation-share 0.039
python -m engine train eagle3 --prompts "$out/fourth.jsonl" --out "$out/fourth" "${common[@]}" \
    --start-from "$out/third" --epochs 2 --learning-rate 0.001 --learn-prompts --validation-share 0.054
python -m engine train eagle3 --prompts "$out/fifth.jsonl" --out "$out/fifth" "${common[@]}" \
    --start-from "$out/fourth" --epochs 2 --learning-rate 0.001 --learn-prompts --validation-share 0.05
python -m engine train eagle3 --prompts "$out/sixth.jsonl" --out "$out/sixth" "${common[@]}" \
    --start-from "$out/fifth" --epochs 1 --learning-rate 0.0005 --learn-prompts --validation-share 0.05
python -m engine train eagle3 --prompts "$out/seventh.jsonl" --out "$out/seventh" "${common[@]}" \
    --start-from "$out/sixth" --epochs 2 --learning-rate 0.0007 --learn-prompts --validation-share 0.03
python -m engine train eagle3 --prompts "$out/eighth.jsonl" --out "$out/eighth" "${common[@]}" \
    --start-from "$out/seventh" --epochs 2 --learning-rate 0.0007 --learn-prompts --validation-share 0.0746 --loss lk
python -m engine train eagle3 --prompts "$out/ninth.jsonl" --out "$out/ninth" "${common[@]}" \
    --start-from "$out/eighth" --epochs 2 --learning-rate 0.0007 --validation-share 0.054 --loss lk
python -m engine train eagle3 --prompts "$out/tenth.jsonl" --out "$out/tenth" "${common[@]}" \
    --start-from "$out/ninth" --epochs 2 --learning-rate 0.0007 --validation-share 0.04 --loss lk
python -m engine train eagle3 --prompts "$out/eleventh.jsonl" --out "$out/head" "${common[@]}" \
    --start-from "$out/tenth" --epochs 2 --learning-rate 0.0007 --validation-share 0.04 --loss lk
