#!/usr/bin/env bash
# PPO at three times the learning rate, with and without the KL penalty, compared with the demo's
#
#     bash pipelines/overoptimise.sh      # SEED and RUNS are the demo's, which runs first where it has not
set -euo pipefail
cd "$(dirname "$0")/.."
. pipelines/common.sh
RUNS=${RUNS:-runs/tiny}

[ -f "$RUNS/ppo/summary.json" ] || bash pipelines/demo.sh

# 1. With the penalty.
python train_ppo.py --data "$RUNS/data" --sft "$RUNS/sft" --reward-model "$RUNS/rm" \
  --out "$RUNS/ppo_fast" --seed "$SEED" --processes "$PROCESSES" --lr 1e-3 --keep-every 2 --overwrite

# 2. Without it: what the reward model overrates can be had for nothing.
python train_ppo.py --data "$RUNS/data" --sft "$RUNS/sft" --reward-model "$RUNS/rm" \
  --out "$RUNS/ppo_fast_no_kl" --seed "$SEED" --processes "$PROCESSES" --lr 1e-3 --kl-coef 0 \
  --keep-every 2 --overwrite

# 3. Both beside the demo's PPO, by the reward model and by the truth.
python eval.py --data "$RUNS/data" --reward-model "$RUNS/rm" --out "$RUNS/eval_fast" \
  --seed "$SEED" --overwrite --policies sft "$RUNS/sft" ppo "$RUNS/ppo" \
  ppo_fast "$RUNS/ppo_fast" ppo_fast_no_kl "$RUNS/ppo_fast_no_kl"
