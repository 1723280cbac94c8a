"""Checkpoints: load Hugging Face folders and save the same layout. ``bebop.model.layouts`` maps MTP weights."""

import datetime
import json
import logging
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers import logging as transformers_logging
from transformers.utils.chat_template_utils import _compile_jinja_template

from bebop.config.job import ModelConfig
from bebop.errors import UserError
from bebop.model.attention import needs_stock, refuse_config
from bebop.model.backbone import Policy, stop_token_ids
from bebop.model.layouts import FRESH, LAYOUTS, TABLES, from_layout, split_experts, to_layout
from bebop.model.lora import refuse_adapter
from bebop.model.mtp import MTPHead, init_from_backbone
from bebop.model.parity import check_parity, check_stock
from bebop.model.parts import find_part, load_part
from bebop.model.sharded import on_meta, outline, sample
from bebop.model.skeleton import (
    FLOATS,
    NAME,
    check_file,
    check_layers,
    check_same_tokens,
    check_settings,
    check_tokenizer,
    check_tokens,
    header,
    read_object,
)
from bebop.model.smollm2 import HEAD, cached
from bebop.run_dir.safe_parse import main_type
from bebop.systems import PARTS

if TYPE_CHECKING:  # transformers' modeling code, 4.2 s of processor time to import
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)
ADVICE = "give a folder that transformers loads"
_checked: set[tuple[object, ...]] = set()  # models that were compared with Hugging Face's forward in this process


def load_policy(
    config: ModelConfig,
    need_head: bool = False,
    needs: Sequence[str] = (),
    sharded: bool = False,
    need_draft: bool = False,
    any_backbone: bool = False,
) -> Policy:
    """Load backbone, tokenizer and MTP head, and compare the logits with Hugging Face's own forward.

    The comparison runs once a process for each checkpoint.

    Args:
        need_head: raise an error for a missing head instead of returning None.
        needs: trained parts to load as well, see ``bebop.model.parts``.
        sharded: leave the backbone on the meta device if ``bebop.model.sharded`` can fill it after the split. A random
            model with its settings is compared with Hugging Face's forward in its place.
        need_draft: load ``model.draft`` as well.
        any_backbone: use transformers' own attention for models that bebop's does not support (``Policy.stock``).
    """
    folder = resolve(config.path)
    tokenizer = load_tokenizer(config)
    stock = any_backbone and needs_stock(read_config(config)) is not None
    backbone = _outline_backbone(config, folder, tokenizer) if sharded and not stock else None
    if backbone is None:
        backbone = load_backbone(config, stock).to(find_device(config))
    check_tokenizer(tokenizer, backbone.config.vocab_size, f"model.path={config.path!r}")
    backbone.eval()
    if need_head:
        require_mtp(config)
    policy = Policy(backbone=backbone, tokenizer=tokenizer, mtp=None, layout="mimo", stock=stock)
    check = config.check and not on_meta(backbone) and (loaded := _identity(folder, config)) not in _checked
    if check and not stock:
        check_parity(policy, config.path)
        _checked.add(loaded)
    policy.layout, policy.mtp = load_mtp(folder, backbone, fresh=config.init_mtp)
    if policy.mtp is not None:
        policy.mtp.to(find_device(config))
    if check and stock:
        check_stock(policy, config.path)
        _checked.add(loaded)
    policy.stored = _types(folder, backbone)
    policy.parts = {name: load_part(name, find_part(config, name), policy) for name in needs}
    if need_draft:
        policy.draft = load_draft(config, policy.tokenizer)
    policy.drafting = next((name for name in needs if PARTS[name].backend is not None), "")
    if policy.head is not None and policy.drafting:  # one type everywhere, so that fingerprints agree
        policy.head.to(device=find_device(config), dtype=getattr(torch, config.dtype))
    return policy


def draft_config(config: ModelConfig) -> ModelConfig:
    """Return the configuration of a checkpoint's draft model: the target's type and device."""
    if config.draft is None:
        raise UserError("model.draft is missing: give the folder of a smaller model with the same tokenizer")
    return replace(config, path=config.draft, draft=None, init_mtp=False, parts={})


def read_draft(config: ModelConfig) -> Any:
    """Return the Hugging Face configuration of the draft model of a checkpoint."""
    with of_draft():
        return read_config(draft_config(config))


def load_draft(config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> Policy:
    """Return the draft model of a checkpoint, frozen, without an MTP head of its own.

    Raises:
        UserError: It cannot be loaded, or its tokens differ from those of ``tokenizer``, the target's.
    """
    own = draft_config(config)
    with of_draft():
        check_same_tokens(tokenizer, load_tokenizer(own), f"model.draft={own.path!r}")
        draft = load_policy(own)
    draft.backbone.requires_grad_(False)
    draft.mtp = None
    return draft


@contextmanager
def of_draft() -> Iterator[None]:
    """Let errors within this block name ``model.draft`` instead of ``model.path``."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("model.path=", "model.draft=")) from error


def _outline_backbone(
    config: ModelConfig, folder: Path, tokenizer: PreTrainedTokenizerBase
) -> "PreTrainedModel | None":
    """Return the backbone without memory, to be filled after the split; None if it must be loaded whole.

    A model that may compute other logits than Hugging Face's forward is loaded whole, so that it is compared itself.
    """
    require_known(config)
    settings = read_config(config)
    if (
        config.init_mtp
        and mtp_layout(folder, settings.get_text_config().num_hidden_layers) is None
        and trained_head(folder) is None
    ):
        return None  # a fresh head starts from the last layer's weights
    dtype = getattr(torch, config.dtype)
    with readable(config):
        backbone = outline(settings, folder, dtype)
    if backbone is None or not config.check:
        return backbone
    try:
        with readable(config):
            small = sample(settings, dtype, find_device(config))
        check_parity(Policy(backbone=small, tokenizer=tokenizer, mtp=None, layout="mimo"), config.path)
    except UserError as error:
        reason = "a random model with its settings failed the check, which model.check=false skips"
        log.warning("every rank loads the whole model and checks it: %s: %s", reason, error)
        return None
    return backbone


def _identity(folder: Path, config: ModelConfig) -> tuple[object, ...]:
    """Return the key of a checked model: the state of its files, its type and its device."""
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.json"), *folder.glob("*.bin")])
    stats = [(file.name, stat.st_mtime_ns, stat.st_size) for file in files for stat in [file.stat()]]
    return (folder.resolve(), config.dtype, find_device(config), *stats)


def find_device(config: ModelConfig) -> torch.device:
    """Return the device that ``model.device`` names; ``auto`` is the first GPU, or the CPU where there is none."""
    gpus = torch.cuda.device_count()
    if config.device == "auto":
        return torch.device("cuda" if gpus else "cpu")
    kind, _, index = config.device.partition(":")
    known = kind in ("cpu", "cuda") and (not index or index.isdigit())
    if not known or (kind == "cuda" and int(index or 0) >= gpus):
        raise UserError(f"model.device={config.device!r} is not possible: give auto, cpu or one of {gpus} GPUs")
    # Kernels and events go to the current GPU of a thread, and each thread begins with the first one.
    if kind == "cuda" and int(index or 0) and int(index) != torch.cuda.current_device():
        raise UserError(
            f"model.device={config.device!r} is not the current GPU of this process: set CUDA_VISIBLE_DEVICES={index} "
            "and give cuda"
        )
    return torch.device(config.device)


def load_backbone(config: ModelConfig, stock: bool = False) -> "PreTrainedModel":
    """Return the causal LM of a checkpoint on the CPU.

    Missing or misfitting weights raise ``UserError``; they never become random. Features that bebop's attention lacks
    also raise it, before any weights are read. ``stock``: use transformers' own attention.
    """
    from bebop.model.attention import ATTENTION  # with transformers' modeling code: 4.2 s of processor time

    require_known(config, any_backbone=stock)
    # PyTorch's attention, transformers' default, has no soft caps and would leave them out silently.
    capped = stock and getattr(read_config(config).get_text_config(), "attn_logit_softcapping", None)
    own = "eager" if capped else None
    with readable(config):
        backbone, info = AutoModelForCausalLM.from_pretrained(
            resolve(config.path),
            dtype=getattr(torch, config.dtype),
            attn_implementation=own if stock else ATTENTION,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are listed below instead of raised as a table
        )
    for problem in ("missing", "mismatched"):
        names = sorted(str(key[0] if isinstance(key, tuple) else key) for key in info[f"{problem}_keys"])
        if names:
            raise UserError(f"model.path={config.path!r}: {len(names)} {problem} weights, the first is {names[0]}")
    return backbone


def read_config(config: ModelConfig) -> Any:
    """Return the Hugging Face configuration of a checkpoint; raise ``UserError`` for impossible sizes."""
    folder, name = resolve(config.path), f"model.path={config.path!r}"
    refuse_adapter(folder, name)
    with readable(config, "config.json: "):
        check_file(folder, name)
        check_tokens(folder, name)
        # An explicit False: by default transformers would ask at a terminal whether to run the folder's own code.
        settings = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        check_settings(settings, name)
    return settings


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a checkpoint, without its weights.

    A generic class name in a folder means that tokenizer.json applies as it stands. AutoTokenizer would replace it by
    the class of the model's family (for ``qwen2`` one with another pre-tokenizer and an added token).
    """
    folder = resolve(config.path)
    with readable(config, "its tokenizer: "):
        name = read_object(folder / "tokenizer_config.json").get("tokenizer_class")
        if name is not None and not isinstance(name, str):
            raise UserError(f"model.path={config.path!r}: tokenizer_config.json has tokenizer_class={name!r}: {NAME}")
        generic = name in ("TokenizersBackend", "PreTrainedTokenizerFast") and (folder / "tokenizer.json").is_file()
        kind = PreTrainedTokenizerFast if generic else AutoTokenizer
        tokenizer = kind.from_pretrained(folder, local_files_only=True)
    # transformers makes an empty tokenizer of the family's class where the files are missing.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise UserError(f"model.path={config.path!r} cannot be loaded: it has no tokenizer files (tokenizer.json, ...)")
    if config.date != "auto" and isinstance(tokenizer.chat_template, str):
        # transformers has no argument for the day. It compiles each template once, and keeps what was compiled.
        day = datetime.date.fromisoformat(config.date)
        _compile_jinja_template(tokenizer.chat_template).globals["strftime_now"] = day.strftime
    return tokenizer


def stop_tokens(config: ModelConfig) -> tuple[int, ...]:
    """Return the tokens that end a completion of a checkpoint, without its weights (``Policy.eos_token_ids``)."""
    folder = resolve(config.path)
    settings = read_config(config)
    with readable(config, "generation_config.json: "):
        if (folder / "generation_config.json").is_file():
            generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
        else:
            generation = GenerationConfig.from_model_config(settings)
    return stop_token_ids(generation, load_tokenizer(config))


@contextmanager
def readable(config: ModelConfig, what: str = "") -> Iterator[None]:
    """Turn errors of transformers about ``what`` in a folder into one line, and silence its log.

    transformers checks little of its input, so a value of another type may end in any exception. It also logs keys of
    MTP weights, and pages about an error that it then raises.
    """
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"model.path={config.path!r} cannot be loaded: {what}{reason}; {ADVICE}") from error
    finally:
        transformers_logging.set_verbosity(level)


def resolve(path: str) -> Path:
    """Return the folder of a built-in name, or the path itself."""
    if path == "tiny":
        return Path(__file__).parent / "tiny"
    if path == "smollm2":
        from bebop.model.smollm2 import folder

        return folder()
    return Path(path)


def trained_head(folder: Path) -> Path | None:
    """Return the head file that bebop ships for a model without a head; its weights have the names of ``MTPHead``."""
    return HEAD if HEAD.is_file() and folder.resolve() == cached().resolve() else None


def mtp_layout(folder: Path, layers: int) -> str | None:
    """Return the layout of the MTP weights in a folder whose backbone has ``layers`` layers; None without any.

    Raises:
        UserError: There are weights of further layers that are no MTP layers.
    """
    names = _names(folder)
    check_layers(names, layers, str(folder))
    for kind, layout in LAYOUTS.items():
        prefix = layout.prefix.format(L=layers)
        own = tuple(f"{prefix}{part}." for part in layout.names.values())
        if any(name.startswith(own) for name in names):  # a layer of the backbone itself may have the prefix
            return kind
    return None


def require_known(config: ModelConfig, any_backbone: bool = False) -> None:
    """Raise ``UserError`` if the checkpoint's settings need features that bebop's attention lacks; read no weights.

    ``any_backbone``: accept features of transformers' own attention (``load_policy``).
    """
    own = read_config(config)
    with readable(config):
        refuse_config(own, config.path, any_backbone)


def require_mtp(config: ModelConfig) -> None:
    """Raise ``UserError`` if the checkpoint has no MTP weights and no fresh head is configured; read no weights."""
    folder = resolve(config.path)
    layers = read_config(config).get_text_config().num_hidden_layers
    if not config.init_mtp and mtp_layout(folder, layers) is None:
        raise UserError(
            f"model.path={config.path!r} has no MTP weights ({', '.join(LAYOUTS)} layouts are known); "
            "set model.init_mtp=true for a fresh head or decoding.system=autoregressive"
        )


def refuse_own_head(config: ModelConfig, engine: str) -> None:
    """Raise ``UserError`` for a separate language-model head although config.json ties it to the embedding.

    Transformers, and so the trainer, uses the head in the weights; an ``engine`` that follows config.json does not.
    """
    if not read_config(config).get_text_config().tie_word_embeddings:
        return
    pair = [dict(_tensors(resolve(config.path), name)) for name in ("lm_head.weight", "model.embed_tokens.weight")]
    head, embedding = (next(iter(found.values()), None) for found in pair)
    if head is not None and embedding is not None and not torch.equal(head, embedding):
        raise UserError(
            f"model.path={config.path!r}: config.json has tie_word_embeddings=true, but the weights have another "
            f"lm_head.weight, which {engine} would leave out: set it to false"
        )


def load_mtp(folder: Path, backbone: "PreTrainedModel", fresh: bool) -> tuple[str, MTPHead | None]:
    """Return the MTP head of a folder and the name of its layout; with ``fresh`` a new head if the folder has none."""
    layers = backbone.config.num_hidden_layers
    name = mtp_layout(folder, layers)
    if name is not None:
        layout = LAYOUTS[name]
        tensors = dict(_tensors(folder, layout.prefix.format(L=layers)))
        _refuse_own_tables(folder, layout.prefix.format(L=layers), backbone)
        head = MTPHead(backbone, zero_first=layout.zero_first)
        state = from_layout(tensors, layout, layers, list(head.state_dict()))
        for key, tensor in state.items():
            if tensor.shape != head.state_dict()[key].shape:
                shapes = f"{tuple(tensor.shape)}, the model needs {tuple(head.state_dict()[key].shape)}"
                raise UserError(f"{folder}: MTP weight {key} has shape {shapes}")
        return name, _filled(head, state)
    if not fresh:
        return "mimo", None
    trained = trained_head(folder)
    if trained is not None:
        head = MTPHead(backbone, zero_first=LAYOUTS["mimo"].zero_first)
        return "mimo", _filled(head, load_file(trained))
    strange = next((name for name in _names(folder) if "mtp" in name.lower() or "nextn" in name.lower()), None)
    if strange is not None:
        raise UserError(f"{folder}: MTP weight {strange} is in no known layout ({', '.join(LAYOUTS)})")
    layout_name = FRESH.get(backbone.config.get_text_config().model_type, "mimo")
    head = MTPHead(backbone, zero_first=LAYOUTS[layout_name].zero_first)
    init_from_backbone(head, backbone)
    log.warning("a fresh MTP head was made from the last layer of %s; adapt it before relying on it", folder)
    return layout_name, head.eval()


def _filled(head: MTPHead, state: Mapping[str, Tensor]) -> MTPHead:
    """Return the head with its weights, on the CPU if it was made beside a backbone without memory."""
    if on_meta(head):
        head.to_empty(device="cpu")
    head.load_state_dict(state)
    return head.eval()


def _names(folder: Path) -> list[str]:
    """Return the names of all tensors in the folder's safetensors files."""
    try:
        return [name for name, _ in header(folder)]
    except SafetensorError as error:
        raise UserError(f"the weights in {folder} cannot be read: {error}") from error


def _tensors(folder: Path, prefix: str, skip: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a folder's safetensors files whose names start with ``prefix``, except those in ``skip``."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # safe_open is no mapping: it cannot be iterated
                    if name.startswith(prefix) and name not in skip:
                        yield name, opened.get_tensor(name)
        except SafetensorError as error:
            raise UserError(f"{file} cannot be read: {error}") from error


def _types(folder: Path, backbone: "PreTrainedModel") -> dict[str, torch.dtype]:
    """Return the types of the weights in a saved checkpoint of a loaded model, by their names on disk.

    If the model was loaded in the main type of the folder, each weight keeps its type in the folder: most mixtures in
    bfloat16 hold their router's bias in float32. Otherwise each has its type in transformers, which keeps such a bias
    in float32 as well.
    """
    came = {name: FLOATS[kind] for name, (kind, _) in header(folder) if kind in FLOATS}
    if FLOATS.get(main_type(folder)) == backbone.dtype:
        return came
    held = {name: tensor.dtype for name, tensor in _named_as_stored(backbone).items()}
    return dict.fromkeys(came, backbone.dtype) | held


def _named_as_stored(backbone: "PreTrainedModel", weights: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return weights and persistent buffers under the names, and in the pieces, of the model's own checkpoint.

    Transformers renames weights of some families on loading, and stacks experts; this function reverses its tables. A
    weight that two modules share appears once. ``weights``: used in place of the model's own.
    """
    known = backbone.state_dict().keys()
    state = {**(weights or dict(backbone.named_parameters()))}
    state |= {name: buffer for name, buffer in backbone.named_buffers() if name in known}
    return _reverted(backbone, state)


def named_as_served(folder: Path, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights of a backbone under the names that servers expect in checkpoints of the model in ``folder``.

    Experts are separate weights under the names of their family: ``block_sparse_moe.experts.3.w1`` for Mixtral.
    """
    return split_experts(_reverted(empty_model(folder), weights))


@cache
def empty_model(folder: Path) -> "PreTrainedModel":
    """Return the model of a folder on the meta device, without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, local_files_only=True))


def _rest(source: Path, policy: Policy, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of the folder ``source`` that do not belong to the policy.

    The result is empty if the names on disk are not those of ``state``: weights there may be the policy's under other
    names.
    """
    prefix = LAYOUTS[policy.layout].prefix.format(L=policy.backbone.config.num_hidden_layers)
    if any(name not in policy.stored and not name.startswith(prefix) for name in state):
        return {}
    return dict(_tensors(source, "", skip=state))


def _around(source: Path, text: dict[str, Any]) -> dict[str, Any]:
    """Return config.json of a model around a language model, with the head settings of ``text``.

    If the source has no such outer model, return ``text``.
    """
    whole = read_object(source / "config.json")
    if not isinstance(whole.get("text_config"), dict):
        return text
    head = {key: text[key] for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers") if key in text}
    return {**whole, "text_config": {**whole["text_config"], **head}}


def _copied_tables(policy: Policy, layers: int, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return embedding and language-model head under the names in the MTP layer of the policy's checkpoint.

    ``own``: the backbone's weights by name. The policy itself may hold parts of them alone.
    """
    prefix, backbone = LAYOUTS[policy.layout].prefix.format(L=layers), policy.backbone
    names = {id(parameter): name for name, parameter in backbone.named_parameters()}
    found = {}
    for name, module in zip(TABLES, (backbone.get_input_embeddings(), backbone.get_output_embeddings()), strict=True):
        if prefix + name in policy.stored:
            found[prefix + name] = own[names[id(module.weight)]].detach().clone()
    return found


def _refuse_own_tables(folder: Path, prefix: str, backbone: "PreTrainedModel") -> None:
    """Raise ``UserError`` if the MTP layer of a checkpoint has another embedding or head than the backbone.

    Engines use the backbone's, and so does the training of a head.
    """
    modules = (backbone.get_input_embeddings(), backbone.get_output_embeddings())
    for name, module in zip(TABLES, modules, strict=True):
        if on_meta(backbone) or type(module.weight) is not torch.nn.Parameter:
            continue  # not filled yet, or split over processes
        for key, tensor in _tensors(folder, prefix + name):
            if not torch.equal(tensor.to(module.weight), module.weight):
                raise UserError(f"{folder}: {key} is another table than the model's own, which MTP heads share")


def _reverted(backbone: "PreTrainedModel", state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion  # with modeling code, 4.2 s of processor time

    named: dict[str, Tensor] = revert_weight_conversion(backbone, {name: t.detach() for name, t in state.items()})
    return named


def save_policy(
    policy: Policy,
    folder: Path,
    dtype: torch.dtype | None = None,
    weights: Mapping[str, Tensor] | None = None,
    source: Path | None = None,
) -> None:
    """Write a Hugging Face folder like the policy's source: names, pieces, types, layout of the head.

    All weights go into one safetensors file. Readers without MTP support (transformers) skip its MTP keys, and those
    with it (SGLang) find them.

    Args:
        policy: the policy to write.
        folder: created if it does not exist.
        dtype: type of weights that ``policy.stored`` does not name, such as those of a model made in memory; None:
            their own type.
        weights: the backbone's weights, in place of the policy's own and with the names of ``Policy.weights``: those of
            a policy that is split over processes.
        source: the policy's source folder, whose further weights are copied unchanged, such as a tower for images.
    """
    folder.mkdir(parents=True, exist_ok=True)
    backbone, layers = policy.backbone, policy.backbone.config.num_hidden_layers
    own = {name.removeprefix("backbone."): t for name, t in (weights or policy.weights()).items()}
    state = _named_as_stored(backbone, own)
    if policy.mtp is not None:
        state |= to_layout(policy.mtp.state_dict(), LAYOUTS[policy.layout], layers, stored=policy.stored)
        state |= _copied_tables(policy, layers, own)
    for name, tensor in state.items():
        kind = policy.stored.get(name, dtype or tensor.dtype) if tensor.is_floating_point() else tensor.dtype
        state[name] = tensor.to(device="cpu", dtype=kind).contiguous()
    rest = {} if source is None else _rest(source, policy, state)
    save_file(state | rest, folder / "model.safetensors", metadata={"format": "pt"})
    config = backbone.config.to_dict()
    # Transformers keeps a separate head in the file untied, whatever config.json says; others follow config.json.
    shared = [name for name, _ in backbone.named_parameters(remove_duplicate=False) if name not in own]
    config["tie_word_embeddings"] = bool(shared)
    config["dtype"] = str(max(state.values(), key=torch.numel).dtype).removeprefix("torch.")
    config["architectures"] = config.get("architectures") or [type(backbone).__name__]  # none if made in memory
    for private in ("_attn_implementation", "_name_or_path"):  # the latter is a local path
        config.pop(private, None)
    if policy.mtp is not None:
        config["num_nextn_predict_layers"] = 1
        if policy.layout == "mimo" and config["model_type"] == "qwen2":
            config["architectures"] = ["MiMoForCausalLM"]  # for SGLang; transformers uses model_type
        if config["model_type"].startswith("qwen3_5"):
            config["mtp_num_hidden_layers"] = 1
    if source is not None and rest:
        config = _around(source, config)
        for file in source.glob("*processor_config.json"):
            shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n")
    if backbone.generation_config is not None:
        # Not save_pretrained: it refuses values that from_pretrained accepts, such as a temperature without do_sample.
        backbone.generation_config.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])
    policy.tokenizer.save_pretrained(folder)
