"""Wrong arguments of certificates: kind -> (arguments, what the line must name)."""

CASES = {
    "settings": [
        ("--fast", "--fast"), ("nonsense=1", "nonsense"), ("tokens=0", "tokens=0"), ("tokens=many", "tokens='many'"),
        ("engine.name=vllm", "engine.name='vllm'"), ("engine.name=sglang", "engine.url=None"),
        ("engine.name=openai engine.url=localhost:30000", "engine.url='localhost:30000'"),
        ("engine.cuda_graphs=true", "engine.cuda_graphs=True"),
        ("engine.cuda_graphs=true engine.name=openai engine.url=http://127.0.0.1:9", "engine.cuda_graphs=True"),
        ("engine.cuda_graphs=true white_box=false model.device=cpu", "engine.cuda_graphs=True"),
        ("engine.name=function", "engine.function=None"), ("engine.name=function engine.function=len", "'len'"),
        ("engine.name=function engine.function=no.such:thing", "no.such"),
        ("engine.name=sglang engine.url=http://127.0.0.1:9", "http://127.0.0.1:9"),
        ("engine.name=openai engine.url=http://127.0.0.1:9", "http://127.0.0.1:9"),
        ("reference=server", "reference='server'"), ("reference=other", "reference='other'"),
        ("logprobs=nat", "logprobs='nat'"), ("alpha=0", "alpha=0"), ("alpha=.5", "alpha=0.5"),
        ("alpha=nan", "alpha=nan"),
        ("limit_tv=0", "limit_tv=0"), ("stress=-1", "stress=-1"), ("stress=nan", "stress=nan"),
        ("quick=maybe", "quick='maybe'"), ("--quick=5", "--quick=5"), ("stop_when_bounded=5", "stop_when_bounded=5"),
        ("cohort=3", "cohort=3"),
        ("cohort=0", "cohort=0"), ("sampling.temperature=0", "sampling.temperature=0"), ("seed=-1", "seed=-1"),
        ("max_length=100", "max_length=100"), ("first_prompt=-1", "first_prompt=-1"), ("decoding=pad", "'pad'"),
        ("decoding=draft_model", "model.draft is missing: give the folder of a smaller model"),
        ("decoding=bebop decoding.draft_tokens=0", "draft_tokens=0"), ("model.path=missing", "model.path='missing'"),
        ("--museum --fast", "--fast"), ("--museum --clean-runs -1", "-1"), ("--museum --clean-runs few", "'few'"),
        ("--museum --out {here}/rows.txt/inside", "rows.txt/inside"),
        ("task=file task.path=missing.jsonl", "missing.jsonl"), ("dir={here}/rows.txt/inside", "rows.txt/inside"),
    ],
}  # fmt: skip
