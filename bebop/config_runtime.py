"""Define the settings of a run as such: ``monitor.*``, what is measured; ``runtime.*``, where and how it runs."""

from dataclasses import dataclass
from typing import Literal

from bebop.parsing import MAX_SEED, NOT_EMPTY, NOT_NEGATIVE, Limit, Settings, above, at_least, setting, within

TraceMode = Literal["sample", "all", "off"]  # of how many completions, see bebop/trajectory.py
SEED = Limit(lambda seed: 0 <= seed < MAX_SEED, f"give a number from 0 to {MAX_SEED - 1}")
PORT = within(0, 65535, "give a port from 0 to 65535")


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorConfig(Settings):
    """What is measured during a run and where it is sent."""

    SECTION = "monitor."
    decode_stats: bool = setting(True, "overlap and entropies of every verified position")
    drift: bool = setting(
        True, "why acceptance moved: drift/* metrics, drift.jsonl, controller.jsonl; of history, the head alone"
    )
    probe_every: int = setting(10, "steps between readings of the probe set, fewer when in doubt", at_least(0, "never"))
    probe_completions: int = setting(24, "completions that make up the probe set", at_least(2))
    actions: bool = setting(False, "carry out the proposals on system and draft length; takes monitor.drift")
    check_completions: int = setting(
        8, "completions a step scored again by the weights that wrote them", at_least(0, "none")
    )
    certify_every: int = setting(
        10, "steps between readings of the certificate: do completions follow the distributions?", at_least(0, "never")
    )
    trace: TraceMode = setting(
        "sample",
        "trajectories.sqlite: all completions, and how each token came about: of a prompt a step, of all; or off",
    )
    tensorboard: bool = setting(True, "write TensorBoard events")
    wandb: bool = setting(False, "write to Weights & Biases")
    ray_metrics: bool = setting(True, "give every number to Ray, which exports it for Prometheus")
    plots: bool = setting(True, "report.html at the end")

    def _validate(self) -> None:
        self.require(self.drift or not self.actions, "actions", "it takes monitor.drift=true")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig(Settings):
    """Ray and the run folder."""

    SECTION = "runtime."
    dir: str | None = setting(None, "the run folder; null: runs/<date and time>", NOT_EMPTY)
    resume: bool = setting(False, "go on from the newest checkpoint in runtime.dir")
    trust: bool = setting(False, "with resume: use code and servers that a run folder of somebody else names; --trust")
    seed: int = setting(
        0, "of the sampled completions", SEED, fixed="completions that start again would draw other random numbers"
    )
    address: str | None = setting(None, "a Ray cluster to join; null starts one for this run", NOT_EMPTY)
    temp_dir: str | None = setting(None, "Ray's own folder; null: a fresh temporary one", NOT_EMPTY)
    port: int = setting(0, "Ray's port; 0 picks a free one", PORT)
    dashboard: bool = setting(False, "start Ray's dashboard")
    dashboard_port: int = setting(8265, "where it is served", PORT)
    metrics_port: int = setting(0, "where Ray exports Prometheus metrics; 0 picks a free one", PORT)
    max_restarts: int = setting(3, "rollout workers replaced before the run gives up", NOT_NEGATIVE)
    hang_after: float = setting(
        30.0,
        "a part that is silent for this long hangs, if that is also 10 times its slowest",
        above(0, unit="seconds"),
    )
    progress: bool = setting(True, "show a progress bar")

    def _validate(self) -> None:
        self.require(not self.resume or bool(self.dir), "resume", "give the run's folder as runtime.dir")
