"""Will it pay: seconds, memory, acceptance and a rollout by hand; what is refused; the page and the JSON."""

import json
from typing import Any

import pytest

from bebop import simulate
from bebop.config.fields import from_dict
from bebop.config.simulate import PaysConfig
from bebop.errors import UserError
from bebop.simulation.pays import Fleet, answer, page
from bebop.simulation.roofline import GPUS, SHAPES, Model, from_config, shape
from tests.commands import error_of


def fleet(**given: Any) -> Fleet:
    return Fleet.of(from_dict(PaysConfig, {"gpu": "h100", "gpus": 1, "params": "8b", **given}))


# ---- seconds


def test_a_cycle_by_hand() -> None:
    """Llama-3.1-8B at one row and K = 2: weights and cache are read once by the pass, and a layer for each draft."""
    ours = fleet(tail=0, prompt=500, length=1000)
    weights = 32 * (4096 * 128 * 2 * (32 + 8) + 3 * 4096 * 14336) + 128256 * 4096
    token = 2 * 8 * 128 * 2  # bytes of keys and values in one layer
    assert ours.context == 1000
    plain = 5e-4 + (2 * weights + 32 * token * 1000) / (3.35e12 * 0.8)
    head = 4096 * 128 * 2 * (32 + 8) + 3 * 4096 * 14336 + 2 * 4096**2 + 128256 * 4096
    draft = GPUS["h100"].draft_launch + (2 * head + token * 1000) / (3.35e12 * 0.8)
    assert ours.cycle(1, 0) == pytest.approx(plain, rel=1e-12)
    assert ours.cycle(1, 2) == pytest.approx(plain + 2 * draft, rel=1e-12)
    assert ours.speedup(1, 2) == pytest.approx((1 + 0.7 + 0.49) * plain / (plain + 2 * draft), rel=1e-12)


def test_drafters_differ_in_what_they_read() -> None:
    mtp, eagle, ngram = (fleet(drafter=name) for name in ("mtp", "eagle", "ngram"))
    assert mtp.draft(1) - eagle.draft(1) == pytest.approx(2 * (128256 - 32000) * 4096 / (3.35e12 * 0.8), rel=1e-9)
    assert ngram.draft(64) == 0.0 and ngram.weight_bytes == 2 * SHAPES["8b"][1].parameters
    assert ngram.cycle(1, 3) == ngram.target(1, 4)


def test_a_tree_is_verified_as_a_whole_and_drafted_by_its_depth() -> None:
    tree = fleet(draft_tokens=3, verify=21)
    assert tree.cycle(64, 3) == pytest.approx(tree.target(64, 22) + 3 * tree.draft(64), rel=1e-12)
    assert tree.speedup(64, 3) < 1 < fleet(draft_tokens=3).speedup(64, 3)


def test_a_batch_reads_the_experts_that_its_tokens_choose() -> None:
    model = Model(
        layers=1, hidden=8, heads=1, kv_heads=1, head_dim=8, intermediate=8, vocabulary=8, experts=4, active_experts=1,
        expert_intermediate=8,
    )  # fmt: skip
    outside = 8 * 8 * 2 * 2 + 64  # attention and output
    assert model.read(1) == outside + 3 * 64 == model.multiplied
    assert model.read(2) == outside + 1.75 * 3 * 64  # the second token chooses the same one in a quarter of the cases
    assert model.read(1e9) == outside + 4 * 3 * 64


def test_experts_make_small_batches_dear_and_large_ones_cheap() -> None:
    moe = fleet(params="30b-a3b", gpus=2, tensor_parallel=2)
    assert moe.speedup(1, 3) < 1 < moe.speedup(64, 3)
    first, last = moe.pays_at(3) or (0, 0)
    assert 1 < first and moe.speedup(first - 1, 3) <= 1 < moe.speedup(first, 3) and last == moe.largest


def test_a_measured_step_is_what_all_passes_are_fitted_to() -> None:
    slow, fast = fleet(step_ms=20.0, step_rows=16), fleet(step_ms=3.0)
    assert slow.target(16, 1) == pytest.approx(0.02) and fast.target(1, 1) == pytest.approx(0.003)
    assert slow.target(16, 4) - slow.target(16, 1) == pytest.approx(fleet().target(16, 4) - fleet().target(16, 1))
    assert slow.speedup(16, 3) > fleet().speedup(16, 3) > fast.speedup(16, 3)


# ---- acceptance


def test_tokens_of_a_cycle() -> None:
    assert fleet(accept=[0.9, 0.5], draft_tokens=2).accept_length(2) == pytest.approx(1 + 0.9 + 0.45)
    assert fleet(accept=[0.9, 0.5], draft_tokens=2).accept_length(3) == pytest.approx(1 + 0.9 + 0.45 + 0.225)
    assert fleet(accept=[0.9, 0.5], draft_tokens=2).accept_length(1) == pytest.approx(1.9)
    assert fleet(accept_length=3.32).accept_length(3) == pytest.approx(3.32)
    assert fleet(accept_length=4.0).accept_length(3) == pytest.approx(4.0)


# ---- where drafts pay


def test_break_even_is_the_first_batch_that_loses() -> None:
    ours = fleet(gpu="h20", params="mimo-7b", accept=[0.6])
    even = ours.break_even(3)
    assert even is not None and ours.speedup(even, 3) <= 1 < ours.speedup(even - 1, 3)
    assert ours.pays_at(3) == (1, even - 1)
    assert fleet(accept=[0.0]).pays_at(3) is None and fleet(accept=[0.0]).break_even(3) == 1
    assert fleet(accept=[0.9], draft_tokens=1).break_even(1) is None


def test_the_best_k_is_none_where_nothing_is_accepted() -> None:
    assert fleet(accept=[0.0]).best(8) == 0 and fleet(accept=[1.0]).best(1) == 7


def test_the_best_k_may_be_the_one_that_was_asked_for() -> None:
    long = fleet(accept=[0.95], draft_tokens=16, drafter="ngram")
    assert long.speedup(1, long.best(1)) >= long.speedup(1, 16) and long.rollout(None) >= long.rollout(16)


# ---- memory


def test_the_largest_batch_fits_and_one_row_more_does_not() -> None:
    ours = fleet()
    assert ours.largest * ours.row_bytes <= ours.cache_bytes < (ours.largest + 1) * ours.row_bytes
    head = SHAPES["8b"][1].head
    assert ours.cache_bytes == pytest.approx(0.9 * 80e9 - 2 * (SHAPES["8b"][1].parameters + head))


def test_a_model_is_spread_over_as_few_gpus_as_leave_room() -> None:
    assert fleet(gpus=8).ranks == 1 and fleet(gpus=8, params="70b").ranks == 4
    assert fleet(gpus=8, params="70b", dtype="fp8").ranks == 2
    with pytest.raises(UserError, match=r"^--gpus=1 is not possible: Llama-3-70B takes 1\d\d GB .* h100 has 72 GB$"):
        fleet(params="70b")


# ---- a rollout


def test_without_a_tail_a_rollout_is_one_batch() -> None:
    ours = fleet(tail=0, completions=32, prompt=500, length=1000)
    assert ours.segments == [(32, 1000.0, 1000.0)]
    assert ours.rollout(3) == pytest.approx(ours.speedup(32, 3), rel=1e-12)


def test_with_a_tail_the_batch_shrinks_and_no_token_is_lost() -> None:
    ours = fleet(tail=1.0, completions=32)
    rows = [rows for rows, _, _ in ours.segments]
    assert rows == sorted(rows, reverse=True) and rows[0] == 32
    assert sum(rows * tokens for rows, tokens, _ in ours.segments) == pytest.approx(sum(ours.lengths(32)))
    assert sum(tokens for _, tokens, _ in ours.segments) == pytest.approx(max(ours.lengths(32)))
    by_hand = sum(n * ours.cycle(r, 0, c) for r, n, c in ours.segments) / sum(
        n * ours.cycle(r, 3, c) / ours.accept_length(3) for r, n, c in ours.segments
    )
    assert ours.rollout(3) == pytest.approx(by_hand, rel=1e-12)


def test_completions_wait_for_a_row() -> None:
    ours = fleet(completions=2000, tail=0.5)
    assert ours.largest < 2000 and ours.segments[0][0] == ours.largest
    tokens = sum(rows * tokens for rows, tokens, _ in ours.segments)
    assert tokens == pytest.approx(sum(ours.lengths(2000)))


def test_a_k_that_follows_the_batch_is_never_worse() -> None:
    ours = fleet(gpu="h20", params="mimo-7b", accept=[0.6], completions=128)
    assert ours.rollout(3) < 1 < ours.rollout(None)
    assert ours.rollout(None) >= max(ours.rollout(k) for k in range(8))


def test_a_step_gains_by_amdahl() -> None:
    assert fleet(rollout_share=0.7).step(2.0) == pytest.approx(1 / (0.3 + 0.35))
    assert fleet(rollout_share=0).step(9.0) == 1.0


# ---- shapes


@pytest.mark.parametrize(
    ("size", "billions", "active"),
    [("7b", 7.62, 7.62), ("qwen3-8b", 8.19, 8.19), ("32b", 32.8, 32.8), ("70b", 70.6, 70.6), ("30b-a3b", 30.5, 3.3),
     ("235b-a22b", 235, 22), ("671b-a37b", 671, 37)],
)  # fmt: skip
def test_shapes_have_the_parameters_that_are_published(size: str, billions: float, active: float) -> None:
    model = SHAPES[size][1]
    assert model.parameters / 1e9 == pytest.approx(billions, rel=5e-3)
    assert (model.multiplied + model.output * (not model.tied)) / 1e9 == pytest.approx(active, rel=0.03)


def test_another_size_has_other_layers() -> None:
    name, model = shape("13B")
    assert name == "Qwen3-14B with 35 layers" and model.parameters == pytest.approx(13e9, rel=0.02)
    for wrong in ("b", "0b", "7", "nanb", "-7b", "infb", "7b-a1b"):
        with pytest.raises(UserError, match=r"^--params="):
            shape(wrong)


QWEN3 = {
    "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 12288, "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK = {
    "hidden_size": 7168, "num_attention_heads": 128, "num_hidden_layers": 61, "num_key_value_heads": 128,
    "head_dim": 128, "intermediate_size": 18432, "vocab_size": 129280, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip


def test_a_config_gives_the_shape() -> None:
    assert from_config(QWEN3) == SHAPES["qwen3-8b"][1] == from_config({"text_config": QWEN3})
    assert from_config(DEEPSEEK) == SHAPES["671b-a37b"][1]
    hybrid = from_config({**QWEN3, "layer_types": ["linear_attention"] * 27 + ["full_attention"] * 9})
    assert hybrid.growing == 9 == from_config({**QWEN3, "full_attention_interval": 4}).growing
    assert from_config({**QWEN3, "model_type": "qwen3_next"}).growing == 9
    for name, value in (("hidden_size", None), ("vocab_size", "x"), ("num_hidden_layers", 0)):
        with pytest.raises(UserError, match=f"^config.json: {name}="):
            from_config({**QWEN3, name: value})


def test_other_sizes_leave_a_model_that_can_be() -> None:
    small = fleet(params="671b-a37b", layers=2).model
    assert small.parameters > 0 and small.dense_layers == 2
    assert fleet(params="9b", layers=4).model.growing <= 4
    with pytest.raises(UserError, match=r"^--kv-heads=8 is not possible: this model's attention"):
        fleet(params="671b-a37b", kv_heads=8)


# ---- the command

ASKED = ["--gpu", "h100", "--gpus", "8", "--params", "7b", "--accept", "0.7", "--draft-tokens", "3"]


def test_the_page_says_what_the_json_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(ASKED) == 0
    text = capsys.readouterr().out
    assert simulate.main([*ASKED, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(json.dumps(answer(fleet(gpus=8, params="7b", accept=[0.7], draft_tokens=3))))
    assert found["advice"] in " ".join(text.split()) and len(text.splitlines()) < 40
    assert max(map(len, text.splitlines())) <= 112
    for one in found["speedup"]:
        row = next(line for line in text.splitlines() if line.split()[:1] == [str(one["rows"])])
        assert row.split()[3] == f"{one['3']:.2f}"


@pytest.mark.parametrize(
    ("given", "begins"),
    [
        ({}, "Draft with K = 3"),
        ({"accept": [0.05]}, "Do not draft: at 1.05 tokens"),
        ({"gpu": "h20", "params": "mimo-7b", "accept": [0.6]}, "Do not draft with K = 3: this rollout becomes slower"),
        ({"gpu": "h20", "params": "mimo-7b", "accept": [0.6], "completions": 32}, "K = 3 is too close to call"),
    ],
)
def test_advice(given: dict[str, Any], begins: str) -> None:
    ours = fleet(**given)
    assert answer(ours)["advice"].startswith(begins)
    assert begins.split(":")[0] in page(answer(ours), ours.config)


def test_help_has_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        simulate.main(["--gpu", "h100", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(f"--{word}" in text for word in ("accept-length", "draft-tokens", "rollout-share", "kv-heads", "json"))


MISTAKES = [
    ("--gpu h7", "--gpu='h7' is not possible: choose one of h100"),
    ("--gpu", "expected one argument"),
    ("--gpu h100 --gpus 0", "--gpus=0"),
    ("--gpu h100 --params huge", "--params='huge'"),
    ("--gpu h100 --gpus 1 --params 671b-a37b", "--gpus=1 is not possible: DeepSeek-V3 takes"),
    ("--gpu h100 --accept 1.2", "--accept=[1.2]"),
    ("--gpu h100 --accept 0.9,0.8", "--accept=[0.9, 0.8]"),
    ("--gpu h100 --accept-length 5", "--accept-length=5.0 is not possible: K = 3 makes 4 at most"),
    ("--gpu h100 --draft-tokens three", "--draft-tokens='three' is not possible: a whole number"),
    ("--gpu h100 --tensor-parallel 3", "--tensor-parallel=3 is not possible: it must divide --gpus=8"),
    ("--gpu h100 --step-ms nan", "--step-ms='nan' is not possible: a number"),
    ("--gpu h100 --model nowhere", "--model='nowhere' is not possible"),
    ("--gpu h100 --fast", "unrecognized arguments: --fast"),
    ("--params 7b", "--params is no option"),
]


@pytest.mark.parametrize(("given", "word"), MISTAKES)
def test_mistakes_are_one_line(given: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert word in error_of(simulate.main, given.split(), capsys)
