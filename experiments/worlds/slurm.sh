#!/bin/bash
#SBATCH --job-name=worlds
#SBATCH --cpus-per-task=2
#SBATCH --mem=4G
#SBATCH --time=08:00:00
#SBATCH --requeue
#SBATCH --output=worlds-%A_%a.log

# The study over worlds as a Slurm job array. Run it from the root of a checkout with a .venv, on a disk shared by all nodes:
#
#     tuning=$(sbatch --parsable --array=1-6 experiments/worlds/slurm.sh tune 6)
#     sbatch --dependency=afterok:$tuning --array=1-20 experiments/worlds/slurm.sh final 20
#     .venv/bin/python -m experiments.worlds.report     # when all have ended
#
# Arguments: the phase, the number of shares, and further flags of `python -m experiments worlds`. A share is an
# algorithm in tuning and a world in final runs. Resubmit a stopped task to continue it, e.g. task 3 with --array=3. Each
# core runs one program at a time.
set -eu
phase=${1:?the phase: tune or final}
shares=${2:?the number of shares}
shift 2
cd "${SLURM_SUBMIT_DIR:?submit this script with sbatch}"
exec "${PYTHON:-.venv/bin/python}" -m experiments worlds \
  --phase "$phase" --share "$SLURM_ARRAY_TASK_ID/$shares" --jobs "${SLURM_CPUS_PER_TASK:-1}" "$@"
