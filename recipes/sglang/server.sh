#!/usr/bin/env bash
# One server on this machine's GPUs, to be named in rollout.sglang.urls. Weights come from the job, through a folder:
#
#     MODEL=... TP=2 PORT=30000 server.sh
#     python -m bebop.run rollout=sglang model=folder model.path=... rollout.sglang.urls=[http://127.0.0.1:30000] \
#         rollout.sglang.transfer=disk rollout.sglang.folder=/shared/weights
#
# Whoever reaches a server may replace its weights, so it listens to this machine alone. HOST=ADDRESS opens it to others, and
# then demands a key: SGLANG_API_KEY here, and in the job's environment.
# The two variables: the plugin measures one verification step in EVERY; answers arrive whole, with all its entries.
# Without --disable-overlap-schedule, tokens that are in flight during an update could get the version of the new weights.
set -euo pipefail
host="${HOST:-127.0.0.1}"
for argument in "$@"; do
    case "$argument" in # abbreviations too, as argparse takes them
    --ho | --hos | --host | --ho=* | --hos=* | --host=*)
        echo "error: ${argument%%=*}: the address is given as HOST=ADDRESS, which is checked" >&2
        exit 2
        ;;
    esac
done
if [[ ! "$host" =~ ^(127\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}|localhost|::1)$ && -z "${SGLANG_API_KEY:-}" ]]; then
    echo "error: HOST=$host is open to other machines: set SGLANG_API_KEY, or leave HOST out (127.0.0.1)" >&2
    exit 2
fi
export BEBOP_VERIFY_EVERY="${EVERY:-4}" SGLANG_FORCE_STREAM_INTERVAL=1073741824
K="${K:-3}"
drafts=(--speculative-algorithm NEXTN --speculative-draft-model-path "${MODEL:?a checkpoint with MTP weights}"
    --speculative-num-steps "$K" --speculative-eagle-topk 1 --speculative-num-draft-tokens "$((K + 1))"
    --speculative-use-rejection-sampling)
if [[ -n "${DRAFT:-}" ]]; then # dflash.sh
    drafts=(--speculative-algorithm DFLASH --speculative-draft-model-path "$DRAFT"
        --speculative-accept-threshold-single 1.0 --speculative-accept-threshold-acc 1.0)
fi
exec python -m sglang.launch_server --model-path "$MODEL" --dtype bfloat16 \
    --host "$host" --port "${PORT:-30000}" --tp-size "${TP:-1}" \
    ${SGLANG_API_KEY:+--api-key "$SGLANG_API_KEY"} \
    "${drafts[@]}" --disable-overlap-schedule --skip-tokenizer-init --weight-version 0 "$@"
