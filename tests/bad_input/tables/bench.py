"""Wrong arguments of benchmarks: kind -> (arguments, what the line must name)."""

CASES = {
    "arguments": [
        ("", "kind"), ("nothing", "'nothing'"), ("rollout --foo", "--foo"), ("rollout --batches 0", "--batches: 0"),
        ("rollout --batches 1 -4", "-4"), ("rollout --batches", "--batches"), ("rollout --batches one", "'one'"),
        ("rollout --batches 100000000", "100000000"), ("rollout --rounds 0", "--rounds: 0"), ("sglang --rounds 0", "0"),
        ("rollout --waves 0", "--waves: 0"), ("rollout --threads 0", "--threads: 0"), ("kernels --threads -1", "-1"),
        ("rollout --draft-tokens 0", "--draft-tokens: 0"), ("rollout --draft-tokens 99", "99"),
        ("rollout --systems warp", "'warp'"), ("rollout --systems draft_model", "model.draft is missing"),
        ("rollout --draft no", "model.draft='no'"),
        ("rollout --dtype float16", "'float16'"), ("rollout --model no", "'no'"),
        ("rollout --device cuda:99", "'cuda:99'"), ("rollout --device tpu", "'tpu'"),
        ("--out rows.txt rollout", "rows.txt"),
        ("rollout --model {here}/torn", "/torn'"), ("rollout --model {here}/headless", "/headless'"),
        ("kernels --device tpu", "'tpu'"), ("loop --steps 3", "--steps: 3"), ("loop --rounds 0", "--rounds: 0"),
        ("loop nonsense=1", "nonsense"), ("loop trainer.lr=-1", "trainer.lr=-1"), ("loop task.name=warp", "'warp'"),
        ("loop rollout.max_length=1000000", "1000000"), ("monitor --rounds 1", "--rounds: 1"), ("monitor x=1", "x"),
        ("monitor rollout.max_length=1000000", "1000000"), ("monitor decoding=autoregressive", "autoregressive"),
        ("sglang --memory-fraction 2", "memory_fraction=2.0"), ("sglang --memory-fraction x", "'x'"),
        ("sglang --cache-tokens 0", "--cache-tokens: 0"), ("sglang --every -1", "-1"), ("sglang", "SGLang"),
    ],
}  # fmt: skip
