#!/usr/bin/env bash
# Tokens/s of plain decoding, greedy drafts and rejection sampling at batch 1 to 64 on one GPU, the plugin on and off.
# MODEL: a folder with MTP weights (default: the built-in model). Table, chart and JSON go to OUT.
set -euo pipefail
exec python -m bebop.bench --out "${OUT:-runs/bench-sglang}" sglang --model "${MODEL:-tiny}" --dtype bfloat16 \
    --batches 1 4 16 64 --draft-tokens "${K:-3}" "$@"
