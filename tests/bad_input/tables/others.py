"""Wrong arguments of the commands that take few: kind -> (arguments, what the line must name)."""

BEBOP = {
    "arguments": [
        ("rum", "did you mean run?"), ("nonsense", "nonsense"), ("--fast", "--fast"), ("trainer.lr=1", "trainer.lr=1"),
        ("x" * 300, "x" * 80), (("a\nb",), "a b"), (("",), "no such command"),
        ("run task=none", "task=none"), ("completion", "bash"), ("completion tcsh", "tcsh"),
        ("completion bash zsh", "bash"),
    ],
}  # fmt: skip

DEMO = {
    "arguments": [
        ("--dir rows.txt", "rows.txt"), ("--dir rows.txt/new", "rows.txt/new"), ("--dir {here}/used", "used"),
        ("--dir", "--dir"), ("--seed -1", "-1"), ("--seed x", "'x'"), ("--seed " + "9" * 30, "9" * 30),
        ("--steps 3", "--steps"), ("trainer.steps=3", "trainer.steps=3"),
    ],
}  # fmt: skip

VIEW = {
    "arguments": [
        ("", "RUN"), ("missing", "missing is not a folder"), ("rows.txt", "rows.txt is not a folder"),
        ("{here}/empty", "empty is no run"), ("{here}/used", "trajectories.sqlite is missing"),
        ("{here}/used --port 0", "--port: 0"), ("{here}/used --port 70000", "--port: 70000"),
        ("{here}/used --port http", "'http'"), ("{here}/used --port", "--port"), ("{here}/used --public", "--public"),
        ("{here}/used missing", "used"), (("a\nb",), "a b is not a folder"),
    ],
}  # fmt: skip

EXPORT = {
    "arguments": [
        ("", "--out"), ("--out", "--out"), ("--out new --part head", "'head'"), ("--out new --mask-token -1", "-1"),
        ("--out new --mask-token x", "'x'"), ("--out new --mask-token " + "9" * 30, "9" * 30),
        ("--out rows.txt", "rows.txt"), ("--out rows.txt/new", "rows.txt/new"), ("--out {here}/torn", "/torn'"),
        ("--out new --model missing", "missing"), ("--out new --file missing.safetensors", "missing.safetensors"),
        ("--out new --file rows.txt", "rows.txt"), ("--out new --file {here}/torn/model.safetensors", "safetensors"),
        ("--out new --file {here}", "{here}"), ("--out new --model {here}/headless", "headless"), ("new", "--out"),
        ("--out new --run missing", "--run='missing' is not possible: missing/config.yaml cannot be read (No such fil"),
        ("--out new --run {here}/used", "/used/config.yaml"), ("--out new --step 3", "--step 3 is not possible: it go"),
        ("--out new --run {here}/used --step -1", "-1"), ("--out new --run {here}/used --part block", "--part=block"),
        ("--out new --run {here}/used --mask-token 3", "--mask-token=3"),
        ("--out new --part eagle3 --mask-token 3", "--mask-token=3 is not possible: an EAGLE-3 drafter has no MASK"),
    ],
}  # fmt: skip

SETTINGS = {"arguments": [("x", "'x'"), ("--help", "'--help'"), ("trainer.lr=1", "'trainer.lr=1'")]}
CATALOGUE = {"arguments": [("x", "'x'"), ("--out metrics.md", "'--out'"), ("step", "'step'")]}
DOCS = {"arguments": [("--checks", "--checks"), ("README.md", "README.md"), ("--check=1", "--check")]}

SIMULATE = {
    "grammar": [
        ("nonsense=1", "nonsense"), ("fleet.foo=1", "fleet.foo"), ("--fast", "--fast"), ("foo", "'foo'"),
        ("--help nope", "nope"), ("fleet=3", "fleet=3"), ("=1", "'=1'"), ("fleet.workers=${nope}", "${nope}"),
        ("fleet.workers=1,2", "fleet.workers=1,2"), ("+fleet.foo=1", "fleet.foo"), ("costs={", "costs={"),
    ],
    "numbers": [
        ("fleet.workers=0", "fleet.workers=0"), ("fleet.workers=-1", "fleet.workers=-1"),
        ("fleet.workers=1000000", "fleet.workers=1000000"), ("fleet.workers=1.5", "fleet.workers=1.5"),
        ("fleet.workers=" + "9" * 40, "fleet.workers"), ("fleet.slots=0", "fleet.slots=0"),
        ("fleet.staleness=-1", "fleet.staleness=-1"), ("fleet.group_size=1", "fleet.group_size=1"),
        ("fleet.steps=0", "fleet.steps=0"), ("fleet.skip=30", "fleet.skip=30"), ("fleet.skip=-1", "fleet.skip=-1"),
        ("fleet.groups_per_step=0", "groups_per_step=0"), ("completions.median=0", "completions.median=0"),
        ("completions.median=nan", "completions.median=nan"), ("completions.median=inf", "completions.median=inf"),
        ("completions.sigma=-1", "completions.sigma=-1"), ("completions.longest=0", "completions.longest=0"),
        ("completions.lengths=[0]", "completions.lengths"), ("completions.lengths=[a]", "completions.lengths"),
        ("completions.lengths=7", "completions.lengths=7"),
        ("completions.accept_rates=[2]", "completions.accept_rates"),
        ("completions.accept_rates=[.nan]", "completions.accept_rates"),
        ("completions.accept_rates=[]", "draft_tokens=3"),
        ("completions.draft_tokens=9", "completions.draft_tokens=9"),
        ("completions.draft_tokens=-1", "draft_tokens=-1"),
        ("completions.prompt=-1", "completions.prompt=-1"), ("costs.cycle=0", "costs.cycle=0"),
        ("costs.row=-1", "costs.row=-1"), ("costs.bandwidth=0", "costs.bandwidth=0"),
        ("costs.update=nan", "costs.update=nan"), ("costs.weights=inf", "costs.weights=inf"),
        ("costs.step=null", "costs.step=None"), ("grain=0", "grain=0"), ("seed=-1", "seed=-1"),
        ("split=maybe", "split='maybe'"), ("sweep=2", "sweep=2"), ("seed=x", "seed='x'"),
    ],
    "does it fit": [
        ("memory gpus=0", "gpus=0"), ("memory gpus=9", "gpus=9"), ("memory gpus=two", "gpus='two'"),
        ("memory gpu=h7", "gpu='h7'"), ("memory model=", "model=None"), ("memory model=rows.txt", "rows.txt"),
        ("memory model=30b-a3b", "30b-a3b"), ("memory nonsense=1", "nonsense=1"),
        ("memory --fast", "--fast"), ("memory 8b", "8b"), ("memory max_tokens=0", "max_tokens=0"),
        ("memory gpus=[", "gpus=["), ("memory checkpointing=2", "checkpointing=2"),
        ("memory gradient_sync=never", "gradient_sync='never'"), ("memory engine_share=1.5", "engine_share=1.5"),
        ("memory dtype=fp8", "dtype='fp8'"), ("memory staleness=" + "9" * 40, "staleness"),
    ],
    "machine": [("dir=rows.txt", "rows.txt"), ("dir=rows.txt/new", "rows.txt/new"), ("dir=''", "dir=''")],
    "will it pay": [
        ("--params 7b", "--params"), ("--gpu", "--gpu"), ("--gpu h7", "--gpu='h7'"), ("--gpu h100 --fast", "--fast"),
        ("--gpu h100 fleet.workers=2", "fleet.workers=2"), ("--gpu h100 --gpus 0", "--gpus=0"),
        ("--gpu h100 --gpus 1.5", "--gpus='1.5'"), ("--gpu h100 --gpus " + "9" * 40, "--gpus"),
        ("--gpu h100 --params huge", "--params='huge'"), ("--gpu h100 --params 0b", "--params='0b'"),
        ("--gpu rtx4090 --gpus 1 --params 70b", "--gpus=1"), ("--gpu h100 --model missing", "'missing'"),
        ("--gpu h100 --model rows.txt", "'rows.txt'"), ("--gpu h100 --layers 0", "--layers=0"),
        ("--gpu h100 --experts 8", "--active-experts=0"),
        ("--gpu h100 --experts 8 --active-experts 9", "--active-experts=9"),
        ("--gpu h100 --experts 8 --active-experts 2", "--expert-intermediate=0"),
        ("--gpu h100 --dtype int4", "--dtype='int4'"),
        ("--gpu h100 --tensor-parallel 3", "--tensor-parallel=3"), ("--gpu h100 --length 0", "--length=0"),
        ("--gpu h100 --length 9000", "--length=9000"), ("--gpu h100 --tail -1", "--tail=-1"),
        ("--gpu h100 --completions 0", "--completions=0"), ("--gpu h100 --accept 2", "--accept=[2.0]"),
        ("--gpu h100 --accept nan", "--accept='nan'"), ("--gpu h100 --accept 0.9,", "--accept=''"),
        ("--gpu h100 --accept 0.9,0.8", "--accept="), ("--gpu h100 --accept-length 5", "--accept-length=5.0"),
        ("--gpu h100 --accept-length 0.5", "--accept-length=0.5"), ("--gpu h100 --draft-tokens 0", "--draft-tokens=0"),
        ("--gpu h100 --draft-tokens 65", "--draft-tokens=65"), ("--gpu h100 --verify 2", "--verify=2"),
        ("--gpu h100 --drafter medusa", "--drafter='medusa'"), ("--gpu h100 --step-ms 0", "--step-ms=0.0"),
        ("--gpu h100 --step-rows 0", "--step-rows=0"), ("--gpu h100 --rollout-share 1.5", "--rollout-share=1.5"),
    ],
}  # fmt: skip

CLUSTER = {
    "arguments": [
        ("nope", "'nope'"), ("--predict", "--predict"), ("--show", "--show"), ("--store x", "--store"),
        ("--store --predict", "--store"), ("8-gpus-8b-short --predict a=1", "'a=1'"), ("--fast", "--fast"),
        ("8-gpus-8b-short a=1 --predict", "'a=1'"), ("8-gpus-8b-short --predict --show", "--show"),
        ("8-gpus-8b-short word", "'word'"), ("8-gpus-8b-short", "model.path="),
        ("8-gpus-8b-short --show word", "'word'"),
        ("../cluster", "'../cluster'"), ("8-gpus-8b-short model.path=missing", "missing"),
        ("8-gpus-8b-short nonsense=1 model.path=missing", "nonsense"),
    ],
}  # fmt: skip

MEGATRON_ADAPT = {
    "arguments": [
        ("nonsense=1", "nonsense"), ("--fast", "--fast"), ("train.steps=0", "train.steps=0"), ("--help nope", "nope"),
        ("parallel", "'parallel'"), ("head.lr=nan", "head.lr=nan"), ("parallel.tensor={", "parallel.tensor={"),
        ("resume=true", "resume=True"), ("parallel.tensor=2", "megatron-core"),
        ("parallel.expert={", "parallel.expert={"), ("parallel.context", "'parallel.context'"),
    ],
}  # fmt: skip
MEGATRON_CONVERT = {
    "arguments": [
        ("both", "'both'"), ("to-megatron", "model is missing"), ("to-megatron model=a", "out is missing"),
        ("to-huggingface model=a out=b", "source is missing"), ("to-megatron size=3", "size=3"),
        ("to-megatron model=a out=b", "megatron-core"), ("to-megatron word", "word"),
    ],
}  # fmt: skip
