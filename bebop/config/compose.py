"""Turn a command line into a checked configuration for all entry points; no other module imports Hydra.

Hydra composes ``conf/`` with the overrides, and ``bebop.config.fields.from_dict`` checks the result. A run stores its
overrides instead of the composed values. So a resume may choose another group, delete a setting or change one that
others refer to. The result is the same as if all overrides stood in one line.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from bebop.config.adapt import AdaptConfig
from bebop.config.certify import CertifyConfig
from bebop.config.fields import Setting, from_dict, plain, settings, similar
from bebop.config.job import BUILT_IN, JobConfig
from bebop.config.simulate import SimulateConfig
from bebop.errors import UserError
from bebop.run_dir.checkpoints import write_text
from bebop.run_dir.folder import CONFIG, OVERRIDES, sign
from bebop.run_dir.safe_parse import parse_json
from bebop.systems import SYSTEMS

ROOTS: Mapping[str, type] = {  # file in conf/ -> its dataclass
    "config": JobConfig, "adapt": AdaptConfig, "certify": CertifyConfig, "simulate": SimulateConfig,
}  # fmt: skip
ALONE = {"algorithm": "grpo", "monitor": "default", "runtime": "default", "trainer": "default"}  # groups of one choice
OPENED = (
    "options.",
    "evaluation.task.",
    "data.engine_options.",
)  # a dataclass, not Hydra, checks the names below these
GIVEN = "model.path"  # set by every choice of its group; Hydra would not let a ??? replace a default


def job_config(overrides: Sequence[str]) -> JobConfig:
    """Return the job that Hydra overrides describe; raise one ``UserError`` for any mistake in them."""
    return from_dict(JobConfig, composed(overrides))


def adapt_config(overrides: Sequence[str]) -> AdaptConfig:
    """Return the adaptation that overrides describe."""
    return from_dict(AdaptConfig, composed(overrides, "adapt"))


def certify_config(overrides: Sequence[str]) -> CertifyConfig:
    """Return the certificate that overrides describe."""
    return from_dict(CertifyConfig, composed(overrides, "certify"))


def simulate_config(overrides: Sequence[str]) -> SimulateConfig:
    """Return the simulation that overrides describe."""
    return from_dict(SimulateConfig, composed(overrides, "simulate"))


def composed(overrides: Sequence[str], root: str = "config") -> dict[str, Any]:
    """Return ``conf/<root>.yaml`` with overrides, as plain data."""
    parsed = [_read(override) for override in overrides]
    try:
        config = _compose(tuple(overrides), root)
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise UserError(f"{error.full_key} is missing: give {error.full_key}=VALUE") from error
    except (HydraException, OmegaConfBaseException) as error:
        with suppress(HydraException):  # if the choices alone cannot be composed, only Hydra's own message is left
            _check_names(parsed, root)
        reason = " ".join(str(error).split())
        culprits = [o for o, p in zip(overrides, parsed, strict=True) if p.key_or_group in reason] or overrides
        raise UserError(f"{' '.join(culprits)} is not possible: {reason}") from error
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


# A command composes the same overrides two or three times, at .15 s each: for the run to resume, then for its settings.
@lru_cache(maxsize=32)
def _compose(overrides: tuple[str, ...], root: str) -> DictConfig:
    """Compose a configuration. It is cached, so callers must not change it; they resolve the references in it."""
    _register()
    # The options of a trained part depend on the part, whose dataclass checks their names: ++ accepts all names.
    # ``evaluation.task`` does not repeat the settings of ``task``: ++ accepts those that differ.
    opened = [f"++{override}" if override.startswith(OPENED) else override for override in overrides]
    with initialize_config_module("bebop.conf", version_base="1.3"):
        return compose(root, overrides=[*_model_of(overrides, root), *opened])


@cache
def _register() -> None:
    """Give Hydra the defaults of the dataclasses, so that ``conf/`` holds only the differences.

    The settings of a single choice of a group are its ``defaults: [CHOICE_settings]``.
    """
    store = ConfigStore.instance().store
    for name, system in SYSTEMS.items():
        options = _tree(settings(system.options)) if system.options else {}
        store(name, {"system": name, "draft_tokens": system.draft_tokens, "options": options}, group="decoding")
    for group, choice in ALONE.items():
        store(choice, {}, group=group)
    for root, cls in ROOTS.items():
        store(f"{root}_settings", _tree(s for s in settings(cls) if not s.only and s.name != GIVEN))
    for group, choice in {(s.name.split(".")[0], s.only) for s in settings(JobConfig) if s.only}:
        part = _tree(s for s in settings(JobConfig) if s.only == choice)
        store(f"{choice}_settings", part[group], group=group)


def _tree(found: Iterable[Setting]) -> dict[str, Any]:
    """Return settings as nested mappings of their defaults."""
    tree: dict[str, Any] = {}
    for setting in found:
        *path, last = setting.name.split(".")
        at = tree
        for part in path:
            at = at.setdefault(part, {})
        at[last] = setting.default
    return tree


# ---- groups, and the settings that a choice of model brings


def groups() -> dict[str, list[str]]:
    """Return the configuration groups and the choices in each."""
    there = {
        folder.name: sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml"))
        for folder in resources.files("bebop.conf").iterdir()
        if folder.is_dir() and not folder.name.startswith("_")
    }
    alone = {group: [choice] for group, choice in ALONE.items()}
    return dict(sorted({**there, **alone, "decoding": list(SYSTEMS)}.items()))


def root_groups(root: str) -> list[str]:
    """Return the groups that ``conf/<root>.yaml`` chooses from, which a command line may change."""
    return [group for group in _choices(root) if group in groups()]


def _choices(root: str) -> dict[str, str]:
    """Return the default choice of each group in ``conf/<root>.yaml``."""
    text = (resources.files("bebop.conf") / f"{root}.yaml").read_text()
    defaults = yaml.safe_load(text)["defaults"]
    return {group: choice for entry in defaults if isinstance(entry, dict) for group, choice in entry.items()}


def _model_of(overrides: Sequence[str], root: str) -> list[str]:
    """Return the choice of the group ``model`` that a path alone implies: ``model.path=DIR`` means ``folder``.

    The choice brings the settings of ``conf/_of_model``: a learning rate for the built-in model spoils a real one.
    """
    parsed = [_read(override) for override in overrides]
    paths = [p.value() for p in parsed if p.key_or_group == GIVEN and not p.is_delete()]
    if not paths or "model" not in _choices(root) or any(p.key_or_group == "model" for p in parsed):
        return []
    return [f"model={paths[-1] if paths[-1] in BUILT_IN else 'folder'}"]


def model_defaults(config: JobConfig) -> dict[str, Any]:
    """Return the settings that this job still has from its choice of model."""
    theirs, now = of_model(config.model.path), _flat(plain(config))
    return {name: value for name, value in theirs.items() if now[name] == value}


def of_model(path: str, root: str = "config") -> dict[str, Any]:
    """Return the settings in ``conf/_of_model`` that go with a choice of model, by name, for ``conf/<root>.yaml``."""
    folder = resources.files("bebop.conf") / "_of_model"
    file = (folder if root == "config" else folder / root) / f"{path if path in BUILT_IN else 'folder'}.yaml"
    tree = OmegaConf.to_container(OmegaConf.create(file.read_text() if file.is_file() else ""))
    assert isinstance(tree, dict)
    return _flat({str(name): value for name, value in tree.items()})


def _flat(tree: dict[str, Any], where: str = "") -> dict[str, Any]:
    """Return nested mappings as one, by full names."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= _flat(value, f"{where}{name}.") if isinstance(value, dict) else {f"{where}{name}": value}
    return found


# ---- checks of overrides


def _read(override: str) -> Override:
    """Return one override, parsed; raise a short ``UserError`` in place of Hydra's long messages."""
    try:
        parsed = OverridesParser.create().parse_override(override)
    except (HydraException, ValueError) as error:  # ValueError: a number of more digits than Python reads
        override = override if len(override) < 100 else override[:100] + "..."
        how = "give GROUP=CHOICE or GROUP.NAME=VALUE, and quotes around a VALUE that holds = { or ["
        raise UserError(f"{override!r} cannot be read: {how}") from error
    name, choices = parsed.key_or_group, groups()
    if parsed.package is not None:
        raise UserError(f"{override} is not possible: a group stays where it is; leave out @{parsed.package}")
    if not name:
        raise UserError(f"{override!r} cannot be read: there is no name before the =")
    if parsed.is_sweep_override():
        raise UserError(f"{override} is not possible: give one value; a list is written [1,2], a text in quotes")
    if name in choices and not parsed.is_delete() and parsed.value() not in choices[name]:
        close = similar(str(parsed.value()), choices[name])
        raise UserError(f"{override} is not possible: {close}choose one of {', '.join(choices[name])}")
    return parsed


def _check_names(parsed: Sequence[Override], root: str) -> None:
    """Raise ``UserError`` for the first override of a missing setting, with the existing ones."""
    chosen = [p.input_line or "" for p in parsed if p.key_or_group in groups()]
    known: Any = OmegaConf.to_container(_compose(tuple(chosen), root))
    elsewhere = {one.name: one.only for one in settings(ROOTS[root]) if one.only}
    for override in parsed:
        if override.is_add():
            continue
        at, path = known, override.key_or_group.split(".")
        for depth, name in enumerate(path):
            where = ".".join(path[:depth])
            if not isinstance(at, dict):
                raise UserError(f"{override.key_or_group}: no such setting; {where} is a single value")
            if name not in at:
                there = f"{where} has {', '.join(at) or 'none'}" if where else f"the groups are {', '.join(at)}"
                new = f" (+{override.input_line} adds one)" if where == "task.args" else ""
                if choice := elsewhere.get(override.key_or_group):
                    raise UserError(f"{override.key_or_group}: no such setting; it goes with {path[0]}={choice}")
                close = similar(override.key_or_group, [*_names(known), *elsewhere])
                raise UserError(f"{override.key_or_group}: no such setting; {close}{there}{new}")
            at = at[name]


def _names(tree: dict[str, Any], where: str = "") -> Iterator[str]:
    """Yield the full name of every group and setting in nested mappings."""
    for name, value in tree.items():
        yield f"{where}{name}"
        if isinstance(value, dict):
            yield from _names(value, f"{where}{name}.")


# ---- saved overrides, and their merge in a resume


def as_yaml(config: Any) -> str:
    """Return a configuration dataclass as YAML."""
    return yaml.safe_dump(plain(config), sort_keys=False)


def write_down(config: Any, overrides: Sequence[str], folder: Path, section: str = "") -> None:
    """Write the configuration and the overrides into the run folder, for readers and for a resume.

    Call it after all checks of the configuration. The day on which the run began is written too, if its model's chat
    template prints one: another day would be composed in a resume.
    """
    now = [f"{section}{name}" for name in ("dir", "resume", "trust")]  # settings of this call alone
    kept = [o for o in overrides if _read(o).key_or_group not in now]
    if config.model.date != "auto" and "model.date" not in [_read(o).key_or_group for o in kept]:
        kept.append(f"model.date={config.model.date}")
    text = json.dumps(kept) + "\n"
    write_text(folder / CONFIG, as_yaml(config))
    sign(folder, text)
    write_text(folder / OVERRIDES, text)


def resumed_overrides(
    overrides: Sequence[str], root: str = "config", section: str = "", apart: str | None = None
) -> list[str]:
    """Return the overrides of the resumed run followed by ``overrides``; for a new run only ``overrides``.

    Args:
        overrides: overrides of this call, in any spelling that Hydra takes.
        root: name of their configuration in ``conf/``.
        section: section that holds ``dir`` and ``resume``; it ends in a dot unless it is empty.
        apart: prefix of overrides that belong to another configuration: they are merged, but not composed.
    """
    parsed = [_read(override) for override in overrides]
    own = [p for p in parsed if apart is None or not p.key_or_group.startswith(apart)]
    folder = _resumed_folder(own, root, section)
    if folder is None or not (folder / OVERRIDES).is_file():
        return list(overrides)
    merged = merge_overrides(_saved(folder / OVERRIDES), overrides, root)
    kept = [p for p in map(_read, merged) if apart is None or not p.key_or_group.startswith(apart)]
    if _resumed_folder(kept, root, section) != folder:
        raise UserError(
            f"{section}dir is {str(folder)!r} before the saved settings are read and another folder afterwards: "
            f"give {section}dir and {section}resume as they are, without references to other settings"
        )
    return merged


def _resumed_folder(parsed: Sequence[Override], root: str, section: str) -> Path | None:
    """Return the folder of the run that these overrides resume, as Hydra reads them; None for a new run.

    Other settings may be wrong, or valid only together with the saved ones. If all overrides cannot be composed, only
    those of ``dir`` and ``resume`` are.
    """
    names = [f"{section}dir", f"{section}resume"]
    about = [p.input_line or "" for p in parsed if p.key_or_group in names]
    for chosen in ([p.input_line or "" for p in parsed], about):
        try:
            config = _compose(tuple(chosen), root)
            folder, resume = (OmegaConf.select(config, name) for name in names)
        except (HydraException, OmegaConfBaseException):
            continue
        return Path(folder) if resume is True and isinstance(folder, str) else None
    return None  # composing all overrides reports the mistake


def trusted(given: Sequence[str], section: str = "") -> bool:
    """Return whether this call trusts the folder that it resumes; settings in the folder do not count."""
    return any(p.key_or_group == f"{section}trust" and p.value() is True for p in map(_read, given))


def _saved(file: Path) -> list[str]:
    """Return the overrides that a run was started with; raise ``UserError`` if the file is damaged."""
    try:
        overrides = parse_json(file.read_bytes())
        if not isinstance(overrides, list) or not all(isinstance(override, str) for override in overrides):
            raise ValueError
    except ValueError:
        raise UserError(f"{file} is corrupt: give the list of settings that the run was started with") from None
    return overrides


def merge_overrides(saved: Sequence[str], new: Sequence[str], root: str = "config") -> list[str]:
    """Return the overrides of a run and those of its resume as one list.

    The rule is Hydra's own: all in one line, the old ones first, later ones win. Three cases need a correction: a name
    given twice where Hydra takes it once; a saved deletion before a new value; and values in a newly chosen group,
    which belong to the former choice.
    """
    old, now, choices = [_read(o) for o in saved], [_read(o) for o in new], _choices(root)
    before = choices | {o.key_or_group: o.value() for o in old if o.key_or_group in choices}
    after = {o.key_or_group: o.value() for o in now if o.key_or_group in choices and not o.is_delete()}
    changed = tuple(f"{group}." for group, choice in after.items() if str(choice) != str(before[group]))
    kept = [
        o.input_line or ""
        for o in old
        if o.key_or_group not in after
        and not o.key_or_group.startswith(changed)
        and not any(_replaces(n, o) for n in now if n.key_or_group == o.key_or_group)
    ]
    return [*kept, *new]


def _replaces(new: Override, old: Override) -> bool:
    """Return whether a new override of the same name cancels an old one, or cannot stand beside it."""
    if new.input_line == old.input_line:
        return True
    if isinstance(new.value(), dict) and isinstance(old.value(), dict):
        return False  # mappings are merged
    adds = new.is_add() or new.is_force_add()
    if old.is_delete():
        return not adds  # a plain value needs the name, which the deletion takes away
    if old.is_add() or old.is_force_add():
        return adds  # a plain value, and a deletion, need the name that the old one adds
    return not new.is_delete()
