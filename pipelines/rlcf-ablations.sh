#!/usr/bin/env bash
# what the paper compares RLCF with: CodeRL, BipolarRamp, no localisation, the compiler alone
#
#     bash pipelines/rlcf-ablations.sh      # SEED, PROGRAMS, CODE and MODEL are those of rlcf, which runs first
set -euo pipefail
cd "$(dirname "$0")/.."
. pipelines/common.sh
if [ "${MODEL:-}" = t5 ]; then PROGRAMS=${PROGRAMS:-runs/programs_t5}; fi
PROGRAMS=${PROGRAMS:-runs/programs}

[ -f "$PROGRAMS/eval/eval.json" ] || bash pipelines/rlcf.sh

# 1. From the same start, with as many episodes: the two baselines, and RLCF without one of its parts.
for baseline in coderl bipolar_ramp; do
  python -m nanorlhf.rlcf.train_baselines "$baseline-tiny" --data "$PROGRAMS/data" --sft "$PROGRAMS/sft" \
    --out "$PROGRAMS/$baseline" --seed "$SEED" --processes "$PROCESSES" --overwrite
done
python train_rlcf.py rlcf-tiny --no-localise --data "$PROGRAMS/data" --sft "$PROGRAMS/sft" \
  --discriminator "$PROGRAMS/discriminator" --out "$PROGRAMS/no_localisation" \
  --seed "$SEED" --processes "$PROCESSES" --overwrite
python train_rlcf.py rlcf-tiny --discriminator None --data "$PROGRAMS/data" --sft "$PROGRAMS/sft" \
  --out "$PROGRAMS/compiler_only" --seed "$SEED" --processes "$PROCESSES" --overwrite

# 2. Each is fine-tuned on the benchmark, as those of rlcf were.
for policy in coderl bipolar_ramp no_localisation compiler_only; do
  python train_sft.py rlcf-tiny-bench --model "$PROGRAMS/$policy" --data "$PROGRAMS/bench" \
    --out "$PROGRAMS/${policy}_bench" --seed "$SEED" --processes "$PROCESSES" --overwrite
done

# 3. One discriminator, which none of them was trained against, judges all.
python eval.py rlcf-tiny --data "$PROGRAMS/bench" --policies sft "$PROGRAMS/sft_bench" \
  mono "$PROGRAMS/mono_bench" rlcf "$PROGRAMS/ppo_bench" coderl "$PROGRAMS/coderl_bench" \
  bipolar_ramp "$PROGRAMS/bipolar_ramp_bench" no_localisation "$PROGRAMS/no_localisation_bench" \
  compiler_only "$PROGRAMS/compiler_only_bench" --curves "$PROGRAMS/ppo" "$PROGRAMS/coderl" \
  "$PROGRAMS/bipolar_ramp" "$PROGRAMS/no_localisation" "$PROGRAMS/compiler_only" \
  --discriminator "$PROGRAMS/discriminator" --out "$PROGRAMS/eval_ablations" --seed "$SEED" --overwrite
