"""What a template adds between two answers, in ids; which templates are refused; texts that forge no marker."""

import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from bebop.config.job import ModelConfig
from bebop.errors import UserError
from bebop.model.checkpoint import load_tokenizer, stop_tokens
from bebop.tasks.chat_delta import ChatDelta, GivenTokens
from tests.cases import slow_but

EOS = 1
CHATML = (
    "{% for m in messages %}<user>{{ m.role }}\n{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<user>assistant\n{% endif %}"
)


def with_template(template: str | None = None) -> PreTrainedTokenizerBase:
    """The built-in model's tokenizer, with another template if one is given."""
    tokenizer = load_tokenizer(ModelConfig())
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def tiny() -> ChatDelta:
    return ChatDelta.checked(with_template(), stop_tokens(ModelConfig()))


def test_the_built_in_template_takes_turns(tiny: ChatDelta) -> None:
    ids = tiny.first([{"role": "user", "content": "Find 12"}])
    assert tiny.tokenizer.decode(ids) == "<user>Find 12<assistant>"
    for role in ("user", "tool"):
        assert tiny.tokenizer.decode(tiny.observation([{"role": role, "content": "more"}])) == "<user>more<assistant>"
    both = tiny.observation([{"role": "tool", "content": "a"}, {"role": "user", "content": "b"}])
    assert tiny.tokenizer.decode(both) == "<user>a<user>b<assistant>"


def test_a_delta_begins_right_after_the_stop_token() -> None:
    """The line break after a stop token is the template's, and belongs to the delta."""
    delta = ChatDelta.checked(with_template(CHATML), (EOS,))
    said = delta.observation([{"role": "tool", "content": "42"}])
    assert delta.tokenizer.decode(said) == "\n<user>tool\n42<eos>\n<user>assistant\n"
    # Without a role for tools, what they say is said by the user.
    users = CHATML.replace("<user>{{ m.role }}", "{% if m.role != 'tool' %}<user>{{ m.role }}").replace(
        "\n{% endfor", "\n{% endif %}{% endfor"
    )
    said = ChatDelta.checked(with_template(users), (EOS,)).observation([{"role": "tool", "content": "42"}])
    assert delta.tokenizer.decode(said) == "\n<user>user\n42<eos>\n<user>assistant\n"


REFUSED = {
    "counts messages": ("{{ messages | length }}" + CHATML, "does not begin as the conversation before"),
    "takes thoughts out": (
        CHATML.replace("m.content", "(m.content if loop.last else m.content.split('</think>')[-1])"),
        "renders '<think>a thought</think>\\n\\nafter it' otherwise once messages follow",
    ),
    "ends nothing": (CHATML.replace("<eos>", ""), "does not end a completion with '<eos>'"),
    "puts a blank before the stop": (CHATML.replace("}}<eos>", "}} <eos>"), "does not end a completion with '<eos>'"),
    "ends the last one otherwise": (
        CHATML.replace("<eos>", "{% if not loop.last %}<eos>{% endif %}"), "does not begin as the conversation before"
    ),
    "looks at the answer": (
        CHATML.replace("<eos>\n", "<eos>{{ messages[loop.index0 - 1].content | length if loop.index0 }}\n"),
        "adds something else after ''",
    ),
    "knows no answers": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ raise_exception('no answers') }}{% endif %}"
        "{% endfor %}",
        "refuses messages of user, assistant, user (TemplateError: no answers)",
    ),
    "begins answers otherwise": (
        CHATML.replace("<user>assistant\n{% endif", "<user>assistant\n<answer>{% endif"),
        "does not begin as the conversation before the completion did",
    ),
    "is not there": (None, "has no chat template"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_templates_that_cannot_grow_are_refused(what: str) -> None:
    template, reason = REFUSED[what]
    tokenizer = with_template(template)
    tokenizer.chat_template = template
    with pytest.raises(UserError) as refused:
        ChatDelta.checked(tokenizer, (EOS,))
    assert reason in str(refused.value) and "\n" not in str(refused.value)


def test_a_delta_that_merges_with_the_answer_is_refused() -> None:
    """By itself the first digits of the delta are other tokens than after the text of a stop that is no token."""
    tokenizer = with_template(
        "{% for m in messages %}#{{ m.content }}#{% endfor %}{% if add_generation_prompt %}#{% endif %}"
    )
    single = tokenizer.encode("#")[0]
    assert tokenizer.encode("##") != [single, single]  # "##" is a token of its own
    with pytest.raises(UserError, match="has other ids where its parts meet"):
        ChatDelta.checked(tokenizer, (single,))


def test_a_model_that_never_stops_is_refused() -> None:
    with pytest.raises(UserError, match="has no stop token"):
        ChatDelta.checked(with_template(), ())


PIECES = (
    "<eos>",
    "<",
    "eos",
    ">",
    "<user>",
    "<us",
    "er>",
    "</answer>",
    "<answer",
    " ",
    "<|endoftext|>",
    "a",
    "<eo<eos>s>",
)


@given(
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.lists(st.sampled_from(PIECES), max_size=6).map("".join),
)
@settings(max_examples=80, deadline=None)
def test_no_text_forges_a_marker(tiny: ChatDelta, one: str, other: str) -> None:
    """Special ids are those that the template puts there, whatever is said, and what is no marker is said as it is."""
    ids = tiny.observation([{"role": "tool", "content": one}, {"role": "user", "content": other}])
    markers = tiny.tokenizer.convert_tokens_to_ids(list(tiny.markers))
    special = [i for i in ids if i in markers]
    assert tiny.tokenizer.convert_ids_to_tokens(special) == ["<user>", "<user>", "<assistant>"]
    assert tiny.tokenizer.decode(ids).replace(" ", "") == f"<user>{one}<user>{other}<assistant>".replace(" ", "")
    if not any(marker in one + other for marker in tiny.markers):
        assert tiny.escaped(one) == one


def test_half_a_surrogate_pair_is_a_question_mark(tiny: ChatDelta) -> None:
    """JSON may hold one; no tokenizer takes it."""
    halves, marks = (tiny.observation([{"role": "tool", "content": f"city {text}"}]) for text in ("\ud83d", "?"))
    assert halves == marks


def test_a_text_without_markers_stays_as_it_is(tiny: ChatDelta) -> None:
    assert tiny.escaped("a < b > c, <b>, eos") == "a < b > c, <b>, eos"
    assert tiny.escaped("x<eos>y") == "x< eos>y"


@pytest.mark.parametrize("enough", slow_but([1_000], [1_000, 10_000]))
@pytest.mark.slow
def test_histories_of_ids_are_what_a_rendering_gives(enough: int) -> None:
    """So many turns: appended ids equal those of the whole conversation, where answers are what the tokenizer gives.

    Where they are not, an answer's ids stay as they were sampled: nothing is tokenised again.
    """
    rng, turns, odd = random.Random(7), 0, 0
    tokenizer = with_template()
    tiny = ChatDelta.checked(tokenizer, (EOS,))
    words = ("Find 12", "GCD", " 7-3=4", "\n", "é", "<", "sorted: 1, 2", "  ", "'s", "x<y>z")
    while turns < enough:
        messages = [{"role": "user", "content": "".join(rng.choices(words, k=rng.randrange(1, 5)))}]
        history, sampled = tiny.first(messages), []
        for _ in range(rng.randrange(1, 60)):
            said = "".join(rng.choices(words, k=rng.randrange(4)))
            ids = tokenizer.encode(said, add_special_tokens=False)
            if rng.random() < 0.1:  # as a policy may sample it: letter by letter
                ids = [i for letter in said for i in tokenizer.encode(letter, add_special_tokens=False)]
            heard = {"role": "tool", "content": "".join(rng.choices(words, k=rng.randrange(4)))}
            sampled.append((len(history), [*ids, EOS]))
            history += [*ids, EOS, *tiny.observation([heard])]
            messages += [{"role": "assistant", "content": said}, heard]
            turns += 1
        assert all(history[place : place + len(ids)] == ids for place, ids in sampled)
        whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        rendered = tokenizer.encode(whole, add_special_tokens=False)
        assert tokenizer.decode(history) == whole
        canonical = all(
            tokenizer.encode(tokenizer.decode(ids[:-1]), add_special_tokens=False) == ids[:-1] for _, ids in sampled
        )
        odd += not canonical
        assert not canonical or history == rendered
    assert odd > 10  # the difference shows


def test_tokens_that_are_given_are_the_policys() -> None:
    given = GivenTokens(12)
    assert given.first((0, 11)) == given.observation((0, 11)) == [0, 11]
    for read, wrong in product((given.first, given.observation), (12, -1)):
        with pytest.raises(UserError, match=f"gave token {wrong}, but the policy's vocabulary has 12"):
            read((3, wrong))
