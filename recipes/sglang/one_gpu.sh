#!/usr/bin/env bash
# One GPU. MODEL: a folder with MTP weights, which bebop.adapt writes. Further arguments are settings of the job.
#
# Side by side (default): SGLang takes FRACTION of the memory, the trainer works in the rest, at the same time.
# COLOCATED=1: in turns. SGLang gives its memory away once all answers of a step are there and takes it back for the
# next; rollout.staleness=0, since nothing can be answered meanwhile.
set -euo pipefail
turns=()
if [[ -n "${COLOCATED:-}" ]]; then
    turns=(rollout.staleness=0 rollout.sglang.colocated=true)
fi
exec python -m bebop.run rollout=sglang model=folder model.path="${MODEL:?a checkpoint with MTP weights}" \
    rollout.sglang.memory_fraction="${FRACTION:-0.4}" decoding=bebop decoding.draft_tokens="${K:-3}" "${turns[@]}" "$@"
