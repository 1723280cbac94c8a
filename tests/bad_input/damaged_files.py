"""What is wrong with rows of questions, with logs and with runs: name -> contents."""

from collections.abc import Mapping

GOOD = b'{"question": "1+1", "answer": "2"}\n'
DEEP = b"[" * 100_000

# Rows of questions.
ROWS: dict[str, bytes] = {
    "nul": GOOD + b"\0\0\0\0\n",
    "latin": b'{"question": "caf\xe9", "answer": "2"}\n',
    "surrogate": b'{"question": "a\\ud800b", "answer": "2"}\n',
    "surrogate-answer": b'{"question": "1+1", "answer": "\\udfff"}\n',
    "deep": b'{"question": ' + DEEP + b"\n",
    "digits": b'{"question": "1+1", "answer": ' + b"9" * 5000 + b"}\n",
    "list": b'["1+1", "2"]\n',
    "number": b"17\n",
    "null": b"null\n",
    "half": GOOD + b'{"question": "1+1", \n' + GOOD,
    "quotes": b"{'question': '1+1', 'answer': '2'}\n",
    "csv": b"question,answer\n1+1,2\n",
    "blank": b"\n \n\n",
    "nan-question": b'{"question": NaN, "answer": "2"}\n',
    "number-question": b'{"question": 11, "answer": "2"}\n',
    "null-question": b'{"question": null, "answer": "2"}\n',
    "empty-question": b'{"question": "  ", "answer": "2"}\n',
    "no-answer": b'{"question": "1+1"}\n',
    "null-answer": b'{"question": "1+1", "answer": null}\n',
    "no-messages": b'{"question": [], "answer": "2"}\n',
    "text-messages": b'{"question": ["1+1"], "answer": "2"}\n',
    "roleless": b'{"question": [{"content": "1+1"}], "answer": "2"}\n',
    "number-content": b'{"question": [{"role": "user", "content": 7}], "answer": "2"}\n',
    "null-content": b'{"question": [{"role": "user", "content": null}], "answer": "2"}\n',
    "surrogate-content": b'{"question": [{"role": "user", "content": "\\ud800"}], "answer": "2"}\n',
    "number-role": b'{"question": [{"role": 1, "content": "1+1"}], "answer": "2"}\n',
    "long": b'{"question": "' + b"1+" * 3_000 + b'1", "answer": "2"}\n',
}

GOOD_LOG = b'{"step": 1, "accept_length": 2.5, "entropy": 1.0}\n'
# Logs of other trainers, given with --from.
LOGS: dict[str, bytes] = {
    "nul": b"\0\0\n" + GOOD_LOG,
    "latin": b'{"step": 1, "task": "caf\xe9"}\n' + GOOD_LOG,
    "deep": b'{"step": ' + DEEP + b"\n" + GOOD_LOG,
    "digits": b'{"step": ' + b"9" * 5000 + b"}\n" + GOOD_LOG,
    "list": b"[1, 2]\n" + GOOD_LOG,
    "null": b"null\n" + GOOD_LOG,
    "half": b'{"step": 1, \n' + GOOD_LOG,
    "blank": b"\n\n",
    "stepless": b'{"accept_length": 2.5}\n',
    "text-step": b'{"step": "one", "accept_length": 2.5}\n',
    "half-step": b'{"step": 1.5, "accept_length": 2.5}\n',
    "nan-step": b'{"step": NaN, "accept_length": 2.5}\n',
    "infinite-step": b'{"step": Infinity, "accept_length": 2.5}\n',
    "huge-step": b'{"step": 1e300, "accept_length": 2.5}\n',
    "true-step": b'{"step": true, "accept_length": 2.5}\n',
    "list-step": b'{"step": [1], "accept_length": 2.5}\n',
    "text-length": b'{"step": 1, "accept_length": "2.5"}\n',
    "short-length": b'{"step": 1, "accept_length": 0.5}\n',
    "negative-length": b'{"step": 1, "accept_length": -2}\n',
    "nan-length": b'{"step": 1, "accept_length": NaN}\n',
    "huge-length": b'{"step": 1, "accept_length": 1' + b"0" * 400 + b"}\n",
    "huge-entropy": b'{"step": 1, "accept_length": 2, "entropy": 1' + b"0" * 400 + b"}\n",
    "huge-tokens": b'{"step": 1, "accept_length": 2, "tokens": 1' + b"0" * 400 + b"}\n",
    "huge-rate": b'{"step": 1, "accept_length": 2, "accept_rate/1": 1' + b"0" * 400 + b"}\n",
    "huge-lag": b'{"step": 1, "spec_verify_ct": 4, "completion_tokens": 9, "lag": 1' + b"0" * 400 + b"}\n",
    "infinite-lag": b'{"step": 1, "spec_verify_ct": 4, "completion_tokens": 9, "lag": Infinity}\n',
    "wide-lag": b'{"step": 1, "spec_verify_ct": 4, "completion_tokens": 9, "lag": 1e30}\n',
    "meta-empty": b'{"step": 1, "meta_info": {}}\n',
    "meta-infinite": b'{"step": 1, "meta_info": {"spec_verify_ct": Infinity, "completion_tokens": 5}}\n',
    "meta-nan": b'{"step": 1, "meta_info": {"spec_verify_ct": NaN, "completion_tokens": 5}}\n',
    "meta-huge": b'{"step": 1, "meta_info": {"spec_verify_ct": 1' + b"0" * 400 + b', "completion_tokens": 5}}\n',
    "histogram-text": b'{"step": 1, "spec_verify_ct": 4, "completion_tokens": 9, "spec_accept_histogram": ["a"]}\n',
    "histogram-number": b'{"step": 1, "spec_verify_ct": 4, "completion_tokens": 9, "spec_accept_histogram": 7}\n',
    "histogram-ragged": b'{"step": 1, "spec_verify_ct": 4, "completion_tokens": 9, '
    b'"spec_accept_histogram": [[1], 2]}\n',
    "histogram-nan": b'{"step": 1, "spec_verify_ct": 4, "completion_tokens": 9, "spec_accept_histogram": [NaN, 1]}\n',
    "verify-number": b'{"step": 1, "meta_info": {"bebop_verify": 7}}\n',
    "verify-numbers": b'{"step": 1, "meta_info": {"bebop_verify": [1, 2]}}\n',
    "verify-empty": b'{"step": 1, "meta_info": {"bebop_verify": [{}]}}\n',
    "verify-overlap": b'{"step": 1, "meta_info": {"bebop_verify": [{"accepted": 1, "overlap": 3}]}}\n',
    "verify-texts": b'{"step": 1, "meta_info": {"bebop_verify": [{"accepted": 1, "overlap": ["a"]}]}}\n',
    "verify-infinite": b'{"step": 1, "meta_info": {"bebop_verify": [{"accepted": Infinity, "overlap": [0.5]}]}}\n',
    "verify-nan": b'{"step": 1, "meta_info": {"bebop_verify": [{"accepted": NaN, "overlap": [0.5]}]}}\n',
    "verify-ragged": b'{"step": 1, "meta_info": {"bebop_verify": [{"accepted": 1, "overlap": [0.5, 0.5], '
    b'"target_entropy": [1]}]}}\n',
    "vllm-partial": b'{"step": 1, "vllm:spec_decode_num_drafts": 5}\n',
    "vllm-text": b'{"step": 1, "vllm:spec_decode_num_drafts": "x", "vllm:spec_decode_num_draft_tokens": 1, '
    b'"vllm:spec_decode_num_accepted_tokens": 1}\n',
    "vllm-list": b'{"step": 1, "vllm:spec_decode_num_drafts": [1], "vllm:spec_decode_num_draft_tokens": 1, '
    b'"vllm:spec_decode_num_accepted_tokens": 1}\n',
    "vllm-infinite": b'{"step": 1, "vllm:spec_decode_num_drafts": Infinity, "vllm:spec_decode_num_draft_tokens": 1, '
    b'"vllm:spec_decode_num_accepted_tokens": 1}\n',
    "vllm-positions": b'{"step": 1, "vllm:spec_decode_num_drafts": 5, "vllm:spec_decode_num_draft_tokens": 5, '
    b'"vllm:spec_decode_num_accepted_tokens": 1, "vllm:spec_decode_num_accepted_tokens_per_pos": 3}\n',
    "drift-columns": b'{"step": 1, "unit": [1], "reached": []}\n',
    "drift-ragged": b'{"step": 1, "unit": [1, 2], "reached": [[1], [1, 2]]}\n',
    "drift-unit": b'{"step": 1, "unit": 7, "reached": []}\n',
    "drift-bank": b'{"step": 1, "unit": [], "reached": [], "bank": 7}\n',
    "drift-sweep": b'{"step": 1, "unit": [], "reached": [], "sweep": {"bank": 1}}\n',
    "drift-health": b'{"step": 1, "unit": [], "reached": [], "health": {"colour": "red"}}\n',
}

GOOD_STEP = b'{"step": 1, "reward/mean": 0.5}\n'
# metrics.jsonl of a run, for report and view.
METRICS: dict[str, bytes] = {
    "nul": b"\0\0\n" + GOOD_STEP,
    "latin": b'{"step": 1, "task": "caf\xe9"}\n' + GOOD_STEP,
    "deep": b'{"step": ' + DEEP + b"\n" + GOOD_STEP,
    "digits": b'{"step": ' + b"9" * 5000 + b"}\n" + GOOD_STEP,
    "list": b"[1, 2]\n" + GOOD_STEP,
    "null": b"null\n" + GOOD_STEP,
    "number": b"3\n" + GOOD_STEP,
    "stepless": b'{"reward/mean": 1}\n' + GOOD_STEP,
    "text-step": b'{"step": "1"}\n' + GOOD_STEP,
    "half-step": b'{"step": 1.5}\n' + GOOD_STEP,
    "true-step": b'{"step": true}\n' + GOOD_STEP,
    "blank": b"\n" + GOOD_STEP,
    "wide-step": b'{"step": 1' + b"0" * 400 + b"}\n" + GOOD_STEP,
    "torn": b'{"step": 1',
}

# Other files of a run whose metrics.jsonl is in order: name -> (file, contents).
RUN_FILES: dict[str, tuple[str, bytes]] = {
    "config-torn": ("config.yaml", b"a: ["),
    "config-latin": ("config.yaml", b"a: caf\xe9\n"),
    "config-nul": ("config.yaml", b"a: \0\n"),
    "config-python": ("config.yaml", b"!!python/object/apply:os.getcwd []\n"),
    "config-deep": ("config.yaml", b"[" * 5000),
    "drift-garbage": ("drift.jsonl", b"garbage\nmore\n"),
    "drift-latin": ("drift.jsonl", b"\xff\xfe\n"),
    "drift-list": ("drift.jsonl", b"[]\n[]\n"),
    "drift-columns": ("drift.jsonl", LOGS["drift-columns"]),
    "store-garbage": ("trajectories.sqlite", b"garbage " * 100),
    "store-empty": ("trajectories.sqlite", b""),
    "store-torn": ("trajectories.sqlite", b"SQLite format 3\0" + b"\0" * 50),
}

# Runs that are to be resumed: name -> their files.
RESUMED: dict[str, Mapping[str, bytes]] = {
    "overrides-torn": {"overrides.json": b'["trainer.st'},
    "overrides-empty": {"overrides.json": b""},
    "overrides-object": {"overrides.json": b'{"trainer.steps": 3}'},
    "overrides-number": {"overrides.json": b"7"},
    "overrides-numbers": {"overrides.json": b"[1, 2]"},
    "overrides-latin": {"overrides.json": b'["task.name=caf\xe9"]'},
    "overrides-surrogate": {"overrides.json": b'["task.name=\\ud800"]'},
    "overrides-deep": {"overrides.json": DEEP},
    "overrides-grammar": {"overrides.json": b'["trainer.lr={"]'},
    "overrides-nul": {"overrides.json": b"\0\0\0"},
    "config-missing": {"overrides.json": b"[]"},
    "config-torn": {"overrides.json": b"[]", "config.yaml": b"a: ["},
    "config-list": {"overrides.json": b"[]", "config.yaml": b"- a\n"},
    "config-deep": {"overrides.json": b"[]", "config.yaml": b"[" * 5000},
    "config-latin": {"overrides.json": b"[]", "config.yaml": b"a: caf\xe9\n"},
    "config-date": {"overrides.json": b"[]", "config.yaml": b"a: 2026-99-99\n"},
    "config-python": {"overrides.json": b"[]", "config.yaml": b"!!python/object/apply:os.getcwd []\n"},
    "config-empty": {"overrides.json": b"[]", "config.yaml": b""},
    "reward": {"overrides.json": b'["task.reward=reward.py:f"]'},
    "address": {"overrides.json": b'["runtime.address=10.0.0.1:6379"]'},
    "temp": {"overrides.json": b'["runtime.temp_dir=/elsewhere"]'},
    "urls": {"overrides.json": b'["rollout=sglang", "rollout.sglang.urls=[http://10.0.0.1:1]"]'},
    "trusting": {"overrides.json": b'["runtime.trust=true", "task.reward=reward.py:f"]'},
    "origin": {"overrides.json": b'["task.reward=reward.py:f"]', "origin.json": b"[]"},
    "origin-torn": {"overrides.json": b'["task.reward=reward.py:f"]', "origin.json": b"{"},
    "origin-deep": {"overrides.json": b'["task.reward=reward.py:f"]', "origin.json": DEEP},
    "origin-latin": {"overrides.json": b'["task.reward=reward.py:f"]', "origin.json": b"\xff"},
    "out": {"overrides.json": b'["out=/elsewhere"]'},
    "step-file": {"checkpoints/step_000001": b""},
    "identity-torn": {"overrides.json": b"[]", "identity.json": b"{"},
    "identity-number": {"overrides.json": b"[]", "identity.json": b"7"},
    "identity-deep": {"overrides.json": b"[]", "identity.json": DEEP},
    "identity-latin": {"overrides.json": b"[]", "identity.json": b'{"a": "\xe9"}'},
    "identity-other": {"overrides.json": b"[]", "identity.json": b'{"the weights in model.path": "another"}'},
}

EVIL = b"cos\nsystem\n(S'touch evil'\ntR."
# Pickled checkpoints that convert must not read: name -> their trainer.pt.
PICKLES: dict[str, bytes] = {
    "empty": b"",
    "text": b"no pickle at all",
    "system": EVIL,
    "protocol": b"\x80\x05" + EVIL,
    "torn": b"\x80\x02}q\x00(X\x05\x00\x00",
    "reduce": b"\x80\x02cbuiltins\neval\nX\x03\x00\x00\x001+1\x85R.",
    "zip": b"PK\x03\x04" + b"\0" * 60,
    "persistent": b"\x80\x02X\x01\x00\x00\x00aQ.",
}
