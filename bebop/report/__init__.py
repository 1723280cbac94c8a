"""Report on run folders as one self-contained HTML page: ``runs`` reads, ``charts`` selects, ``page`` writes."""
