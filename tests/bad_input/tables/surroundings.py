"""Wrong rewards, and what is wrong around a command: kind -> (arguments, what the line must name, environment)."""

RUN = {
    "rewards": [
        ("task.reward=syntax.py:f", "syntax.py"), ("task.reward=exits.py:f", "exits.py"),
        ("task.reward=number.py:f", "'number.py:f'"), ("task.reward=rows.txt:f", "rows.txt"),
        ("task.reward=reward.py", "reward.py"), ("task.reward=reward.py:", "reward.py"),
        ("task.reward=:f", ":f"), ("task.reward={here}:f", "{here}"), ("task.reward=math", "'math'"),
        ("task.reward=os.path", "os.path"), ("task.reward=os.path.nothing", "nothing"),
        ("task.reward=[auto,reward.py:nope]", "'nope'"), ("task.reward=[]", "task.reward=[]"),
        ("task.reward=[auto,auto]", "give each function once"), ("task.reward=[reward.py:f,'']", "task.reward="),
        ("task.reward=[reward.py:f,auto] task.reward_weights=[1]", "task.reward_weights=[1.0]"),
        ("task.reward_weights=[nan]", "task.reward_weights"), ("task.reward_weights=2", "task.reward_weights=2"),
        ("task.reward_signature=trlx", "choose one of auto, text, trl"), ("task.reward_batch=0", "task.reward_batch=0"),
        ("task.reward=reward.py:f task.reward_signature=trl", "no 'completions'"),
        ("task.reward=rewards.py:either", "which may be more than one signature"),
        ("task.reward=rewards.py:alone", "which is no signature of a reward"),
        ("task.reward=rewards.py:short", "returned 0 rewards for 1 completions"),
        ("task.reward=rewards.py:state", "'trainer_state', which is TRL's own"),
        ("task.reward=rewards.py:named", "'a b'"), ("task.reward=rewards.py:taken", "reward/mean is a metric already"),
        ("task.reward=rewards.py:never", "it does not apply"),
        ("task.reward=rewards.py:late", "raised RuntimeError: no"),
        ("task.reward_timeout=0", "task.reward_timeout=0"), ("task.reward_timeout=nan", "task.reward_timeout=nan"),
    ],
    "paths": [
        (("runtime.dir='a\nb/../rows.txt'",), "rows.txt"), (("model.path='a\nb'",), "a\\nb"),
        (("task=file", "task.path='a\nb.jsonl'"), "a\\nb.jsonl"), (("model.path=\ud800",), "model.path="),
        (("runtime.dir=\ud800",), "runtime.dir="), (("task=file", "task.path=\ud800.jsonl"), "task.path="),
        (("task=file", "task.path={here}"), "{here}"), ("task=file task.path={here}/rows.txt/x.jsonl", "x.jsonl"),
        ("model.path=/dev/null", "/dev/null"), ("task=file task.path=/dev/null", "/dev/null"),
    ],
    "environment": [
        ("trainer.steps=0", "trainer.steps=0", {"XDG_CACHE_HOME": "{here}/rows.txt"}),
        ("trainer.steps=0", "trainer.steps=0", {"TMPDIR": "{here}/missing"}),
        ("trainer.steps=0", "trainer.steps=0", {"HOME": "{here}/rows.txt"}),
        ("trainer.steps=0", "trainer.steps=0", {"COLUMNS": "none"}),
        ("trainer.steps=0", "trainer.steps=0", {"OMP_NUM_THREADS": "many"}),
        ("trainer.lr=${oc.env:NOT_THERE}", "NOT_THERE"),
        ("trainer.lr=${oc.env:RATE}", "trainer.lr", {"RATE": "fast"}),
    ],
}  # fmt: skip
REPORT = {
    "paths": [
        (("a\nb",), "a b is not a folder"), (("--from", "a\nb.jsonl"), "a b.jsonl"),
        ("{here}/used --out {here}/rows.txt/x.html", "rows.txt"), ("{here}/used --out /proc/new.html", "/proc/new"),
        ("--from {here}", "{here}"), ("--from /dev/null", "/dev/null"), ("{here}/rows.txt", "rows.txt"),
        ("--from rows.jsonl --map =", "''"), ("--from rows.jsonl --map warp=speed", "warp"),
        ("{here}/used missing", "missing"),
    ],
}  # fmt: skip
