"""How near the engine's bfloat16 log-probs are to those of one forward pass: as near as rounding, which is measured."""

import numpy as np
import torch

from bebop.config import DecodingConfig
from bebop.model.attention import PackedContext
from bebop.model.backbone import Policy
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.trajectory import Completion
from tests.builders import bare_policy, requests

PROMPTS = [[1, 2, 3], [1, 2, 3], [4, 5, 6, 7, 8, 1], [9], [2, 2]]
SEEDS = range(8, 10)


def forward(policy: Policy, prompt: list[int], answer: Completion, temperature: float = 1.0) -> np.ndarray:
    """Log-probs [T] of an answer from one pass over the whole text."""
    ids = torch.tensor([*prompt, *answer.token_ids.tolist()])
    with torch.no_grad():
        hidden = policy.hidden(ids[None], torch.arange(len(ids))[None], PackedContext(torch.tensor([len(ids)])))
        table = (policy.logits(hidden)[0].float() / temperature).log_softmax(-1)
    return table[torch.arange(len(prompt) - 1, len(ids) - 1), ids[len(prompt) :]].numpy()


def exact(policy: Policy, seed: int) -> Policy:
    """The same weights in single precision."""
    made = bare_policy(seed=seed)
    made.backbone.load_state_dict({name: w.float() for name, w in policy.backbone.state_dict().items()})
    return made


def test_bfloat16_differs_by_its_rounding_and_nothing_else() -> None:
    """Against the same weights in fp32, the engine is no worse than one bfloat16 pass over the text.

    A limit on the largest difference would have to be wide; means over hundreds of tokens see a shift of a hundredth.
    """
    engine_error, forward_error, hot_error = [], [], []
    for seed in SEEDS:
        policy = bare_policy(seed=seed, dtype=torch.bfloat16)
        single = exact(policy, seed)
        engine = TorchEngine(policy, DecodingConfig(draft_tokens=3), slots=4, max_length=96)
        for prompt, answer in zip(PROMPTS, generate(engine, requests(PROMPTS, max_new_tokens=30)), strict=True):
            right = forward(single, prompt, answer)
            engine_error.append(answer.logprobs - right)
            forward_error.append(forward(policy, prompt, answer) - right)
            hot_error.append(forward(policy, prompt, answer, temperature=1.05) - right)
    mine, plain, hot = (np.concatenate(errors) for errors in (engine_error, forward_error, hot_error))
    assert 0.003 < np.abs(plain).mean() < 0.03  # what rounding is
    assert np.abs(mine).mean() < 1.15 * np.abs(plain).mean() < np.abs(hot).mean()
    assert np.abs(mine).max() < 2.5 * np.abs(plain).max()
    assert abs(mine.mean()) < 0.005  # it does not lean to one side
