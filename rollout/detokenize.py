"""The text of a completion, the same for every engine: rewards, reports and logs see this text of its tokens."""

from collections.abc import Callable, Sequence
from typing import Any

from bebop.trajectory import FinishReason, SamplingParams

ROLES = ("eos_token_id", "pad_token_id", "bos_token_id")
TextOf = Callable[[Sequence[int], SamplingParams, FinishReason], str]  # of a completion's tokens [T]


class CompletionText:
    """Turns the tokens of a completion into its text. A verifier must never see how an engine noticed the end.

    - A completion that *ended* (``stop``) loses its stop token, and the special tokens right before it:
      ``1/2<|im_end|><|endoftext|>`` is ``1/2``. Tokens that only ever end or fill a text (the tokenizer's eos, pad,
      bos) go in any case. Others stay if the completion holds a further special token, which they may close, as
      ``</answer>`` does in ``<answer>5</answer><eos>``.
    - A completion that was cut off (``length``, ``abort``) was ended by no token, and keeps all of them.
    - Special tokens in the middle stay in any case: they mark thinking, tool calls and answers, and a reward looks for
      those marks.
    - A stop *string* stays, and the text ends with its last character. The usual one in RL is ``</answer>``, without
      which a verifier cannot find the result.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Make a converter; ``tokenizer`` is one of transformers."""
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self.special = {*tokenizer.all_special_ids, *(id for id, token in added if token.special)}
        self.ends = {getattr(tokenizer, role) for role in ROLES}

    def __call__(self, ids: Sequence[int], params: SamplingParams, reason: FinishReason) -> str:
        """Return the text of tokens [T] that were sampled under ``params`` and ended for ``reason``."""
        count = self._said(ids, params) if reason == "stop" else len(ids)
        text = decoded(self.tokenizer, ids[:count])
        if reason != "stop" or count < len(ids):
            return text
        return text[: min((text.index(s) + len(s) for s in params.stop if s in text), default=len(text))]

    def _said(self, ids: Sequence[int], params: SamplingParams) -> int:
        """Return how many tokens come before those that ended the completion."""
        count = len(ids)
        ends = self.ends.union(params.stop_token_ids)
        while count and ids[count - 1] in ends:
            count -= 1
        before = count
        while before and ids[before - 1] in self.special:
            before -= 1
        return count if self.special.intersection(ids[:before]) else before


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of tokens [T], whatever the tokenizer's own settings are.

    With ``clean_up_tokenization_spaces`` it would lose spaces before marks (``a .`` becomes ``a.``), and a stop string
    that holds one would never be found.
    """
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def completed_at(tokenizer: Any, ids: Sequence[int], stops: Sequence[str]) -> int:
    """Return the number of tokens of a completion [T] up to the one that completes a stop string; 0 without one."""

    def holds(count: int) -> bool:
        text = decoded(tokenizer, ids[:count])
        return any(stop in text for stop in stops)

    count = len(ids)
    if not holds(count):
        return 0
    while count > 1 and holds(count - 1):
        count -= 1
    return count
