"""``bebop demo``: training, one completion token by token, a certificate, and another one with a planted fault.

It uses the built-in model and computes everything that it shows. The exit code is 0 only if the first certificate
passes and the second one fails.

The certificates call an exact engine faulty with a probability of at most ``ALPHA``, by Ville's inequality. All of 24
seeds passed, with bounds of 0.8 to 1.6 % where the limit is 5 %. With the fault all failed after one cohort of at most
1,600 tokens, with ln E above 1,600 where 9.2 suffices.
"""

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO
from unittest.mock import patch

from bebop.command import Parser, check_writable, run_main, shown_path, whole
from bebop.config.certify import CertifyConfig
from bebop.config.compose import certify_config
from bebop.config.fields import MAX_SEED
from bebop.errors import UserError

if TYPE_CHECKING:  # torch takes seconds to import; --help and errors should not wait
    from torch import Tensor

    from bebop.certify.certificate import Certificate
    from bebop.rollout.decoding.base import Accepted, Draft, Rows, TargetOutput
    from bebop.rollout.decoding.draft_verify import Observer

ABOUT = (
    "Train the built-in model for three steps, show one completion token by token, certify the engine, then plant a "
    "fault and certify it again. Everything is computed here and now, in about a minute on two cores."
)
ALPHA = 1e-4
TOKENS = 3000  # minimum of a certificate: the cohort that reaches it is completed
# Steps are a quarter of the default size, so that three of them fit into the minute.
TRAINING = (
    "trainer.steps=3",
    "trainer.groups_per_step=8",
    "trainer.group_size=4",
    "trainer.save_every=3",
    "rollout.slots=32",
)
# One thread: two gain nothing on matrices of this size, and spin while other programs hold a core.
SHOWN = ("task=chain_sum", "threads=1")  # the questions of the job
CERTIFICATE = (f"tokens={TOKENS}", f"alpha={ALPHA}", "stress=0", "limit_tv=0.05", "threads=1",
               "stop_when_bounded=false")  # fmt: skip
MAX_SHOWN = 120  # tokens of the completion

# ---- the planted fault


@contextlib.contextmanager
def planted_fault() -> Iterator[None]:
    """Verify with the wrong bonus token within the block: it is drawn from row K of the target, not from row K + 1.

    That is how Algorithms 3 and 4 of the Bebop paper print it. Only cycles whose drafts were all accepted have a bonus
    token, so most tokens of a completion stay right.
    """
    import torch

    from bebop.rollout.decoding.rules import Rejection

    right = Rejection.accept

    def wrong(rule: Rejection, rows: "Rows", draft: "Draft", out: "TargetOutput", uniforms: "Tensor") -> "Accepted":
        probs = torch.cat([out.probs[:, :-1], out.probs[:, -2:-1]], 1)  # drafts are tested against the first K rows
        return right(rule, rows, draft, dataclasses.replace(out, probs=probs), uniforms)

    with patch.object(Rejection, "accept", wrong):
        yield


# ---- one completion during decoding


@dataclasses.dataclass(frozen=True, slots=True)
class Style:
    """Display style of a kind of token: an ANSI code with colours, marks around the token without."""

    code: str
    marks: tuple[str, str]


STYLES = {
    "accepted": Style("32", ("", "")),
    "rejected": Style("9;31", ("[-", "-]")),
    "recovered": Style("1;33", ("{+", "+}")),
    "bonus": Style("1;36", ("{*", "*}")),
}
LEGEND = {
    "accepted": "a draft that stands",
    "rejected": "a draft that the model refused; it is no part of the text",
    "recovered": "the model's token in its place",
    "bonus": "the model's token after three drafts that stand",
}


def colored(stream: TextIO) -> bool:
    """Return whether to use colours: the stream is a terminal with colours, and NO_COLOR is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def styled(kind: str, text: str, color: bool) -> str:
    """Return a token's text in the style of its kind."""
    style = STYLES[kind]
    if color:
        return f"\x1b[{style.code}m{text}\x1b[0m"
    return text.join(style.marks)


def cycle_tokens(draft: list[int], accepted: int, following: int, emitted: int) -> list[tuple[str, int]]:
    """Return the tokens of a cycle with their kinds, in the order of the text.

    Args:
        draft: the K drafted tokens.
        accepted: how many of them are accepted, 0..K.
        following: the token after them.
        emitted: how many tokens of the cycle count, at least 1: a stop token or the limit cuts the rest.
    """
    shown = [("accepted", token) for token in draft[: min(accepted, emitted)]]
    if accepted < emitted:
        rejected = draft[accepted : accepted + 1]
        shown += [("rejected", token) for token in rejected]
        shown.append(("recovered" if rejected else "bonus", following))
    return shown


def show_completion(config: CertifyConfig, out: TextIO) -> float:
    """Decode one completion and print each cycle as it ends; return the accept length, tokens per cycle."""
    from bebop.certify.embedded import make
    from bebop.certify.run import sampling_params
    from bebop.model.checkpoint import load_tokenizer
    from bebop.rollout.engine import Request
    from bebop.runtime.preflight import prompts

    tokenizer, color, counts = load_tokenizer(config.model), colored(out), list[int]()

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def watch(rows: "Rows", draft: "Draft", target: "TargetOutput", made: "Accepted", emitted: "Tensor") -> None:
        count, accepted = int(emitted[0]), int(made.lengths[0])
        tokens = made.tokens[0].tolist()
        for kind, token in cycle_tokens(draft.tokens[0].tolist(), accepted, tokens[accepted], count):
            out.write(styled(kind, decode([token]), color))
            out.flush()
        counts.append(count)

    engine = make(dataclasses.replace(config, white_box=False)).engine
    observers: list[Observer] = engine.decoder.observers  # type: ignore[attr-defined]  # this system has a DraftVerify
    observers.append(watch)
    params = dataclasses.replace(sampling_params(config), max_new_tokens=MAX_SHOWN, seed=config.seed)
    source = prompts(config.model, config.task, config.max_length - MAX_SHOWN)
    prompt = source.prompt(config.first_prompt)
    out.write(f"{decode(list(prompt.token_ids)).strip()}\n")
    engine.add(Request(id=0, token_ids=tuple(prompt.token_ids), params=params))
    while engine.unfinished:
        engine.step()
    out.write("\n")
    return sum(counts) / len(counts)


# ---- the parts


def train(folder: Path) -> int:
    """Run the real job for a few steps in ``folder``; return its exit code."""
    from bebop import run

    return run.main([*TRAINING, f"runtime.dir={folder}"])


def certify(config: CertifyConfig, folder: Path) -> "Certificate":
    """Certify the embedded engine, write the certificate with its page to ``folder``, and return it.

    Raises:
        KeyboardInterrupt: It was interrupted, which the engine itself only records.
    """
    from bebop.certify.report import write_page
    from bebop.certify.run import make_run

    with contextlib.ExitStack() as stack:
        run = make_run(config, stack)
        certificate = run.run()
    if run.interrupted:
        raise KeyboardInterrupt
    folder.mkdir(parents=True, exist_ok=True)
    certificate.write(folder)
    write_page(folder, certificate)
    return certificate


def as_expected(sound: str, faulty: str) -> int:
    """Return the exit code: 0 if the sound engine passed and the faulty one failed, else 1."""
    return 0 if (sound, faulty) == ("pass", "fail") else 1


def main(arguments: list[str]) -> int:
    """Run the four parts of the demo, print the next steps, and return the exit code."""
    parser = Parser(prog="bebop demo", description=ABOUT)
    parser.add_argument("--dir", type=Path, help="the run folder (default: runs/demo-<date and time>)")
    parser.add_argument(
        "--seed", type=whole(0, MAX_SEED), default=0, help="of the completion and the certificates (default: 0)"
    )
    options = parser.parse_args(arguments)
    folder = (options.dir or Path(f"runs/demo-{time.strftime('%Y%m%d-%H%M%S')}")).resolve()
    check_writable("--dir", folder)
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"--dir={str(folder)!r} is not possible: it holds something already; choose another folder")
    return demo(folder, options.seed, sys.stdout)


def demo(folder: Path, seed: int, out: TextIO) -> int:
    """Run the four parts of the demo in ``folder``; return the exit code."""
    config, began = certify_config([*CERTIFICATE, f"seed={seed}"]), time.monotonic()

    def head(number: int, text: str) -> None:
        out.write(f"\n{number}/4  {text}\n")
        out.flush()

    head(1, "Training: three steps of GRPO, speculative rollouts on Ray.")
    if code := train(folder):
        return code
    head(2, "One completion, token by token: the MTP head drafts three tokens a cycle, the model verifies them.")
    for kind, meaning in LEGEND.items():
        out.write(f"  {styled(kind, kind, colored(out))}: {meaning}\n")
    out.write("\n")
    length = show_completion(certify_config([*SHOWN, f"seed={seed}"]), out)
    out.write(f"accept length: {length:.2f} tokens a cycle; without drafts it is 1\n")
    head(3, f"Certificate: are {TOKENS:,} tokens of this engine drawn from the distribution of the model alone?")
    sound = certify(config, folder / "certificate")
    out.write(f"{sound.sentence}\n")
    head(4, "Planted fault: the bonus token now comes from the row before its own. Most tokens stay right.")
    with planted_fault():
        faulty = certify(config, folder / "certificate-of-the-fault")
    out.write(f"{faulty.sentence} {faulty.advice}\n")
    code = as_expected(sound.verdict, faulty.verdict)
    out.write("\n" + ending(folder, code, time.monotonic() - began))
    return code


def ending(folder: Path, code: int, seconds: float) -> str:
    """Return the demo's result, the paths of its pages, and the next steps, as text."""
    verdict = (
        "The sound engine passed and the faulty one failed, as they should."
        if code == 0
        else "That is not what should have come out: the sound engine has to pass and the faulty one to fail."
    )
    shown = shown_path(folder)
    return (
        f"{verdict} It took {seconds:.0f} s.\n"
        f"  report        {shown / 'report.html'}\n"
        f"  certificate   {shown / 'certificate' / 'report.html'}\n"
        f"  of the fault  {shown / 'certificate-of-the-fault' / 'report.html'}\n"
        f"  viewer        bebop view {shown}\n"
        f"  next          bebop run   (the whole job, about eight minutes; bebop run --help: your own model)\n"
    )


if __name__ == "__main__":
    run_main(main)
