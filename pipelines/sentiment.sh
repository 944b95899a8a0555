#!/usr/bin/env bash
# the same model continues film dialogues and is rewarded for good spirits
#
#     MOVIES=dir MODEL=dir bash pipelines/sentiment.sh      # needs pip install -e '.[real]'; PyPI's nanorlhf is another project
#
# MOVIES is the Cornell Movie-Dialogs Corpus, unpacked; MODEL as in real.sh. What was interrupted goes on.
set -euo pipefail
cd "$(dirname "$0")/.."
. pipelines/common.sh
FILMS=${FILMS:-runs/sentiment}
MOVIES=${MOVIES:-cornell movie-dialogs corpus}
MODEL=${MODEL:-$(python -m data.pretrained)}

# 1. A line of a film, and the line that answers it.
python -m data.dialogue --source "$MOVIES" --out "$FILMS/all" --tokenizer "$MODEL" --history 1 \
  --max-query-length 48 --max-response-length 24 --resplit
python -m data.subset --data "$FILMS/all" --out "$FILMS/data" --num-demonstrations 2000 --num-validation 256

# 2. The reward is known: what the lexicon VADER says of the continuation.
stage "$FILMS/ppo" train_ppo.py sentiment --data "$FILMS/data" --sft "$MODEL"
python eval.py sentiment --data "$FILMS/data" --policies before "$MODEL" ppo "$FILMS/ppo" \
  --out "$FILMS/eval" --seed "$SEED" --overwrite
