"""Faults in checkpoints and in what a resumed run goes on with."""

from tests.mutants.fault import fault

CHECKPOINT = "trainer/test_checkpoint.py"
NEWEST = "trainer/test_newest.py"
STATE = "trainer/test_state.py"

STORE = "test_store.py"

FAULTS = (
    fault(
        "resume/unverified",
        "trainer/checkpoint.py",
        "    verify(folder)\n    trainer",
        "    trainer",
        "trainer/test_checkpoint.py::test_a_flipped_byte_is_found_and_named",
    ),
    fault(
        "resume/weights-in-bf16",
        "trainer/policy.py",
        '"weights": self._collected(named)',
        '"weights": self._collected(named, torch.bfloat16 if self.mixed else None)',
        "trainer/test_checkpoint.py::test_three_updates_equal_one_and_resume_and_two_bit_for_bit",
    ),
    fault(
        "resume/no-moments",
        "trainer/policy.py",
        '"optimizer": self._collected(moments)',
        '"optimizer": {}',
        "trainer/test_checkpoint.py::test_three_updates_equal_one_and_resume_and_two_bit_for_bit",
    ),
    fault(
        "resume/one-moment",
        "trainer/policy.py",
        "for key, value in state.items()}\n        return",
        'for key, value in state.items() if key != "exp_avg_sq"}\n        return',
        "trainer/test_checkpoint.py::test_three_updates_equal_one_and_resume_and_two_bit_for_bit",
    ),
    fault(
        "resume/optimizer-step",
        "trainer/policy.py",
        "value.clone() if value.dim() == 0",
        "0 * value.clone() if value.dim() == 0",
        "trainer/test_checkpoint.py::test_three_updates_equal_one_and_resume_and_two_bit_for_bit",
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
        "trainer/test_checkpoint.py::test_three_updates_equal_one_and_resume_and_two_bit_for_bit",
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
    fault(
        "resume/other-model",
        "trainer/policy.py",
        "if found != wanted:",
        "if False:",
        "trainer/test_checkpoint.py::test_a_checkpoint_of_another_model_is_refused",
    ),
    fault(
        "resume/head-not-restored",
        "trainer/policy.py",
        'if state.get("head") is not None:',
        "if False:",
        "trainer/test_cotrain.py::test_resume_is_exact_and_checkpoints_hold_the_trained_head",
    ),
    fault(
        "resume/frozen-head-lost",
        "trainer/policy.py",
        "            self._trained_head = state\n",
        "",
        "trainer/test_cotrain.py::test_resume_is_exact_and_checkpoints_hold_the_trained_head",
    ),
    fault(
        "resume/head-moments",
        "trainer/heads.py",
        "self.optimizer.state[self.named[name]][field] = moment",
        "pass",
        "trainer/test_heads.py::test_a_resume_is_bit_exact",
    ),
    fault(
        "resume/head-version",
        "trainer/heads.py",
        'self.version, self._skipped = state["version"]',
        'self.version, self._skipped = 0 * state["version"]',
        "trainer/test_heads.py::test_a_resume_is_bit_exact",
    ),
    fault(
        "resume/head-other-shape",
        "trainer/heads.py",
        "if found != wanted:",
        "if False:",
        "trainer/test_heads.py::test_a_state_of_another_head_is_refused",
    ),
    fault(
        "resume/buffer-left-out",
        "bebop/loop.py",
        'self.buffer.restore(state["buffer"])',
        "pass",
        "test_loop.py::test_too_many_deaths_end_the_job_with_a_checkpoint",
    ),
    fault(
        "resume/saved-twice",
        "bebop/loop.py",
        "if self._saved != self.buffer.version:",
        "if True:",
        "test_loop_order.py",
    ),
    fault(
        "resume/never-saved-at-end",
        "bebop/loop.py",
        "if self._saved != self.buffer.version:",
        "if False:",
        "test_loop.py::test_too_many_deaths_end_the_job_with_a_checkpoint",
    ),
    fault(
        "resume/save-rhythm",
        "bebop/loop.py",
        "self.buffer.version % every == 0",
        "self.buffer.version % every == 1",
        "test_loop.py::test_checkpoints_every_so_many_steps_and_at_the_end",
    ),
    fault(
        "resume/bank-texts",
        "bebop/loop.py",
        'state.get("bank", ())',
        "()",
        "test_loop_watch.py::test_a_resumed_job_reads_the_same_texts_and_continues_its_log",
    ),
    fault(
        "resume/monitor-not-replayed",
        "bebop/monitor/watch.py",
        "self._follow(logged.tell(self.monitor))",
        "pass",
        "monitor/test_watch.py::test_a_resumed_run_goes_on_as_if_it_had_never_stopped",
    ),
    fault(
        "resume/restart-of-reference",
        "bebop/monitor/watch.py",
        "self.config.rollout.staleness + 1",
        "self.config.rollout.staleness",
        "monitor/test_watch.py::test_decoding_changes_only_if_actions_are_on",
    ),
    fault("resume/size-alone", "bebop/store.py", "(not contents or _entry(path) == entry)", "True", STORE, CHECKPOINT),
    fault("resume/unknown-format", "bebop/store.py", "if form != FORMAT:", "if False:", STORE),
    fault(
        "resume/prune-newest",
        "bebop/store.py",
        "steps[len(steps) - (max(1, keep) - 1) :]",
        "steps[: max(1, keep) - 1]",
        STORE,
    ),
    fault("resume/prune-one-less", "bebop/store.py", "(max(1, keep) - 1) :]", "max(0, keep - 2) :]", STORE),
    fault(
        "resume/prune-beside-damage",
        "bebop/store.py",
        'older checkpoints are kept", damage)\n            return',
        'older checkpoints are kept", damage)',
        STORE,
    ),
    fault(
        "resume/by-name",
        "bebop/store.py",
        "p.is_dir()), key=self._place)",
        "p.is_dir()), key=lambda p: p.name)",
        NEWEST,
    ),
    fault("resume/oldest", "bebop/store.py", "for path in reversed(found):", "for path in found:", STORE, NEWEST),
    fault(
        "resume/newest-unverified", "bebop/store.py", "                verify(path)\n", "                pass\n", STORE
    ),
    fault("resume/newer-not-set-aside", "bebop/store.py", "self._place(path) > self._place(found)]", "False]", STORE),
    fault(
        "resume/flush",
        "bebop/store.py",
        '    for path in (*folder.rglob("*"), folder, folder.parent, folder.parent.parent):\n        flush(path)\n',
        "",
        STORE,
    ),
)
