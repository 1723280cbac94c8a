"""Faults in who is asked when, and with which weights: buffer, loop, worker."""

from tests.mutants.fault import fault

BUFFER, LOOP, WORKER = "test_buffer.py", "test_loop.py", "rollout/test_worker.py"
WATCHED, ORDER = "test_loop_watch.py", "test_loop_order.py"

FAULTS = (
    fault("staleness/one-batch-more", "bebop/buffer.py", "(self.version + 1 + self.staleness)", "(self.version + 2 + self.staleness)", BUFFER),
    fault("staleness/one-batch-less", "bebop/buffer.py", "(self.version + 1 + self.staleness)", "(self.version + max(1, self.staleness))", BUFFER),
    fault("staleness/one-prompt-more", "bebop/buffer.py", "self.staleness) * self.groups_per_batch\n", "self.staleness) * self.groups_per_batch + 1\n", BUFFER),
    fault("staleness/handed-out-twice", "bebop/buffer.py", "self.admitted = max(self.admitted, limit)", "pass", BUFFER),
    fault("staleness/ready-asked-again", "bebop/buffer.py", " if i not in self.ready]", "]", BUFFER),
    fault("staleness/batch-order", "bebop/buffer.py", "tuple(self.ready[i] for i in wanted)", "tuple(self.ready[i] for i in reversed(wanted))", BUFFER),
    fault("staleness/batch-incomplete", "bebop/buffer.py", "lambda: all(", "lambda: any(", BUFFER),
    fault("staleness/trained-groups-stay", "bebop/buffer.py", "del self.ready[i]", "pass", BUFFER),
    fault("staleness/twice-back", "bebop/buffer.py", "assert index not in self.ready", "assert True", BUFFER),
    fault("staleness/unasked", "bebop/buffer.py", "assert self.taken <= index < self.admitted", "assert self.taken <= index", BUFFER),
    fault("staleness/restore-drops-first", "bebop/buffer.py", "group.prompt.index >= self.taken}", "group.prompt.index > self.taken}", BUFFER),
    fault("staleness/restore-keeps-trained", "bebop/buffer.py", " if group.prompt.index >= self.taken}", "}", "test_versions.py"),
    fault("staleness/restore-goes-on-too-far", "bebop/buffer.py", "self.admitted = self.taken\n", 'self.admitted = self.taken + len(state["ready"])\n', BUFFER),
    fault("staleness/restore-version", "bebop/buffer.py", 'self.version = state["version"]', 'self.version = state["version"] + 1', BUFFER),
    fault("staleness/advance-before-update", "bebop/loop.py", 'self.buffer.advance()\n        with _timed(clock, "sync"):\n            await self._publish()',
          'with _timed(clock, "sync"):\n            await self._publish()\n        self.buffer.advance()', LOOP),
    fault("staleness/prompts-before-weights", "bebop/loop.py", "        self.buffer.advance()\n", "        self.buffer.advance()\n        await self._admit()\n", LOOP),
    fault("staleness/handed-over-kept-in-flight", "bebop/loop.py", "self._in_flight[i].discard(group.prompt.index)", "pass", LOOP),
    fault("staleness/dead-worker-forgotten", "bebop/loop.py", "self.prompt(index) for index in sorted(self._in_flight[i])]", "self.prompt(index) for index in []]", LOOP),
    fault("staleness/replacement-without-weights", "bebop/loop.py", "if self._published is not None:", "if self._published is None:", LOOP),
    fault("staleness/replacement-newest-version", "bebop/loop.py", "await self.workers[i].set_weights(*self._published)",
          "await self.workers[i].set_weights(self._published[0], self.buffer.version)", LOOP),
    fault("staleness/deaths-unlimited", "bebop/loop.py", "if self.restarts > self._most_restarts", "if False", LOOP),
    fault("staleness/one-death-less", "bebop/loop.py", "if self.restarts > self._most_restarts", "if self.restarts >= self._most_restarts", LOOP),
    fault("staleness/skipped-sync-due", "bebop/loop.py", "group.prompt.index // size - staleness", "group.prompt.index // size - staleness - 1", ORDER),
    fault("staleness/skipped-sync-too-strict", "bebop/loop.py", "group.prompt.index // size - staleness", "group.prompt.index // size", WATCHED),
    fault("staleness/heads-forgotten", "bebop/loop.py", "if v >= version - self.config.rollout.staleness}", "if v >= version}", ORDER),
    fault("staleness/reports-while-sending", "bebop/loop.py", "if self._sends[i] == sends and sends % 2 == 0:", "if True:", WATCHED),
    fault("staleness/weights-overtake", "rollout/worker.py", "self._inbox.append((weights, version))", "self._inbox.appendleft((weights, version))", ORDER),
    fault("staleness/answers-of-one-seed", "rollout/worker.py", "(self.config.runtime.seed << 40) + answer", "(self.config.runtime.seed << 40)", WORKER),
    fault("staleness/jobs-of-one-seed", "rollout/worker.py", "(self.config.runtime.seed << 40) + answer", "self.config.runtime.seed + answer", WORKER),
    fault("staleness/answers-unordered", "rollout/worker.py", "for m in sorted(group.answers))", "for m in group.answers)", WORKER),
    fault("staleness/group-too-early", "rollout/worker.py", "if len(group.answers) < self.config.trainer.group_size:", "if len(group.answers) < self.config.trainer.group_size - 1:", WORKER),
    fault("staleness/oldest-version", "bebop/trajectory.py", "return min(int(t.completion.versions.min())", "return min(int(t.completion.versions.max())", "test_versions.py"),
)
