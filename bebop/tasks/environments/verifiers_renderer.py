"""The model's own chat template as a renderer of verifiers', with history that is never tokenised again.

verifiers' default renderer tokenises the whole conversation in every turn, which is exact only while the policy writes
each word in the tokenizer's own pieces. This one does as ``ChatDelta``: the first prompt is rendered once, and then
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
    """Nothing to set."""


class DeltaRenderer(DefaultRenderer):
    """Messages as tokens by ``ChatDelta``; answers as text by the library. No tools."""

    config_class = DeltaRendererConfig

    def __init__(self, tokenizer: Tokenizer, config: DeltaRendererConfig | None = None) -> None:
        """``UserError`` for a chat template that cannot have turns."""
        super().__init__(tokenizer, config)
        self.delta = ChatDelta.checked(tokenizer, self.get_stop_token_ids())

    def render(
        self, messages: list[Message], *, tools: list[ToolSpec] | None = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        """A prompt; the server refuses it where it is not what was fed and sampled before."""
        return _attributed([], self.delta.first(_texts(messages)), messages)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Message],
        *,
        tools: list[ToolSpec] | None = None,
    ) -> RenderedTokens:
        """What was fed and sampled, as it is, and what the template adds for new messages."""
        before = [*previous_prompt_ids, *previous_completion_ids]
        return _attributed(before, self.delta.observation(_texts(new_messages)), new_messages)


def _texts(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Messages of text alone; ``UserError`` for any other."""
    for message in messages:
        if not isinstance(message.get("content"), str):
            raise UserError(f"only messages of text are possible, not {str(message)[:80]!r}")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _attributed(before: list[int], added: list[int], messages: Sequence[Message]) -> RenderedTokens:
    """Tokens where those added belong to the last message: a template is opaque, and nothing here asks further."""
    roles: list[Any] = [message["role"] for message in messages]
    indices = [-1] * len(before) + [len(messages) - 1] * len(added)
    return RenderedTokens(token_ids=[*before, *added], message_indices=indices, message_roles=roles)
