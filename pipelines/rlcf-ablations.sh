#!/usr/bin/env bash
# what the paper compares RLCF with: CodeRL, BipolarRamp, and RLCF without one of its parts
#
#     bash pipelines/rlcf-ablations.sh      # SEED, PROGRAMS, CODE and MODEL are those of rlcf, which runs first
set -euo pipefail
cd "$(dirname "$0")/.."
. pipelines/common.sh
if [ "${MODEL:-}" = t5 ]; then PROGRAMS=${PROGRAMS:-runs/programs_t5}; fi
PROGRAMS=${PROGRAMS:-runs/programs}

[ -f "$PROGRAMS/eval/eval.json" ] || bash pipelines/rlcf.sh

# 1. From the same start, with as many episodes: the two baselines.
for baseline in coderl bipolar_ramp; do
  python -m nanorlhf.rlcf.train_baselines "$baseline-tiny" --data "$PROGRAMS/data" --sft "$PROGRAMS/sft" \
    --out "$PROGRAMS/$baseline" --seed "$SEED" --processes "$PROCESSES" --overwrite
done

# 2. RLCF without one of its parts; compiler_pays_0 scores a program that compiles as this discriminator does at first.
ablation() {
  local name=$1
  shift
  python train_rlcf.py rlcf-tiny "$@" --data "$PROGRAMS/data" --sft "$PROGRAMS/sft" --out "$PROGRAMS/$name" \
    --seed "$SEED" --processes "$PROCESSES" --overwrite
}
python -m nanorlhf.rlcf.train_discriminator rlcf-tiny --num-pair-epochs 0 --data "$PROGRAMS/data" \
  --sft "$PROGRAMS/sft" --out "$PROGRAMS/discriminator_triplets" --seed "$SEED" --processes "$PROCESSES" --overwrite
ablation no_localisation --no-localise --discriminator "$PROGRAMS/discriminator"
ablation compiler_only --discriminator None
ablation compiler_pays_0 --discriminator None --pass-score 0
ablation fix_disc --freeze-discriminator --discriminator "$PROGRAMS/discriminator"
ablation no_pretraining --discriminator "$PROGRAMS/discriminator_triplets"
ablation discriminator_only --no-compiler --discriminator "$PROGRAMS/discriminator"

# 3. Each is fine-tuned on the benchmark, as those of rlcf were.
policies=(sft "$PROGRAMS/sft_bench" mono "$PROGRAMS/mono_bench" rlcf "$PROGRAMS/ppo_bench")
curves=("$PROGRAMS/ppo")
for policy in coderl bipolar_ramp no_localisation compiler_only compiler_pays_0 fix_disc no_pretraining \
  discriminator_only; do
  python train_sft.py rlcf-tiny-bench --model "$PROGRAMS/$policy" --data "$PROGRAMS/bench" \
    --out "$PROGRAMS/${policy}_bench" --seed "$SEED" --processes "$PROCESSES" --overwrite
  policies+=("$policy" "$PROGRAMS/${policy}_bench") curves+=("$PROGRAMS/$policy")
done

# 4. One discriminator, which none of them was trained against, judges all.
python eval.py rlcf-tiny --data "$PROGRAMS/bench" --policies "${policies[@]}" --curves "${curves[@]}" \
  --discriminator "$PROGRAMS/discriminator" --out "$PROGRAMS/eval_ablations" --seed "$SEED" --overwrite
