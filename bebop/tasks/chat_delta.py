"""What a chat template adds between two answers, as token ids: history is never rendered or tokenised again.

A trajectory is append-only ids. The first prompt is rendered once. After that only the *delta* is: what the template
puts from right after the stop token that the policy sampled to where its next answer begins. That is exact only if the
template treats a conversation as something that grows, which ``ChatDelta.checked`` finds out before a job starts, by
rendering conversations of its own. A template is refused if

- a longer conversation is not rendered as a continuation of the shorter one (thoughts of earlier answers taken out, the
  number of messages or the last one treated differently);
- the delta depends on what was answered, or on what came before;
- an answer does not end with a token that the policy stops at, so that a delta could not begin right after it;
- the delta has other ids when it is tokenised by itself.

Texts from environments cannot forge the markers of a conversation: special tokens in them are broken up by a blank
(``< eos>``), and the ids are looked at afterwards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from bebop.errors import UserError
from bebop.tasks.environment import Message

QUESTION = {"role": "user", "content": "first question"}
PLAIN = "plain answer"
# Answers whose edges, emptiness or contents a template might look at.
ANSWERS = (
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
OBSERVED = ("user", "tool")
SHOWN = 40  # characters of a difference
MOST_ESCAPES = 1000


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """A template that was found fit; made by ``checked``."""

    tokenizer: Any
    stops: tuple[str, ...]  # texts of the tokens at which an answer ends, the longest first
    tool: str  # the role that messages of tools are given: user, where the template has none for them
    markers: tuple[str, ...]  # texts of special tokens, the longest first

    @classmethod
    def checked(cls, tokenizer: Any, stop_ids: Sequence[int]) -> Self:
        """The delta of a tokenizer's chat template; ``UserError`` names the first thing that is wrong with it.

        ``stop_ids``: tokens at which the policy stops.
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
        """The prompt of the first turn; ``UserError`` if the template refuses it."""
        return self._ids(lambda own: self._render(own, ask=True), messages)

    def observation(self, messages: Sequence[Message]) -> list[int]:
        """Ids from right after the sampled stop token to where the next answer begins."""
        return self._ids(self._between, messages)

    # ---- rendering

    def _render(self, messages: Sequence[Message], ask: bool) -> str:
        """A conversation as text; ``ask``: with what an answer is begun by."""
        try:
            text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=ask)
        except Exception as error:  # a template is code from outside
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            roles = ", ".join(message["role"] for message in messages)
            raise UserError(f"the model's chat template refuses messages of {roles} ({reason})") from error
        assert isinstance(text, str)
        return text

    def _between(self, messages: Sequence[Message], history: Sequence[Message] = (QUESTION,)) -> str:
        """The delta as text, after a plain answer."""
        answered = [*history, {"role": "assistant", "content": PLAIN}]
        whole = self._render([*answered, *messages], ask=True)
        prompt = self._render(history, ask=True)
        _same(whole[: len(prompt)], prompt, "does not begin as the conversation before the answer did")
        rest = whole[len(prompt) :]
        _same(rest[: len(PLAIN)], PLAIN, "does not put an answer as it is right after what begins it")
        rest = rest[len(PLAIN) :]
        stop = next((stop for stop in self.stops if rest.startswith(stop)), None)
        if stop is None:
            raise _refused(f"does not end an answer with {' or '.join(map(repr, self.stops))}", repr(rest[:SHOWN]))
        return rest[len(stop) :]

    def _ids(self, render: Any, messages: Sequence[Message]) -> list[int]:
        """Ids of messages, in which only the template may put special tokens; ``UserError`` if others get in."""
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
        """Ids of a rendered text; the template has written the special tokens already."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def escaped(self, text: str) -> str:
        """The text with a blank after the first character of whatever is a special token."""
        for _ in range(MOST_ESCAPES):
            before = text
            for marker in self.markers:
                text = text.replace(marker, f"{marker[0]} {marker[1:]}")
            if text == before:
                return text
        raise UserError(f"special tokens in {text[:40]!r} cannot be broken up by blanks")

    # ---- what is looked at before a job

    def _has_tools(self) -> bool:
        """Whether the template shows messages of tools."""
        try:
            return CONTENT in self._between([{"role": "tool", "content": CONTENT}])
        except UserError:
            return False

    def _check(self, messages: Sequence[Message]) -> None:
        """Everything in the module's list, for one kind of message."""
        between = self._between(messages)
        histories = ([QUESTION], [QUESTION, {"role": "assistant", "content": PLAIN}, *messages])
        for history in histories:
            prompt = self._render(history, ask=True)
            for answer in ANSWERS:
                answered = [*history, {"role": "assistant", "content": answer}]
                whole, short = self._render([*answered, *messages], ask=True), self._render(answered, ask=False)
                _same(whole[: len(prompt)], prompt, f"begins otherwise once {answer!r} was answered")
                _same(whole[: len(short)], short, f"renders {answer!r} otherwise once messages follow")
                ends = next((s for s in self.stops if whole.endswith(s + between)), None)
                if ends is None:
                    # Shown from where the delta after a plain answer would have begun.
                    _same(whole[-len(between) :], between, f"adds something else after {answer!r}")
                    before = whole[: -len(between)] if between else whole
                    raise _refused(
                        f"does not end {answer!r} with {' or '.join(map(repr, self.stops))}", before[-SHOWN:]
                    )
        self._check_ids(messages, between)

    def _check_ids(self, messages: Sequence[Message], between: str) -> None:
        """The delta has the ids that it has in the whole, right after a stop token."""
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
    """In place of ``ChatDelta`` for an environment that renders for itself (``EnvironmentKind.tokens``)."""

    vocabulary: int  # ids are below it

    def first(self, ids: Sequence[int]) -> list[int]:
        """The prompt of the first turn; ``UserError`` for an id that the policy does not have."""
        if wrong := next((token for token in ids if not 0 <= token < self.vocabulary), None):
            raise UserError(
                f"the environment gave token {wrong}, but the policy's vocabulary has {self.vocabulary}: "
                "its tokenizer has to be the policy's"
            )
        return list(ids)

    def observation(self, ids: Sequence[int]) -> list[int]:
        """As ``first``, of what comes after an answer."""
        return self.first(ids)


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text that tokens say; a tokenizer may be set to clean up spaces, which a template does not."""
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


def _special(tokenizer: Any) -> set[str]:
    """Texts of tokens that are no text: those that the tokenizer calls special, and added ones in angle brackets."""
    added: Mapping[int, Any] = tokenizer.added_tokens_decoder
    angled = {text for token in added.values() if (text := str(token)).startswith("<") and text.endswith(">")}
    special = {str(token) for token in added.values() if token.special}
    return {text for text in angled | special | set(map(str, tokenizer.all_special_tokens)) if len(text) > 1}


def _same(found: str, wanted: str, problem: str) -> None:
    """``UserError`` with the first difference."""
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
