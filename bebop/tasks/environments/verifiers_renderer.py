"""The model's own chat template as a renderer of verifiers, which never tokenises history again.

verifiers' default renderer tokenises the whole conversation in every turn. That is exact only while the policy writes
each word in the tokenizer's own pieces. This renderer uses ``ChatDelta``: it renders the first prompt once, and then
what the template adds after the sampled stop token.
"""

from collections.abc import Sequence
from typing import Any

from renderers.base import Message, RenderedTokens, Tokenizer, ToolSpec
from renderers.configs import DefaultRendererConfig
from renderers.default import DefaultRenderer

from bebop.errors import UserError
from bebop.tasks.chat_delta import ChatDelta

IMPORT_PATH = f"{__name__}.DeltaRenderer"  # as the settings of a renderer name it


class DeltaRendererConfig(DefaultRendererConfig):
    """The configuration of ``DeltaRenderer``: nothing to set."""


class DeltaRenderer(DefaultRenderer):
    """Renders messages by ``ChatDelta``; the library decodes completions. No tools."""

    config_class = DeltaRendererConfig

    def __init__(self, tokenizer: Tokenizer, config: DeltaRendererConfig | None = None) -> None:
        """Check the chat template; ``UserError`` if it cannot have turns."""
        super().__init__(tokenizer, config)
        self.delta = ChatDelta.checked(tokenizer, self.get_stop_token_ids())

    def render(
        self, messages: list[Message], *, tools: list[ToolSpec] | None = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        """Render a prompt; the server refuses one that changes what was fed and sampled before."""
        return _attributed([], self.delta.first(_texts(messages)), messages)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Message],
        *,
        tools: list[ToolSpec] | None = None,
    ) -> RenderedTokens:
        """Return what was fed and sampled, unchanged, and what the template adds for new messages."""
        before = [*previous_prompt_ids, *previous_completion_ids]
        return _attributed(before, self.delta.observation(_texts(new_messages)), new_messages)


def _texts(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Return messages of text; ``UserError`` for any other."""
    for message in messages:
        if not isinstance(message.get("content"), str):
            raise UserError(f"only messages of text are possible, not {str(message)[:80]!r}")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _attributed(before: list[int], added: list[int], messages: Sequence[Message]) -> RenderedTokens:
    """Attribute the added tokens to the last message: a template is opaque, and no finer answer is needed."""
    roles: list[Any] = [message["role"] for message in messages]
    indices = [-1] * len(before) + [len(messages) - 1] * len(added)
    return RenderedTokens(token_ids=[*before, *added], message_indices=indices, message_roles=roles)
