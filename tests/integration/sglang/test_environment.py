"""Trajectories of several turns on SGLang: what it wrote and what it read is what transformers computes of the ids."""

from pathlib import Path

import numpy as np

from bebop.config.fields import from_dict
from bebop.config.job import JobConfig
from bebop.driver.protocols import Assignment
from bebop.rollout.agent_loop import AgentLoop
from bebop.rollout.agent_setup import make_episodes
from bebop.rollout.worker import RolloutWorker
from bebop.tasks.chat_delta import ChatDelta
from bebop.trajectory import Prompt
from tests.builders import letters
from tests.integration.sglang.builders import engine
from tests.rollout.test_agent_loop import ECHO, TEMPLATE, begin_anew
from tests.served_models import VOCAB, checkpoint, job, logprobs

EOS, COUNT, TURNS, ROOM = VOCAB - 1, 4, 3, 120
# SGLang takes no seeds. With this seed of the model a turn ends after 4 tokens on average and 9 at the 95th percentile
# (by transformers), so that none of a test's comes near the 40 at which it is cut off.
SOON = 12


def test_turns_are_those_of_the_ids(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", seed=SOON)
    tokenizer = letters(VOCAB)
    tokenizer.chat_template = TEMPLATE
    task = {
        "source": "environment",
        "name": ECHO,
        "args": {"turns": TURNS, "breaks": [*range(1, COUNT + 1)], "together": COUNT},
    }
    rollout = {"max_length": ROOM, "sampling": {"max_new_tokens": 40}}
    config = from_dict(JobConfig, {"task": task, "trainer": {"group_size": COUNT}, "rollout": rollout})
    begin_anew()
    with engine(job(folder)) as sglang:
        worker = RolloutWorker(sglang, lambda *_: 0.0, config, eos=(EOS,))
        delta = ChatDelta.checked(tokenizer, (EOS,))
        worker.agents = AgentLoop(worker.thread, config.task, ROOM, delta, make_episodes(config.task))
        worker.start()
        try:
            prompt = Prompt(index=0, task="echo", text="", token_ids=(), item={"index": 0})
            worker.submit([Assignment(prompt=prompt, members=tuple(range(COUNT)))])
            parts, seen = [], 0
            while sum(len(part.members) for part in parts) < COUNT:
                report = worker.collect(120, seen)
                seen = report.number
                assert report.parts, "nothing for two minutes"
                parts += report.parts
        finally:
            worker.stop()
    found = [(part.prompt.token_ids, t) for part in parts for t in part.trajectories if t is not None]
    assert len(found) == COUNT and all(t.restarts == 1 and len(t.turns) > 1 for _, t in found)
    for first, trajectory in found:
        whole = trajectory.completion
        assert trajectory.ended in ("done", "length", "tokens")
        wanted = logprobs(folder, first, whole.token_ids.tolist())[whole.written]
        np.testing.assert_allclose(whole.logprobs[whole.written], wanted, atol=1e-4)
        for before, turn in zip(trajectory.turns, trajectory.turns[1:], strict=False):
            assert before.completion.token_ids[-1] == EOS
            said = {"role": "tool", "content": f"you wrote {len(before.completion.text)}"}
            assert turn.observation.tolist() == delta.observation([said])
