"""Turns of a model with an environment as sequences to train a head on: what was read before a turn is its prompt."""

import dataclasses
from pathlib import Path

from tqdm import tqdm

from bebop.adaptation.corpus import HELD_OUT_SEED, keep, params, read_back, token_rows
from bebop.adaptation.ranks import ALONE, Ranks
from bebop.command import writing
from bebop.config import DecodingConfig, TaskConfig
from bebop.config_adapt import AdaptConfig
from bebop.errors import UserError
from bebop.model.backbone import Policy
from bebop.parsing import MAX_SEED
from bebop.rollout.agent_setup import make_agent_loop
from bebop.rollout.engine_thread import EngineThread
from bebop.rollout.torch_engine import TorchEngine
from bebop.tasks.source import EnvironmentSource
from bebop.trainer.chains import TokenRow
from bebop.trajectory import Completion, Prompt, Trajectory

Answer = tuple[Prompt, Completion]  # a turn, with all tokens before it as its prompt


def sampled_turns(
    config: AdaptConfig,
    policy: Policy,
    path: Path,
    decoding: DecodingConfig,
    label: str | None,
    ranks: Ranks = ALONE,
) -> tuple[list[Prompt], list[TokenRow], list[Prompt]]:
    """Prompts to train on, the model's turns after them, and held-out prompts; see ``corpus.sampled``."""
    other = dataclasses.replace(config.task, seed=config.task.seed + HELD_OUT_SEED, size=None)
    # Draws go by seed and tokens: with the seeds of the training games, a held-out one would begin as one of them.
    seed = (config.seed + HELD_OUT_SEED) % MAX_SEED
    held_out = [p for p, _ in play(config, other, config.evaluation.prompts, policy, decoding, None, ranks, seed)]
    if config.resume and path.is_file():
        rows = read_back(path)
        return [_prompt(i, row.prompt, row.task) for i, row in enumerate(rows)], rows, held_out
    answers = play(config, config.task, config.data.sequences, policy, decoding, label, ranks)
    training = [p for p, _ in answers]
    rows = token_rows(training, [completion for _, completion in answers])
    if ranks.rank == 0:
        with writing(path):
            keep(rows, path)
    return training, rows, held_out


def play(
    config: AdaptConfig,
    task: TaskConfig,
    wanted: int,
    policy: Policy,
    decoding: DecodingConfig,
    label: str | None,
    ranks: Ranks = ALONE,
    seed: int | None = None,
) -> list[Answer]:
    """The first ``wanted`` turns of trajectories 0, 1, ..., of which each rank plays its share.

    ``seed``: of the draws, other than that of the configuration; ``UserError`` if all are lost.
    """
    data, source = config.data, EnvironmentSource(task)
    drawn = config.seed if seed is None else seed
    thread = EngineThread(TorchEngine(policy, decoding, slots=data.slots, max_length=data.max_length))
    agents = make_agent_loop(config.model, task, data.max_length, thread, policy.eos_token_ids)
    answers: list[Answer] = []
    thread.start()
    agents.start()
    try:
        with tqdm(total=wanted, desc=label, unit="turn", disable=label is None or ranks.rank > 0) as bar:
            begun = 0
            while len(answers) < wanted:
                numbers = range(begun, begun + data.slots * ranks.world)
                begun = numbers.stop
                mine = [i for i in numbers if i % ranks.world == ranks.rank]
                playing = {
                    i: agents.play(source.prompt(i), params(policy, data.sampling, (drawn << 40) + i)) for i in mine
                }
                played = ranks.union({i: future.result() for i, future in playing.items()})
                there = [played[i] for i in numbers if played[i].trajectory is not None]
                if not there:
                    raise UserError(f"environment {task.name}: {len(numbers)} of {len(numbers)} trajectories were lost")
                new = [answer for one in there if one.trajectory for answer in answers_of(one.prompt, one.trajectory)]
                answers += new
                bar.update(min(len(new), wanted - bar.n))
    finally:
        agents.stop()
        thread.stop()
    return answers[:wanted]


def answers_of(prompt: Prompt, trajectory: Trajectory) -> list[Answer]:
    """Each turn of a trajectory as an answer to all before it."""
    before, answers = list(prompt.token_ids), list[Answer]()
    for turn in trajectory.turns:
        before += turn.observation.tolist()
        answers.append((dataclasses.replace(prompt, token_ids=tuple(before)), turn.completion))
        before += turn.completion.token_ids.tolist()
    return answers


def _prompt(index: int, token_ids: tuple[int, ...], task: str) -> Prompt:
    return Prompt(index=index, task=task, text="", token_ids=tuple(token_ids), item={})
