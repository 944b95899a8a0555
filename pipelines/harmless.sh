#!/usr/bin/env bash
# the same on HH-RLHF's harmlessness: SFT, two linear reward models, PPO and RLOO of 64 updates
#
#     HH=dir MODEL=dir bash pipelines/harmless.sh      # needs pip install -e '.[real]'; PyPI's nanorlhf is another project
#
# HH is HH-RLHF, on the Hub or a directory with its folder harmless-base; MODEL as in real.sh. What was
# interrupted goes on.
set -euo pipefail
cd "$(dirname "$0")/.."
. pipelines/common.sh
HARMLESS=${HARMLESS:-runs/harmless}
HH=${HH:-Anthropic/hh-rlhf}
MODEL=${MODEL:-$(python -m data.pretrained)}

# 1. Pairs in two halves of 600, as many as the test split alone nearly has.
python -m data.hh --source "$HH" --files 'harmless-base/*' --out "$HARMLESS/all" --tokenizer "$MODEL" \
  --max-query-length 96 --max-response-length 96 --validation-share 0.2
for half in first second; do
  python -m data.subset --data "$HARMLESS/all" --out "$HARMLESS/$half" --half "$half" \
    --num-demonstrations 1200 --num-comparisons 600 --num-validation 300
done

# 2. SFT and a linear reward model on the first half, and the gold model on the second.
stage "$HARMLESS/sft" train_sft.py harmless --model "$MODEL" --data "$HARMLESS/first" --dtype auto
linear() { # NAME HALF
  [ -f "$HARMLESS/$1/summary.json" ] || python -m nanorlhf.training.train_linear \
    --data "$HARMLESS/$2" --model "$MODEL" --out "$HARMLESS/$1" \
    --max-query-length 96 --max-response-length 96 --seed "$SEED"
}
linear rm first
linear gold second

# 3. PPO and RLOO, at two seeds.
train() { # OUT PROGRAM
  stage "$HARMLESS/$1" "$2" harmless --data "$HARMLESS/first" --sft "$HARMLESS/sft" \
    --reward-model "$HARMLESS/rm" --dtype auto
}
train ppo train_ppo.py
train rloo train_grpo.py
SEED=$((SEED + 1)) train ppo_2 train_ppo.py
SEED=$((SEED + 1)) train rloo_2 train_grpo.py

# 4. All of them, and the best of 16 of SFT's answers, by the gold model.
python eval.py harmless --data "$HARMLESS/first" --policies sft "$HARMLESS/sft" \
  ppo "$HARMLESS/ppo" rloo "$HARMLESS/rloo" ppo_2 "$HARMLESS/ppo_2" rloo_2 "$HARMLESS/rloo_2" \
  best_of_16 "best-of-16:$HARMLESS/sft" --reward-model "$HARMLESS/rm" --gold "$HARMLESS/gold" \
  --out "$HARMLESS/eval" --seed "$SEED" --overwrite
