#!/usr/bin/env bash
# server.sh with drafts of whole blocks (SGLang's DFLASH) instead of the model's MTP head; all of its settings but K count:
#
#     python -m bebop.export --model DIR --file block.safetensors --out DRAFT
#     MODEL=DIR DRAFT=DRAFT dflash.sh
#     python -m bebop.run rollout=sglang model=folder model.path=DIR decoding=block_target_only decoding.draft_tokens=7 \
#         model.parts.block=block.safetensors rollout.sglang.draft=DRAFT rollout.sglang.urls=[http://127.0.0.1:30000] \
#         rollout.sglang.transfer=disk rollout.sglang.folder=/shared/weights
#
# The size of a block is the drafter's.
set -euo pipefail
: "${MODEL:?the model that the drafter was made for}" "${DRAFT:?the folder that python -m bebop.export wrote}"
if ! python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "error: SGLang's DFLASH needs CUDA, which is not here; rollout=torch decoding=block drafts blocks anywhere" >&2
    exit 2
fi
export MODEL DRAFT
exec bash "$(dirname "${BASH_SOURCE[0]}")/server.sh" "$@"
