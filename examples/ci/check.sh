#!/usr/bin/env bash
# Hold a bundle against its reference and leave what a pipeline shows: the same run on a laptop,
# in GitHub Actions (action.yml), in GitLab (gitlab-ci.yml), and before a push (pre-commit.yaml).
#
# BUNDLE     bundle folder
# REFERENCE  checkpoint, or what `headport reference` wrote (needs neither torch nor the checkpoint)
# TEXTS      texts, one a line; not with a stored reference, which brings its own
# GATES      limits (TOML); empty: those of the bundle's recipe
# BASELINE   earlier report.json that must not be worse; empty: none
# OUT        folder for the reports
set -euo pipefail
: "${BUNDLE:?a bundle folder is expected}" "${REFERENCE:?a checkpoint or a stored reference is expected}"
OUT=${OUT:-headport-report}
mkdir -p "$OUT"

arguments=("$BUNDLE" --reference "$REFERENCE" --force)
if [ -n "${TEXTS:-}" ]; then
  arguments+=(--text)
  while IFS= read -r text; do
    [ -z "$text" ] || arguments+=("$text")
  done <<<"$TEXTS"
fi
[ -z "${GATES:-}" ] || arguments+=(--gates "$GATES")
[ -z "${BASELINE:-}" ] || arguments+=(--baseline "$BASELINE")

# Exit 0: passed; 1: a gate failed or is undecided; 2: wrong use. Reports are written for 0 and 1.
headport validate "${arguments[@]}" \
  --json "$OUT/report.json" --html "$OUT/report.html" --markdown "$OUT/report.md" \
  --junit "$OUT/junit.xml"
