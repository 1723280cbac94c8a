"""numpy's matrix products use the same kernels on every processor: their bits are compared (tests/digests).

OpenBLAS chooses its kernels by the processor when numpy is imported, which no test can do before this file.
"""

import os
import platform

if platform.machine() == "x86_64":
    os.environ.setdefault("OPENBLAS_CORETYPE", "Haswell")  # AVX2, which all that torch runs on have
