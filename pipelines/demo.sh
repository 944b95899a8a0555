#!/usr/bin/env bash
# the whole pipeline on the embedded world, on two CPU cores in minutes; ends with a table and a report
#
#     make demo                                          # sets up .venv first
#     bash pipelines/demo.sh                             # in an environment that you have set up
#     SEED=2 RUNS=runs/second bash pipelines/demo.sh     # another world, elsewhere
set -euo pipefail
cd "$(dirname "$0")/.."
. pipelines/common.sh
RUNS=${RUNS:-runs/tiny}

# say PERCENT STAGE WHY: what comes next, and the time left; the stages so far take PERCENT of the demo
say() { echo "== $2, about $((SECONDS * (100 - $1) / $1)) s left. $3"; }

echo "== 1 of 6: the world. Posts, lazy summaries of them, and which of two summaries a noisy labeller prefers."
python -m data.tiny --out "$RUNS/data" --seed "$SEED"

say 5 "2 of 6: SFT" "A small GPT learns to write as people do and leaves out what they leave out."
python train_sft.py --data "$RUNS/data" --out "$RUNS/sft" \
  --seed "$SEED" --processes "$PROCESSES" --overwrite

say 25 "3 of 6: the reward model" "It learns from the comparisons which summary people prefer."
python train_rm.py --data "$RUNS/data" --sft "$RUNS/sft" --out "$RUNS/rm" \
  --seed "$SEED" --processes "$PROCESSES" --overwrite

say 50 "4 of 6: PPO" "The policy writes and the reward model scores until it tells what people left out."
python train_ppo.py --data "$RUNS/data" --sft "$RUNS/sft" --reward-model "$RUNS/rm" \
  --out "$RUNS/ppo" --trace 4 --seed "$SEED" --processes "$PROCESSES" --overwrite
python -m nanorlhf.report.microscope --run "$RUNS/ppo"

say 72 "5 of 6: DPO" "The same comparisons without a reward model to see what PPO's detour is worth."
python train_dpo.py --data "$RUNS/data" --sft "$RUNS/sft" --out "$RUNS/dpo" --num-epochs 0.4 --lr 2e-4 \
  --seed "$SEED" --processes "$PROCESSES" --overwrite

say 85 "6 of 6: the evaluation" "All three against the references by the true quality that no training has seen."
python eval.py --data "$RUNS/data" --policies sft "$RUNS/sft" ppo "$RUNS/ppo" dpo "$RUNS/dpo" \
  --reward-model "$RUNS/rm" --implicit-rewards dpo --out "$RUNS/eval" --seed "$SEED" --overwrite

echo "== done in $SECONDS s. Open $RUNS/eval/report.html in a browser: first the"
echo "samples (which facts does each policy tell?) then PPO's curves (score up and KL bounded). Then every number of a"
echo "few of PPO's responses, token by token: $RUNS/ppo/microscope.html. Try: make overoptimise"
