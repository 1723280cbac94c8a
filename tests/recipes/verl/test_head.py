"""The head beside verl's engine, here with a whole model of transformers, and batches as verl makes them."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from bebop.config.job import HeadConfig, ModelConfig
from bebop.model.checkpoint import load_policy, resolve
from bebop.trainer.chains import TokenRow, known_chains
from bebop.trainer.head_backend import FSDPBackend
from bebop.trainer.heads import HeadTrainer
from bebop.trainer.objectives import Sampling
from bebop.verl_job.head import HeadBeside, answer_masks, split_rows
from bebop.verl_job.settings import VerlConfig

ROWS = [torch.arange(6.0).view(3, 2), torch.arange(6.0, 10.0).view(2, 2)]  # hidden states of 3 and of 2 tokens
TEXTS = [
    TokenRow(prompt=(2, 17, 40, 3), answer=(50, 61, 72, 1)),
    TokenRow(prompt=(2, 9, 3), answer=(80, 33, 4, 30, 5, 1)),
]
CONFIG = VerlConfig(train_head=True, head=HeadConfig(depth=3, lr=1e-3, lr_warmup_steps=1))


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make(**changes: Any) -> tuple[HeadBeside, Any]:
    """A head beside a model as verl loads it."""
    model = AutoModelForCausalLM.from_pretrained(resolve("tiny"), dtype=torch.float32, attn_implementation="eager")
    settings = SimpleNamespace(local_path=str(resolve("tiny")))
    engine = SimpleNamespace(model_config=settings, module=model, _autocast_dtype=torch.float32)
    engine.__dict__.update(changes)
    return HeadBeside(engine, model, CONFIG, lambda: "cpu"), model


def batch() -> dict[str, Any]:
    """Both texts as verl's engines get them."""
    ids = [torch.tensor(row.token_ids) for row in TEXTS]
    masks = [torch.ones(len(row.answer)) for row in TEXTS]
    jagged = {"layout": torch.jagged}
    return {
        "input_ids": torch.nested.nested_tensor(ids, **jagged),
        "response_mask": torch.nested.nested_tensor(masks, **jagged),
        "temperature": 0.9,
    }


def learn(beside: HeadBeside, model: Any) -> dict[str, float]:
    """The forward pass of a policy update, rows side by side, and the head's step."""
    micro = batch()
    padded = torch.nested.to_padded_tensor(micro["input_ids"], 0)
    mask = torch.arange(padded.shape[1]) < torch.tensor([len(row.token_ids) for row in TEXTS])[:, None]
    with beside.keeping(micro):
        model(input_ids=padded, attention_mask=mask.long()).logits.sum().backward()
    return beside.update()


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.9, 5)])
def test_a_step_is_that_of_the_projects_own_trainer(top_p: float, top_k: int) -> None:
    beside, model = make()
    beside.config = replace(CONFIG, rollout_top_p=top_p, rollout_top_k=top_k)
    found = learn(beside, model)
    policy = load_policy(ModelConfig(device="cpu"))
    sampling = Sampling(temperature=0.9, target_top_p=top_p, target_top_k=top_k)
    expected = HeadTrainer(FSDPBackend(policy, sampling), CONFIG.head).update(TEXTS)
    assert found == pytest.approx(expected, rel=1e-4)
    assert policy.mtp is not None
    for name, weight in policy.mtp.named_parameters():
        torch.testing.assert_close(beside.trainer().backend.named[name].grad, weight.grad, rtol=1e-3, atol=1e-6)


def test_the_policy_notices_nothing() -> None:
    torch.manual_seed(5)
    beside, model = make()
    after = torch.rand(3)
    torch.manual_seed(5)
    AutoModelForCausalLM.from_pretrained(resolve("tiny"), dtype=torch.float32, attn_implementation="eager")
    assert torch.equal(after, torch.rand(3))  # no random number was drawn for the head
    learn(beside, model)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    padded = torch.nested.to_padded_tensor(batch()["input_ids"], 0)
    mask = torch.arange(padded.shape[1]) < torch.tensor([len(row.token_ids) for row in TEXTS])[:, None]
    model(input_ids=padded, attention_mask=mask.long()).logits.sum().backward()
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())
    assert model.config._attn_implementation == "eager"


def test_it_is_sent_under_the_names_of_the_checkpoint() -> None:
    beside, model = make()
    with safe_open(resolve("tiny") / "model.safetensors", framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys() if "mtp" in name}
    sent = beside.weights()
    assert sent.keys() == stored.keys() and all(torch.equal(sent[name], stored[name].float()) for name in sent)
    learn(beside, model)
    assert any(not torch.equal(weight, stored[name].float()) for name, weight in beside.weights().items())


@pytest.mark.slow
def test_it_goes_on_from_a_checkpoint_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    one, model = make()
    learn(one, model)
    one.save(tmp_path)
    learn(one, model)
    other, model = make()
    other.load(tmp_path)
    assert other.trainer().version == 1
    learn(other, model)
    ours, theirs = one.trainer().weights(), other.trainer().weights()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_checkpoint_from_before_the_head_was_trained_is_no_mistake(tmp_path: Path) -> None:
    beside, _ = make()
    before = beside.weights()
    beside.load(tmp_path)
    assert all(torch.equal(weight, before[name]) for name, weight in beside.weights().items())


def test_what_it_cannot_do_is_one_line() -> None:
    beside, model = make(_autocast_dtype=torch.float16)
    with pytest.raises(ValueError, match="fp16 is not possible"):
        learn(beside, model)
    with pytest.raises(ValueError, match="no hidden state was seen"), beside.keeping(batch()):
        pass  # an engine that does not run the model


def test_hidden_states_side_by_side_and_end_to_end_are_the_same_rows() -> None:
    padded = torch.nn.utils.rnn.pad_sequence(ROWS, batch_first=True, padding_value=9.0)
    packed = torch.cat([*ROWS, torch.full((3, 2), 9.0)])[None]  # padded to a multiple, as verl may
    for states in (padded, packed):
        assert all(torch.equal(a, b) for a, b in zip(split_rows(states, [3, 2]), ROWS, strict=True))
    assert torch.equal(split_rows(ROWS[0][None], [3])[0], ROWS[0])


def test_states_that_are_too_few_are_noticed() -> None:
    with pytest.raises(AssertionError):
        split_rows(ROWS[0][None], [3, 2])


def test_what_the_policy_wrote_in_both_kinds_of_batch() -> None:
    rows = [torch.tensor([1, 0, 1]), torch.ones(5, dtype=torch.long)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    assert [own.tolist() for own in answer_masks({"response_mask": nested})] == [[True, False, True], [True] * 5]
    # A prompt of two tokens after one of padding, an answer of three of which the middle one came from a tool.
    mask, attention = torch.tensor([[1, 0, 1, 0]]), torch.tensor([[0, 1, 1, 1, 1, 1, 0]])
    found = answer_masks({"response_mask": mask, "attention_mask": attention})
    assert [own.tolist() for own in found] == [[True, False, True]]


def test_what_a_tool_wrote_is_never_a_target() -> None:
    beside, model = make()
    micro = batch()
    masks = [row.clone() for row in micro["response_mask"].unbind()]
    masks[0][1] = 0
    micro = {**micro, "response_mask": torch.nested.nested_tensor(masks, layout=torch.jagged)}
    padded = torch.nested.to_padded_tensor(micro["input_ids"], 0)
    with beside.keeping(micro):
        model(input_ids=padded)
    first = beside.rows[0]
    hole = len(TEXTS[0].prompt) + 1
    assert not first.answer[hole] and first.answer.sum() == len(TEXTS[0].answer) - 1
    layout = known_chains([first], 3)
    drafted = {
        (int(anchor) + step + 1)
        for anchor, steps in zip(layout.anchors[0], layout.steps[0], strict=True)
        for step in range(1, int(steps) + 1)
    }
    assert hole not in drafted and drafted == set(torch.nonzero(first.answer).ravel().tolist())
