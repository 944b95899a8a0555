#!/usr/bin/env bash
# the same model answers problems that a program checks: GRPO, PPO, the share solved before and after
#
#     MODEL=dir bash pipelines/reason.sh      # needs pip install -e '.[real,reason]'; PyPI's nanorlhf is another project
#
# MODEL as in real.sh. What was interrupted goes on.
set -euo pipefail
cd "$(dirname "$0")/.."
. pipelines/common.sh
REASON=${REASON:-runs/reason}
MODEL=${MODEL:-$(python -m data.pretrained)}

# 1. reasoning-gym makes the problems and checks the answers.
python -m data.reason --out "$REASON/problems" --seed "$SEED"
python -m data.chat --source "$REASON/problems" --out "$REASON/data" --tokenizer "$MODEL"

# 2. Four replies to each question, compared with each other; and one reply to each, with a value model.
stage "$REASON/grpo" train_grpo.py reason --data "$REASON/data" --sft "$MODEL"
stage "$REASON/ppo" train_ppo.py reason --data "$REASON/data" --sft "$MODEL"

# 3. The share solved.
python eval.py reason --data "$REASON/data" --policies before "$MODEL" grpo "$REASON/grpo" \
  ppo "$REASON/ppo" --out "$REASON/eval" --seed "$SEED" --overwrite
