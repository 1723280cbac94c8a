"""Judges the files of an episode of ``bugfix``, in a sandbox of its own.

Hidden tests are calls and what they return. Only the calls are put into the sandbox, and only now; a program there
makes them and writes down what came of each. The comparison is made here: what the calls should return is never where
code of a model runs, so it can neither be read nor can a verdict be forged. Whatever the code does to the program, to
Python or to the output, it has to write the right values.
"""

import json
from collections.abc import Mapping, Sequence

from bebop.tasks.environments.sandbox import PYTHON, Sandbox

# Writes a line for each call. Files of the package come first on the path, so they may hide anything but what is
# imported here already; all they get from it is another way to write a line.
PROGRAM = """
import ast, importlib, json, os, sys
output = os.dup(1)
nothing = os.open("/dev/null", os.O_WRONLY)
os.dup2(nothing, 1)
os.dup2(nothing, 2)
sys.path.insert(0, "/box")
for module, function, arguments in json.loads(sys.argv[1]):
    try:
        result = repr(getattr(importlib.import_module(module), function)(*ast.literal_eval(arguments)))
    except Exception as error:
        result = "raised " + type(error).__name__
    os.write(output, json.dumps(result).encode() + b"\\n")
"""


def passed(sandbox: Sandbox, files: Mapping[str, str], hidden: Sequence[Sequence[str]]) -> int:
    """How many of the hidden tests (module, function, arguments, result) the files pass; ``SandboxLost``."""
    calls = json.dumps([[module, function, arguments] for module, function, arguments, _ in hidden])
    # Not -I, which would leave the order of sets to chance: what fails with a command has to fail here.
    ran = sandbox.run([PYTHON, "-sSP", "-c", PROGRAM, calls], files)
    lines = ran.output.splitlines()
    if len(lines) > len(hidden):
        return 0  # something else was written among them
    return sum(line == json.dumps(result) for line, (*_, result) in zip(lines, hidden, strict=False))
