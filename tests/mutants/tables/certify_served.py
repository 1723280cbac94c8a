"""Faults in what certificates ask of served engines: structure, reported log-probs, calls, prefill, the look inside."""

from tests.mutants.fault import fault

STRUCTURE = "certify/test_structure.py"
DECLARED = "certify/test_declared.py"
COLUMNS = "certify/test_columns.py"
SERVED = "certify/test_served.py"
PREFILL = "certify/test_served_reference.py"
FUNCTION = "certify/test_function.py"
INSIDE = "rollout/sglang/test_look_inside.py"


FAULTS = (
    fault(
        "served/structure-after-a-stop",
        "bebop/certify/structure.py",
        "int(places[0]) == count - 1",
        "int(places[-1]) == count - 1",
        f"{STRUCTURE}::test_what_no_engine_may_give",
    ),
    fault(
        "served/structure-cut-too-early",
        "bebop/certify/structure.py",
        'reason == "length" and limit is not None and count < limit',
        'reason == "length" and limit is not None and count < limit - 2',
        STRUCTURE,
    ),
    fault(
        "served/structure-versions-fall",
        "bebop/certify/structure.py",
        "steps < 0 if updated else steps != 0",
        "steps > 0 if updated else steps != 0",
        STRUCTURE,
    ),
    fault("served/declared-mean", "bebop/certify/declared.py", "float(near.median())", "float(near.mean())", DECLARED),
    fault(
        "served/declared-temperature",
        "bebop/certify/declared.py",
        "(raw.log() / temperature).log_softmax(-1)",
        "(raw.log() * temperature).log_softmax(-1)",
        DECLARED,
    ),
    fault(
        "served/declared-forgives-single-precision",
        "bebop/certify/declared.py",
        "if self.share else 0",
        "if True else 0",
        DECLARED,
    ),
    fault(
        "served/columns-seen-too-early",
        "bebop/certify/columns.py",
        "written[places, torch.from_numpy(answer.token_ids[:-1])] = True",
        "written[places - 1, torch.from_numpy(answer.token_ids[:-1])] = True",
        COLUMNS,
    ),
    fault(
        "served/columns-twin-beyond-the-first-difference",
        "bebop/certify/columns.py",
        "reach = min(width, agreed + 1)",
        "reach = width",
        COLUMNS,
    ),
    fault(
        "served/calls-sample-asked-again",
        "bebop/certify/calls.py",
        "(REFUSED + FAILED if again else REFUSED)",
        "REFUSED + FAILED",
        f"{SERVED}::test_a_sample_is_drawn_once",
    ),
    fault(
        "served/calls-connection-kept",
        "bebop/certify/calls.py",
        "force_close=True",
        "force_close=False",
        f"{SERVED}::test_a_sample_is_drawn_once",
    ),
    fault(
        "served/calls-interrupted-not-ended",
        "bebop/certify/calls.py",
        "        await end()\n",
        "",
        f"{SERVED}::test_ctrl_c_ends_our_own_requests_and_gives_what_is_there",
    ),
    fault(
        "served/sglang-prefill-from-a-cache",
        "bebop/certify/sglang_server.py",
        '"extra_key": uuid4().hex',
        '"extra_key": self.run',
        PREFILL,
    ),
    fault(
        "served/sglang-more-than-there-are",
        "bebop/certify/sglang_server.py",
        "top = min(top, self.vocabulary)",
        "top = max(top, 1)",
        PREFILL,
    ),
    fault(
        "served/prefill-rest",
        "bebop/certify/prefill.py",
        "left = (1 - logprobs.exp().sum(-1)).clamp_min(0)",
        "left = 0 * logprobs[:, 0]",
        PREFILL,
    ),
    fault(
        "served/prefill-row-before",
        "bebop/certify/served_reference.py",
        "return rows[first - 1 : -1] if first",
        "return rows[first:] if first",
        PREFILL,
    ),
    fault(
        "served/function-end",
        "bebop/certify/function.py",
        "len(ids) < request.params.max_new_tokens or",
        "False or",
        FUNCTION,
    ),
    fault(
        "served/inside-q-afterwards",
        "rollout/sglang/certify.py",
        "verify.draft_probs.clone()",
        "verify.draft_probs",
        INSIDE,
    ),
    fault(
        "served/inside-everybody",
        "rollout/sglang/certify.py",
        "if other == run and not is_state(batch.reqs[i].rid)",
        "if not is_state(batch.reqs[i].rid)",
        INSIDE,
    ),
    fault(
        "served/inside-following",
        "rollout/sglang/certify.py",
        "index.long().gather(1, accepted[:, None])",
        "index.long().gather(1, (accepted[:, None] - 1).clamp_min(0))",
        INSIDE,
    ),
)
