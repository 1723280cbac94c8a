"""SGLang or vLLM as the sampler of an adaptation's completions: started on demand, ended before training."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bebop.adaptation.ranks import ALONE, Ranks
from bebop.config.adapt import SERVED, AdaptConfig, DataConfig
from bebop.config.fields import MAX_SEED
from bebop.errors import UserError, one_line
from bebop.model.checkpoint import find_device
from bebop.rollout.engine import EngineDied
from bebop.rollout.engine_process import EngineProcess

SPARE_MEMORY = 0.1  # share of the GPU's free memory that an engine beside the model leaves unused


class ServedEngines:
    """The SGLang or vLLM engine that ``data.engine`` names, in its own process, which starts at the first use."""

    def __init__(self, config: AdaptConfig, ranks: Ranks = ALONE) -> None:
        self.config, self.ranks = config, ranks
        self._engine: EngineProcess | None = None

    def engine(self, drawn: int = 0) -> EngineProcess:
        """Return the engine; start it at the first call.

        ``drawn``: completions sampled before. It enters the seed, so a restarted engine draws other completions.
        """
        if self._engine is None:
            config, rank = self.config, self.ranks.rank
            seed = random.Random(f"{config.seed}/{rank}/{drawn}").randrange(MAX_SEED)
            alone = self.ranks.world == 1 or find_device(config.model).type == "cpu"
            gpu = None if alone else torch.cuda.current_device()
            self._engine = EngineProcess(config.engine_job(seed, **self._memory()), gpu)
        return self._engine

    def close(self) -> None:
        """End the engine, so that its memory is free."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _memory(self) -> dict[str, float]:
        """Return the share of the whole GPU memory that vLLM may use, given that the model already occupies its part.

        The result is empty for SGLang, on a CPU, and where the configuration sets the share.
        """
        own, device = self.config.data.served, find_device(self.config.model)
        asked = own is None or own.memory_fraction is not None or "gpu_memory_utilization" in own.extra
        if self.config.data.engine != "vllm" or asked or device.type == "cpu":
            return {}
        free, total = torch.cuda.mem_get_info(device)
        return {"memory_fraction": round((1 - SPARE_MEMORY) * free / total, 3)}


@contextmanager
def engine_errors(data: DataConfig) -> Iterator[None]:
    """Let errors of SGLang or vLLM in this block name the settings of an adaptation and say how to continue."""
    if data.engine not in SERVED:
        yield
        return
    try:
        yield
    except UserError as error:
        text = str(error).replace(f"rollout.{data.engine}.", "data.engine_options.")
        raise UserError(text.replace("rollout=", "data.engine=").replace("rollout.", "data.")) from error
    except EngineDied as error:
        raise UserError(
            f"data.engine={data.engine!r} ended: {one_line(error)}; start it again, with resume=true to go on with the "
            "completions that there are"
        ) from error
