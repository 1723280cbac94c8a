"""Endless prompt stream, addressed by number, so that a job resumes from one integer.

Questions are endless, or a finite set (``task.size``, the rows of a file) that repeats each epoch. Prompt i of N
questions belongs to epoch i // N. Seed and epoch alone determine the permutation of its place there.
"""

from collections.abc import Callable
from typing import Any, Protocol

from bebop.config.job import TaskConfig
from bebop.errors import UserError
from bebop.run_dir.storable import check_keepable
from bebop.tasks.environment import find_kind, question
from bebop.tasks.epochs import Epochs
from bebop.tasks.files import FileItems
from bebop.tasks.procedural import ProceduralItems
from bebop.trajectory import Prompt

Question = str | list[dict[str, str]]  # a text, or messages with role and content
Encode = Callable[[Any], tuple[str, tuple[int, ...]]]  # Question -> text after the chat template, token ids [P]

MAX_TRIES = 128  # candidates for one place in the stream before the length limit is reported as wrong


class Items(Protocol):
    """Source of questions: a mapping with question, answer and metadata for every (index, attempt)."""

    def item(self, index: int, attempt: int = 0) -> dict[str, Any]:
        """Return candidate ``attempt`` for place ``index``, the same on every call."""
        ...

    def asked(self, index: int, attempt: int = 0) -> tuple[int, int | None]:
        """Return the epoch, from 0, and the number of the question, the same in each epoch; None: it is asked once."""
        ...


class PromptSource:
    """Prompts of a job. ``prompt(n)`` depends only on the settings and n: n is the whole state of the stream.

    A question of more than ``max_prompt_tokens`` is replaced by another candidate for the same place; all other places
    stay as they are. In a finite set the candidate is the same in each epoch. In a file it is another row, which the
    epoch then contains twice.
    """

    def __init__(self, config: TaskConfig, encode: Encode, max_prompt_tokens: int, items: Items | None = None) -> None:
        """Open the source; ``encode`` converts a question to text and token ids (see ``chat_encoder``).

        ``items``: the questions, if they are already open.
        """
        self.config, self.encode, self.max_prompt_tokens = config, encode, max_prompt_tokens
        self.items = items or open_items(config)

    def prompt(self, index: int) -> Prompt:
        """Return prompt ``index`` >= 0; raise ``UserError`` if every candidate for the place is too long."""
        assert index >= 0, index
        lengths = []
        for attempt in range(MAX_TRIES):
            item = self.items.item(index, attempt)
            text, token_ids = self.encode(item["question"])
            if len(token_ids) <= self.max_prompt_tokens:
                check_keepable(item, f"question {index} of task.name={self.config.name!r}")
                epoch, number = self.items.asked(index, attempt)
                return Prompt(
                    index=index,
                    task=self._task(item),
                    text=text,
                    token_ids=token_ids,
                    item=item,
                    question=number,
                    epoch=epoch,
                )
            lengths.append(len(token_ids))
        raise UserError(
            f"task.name={self.config.name!r}: {MAX_TRIES} prompts in a row take {min(lengths)} to {max(lengths)} "
            f"tokens, but {self.max_prompt_tokens} fit; raise rollout.max_length or choose shorter questions"
        )

    def _task(self, item: dict[str, Any]) -> str:
        """Return the data set of an item; in a mixture, the drawn one."""
        return str(item["metadata"]["source_dataset"]) if self.config.name == "composite" else self.config.name


class EnvironmentSource:
    """Questions of an environment. It creates their first messages in a rollout: prompts have no tokens yet."""

    def __init__(self, config: TaskConfig) -> None:
        """Find the environment; raise ``UserError`` if there is none."""
        self.config, self.kind = config, find_kind(config.name)
        self._epochs = None if config.size is None else Epochs(config.size, config.seed)

    def prompt(self, index: int) -> Prompt:
        """Return prompt ``index`` >= 0, from the settings and the number alone.

        A repeated question begins as before: its environment gets the same item and the same seed.
        """
        epoch, number = (0, None) if self._epochs is None else self._epochs.place(index)
        item = question(self.kind, index if number is None else number, self.config.seed, self.config.args)
        task = self.config.name
        check_keepable(item, f"task.name={task!r}: the item of question {index}")
        return Prompt(index=index, task=task, text="", token_ids=(), item=item, question=number, epoch=epoch)


def chat_encoder(tokenizer: Any, system: str | None = None) -> Callable[[Question], tuple[str, tuple[int, ...]]]:
    """Return a function that encodes a question to text and token ids, by the chat template, else as text and a
    newline.

    ``system`` precedes a question without its own system message. A model that was not trained to answer between
    <answer> tags needs the instruction (``reasoning_gym.utils.SYSTEM_PROMPTS`` has wordings).
    """

    def encode(question: Question) -> tuple[str, tuple[int, ...]]:
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
        if system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        if not tokenizer.chat_template:
            text = "\n".join(m["content"] for m in messages) + "\n"
            return text, open_text(tokenizer, text)
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is code from outside
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise UserError(
                f"the model's chat template refuses {str(messages)[:60]!r} ({reason}): give a model or a prompt that "
                "fits the other"
            ) from error
        # The template has already written the special tokens.
        return text, tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    return encode


def open_text(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Return the ids of a text to continue: with the tokenizer's prefix, without its suffix such as eos.

    A text that begins with the prefix, as one that a chat template has rendered, gets no second one.
    """
    ids, own = (tuple(tokenizer(text, add_special_tokens=added)["input_ids"]) for added in (True, False))
    begin = next((i for i in range(len(ids) - len(own) + 1) if ids[i : i + len(own)] == own), 0)
    prefix = ids[:begin]
    return own if own[:begin] == prefix else prefix + own


def instruction(config: TaskConfig, tokenizer: Any) -> str | None:
    """Return the system message that ``task.system`` selects.

    ``auto``: a reasoning-gym task asks for an answer between tags, with reasoning-gym's own wording. It does not if the
    tokenizer has those tags as tokens: such a model (the built-in one) was trained to use them.
    """
    if config.system != "auto":
        return config.system
    if config.source != "reasoning_gym" or "<answer>" in tokenizer.get_vocab():
        return None
    from reasoning_gym.utils import SYSTEM_PROMPTS

    return str(SYSTEM_PROMPTS["default"])


def open_items(config: TaskConfig) -> Items:
    """Open the questions of a task without environment; raise ``UserError`` for any fault. Needs no torch."""
    if config.source == "file":
        assert config.path is not None, "TaskConfig checks this"
        return FileItems(config.path, config.prompt_key, config.answer_key, config.seed, config.size)
    return ProceduralItems(config.name, config.args, config.seed, config.size)
