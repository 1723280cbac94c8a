"""Faults in what plain decoding is held against: bytes, operations, calls."""

from tests.mutants.fault import fault

FILE, ROOFS, HERE = "benchmarks/bound.py", "benchmarks/roofs.py", "benchmarks/test_bound.py"

FAULTS = (
    fault("bound/one-matrix-a-shape", FILE, "layers * shapes.count(shape)", "layers", HERE),
    fault("bound/head-left-out", FILE, "matrices.get(head, 0) + 1", "matrices.get(head, 0)", HERE),
    fault("bound/keys-without-values", FILE, "return 2 * self.layers * self.kv", "return self.layers * self.kv", HERE),
    fault("bound/heads-of-the-cache", FILE, "self.layers * self.heads *", "self.layers * self.kv_heads *", HERE),
    fault("bound/cache-of-one-row", FILE, "BYTES * batch * work.cache", "BYTES * work.cache", HERE),
    fault("bound/the-higher-roof", FILE, '"roof": batch / max(', '"roof": batch / min(', HERE),
    fault(
        "bound/narrow-has-other-layers",
        FILE,
        "config.head_dim, config.hid",
        "config.num_hidden_layers = 1\n    config.head_dim, config.hid",
        HERE,
    ),
    fault(
        "bound/narrow-is-wide", FILE, "config.intermediate_size, config.vocab_size = INNER, VOCABULARY", "pass", HERE
    ),
    fault(
        "bound/prompts-count-twice",
        FILE,
        "    engine.step()\n    engine.step()\n    entries",
        "    engine.step()\n    entries",
        HERE,
    ),
    fault("bound/seconds-of-all-calls", ROOFS, "min(best, spent / calls)", "min(best, spent)", HERE),
    fault("bound/half-the-operations", ROOFS, "2 * rows * outputs * inputs", "rows * outputs * inputs", HERE),
)
