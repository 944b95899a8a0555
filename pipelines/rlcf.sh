#!/usr/bin/env bash
# a compiler and a discriminator as feedback, on embedded programs: SFT, more SFT, PPO, evaluation
#
#     CODE=python bash pipelines/rlcf.sh     # what the programs are written in; Java where there is a JDK
#     MODEL=t5 bash pipelines/rlcf.sh        # the policy is an encoder-decoder; in runs/programs_t5
set -euo pipefail
cd "$(dirname "$0")/.."
. pipelines/common.sh
if [ "${MODEL:-}" = t5 ]; then
  ARCHITECTURE=t5 PROGRAMS=${PROGRAMS:-runs/programs_t5}
else
  ARCHITECTURE=gpt PROGRAMS=${PROGRAMS:-runs/programs}
fi
CODE=${CODE:-$(command -v javac >/dev/null && echo java || echo python)}

# 1. Programs to learn from, and a benchmark of other problems with tests.
python -m data.programs --out "$PROGRAMS" --language "$CODE" --seed "$SEED"
python -m data.codenet --source "$PROGRAMS/sources" --out "$PROGRAMS/data" --language "$CODE" \
  --vocab-size 512 --no-nested --max-query-length 160 --max-response-length 128 --seed "$SEED"

# 2. The policy, and a discriminator that tells its programs from people's.
python train_sft.py rlcf-tiny --architecture "$ARCHITECTURE" --data "$PROGRAMS/data" \
  --out "$PROGRAMS/sft" --seed "$SEED" --processes "$PROCESSES" --overwrite
python -m nanorlhf.rlcf.train_discriminator rlcf-tiny --data "$PROGRAMS/data" --sft "$PROGRAMS/sft" \
  --out "$PROGRAMS/discriminator" --seed "$SEED" --processes "$PROCESSES" --overwrite

# 3. PPO; and mono, which has as many more supervised episodes as PPO has.
python train_rlcf.py rlcf-tiny --data "$PROGRAMS/data" --sft "$PROGRAMS/sft" \
  --discriminator "$PROGRAMS/discriminator" --out "$PROGRAMS/ppo" \
  --seed "$SEED" --processes "$PROCESSES" --overwrite
python train_sft.py rlcf-tiny --model "$PROGRAMS/sft" --data "$PROGRAMS/data" --out "$PROGRAMS/mono" \
  --num-epochs 2 --lr 1e-3 --seed "$SEED" --processes "$PROCESSES" --overwrite

# 4. All three are fine-tuned on the benchmark before its test.
for policy in sft mono ppo; do
  python train_sft.py rlcf-tiny-bench --model "$PROGRAMS/$policy" --data "$PROGRAMS/bench" \
    --out "$PROGRAMS/${policy}_bench" --seed "$SEED" --processes "$PROCESSES" --overwrite
done
python eval.py rlcf-tiny --data "$PROGRAMS/bench" --policies sft "$PROGRAMS/sft_bench" \
  mono "$PROGRAMS/mono_bench" rlcf "$PROGRAMS/ppo_bench" --curves "$PROGRAMS/ppo" \
  --discriminator "$PROGRAMS/discriminator" --out "$PROGRAMS/eval" --seed "$SEED" --overwrite
