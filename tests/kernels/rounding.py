"""Triton's interpreter with the rounding of a device: to the nearest, ties to even."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import triton.language as tl


@contextmanager
def to_nearest() -> Iterator[None]:
    """Within this block fp32 becomes bf16 as on a device. The interpreter cuts bits off, whatever rounding is asked.

    Products of matrices in bf16 are computed in fp32; the interpreter multiplies the bits of their numbers instead.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    own, product = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def convert(data: Any, before: Any, after: Any, mode: object) -> Any:
        if (before, after) != (tl.float32, tl.bfloat16):
            return own(data, before, after, mode)
        bits = np.ascontiguousarray(data, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)

    def wide(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def multiply(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        return product(builder, wide(a), wide(b), *rest)

    with (
        mock.patch.object(interpreter, "_convert_float", convert),
        mock.patch.object(interpreter.InterpreterBuilder, "create_dot", multiply),
    ):
        yield
