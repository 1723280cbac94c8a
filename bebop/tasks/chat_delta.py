"""Token ids that a chat template adds between two completions; history is never rendered or tokenised again.

A trajectory is append-only ids. The first prompt is rendered once. After that only the *delta* is rendered: what the
template puts between the stop token that the policy sampled and the start of its next completion. That is exact only if
the template lets a conversation grow. ``ChatDelta.checked`` verifies this before a job starts, by rendering
conversations of its own. It refuses a template if

- a longer conversation is no continuation of the shorter one (it drops thoughts of earlier completions, or treats the
  number of messages or the last one differently);
- the delta depends on the completion, or on what came before;
- a completion does not end with a token at which the policy stops, so that no delta could begin right after it;
- the delta has other ids when it is tokenised by itself.

Texts from environments cannot forge the markers of a conversation: a blank breaks up special tokens in them
(``< eos>``), and the ids are checked afterwards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from bebop.errors import UserError
from bebop.tasks.environment import Message

QUESTION = {"role": "user", "content": "first question"}
PLAIN = "plain answer"
# Completions whose edges, emptiness or contents a template might treat differently.
COMPLETIONS = (
    PLAIN,
    "",
    " blanks around ",
    "\n\nlines around\n\n",
    "<think>a thought</think>\n\nafter it",
    "é 你 🙂",
    "half a marker <|im_",
    '{"name": "call"}',
)
CONTENT = "an observation"
SHOWN = 40  # characters of a difference
MAX_ESCAPES = 1000


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """Chat template that passed ``checked``, which constructs it."""

    tokenizer: Any
    stops: tuple[str, ...]  # texts of the tokens at which a completion ends, the longest first
    tool: str  # the role of tool messages; user if the template has no role for them
    markers: tuple[str, ...]  # texts of special tokens, the longest first

    @classmethod
    def checked(cls, tokenizer: Any, stop_ids: Sequence[int]) -> Self:
        """Return the delta of a tokenizer's chat template; raise ``UserError`` with its first fault.

        ``stop_ids``: the tokens at which the policy stops.
        """
        if tokenizer.chat_template is None:
            raise UserError("the model's tokenizer has no chat template: an environment of several turns needs one")
        if not stop_ids:
            raise UserError("the model has no stop token: a turn could not end")
        stops = sorted((_decoded(tokenizer, [stop]) for stop in stop_ids), key=len, reverse=True)
        markers = sorted(_special(tokenizer), key=len, reverse=True)
        delta = cls(tokenizer, tuple(stops), "tool", tuple(markers))
        if not delta._has_tools():
            delta = cls(tokenizer, tuple(stops), "user", tuple(markers))
        for role in ("user", delta.tool):
            delta._check([{"role": role, "content": CONTENT}])
        return delta

    def first(self, messages: Sequence[Message]) -> list[int]:
        """Return the prompt of the first turn; raise ``UserError`` if the template refuses it."""
        return self._ids(lambda own: self._render(own, ask=True), messages)

    def observation(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids between the sampled stop token and the start of the next completion."""
        return self._ids(self._between, messages)

    # ---- rendering

    def _render(self, messages: Sequence[Message], ask: bool) -> str:
        """Render a conversation as text; ``ask``: append the prefix of the next completion."""
        try:
            text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=ask)
        except Exception as error:  # a template is code from outside
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            roles = ", ".join(message["role"] for message in messages)
            raise UserError(f"the model's chat template refuses messages of {roles} ({reason})") from error
        assert isinstance(text, str)
        return text

    def _between(self, messages: Sequence[Message], history: Sequence[Message] = (QUESTION,)) -> str:
        """Return the delta as text, after a plain completion."""
        answered = [*history, {"role": "assistant", "content": PLAIN}]
        whole = self._render([*answered, *messages], ask=True)
        prompt = self._render(history, ask=True)
        _same(whole[: len(prompt)], prompt, "does not begin as the conversation before the completion did")
        rest = whole[len(prompt) :]
        _same(rest[: len(PLAIN)], PLAIN, "does not put a completion as it is right after what begins it")
        rest = rest[len(PLAIN) :]
        stop = next((stop for stop in self.stops if rest.startswith(stop)), None)
        if stop is None:
            raise _refused(f"does not end a completion with {' or '.join(map(repr, self.stops))}", repr(rest[:SHOWN]))
        return rest[len(stop) :]

    def _ids(self, render: Any, messages: Sequence[Message]) -> list[int]:
        """Return the ids of messages; raise ``UserError`` for special tokens that are not the template's."""
        own = [
            {"role": self.tool if m["role"] == "tool" else m["role"], "content": self.escaped(m["content"])}
            for m in messages
        ]
        ids = self._encode(render(own))
        bare = self._encode(render([{**m, "content": CONTENT} for m in own]))
        special = set(self.tokenizer.convert_tokens_to_ids(list(self.markers)))
        if [i for i in ids if i in special] != [i for i in bare if i in special]:
            raise UserError(f"a message of the environment holds special tokens after escaping: {str(messages)[:80]!r}")
        return ids

    def _encode(self, text: str) -> list[int]:
        """Return the ids of a rendered text, which already contains the template's special tokens.

        JSON may hold one half of a surrogate pair, which no tokenizer takes: it becomes a question mark.
        """
        text = text.encode("utf-8", "replace").decode()
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def escaped(self, text: str) -> str:
        """Insert a blank after the first character of every special token in a text."""
        for _ in range(MAX_ESCAPES):
            before = text
            for marker in self.markers:
                text = text.replace(marker, f"{marker[0]} {marker[1:]}")
            if text == before:
                return text
        raise UserError(f"special tokens in {text[:40]!r} cannot be broken up by blanks")

    # ---- checks before a job

    def _has_tools(self) -> bool:
        """Return whether the template shows tool messages."""
        try:
            return CONTENT in self._between([{"role": "tool", "content": CONTENT}])
        except UserError:
            return False

    def _check(self, messages: Sequence[Message]) -> None:
        """Check all conditions in the module's list for one kind of message."""
        between = self._between(messages)
        histories = ([QUESTION], [QUESTION, {"role": "assistant", "content": PLAIN}, *messages])
        for history in histories:
            prompt = self._render(history, ask=True)
            for answer in COMPLETIONS:
                answered = [*history, {"role": "assistant", "content": answer}]
                whole, short = self._render([*answered, *messages], ask=True), self._render(answered, ask=False)
                _same(whole[: len(prompt)], prompt, f"begins otherwise once {answer!r} was answered")
                _same(whole[: len(short)], short, f"renders {answer!r} otherwise once messages follow")
                ends = next((s for s in self.stops if whole.endswith(s + between)), None)
                if ends is None:
                    # Show the text from the place where the delta after a plain answer would begin.
                    _same(whole[-len(between) :], between, f"adds something else after {answer!r}")
                    before = whole[: -len(between)] if between else whole
                    raise _refused(
                        f"does not end {answer!r} with {' or '.join(map(repr, self.stops))}", before[-SHOWN:]
                    )
        self._check_ids(messages, between)

    def _check_ids(self, messages: Sequence[Message], between: str) -> None:
        """Check that the delta has the same ids alone as right after a stop token."""
        prompt = self._render([QUESTION], ask=True)
        whole = self._render([QUESTION, {"role": "assistant", "content": PLAIN}, *messages], ask=True)
        stop = whole[len(prompt) + len(PLAIN) : len(whole) - len(between)]
        ids = self._encode(whole)
        parts = self._encode(prompt) + self._encode(PLAIN) + self._encode(stop) + self._encode(between)
        if ids != parts:
            place = next((i for i, (a, b) in enumerate(zip(ids, parts, strict=False)) if a != b), 0)
            found = (_decoded(self.tokenizer, some[place : place + 4]) for some in (ids, parts))
            raise _refused("has other ids where its parts meet", "{!r}, in parts {!r}".format(*found))


@dataclass(frozen=True, slots=True)
class GivenTokens:
    """Substitute for ``ChatDelta`` if an environment renders messages itself (``EnvironmentKind.tokens``)."""

    vocabulary: int  # ids are below it

    def first(self, ids: Sequence[int]) -> list[int]:
        """Return the prompt of the first turn; raise ``UserError`` for an id outside the policy's vocabulary."""
        if wrong := next((token for token in ids if not 0 <= token < self.vocabulary), None):
            raise UserError(
                f"the environment gave token {wrong}, but the policy's vocabulary has {self.vocabulary}: "
                "its tokenizer has to be the policy's"
            )
        return list(ids)

    def observation(self, ids: Sequence[int]) -> list[int]:
        """Return the ids after a completion; raise ``UserError`` as ``first`` does."""
        return self.first(ids)


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """Decode tokens without cleaning up spaces, whatever the tokenizer's setting: a template does not clean up."""
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


def _special(tokenizer: Any) -> set[str]:
    """Return the texts of markers: special tokens of the tokenizer, and added tokens in angle brackets."""
    added: Mapping[int, Any] = tokenizer.added_tokens_decoder
    angled = {text for token in added.values() if (text := str(token)).startswith("<") and text.endswith(">")}
    special = {str(token) for token in added.values() if token.special}
    return {text for text in angled | special | set(map(str, tokenizer.all_special_tokens)) if len(text) > 1}


def _same(found: str, wanted: str, problem: str) -> None:
    """Raise ``UserError`` with the first difference of the texts, if they differ."""
    if found == wanted:
        return
    place = next(
        (i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), min(len(found), len(wanted))
    )
    begin = max(0, place - 10)
    seen, due = found[begin : begin + SHOWN], wanted[begin : begin + SHOWN]
    raise _refused(problem, f"{seen!r}, not {due!r}, at character {place}")


def _refused(problem: str, found: str) -> UserError:
    return UserError(f"the model's chat template {problem}, so turns cannot be appended: {found[:160]}")
