#!/usr/bin/env bash
# Several machines that form a Ray cluster with a key, without which whoever reaches it could run code:
#
#     first machine:   ray get-auth-token --generate     # copy ~/.ray/auth_token to the others
#     first machine:   RAY_AUTH_MODE=token ray start --head --port 6379
#     every other one: RAY_AUTH_MODE=token ray start --address FIRST:6379
#     first machine:   MODEL=... WORKERS=8 TP=2 RANKS=8 RAY_AUTH_MODE=token several_nodes.sh runtime.dir=/shared/run
#
# The rollout's placement group has a bundle of TP GPUs for each engine, on any machine; the trainer's lies on one machine.
# bebop, SGLang, MODEL and runtime.dir must be found under the same path everywhere.
set -euo pipefail
exec python -m bebop.run rollout=sglang model=folder model.path="${MODEL:?a checkpoint with MTP weights}" \
    runtime.address="${RAY:-auto}" rollout.workers="${WORKERS:?engines}" rollout.sglang.tensor_parallel="${TP:-1}" \
    trainer.ranks="${RANKS:?GPUs of the trainer}" decoding=bebop decoding.draft_tokens="${K:-3}" "$@"
