#!/usr/bin/env bash
# Several nodes: server.sh runs on each rollout node already; here the trainer's nodes form a Ray cluster.
# URLS: http://node1:30000,http://node2:30000  FOLDER: on a file system that all nodes see  RAY: the cluster's address
set -euo pipefail
exec python -m bebop.run rollout=sglang model=folder model.path="${MODEL:?}" model.dtype=bfloat16 \
    rollout.sglang.urls="[${URLS:?}]" rollout.sglang.carrier=disk rollout.sglang.folder="${FOLDER:?}" \
    runtime.address="${RAY:?}" trainer.ranks="${RANKS:?}" "$@"
