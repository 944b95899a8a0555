#!/usr/bin/env bash
# entries that train a policy within a budget, ranked by the true reward in public and secret worlds
#
#     ENTRY=my_entry.py SECRET=runs/secret bash pipelines/leaderboard.sh
#
# ENTRY: only this file; SECRET: a file with a secret, for a second set of worlds. Finished runs are not repeated.
set -euo pipefail
cd "$(dirname "$0")/.."
. pipelines/common.sh

set --
[ -z "${ENTRY:-}" ] || set -- --entries "$ENTRY"
python -m experiments leaderboard "$@"
[ -z "${SECRET:-}" ] || python -m experiments leaderboard --secret-file "$SECRET" "$@"
python -m experiments.leaderboard.report
