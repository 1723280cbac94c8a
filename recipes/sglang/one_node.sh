#!/usr/bin/env bash
# One node with 8 GPUs: two servers with 2 GPUs each, four ranks of the trainer. Weights travel through FOLDER.
set -euo pipefail
here="$(dirname "${BASH_SOURCE[0]}")"
CUDA_VISIBLE_DEVICES=0,1 PORT=30000 TP=2 "$here/server.sh" & first=$!
CUDA_VISIBLE_DEVICES=2,3 PORT=30001 TP=2 "$here/server.sh" & second=$!
trap 'kill "$first" "$second"' EXIT
for port in 30000 30001; do
    until curl -sf "http://127.0.0.1:$port/health" >/dev/null; do sleep 2; done
done
CUDA_VISIBLE_DEVICES=4,5,6,7 python -m bebop.run rollout=sglang model=folder model.path="$MODEL" model.dtype=bfloat16 \
    rollout.sglang.urls=[http://127.0.0.1:30000,http://127.0.0.1:30001] rollout.sglang.carrier=disk \
    rollout.sglang.folder="${FOLDER:?a folder for weights, best in memory}" trainer.ranks=4 "$@"
