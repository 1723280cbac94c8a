"""Faults in what vLLM is started with, refused, told and asked: arguments, weights, mends, statistics, self-test."""

from tests.mutants.fault import fault

ROOT = "bebop/rollout/vllm"
ARGUMENTS = "rollout/vllm/test_arguments.py"
CPU = "rollout/vllm/test_cpu.py"
PLUGIN = "rollout/vllm/test_plugin.py"
STARTUP = "rollout/vllm/test_startup.py"
STATS = "rollout/vllm/test_stats.py"
TRANSFER = "rollout/vllm/test_transfer.py"
SERVING = "rollout/vllm/test_serving.py"
SUFFIXES, TREE = "rollout/vllm/test_suffixes.py", f"{ROOT}/suffixes.py"
DRIVER = "recipes/verl/test_checks.py"
COLLECTION = "recipes/verl/test_collection.py"

FAULTS = (
    fault("vllm/told-without-its-prompt", TREE, "(*key[-LONGEST:], *answer)", "(*answer,)", SUFFIXES),
    fault("vllm/told-again-twice", TREE, "held.told == told", "False", SUFFIXES),
    fault(
        "vllm/told-beside-what-it-replaces",
        TREE,
        "            self._drop(key)\n        new",
        "            pass\n        new",
        SUFFIXES,
    ),
    fault("vllm/text-left-in-progress", TREE, "            self.cache.stop_request(name)\n", "", SUFFIXES),
    fault(
        "vllm/newest-text-goes",
        TREE,
        "self._drop(next(iter(self._held)))",
        "self._drop(next(reversed(self._held)))",
        SUFFIXES,
    ),
    fault("vllm/texts-without-bound", TREE, "while self.tokens > self.limit:", "while False:", SUFFIXES),
    fault(
        "vllm/text-counted-that-is-not-there", TREE, "if name not in self.cache.cached_requests:", "if False:", SUFFIXES
    ),
    fault(
        "vllm/nothing-told",
        "bebop/rollout/served_engine.py",
        "self.run(self.server.remember(prompt, answers))",
        "pass",
        "rollout/test_served_engine.py",
    ),
    fault(
        "vllm/history-as-if-sampled", f"{ROOT}/arguments.py", "if greedy and temperature != 0:", "if False:", ARGUMENTS
    ),
    fault("vllm/steps-to-nobody", f"{ROOT}/serving.py", "if one.request_id in steps:", "if False:", SERVING),
    fault(
        "vllm/steps-in-place-of-others",
        f"{ROOT}/serving.py",
        "{**(one.kv_transfer_params or {}), FIELD",
        "{FIELD",
        SERVING,
    ),
    fault(
        "vllm/sums-that-begin-again",
        f"{ROOT}/serving.py",
        'counts: StepCounts | None = getattr(state, "bebop_counts", None)',
        "counts = None",
        SERVING,
    ),
    fault(
        "vllm/ours-goes-further",
        f"{ROOT}/serving.py",
        "step = rest.pop(FIELD, None)",
        "step = rest.get(FIELD)",
        SERVING,
    ),
    fault("vllm/verl-silent", "bebop/verl_job/stats.py", "    if stats.cycles:\n", "    if False:\n", COLLECTION),
    fault(
        "vllm/verl-loses-others", "bebop/verl_job/stats.py", "if name != VLLM}, params", "if False}, params", COLLECTION
    ),
    fault(
        "vllm/verl-counts-alone",
        "bebop/verl_job/driver.py",
        "{EVERY: str(wanted.verify_every), DRAFTS",
        "{DRAFTS",
        DRIVER,
    ),
    fault(
        "vllm/verl-looks-ahead",
        "bebop/verl_job/checks.py",
        'not wanted.metrics or options.get("async_scheduling") is False',
        "True",
        DRIVER,
    ),
    fault("vllm/greedy-drafts", f"{ROOT}/hosting.py", '"probabilistic" if', '"greedy" if', ARGUMENTS),
    fault(
        "vllm/raw-logprobs",
        f"{ROOT}/arguments.py",
        '"logprobs_mode": "processed_logprobs"',
        '"logprobs_mode": "raw_logprobs"',
        ARGUMENTS,
    ),
    fault("vllm/room-without-the-head", f"{ROOT}/arguments.py", "* (layers + 1) // layers", "", ARGUMENTS),
    fault(
        "vllm/room-for-no-drafts", f"{ROOT}/arguments.py", "rollout.max_length + 1 + drafts", "64 + drafts", ARGUMENTS
    ),
    fault("vllm/adaptive-length", f"{ROOT}/hosting.py", 'system.length != "fixed"', "False", ARGUMENTS),
    fault("vllm/min-p-with-drafts", f"{ROOT}/arguments.py", "params.min_p > 0 and speculative", "False", ARGUMENTS),
    fault("vllm/temperature-that-it-raises", f"{ROOT}/arguments.py", "COLDEST = 0.01", "COLDEST = 0.001", ARGUMENTS),
    fault("vllm/versions-as-text", f"{ROOT}/arguments.py", "numbers < OLDEST", "numbers[:1] < OLDEST[:1]", ARGUMENTS),
    fault("vllm/head-in-the-target", f"{ROOT}/builder.py", '"target": names - head', '"target": names', ARGUMENTS),
    fault("vllm/head-that-is-not-there", f"{ROOT}/builder.py", "if system.head and mtp", "if mtp", ARGUMENTS),
    fault("vllm/part-of-a-model", f"{ROOT}/transfer.py", "self.names[role] - set(weights)", "set()", TRANSFER),
    fault(
        "vllm/one-model-of-two",
        f"{ROOT}/transfer.py",
        '(("target", load.target), ("draft", load.draft))',
        '(("target", load.target),)',
        TRANSFER,
    ),
    fault("vllm/folder-that-grows", f"{ROOT}/transfer.py", "self.versions.pop(0)", "self.versions.pop()", TRANSFER),
    fault("vllm/tables-that-stay", f"{ROOT}/tables.py", "        del TABLES[number]", "        pass", TRANSFER),
    fault("vllm/expansion-not-asked", f"{ROOT}/cpu.py", "self.own if self.works else", "self.own if True else", CPU),
    fault(
        "vllm/expansion-never-used",
        f"{ROOT}/cpu.py",
        "self.works = self._asked(x, cu_num_tokens)",
        "self.works = False",
        CPU,
    ),
    fault("vllm/expansion-replaces-nothing", f"{ROOT}/cpu.py", "x == replace_from", "x != x", CPU),
    fault("vllm/rows-of-another-request", f"{ROOT}/plugin.py", "at += one.drafted", "at += 1", PLUGIN),
    fault("vllm/weight-of-one", f"{ROOT}/plugin.py", "one.weight = steps.every", "one.weight = 1", PLUGIN),
    fault("vllm/greedy-measured", f"{ROOT}/plugin.py", "if not skip:", "if True:", PLUGIN),
    fault("vllm/bonus-counts-as-draft", f"{ROOT}/plugin.py", "(out >= 0).sum(-1) - 1", "(out >= 0).sum(-1)", PLUGIN),
    fault("vllm/kept-for-ever", f"{ROOT}/plugin.py", "kept, self.kept = self.kept, {}", "kept = self.kept", PLUGIN),
    fault(
        "vllm/accepted-behind-the-end", f"{ROOT}/stats.py", "min(verified.accepted, tokens)", "verified.accepted", STATS
    ),
    fault("vllm/prefill-as-a-cycle", f"{ROOT}/stats.py", "if self.prefill and", "if False and", STATS),
    fault("vllm/reached-beyond-the-drafts", f"{ROOT}/stats.py", "min(kept + 1, verified.drafted)", "kept + 1", STATS),
    fault("vllm/measures-unweighted", f"{ROOT}/stats.py", "verified.weight * np", "np", STATS),
    fault("vllm/recomputed-as-cycles", f"{ROOT}/stats.py", "        self.prefill = True", "        pass", STATS),
    fault(
        "vllm/nan-is-a-temperature",
        f"{ROOT}/startup.py",
        "not abs(temperature * inverse - 1) <= TOLERANCE",
        "abs(temperature * inverse - 1) > TOLERANCE",
        STARTUP,
    ),
    fault("vllm/tolerant-of-anything", f"{ROOT}/startup.py", "TOLERANCE = 0.1", "TOLERANCE = 0.5", STARTUP),
    fault("vllm/no-draft-is-fine", f"{ROOT}/startup.py", "if not seen:", "if False:", STARTUP),
    fault("vllm/one-hot-is-fine", f"{ROOT}/startup.py", "if sampled and not", "if False and not", STARTUP),
)
