"""The command line of ``python -m bebop.bench``."""

import argparse
from pathlib import Path

from bebop.bench import agents, engines, loop
from bebop.command import Parser, whole
from bebop.parsing import LARGEST, MOST
from bebop.rollout.sglang.hosting import HOSTED
from bebop.systems import SYSTEMS


def parser(about: str) -> Parser:
    """What can be asked for; ``about`` all of it."""
    top = Parser(prog="python -m bebop.bench", description=about)
    ended = "of one that is ended before it is done, what was measured is kept as KIND-unfinished"
    top.add_argument(
        "--out", type=Path, help=f"folder for JSON, table and chart (default: runs/bench-<date and time>); {ended}"
    )
    kinds = top.add_subparsers(dest="kind", required=True)
    decoding = kinds.add_parser("rollout", help="tokens/s of the decoding systems and of Hugging Face generate")
    reading = kinds.add_parser("first_token", help="time to the first token, by length of the prompt")
    several = kinds.add_parser("engines", help="tokens/s of the embedded engine, vLLM and Hugging Face generate")
    looking = kinds.add_parser("trace", help="what keeping how each token came about costs the embedded engine")
    repeating = kinds.add_parser(
        "history", help="drafts from past answers: lookups, and decoding beside plain and bebop"
    )
    telling = kinds.add_parser("told", help="acceptance of drafts from past answers, in vLLM and the embedded engine")
    telling.add_argument("--prompts", type=whole(2), default=96, help="each is asked once (default: 96)")
    telling.add_argument("--answers", type=whole(1), default=8, help="past ones of each prompt (default: 8)")
    for embedded in (decoding, reading, looking, several, repeating, telling):
        embedded.add_argument("--model", default="tiny", help="tiny, smollm2 or a Hugging Face folder (default: tiny)")
        embedded.add_argument("--device", default="auto")
        embedded.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
        embedded.add_argument("--threads", type=whole(1, MOST), default=1, help="CPU threads (default: 1, as a worker)")
    for embedded in (decoding, reading):
        chosen = "default: all whose trained parts are there"
        embedded.add_argument("--systems", nargs="+", choices=list(SYSTEMS), help=chosen)
        embedded.add_argument("--parts", type=_part, nargs="+", default=[], metavar="NAME=PATH", help="trained parts")
    several.add_argument("--systems", nargs="+", choices=engines.CHOICE, default=engines.CHOICE, help="default: both")
    several.add_argument("--max-new-tokens", type=whole(1), default=160, help="of an answer (default: 160)")
    _add_tracing(looking)
    reading.add_argument("--lengths", type=whole(1), nargs="+", default=[64, 256, 1024], help="tokens of a prompt")
    reading.add_argument("--rounds", type=whole(2), default=20, help="turns of each arm (default: 20)")
    _add_history(repeating)
    for timed, batches, waves in ((decoding, [1, 8, 32], 3), (several, [1, 8, 32, 64], 6)):
        timed.add_argument("--batches", type=whole(1), nargs="+", default=batches)
        kind, words = (_drafts, ", or auto beside 1 to 5") if timed is decoding else (whole(1, 16), "")
        timed.add_argument("--draft-tokens", type=kind, default=3, help=f"K{words} (default: 3)")
        timed.add_argument("--rounds", type=whole(1), default=3, help="turns of each arm; the best counts (default: 3)")
        timed.add_argument("--waves", type=whole(1), default=waves, help=f"requests per slot (default: {waves})")
    jobs = kinds.add_parser("loop", help="asynchronous against synchronous jobs")
    jobs.add_argument("--steps", type=whole(loop.WARM_UP + 2), default=15, help="steps of each job (default: 15)")
    jobs.add_argument("--rounds", type=whole(1), default=1, help="turns of each arm; the best counts (default: 1)")
    jobs.add_argument("overrides", nargs="*", help="settings for every job, as for python -m bebop.run")
    _add_kernels(kinds.add_parser("kernels", help="draft losses and verification against what others offer"))
    _add_bound(kinds.add_parser("bound", help="plain decoding beside what memory and arithmetic of this machine allow"))
    _add_watching(kinds)
    _add_simulations(kinds)
    _add_serving(kinds)
    return top


def _add_history(kind: argparse.ArgumentParser) -> None:
    kind.add_argument("--batches", type=whole(1), nargs="+", default=[1, 8])
    kind.add_argument("--prompts", type=whole(1), default=32, help="each is asked once (default: 32)")
    kind.add_argument("--answers", type=whole(1), default=8, help="past ones of each prompt (default: 8)")
    kind.add_argument("--rounds", type=whole(1), default=3, help="turns of each arm; the best counts (default: 3)")


def _add_serving(kinds: "argparse._SubParsersAction[Parser]") -> None:
    serving = kinds.add_parser("sglang", help="tokens/s of SGLang, with and without the plugin that measures drafts")
    serving.add_argument(
        "--model", default="tiny", help="tiny or a Hugging Face folder with MTP weights (default: tiny)"
    )
    serving.add_argument("--device", default="auto")
    serving.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    serving.add_argument("--batches", type=whole(1), nargs="+", default=[1, 4, 16, 64])
    whole_checkpoint = [name for name in HOSTED if not SYSTEMS[name].needs]
    fixed = [name for name in whole_checkpoint if SYSTEMS[name].fixed_length]
    serving.add_argument("--systems", nargs="+", default=fixed, choices=whole_checkpoint)
    serving.add_argument("--draft-tokens", type=whole(1, 16), default=3, help="K (default: 3)")
    serving.add_argument("--rounds", type=whole(1), default=3, help="turns at each size; the best counts (default: 3)")
    serving.add_argument("--waves", type=whole(1), default=4, help="requests per place (default: 4)")
    serving.add_argument("--max-new-tokens", type=whole(1), default=256)
    serving.add_argument(
        "--every", type=whole(0), default=4, help="the plugin measures one step in so many (default: 4)"
    )
    serving.add_argument("--memory-fraction", type=float, help="of the GPU (default: SGLang decides)")
    serving.add_argument("--cache-tokens", type=whole(1, LARGEST), help="room for keys and values (default: what fits)")


def _add_watching(kinds: "argparse._SubParsersAction[Parser]") -> None:
    watching = kinds.add_parser("monitor", help="what watching acceptance costs")
    watching.add_argument("--rounds", type=whole(2), default=8, help="turns with and without statistics (default: 8)")
    watching.add_argument("overrides", nargs="*", help="settings of the job, as for python -m bebop.run")
    holding = kinds.add_parser("certify", help="what holding a job's answers against the trainer's distributions costs")
    holding.add_argument("--rounds", type=whole(2), default=20, help="turns with and without readings (default: 20)")
    holding.add_argument("overrides", nargs="*", help="settings of the job, as for python -m bebop.run")


def _add_simulations(kinds: "argparse._SubParsersAction[Parser]") -> None:
    playing = kinds.add_parser("agents", help="trajectories of several turns: parked caches, slow environments")
    playing.add_argument("--rounds", type=whole(2), default=agents.ROUNDS, help="of each arm (default: 5)")
    tempering = kinds.add_parser("draft_temperature", help="draft temperatures that are chosen against fixed ones")
    tempering.add_argument("--heads", nargs="+", default=[], help="of recipes.reproduce.objectives (default: all)")
    tempering.add_argument("--seeds", type=whole(0), nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    costing = kinds.add_parser("draft_temperature_cost", help="what choosing draft temperatures takes of a cycle")
    costing.add_argument("--models", nargs="+", default=["tiny"], help="tiny, smollm2, or folders (default: tiny)")
    costing.add_argument("--batches", type=whole(1), nargs="+", default=[1, 8, 32])
    costing.add_argument("--rounds", type=whole(1), default=3, help="turns; the fastest counts (default: 3)")
    costing.add_argument(
        "--cycles", type=whole(1), default=28, help="of a request, as the built-in model's (default: 28)"
    )
    costing.add_argument("--draft-tokens", type=whole(1, 16), default=3, help="K (default: 3)")
    kinds.add_parser("simulate", help="predictions of bebop.simulate against six real jobs")
    kinds.add_parser("balance", help="prompts to who has room against a fixed order, in virtual time")
    own = kinds.add_parser("simulate_cost", help="what the loop itself costs, by workers and trajectories")
    most = "the most trajectories of a job (default: 1000000)"
    own.add_argument("--most", type=whole(10_000, LARGEST), default=1_000_000, help=most)


def _add_kernels(kernel: argparse.ArgumentParser) -> None:
    kernel.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    ends = "after which shapes are left out (default: some minutes, by the device)"
    kernel.add_argument("--seconds", type=whole(1), help=ends)
    counts = "CPU threads (default: 1); several: the CPU kernels of every kind on each of these"
    kernel.add_argument("--threads", type=whole(1, MOST), nargs="+", default=[1], help=counts)
    beside = "the CPU kernels once more beside so many processes that keep a core busy (default: 0)"
    kernel.add_argument("--busy", type=whole(0, MOST), default=0, help=beside)


def _add_tracing(kind: argparse.ArgumentParser) -> None:
    kind.add_argument("--batches", type=whole(1), nargs="+", default=[8, 32])
    kind.add_argument("--rounds", type=whole(2), default=8, help="turns of each arm (default: 8)")
    kind.add_argument("--vocabulary", type=whole(0), default=151_936, help="of a random model; 0: none")


def _add_bound(kind: argparse.ArgumentParser) -> None:
    kind.add_argument(
        "--models", nargs="+", default=["tiny"], help="tiny, smollm2, Hugging Face folders (default: tiny)"
    )
    kind.add_argument("--batches", type=whole(1), nargs="+", default=[1, 8, 32])
    kind.add_argument("--rounds", type=whole(1), default=5, help="turns; the best counts (default: 5)")
    kind.add_argument("--cycles", type=whole(1), default=40, help="of a turn (default: 40)")


def _drafts(text: str) -> int | str:
    """A type for ``add_argument``: auto, or a number of drafts."""
    return text if text == "auto" else whole(1, 16)(text)


def _part(text: str) -> tuple[str, str]:
    """A type for ``add_argument``: the name and the file of a trained part."""
    name, separator, path = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not possible: give NAME=PATH")
    return name, path
