"""SGLang's arguments from a job's configuration, and refusals of settings that it cannot host or would ignore.

``HOSTINGS`` says what SGLang has in place of our drafters. This module needs no sglang.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bebop.config.engines import Pause, SglangConfig
from bebop.config.job import DecodingConfig, JobConfig
from bebop.errors import UserError
from bebop.rollout.engines import fresh_seed
from bebop.rollout.served_weights import draft_folder
from bebop.rollout.sglang import dflash
from bebop.systems import SYSTEMS
from bebop.systems.base import System
from bebop.trajectory import SamplingParams

OLDEST = (0, 5, 14)  # the first with speculative_use_rejection_sampling
CPU = {  # arguments for a CPU without AMX; see recipes/sglang
    "device": "cpu",
    "attention_backend": "triton",
    "triton_attention_num_kv_splits": 1,
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "sleep_on_idle": True,  # else it takes a whole core while it waits
}

# ---- SGLang's algorithms for our drafters


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosting:
    """How SGLang drafts in place of one of our drafters, and which options it has."""

    algorithms: tuple[str | None, ...]  # what a server calls it
    arguments: Callable[[DecodingConfig, SglangConfig, Path], dict[str, Any]]  # to start it, with the target's folder
    wanted: Callable[[DecodingConfig], dict[str, tuple[Any, ...]]]  # settings a server must report: allowed values
    lengths: tuple[str, ...] = ("fixed",)  # modules of rollout/decoding/lengths that it can follow
    sampled: bool = True  # drafts can be draws from q
    cpu: bool = True  # Triton's interpreter runs it where there is no GPU
    seeded: bool = True  # with deterministic inference, completions have random numbers of their own
    measured: bool = True  # the plugin sees its drafts
    refuse: Callable[[DecodingConfig, SglangConfig, Path], None] | None = None  # checks a drafter that has a folder
    part: str = ""  # the trained part that it drafts with, whose folder ``arguments`` is given in place of the target's


def head_arguments(decoding: DecodingConfig, own: SglangConfig, folder: Path) -> dict[str, Any]:
    """Return arguments for drafts of the MTP head in the target's checkpoint."""
    arguments: dict[str, Any] = {
        "speculative_algorithm": "NEXTN",
        "speculative_draft_model_path": str(folder),
        "speculative_num_steps": decoding.limit,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": decoding.limit + 1,
        "speculative_use_rejection_sampling": SYSTEMS[decoding.system].sampled,
    }
    if own.block_verification:
        arguments["speculative_use_block_verification"] = True
    if SYSTEMS[decoding.system].length_name == "entropy":
        arguments["speculative_adaptive"] = True
        if own.adaptive_steps is not None:
            arguments["speculative_adaptive_config"] = own.adaptive_steps
    return arguments


def eagle3_arguments(decoding: DecodingConfig, own: SglangConfig, folder: Path) -> dict[str, Any]:
    """Return arguments for drafts of the EAGLE-3 drafter in ``folder``."""
    return {**head_arguments(decoding, own, folder), "speculative_algorithm": "EAGLE3"}


def head_wanted(decoding: DecodingConfig) -> dict[str, tuple[Any, ...]]:
    """Return the settings that a running server must report to draft with the MTP head: names with allowed values."""
    system = SYSTEMS[decoding.system]
    steps = {"speculative_num_steps": (decoding.limit,)} if system.fixed_length else {}
    return {
        "speculative_eagle_topk": (1,),
        "speculative_use_rejection_sampling": (system.sampled,),
        "speculative_accept_threshold_single": (1.0,),
        "speculative_accept_threshold_acc": (1.0,),
        **steps,
    }


def model_arguments(decoding: DecodingConfig, own: SglangConfig, folder: Path) -> dict[str, Any]:
    """Return arguments for greedy drafts of a separate model, whose folder ``server_arguments`` names."""
    return {
        "speculative_algorithm": "STANDALONE",
        "speculative_num_steps": decoding.limit,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": decoding.limit + 1,
        "speculative_use_rejection_sampling": False,
        **dflash.EXACT,
    }


def model_wanted(decoding: DecodingConfig) -> dict[str, tuple[Any, ...]]:
    """Return the settings that a running server must report to draft with a separate model."""
    return head_wanted(decoding) | {"speculative_use_rejection_sampling": (False,)}


# SGLang's algorithm for these would be NGRAM, with texts from /add_external_corpus.
PADDED = (
    "its NGRAM drafts are not verified exactly: they are filled up with token 0, and each of those counts as another "
    "draft of it (docs/upstream.md); "
)
LACKING = {"ngram": PADDED, "history": PADDED}  # by drafter
HOSTINGS = {  # by drafter
    "none": Hosting(algorithms=(None,), arguments=lambda decoding, own, folder: {}, wanted=lambda decoding: {}),
    "mtp": Hosting(
        algorithms=("EAGLE", "NEXTN"), arguments=head_arguments, wanted=head_wanted, lengths=("fixed", "entropy")
    ),
    "draft_model": Hosting(algorithms=("STANDALONE",), arguments=model_arguments, wanted=model_wanted, sampled=False),
    "eagle3": Hosting(algorithms=("EAGLE3",), arguments=eagle3_arguments, wanted=head_wanted, part="eagle3"),
    "block": Hosting(
        algorithms=("DFLASH",),
        arguments=dflash.arguments,
        wanted=dflash.wanted,
        sampled=False,
        cpu=False,
        seeded=False,
        measured=False,
        refuse=dflash.refuse_drafter,
    ),
}


def missing(system: System) -> str | None:
    """Return what SGLang lacks for a system; None if it hosts it, and "" where there is no more to say."""
    if system.serve_error:
        return f"{system.serve_error}; "
    hosting = HOSTINGS.get(system.drafter_name)
    if system.drafter_name in LACKING:
        return LACKING[system.drafter_name]
    if hosting is None or system.rule_name != "rejection" or system.custom_cycle:
        return ""
    if system.length_name not in hosting.lengths:
        return f"{hosting.algorithms[0]} has one number of drafts for all requests of a server; "
    if system.sampled and not hosting.sampled and system.other is not None:
        return f"{hosting.algorithms[0]} drafts greedily; "
    return None


HOSTED = [name for name, system in SYSTEMS.items() if missing(system) is None]

# ---- SGLang's arguments


def server_arguments(
    config: JobConfig, own: SglangConfig, folder: Path, device: str, drafter: Path | None = None
) -> dict[str, Any]:
    """Return the arguments of ``sglang.Engine`` for a job; ``device`` is cpu or cuda, ``drafter`` a folder."""
    rollout = config.rollout
    arguments: dict[str, Any] = {
        "model_path": str(folder),
        "dtype": config.model.dtype,
        "context_length": rollout.max_length + 1 + config.decoding.limit,
        "max_running_requests": rollout.slots,
        "random_seed": config.runtime.seed if own.deterministic else fresh_seed(),
        "tp_size": own.tensor_parallel,
        "dp_size": own.data_parallel,
        "weight_version": "0",
        "skip_server_warmup": True,
        # Tokens go in and out; only stop texts have to be read as text.
        "skip_tokenizer_init": not rollout.sampling.stop,
        "log_level": "error",
    }
    optional = {
        "mem_fraction_static": own.memory_fraction,
        "max_total_tokens": own.cache_tokens,
        "attention_backend": own.attention_backend,
    }
    arguments |= {name: value for name, value in optional.items() if value is not None}
    if own.deterministic:
        arguments["enable_deterministic_inference"] = True
    if config.trainer.routing_replay:
        arguments["enable_return_routed_experts"] = True
    if own.colocated:
        arguments |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    if pause_mode(own, rollout.on_update) == "in_place":
        # With overlap a batch may be in flight when SGLang pauses: its tokens would get the version of the weights that
        # come, and weights would change under it.
        arguments["disable_overlap_schedule"] = True
    if device == "cpu":
        arguments = CPU | arguments
    arguments |= speculation(config.decoding, own, folder, device, drafter)
    if SYSTEMS[config.decoding.system].separate:
        arguments["speculative_draft_model_path"] = str(draft_folder(config, "SGLang"))
    return arguments | own.extra


def speculation(
    decoding: DecodingConfig, own: SglangConfig, folder: Path, device: str, drafter: Path | None = None
) -> dict[str, Any]:
    """Return the arguments for drafting and verification; all are given, since SGLang's defaults vary."""
    refuse_system(decoding, own, device)
    system = SYSTEMS[decoding.system]
    if system.drafts:
        refuse_vocabulary(folder)
    return HOSTINGS[system.drafter_name].arguments(decoding, own, drafter or folder)


def refuse_system(decoding: DecodingConfig, own: SglangConfig, device: str) -> None:
    """Raise ``UserError`` for a decoding configuration that SGLang cannot run."""
    name, temperature = decoding.system, decoding.draft_temperature
    system = SYSTEMS[name]
    if (lack := missing(system)) is not None:
        raise UserError(
            f"decoding.system={name!r} is not possible with SGLang: {lack}choose one of {', '.join(HOSTED)}"
        )
    hosting = HOSTINGS[system.drafter_name]
    if not hosting.cpu and device != "cuda" and not own.urls:
        raise UserError(
            f"decoding.system={name!r} is not possible with SGLang on a {device}: its {hosting.algorithms[0]} needs "
            "CUDA; rollout=torch has it anywhere"
        )
    greedy = system.sampled and not hosting.sampled
    if greedy and temperature != 0:
        raise UserError(
            f"decoding.draft_temperature={temperature or 'null'} is not possible with decoding.system={name!r} on "
            f"SGLang: its {hosting.algorithms[0]} drafts what is likeliest; give 0"
        )
    if not greedy and temperature is not None and temperature != system.draft_temperature:
        raise UserError(
            f"decoding.draft_temperature={temperature} is not possible with SGLang: it drafts at the target's "
            "temperature; give null, or decoding.system=target_only for greedy drafts"
        )
    if decoding.draft_tokens == "auto" and system.drafts:
        raise UserError(
            "decoding.draft_tokens=auto is not possible with SGLang: it drafts as it was started; give a number, or "
            "rollout.sglang.adaptive_steps"
        )
    sampled = system.drafts and system.sampled and not greedy
    if own.block_verification and (device != "cuda" or not sampled):
        raise UserError(
            "rollout.sglang.block_verification=true is not possible: "
            + ("it needs a GPU" if sampled else "it verifies sampled drafts, so decoding.system=bebop")
        )
    if own.colocated and device != "cuda":
        raise UserError("rollout.sglang.colocated=true is not possible: memory changes hands on a GPU only")
    if own.deterministic and not hosting.seeded:
        raise UserError(
            f"rollout.sglang.deterministic=true is not possible with decoding.system={name}: SGLang's "
            f"{hosting.algorithms[0]} draws from one generator for all completions"
        )
    if own.deterministic and sampled and device != "cuda":
        raise UserError("rollout.sglang.deterministic=true is not possible: SGLang's seeded drafts need a GPU")


def refuse_loop(config: JobConfig) -> None:
    """Raise ``UserError`` for settings of the RL loop that do not work with SGLang."""
    own, rollout = config.rollout.sglang, config.rollout
    if config.monitor.actions:
        raise UserError("monitor.actions=true is not possible with SGLang: it decodes as it was started")
    if config.trainer.routing_replay and SYSTEMS[config.decoding.system].drafts:
        raise UserError(
            "trainer.routing_replay=True is not possible with SGLang's drafts: whether its record leaves rejected ones "
            "out is not tested; choose decoding=autoregressive, or rollout=torch"
        )
    if own.urls and rollout.workers > 1:
        raise UserError(f"rollout.workers={rollout.workers} is not possible with rollout.sglang.urls: one serves all")
    if own.colocated and (rollout.staleness or own.urls):
        raise UserError(
            "rollout.sglang.colocated=true is not possible here: memory changes hands between rollout and update, so "
            "rollout.staleness=0, and the engine is the worker's own"
        )


def refuse_length(config: JobConfig, settings: Any) -> None:
    """Raise ``UserError`` unless a model (its Hugging Face configuration) has positions for SGLang's lookahead.

    SGLang cuts completions one token before its context ends, and puts drafts behind them.
    """
    length, ahead = config.rollout.max_length, 1 + config.decoding.limit
    positions = getattr(settings.get_text_config(), "max_position_embeddings", None)
    if positions is not None and length + ahead > positions and not config.rollout.sglang.urls:
        raise UserError(
            f"rollout.max_length={length} is not possible with SGLang: the model has {positions} positions, of which "
            f"it takes {ahead} for itself; give {positions - ahead} or less"
        )


def refuse_vocabulary(folder: Path) -> None:
    """Raise ``UserError`` if a checkpoint's heads draft from fewer tokens than the model has."""
    settings = json.loads((folder / "config.json").read_text())
    settings = settings.get("text_config") or settings
    own, drafts = settings.get("vocab_size"), settings.get("draft_vocab_size")
    if drafts is not None and drafts != own:
        raise UserError(
            f"{folder}: its heads draft from {drafts} of {own} tokens, which rejection sampling cannot verify; "
            "use heads with the full vocabulary"
        )


def refuse_sampling(params: SamplingParams, speculative: bool, rescored: bool) -> None:
    """Raise ``UserError`` for a distribution that SGLang does not sample from, or gives no log-probs of."""
    if params.repetition_penalty != 1.0:
        raise UserError(
            f"repetition_penalty={params.repetition_penalty} is not possible with SGLang: its penalty is another "
            "distribution than the trainer's, and a relaxed one under verification; give 1"
        )
    if params.min_p > 0 and speculative:
        raise UserError(f"min_p={params.min_p} is not possible with SGLang's drafts: verification ignores it; give 0")
    if params.truncated and not rescored:
        raise UserError(
            f"top_k={params.top_k}, top_p={params.top_p}, min_p={params.min_p}: SGLang's log-probs leave truncation "
            "out; set algorithm.rescore=true, or sample without truncation"
        )


def refuse_version(version: str) -> None:
    """Raise ``UserError`` for an SGLang version without rejection sampling of sampled drafts."""
    numbers = tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.split(".")[:3])
    if numbers < OLDEST:
        raise UserError(f"sglang {version} verifies no sampled drafts: install {'.'.join(map(str, OLDEST))} or newer")


def refuse_server(info: Mapping[str, Any], decoding: DecodingConfig, pause: Pause, url: str) -> None:
    """Raise ``UserError`` if a running server drafts, verifies or pauses in another way than the configuration says."""
    refuse_version(str(info.get("version", "0")))
    hosting = HOSTINGS[SYSTEMS[decoding.system].drafter_name]
    wanted = {"speculative_algorithm": hosting.algorithms, **hosting.wanted(decoding)}
    for name, values in wanted.items():
        if name in info and info[name] not in values:
            allowed = " or ".join(map(repr, values))
            raise UserError(f"{url} runs with {name}={info[name]!r}; decoding.system={decoding.system} needs {allowed}")
    if pause == "in_place" and info.get("disable_overlap_schedule") is False:
        raise UserError(
            f"{url} runs with disable_overlap_schedule=False, so tokens may get the version of later weights: start it "
            "with --disable-overlap-schedule, or set rollout.sglang.pause=retract"
        )


def pause_mode(own: SglangConfig, on_update: str) -> Pause:
    """Return what SGLang does with running completions while weights change."""
    return own.pause or ("in_place" if on_update == "keep" else "retract")


def sampling_arguments(params: SamplingParams, fresh: int, seeded: bool) -> dict[str, Any]:
    """Return SGLang's sampling parameters for ``fresh`` more tokens."""
    arguments: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "min_p": params.min_p,
        "max_new_tokens": fresh,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": not params.stop_token_ids,
        "skip_special_tokens": False,
    }
    if params.stop:
        arguments["stop"] = list(params.stop)
    if seeded:
        arguments["sampling_seed"] = params.seed % (1 << 31)
    return arguments
