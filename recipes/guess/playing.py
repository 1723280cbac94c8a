"""Games played with a policy as in a job: the share of games won, and the accept length of each turn."""

import dataclasses
from collections.abc import Sequence

from tqdm import tqdm

from bebop.config.fields import from_dict
from bebop.config.job import DecodingConfig, ModelConfig, TaskConfig
from bebop.model.backbone import Policy
from bebop.rollout.agent_setup import make_agent_loop
from bebop.rollout.engine_thread import EngineThread
from bebop.rollout.torch_engine import TorchEngine
from bebop.tasks.source import EnvironmentSource
from bebop.trajectory import SamplingParams, Trajectory

SLOTS, LONGEST, TURN = 64, 224, 16  # requests side by side, tokens of a game, tokens of a turn
PLAYED_SEED = 1_000_003  # questions and draws of games that only measure


def task(seed: int) -> TaskConfig:
    """Return the task of the game, with questions of ``seed``."""
    return from_dict(TaskConfig, {"source": "environment", "name": "guess", "seed": seed})


def play(model: ModelConfig, policy: Policy, games: int, drafts: int, label: str) -> list[Trajectory]:
    """Play games sampled at temperature 1, with the head's drafts; return their trajectories."""
    asked = task(PLAYED_SEED)
    source = EnvironmentSource(asked)
    engine = TorchEngine(policy, DecodingConfig(system="bebop", draft_tokens=drafts), slots=SLOTS, max_length=LONGEST)
    thread = EngineThread(engine)
    agents = make_agent_loop(model, asked, LONGEST, thread, policy.eos_token_ids)
    params = SamplingParams(temperature=1.0, max_new_tokens=TURN, stop_token_ids=policy.eos_token_ids, seed=0)
    thread.start()
    agents.start()
    try:
        playing = [
            agents.play(source.prompt(i), dataclasses.replace(params, seed=PLAYED_SEED + i)) for i in range(games)
        ]
        played = [future.result() for future in tqdm(playing, desc=label, unit="game")]
    finally:
        agents.stop()
        thread.stop()
    return [one.trajectory for one in played if one.trajectory is not None]


def won(played: Sequence[Trajectory]) -> float:
    """Return the share of games won."""
    return sum(one.reward for one in played) / len(played)


def accept_lengths(played: Sequence[Trajectory]) -> list[float]:
    """Return the mean tokens per cycle in turn 0, 1, ..., over the games that have this turn."""
    lengths = []
    for turn in range(max(len(one.turns) for one in played)):
        stats = [one.turns[turn].completion.stats for one in played if len(one.turns) > turn]
        lengths.append(sum(s.emitted for s in stats) / sum(s.cycles for s in stats))
    return lengths
