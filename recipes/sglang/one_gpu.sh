#!/usr/bin/env bash
# One GPU: SGLang in the rollout worker's process, the trainer beside it. MODEL: a folder with MTP weights.
set -euo pipefail
exec python -m bebop.run rollout=sglang model=folder model.path="${MODEL:?a checkpoint with MTP weights}" \
    model.dtype=bfloat16 rollout.workers=1 rollout.sglang.memory_fraction="${FRACTION:-0.4}" \
    decoding=bebop decoding.draft_tokens=3 "$@"
