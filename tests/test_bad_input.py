"""Whatever is wrong on a command line ends in one line and exit code 2, and leaves nothing on the disk.

Every command has its table: arguments, and what the line must name. ``{here}`` is the working folder, which holds what
``world`` puts there.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bebop import adapt, run
from bebop.bench import __main__ as bench
from bebop.certify import __main__ as certify
from bebop.dashboards import __main__ as dashboards
from bebop.model.checkpoint import resolve
from bebop.report import __main__ as report
from recipes.reproduce import __main__ as reproduce
from recipes.tiny import __main__ as tiny
from tests.commands import error_of, on_disk

COMMANDS = {
    "run": run.main, "adapt": adapt.main, "bench": bench.main, "report": report.main,
    "dashboards": dashboards.main, "reproduce": reproduce.main, "tiny": tiny.main, "certify": certify.main,
}  # fmt: skip

RUN = [
    # names and grammar
    ("nonsense=1", "nonsense"), ("trainer.foo=1", "trainer.foo"), ("+trainer.foo=1", "trainer.foo"),
    ("task=nonsense", "task=nonsense"), ("foo", "'foo'"), ("=3", "'=3'"), ("trainer.lr={", "trainer.lr={"),
    ("trainer.lr=${nope}", "${nope}"), ("trainer.steps=1,2", "trainer.steps=1,2"), ("--config", "--config"),
    ("~trainer.lr.x", "trainer.lr.x"), ("trainer@a=default", "trainer@a"), ("''", "''"), ("trainer=", "trainer="),
    ("+task=gcd", "+task=gcd"), ("~task=gcd", "task=gcd"), ("--help nope", "nope"),
    ("runtime=verl bebop=nope", "verl"),
    # types
    ("trainer.steps=2.5", "trainer.steps=2.5"), ("trainer.steps=two", "trainer.steps='two'"),
    ("trainer.steps=null", "trainer.steps=None"), ("trainer.steps=[1]", "trainer.steps=[1]"),
    ("trainer.lr=true", "trainer.lr=True"), ("trainer.lr=", "trainer.lr=''"), ("task.args=5", "task.args"),
    ("rollout.sampling.stop=x", "rollout.sampling.stop='x'"), ("model.init_mtp=1", "model.init_mtp=1"),
    ("trainer.betas=[0.9]", "trainer.betas"), ("monitor.wandb=maybe", "monitor.wandb='maybe'"),
    ("rollout=sglang rollout.sglang.urls=[1]", "rollout.sglang.urls"), ("model=5", "model=5"),
    # huge, NaN, infinite, negative, empty
    ("trainer.steps=" + "9" * 30, "trainer.steps"), ("trainer.steps=" + "9" * 5000, "trainer.steps"),
    ("trainer.lr=nan", "trainer.lr=nan"), ("trainer.lr=-inf", "trainer.lr=-inf"), ("trainer.lr=1" + "0" * 400, "lr"),
    ("algorithm.kl_coefficient=inf", "algorithm.kl_coefficient=inf"), ("algorithm.tis_cap=nan", "tis_cap=nan"),
    ("algorithm.clip_high=nan", "clip_high=nan"), ("decoding.cost_ratio=inf", "decoding.cost_ratio=inf"),
    ("rollout.sampling.temperature=1e-30", "temperature=1e-30"), ("decoding.draft_temperature=1e-9", "1e-09"),
    ("rollout.sampling.top_p=nan", "rollout.sampling.top_p=nan"),
    ("rollout=sglang rollout.sglang.timeout=inf", "timeout=inf"),
    ("rollout.workers=100000", "rollout.workers=100000"), ("trainer.ranks=100000", "trainer.ranks=100000"),
    ("trainer.threads=1000000", "trainer.threads=1000000"), ("trainer.group_size=1000000", "trainer.group_size"),
    ("rollout.slots=1000000", "rollout.slots=1000000"), ("trainer.groups_per_step=100000000", "groups_per_step"),
    ("rollout.max_length=1000000", "rollout.max_length=1000000"), ("rollout.staleness=-1", "rollout.staleness=-1"),
    ("rollout.sampling.max_new_tokens=512", "rollout.max_length=512"), ("runtime.dir=''", "runtime.dir=''"),
    ("runtime.address=''", "runtime.address=''"), ("runtime.temp_dir=''", "runtime.temp_dir=''"),
    ("model.path=''", "model.path=''"), ("task.name=''", "task.name=''"), ("task.seed=-1", "task.seed=-1"),
    ("task.reward=''", "task.reward=''"), ("rollout=sglang rollout.sglang.cache_tokens=0", "cache_tokens=0"),
    # choices, also those of parts that are off
    ("cotrain.head.objective=xyz", "cotrain.head.objective='xyz'"), ("cotrain.head.depth=0", "cotrain.head.depth=0"),
    ("cotrain.mode=sometimes", "cotrain.mode='sometimes'"), ("decoding.system=warp", "decoding.system='warp'"),
    ("decoding=autoregressive decoding.draft_temperature=-1", "decoding.draft_temperature=-1"),
    ("decoding.draft_tokens=0", "decoding.draft_tokens=0"), ("rollout.engine=vllm", "rollout.engine='vllm'"),
    ("rollout=sglang rollout.sglang.pause=later", "rollout.sglang.pause='later'"),
    ("rollout=sglang rollout.sglang.urls=[ftp://a]", "ftp://a"),
    ("rollout=sglang rollout.sglang.urls=['http://']", "http://"),
    ("rollout=sglang rollout.sglang.adaptive_steps=no.json", "'no.json'"),
    ("rollout=sglang rollout.sglang.transfer=disk", "rollout.sglang.folder=None"),
    ("+task.path=no.jsonl", "task.path='no.jsonl'"),
    ("+task.path=rows.txt", "task.path='rows.txt'"), ("model.dtype=float16", "model.dtype='float16'"),
    ("model.device=gpu", "model.device='gpu'"), ("model.device=cuda:x", "model.device='cuda:x'"),
    # together
    ("rollout.sampling.top_k=5", "'top_k': 5"), ("monitor.drift=false monitor.actions=true", "monitor.actions=True"),
    ("monitor.drift=false cotrain=auto", "cotrain.mode='auto'"), ("algorithm.minibatches=5", "algorithm.minibatches=5"),
    ("runtime.resume=true", "runtime.resume=True"), ("runtime.metrics_port=6001 runtime.port=6001", "=6001"),
    # what is on this machine
    ("model.device=cuda:99", "model.device='cuda:99'"), ("model=folder", "model.path"),
    ("model=folder model.path=missing", "model.path='missing'"), ("model.path={here}/empty", "/empty'"),
    ("model.path={here}/torn", "/torn'"), ("model.path={here}/headless", "/headless'"),
    ("model.path={here}/strange", "/strange'"), ("model.path={here}/unread", "/unread'"),
    ("model.path={here}/wordless", "/wordless'"), ("model.path={here}/large", "/large'"),
    ("rollout=sglang", "SGLang"), ("monitor.wandb=true", "monitor.wandb=True"),
    ("runtime.port={port}", "runtime.port={port}"), ("runtime.metrics_port={port}", "runtime.metrics_port={port}"),
    ("runtime.dashboard=true runtime.dashboard_port={port}", "runtime.dashboard_port={port}"),
    ("runtime.dir=rows.txt", "/rows.txt'"), ("runtime.dir=rows.txt/run", "/rows.txt/run'"),
    ("runtime.dir=" + "x" * 300, "runtime.dir="), ("runtime.dir={here}/used", "/used'"),
    ("runtime.dir={here}/used runtime.resume=true", "/used"), ("runtime.dir={here}/no runtime.resume=true", "/no"),
    ("runtime.temp_dir=rows.txt", "/rows.txt'"), ("runtime.temp_dir={here}/" + "x" * 90, "runtime.temp_dir="),
    # the task
    ("task=file", "task.path=None"), ("task=file task.path=no.jsonl", "'no.jsonl'"),
    ("task=file task.path=empty.jsonl", "'empty.jsonl'"), ("task=file task.path=torn.jsonl", "torn.jsonl"),
    ("task=file task.path=torn.parquet", "'torn.parquet'"), ("task=file task.path=rows.jsonl task.prompt_key=q", "'q'"),
    ("task=file task.path=rows.jsonl task.answer_key=a", "task.answer_key='a'"), ("task.name=warp", "'warp'"),
    ("task.args.terms=1", "task.args.terms"), ("+task.args.terms=1", "task.args.terms=1"),
    ("task.args.min_terms=-3", "'min_terms': -3"), ("+task.args.seed=3", "task.args.seed=3"),
    ("task.reward=no.such.function", "'no.such.function'"), ("task.reward=reward.py:nope", "'nope'"),
    ("task.reward=missing.py:f", "missing.py"), ("task.reward=raises.py:f", "raises.py"),
    ("rollout.max_length=161", "rollout.max_length"),
]  # fmt: skip

ADAPT = [
    ("nonsense=1", "nonsense"), ("head.foo=1", "head.foo"), ("--config", "--config"), ("steps=5", "steps"),
    ("rollout=torch", "rollout=torch"), ("--help nope", "nope"),
    ("head.objective=xyz", "head.objective='xyz'"), ("train.warm_objective=xyz", "train.warm_objective='xyz'"),
    ("train.warm_steps=1000", "train.warm_steps=1000"), ("train.steps=0", "train.steps=0"),
    ("train.threads=1000000", "train.threads=1000000"), ("train.cache_mb=-1", "train.cache_mb=-1"),
    ("train.eval_every=-1", "train.eval_every=-1"), ("train.keep=0", "train.keep=0"), ("head.lr=nan", "head.lr=nan"),
    ("head.betas=[1,1]", "head.betas"), ("head.max_grad_norm=0", "head.max_grad_norm=0"), ("seed=-1", "seed=-1"),
    ("data.sequences=0", "data.sequences=0"), ("data.slots=0", "data.slots=0"),
    ("data.source=web", "data.source='web'"),
    ("data.path=no.jsonl", "data.path='no.jsonl'"), ("data.source=file", "data.path=None"),
    ("data.source=file data.path=rows.txt", "data.path='rows.txt'"), ("data.max_length=160", "data.max_length=160"),
    ("data.max_length=1000000", "data.max_length=1000000"), ("data.slots=1000000", "data.slots=1000000"),
    ("data.sampling.top_p=0", "data.sampling.top_p=0"), ("data.sampling.min_p=0.5", "'min_p': 0.5"),
    ("data.sampling.temperature=0", "data.sampling.temperature=0"), ("data.prompt_key=''", "data.prompt_key=''"),
    ("evaluation.prompts=1", "evaluation.prompts=1"), ("evaluation.draft_tokens=0", "evaluation.draft_tokens=0"),
    ("task=nonsense", "nonsense"), ("task.name=warp", "'warp'"), ("resume=true", "resume=True"),
    ("model.path=missing", "'missing'"), ("model.path={here}/torn", "/torn'"), ("dir=rows.txt", "/rows.txt'"),
    ("out=rows.txt", "/rows.txt'"), ("dir=''", "dir=''"), ("out=''", "out=''"), ("dir={here}/used", "/used'"),
    ("model.device=cuda:99", "'cuda:99'"), ("dir={here}/no resume=true", "/no"),
    ("data.source=file data.path=rows.jsonl", "rows.jsonl"), ("out={tiny}", "out="),
]  # fmt: skip

BENCH = [
    ("", "kind"), ("nothing", "'nothing'"), ("rollout --foo", "--foo"), ("rollout --batches 0", "--batches: 0"),
    ("rollout --batches 1 -4", "-4"), ("rollout --batches", "--batches"), ("rollout --batches one", "'one'"),
    ("rollout --batches 100000000", "100000000"), ("rollout --rounds 0", "--rounds: 0"), ("sglang --rounds 0", "0"),
    ("rollout --waves 0", "--waves: 0"), ("rollout --threads 0", "--threads: 0"), ("kernels --threads -1", "-1"),
    ("rollout --draft-tokens 0", "--draft-tokens: 0"), ("rollout --draft-tokens 99", "99"),
    ("rollout --systems warp", "'warp'"), ("rollout --dtype float16", "'float16'"), ("rollout --model no", "'no'"),
    ("rollout --device cuda:99", "'cuda:99'"), ("rollout --device tpu", "'tpu'"),
    ("--out rows.txt rollout", "rows.txt"),
    ("rollout --model {here}/torn", "/torn'"), ("rollout --model {here}/headless", "/headless'"),
    ("kernels --device tpu", "'tpu'"), ("loop --steps 3", "--steps: 3"), ("loop --rounds 0", "--rounds: 0"),
    ("loop nonsense=1", "nonsense"), ("loop trainer.lr=-1", "trainer.lr=-1"), ("loop task.name=warp", "'warp'"),
    ("loop rollout.max_length=1000000", "1000000"), ("monitor --rounds 1", "--rounds: 1"), ("monitor x=1", "x"),
    ("monitor rollout.max_length=1000000", "1000000"), ("monitor decoding=autoregressive", "autoregressive"),
    ("sglang --memory-fraction 2", "memory_fraction=2.0"), ("sglang --memory-fraction x", "'x'"),
    ("sglang --cache-tokens 0", "--cache-tokens: 0"), ("sglang --every -1", "-1"), ("sglang", "SGLang"),
]  # fmt: skip

REPORT = [
    ("", "RUN"), ("missing", "missing"), ("{here}/empty", "metrics.jsonl"),
    ("{here}/used --out no/x.html", "no/x.html"),
    ("{here}/used --from rows.jsonl", "RUN"), ("--from missing.jsonl", "missing.jsonl"), ("--from torn.jsonl", "torn"),
    ("--from rows.jsonl --map nonsense", "nonsense"), ("{here}/used --map a=b", "RUN"), ("--foo", "--foo"),
    ("--from rows.jsonl", "rows.jsonl"), ("{here}/garbled", "metrics.jsonl"), ("{here}/used --out {here}", "{here}"),
]  # fmt: skip

DASHBOARDS = [
    ("--session missing", "missing"), ("--staleness -1", "-1"), ("--staleness x", "'x'"), ("--foo", "--foo"),
    ("--session {here} --out rows.txt", "rows.txt"), ("stray", "stray"), ("--session rows.txt", "rows.txt"),
    ("--export rows.txt", "rows.txt"),
]  # fmt: skip

RECIPES = [
    ("reproduce", "--only nothing", "'nothing'"), ("reproduce", "--fast", "--fast"), ("reproduce", "--only", "--only"),
    ("tiny", "--steps 0", "--steps: 0"), ("tiny", "--head-steps -1", "-1"), ("tiny", "--threads 0", "--threads: 0"),
    ("tiny", "--seed -1", "-1"), ("tiny", "--out rows.txt", "rows.txt"), ("tiny", "--foo", "--foo"),
    ("tiny", "--steps 1e3", "'1e3'"),
]  # fmt: skip

CERTIFY = [
    ("--fast", "--fast"), ("nonsense=1", "nonsense"), ("tokens=0", "tokens=0"), ("tokens=many", "tokens='many'"),
    ("engine.name=vllm", "engine.name='vllm'"), ("engine.name=sglang", "engine.url=None"),
    ("engine.name=openai engine.url=localhost:30000", "engine.url='localhost:30000'"),
    ("engine.name=function", "engine.function=None"), ("engine.name=function engine.function=len", "'len'"),
    ("engine.name=function engine.function=no.such:thing", "no.such"),
    ("engine.name=sglang engine.url=http://127.0.0.1:9", "http://127.0.0.1:9"),
    ("engine.name=openai engine.url=http://127.0.0.1:9", "http://127.0.0.1:9"),
    ("reference=server", "reference='server'"), ("reference=other", "reference='other'"),
    ("logprobs=nat", "logprobs='nat'"), ("alpha=0", "alpha=0"), ("alpha=.5", "alpha=0.5"), ("alpha=nan", "alpha=nan"),
    ("limit_tv=0", "limit_tv=0"), ("stress=-1", "stress=-1"), ("stress=nan", "stress=nan"), ("cohort=3", "cohort=3"),
    ("cohort=0", "cohort=0"), ("sampling.temperature=0", "sampling.temperature=0"), ("seed=-1", "seed=-1"),
    ("max_length=100", "max_length=100"), ("first_prompt=-1", "first_prompt=-1"), ("decoding=pad", "'pad'"),
    ("decoding=bebop decoding.draft_tokens=0", "draft_tokens=0"), ("model.path=missing", "model.path='missing'"),
    ("task=file task.path=missing.jsonl", "missing.jsonl"), ("dir={here}/rows.txt/inside", "rows.txt/inside"),
]  # fmt: skip

ALL = [
    *(("run", given, names) for given, names in RUN),
    *(("adapt", given, names) for given, names in ADAPT),
    *(("bench", given, names) for given, names in BENCH),
    *(("report", given, names) for given, names in REPORT),
    *(("dashboards", given, names) for given, names in DASHBOARDS),
    *RECIPES,
    *(("certify", given, names) for given, names in CERTIFY),
]
QUICK = 10  # one in so many belongs to the quick tests
TABLE = [
    pytest.param(command, given, names, id=f"{command} {given[:60]}", marks=[pytest.mark.slow] if i % QUICK else [])
    for i, (command, given, names) in enumerate(ALL)
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with files and models that are wrong, each in its way."""
    here = tmp_path_factory.mktemp("bad") / "here"
    here.mkdir()
    for name, text in {
        "rows.txt": "text\n",
        "rows.jsonl": '{"question": "1+1", "answer": "2"}\n',
        "empty.jsonl": "",
        "torn.jsonl": '{"question": "1+',
        "torn.parquet": "PAR1",
        "reward.py": "def f(text, item):\n    return 0.0\n",
        "raises.py": "raise RuntimeError('no')\n",
    }.items():
        (here / name).write_text(text)
    (here / "used").mkdir()
    (here / "used" / "metrics.jsonl").write_text('{"step": 1}\n')
    (here / "garbled").mkdir()
    (here / "garbled" / "metrics.jsonl").write_text("nonsense\n{}\n")
    (here / "empty").mkdir()
    for name in ("torn", "headless", "strange", "unread", "wordless", "large"):
        shutil.copytree(resolve("tiny"), here / name)
    weights = here / "torn" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    without_head(here / "headless" / "model.safetensors")
    change(here / "strange" / "config.json", model_type="warp")
    (here / "unread" / "config.json").write_text("{")
    for file in (here / "wordless").glob("tokenizer*"):
        file.unlink()
    change(here / "large" / "config.json", vocab_size=4)
    return here


def without_head(file: Path) -> None:
    """Leave out the weights of the MTP head."""
    from safetensors.torch import load_file, save_file

    save_file({k: v for k, v in load_file(file).items() if "mtp" not in k}, file, metadata={"format": "pt"})


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A port that is taken."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.mark.parametrize(("command", "given", "names"), TABLE)
def test_a_mistake_is_one_line_and_nothing_is_written(
    command: str, given: str, names: str, world: Path, port: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    temp = tmp_path / "temp"
    temp.mkdir()
    monkeypatch.chdir(world)
    monkeypatch.setenv("TMPDIR", str(temp))
    monkeypatch.setattr(tempfile, "tempdir", None)
    filled = {"here": str(world), "port": str(port), "tiny": str(resolve("tiny"))}
    for name, value in filled.items():
        given, names = given.replace("{" + name + "}", value), names.replace("{" + name + "}", value)
    before = on_disk(world) | on_disk(temp)
    line = error_of(COMMANDS[command], given.split(), capsys)
    assert names in line and "Traceback" not in line, line
    assert on_disk(world) | on_disk(temp) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "given"),
    [
        ("bebop.run", "rollout.max_length=1000000"),
        ("bebop.adapt", "head.objective=xyz"),
        ("bebop.certify", "engine.name=sglang"),
        ("bebop.bench", "rollout --batches 0"),
        ("bebop.report", "missing"),
        ("bebop.dashboards", "--staleness -1"),
        ("recipes.reproduce", "--fast"),
        ("recipes.reproduce.boundary", "--fast"),
        ("recipes.tiny", "--steps 0"),
    ],
)
def test_as_a_process_of_its_own(module: str, given: str, tmp_path: Path) -> None:
    """With whatever its imports print and leave behind."""
    (tmp_path / "temp").mkdir()
    root = str(Path(__file__).resolve().parents[1])
    environment = os.environ | {"TMPDIR": str(tmp_path / "temp"), "PYTHONPATH": root}
    command = [sys.executable, "-m", module, *given.split()]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: "), done.stderr
    assert list(on_disk(tmp_path)) == [str(tmp_path / "temp")]
