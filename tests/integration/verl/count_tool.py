"""The tool of ``test_tool_agent``."""

from verl.tools.function_tool import function_tool


@function_tool
def count(text: str) -> str:
    """Counts letters.

    Args:
        text: what to count.
    """
    return str(len(text))
