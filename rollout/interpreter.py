"""Faster runs of Triton's interpreter on machines without a GPU, with the same results of vLLM's and SGLang's kernels.

It changes Triton in this process, for good: for tests, and for engines on a CPU.
"""

import dataclasses
import importlib
from typing import Any

import numpy as np


def quicken() -> None:
    """Make kernels run faster in Triton's interpreter, which must be selected already. A second call does nothing."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    if hasattr(interpreter._patch_lang, "once"):
        return
    _patch_once(interpreter)
    _draw_by_numpy(interpreter)


def _patch_once(interpreter: Any) -> None:
    """Leave Triton's language patched and integers unchecked; this saves half of the time.

    Nothing is compiled here, so the language need not be restored.
    """
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    language = importlib.import_module("triton.language")
    patch, patched = interpreter._patch_lang, set[tuple[int, ...]]()

    def patch_lang(function: Any) -> Any:
        used = {id(value) for value in function.__globals__.values() if value is language or value is language.core}
        if (key := tuple(sorted(used))) not in patched:
            patched.add(key)
            patch(function)  # its return value would restore the language
        return interpreter._LangPatchScope()

    patch_lang.once = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch_lang


def _draw_by_numpy(interpreter: Any) -> None:
    """Run the rounds of Philox as six arrays each instead of a hundred; saves over half of a draw's time.

    The numbers are the same to the bit.
    """
    language = importlib.import_module("triton.language")
    random: Any = importlib.import_module("triton.language.random")
    own, word = random.philox_impl, np.uint64(0xFFFFFFFF)

    def philox_impl(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any, n_rounds: Any = 10) -> Any:
        if c0.dtype.scalar != language.uint32:
            return own(c0, c1, c2, c3, k0, k1, n_rounds)
        a, b, c, d, key0, key1 = (np.asarray(x.handle.data).astype(np.uint64) for x in (c0, c1, c2, c3, k0, k1))
        for _ in range(int(getattr(n_rounds, "value", n_rounds))):
            high, low = np.uint64(0xCD9E8D57) * c, np.uint64(0xD2511F53) * a
            a, b = (high >> np.uint64(32)) ^ b ^ key0, high & word
            c, d = (low >> np.uint64(32)) ^ d ^ key1, low & word
            key0, key1 = (key0 + np.uint64(0x9E3779B9)) & word, (key1 + np.uint64(0xBB67AE85)) & word
        shape = np.broadcast_shapes(a.shape, np.asarray(c0.handle.data).shape)
        made = (np.broadcast_to(x, shape).astype(np.uint32) for x in (a, b, c, d))
        return tuple(language.tensor(interpreter.TensorHandle(x, language.uint32), c0.type) for x in made)

    random.philox_impl = philox_impl
