"""One self-contained HTML page from run folders: ``runs`` reads, ``summary`` and ``charts`` select, ``page`` writes."""
