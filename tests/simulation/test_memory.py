"""Whether an update fits: the arithmetic against what is counted, and what it advises."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bebop import simulate
from bebop.bench import update_memory
from bebop.bench.memory import peak_bytes
from bebop.bench.update_memory import NARROW, batch_of, counted, one_rank_group, policy_of
from bebop.config.job import JobConfig, ModelConfig, RolloutConfig, SamplingConfig, TrainerConfig
from bebop.config.simulate import MemoryConfig
from bebop.errors import UserError
from bebop.model.memory import MICRO_BATCH_SHARE, activation_bytes
from bebop.simulation import memory
from bebop.simulation.memory import Question, answer, changes
from bebop.simulation.roofline import GPUS, Model
from bebop.trainer.policy import PolicyTrainer
from tests.cases import slow_but

OF_NARROW = Model(
    layers=NARROW.layers, hidden=NARROW.hidden, heads=NARROW.heads, kv_heads=NARROW.kv_heads,
    head_dim=NARROW.head_dim, intermediate=NARROW.inner, vocabulary=NARROW.vocabulary, tied=True,
)  # fmt: skip


def asked(**settings: object) -> Question:
    return Question.of(MemoryConfig(**settings))  # type: ignore[arg-type]


def narrow(**settings: object) -> Question:
    """The question of the model that is counted."""
    return Question(MemoryConfig(**settings), GPUS["h100"], OF_NARROW, "")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("checkpointing", "sharded", "weights"),
    slow_but(
        [],
        [(True, True, 0.0), (False, False, 2.0), (False, True, 0.0), (True, False, 0.0)],
        several=True,
    ),
)
def test_a_token_leaves_in_a_layer_what_is_counted(
    checkpointing: bool, sharded: bool, weights: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16: 64.8 h and all weights once more before, 4 h with checkpointing, 2 h and no weights over ranks."""
    monkeypatch.setattr(update_memory, "DEPTHS", (1, 3))
    monkeypatch.setattr(update_memory, "LENGTHS", (64, 128))
    with one_rank_group():
        found = counted(checkpointing, sharded)
    predicted = narrow(gpus=1 + sharded).token_bytes(checkpointing) / NARROW.hidden
    assert found["bytes / (token, layer, h)"] == pytest.approx(predicted, rel=0.01)
    assert found["bytes of weights / parameter"] == pytest.approx(weights, abs=0.01)
    assert not checkpointing or predicted <= 4


@pytest.mark.slow  # eight updates: some 15 s
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_peak_of_an_update_is_as_predicted(
    dtype: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two micro-batches of 512 tokens in a process that has weights and moments already: within a tenth."""
    monkeypatch.setattr(memory, "CHUNK", 1 << 24)  # as on a CPU
    policy = policy_of(NARROW, torch.device("cpu"))
    policy.backbone.to(getattr(torch, dtype))
    trainer = PolicyTrainer(
        policy,
        JobConfig(
            model=ModelConfig(dtype=dtype, device="cpu"),
            rollout=RolloutConfig(staleness=0, max_length=4096, sampling=SamplingConfig(max_new_tokens=2048)),
            trainer=TrainerConfig(
                groups_per_step=2, group_size=4, max_tokens=512, lr=1e-6, checkpointing=checkpointing
            ),
        ),
    )
    trainer.update(batch_of(8, 128, NARROW.vocabulary, 0))
    batch = batch_of(8, 128, NARROW.vocabulary, 1)
    question = narrow(gpus=1, dtype=dtype, max_tokens=512, checkpointing=checkpointing)
    predicted = sum(question.parts().values()) - 12 * OF_NARROW.parameters
    assert peak_bytes(lambda: trainer.update(batch)) == pytest.approx(predicted, rel=0.1)


@pytest.mark.slow  # the first recording takes a second
def test_what_an_earlier_recording_made_lowers_no_peak() -> None:
    """Its release is no part of what the later call takes; the order is: release 8 MB, take 4 MB."""
    made: list[torch.Tensor] = []
    assert peak_bytes(lambda: made.append(torch.ones(1 << 21))) == 4 << 21
    assert peak_bytes(lambda: (made.clear(), torch.ones(1 << 20))) == 4 << 20


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_micro_batches_are_those_of_the_trainer(dtype: str, checkpointing: bool) -> None:
    """The prediction may import no PyTorch, so that it has the trainer's arithmetic once more."""
    question = narrow(dtype=dtype, checkpointing=checkpointing)
    config = SimpleNamespace(
        get_text_config=lambda: SimpleNamespace(
            num_hidden_layers=NARROW.layers, hidden_size=NARROW.hidden, intermediate_size=NARROW.inner
        )
    )
    each = activation_bytes(config, getattr(torch, dtype), checkpointing)
    assert question._tokens(checkpointing) == int(question.gpu.memory * MICRO_BATCH_SHARE / each)


def test_parts_by_hand() -> None:
    """Qwen3-8B on 8 cards: 8.19 B parameters, 193 M a layer, tables of 622 M; 8,192 tokens of 4,096 numbers."""
    parts = asked(max_tokens=8192).parts()
    count = asked().model.parameters
    assert count == pytest.approx(8.19e9, rel=0.001)
    assert parts["weights, gradient and Adam"] == 16 * count / 8
    assert parts["gathered weights"] == pytest.approx(2 * (2 * 622.3e6 + 2 * 192.9e6), rel=0.001)
    assert parts["layer inputs"] == 8192 * 36 * 2 * 4096
    assert parts["logits"] == pytest.approx(2**28 * 16 + 4 * 622.3e6, rel=0.001)
    whole = asked(gradient_sync="minibatch", kl=True, cotrain=True).parts()
    assert whole["whole gradient"] == 4 * count
    assert whole["reference model"] == 2 * count / 8
    assert asked(gpus=1).parts()["weights in bfloat16"] == pytest.approx(2 * (622.3e6 + 192.9e6), rel=0.001)
    assert asked(checkpointing=False, max_tokens=8192).parts()["activations"] == 36 * 8192 * (
        16 * 4096 + 8 * 12288 + 12 * 4096 + 10 * 1024
    )


def test_advice_is_the_first_change_that_fits() -> None:
    assert asked().fits and asked().checkpointing
    question = asked(checkpointing=False, max_tokens=8192)
    assert not question.fits and changes(question) == ["trainer.checkpointing=true"]
    assert changes(asked(gradient_sync="minibatch", engine_share=0.35)) == ["trainer.gradient_sync=micro_batch"]
    assert changes(asked(gpus=2, max_tokens=8192)) == ["trainer.max_tokens=1024", "gpus=4"]
    assert changes(asked(model="72b")) is None
    for one in (question, asked(gpus=2)):
        given = dict(word.removeprefix("trainer.").split("=") for word in changes(one) or [])
        values = {k: v if k == "gradient_sync" else json.loads(v) for k, v in given.items()}
        assert one.changed(**values).fits


def test_the_command_answers_for_people_and_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["memory", "gpus=8"]) == 0
    text = capsys.readouterr().out
    assert "It fits." in text and re.search(r"\d+\.\d GB  of 72\.0 GB that the trainer may use on each GPU", text)
    assert simulate.main(["memory", "gpus=8", "checkpointing=false", "max_tokens=8192", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["change"] == ["trainer.checkpointing=true"] and not found["fits"]
    assert found["total_gb"] == pytest.approx(sum(found["parts_gb"].values()) + found["reserved_gb"])
    assert simulate.main(["memory", "--help"]) == 0
    assert "checkpointing=null" in capsys.readouterr().out


def test_a_folder_s_config_gives_the_shape(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "vocab_size": 100, "tie_word_embeddings": True}))
    question = asked(model=str(tmp_path), gpus=1)
    assert (question.model.hidden, question.model.layers) == (64, 2)
    assert answer(question)["fits"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("gpus=9", r"gpus=9 is not possible: give a number from 1 to 8"),
        ("gpus=many", r"gpus='many' is not possible: a whole number is wanted here"),
        ("model=huge", r"model='huge' is not possible: give a folder with a config\.json, or a size"),
        ("model=30b-a3b", r"model='30b-a3b' is not possible: Qwen3-30B-A3B has experts"),
        ("gpu=h900", r"gpu='h900' is not possible: choose one of h100"),
        ("tokens=3", r"tokens=3 is not possible: no such setting"),
        ("8", r"'8' is not possible: give NAME=VALUE, --json or --help"),
        ("gpus=[", r"'gpus=\[' cannot be read: give NAME=VALUE"),
        ("engine_share=2", r"engine_share=2.0 is not possible: give a number from 0 to 1"),
    ],
)
def test_mistakes_are_one_line(words: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        simulate.main(["memory", words])
