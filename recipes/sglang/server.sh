#!/usr/bin/env bash
# One server on this machine's GPUs, to be named in rollout.sglang.urls. Weights come from the job, through a folder:
#
#     MODEL=... TP=2 PORT=30000 SGLANG_API_KEY=... server.sh
#     python -m bebop.run rollout=sglang model=folder model.path=... rollout.sglang.urls=[http://HOST:30000] \
#         rollout.sglang.carrier=disk rollout.sglang.folder=/shared/weights
#
# The two variables: the plugin measures one verification step in EVERY; answers arrive whole, with all its entries.
set -euo pipefail
export BEBOP_VERIFY_EVERY="${EVERY:-4}" SGLANG_FORCE_STREAM_INTERVAL=1073741824
K="${K:-3}"
exec python -m sglang.launch_server --model-path "${MODEL:?a checkpoint with MTP weights}" --dtype bfloat16 \
    --host "${HOST:-0.0.0.0}" --port "${PORT:-30000}" --tp-size "${TP:-1}" \
    ${SGLANG_API_KEY:+--api-key "$SGLANG_API_KEY"} \
    --speculative-algorithm NEXTN --speculative-draft-model-path "$MODEL" --speculative-num-steps "$K" \
    --speculative-eagle-topk 1 --speculative-num-draft-tokens "$((K + 1))" --speculative-use-rejection-sampling \
    --skip-tokenizer-init --weight-version 0 "$@"
