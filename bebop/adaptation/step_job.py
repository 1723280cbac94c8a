"""What trainings of a part by one optimizer have in common: steps that are counted, and a checkpoint to go on from."""

from collections.abc import Callable, Mapping
from contextlib import closing

from torch import nn
from tqdm import tqdm

from bebop.adaptation.checkpoint import store, write
from bebop.adaptation.part_job import PartJob
from bebop.command import stoppable, writing
from bebop.config import TrainerConfig
from bebop.sinks import JsonlSink
from bebop.trainer.optim import GuardedAdamW, load_optimizer_state, optimizer_state


class StepJob(PartJob):
    """A job that calls ``optimise`` as it is made, and ``learn`` as it runs."""

    def optimise(self, network: nn.Module, what: str, *, lr: float, steps: int, warm_up: int) -> None:
        """Make the optimizer of all parameters; the rate rises for ``warm_up`` of ``steps``, then falls as a cosine.

        ``what``: the network in messages, as "block drafter".
        """
        self.what, self.version = what, 0  # steps done
        self.rates = TrainerConfig(lr=lr, steps=steps, lr_schedule="cosine", lr_warmup_steps=warm_up)
        self.optimizer = GuardedAdamW(
            dict(network.named_parameters()),
            self.rates,
            setting="options.lr",
            loss=f"the loss of the {what}",
            causes="weights",
        )

    def prepare(self) -> None:
        """Go on from the newest checkpoint if ``resume`` is set; writes nothing."""
        state = self.resumed()
        if state is None:
            return
        load_optimizer_state(self.optimizer, state, self.what)
        self.version = state["version"]

    def learn(self, last: int, update: Callable[[], Mapping[str, float]]) -> None:
        """Every step that is left of ``last``: ``update`` takes one, counts it in ``version`` and says its metrics."""
        train = self.config.train
        sink = JsonlSink(self.folder / "metrics.jsonl", self.version or None)
        store(self.folder).set_aside(self.found)
        bar = tqdm(total=last, initial=self.version, desc="train", unit="step", disable=self.label("train") is None)
        with closing(sink), closing(bar), stoppable() as stopped:
            while self.version < last and not stopped():
                numbers = update()
                sink.write(self.version, numbers)
                bar.update()
                bar.set_postfix({name.split("/")[-1]: f"{value:.3g}" for name, value in numbers.items()}, refresh=False)
                due = train.save_every and self.version % train.save_every == 0
                if due or self.version == last or stopped():
                    with writing(self.folder / "checkpoints"):
                        write(self.folder, {"version": self.version, **optimizer_state(self.optimizer)}, train.keep)
