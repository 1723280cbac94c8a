"""Wrong arguments of dashboards: kind -> (arguments, what the line must name)."""

CASES = {
    "arguments": [
        ("--session missing", "missing"), ("--staleness -1", "-1"), ("--staleness x", "'x'"), ("--foo", "--foo"),
        ("--session {here} --out rows.txt", "rows.txt"), ("stray", "stray"), ("--session rows.txt", "rows.txt"),
        ("--export rows.txt", "rows.txt"),
    ],
}  # fmt: skip
