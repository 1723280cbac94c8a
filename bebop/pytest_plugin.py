"""pytest plug-in: the fixture ``certify_engine`` turns an engine's certificate of exactness into a test of its project.

``pytest_plugins = ["bebop.pytest_plugin"]`` in a test file, or ``pytest -p bebop.pytest_plugin``, loads it. It is no
entry point: pytest would rewrite the asserts of all of bebop in every run. Nothing heavy is imported before a test
requests the fixture.
"""

import contextlib
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from bebop.certify.certificate import Certificate

QUIET = ("progress=false",)  # default, which a test may override


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--certify-dir``."""
    group = parser.getgroup("bebop", "certificates of exactness")
    group.addoption("--certify-dir", type=Path, help="folder for certificate.json and report.html, one for each test")


@pytest.fixture
def certify_engine(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., "Certificate"]:
    """Return ``certified(engine, model, *overrides)``, which certifies an engine; ``.require_pass()`` fails the test if
    needed.

    ``engine``: vLLM's ``LLM``, SGLang's ``Engine``, the URL of a server, a function of prompts, seeds and a length, or
    None for the embedded engine. ``model``: the Hugging Face folder that it serves, ``tiny`` for the built-in one.
    ``overrides``: settings of ``python -m bebop.certify``, such as ``quick=true`` or ``sampling.top_p=0.9``.

    Certificates go to ``--certify-dir``, or to the folder of the test.
    """

    def certified(engine: Any, model: str | Path, *overrides: str) -> "Certificate":
        from bebop.certify.offline import live_engine
        from bebop.certify.run import make_run
        from bebop.config.compose import certify_config

        chosen = ["model=tiny"] if str(model) == "tiny" else ["model=folder", f"model.path={model}"]
        if isinstance(engine, str):
            chosen += ["engine.name=openai", f"engine.url={engine}"]
        config = certify_config([*chosen, *QUIET, *overrides])
        there = None if engine is None or isinstance(engine, str) else live_engine(engine)
        with contextlib.ExitStack() as stack:
            certificate = make_run(config, stack, there).run()
        folder = _free(request.config.getoption("--certify-dir", default=None) or tmp_path, request.node.name)
        folder.mkdir(parents=True)
        certificate.write(folder)
        print(certificate.sentence, *certificate.scope, _page(folder, certificate), sep="\n")
        return certificate

    return certified


def _page(folder: Path, certificate: "Certificate") -> str:
    """Write the page of a certificate and return its path; without plotly return why there is none."""
    if find_spec("plotly") is None:
        return f"no page in {folder}: plotly is not installed"
    from bebop.certify.report import write_page

    return str(write_page(folder, certificate))


def _free(parent: Path, name: str) -> Path:
    """Return a folder that does not exist yet: a test may create several certificates, and may be repeated."""
    stem = re.sub(r"[^\w.-]+", "-", name).strip("-")
    taken = 0
    while (folder := parent / (stem if not taken else f"{stem}-{taken + 1}")).exists():
        taken += 1
    return folder
