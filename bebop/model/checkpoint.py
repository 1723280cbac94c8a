"""Checkpoints: Hugging Face folders in, the same layout out. MTP weights are mapped by ``bebop.model.layouts``."""

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

from bebop.config.job import ModelConfig
from bebop.errors import UserError
from bebop.model.attention import needs_stock, refuse_config
from bebop.model.backbone import Policy, shared_tables, stop_token_ids
from bebop.model.layouts import FRESH, LAYOUTS, TABLES, from_layout, split_experts, to_layout
from bebop.model.lora import refuse_adapter
from bebop.model.mtp import MTPHead, init_from_backbone
from bebop.model.parity import check_parity, check_stock
from bebop.model.parts import find_part, load_part
from bebop.model.sharded import on_meta, outline
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
_checked: set[tuple[object, ...]] = set()  # what was held against Hugging Face's forward in this process


def load_policy(
    config: ModelConfig,
    need_head: bool = False,
    needs: Sequence[str] = (),
    sharded: bool = False,
    need_draft: bool = False,
    any_backbone: bool = False,
) -> Policy:
    """Load backbone, tokenizer and MTP head; ``need_head`` makes a missing head an error instead of None.

    ``needs``: trained parts to load beside them, see ``bebop.model.parts``. ``need_draft``: load ``model.draft`` as
    well. The backbone's logits are held against Hugging Face's own forward, once a process for each checkpoint.

    ``sharded``: leave the backbone on the meta device where ``bebop.model.sharded`` can fill it once it is split. It is
    not held against Hugging Face's forward then.

    ``any_backbone``: load what bebop's attention does not have on transformers' own (``Policy.stock``).
    """
    folder = resolve(config.path)
    tokenizer = load_tokenizer(config)
    stock = any_backbone and needs_stock(read_config(config)) is not None
    backbone = _outline_backbone(config, folder) if sharded and not stock else None
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
    if policy.head is not None and policy.drafting:  # in one type everywhere, so that fingerprints agree
        policy.head.to(device=find_device(config), dtype=getattr(torch, config.dtype))
    return policy


def draft_config(config: ModelConfig) -> ModelConfig:
    """Return where and how the draft model of a checkpoint is loaded: in the target's type, on its device."""
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
        UserError: It cannot be loaded, or its tokens are not those of ``tokenizer``, the target's.
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


def _outline_backbone(config: ModelConfig, folder: Path) -> "PreTrainedModel | None":
    """Return the backbone without memory, to be filled once it is split; None where it has to be loaded whole."""
    require_known(config)
    settings = read_config(config)
    if (
        config.init_mtp
        and mtp_layout(folder, settings.get_text_config().num_hidden_layers) is None
        and trained_head(folder) is None
    ):
        return None  # a fresh head starts from the last layer's weights
    with readable(config):
        return outline(settings, folder, getattr(torch, config.dtype))


def _identity(folder: Path, config: ModelConfig) -> tuple[object, ...]:
    """Return what a check of a loaded model holds for: the files as they are, and how they were loaded."""
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
    return torch.device(config.device)


def load_backbone(config: ModelConfig, stock: bool = False) -> "PreTrainedModel":
    """Return the causal LM of a checkpoint on the CPU. Weights that are missing or do not fit are an error, never
    random.

    So is what bebop's attention does not have, before any weights are read. ``stock``: on transformers' own attention.
    """
    from bebop.model.attention import ATTENTION  # with transformers' modeling code: 4.2 s of processor time

    require_known(config, any_backbone=stock)
    # PyTorch's attention, which transformers takes by itself, has no soft caps; they would be left out in silence.
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
    """Return the Hugging Face configuration of a checkpoint; ``UserError`` for sizes that no model has."""
    folder, name = resolve(config.path), f"model.path={config.path!r}"
    refuse_adapter(folder, name)
    with readable(config, "config.json: "):
        check_file(folder, name)
        check_tokens(folder, name)
        # False, and not left out: transformers would ask at a terminal whether to run the folder's own code.
        settings = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        check_settings(settings, name)
    return settings


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a checkpoint, without its weights.

    A folder that names a generic class means its tokenizer.json as it stands. AutoTokenizer would put the class of
    the model's family in its place (for ``qwen2`` one with another pre-tokenizer and an added token).
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
    """Turn what transformers finds wrong with ``what`` of a folder into one line, and keep its reports quiet.

    It checks little of what it reads, so that a value of another type may end in any exception; and it logs keys of MTP
    weights, and pages about an error that it then raises.
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
    """Return the head that bebop brings for a model that has none of its own; its weights are named as in
    ``MTPHead``."""
    return HEAD if HEAD.is_file() and folder.resolve() == cached().resolve() else None


def mtp_layout(folder: Path, layers: int) -> str | None:
    """Return the layout of the MTP weights in a folder whose backbone has ``layers`` layers; None if it has none.

    ``UserError`` for weights of further layers that are no MTP layers.
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
    """Raise ``UserError`` if the checkpoint's settings name what bebop's attention does not have; reads no weights.

    ``any_backbone``: but for what transformers' attention has (``load_policy``).
    """
    own = read_config(config)
    with readable(config):
        refuse_config(own, config.path, any_backbone)


def require_mtp(config: ModelConfig) -> None:
    """Raise ``UserError`` if the checkpoint has no MTP weights and no fresh head is asked for; reads no weights."""
    folder = resolve(config.path)
    layers = read_config(config).get_text_config().num_hidden_layers
    if not config.init_mtp and mtp_layout(folder, layers) is None:
        raise UserError(
            f"model.path={config.path!r} has no MTP weights ({', '.join(LAYOUTS)} layouts are known); "
            "set model.init_mtp=true for a fresh head or decoding.system=autoregressive"
        )


def refuse_own_head(config: ModelConfig, engine: str) -> None:
    """Raise ``UserError`` for a language-model head of its own where config.json says that it is the embedding.

    Transformers, and so the trainer, takes the one in the weights; an ``engine`` that goes by config.json does not.
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
    """Return the MTP head found in a folder and the name of its layout; a fresh one if asked for and none is there."""
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
    """Return the head with its weights: on the CPU where it was made beside a backbone without memory."""
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
    """Yield the tensors in the folder's safetensors files whose names start with ``prefix``, but for those to skip."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # safe_open is no mapping: it cannot be iterated
                    if name.startswith(prefix) and name not in skip:
                        yield name, opened.get_tensor(name)
        except SafetensorError as error:
            raise UserError(f"{file} cannot be read: {error}") from error


def _types(folder: Path, backbone: "PreTrainedModel") -> dict[str, torch.dtype]:
    """Return the types that a checkpoint of a loaded model has, by the names on disk.

    Each as it came where the model was loaded in the main type of the folder: most mixtures in bfloat16 hold their
    router's bias in float32. Else as transformers holds it, which keeps such a bias in float32 as well.
    """
    came = {name: FLOATS[kind] for name, (kind, _) in header(folder) if kind in FLOATS}
    if FLOATS.get(main_type(folder)) == backbone.dtype:
        return came
    held = {name: tensor.dtype for name, tensor in _named_as_stored(backbone).items()}
    return dict.fromkeys(came, backbone.dtype) | held


def _named_as_stored(backbone: "PreTrainedModel", weights: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return weights and persistent buffers under the names, and in the pieces, of the checkpoint that the model came
    from.

    Transformers renames weights of some families as it reads them, and stacks experts: its own tables are read
    backwards. A weight that two modules share is there once. ``weights``: in place of the model's own.
    """
    known = backbone.state_dict().keys()
    state = {**(weights or dict(backbone.named_parameters()))}
    state |= {name: buffer for name, buffer in backbone.named_buffers() if name in known}
    return _reverted(backbone, state)


def named_as_served(folder: Path, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights of a backbone as servers read them from checkpoints of the model in ``folder``.

    Experts are one by one, under the names of their family: ``block_sparse_moe.experts.3.w1`` for Mixtral.
    """
    return split_experts(_reverted(empty_model(folder), weights))


@cache
def empty_model(folder: Path) -> "PreTrainedModel":
    """Return the model of a folder on the meta device, without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, local_files_only=True))


def _rest(source: Path, policy: Policy, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of the folder ``source`` that are none of the policy's own.

    Empty where the names on disk are not those of ``state``: what is there may be the policy's under another name.
    """
    prefix = LAYOUTS[policy.layout].prefix.format(L=policy.backbone.config.num_hidden_layers)
    if any(name not in policy.stored and not name.startswith(prefix) for name in state):
        return {}
    return dict(_tensors(source, "", skip=state))


def _around(source: Path, text: dict[str, Any]) -> dict[str, Any]:
    """Return config.json of a model around a language model, with the head that ``text`` says; ``text`` without one."""
    whole = read_object(source / "config.json")
    if not isinstance(whole.get("text_config"), dict):
        return text
    head = {key: text[key] for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers") if key in text}
    return {**whole, "text_config": {**whole["text_config"], **head}}


def _copied_tables(policy: Policy, layers: int) -> dict[str, Tensor]:
    """Return embedding and language-model head under the names that the MTP layer of the policy's checkpoint has."""
    prefix = LAYOUTS[policy.layout].prefix.format(L=layers)
    pair = zip(TABLES, shared_tables(policy), strict=True)
    return {prefix + name: table.clone() for name, table in pair if prefix + name in policy.stored}


def _refuse_own_tables(folder: Path, prefix: str, backbone: "PreTrainedModel") -> None:
    """Raise ``UserError`` where the MTP layer of a checkpoint has another embedding or head than the backbone.

    Engines take the backbone's, and so does the training of a head.
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
    """Write a Hugging Face folder like the one that the policy came from: names, pieces, types, layout of the head.

    One safetensors file, so that readers that know no MTP (transformers) skip its keys and those that do (SGLang)
    find them.

    Args:
        policy: what is written.
        folder: made if it is not there.
        dtype: of weights that ``policy.stored`` does not name, those of a model made in memory for instance; None: as
            they are.
        weights: the backbone's, in place of the policy's own and named as ``Policy.weights`` names them: those of a
            policy that is split over processes.
        source: the folder that the policy came from, whose further weights are kept as they are: a tower for images.
    """
    folder.mkdir(parents=True, exist_ok=True)
    backbone, layers = policy.backbone, policy.backbone.config.num_hidden_layers
    own = {name.removeprefix("backbone."): t for name, t in (weights or policy.weights()).items()}
    state = _named_as_stored(backbone, own)
    if policy.mtp is not None:
        state |= to_layout(policy.mtp.state_dict(), LAYOUTS[policy.layout], layers, stored=policy.stored)
        state |= _copied_tables(policy, layers)
    for name, tensor in state.items():
        kind = policy.stored.get(name, dtype or tensor.dtype) if tensor.is_floating_point() else tensor.dtype
        state[name] = tensor.to(device="cpu", dtype=kind).contiguous()
    rest = {} if source is None else _rest(source, policy, state)
    save_file(state | rest, folder / "model.safetensors", metadata={"format": "pt"})
    config = backbone.config.to_dict()
    # Transformers leaves a head untied that a file has of its own, whatever its config.json says; others go by that.
    shared = [name for name, _ in backbone.named_parameters(remove_duplicate=False) if name not in own]
    config["tie_word_embeddings"] = bool(shared)
    config["dtype"] = str(max(state.values(), key=torch.numel).dtype).removeprefix("torch.")
    config["architectures"] = config.get("architectures") or [type(backbone).__name__]  # none where made in memory
    for private in ("_attn_implementation", "_name_or_path"):  # the latter is where it was loaded from: a local path
        config.pop(private, None)
    if policy.mtp is not None:
        config["num_nextn_predict_layers"] = 1
        if policy.layout == "mimo" and config["model_type"] == "qwen2":
            config["architectures"] = ["MiMoForCausalLM"]  # what SGLang goes by; transformers goes by model_type
        if config["model_type"].startswith("qwen3_5"):
            config["mtp_num_hidden_layers"] = 1
    if source is not None and rest:
        config = _around(source, config)
        for file in source.glob("*processor_config.json"):
            shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n")
    if backbone.generation_config is not None:
        # Not save_pretrained, which refuses much that from_pretrained takes, a temperature without do_sample say.
        backbone.generation_config.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])
    policy.tokenizer.save_pretrained(folder)
