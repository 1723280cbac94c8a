"""Damaged files, by command: kind -> (arguments, what the line must name). Each row is a name of ``..damage``."""

from tests.bad_input.damage import CONFIGS, LOGS, METRICS, RESUMED, ROWS, RUN_FILES, TEXTS, WEIGHTS

RUN = {
    "questions": [(f"task=file task.path={{rows:{name}}}", f"rows-{name}.jsonl") for name in ROWS],
    "models": [(f"model.path={{model:{name}}}", f"model-{name}") for name in (*CONFIGS, *TEXTS, *WEIGHTS)],
    "resumes": [(f"runtime.dir={{resumed:{name}}} runtime.resume=true", f"resumed-{name}") for name in RESUMED],
}
ADAPT = {
    "questions": [(f"data.source=file data.path={{rows:{name}}}", f"rows-{name}.jsonl") for name in ROWS],
    "models": [(f"model.path={{model:{name}}}", f"model-{name}") for name in CONFIGS],
    "resumes": [(f"dir={{resumed:{name}}} resume=true", f"resumed-{name}") for name in RESUMED],
}
CERTIFY = {
    "models": [(f"model.path={{model:{name}}}", f"model-{name}") for name in TEXTS],
}
EXPORT = {
    "models": [(f"--out new --model {{model:{name}}}", f"model-{name}") for name in WEIGHTS],
}
REPORT = {
    "logs": [(f"--from {{log:{name}}}", f"log-{name}") for name in LOGS],
    "runs": [
        *((f"{{metrics:{name}}}", f"metrics-{name}") for name in METRICS),
        *((f"{{run:{name}}}", f"run-{name}") for name in RUN_FILES),
    ],
}
VIEW = {
    "runs": [(f"--no-browser {{run:{name}}}", f"run-{name}") for name in RUN_FILES],
}
CONVERT = {
    "runs": [(f"{{resumed:{name}}}", f"resumed-{name}") for name in RESUMED],
}
