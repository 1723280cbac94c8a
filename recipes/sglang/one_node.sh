#!/usr/bin/env bash
# One machine with several GPUs: WORKERS engines of TP GPUs each, and RANKS GPUs that share the training. The job reserves
# them as two Ray placement groups, so WORKERS x TP + RANKS GPUs are needed: 2 x 2 + 4 = 8 by default.
set -euo pipefail
exec python -m bebop.run rollout=sglang model=folder model.path="${MODEL:?a checkpoint with MTP weights}" \
    rollout.workers="${WORKERS:-2}" rollout.sglang.tensor_parallel="${TP:-2}" trainer.ranks="${RANKS:-4}" \
    decoding=bebop decoding.draft_tokens="${K:-3}" "$@"
