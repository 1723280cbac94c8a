"""A tool parser for a model that knows no calls: whatever it says is a call of the tool ``count``.

Loaded through VERL_USE_EXTERNAL_MODULES.
"""

import json
from typing import Any

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser


@ToolParser.register("every_answer")
class EveryAnswer(ToolParser):
    """The text of an answer, without special tokens, is the call's argument."""

    async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[FunctionCall]]:
        text = self.tokenizer.decode(responses_ids, skip_special_tokens=True)
        return text, [FunctionCall(name="count", arguments=json.dumps({"text": text}))]
