#!/usr/bin/env bash
# the TL;DR paper's pipeline with Pythia 1B on one GPU of 80 GB, in about a day
#
#     TLDR=dir MODEL=dir bash pipelines/tldr.sh      # needs pip install -e '.[hub]'; PyPI's nanorlhf is another project
#
# MODEL is on the Hub or a directory. What was interrupted goes on. docs/renting.md predicts the hours of each stage.
set -euo pipefail
cd "$(dirname "$0")/.."
. pipelines/common.sh
TLDR=${TLDR:-runs/tldr}
MODEL=${MODEL:-EleutherAI/pythia-1b-deduped}

# 1. The paper's demonstrations and comparisons.
python -m data.tldr --source vwxyzjn/summarize_from_feedback_tldr_3_filtered --tokenizer "$MODEL" --out "$TLDR/data"
python -m data.tldr --source openai/summarize_from_feedback --revision refs/convert/parquet --files 'comparisons/*' \
  --tokenizer "$MODEL" --out "$TLDR/data"

# 2. The policy and its reward model.
stage "$TLDR/sft" train_sft.py tldr --model "$MODEL" --data "$TLDR/data" --dtype bfloat16
stage "$TLDR/rm" train_rm.py tldr --data "$TLDR/data" --sft "$TLDR/sft" --dtype bfloat16

# 3. PPO, 1,953 updates. A lost machine costs at most the last 25.
stage "$TLDR/ppo" train_ppo.py tldr --data "$TLDR/data" --sft "$TLDR/sft" --reward-model "$TLDR/rm" --dtype bfloat16 \
  --save-every 25

# 4. Both policies on all validation posts.
python eval.py tldr --data "$TLDR/data" --policies sft "$TLDR/sft" ppo "$TLDR/ppo" --reward-model "$TLDR/rm" \
  --dtype bfloat16 --out "$TLDR/eval" --overwrite
