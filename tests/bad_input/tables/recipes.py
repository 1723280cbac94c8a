"""Wrong arguments of the recipes, by command: kind -> (arguments, what the line must name)."""

REPRODUCE = {
    "arguments": [("--only nothing", "'nothing'"), ("--fast", "--fast"), ("--only", "--only"),
                  ("--html", "--html"), ("--html pages --only drift", "--html shows all that is stored")],
}  # fmt: skip

TINY = {
    "arguments": [
        ("--steps 0", "--steps: 0"), ("--head-steps -1", "-1"), ("--threads 0", "--threads: 0"), ("--seed -1", "-1"),
        ("--out rows.txt", "rows.txt"), ("--foo", "--foo"), ("--steps 1e3", "'1e3'"),
    ],
}  # fmt: skip
