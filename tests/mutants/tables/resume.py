"""Faults in checkpoints and in what a resumed run goes on with."""

from tests.mutants.fault import fault

CHECKPOINT, HEADS, COTRAIN = "trainer/test_checkpoint.py", "trainer/test_heads.py", "trainer/test_cotrain.py"
NEWEST = "trainer/test_newest.py"
STATE, LOOP, WATCH = "trainer/test_state.py", "test_loop.py", "monitor/test_watch.py"

FAULTS = (
    fault("resume/unverified", "trainer/checkpoint.py", "    verify(folder)\n    trainer", "    trainer", CHECKPOINT),
    fault(
        "resume/size-alone",
        "trainer/checkpoint.py",
        "if _entry(folder / name) != entry:",
        'if _entry(folder / name)["bytes"] != entry["bytes"]:',
        CHECKPOINT,
    ),
    fault("resume/unknown-format", "trainer/checkpoint.py", "if form != FORMAT:", "if False:", CHECKPOINT),
    fault(
        "resume/prune-newest",
        "trainer/checkpoint.py",
        "steps(run_dir)[: -max(1, keep)]",
        "steps(run_dir)[max(1, keep) :]",
        CHECKPOINT,
    ),
    fault("resume/prune-all", "trainer/checkpoint.py", "-max(1, keep)", "len(steps(run_dir)) - keep", NEWEST),
    fault("resume/by-name", "trainer/checkpoint.py", 'int(path.name.removeprefix("step_"))', "path.name", NEWEST),
    fault(
        "resume/oldest", "trainer/checkpoint.py", "return found[-1] if found", "return found[0] if found", CHECKPOINT
    ),
    fault(
        "resume/in-place",
        "trainer/checkpoint.py",
        "partial = folder.with_name(_HIDDEN + folder.name)",
        "partial = folder",
        CHECKPOINT,
    ),
    fault(
        "resume/flush",
        "trainer/checkpoint.py",
        "os.fsync(descriptor)",
        "pass",
        CHECKPOINT,
        immortal="what fsync is for shows after a power failure alone",
    ),
    fault(
        "resume/weights-in-bf16",
        "trainer/policy.py",
        '"weights": self._collected(named)',
        '"weights": self._collected(named, torch.bfloat16 if self.mixed else None)',
        CHECKPOINT,
    ),
    fault(
        "resume/no-moments", "trainer/policy.py", '"optimizer": self._collected(moments)', '"optimizer": {}', CHECKPOINT
    ),
    fault(
        "resume/one-moment",
        "trainer/policy.py",
        "for key, value in state.items()}\n        return",
        'for key, value in state.items() if key != "exp_avg_sq"}\n        return',
        CHECKPOINT,
    ),
    fault(
        "resume/optimizer-step",
        "trainer/policy.py",
        "value.clone() if value.dim() == 0",
        "0 * value.clone() if value.dim() == 0",
        CHECKPOINT,
    ),
    fault(
        "resume/moments-shared",
        "trainer/policy.py",
        "like(value, named[name]).clone()",
        "like(value, named[name])",
        STATE,
    ),
    fault("resume/old-moments-stay", "trainer/policy.py", "        self.optimizer.state.clear()\n", "", STATE),
    fault(
        "resume/version",
        "trainer/policy.py",
        'self.version, self._skipped = state["version"], state["skipped"]',
        'self._skipped = state["skipped"]',
        CHECKPOINT,
    ),
    fault(
        "resume/skipped-steps",
        "trainer/policy.py",
        'self.version, self._skipped = state["version"], state["skipped"]',
        'self.version = state["version"]',
        STATE,
    ),
    fault("resume/random-numbers", "trainer/policy.py", '_set_rng(state["rng"][self.rank])', "pass", STATE),
    fault(
        "resume/random-numbers-of-rank-0",
        "trainer/policy.py",
        '_set_rng(state["rng"][self.rank])',
        '_set_rng(state["rng"][0])',
        STATE,
    ),
    fault("resume/other-model", "trainer/policy.py", "if found != wanted:", "if False:", CHECKPOINT),
    fault("resume/head-not-restored", "trainer/policy.py", 'if state.get("head") is not None:', "if False:", COTRAIN),
    fault("resume/frozen-head-lost", "trainer/policy.py", "            self._trained_head = state\n", "", COTRAIN),
    fault(
        "resume/head-moments",
        "trainer/heads.py",
        "self.optimizer.state[self.named[name]][field] = moment",
        "pass",
        HEADS,
    ),
    fault(
        "resume/head-version",
        "trainer/heads.py",
        'self.version, self._skipped = state["version"]',
        'self.version, self._skipped = 0 * state["version"]',
        HEADS,
    ),
    fault("resume/head-other-shape", "trainer/heads.py", "if found != wanted:", "if False:", HEADS),
    fault("resume/buffer-left-out", "bebop/loop.py", 'self.buffer.restore(state["buffer"])', "pass", LOOP),
    fault(
        "resume/saved-twice",
        "bebop/loop.py",
        "if self._saved != self.buffer.version:",
        "if True:",
        "test_loop_order.py",
    ),
    fault("resume/never-saved-at-end", "bebop/loop.py", "if self._saved != self.buffer.version:", "if False:", LOOP),
    fault(
        "resume/save-rhythm",
        "bebop/loop.py",
        "self.buffer.version % every == 0",
        "self.buffer.version % every == 1",
        LOOP,
    ),
    fault("resume/bank-texts", "bebop/loop.py", 'state.get("bank", ())', "()", "test_loop_watch.py"),
    fault(
        "resume/monitor-not-replayed",
        "bebop/monitor/watch.py",
        "self._follow(logged.tell(self.monitor))",
        "pass",
        WATCH,
    ),
    fault(
        "resume/restart-of-reference",
        "bebop/monitor/watch.py",
        "self.config.rollout.staleness + 1",
        "self.config.rollout.staleness",
        WATCH,
    ),
)
