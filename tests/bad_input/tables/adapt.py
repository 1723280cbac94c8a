"""Wrong arguments of adaptations: kind -> (arguments, what the line must name)."""

CASES = {
    "settings": [
        ("nonsense=1", "nonsense"), ("head.foo=1", "head.foo"), ("--config", "--config"), ("steps=5", "steps"),
        ("rollout=torch", "rollout=torch"), ("--help nope", "nope"),
        ("head.objective=xyz", "head.objective='xyz'"), ("train.warm_objective=xyz", "train.warm_objective='xyz'"),
        ("train.warm_steps=1000", "train.warm_steps=1000"), ("train.steps=0", "train.steps=0"),
        ("train.threads=1000000", "train.threads=1000000"), ("train.cache_mb=-1", "train.cache_mb=-1"),
        ("train.eval_every=-1", "train.eval_every=-1"), ("train.keep=0", "train.keep=0"),
        ("head.lr=nan", "head.lr=nan"),
        ("head.betas=[1,1]", "head.betas"), ("head.max_grad_norm=0", "head.max_grad_norm=0"), ("seed=-1", "seed=-1"),
        ("data.sequences=0", "data.sequences=0"), ("data.slots=0", "data.slots=0"),
        ("data.source=web", "data.source='web'"),
        ("data.path=no.jsonl", "data.path='no.jsonl'"), ("data.source=file", "data.path=None"),
        ("data.source=file data.path=rows.txt", "data.path='rows.txt'"), ("data.max_length=160", "data.max_length=160"),
        ("data.max_length=1000000", "data.max_length=1000000"), ("data.slots=1000000", "data.slots=1000000"),
        ("data.sampling.top_p=0", "data.sampling.top_p=0"), ("data.sampling.min_p=0.5", "'min_p': 0.5"),
        ("data.sampling.temperature=0", "data.sampling.temperature=0"), ("data.prompt_key=''", "data.prompt_key=''"),
        ("evaluation.prompts=1", "evaluation.prompts=1"), ("evaluation.draft_tokens=0", "evaluation.draft_tokens=0"),
        ("task=nonsense", "nonsense"), ("task.name=warp", "'warp'"), ("resume=true", "resume=True"),
        ("model.path=missing", "'missing'"), ("model.path={here}/torn", "/torn'"), ("dir=rows.txt", "/rows.txt'"),
        ("out=rows.txt", "/rows.txt'"), ("dir=''", "dir=''"), ("out=''", "out=''"), ("dir={here}/used", "/used'"),
        ("model.device=cuda:99", "'cuda:99'"), ("dir={here}/no resume=true", "/no"),
        ("data.source=file data.path=rows.jsonl", "rows.jsonl"), ("out={tiny}", "out="),
        ("part=eagle3 options.draft_vocab=1", "options.draft_vocab=1 is not possible: give 2 or more, or null"),
        ("part=eagle3 options.draft_vocab=513", "options.draft_vocab=513 is not possible: the model has 512 tokens"),
        ("part=eagle3 options.depth=0", "options.depth=0"), ("part=eagle3 options.taps=2", "options.taps"),
        # backbones that only transformers' attention can run
        ("part=block model.path={model:sliding}", "layer_types sliding_attention is not possible"),
        ("task=environment model.path={model:sliding}", "layer_types sliding_attention is not possible"),
        ("model.path={model:sliding} data.sampling.stop=[x]", "data.sampling.stop=['x']"),
    ],
}  # fmt: skip
