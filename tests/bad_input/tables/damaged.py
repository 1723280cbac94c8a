"""Damaged files, by command: kind -> (arguments, what the line must name).

Each row is a name of ``damaged_files`` or ``damaged_models``. Where the line names something else than the file, this
is below.
"""

from collections.abc import Iterable

from tests.bad_input.damaged_files import LOGS, METRICS, RESUMED, ROWS, RUN_FILES
from tests.bad_input.damaged_models import CONFIGS, TEXTS, WEIGHTS

NAMED = {
    "rows:long": "rollout.max_length",
    **{f"model:{name}": "chat template refuses" for name in TEXTS if name.startswith("template-")},
    "model:template-latin": "model-template-latin",
    "model:mtp-part": "MTP layer lacks",
    "model:mixtral": "MTP layer lacks",
    **{f"resumed:overrides-{name}": "overrides.json is corrupt" for name in ("torn", "empty", "object", "number")},
    **{f"resumed:overrides-{name}": "overrides.json is corrupt" for name in ("numbers", "latin", "deep")},
    "resumed:overrides-surrogate": "task.name=",
    "resumed:overrides-grammar": "trainer.lr={",
    **{f"resumed:config-{name}": "config.yaml is no configuration" for name in ("torn", "deep", "latin", "date")},
    **{f"resumed:config-{name}": "config.yaml is no configuration" for name in ("list", "python", "empty")},
    "resumed:config-missing": "config.yaml is missing",
    **{f"resumed:identity-{name}": "identity.json is corrupt" for name in ("torn", "number", "deep", "latin")},
    "resumed:identity-other": "the weights in model.path is not the one",
    "resumed:reward": "task.reward='reward.py:f'",
    "resumed:trusting": "task.reward='reward.py:f'",
    "resumed:address": "runtime.address='10.0.0.1:6379'",
    "resumed:temp": "runtime.temp_dir='/elsewhere'",
    "resumed:urls": "rollout.sglang.urls",
    "resumed:out": "out='/elsewhere'",
}
OF_RUN = ("address", "temp", "urls", "trusting")  # settings that only a run has
HEAD = ("mtp-shape", "mtp-part")
TOKENIZERS = [name for name in TEXTS if name.startswith(("tokenizer-", "template-"))]


def rows(given: str, kind: str, names: Iterable[str]) -> list[tuple[str, str]]:
    """One for each name, which stands in braces in ``given``."""
    return [
        (given.replace("{}", f"{{{kind}:{name}}}"), NAMED.get(f"{kind}:{name}", f"{kind}-{name}")) for name in names
    ]


RUN = {
    "questions": rows("task=file task.path={}", "rows", ROWS),
    "models": rows("model.path={}", "model", (*CONFIGS, *TEXTS, *WEIGHTS)),
    "resumes": rows("runtime.dir={} runtime.resume=true", "resumed", [name for name in RESUMED if name != "out"]),
}
ADAPT = {
    "questions": rows("data.source=file data.path={}", "rows", ("nul", "latin", "deep", "digits", "list", "half")),
    "models": rows("model.path={}", "model", [*list(CONFIGS)[::8], *HEAD]),
    "resumes": rows(
        "dir={} resume=true", "resumed",
        [name for name in RESUMED if name not in OF_RUN and not name.startswith(("config-", "identity-"))],
    ),
}  # fmt: skip
CERTIFY = {"models": rows("model.path={}", "model", TOKENIZERS)}
EXPORT = {"models": rows("--out new --model {}", "model", (*WEIGHTS, "weights-empty", "config-list"))}
REPORT = {
    "logs": rows("--from {}", "log", LOGS),
    "runs": [
        *rows("{}", "metrics", METRICS),
        *rows("{}", "run", [name for name in RUN_FILES if not name.startswith("store-")]),
    ],
}
VIEW = {"runs": rows("--no-browser {}", "run", [name for name in RUN_FILES if name.startswith("store-")])}
