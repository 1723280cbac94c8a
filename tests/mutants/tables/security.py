"""Faults in what keeps the files of others from doing anything."""

from tests.mutants.fault import fault

TRUST = "test_trust.py::"
CODEC = "test_codec.py::"

FAULTS = (
    fault(
        "security/reward-not-asked-for",
        "bebop/trust.py",
        '    "task.reward": "import and run",\n',
        "",
        f"{TRUST}test_who_began_a_run_is_not_asked",
    ),
    fault(
        "security/environment-not-asked-for",
        "bebop/trust.py",
        "return kind is not None and not kind.reaches",
        "return True",
        f"{TRUST}test_an_environment_of_a_foreign_folder_is_not_imported",
    ),
    fault(
        "security/servers-not-asked-for",
        "bebop/trust.py",
        '    "rollout.sglang.urls": "send prompts and weights to",\n',
        "",
        f"{TRUST}test_changed_settings_make_a_mark_void",
    ),
    fault(
        "security/any-mark-will-do",
        "bebop/origin.py",
        "any(hmac.compare_digest(_mark(key, text), mark) for mark in _marks(run))",
        "any(len(_mark(key, text)) == len(mark) for mark in _marks(run))",
        f"{TRUST}test_changed_settings_make_a_mark_void",
    ),
    fault(
        "security/mark-without-a-key",
        "bebop/origin.py",
        'hmac.new(key, b"settings',
        'hmac.new(b"key", b"settings',
        f"{TRUST}test_who_began_a_run_is_not_asked",
    ),
    fault(
        "security/key-that-others-read",
        "bebop/origin.py",
        " and not status.st_mode & 0o077",
        "",
        f"{TRUST}test_a_key_that_others_can_read_or_a_broken_mark_is_none",
    ),
    fault(
        "security/key-made-for-all",
        "bebop/origin.py",
        "os.O_EXCL, 0o600",
        "os.O_EXCL, 0o644",
        f"{TRUST}test_a_key_that_others_can_read_or_a_broken_mark_is_none",
    ),
    fault(
        "security/all-marks-of-before-stay",
        "bebop/origin.py",
        "for mark in _marks(run)[:1] if",
        "for mark in _marks(run) if",
        f"{TRUST}test_a_mark_is_of_the_settings_of_before_or_of_now",
    ),
    fault(
        "security/trust-said-in-any-way",
        "bebop/compose.py",
        "p.value() is True for p",
        "True for p",
        f"{TRUST}test_who_began_a_run_is_not_asked",
    ),
    fault(
        "security/adaptation-not-asked",
        "bebop/trust.py",
        '    "out": "write to",\n',
        "",
        f"{TRUST}test_an_adaptation_asks_too",
    ),
    fault(
        "security/code-of-a-model",
        "bebop/model/checkpoint.py",
        "trust_remote_code=False",
        "trust_remote_code=True",
        f"{TRUST}test_code_in_a_model_folder_is_not_imported",
    ),
    fault(
        "security/yaml-that-calls",
        "bebop/reading.py",
        "yaml.safe_load(text)",
        "yaml.unsafe_load(text)",
        f"{TRUST}test_looking_at_a_foreign_folder_runs_nothing",
    ),
    fault(
        "security/pickles-of-any-type",
        "bebop/convert.py",
        "weights_only=True)",
        "weights_only=False)",
        "test_convert.py::test_what_no_state_is_made_of_is_refused_and_nothing_is_written",
    ),
    fault(
        "security/kinds-by-name",
        "bebop/codec.py",
        "        if kind in self.kinds:\n            return self.kinds[kind](",
        "        if kind in self.kinds or hasattr(__import__('builtins'), kind):\n"
        "            return self.kinds.get(kind, getattr(__import__('builtins'), kind, None))(",
        f"{CODEC}test_a_file_names_no_code",
        f"{CODEC}test_what_save_never_writes_is_one_line",
    ),
    fault(
        "security/arrays-beyond-their-file",
        "bebop/codec.py",
        "if min([place, *shape]) < 0 or place + size > len(flat):",
        "if False:",
        f"{CODEC}test_what_save_never_writes_is_one_line",
    ),
    fault(
        "security/states-of-others-mapped",
        "bebop/codec.py",
        "    numbers.unlink(missing_ok=True)",
        "    ...",
        f"{CODEC}test_what_was_loaded_stays_when_its_file_is_written_again",
    ),
)
