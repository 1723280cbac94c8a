"""The card says what was done and found, and names no folder of the machine."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from bebop.config_adapt import AdaptConfig
from bebop.parsing import from_dict
from bebop.report.adapted import write_card
from tests.adaptation.builders import config, results


def card(folder: Path, settings: AdaptConfig | None = None, fresh: bool = False) -> str:
    write_card(folder, settings or config(), results(fresh=fresh))
    return (folder / "README.md").read_text()


def test_the_card_has_what_a_reader_needs(tmp_path: Path) -> None:
    text = card(tmp_path)
    front = yaml.safe_load(text.split("---")[1])
    assert (
        front["library_name"] == "transformers" and "speculative-decoding" in front["tags"] and "mtp" in front["tags"]
    )
    measured = results()
    for expected in (
        "# tiny with an adapted MTP head", "| Objective | `e2e_tv` |", "| Depth | 5 recursive steps |",
        "2,000 sequences with 163,840 answer tokens", "temperature 1", "| Tasks | chain_sum, gcd |", "| Seed | 0 |",
        "AdamW, learning rate 0.001", "came with the checkpoint",
        "--speculative-algorithm NEXTN", "--speculative-num-steps 3", "--speculative-eagle-topk 1",
        "--speculative-num-draft-tokens 4", "--speculative-use-rejection-sampling", "0.5.14",
        "python -m bebop.run model=folder model.path=DIR",
        f"| {measured.before.decoded['bebop'].interval('accept_length')} |",
        f"| {measured.after.decoded['target_only'].interval('accepted', 2)} |",
        f"| {measured.change('bebop', 'accept_length')} |",
        "bebop-rl 0", "torch 2", "transformers ", "Python 3",
    ):  # fmt: skip
        assert expected in text, expected


def test_a_fresh_head_and_its_warm_up_are_named(tmp_path: Path) -> None:
    text = card(tmp_path, fresh=True)
    warm = AdaptConfig().train.steps // 3
    assert f"`e2e_tv`, after {warm} steps of `ce`" in text and "a fresh one, made from the last layer" in text


def test_the_configuration_in_it_can_be_run_again(tmp_path: Path) -> None:
    text = card(tmp_path, config(head={"objective": "kl", "betas": [0.9, 0.99]}, seed=7))
    values = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    again = from_dict(AdaptConfig, values)
    wanted = config(head={"objective": "kl", "betas": [0.9, 0.99]}, seed=7)
    assert dataclasses.replace(again, model=wanted.model) == wanted


def test_no_folder_of_the_machine_is_in_it(tmp_path: Path) -> None:
    model, text_file, out = tmp_path / "secret" / "my-model", tmp_path / "secret" / "text.jsonl", tmp_path / "out"
    model.mkdir(parents=True)
    text_file.write_text("{}\n")
    out.mkdir()
    settings = config(
        model={"path": str(model)}, dir=str(out), out=str(out / "model"),
        data={"source": "file", "path": str(text_file)},
        task={"source": "file", "path": str(text_file), "reward": f"{tmp_path}/secret/reward.py:score"},
    )  # fmt: skip
    text = card(out, settings)
    assert "my-model" in text and "text.jsonl" in text and "reward.py:score" in text
    assert "secret" not in text and str(tmp_path) not in text


@pytest.mark.parametrize(
    ("sampling", "words"), [({"top_p": 0.9}, "top_p 0.9"), ({"temperature": 0.6}, "temperature 0.6")]
)
def test_the_sampling_distribution_is_named(tmp_path: Path, sampling: dict[str, float], words: str) -> None:
    assert words in card(tmp_path, config(data={"sampling": sampling})).split("## Acceptance")[0]
