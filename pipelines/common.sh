# shellcheck shell=bash
# What every pipeline begins with, in the root of the repository: `. pipelines/common.sh`.

# the Python of .venv, or without one that of the activated environment
PATH="$PWD/.venv/bin:$PATH"

# each command is shown before it runs, as make shows them
python() {
  echo "python $*" >&2
  command python "$@"
}

SEED=${SEED:-1}

# Processes that train a small world, each of one thread: there two threads wait for each other more
# than they compute, and so the digits do not depend on the number of cores. macOS can't fork them.
PROCESSES=${PROCESSES:-$([ "$(uname)" = Linux ] && echo 2 || echo 1)}

# Threads that wait for others soon sleep (GNU's OpenMP: after so many turns). Its default is to spin
# for a millisecond or more, which beside a busy process costs a factor of two to five, and to sleep
# at once is slower where nothing else runs.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-2000}

# stage OUT PROGRAM FLAGS: run a long stage unless it has finished, and go on from its last state
# where it was interrupted.
stage() {
  local out=$1 again=--overwrite
  shift
  if [ -f "$out/summary.json" ]; then return; fi
  if compgen -G "$out/state/step-*" >/dev/null; then again=--resume; fi
  python "$@" --out "$out" --seed "$SEED" "$again"
}
