"""Writes down every answer as it leaves a rollout server: an account of the drafts that the plug-in has no hand in.

Loaded through VERL_USE_EXTERNAL_MODULES; one file a process in the folder that RECORD_ANSWERS names.
"""

import json
import os
from typing import Any

from verl.workers.rollout.llm_server import LLMServerClient

_generate = LLMServerClient.generate


async def generate(self: Any, request_id: str, *, prompt_ids: list[int], **inputs: Any) -> Any:
    output = await _generate(self, request_id, prompt_ids=prompt_ids, **inputs)
    row = {"request": request_id, "prompt": prompt_ids, "ids": output.token_ids, "extra": output.extra_fields}
    with open(os.path.join(os.environ["RECORD_ANSWERS"], f"{os.getpid()}.jsonl"), "a") as file:
        file.write(json.dumps(row) + "\n")
    return output


LLMServerClient.generate = generate
