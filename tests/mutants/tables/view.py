"""Faults in what the viewer shows, and to whom."""

from tests.mutants.fault import fault

SERVER, FOLDERS = "view/test_server.py", "view/test_folders.py"

FAULTS = (
    fault("view/host", "bebop/view/server.py", "if host not in HOSTS:", "if not host:", SERVER),
    fault("view/search-wildcards", "bebop/view/queries.py", 'if c in "%_\\\\" else c', 'if c in "%" else c', SERVER),
    fault("view/search-prompts", "bebop/view/queries.py", "OR prompts.text LIKE ?", "OR answers.text LIKE ?", SERVER),
    fault(
        "view/range-end",
        "bebop/view/queries.py",
        "'>=' if end == 'min' else '<='",
        "'>' if end == 'min' else '<='",
        SERVER,
    ),
    fault("view/missing-last", "bebop/view/queries.py", "{order} NULLS LAST", "{order}", SERVER),
    fault("view/anchor", "bebop/view/queries.py", "OVER ({order}) - 1 AS", "OVER ({order}) AS", SERVER),
    fault(
        "view/siblings",
        "bebop/view/queries.py",
        "WHERE prompt = ? OR text = ?)",
        "WHERE prompt = ? AND text = ?)",
        SERVER,
    ),
    fault("view/not-drafted", "bebop/view/tokens.py", "plain[values == NONE] = None", "pass", SERVER),
    fault("view/state", "bebop/view/folders.py", 'return "running" if self', 'return "running" if not self', FOLDERS),
    fault("view/other-lock", "bebop/view/folders.py", " == str(inode) and", " != str(inode) and", FOLDERS),
    fault("view/port", "bebop/view/__main__.py", "or tried == port:", "or tried == PORT:", FOLDERS),
)
