#!/usr/bin/env bash
# One GPU, engine and trainer side by side: vLLM takes FRACTION of the memory, the trainer works in the rest.
# MODEL: a folder with MTP weights, which bebop.adapt writes. Further arguments are settings of the job.
set -euo pipefail
exec python -m bebop.run rollout=vllm model=folder model.path="${MODEL:?a checkpoint with MTP weights}" \
    rollout.vllm.memory_fraction="${FRACTION:-0.4}" decoding=bebop decoding.draft_tokens="${K:-3}" "$@"
