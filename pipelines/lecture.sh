#!/usr/bin/env bash
# the five pictures of docs/lecture.md, from the runs of demo and overoptimise
#
#     bash pipelines/lecture.sh      # SEED and RUNS are theirs; they run first where they have not
set -euo pipefail
cd "$(dirname "$0")/.."
. pipelines/common.sh
RUNS=${RUNS:-runs/tiny}

[ -f "$RUNS/ppo_fast_no_kl/summary.json" ] || bash pipelines/overoptimise.sh
python -m experiments.lecture.report --runs "$RUNS" --out "$RUNS/lecture"
