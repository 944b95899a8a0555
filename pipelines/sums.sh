#!/usr/bin/env bash
# a reward that a program checks, on embedded sums: SFT, a reward model, PPO, GRPO, pass@k of 64 samples
#
#     SEED=2 SUMS=runs/sums2 bash pipelines/sums.sh
set -euo pipefail
cd "$(dirname "$0")/.."
. pipelines/common.sh
SUMS=${SUMS:-runs/sums}

# 1. Short sums with their workings to learn from, and longer ones to practise on.
python -m data.sums --out "$SUMS" --seed "$SEED"
python train_sft.py sums --data "$SUMS/short" --out "$SUMS/sft" \
  --seed "$SEED" --processes "$PROCESSES" --overwrite

# 2. A reward model of comparisons, which is there to be compared: the reward below is what data/sums.py checks.
python train_rm.py sums --data "$SUMS/long" --sft "$SUMS/sft" --out "$SUMS/rm" \
  --seed "$SEED" --processes "$PROCESSES" --overwrite
python train_ppo.py sums --data "$SUMS/long" --sft "$SUMS/sft" --out "$SUMS/ppo" \
  --seed "$SEED" --processes "$PROCESSES" --overwrite
python train_grpo.py sums --data "$SUMS/long" --sft "$SUMS/sft" --out "$SUMS/grpo" \
  --seed "$SEED" --processes "$PROCESSES" --overwrite

# 3. How many are solved at the first try, and in one of k.
python eval.py sums --data "$SUMS/long" --policies sft "$SUMS/sft" ppo "$SUMS/ppo" grpo "$SUMS/grpo" \
  --out "$SUMS/eval" --seed "$SEED" --overwrite
