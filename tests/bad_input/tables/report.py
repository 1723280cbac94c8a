"""Wrong arguments of reports: kind -> (arguments, what the line must name)."""

CASES = {
    "arguments": [
        ("", "RUN"), ("missing", "missing"), ("{here}/empty", "metrics.jsonl"),
        ("{here}/used --out no/x.html", "no/x.html"),
        ("{here}/used --from rows.jsonl", "RUN"), ("--from missing.jsonl", "missing.jsonl"),
        ("--from torn.jsonl", "torn"),
        ("--from rows.jsonl --map nonsense", "nonsense"), ("{here}/used --map a=b", "RUN"), ("--foo", "--foo"),
        ("--from rows.jsonl", "rows.jsonl"), ("{here}/garbled", "metrics.jsonl"),
        ("{here}/used --out {here}", "{here}"),
    ],
}  # fmt: skip
