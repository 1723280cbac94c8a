"""EAGLE-3 drafters in their public layout: what is written is read again, and what cannot be right is refused."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bebop.config.job import DecodingConfig, JobConfig, ModelConfig
from bebop.errors import UserError
from bebop.export import main
from bebop.model.attention import CausalContext
from bebop.model.parts import find_part, load_part, part_settings
from bebop.rollout.served_weights import find_drafter, refuse_drafter, update
from bebop.systems.eagle3.layout import LAYER_IDS, Eagle3Folder, export, rope, taps, write
from bebop.systems.eagle3.network import FLOOR, Eagle3Network, taps_of
from tests.builders import tiny_eagle3
from tests.eagle3_models import DRAFTED, LAYERS, drafter, eagle3_job, folders, target
from tests.served_models import VOCAB


def changed(folder: Path, settings: dict[str, Any] | None = None, **weights: torch.Tensor | None) -> Path:
    """The folder with other settings and weights; None takes one away."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | (settings or {})))
    held = load_file(folder / "model.safetensors") | weights
    save_file({name: t for name, t in held.items() if t is not None}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    "make",
    [
        drafter,
        lambda: drafter(tuple(range(VOCAB))),
        lambda: drafter(own_embedding=True, norm_before_residual=True, attention_bias=True, taps=(0, 2, 6)),
    ],
    ids=["part", "whole", "unusual"],
)
def test_what_is_written_is_read_again(make: Callable[[], Eagle3Network], tmp_path: Path) -> None:
    own = make()
    write(own, LAYERS, tmp_path, torch.float32)
    found = load_part("eagle3", tmp_path, target())
    assert isinstance(found, Eagle3Network) and found.taps == own.taps
    assert found.norm_before_residual == own.norm_before_residual and found.config.rms_norm_eps == 1e-3
    assert found.config.rope_parameters == own.config.rope_parameters
    assert found.state_dict().keys() == own.state_dict().keys()
    assert all(torch.equal(t, own.state_dict()[name]) for name, t in found.state_dict().items())
    wide = json.loads((tmp_path / "config.json").read_text())
    assert (LAYER_IDS in wide) == (own.taps == (0, 2, 6)), "usual layers need no word"
    if LAYER_IDS in wide:
        assert wide[LAYER_IDS] == [1, 3, 7] and wide["eagle_config"][LAYER_IDS] == [0, 2, 6]
    assert ("d2t" in load_file(tmp_path / "model.safetensors")) == (own.draft_vocab_size < VOCAB)


def test_a_drafter_turns_whole_heads_whatever_its_target_does(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    own = drafter(rope=rope)
    write(own, LAYERS, tmp_path, torch.float32)
    assert "partial_rotary_factor" not in json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    size = own.config.hidden_size
    states = torch.randn(1, 3, size)
    assert own(states, states, torch.arange(3)[None], CausalContext()).shape == (1, 3, size)


def test_layers_are_those_that_engines_read() -> None:
    assert taps({}, 32) == [1, 15, 28] == taps_of(32)
    assert taps({LAYER_IDS: [2, 16, 29]}, 32) == [1, 15, 28]
    assert taps({"eagle_config": {LAYER_IDS: [3, 10, 30]}}, 32) == [3, 10, 30]
    assert all(0 <= tap < layers for layers in range(1, 12) for tap in taps_of(layers))


def test_names_and_settings_of_older_checkpoints(tmp_path: Path) -> None:
    """Weights as ``layers.0`` below ``model``, no ``t2d``, rope by its old names."""
    own = drafter()
    write(own, LAYERS, tmp_path, torch.float32)
    weights = {
        f"model.{n.replace('midlayer.', 'layers.0.')}": t for n, t in load_file(tmp_path / "model.safetensors").items()
    }
    del weights["model.t2d"]
    save_file(weights, tmp_path / "model.safetensors")
    settings = json.loads((tmp_path / "config.json").read_text())
    del settings["rope_parameters"], settings["head_dim"]
    (tmp_path / "config.json").write_text(json.dumps(settings | {"rope_theta": 3e4, "head_dim": 32}))
    found = load_part("eagle3", tmp_path, target())
    assert all(torch.equal(t, own.state_dict()[name]) for name, t in found.state_dict().items())
    assert rope({"rope_scaling": {"type": "linear", "factor": 2.0}})["rope_type"] == "linear"


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "another architecture": (
        lambda f: changed(f, {"architectures": ["LlamaForCausalLM"]}),
        "with a LlamaForCausalLMEagle3",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "with a LlamaForCausalLMEagle3"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "holds no weights"),
    "another width": (lambda f: changed(f, {"hidden_size": 64}), "hidden_size 64, this one has 32"),
    "another vocabulary": (lambda f: changed(f, {"vocab_size": 13}), "vocab_size 13, this one has 12"),
    "a norm before fc": (lambda f: changed(f, {"norm_before_fc": True}), "norm_before_fc=True"),
    "nested": (lambda f: changed(f, {"eagle_config": {"norm_before_fc": True}}), "norm_before_fc=True"),
    "two layers": (lambda f: changed(f, {"num_hidden_layers": 2}), "num_hidden_layers=2"),
    "a rope that changes": (lambda f: changed(f, {"rope_parameters": {"rope_type": "dynamic"}}), "rope_type='dynamic'"),
    "half of a head turned": (
        lambda f: changed(f, {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
        "partial_rotary_factor=0.5",
    ),
    "a token twice": (lambda f: changed(f, d2t=torch.tensor([0] * 8 + [-1])), "names a token twice"),
    "a token beyond": (lambda f: changed(f, d2t=torch.tensor([0] * 8 + [99])), "one beyond 0..11"),
    "a weight is missing": (lambda f: changed(f, **{"fc.weight": None}), "fc.weight"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused(name: str, tmp_path: Path) -> None:
    write(drafter(), LAYERS, tmp_path, torch.float32)
    spoil, message = REFUSED[name]
    spoil(tmp_path)
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        load_part("eagle3", tmp_path, target())


def test_a_folder_stands_for_a_part(tmp_path: Path) -> None:
    config = ModelConfig(parts={"eagle3": str(tmp_path)})
    assert find_part(config, "eagle3") == tmp_path
    with pytest.raises(UserError, match=r"give a \.safetensors file of bebop\.adapt, or a folder"):
        part_settings(config, "eagle3")
    with pytest.raises(UserError, match=r"that has its \.json"):
        find_part(ModelConfig(parts={"block": str(tmp_path)}), "block")


def test_what_servers_cannot_host_is_refused(tmp_path: Path) -> None:
    model, part = folders(tmp_path)
    job = eagle3_job(model, part)
    refuse_drafter(job, "eagle3", "vLLM", whole=False)
    with pytest.raises(UserError, match=r"SGLang for a drafter of 9 of 12 tokens: .*options\.draft_vocab=null"):
        refuse_drafter(job, "eagle3", "SGLang", whole=True)
    tiny = dataclasses.replace(job, model=ModelConfig(parts={"eagle3": str(part)}))
    with pytest.raises(UserError, match="with vLLM for a MiMoForCausalLM: it does not hand out the layers"):
        refuse_drafter(tiny, "eagle3", "vLLM", whole=False)


def test_a_part_is_served_from_a_folder_of_its_own(tmp_path: Path) -> None:
    """A folder is served as it is; the shipped part is written first. Updates hold the maps that folders hold."""
    model, part = folders(tmp_path)
    found = find_drafter(eagle3_job(model, part), "eagle3")
    assert found is not None and found.folder == part and found.constants.keys() == {"d2t", "t2d"}
    shipped = find_drafter(JobConfig(decoding=DecodingConfig(system="eagle3")), "eagle3")
    assert shipped is not None and shipped.weights["fc.weight"].dtype == torch.float32
    assert Eagle3Folder.settings(shipped.folder)["draft_vocab_size"] == len(shipped.constants["d2t"]) == 128
    own = {f"mtp.{name}": tensor for name, tensor in found.weights.items()}
    load = update({"backbone.norm": torch.ones(1), **own}, 3, "mimo", LAYERS, drafter=found)
    assert load.draft.keys() == load_file(part / "model.safetensors").keys()
    assert update({"backbone.norm": torch.ones(1)}, 3, "mimo", LAYERS, drafter=found).draft == {}
    assert find_drafter(eagle3_job(model, part), "") is None


def test_logits_are_of_the_draft_vocabulary_alone() -> None:
    network = tiny_eagle3(VOCAB, drafted=DRAFTED)
    hidden = torch.randn(3, 2, 32)
    wide, own = network.logits(hidden), network.lm_head(network.norm(hidden))
    assert torch.equal(wide[..., list(DRAFTED)], own)
    outside = [token for token in range(VOCAB) if token not in DRAFTED]
    assert bool((wide[..., outside] == FLOOR).all()) and not wide.softmax(-1)[..., outside].any()
    assert network.t2d.nonzero()[:, 0].tolist() == list(DRAFTED) == network.tokens.tolist()


def test_the_map_of_a_public_checkpoint() -> None:
    """``d2t`` is what has to be added to a draft id."""
    network = tiny_eagle3(VOCAB, drafted=(0, 2, 3, 7))
    assert network.d2t.tolist() == [0, 1, 1, 4]


def test_export_refuses_a_mask(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no MASK"):
        export(target(), drafter(), tmp_path / "out", mask_token=3)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow  # loads the built-in model
def test_the_shipped_drafter_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # an exported part may be written again
        assert main(["--part", "eagle3", "--out", str(tmp_path / "out")]) == 0
    assert "128 of 512 tokens, layers [1, 5, 8]" in capsys.readouterr().out
    assert Eagle3Folder.settings(tmp_path / "out")["draft_vocab_size"] == 128
