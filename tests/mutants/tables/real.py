"""Faults in the study on a real model, and in what it asks of head training."""

from tests.mutants.fault import fault

CHAINS, HEADS = "trainer/test_chains.py", "trainer/test_heads.py"
REAL = "recipes/reproduce/real"
CORPUS, RUNS = "recipes/reproduce/test_real_corpus.py", "recipes/reproduce/test_real_heads.py"

FAULTS = (
    fault("real/chains-always-the-same", "trainer/chains.py", "% every == first)", "% every == 0)", CHAINS),
    fault(
        "real/chains-of-all-rows-alike",
        "trainer/chains.py",
        "(rows.token_ids.sum(1, keepdim=True) + random.Random(seed).randrange(every)) % every",
        "torch.full_like(rows.steps[:, :1], random.Random(seed).randrange(every))",
        CHAINS,
    ),
    fault(
        "real/mean-over-all-chains",
        "trainer/heads.py",
        "spaced(chain_rows(rows, self.config.depth), every, self.version).count",
        "chain_rows(rows, self.config.depth).count",
        HEADS,
    ),
    fault("real/one-seed", f"{REAL}/corpus.py", "(plan.seed << 40) + prompt.number", "plan.seed << 40", CORPUS),
    fault(
        "real/corpus-made-again",
        f"{REAL}/corpus.py",
        "share) if not paths[shard].is_file()]",
        "share)]",
        f"{CORPUS}::test_a_stopped_corpus_goes_on_and_comes_out_the_same",
    ),
    fault(
        "real/growth-mixes-with-the-rest",
        f"{REAL}/prompts.py",
        '(("mixed", plan.kinds), ("later", plan.later))',
        '(("mixed", (*plan.kinds, *plan.later)),)',
        CORPUS,
    ),
    fault(
        "real/splits-in-order",
        f"{REAL}/prompts.py",
        "rank = order[place]",
        "rank = place",
        f"{CORPUS}::test_splits_are_exact_and_whole_kinds_are_unseen",
    ),
    fault(
        "real/unseen-kinds-trained-on",
        f"{REAL}/prompts.py",
        "if not kind.seen:",
        "if not kind.seen and place % 2:",
        CORPUS,
    ),
    fault(
        "real/states-of-other-answers",
        f"{REAL}/states.py",
        "return whole.split(lengths)",
        "return whole.split(lengths[::-1])",
        CORPUS,
    ),
    fault("real/states-unchecked", f"{REAL}/states.py", "if worst > CLOSE:", "if worst > 10:", CORPUS),
    fault(
        "real/fitted-one-early",
        f"{REAL}/starts.py",
        "kept[len(layers) - 2][0, 2:]",
        "kept[len(layers) - 2][0, 1:-1]",
        RUNS,
    ),
    fault(
        "real/top-k-of-the-last-chunk",
        f"{REAL}/objectives.py",
        "total += value.detach()",
        "total = value.detach()",
        RUNS,
    ),
    fault(
        "real/flat-too-soon",
        f"{REAL}/curve.py",
        "curve[-1].step < patience",
        "curve[-1].step < 0",
        f"{RUNS}::test_a_curve_is_flat_once_its_smoothed_best_rises_no_more",
    ),
    fault(
        "real/lucky-validations-count",
        f"{REAL}/curve.py",
        "SMOOTHED = 3",
        "SMOOTHED = 1",
        f"{RUNS}::test_one_lucky_look_is_no_rise_of_its_own_size",
    ),
    fault(
        "real/drops-forgotten",
        f"{REAL}/heads.py",
        'self.drops, self.since = state["drops"], state["since"]',
        "self.drops, self.since = 0, 0",
        f"{RUNS}::test_a_stopped_run_goes_on_and_comes_out_the_same",
    ),
    fault(
        "real/rate-as-at-the-start",
        f"{REAL}/heads.py",
        "lr=self.run.lr * DROP**self.drops",
        "lr=self.run.lr",
        RUNS,
    ),
    fault(
        "real/warm-up-teaches",
        f"{REAL}/heads.py",
        "self.run.every)\n        self.trainer.load_state_dict(state)",
        "self.run.every)",
        RUNS,
    ),
    fault(
        "real/newest-for-best",
        f"{REAL}/heads.py",
        "if best(self.curve, self.since) is self.curve[-1]:",
        "if True:",
        RUNS,
    ),
    fault(
        "real/best-of-all-rates", f"{REAL}/curve.py", "[one for one in curve if one.step > since] or", "curve or", RUNS
    ),
    fault(
        "real/splits-mixed-up",
        f"{REAL}/evaluation.py",
        "{split: text.only(split) for split in HELD_OUT}",
        "{split: text.only(*HELD_OUT) for split in HELD_OUT}",
        f"{RUNS}::test_held_out_chains_are_looked_at_once_by_split",
    ),
    fault(
        "real/held-at-the-end",
        "benchmarks/memory.py",
        "highest = max(highest, held)",
        "highest = held",
        "recipes/reproduce/test_real_fused.py",
    ),
    fault(
        "real/a-head-for-every-model",
        "bebop/model/checkpoint.py",
        "HEAD.is_file() and folder.resolve() == cached().resolve()",
        "HEAD.is_file()",
        "model/test_smollm2.py::test_a_model_that_bebop_has_a_head_for_is_given_that_one",
    ),
    fault(
        "real/the-last-head-is-brought",
        "recipes/reproduce/real/built_in.py",
        "name = max(lengths, key=lambda each: lengths[each])",
        "name = max(lengths)",
        "recipes/reproduce/test_real_built_in.py",
    ),
)
