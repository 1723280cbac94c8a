"""Every command of the documents that starts a job of verl composes with verl's configuration."""

from collections.abc import Iterator
from typing import Any

import pytest

from bebop.verl_job.run import MAIN, command_line
from bebop.verl_job.settings import parse
from tests.documents.commands import commands
from tests.documents.pages import COMMANDS, blocks, pages
from tests.integration.verl.test_compose import composed
from tests.tree import ROOT

pytestmark = pytest.mark.smoke("documents")


def jobs() -> Iterator[tuple[str, list[str]]]:
    """Where it stands, and the arguments of ``verl.trainer.main_ppo``."""
    for page in pages():
        for block in blocks(page, (ROOT / page).read_text()):
            for words in commands(block.text) if block.language in COMMANDS else ():
                if MAIN in words:
                    yield str(block), words[words.index(MAIN) + 1 :]
                elif "runtime=verl" in words:
                    rest = words[words.index("bebop.run") + 1 :]
                    yield str(block), command_line([word for word in rest if word != "runtime=verl"])


JOBS = list(jobs())


def test_the_documents_have_jobs_of_verl() -> None:
    assert len(JOBS) >= 5


@pytest.mark.parametrize(("where", "arguments"), JOBS, ids=[where for where, _ in JOBS])
def test_a_job_composes(where: str, arguments: list[str]) -> None:
    [group] = [word.removeprefix("+bebop=") for word in arguments if word.startswith("+bebop=")]
    rest = [word for word in arguments[2:] if "=" in word and not word.startswith("+bebop=")]
    config: Any = composed(group, *[word.replace("$PWD", "") for word in rest])
    assert parse(config.bebop)
