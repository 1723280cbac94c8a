"""Checks of a checkpoint against the model that its config.json describes, by names, shapes and types alone.

The model is made on the meta device, without memory, and only the headers of the weights are read. Problems found here
would otherwise end a job after its processes have started.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from bebop.errors import UserError
from bebop.model.layouts import LAYOUTS, from_layout
from bebop.model.mtp import MTPHead
from bebop.run_dir.safe_parse import parse_json

if TYPE_CHECKING:  # transformers' modeling code, 4.2 s of processor time to import
    from transformers import PreTrainedModel

COUNTS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings",
)  # fmt: skip
MAX_COUNT = 1 << 31
TOKENS = ("eos_token_id", "pad_token_id", "bos_token_id")
# Names of weights in layers of the backbone, in most families; a tower for images has layers of its own.
LAYER = re.compile(r"(?:(?:model|language_model|transformer|gpt_neox|backbone|decoder)\.)*(?:layers|h)\.(\d+)\..*")
USUAL = ("silu", "gelu", "gelu_pytorch_tanh", "relu")  # activations that need no look at transformers' list
# safetensors' names of the allowed types of weights.
FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
QUANTIZED = ("gguf",)  # methods that describe how weights were read, not how they are stored

NAME = "give the name of one of transformers' classes as a text"
INDEX = "model.safetensors.index.json"


def read_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty without the file; raise ``UserError`` for any other content."""
    if not file.is_file():
        return {}
    try:
        value = parse_json(file.read_bytes())
    except ValueError as error:
        raise UserError(f"{str(file)!r} cannot be loaded: it is not JSON: {error}; give an object in braces") from None
    if not isinstance(value, dict):
        raise UserError(f"{str(file)!r} cannot be loaded: it holds {str(value)[:40]!r}: give an object in braces")
    return value


def check_file(folder: Path, name: str) -> None:
    """Raise ``UserError`` for values in config.json on which transformers fails before it makes a configuration."""
    values = read_object(folder / "config.json")
    kinds = [known for known in vars(torch) if isinstance(getattr(torch, known), torch.dtype)]
    for key, value in values.items():
        wanted = None
        if key == "model_type" and not isinstance(value, str):
            wanted = "give the name of a kind of model that transformers knows, as a text"
        elif key == "hidden_act" and value not in USUAL:
            from transformers.activations import ACT2FN  # 3.9 s of processor time

            if not (isinstance(value, str) and value in ACT2FN):
                wanted = f"choose one of {', '.join(sorted(ACT2FN))}"
        elif key in ("dtype", "torch_dtype") and value is not None and str(value).removeprefix("torch.") not in kinds:
            wanted = "give the name of one of torch's types, bfloat16 or float32 for instance"
        elif key == "quantization_config" and not isinstance(value, dict | None):
            wanted = "leave it out: quantized weights are not possible"
        elif key in ("rope_parameters", "rope_scaling") and not isinstance(value, dict | None):
            wanted = "give an object in braces"
        if wanted is not None:
            raise UserError(f"{name}: config.json has {key}={str(value)[:40]!r}: {wanted}")


def check_tokens(folder: Path, name: str) -> None:
    """Raise ``UserError`` for a token in config.json or generation_config.json that is not a valid token id.

    Transformers accepts ``1.0`` and ``"2"`` in the latter, and the first comparison with a sampled token fails.
    """
    rows = read_object(folder / "config.json").get("vocab_size")
    below = rows if type(rows) is int and rows > 0 else MAX_COUNT
    for file, key in product(("config.json", "generation_config.json"), TOKENS):
        value, ends = read_object(folder / file).get(key), key == "eos_token_id"
        listed = value if ends and isinstance(value, list) else [] if value is None else [value]
        least = 0 if ends else -1  # old checkpoints use -1 for none
        if not all(type(one) is int and least <= one < below for one in listed):
            allowed = f"a whole number from 0 to {below - 1}{', a list of them' * ends} or null"
            raise UserError(f"{name}: {file} has {key}={repr(value)[:40]}: give {allowed}")


def check_tokenizer(tokenizer: Any, rows: int, name: str) -> None:
    """Raise ``UserError`` for tokens that have no row among the ``rows`` of the embedding."""
    if len(tokenizer) > rows:
        raise UserError(
            f"{name}: the tokenizer has {len(tokenizer)} tokens, the model {rows}; they do not belong together"
        )
    text, number = max(tokenizer.get_vocab().items(), key=itemgetter(1))
    if number >= rows:  # numbers may have gaps
        raise UserError(
            f"{name}: the tokenizer has {text!r} as token {number}, the model tokens 0 to {rows - 1}; "
            "they do not belong together"
        )


def check_same_tokens(target: Any, draft: Any, name: str) -> None:
    """Raise ``UserError`` unless the tokenizers of a target and of its draft model have the same token for every id."""
    own, other = ({number: text for text, number in one.get_vocab().items()} for one in (target, draft))
    for number in sorted(own.keys() | other.keys()):
        if own.get(number) != other.get(number):
            texts = [repr(one[number]) if number in one else "missing" for one in (own, other)]
            raise UserError(
                f"{name} is not possible: token {number} is {texts[0]} in model.path and {texts[1]} there; give a "
                "model with the same tokenizer"
            )


def check_layers(keys: Iterable[str], layers: int, name: str) -> None:
    """Raise ``UserError`` for weights of layers beyond the configuration's ``layers``, unless they are MTP layers."""
    beyond: dict[int, list[str]] = defaultdict(list)
    for key in keys:
        parsed = LAYER.fullmatch(key)
        if parsed is not None and int(parsed[1]) >= layers:
            beyond[int(parsed[1])].append(key)
    own = tuple(LAYOUTS["deepseek"].names.values())
    for number, found in sorted(beyond.items()):
        prefix = LAYOUTS["deepseek"].prefix.format(L=number)
        if not any(key.startswith(f"{prefix}{part}.") for key in found for part in own):
            raise UserError(
                f"{name}: config.json has num_hidden_layers={layers}, but there are weights of layer {number} "
                f"({found[0]}), which is no MTP layer: give the number of layers that the weights have"
            )


def check_index(folder: Path, name: str) -> None:
    """Raise ``UserError`` unless every file in the index of a checkpoint in parts exists."""
    places = read_object(folder / INDEX).get("weight_map", {})
    if not isinstance(places, dict):
        raise UserError(f"{name}: weight_map in {INDEX} is {str(places)[:40]!r}: give an object in braces")
    if lacking := sorted({str(place) for place in places.values() if not (folder / str(place)).is_file()}):
        raise UserError(
            f"{name}: {len(lacking)} missing files of weights that {INDEX} names, the first is {lacking[0]}"
        )


def check_settings(settings: Any, name: str) -> None:
    """Raise ``UserError`` for impossible sizes in config.json; ``name`` begins the line."""
    text = settings.get_text_config()
    for key in COUNTS:
        value = getattr(text, key, None)
        if value is not None and (type(value) is not int or not 1 <= value <= MAX_COUNT):
            raise UserError(f"{name}: config.json has {key}={value!r}: give a whole number from 1 to {MAX_COUNT}")
    eps = getattr(text, "rms_norm_eps", None)
    if eps is not None and not 0 <= eps < 1:
        raise UserError(f"{name}: config.json has rms_norm_eps={eps!r}: give a number from 0 to below 1")
    packed = getattr(settings, "quantization_config", None)
    method = packed.get("quant_method") if isinstance(packed, dict) else getattr(packed, "quant_method", packed)
    if method is not None and str(getattr(method, "value", method)) not in QUANTIZED:
        shown = str(getattr(method, "value", method))
        raise UserError(f"{name}: its weights are quantized ({shown}): give a checkpoint in {', '.join(FLOATS)}")


def check_weights(settings: Any, folder: Path, name: str) -> "PreTrainedModel":
    """Return the model without memory, if the headers say that the weights in ``folder`` are the model's.

    A file may use other names than the model (transformers renames weights of some families, and joins experts). Then
    only the names that both have are compared.

    Raises:
        UserError: Weights are missing, or have another type or shape.
    """
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(settings)
    wanted = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    tied = {key for key in wanted if any(key.endswith(end) for end in getattr(model, "_tied_weights_keys", None) or ())}
    stored = dict(header(folder))
    own = {key: value for key, value in stored.items() if not is_mtp(key, settings)}
    shared = {key for key in own if key in wanted}
    lacking = sorted(set(wanted) - shared - tied)
    if lacking and (not shared or len(shared) == len(own)):
        raise UserError(f"{name}: {len(lacking)} missing weights, the first is {lacking[0]}")
    for key in sorted(shared):
        kind, shape = own[key]
        if kind not in FLOATS:
            raise UserError(f"{name}: {key} is stored as {kind}: give a checkpoint in {', '.join(FLOATS)}")
        if shape != wanted[key]:
            raise UserError(f"{name}: {key} has shape {shape}: config.json wants {wanted[key]}")
    return model


def check_head(model: "PreTrainedModel", folder: Path, layout: str) -> None:
    """Raise ``UserError`` unless the MTP weights in ``folder`` fit a head for ``model``, by names and shapes."""
    layers = model.config.num_hidden_layers
    prefix = LAYOUTS[layout].prefix.format(L=layers)
    with torch.device("meta"):
        wanted = MTPHead(model).state_dict()
        given = {key: torch.empty(shape) for key, (_, shape) in header(folder) if key.startswith(prefix)}
        for key, tensor in from_layout(given, LAYOUTS[layout], layers, list(wanted)).items():
            if tensor.shape != wanted[key].shape:
                shapes = f"{tuple(tensor.shape)}, the model needs {tuple(wanted[key].shape)}"
                raise UserError(f"{folder}: MTP weight {key} has shape {shapes}")


def header(folder: Path) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Yield name, type (``BF16``) and shape of every weight in a folder."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # safe_open is no mapping: it cannot be iterated
                part = opened.get_slice(key)
                yield key, (part.get_dtype(), tuple(part.get_shape()))


def is_mtp(key: str, settings: Any) -> bool:
    """Return whether a weight of this name belongs to an MTP layer, in any layout."""
    layers = settings.get_text_config().num_hidden_layers
    return any(key.startswith(layout.prefix.format(L=layers)) for layout in LAYOUTS.values())
